"""What the user of the command sees: the text as it comes, the seconds, the counts and the report at the end.

Read before: `sfi.py`; used by `generate.py`.
"""

import os
import sys
from collections import Counter
from dataclasses import dataclass, field

from command.parser import harmless
from command.text import Stream
from model import Model
from sfi import SFIConfig, Step
from trigger import SLOW_REASONS

BOLD, DIM, SLOW = "\x1b[1m", "\x1b[2m", "\x1b[36m"
ENDS = {"stop": "end token", "length": "length limit", "interrupted": "Ctrl-C", "closed": "closed output"}


def paint(text: str, style: str, file) -> str:
    """`text` in a style where `file` is a terminal; NO_COLOR (no-color.org) and TERM=dumb are respected."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not file.isatty()
    return text if plain or not text else f"{style}{text}\x1b[0m"


class Screen:
    """Prints the answers one after the other: one streams, those after it wait for their turn.

    Several answers stand under their names.  On a terminal, what a slow step gave is coloured.  `text` is the
    checkpoint's (`text.Text`); an answer ends with one of its end tokens or after `most` tokens.
    """

    def __init__(self, names: list[str], text, most: int, file):
        self.names, self.text, self.most, self.file = names, text, most, file
        self.streams = [Stream(text.tokenizer) for _ in names]
        self.waiting = [""] * len(names)  # printed when its turn comes
        self.new, self.ends = [0] * len(names), [None] * len(names)
        self.turn = 0  # whose answer streams
        self._head()

    def push(self, b: int, token: int, slow: bool):
        """Show the next token of answer b."""
        self.new[b] += 1
        if token in self.text.stop_ids:
            return self.end(b, "stop")
        piece = harmless(self.streams[b].push(token), self.file)
        self._put(b, paint(piece, SLOW, self.file) if slow else piece)
        if self.new[b] == self.most:
            self.end(b, "length")

    def end(self, b: int, reason: str):
        """Answer b is complete, so the next may come."""
        if self.ends[b]:
            return
        self._put(b, harmless(self.streams[b].finish(), self.file))
        self.ends[b] = reason
        while self.turn < len(self.names) and self.ends[self.turn]:
            self.turn += 1
            self._write("\n" * min(len(self.names), 2))
            if self.turn < len(self.names):
                self._head()
                self._write(self.waiting[self.turn])

    def close(self, reason: str):
        """End every answer that has not ended."""
        for b in range(len(self.names)):
            self.end(b, reason)

    def _head(self):
        if len(self.names) > 1:
            name = harmless(self.names[self.turn], self.file)
            self._write(paint(f"==> {name} <==", BOLD, self.file) + "\n")

    def _put(self, b: int, piece: str):
        if b == self.turn:
            self._write(piece)
        else:
            self.waiting[b] += piece

    def _write(self, text: str):
        if text:
            print(text, end="", flush=True, file=self.file)


def close_stdout():
    """Nobody reads any more: what is still printed goes nowhere, without an error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@dataclass
class Tally:
    """Counts over a run, after the prefill; a row-step is what one row does in a step.

    A row-step is "fast", or dense for one of SLOW_REASONS:
        dense     the policy asks for it (`--dense`), or in exact mode drafts would not pay
        short     everything fits into the memory, so there is nothing to choose
        first     not all fits any more, and there is no memory yet: it is made
        sentence  the sentence has named something, min_gap fast steps or more after the last dense one
        interval  max_interval fast steps have passed
        doubt     exact mode: a further draft would not pay
        end       exact mode: the text may end here
    """

    reasons: Counter = field(default_factory=Counter)  # row-steps by reason, "fast" among them
    passes: Counter = field(default_factory=Counter)  # forward passes by their tokens, all rows together
    visible: int = 0  # tokens attended to, summed over row-steps
    fast_visible: int = 0  # the same over fast row-steps alone
    fast_dense: int = 0  # what dense decoding would have attended to in those
    dense: int = 0  # tokens that dense decoding would have attended to for the same new tokens
    copied: int = 0  # tokens copied by refreshes, the prefill's included
    drafted: int = 0  # exact mode: tokens that passes checked
    accepted: int = 0  # and how many of them were right

    def add(self, step: Step):
        """Count one Step."""
        self.copied += sum(row.copied for row in step.rows)
        did = [
            (tokens, row)
            for tokens, row in zip(step.tokens, step.rows, strict=True)
            if row.reason not in ("prefill", "ended")
        ]
        self.passes[len(step.rows)] += any(not row.drafted for _, row in did)
        checked = sum(row.drafted + 1 for _, row in did if row.drafted)  # all in one pass
        self.passes[checked] += checked > 0
        for tokens, row in did:
            self.reasons[row.reason] += 1
            self.visible += row.visible
            self.dense += sum(row.length - row.drafted + i for i in range(len(tokens)))
            self.drafted, self.accepted = self.drafted + row.drafted, self.accepted + row.accepted
            if row.reason == "fast":
                self.fast_visible += row.visible
                self.fast_dense += row.length

    @property
    def fast(self) -> int:
        return self.reasons["fast"]

    @property
    def slow(self) -> int:
        return sum(self.reasons[reason] for reason in SLOW_REASONS)


