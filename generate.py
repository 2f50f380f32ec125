"""The command: answer a question about a long text, most steps fast.

Text streams to stdout; everything else goes to stderr.  What it needs beside the method lies in `command/`.
Read before: `sfi.py`.
"""

import json
import os
import signal
import sys
import time
from dataclasses import asdict, fields, replace
from pathlib import Path

if __name__ == "__main__":  # Ctrl-C while torch is being imported: an end without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch
from safetensors import SafetensorError
from tqdm import tqdm

from command import checkpoints
from command.checks import check_lengths, check_output, check_plot, read_prompts, where_not_finite
from command.config import not_applied, read_config, sampling_settings, with_yarn
from command.loading import load
from command.machine import (
    BACKENDS,
    cache_bytes,
    check_memory,
    choose_backend,
    choose_device,
    choose_dtype,
    prepare,
    use_allowed_cores,
)
from command.parser import Parser, harmless
from command.report import DIM, Screen, Tally, close_stdout, counts, paint, report
from command.text import Text
from command.timing import Clock, dense_seconds
from command.tracing import Trace, plot
from model import DTYPES, Model, NotFinite
from sampling import Sampling
from sfi import Engine, SFIConfig, decode

EXAMPLES = """examples:
  python generate.py
      a question about a built-in text, with smollm2
  python generate.py --ckpt qwen3-0.6b --prompt book.txt --question "Who tells the story?" --no-thinking
      your own file, another model, no reasoning before the answer
  python generate.py --prompt a.txt b.txt --question "Sum it up." --plot memory.png --trace steps.jsonl
      two texts as one batch, with a picture and a record of every step
"""
BUILT_IN = "the built-in text"
PICTURES = (".png", ".svg", ".pdf")


def parser() -> Parser:
    p = Parser("generate.py", "Answer a question about a long text, most steps fast.", EXAMPLES)
    number, share = dict(type=int, metavar="N"), dict(type=float, metavar="P")
    flag = dict(action="store_true")
    names = ", ".join(checkpoints.SHORT_NAMES)

    add = p.add_argument_group("what").add_argument
    add("--ckpt", default="smollm2", help=f"a folder, a hub id such as Qwen/Qwen3-4B, or one of {names}")
    files = "texts, one batch, an answer each; - is standard input; none: a built-in text"
    add("--prompt", nargs="+", metavar="FILE", help=files)
    add("--question", metavar="TEXT", help="appended after each text; the built-in text has one of its own")
    add("--system", metavar="TEXT", help="the system message that comes first; none: the chat template's own")
    add("--no-thinking", help="have a model that reasons answer at once", **flag)
    add("--raw", help="no chat template, and control tokens in the text count", **flag)
    add("--max-new-tokens", default=256, help="tokens to generate at most", **number)

    text = "in this order; defaults: generation_config.json's if it has do_sample, else greedy"
    add = p.add_argument_group("sampling", text).add_argument
    add("--temperature", type=float, metavar="T", help="0: the likeliest token; 1: as trained")
    add("--top-k", help="keep the N likeliest; 0: all", **number)
    add("--top-p", help="keep the likeliest until they sum to P; 1: all", **share)
    add("--min-p", help="keep those at least P times as likely as the likeliest; 0: all", **share)
    add("--seed", default=0, help="same seed, same text", **number)

    add = p.add_argument_group("model and machine").add_argument
    dtypes = ["auto", *DTYPES]
    add("--dtype", choices=dtypes, default="auto", help="auto: bfloat16 where the processor has it")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda where there is one")
    add("--backend", choices=["auto", *BACKENDS], default="auto", help="auto: triton on cuda, else cpu")
    add("--yarn", type=float, metavar="FACTOR", help="stretch the positions; 4 makes Qwen3's 131072")

    add = p.add_argument_group("method").add_argument
    add("--dense", help="every step dense, for comparison: --policy dense", **flag)
    for f in fields(SFIConfig):
        kind = dict(type=str, choices=f.metadata["choices"]) if f.metadata["choices"] else number
        kind = {
            "steps": dict(type=lambda text: tuple(filter(None, text.split(","))), metavar="A,B"),
            "exact": flag,
            "draft_cost": dict(type=float, metavar="X"),
        }.get(f.name, kind)
        add("--" + f.name.replace("_", "-"), default=f.default, help=f.metadata["help"], **kind)

    add = p.add_argument_group("output").add_argument
    add("--trace", type=Path, metavar="FILE.jsonl", help="write a line of JSON a step")
    add("--plot", type=Path, metavar="FILE.png", help="draw what the memory held at every step")
    add("--json", help="print one line of JSON last", **flag)
    add("--quiet", help="nothing on stderr but errors", **flag)
    return p


