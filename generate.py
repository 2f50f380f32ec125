"""The command: answer a question about a long text, most steps fast.

    python generate.py                                          # the built-in text and question, with smollm2
    python generate.py --ckpt qwen3-0.6b --prompt book.txt --question "Who is the narrator?"

Text streams to stdout; everything else goes to stderr.  Read before: `sfi.py`.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, fields, replace
from pathlib import Path

import psutil
import torch
from tqdm import tqdm

import checkpoints
import story
from model import CPU_HAS_BF16, DTYPES, Model, ModelConfig, load, read_json, with_yarn
from sfi import (
    REFERENCE,
    SLOW_REASONS,
    Engine,
    SFIConfig,
    Tally,
    cache_bytes,
    check_lengths,
    check_sampling,
    decode,
)
from text import Stream, Text


class Parser(argparse.ArgumentParser):
    """An argument parser that shows defaults, refuses abbreviations and reports errors in one line."""

    def __init__(self, prog, description):
        super().__init__(prog, description=description, formatter_class=Help, allow_abbrev=False)

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}; see --help\n")


class Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action):
        """The help text, with its default where there is one worth showing."""
        plain = action.default is None or action.default is False
        return action.help if plain else super()._get_help_string(action)


def parser() -> argparse.ArgumentParser:
    p = Parser("generate.py", "Answer a question about a long text, most steps fast.")
    number, flag = dict(type=int, metavar="N"), dict(action="store_true")
    names = ", ".join(checkpoints.SHORT_NAMES)

    add = p.add_argument_group("what").add_argument
    add("--ckpt", default="smollm2", help=f"a folder, a hub id such as Qwen/Qwen3-4B, or one of {names}")
    add(
        "--prompt",
        nargs="+",
        metavar="FILE",
        help="texts, an answer each; - is standard input; none: built-in",
    )
    add("--question", metavar="TEXT", help="appended after the text; the built-in text has one of its own")
    add("--raw", help="feed the text as it is, without the chat template", **flag)
    add("--max-new-tokens", default=256, help="tokens to generate at most", **number)
    add("--temperature", type=float, default=0.0, metavar="T", help="0: the likeliest token; 1: as trained")
    add("--seed", default=0, help="of the sampling", **number)

    add = p.add_argument_group("model and machine").add_argument
    add(
        "--dtype", choices=["auto", *DTYPES], default="auto", help="auto: bfloat16 where the processor has it"
    )
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda where there is one")
    add("--yarn", type=float, metavar="FACTOR", help="stretch the positions; 4 makes Qwen3's 131072")

    add = p.add_argument_group("method").add_argument
    add("--dense", help="every step dense, for comparison: --policy dense", **flag)
    for f in fields(SFIConfig):
        kind = dict(type=str, choices=f.metadata["choices"]) if f.metadata["choices"] else number
        if f.name == "paper_steps":
            kind = dict(type=lambda text: tuple(filter(None, text.split(","))), metavar="A,B")
        default = ",".join(f.default) if f.name == "paper_steps" else f.default
        add("--" + f.name.replace("_", "-"), default=default, help=f.metadata["help"], **kind)

    add = p.add_argument_group("output").add_argument
    add("--json", help="print one line of JSON last", **flag)
    add("--quiet", help="no report and no prefill progress on stderr", **flag)
    return p


def read_prompt(name: str) -> str:
    """The text of a file, or of standard input: UTF-8, with or without BOM, line ends as \\n."""
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        text = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as e:
        raise ValueError(
            f"--prompt {name}: {e.strerror.lower()}; give a readable text file, or - for standard input"
        ) from None
    except UnicodeDecodeError as e:
        raise ValueError(
            f"--prompt {name}: byte {e.start} is not UTF-8; allowed is UTF-8 text: convert the file"
        ) from None
    if not text.strip():
        raise ValueError(f"--prompt {name}: the text is empty; give a file with at least one word")
    return text


def read_prompts(args) -> list[str]:
    if args.prompt and args.prompt.count("-") > 1:
        raise ValueError("--prompt has - more than once; standard input can be read once")
    texts = [read_prompt(name) for name in args.prompt] if args.prompt else [story.story()]
    question = args.question if args.question is not None or args.prompt else story.QUESTION
    if question is not None and not question.strip():
        raise ValueError("--question is empty; give a question, or leave the flag out")
    if question and any("\ud800" <= c <= "\udfff" for c in question):
        raise ValueError("--question is not UTF-8; allowed is UTF-8 text")
    return [f"{text.strip()}\n\n{question}" if question else text for text in texts]


def choose_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda: PyTorch sees no CUDA device here; use --device cpu, or another torch"
        )
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    if name != "auto":
        return DTYPES[name]
    return torch.bfloat16 if device.type == "cuda" or CPU_HAS_BF16 else torch.float32


def check_memory(config: ModelConfig, cfg: SFIConfig, sizes: dict, dtype: torch.dtype, device) -> int:
    """Bytes of the weights; ValueError if they and the cache of an engine of `sizes` do not fit."""
    with torch.device("meta"):
        weights = sum(p.numel() for p in Model(config).parameters()) * dtype.itemsize
    cache = cache_bytes(config, cfg, dtype=dtype, **sizes)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if weights + cache > free:
        parts = f"{weights / 1e9:.1f} weights + {cache / 1e9:.1f} cache"
        raise ValueError(
            f"needs {(weights + cache) / 1e9:.1f} GB ({parts}), this machine has {free / 1e9:.1f} GB free; "
            "choose a smaller model, a shorter prompt or a narrower --dtype"
        )
    return weights


def run(args) -> dict:
    """Check all that can be checked before the weights load, load, answer; returns what --json prints."""
    cfg = SFIConfig(**{f.name: getattr(args, f.name) for f in fields(SFIConfig)})
    cfg = replace(cfg, policy="dense") if args.dense else cfg
    check_sampling(args.temperature, args.seed)
    device = choose_device(args.device)
    dtype = choose_dtype(args.dtype, device)
    prompts = read_prompts(args)
    folder = checkpoints.resolve(args.ckpt, weights=False)
    config = ModelConfig.from_dict(read_json(folder / "config.json"))
    config = with_yarn(config, args.yarn) if args.yarn is not None else config
    text = Text(folder)
    encode = (lambda p: text.encode(p, special=True)) if args.raw else lambda p: text.encode(text.chat(p))
    ids = [encode(prompt) for prompt in prompts]
    if (largest := max(map(max, ids), default=0)) >= config.vocab_size:
        raise ValueError(
            f"the tokenizer gives token {largest}, the model has {config.vocab_size}; they do not match"
        )
    check_lengths(config, [len(prompt) for prompt in ids], args.max_new_tokens)
    longest, new = max(map(len, ids)), args.max_new_tokens
    sizes = dict(batch=len(ids), max_length=longest + new, new_tokens=new)
    weights = check_memory(config, cfg, sizes, dtype, device)
    facts = dict(backend=REFERENCE.name, device=str(device), dtype=str(dtype).removeprefix("torch."))
    if not args.quiet:
        how = "{dtype} on {device}, {backend} backend".format(**facts)
        print(
            f"{args.ckpt}: {config.model_type}, {weights / 1e9:.2f} GB, {how}, policy {cfg.policy}",
            file=sys.stderr,
        )

    folder = checkpoints.resolve(args.ckpt)
    began = time.perf_counter()
    model = load(folder, config, dtype, device)
    load_s = time.perf_counter() - began
    engine = Engine(model, cfg, text.token_text, ops=REFERENCE, **sizes)
    facts |= dict(load_s=load_s, seed=args.seed, ckpt=args.ckpt)
    return answer(args, engine, ids, text) | facts | {"config": asdict(cfg)}


def answer(args, engine: Engine, ids: list[list[int]], text: Text) -> dict:
    """Decode all prompts; one streams as it comes, several are printed under their names at the end."""
    streams, new, tally = [Stream(text.tokenizer) for _ in ids], [0] * len(ids), Tally()
    stopped = [False] * len(ids)
    show = (lambda piece: print(piece, end="", flush=True)) if len(ids) == 1 else lambda piece: None
    clock = Clock(engine.model.device)
    shown = dict(desc="prefill", unit=" tokens", leave=False, disable=args.quiet or None)
    with tqdm(total=sum(map(len, ids)), **shown) as bar:

        def progress(n):
            bar.update(n)
            clock.mark("prefill")

        settings = dict(max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=args.seed)
        for step in decode(engine, ids, stop_ids=text.stop_ids, progress=progress, **settings):
            bar.close()
            clock.mark("first_token", once=True)
            tally.add(step.parts)
            for b, token in enumerate(step.tokens):
                if token is not None:
                    new[b], stopped[b] = new[b] + 1, token in text.stop_ids
                    show("" if stopped[b] else streams[b].push(token))
    clock.mark("end")
    for stream in streams:
        show(stream.finish())
    show("\n")
    if len(ids) > 1:
        for name, stream in zip(args.prompt, streams, strict=True):
            print(f"==> {name} <==\n{stream.text}\n")
    steps, token_bytes = tally.slow + tally.fast, engine.model.config.kv_bytes(engine.model.dtype)
    decode_s = clock.at["end"] - clock.at.get("first_token", clock.at["end"])
    result = {
        "text": [stream.text for stream in streams],
        "prompt_tokens": [len(prompt) for prompt in ids],
        "new_tokens": new,
        "stop_reason": ["stop" if s else "length" for s in stopped],
        "slow_steps": tally.slow,
        "fast_steps": tally.fast,
        "slow_reasons": {reason: tally.reasons[reason] for reason in SLOW_REASONS},
        "visible_tokens": tally.visible / steps if steps else None,
        "kv_bytes_read": (tally.visible + tally.copied) * token_bytes,
        "kv_bytes_dense": tally.dense * token_bytes,
        "prefill_s": clock.at["prefill"],
        "first_token_s": clock.at.get("first_token"),
        "decode_s": decode_s,
        "tokens_per_s": steps / decode_s if steps else None,
    }
    if not args.quiet:
        print(report(result, tally, engine.cfg), file=sys.stderr)
    return result


class Clock:
    """Seconds from its making to each mark, the device's queued work included."""

    def __init__(self, device: torch.device):
        self.device, self.began, self.at = device, time.perf_counter(), {}

    def mark(self, name: str, once=False):
        if once and name in self.at:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.at[name] = time.perf_counter() - self.began