def counts(tally: Tally, model: Model, batch: int, dense_steps: int) -> dict:
    """What the steps after the prefill did and read, in bytes; dense decoding would have made dense_steps
    steps of `batch` rows.
    """
    token, weights_of = model.config.kv_bytes(model.dtype), lambda n: model.weight_bytes(model.dtype, n)[1]
    steps, read, dense = tally.slow + tally.fast, (tally.visible + tally.copied) * token, tally.dense * token
    weights = sum(n * weights_of(tokens) for tokens, n in tally.passes.items())
    weights_dense = max(dense_steps, 0) * weights_of(batch)
    return {
        "slow_steps": tally.slow,
        "fast_steps": tally.fast,
        "slow_reasons": {reason: tally.reasons[reason] for reason in SLOW_REASONS},
        "drafted": tally.drafted,
        "accepted": tally.accepted,
        "visible_tokens": tally.visible / steps if steps else None,
        "kv_bytes_read": read,
        "kv_bytes_dense": dense,
        "weight_bytes_read": weights,
        "byte_speedup": (weights_dense + dense) / (weights + read) if steps else None,
    }


def report(r: dict, tally: Tally, cfg: SFIConfig, names: list[str]) -> str:
    """What a reader at the terminal wants to know, a few lines, from what --json prints."""
    lines = []
    for i, name in enumerate(names):
        head = f"{harmless(name, sys.stderr)}: " if len(names) > 1 else ""
        ended = f"ended by {ENDS[r['stop_reason'][i]]}"
        lines.append(f"{head}{r['prompt_tokens'][i]:,} prompt tokens, {r['new_tokens'][i]:,} new, {ended}")
    times = f"prefill {r['prefill_s']:.1f} s"
    fast = r["fast_steps"]
    if not r["tokens_per_s"]:
        return "\n".join([*lines, times])
    slow = ", ".join(f"{n} {reason}" for reason, n in r["slow_reasons"].items() if n)
    n_slow = f"{r['slow_steps']} slow"
    n_slow = paint(n_slow, SLOW, sys.stderr) if fast else n_slow  # the colour that marks them in the text
    lines.append(f"steps: {fast} fast, {n_slow}" + f" ({slow})" * bool(slow))
    if fast:
        visible, dense = tally.fast_visible / fast, tally.fast_dense / fast
        lines[-1] += f"; a fast step reads {visible:,.0f} tokens of {dense:,.0f}, {visible / dense:.0%}"
    if r["drafted"]:
        right, per_pass = (
            f"{r['accepted']} of {r['drafted']} drafts right",
            (r["accepted"] + r["slow_steps"]) / r["slow_steps"],
        )
        share = r["accepted"] / r["drafted"]
        lines.append(f"exact: {right}, {share:.0%}; {per_pass:.1f} tokens a dense pass")
    read, dense = r["kv_bytes_read"], r["kv_bytes_dense"]
    lines.append(
        f"KV cache read: {read / 1e9:.2f} GB, {read / dense:.0%} of dense decoding's {dense / 1e9:.2f} GB"
    )
    lines.append(f"{times}, decode {r['decode_s']:.1f} s, {r['tokens_per_s']:.1f} tokens/s")
    if r["dense_step_ms"] and r["step_ms"]:
        ours, dense = r["step_ms"], r["dense_step_ms"]
        unit = "token" if cfg.exact else "step"
        lines[-1] += f"; a {unit} takes {ours:.0f} ms, a dense one {dense:.0f} ms: about {dense / ours:.1f}x"
        lines[-1] += f" ({r['byte_speedup']:.2f}x by bytes)"
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
    if cfg.exact:
        did, more = "drafts would cost too much", "longer prompts"
        if fast:
            did = f"{r['accepted']} of {r['drafted']} drafts were right"
            more += " and a larger --n-select"
        return f"exact mode cannot pay here: {did}; it gains from {more}"
    if fast < 2 * r["slow_steps"] or fast < cfg.min_gap:
        few = f"{fast} of {steps} steps were fast, which does not repay choosing the memory"
        return f"SFI cannot pay here: {few}; it gains from longer answers"
    read, dense = r["kv_bytes_read"], r["kv_bytes_dense"]
    share = dense / (dense + r["weight_bytes_read"])
    why = f"it read {read / dense:.0%} of the cache, which is {share:.0%} of what a dense step reads"
    return f"SFI cannot pay here: {why}; it gains from longer prompts"