def run(args) -> int:
    """Check all that can be checked before the weights load, load, answer; returns the exit code."""
    cfg = SFIConfig(**{f.name: getattr(args, f.name) for f in fields(SFIConfig)})
    if args.dense and (cfg.policy not in ("sentence", "dense") or cfg.exact):
        other = "--exact" if cfg.exact else f"--policy {cfg.policy}"
        raise ValueError(f"--dense with {other}; give one of the two")
    cfg = replace(cfg, policy="dense") if args.dense else cfg
    given = {f.name: getattr(args, f.name) for f in fields(Sampling)}
    Sampling(**{name: value for name, value in given.items() if value is not None})
    device = choose_device(args.device)
    use_allowed_cores()
    dtype = choose_dtype(args.dtype, device)
    ops = choose_backend(args.backend, device, cfg, args.quiet)
    check_output("--trace", args.trace, (".jsonl",), args.prompt or [])
    check_output("--plot", args.plot, PICTURES, args.prompt or [])
    check_plot(args.plot)
    prompts = read_prompts(args)
    folder = checkpoints.resolve(args.ckpt, weights=False, quiet=args.quiet)
    config = read_config(folder)
    config = with_yarn(config, args.yarn) if args.yarn is not None else config
    text = Text(folder)
    sampling = sampling_settings(text.generation_config, **given)
    chat = lambda prompt: text.encode(text.chat(prompt, args.system, not args.no_thinking))
    ids = [text.encode(prompt, special=True) if args.raw else chat(prompt) for prompt in prompts]
    if (largest := max((i for row in ids for i in row), default=0)) >= config.vocab_size:
        raise ValueError(
            f"the tokenizer gives token {largest}, the model has {config.vocab_size}; they do not match"
        )
    check_lengths(config, [len(prompt) for prompt in ids], args.max_new_tokens)
    longest, new = max(map(len, ids)), args.max_new_tokens
    sizes = dict(batch=len(ids), max_length=longest + new, new_tokens=new)
    with torch.device("meta"):
        weights, _ = Model(config).weight_bytes(dtype, len(ids))
    check_memory(weights, cache_bytes(config, cfg, dtype=dtype, **sizes), device)
    facts = dict(backend=ops.name, device=str(device), dtype=str(dtype).removeprefix("torch."))
    facts |= dict(seed=args.seed, sampling=asdict(sampling), ckpt=args.ckpt, config=asdict(cfg))
    if not args.quiet:
        how = "{dtype} on {device}, {backend} backend".format(**facts) + f", policy {cfg.policy}"
        how += ", exact" * cfg.exact + f", {sampling}"
        line = f"{args.ckpt}: {config.model_type}, {weights / 1e9:.2f} GB, {how}"
        for said in filter(None, (line, not_applied(text.generation_config))):
            print(paint(harmless(said, sys.stderr), DIM, sys.stderr), file=sys.stderr)

    folder = checkpoints.resolve(args.ckpt, quiet=args.quiet)
    prepare(ops, dtype, args.quiet)
    began = time.perf_counter()
    model = load(folder, config, dtype, device)
    facts["load_s"] = time.perf_counter() - began
    trace = None
    if args.trace or args.plot:
        trace = Trace(config, cfg, text.token_text, len(ids), longest + new, args.trace)
    observe = trace.refreshed if trace else None
    engine = Engine(model, cfg, text.token_text, ops=ops, observe=observe, **sizes)
    result = answer(args, engine, ids, text, sampling, trace) | facts
    if args.json:
        print(json.dumps(result), flush=True)
    if args.plot:
        plot(trace, args.prompt or [BUILT_IN], args.plot)
    if trace and trace.problem:
        raise ValueError(trace.problem)
    return 130 if "interrupted" in result["stop_reason"] else 0