def report(r: dict, tally: Tally, cfg: SFIConfig) -> str:
    """What a reader at the terminal wants to know, a few lines."""
    names = {"stop": "end token", "length": "length limit"}
    ended = " and ".join(sorted(names[reason] for reason in set(r["stop_reason"])))
    lines = [f"{sum(r['prompt_tokens']):,} prompt tokens, {sum(r['new_tokens']):,} new, ended by {ended}"]
    steps = r["slow_steps"] + r["fast_steps"]
    if not steps:
        return f"{lines[0]}; prefill {r['prefill_s']:.1f} s"
    slow = ", ".join(f"{n} {reason}" for reason, n in r["slow_reasons"].items() if n)
    lines.append(f"steps: {r['fast_steps']} fast, {r['slow_steps']} slow" + f" ({slow})" * bool(slow))
    if tally.fast:
        visible, dense = tally.fast_visible / tally.fast, tally.dense / steps
        lines[-1] += f"; a fast step reads {visible:,.0f} tokens of {dense:,.0f}"
    elif r["slow_reasons"]["short"] == steps:
        memory = cfg.n_sink + cfg.budget + cfg.n_recent
        lines.append(f"everything fits into the memory of {memory:,} tokens: equal to dense decoding")
    read, dense = r["kv_bytes_read"] / 1e9, r["kv_bytes_dense"] / 1e9
    lines.append(f"KV cache read: {read:.2f} GB, {read / dense:.0%} of dense decoding's {dense:.2f} GB")
    times = f"decode {r['decode_s']:.1f} s, {r['tokens_per_s']:.1f} tokens/s"
    return "\n".join([*lines, f"prefill {r['prefill_s']:.1f} s, {times}"])


def main(argv=None):
    args = parser().parse_args(argv)
    sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character does not end the answer
    try:
        result = run(args)
        if args.json:
            print(json.dumps(result), flush=True)
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError, torch.OutOfMemoryError) as e:
        print(f"generate.py: error: {' '.join(str(e).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
