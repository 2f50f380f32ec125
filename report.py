"""What the user of the command sees: the text as it comes, the seconds, and the report at the end.

Read before: `sfi.py`; used by `generate.py`.
"""

import os
import time

import torch

from sfi import SLOW_REASONS, SFIConfig, Tally
from text import Stream

BOLD, DIM, SLOW = "\x1b[1m", "\x1b[2m", "\x1b[36m"
ENDS = {"stop": "end token", "length": "length limit", "interrupted": "Ctrl-C", "closed": "closed output"}


def paint(text: str, style: str, file) -> str:
    """`text` in a style where `file` is a terminal; NO_COLOR (no-color.org) and TERM=dumb are respected."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not file.isatty()
    return text if plain or not text else f"{style}{text}\x1b[0m"


class Screen:
    """Prints the answers one after the other: one streams, those after it wait for their turn.

    Several answers stand under their names.  On a terminal, what a slow step gave is coloured.
    """

    def __init__(self, names: list[str], tokenizer, file):
        self.names, self.file = names, file
        self.streams = [Stream(tokenizer) for _ in names]
        self.waiting, self.ended = [""] * len(names), [False] * len(names)
        self.turn = 0  # whose answer streams
        self.write(self.head())

    def head(self) -> str:
        return (
            paint(f"==> {self.names[self.turn]} <==", BOLD, self.file) + "\n" if len(self.names) > 1 else ""
        )

    def push(self, b: int, token: int, slow: bool):
        piece = self.streams[b].push(token)
        self.put(b, paint(piece, SLOW, self.file) if slow else piece)

    def put(self, b: int, piece: str):
        if b == self.turn:
            self.write(piece)
        else:
            self.waiting[b] += piece

    def end(self, b: int):
        """Row b is complete: the next answer may come."""
        if self.ended[b]:
            return
        self.put(b, self.streams[b].finish())
        self.ended[b] = True
        while self.turn < len(self.names) and self.ended[self.turn]:
            self.turn += 1
            self.write("\n" * min(len(self.names), 2))
            if self.turn < len(self.names):
                self.write(self.head() + self.waiting[self.turn])

    def close(self):
        """End every answer that has not ended."""
        for b in range(len(self.names)):
            self.end(b)

    def write(self, text: str):
        if text:
            print(text, end="", flush=True, file=self.file)

    @property
    def texts(self) -> list[str]:
        return [stream.text for stream in self.streams]


class Clock:
    """Seconds from its making to each mark, the device's queued work included."""

    def __init__(self, device: torch.device):
        self.device, self.began, self.at = device, time.perf_counter(), {}

    def mark(self, name: str, once=False) -> float:
        if once and name in self.at:
            return self.at[name]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.at[name] = time.perf_counter() - self.began
        return self.at[name]


def counts(tally: Tally, token_bytes: int, weight_bytes: int, passes: int) -> dict:
    """What the steps after the prefill did and read.  A cached token has token_bytes, a pass over the model
    reads weight_bytes of weights.
    """
    steps, read = tally.slow + tally.fast, (tally.visible + tally.copied) * token_bytes
    dense, weights = tally.dense * token_bytes, passes * weight_bytes
    return {
        "slow_steps": tally.slow,
        "fast_steps": tally.fast,
        "slow_reasons": {reason: tally.reasons[reason] for reason in SLOW_REASONS},
        "visible_tokens": tally.visible / steps if steps else None,
        "kv_bytes_read": read,
        "kv_bytes_dense": dense,
        "weight_bytes_read": weights,
        "byte_speedup": (weights + dense) / (weights + read) if steps else None,
    }


def report(r: dict, tally: Tally, cfg: SFIConfig, names: list[str]) -> str:
    """What a reader at the terminal wants to know, a few lines, from what --json prints."""
    lines = []
    for i, name in enumerate(names):
        head = f"{name}: " if len(names) > 1 else ""
        ended = f"ended by {ENDS[r['stop_reason'][i]]}"
        lines.append(f"{head}{r['prompt_tokens'][i]:,} prompt tokens, {r['new_tokens'][i]:,} new, {ended}")
    times = f"prefill {r['prefill_s']:.1f} s"
    steps, fast = r["slow_steps"] + r["fast_steps"], r["fast_steps"]
    if not steps:
        return "\n".join([*lines, times])
    slow = ", ".join(f"{n} {reason}" for reason, n in r["slow_reasons"].items() if n)
    lines.append(f"steps: {fast} fast, {r['slow_steps']} slow" + f" ({slow})" * bool(slow))
    if fast:
        visible, dense = tally.fast_visible / fast, tally.dense / steps
        lines[-1] += f"; a fast step reads {visible:,.0f} tokens of {dense:,.0f}, {visible / dense:.0%}"
    read, dense = r["kv_bytes_read"], r["kv_bytes_dense"]
    lines.append(
        f"KV cache read: {read / 1e9:.2f} GB, {read / dense:.0%} of dense decoding's {dense / 1e9:.2f} GB"
    )
    lines.append(f"{times}, decode {r['decode_s']:.1f} s, {r['tokens_per_s']:.1f} tokens/s")
    if r["dense_tokens_per_s"]:
        lines[-1] += f": {r['tokens_per_s'] / r['dense_tokens_per_s']:.2f}x dense steps here"
        lines[-1] += f" ({r['dense_tokens_per_s']:.1f}), {r['byte_speedup']:.2f}x by bytes"
    if verdict := cannot_pay(r, cfg):
        lines.append(verdict)
    return "\n".join(lines)


def cannot_pay(r: dict, cfg: SFIConfig) -> str | None:
    """One sentence where Slow-Fast Inference gains little or nothing, None where it can pay."""
    steps, fast = r["slow_steps"] + r["fast_steps"], r["fast_steps"]
    if r["slow_reasons"]["short"] == steps:
        memory = cfg.n_sink + cfg.budget + cfg.n_recent
        return f"everything fits into the memory of {memory:,} tokens: equal to dense decoding, no gain"
    if cfg.policy == "dense" or r["byte_speedup"] >= 1.1:
        return None
    if fast < steps / 2:
        return f"SFI cannot pay here: only {fast} of {steps} steps were fast; it gains from longer prompts"
    read, dense = r["kv_bytes_read"], r["kv_bytes_dense"]
    share = dense / (dense + r["weight_bytes_read"])
    why = f"it read {read / dense:.0%} of the cache, which is {share:.0%} of what a dense step reads"
    return f"SFI cannot pay here: {why}; it gains from longer prompts"