def answer(args, engine, ids, text, sampling, trace) -> dict:
    """Decode all prompts and show the text as it comes, then the report, also where Ctrl-C or a closed
    output broke it off.

    Returns what --json prints: lists with an entry a prompt (`text`, `prompt_tokens`, `new_tokens`,
    `stop_reason`: stop, length, interrupted or closed), then counts of all rows after the prefill and seconds
    (`step_ms` and `dense_step_ms` while all rows run; in exact mode a token's).  Bytes read include copies.
    """
    names = args.prompt or [BUILT_IN]
    screen = Screen(names, text, args.max_new_tokens, sys.stdout)
    clock, tally, full, dense_s = Clock(engine.model.device), Tally(), 0, None
    reason = "length"
    shown = dict(desc="prefill", unit=" tokens", leave=False, disable=args.quiet or None)
    settings = dict(max_new_tokens=args.max_new_tokens, sampling=sampling, stop_ids=text.stop_ids)
    try:
        with tqdm(total=sum(map(len, ids)), **shown) as bar:
            progress = lambda n: (bar.update(n), clock.mark("prefill"))
            for step in decode(engine, ids, progress=progress, **settings):
                bar.close()
                began, now = clock.at.get("end", 0.0), clock.mark("end")
                clock.at.setdefault("first_token", now)
                tally.add(step)
                if any(step.tokens) and not any(row.reason == "ended" for row in step.rows):
                    full += sum(map(len, step.tokens)) / len(ids)  # tokens a row, while all rows run, which
                    clock.at["full"] = now  # is what a dense step of all rows is compared with
                if trace:
                    trace.step(step, now - began)
                for b, (tokens, row) in enumerate(zip(step.tokens, step.rows, strict=True)):
                    for i, token in enumerate(tokens):  # of several, the last is the dense pass's own
                        own = row.refresh and row.reason != "prefill" and i == row.accepted
                        screen.push(b, token, slow=own)
        screen.close(reason)
        if tally.fast and not args.quiet:
            dense_s = dense_seconds(engine, [len(prompt) + int(full / 2) for prompt in ids])
    except NotFinite:
        raise ValueError(where_not_finite(engine)) from None
    except KeyboardInterrupt:
        reason = "interrupted"
    except BrokenPipeError:
        reason = "closed"
        close_stdout()
    screen.close(reason)
    at, made = clock.at, sum(screen.new) - len(ids)  # after the prefill
    decode_s = at["end"] - at["first_token"] if made > 0 else 0.0
    result = {
        "text": [stream.text for stream in screen.streams],
        "prompt_tokens": [len(prompt) for prompt in ids],
        "new_tokens": screen.new,
        "stop_reason": screen.ends,
        **counts(tally, engine.model, len(ids), max(screen.new) - 1),
        "prefill_s": at.get("prefill", 0.0),
        "first_token_s": at.get("first_token"),
        "decode_s": decode_s,
        "tokens_per_s": made / decode_s if made > 0 else None,
        "step_ms": 1e3 * (at["full"] - at["first_token"]) / (full - 1) if full > 1 else None,
        "dense_step_ms": 1e3 * dense_s if dense_s else None,
    }
    if not args.quiet:
        print(report(result, tally, engine.cfg, names), file=sys.stderr)
    return result


def main(argv=None):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w"))
    args = parser().parse_args(argv)
    sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character does not end the answer
    try:
        sys.exit(run(args))
    except BrokenPipeError:
        close_stdout()
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError, MemoryError, RuntimeError, SafetensorError) as e:
        message = harmless(" ".join(str(e).split()), sys.stderr)
        print(f"generate.py: error: {message}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
