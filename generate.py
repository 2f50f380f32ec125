"""The command: answer a question about a long text, most steps fast.

    python generate.py                                          # the built-in text and question, with smollm2
    python generate.py --ckpt qwen3-0.6b --prompt book.txt --question "Who is the narrator?"

Text streams to stdout; everything else goes to stderr.  Read before: `sfi.py`.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path

import psutil
import torch
from tqdm import tqdm

import checkpoints
import story
from model import CPU_HAS_BF16, DTYPES, Model, ModelConfig, load, with_yarn
from sfi import REFERENCE, SLOW_REASONS, Engine, SFIConfig, Tally, cache_bytes, check_lengths, decode
from text import Stream, Text, read_json


class Parser(argparse.ArgumentParser):
    def error(self, message):
        """One line on stderr and exit code 2, without the usage text."""
        self.exit(2, f"{self.prog}: error: {message}; see --help\n")


def parser() -> argparse.ArgumentParser:
    p = Parser("generate.py", description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    names = ", ".join(checkpoints.SHORT_NAMES)
    what = p.add_argument_group("what")
    what.add_argument("--ckpt", default="smollm2", help=f"a folder, a hub id such as Qwen/Qwen3-4B, or one of {names}")
    what.add_argument("--prompt", nargs="+", metavar="FILE", help="text files, one answer each; - is standard input; none: the built-in text")
    what.add_argument("--question", metavar="TEXT", help="appended after the text; the built-in text has a question of its own")
    what.add_argument("--raw", action="store_true", help="feed the text as it is, without the chat template")
    what.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="tokens to generate at most")
    what.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token, 1 samples as trained")
    what.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling")
    where = p.add_argument_group("model and machine")
    where.add_argument("--dtype", choices=["auto", *DTYPES], default="auto", help="auto: bfloat16 where the processor has it, else float32")
    where.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda where there is one")
    where.add_argument("--yarn", type=float, metavar="FACTOR", help="stretch the model's positions, 4 for Qwen3 at 131072")
    method = p.add_argument_group("method")
    method.add_argument("--dense", action="store_true", help="every step dense, for comparison: --policy dense")
    for f in fields(SFIConfig):
        if f.name == "paper_steps":
            kind = dict(type=lambda s: tuple(filter(None, s.split(","))), metavar="A,B", default=",".join(f.default))
        else:
            kind = dict(type=type(f.default), choices=f.metadata["choices"], default=f.default)
            kind |= {} if f.metadata["choices"] else {"metavar": "N"}
        method.add_argument("--" + f.name.replace("_", "-"), help=f.metadata["help"], **kind)
    out = p.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print one line of JSON last")
    out.add_argument("--quiet", action="store_true", help="no progress and no report on stderr")
    return p


def read_prompt(name: str) -> str:
    """The text of a file, or of standard input: UTF-8, with or without BOM, line ends as \\n."""
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        text = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as e:
        raise ValueError(f"--prompt {name}: {e.strerror.lower()}; give a readable text file, or - for standard input") from None
    except UnicodeDecodeError as e:
        raise ValueError(f"--prompt {name}: byte {e.start} is not UTF-8; allowed is UTF-8 text: convert the file, for example with iconv") from None
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
    return [f"{text.strip()}\n\n{question}" if question else text for text in texts]


def choose_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch sees no CUDA device here; use --device cpu, or install a CUDA build of torch")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    if name != "auto":
        return DTYPES[name]
    return torch.bfloat16 if device.type == "cuda" or CPU_HAS_BF16 else torch.float32


def check_memory(config: ModelConfig, cfg: SFIConfig, batch: int, longest: int, new: int, dtype: torch.dtype, device: torch.device):
    """ValueError if weights and cache cannot fit into the free memory."""
    with torch.device("meta"):
        weights = sum(p.numel() for p in Model(config).parameters()) * dtype.itemsize
    cache = cache_bytes(config, cfg, batch, longest + new, new, dtype)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if weights + cache > free:
        raise ValueError(
            f"needs {(weights + cache) / 1e9:.1f} GB ({weights / 1e9:.1f} weights, {cache / 1e9:.1f} cache), this machine has {free / 1e9:.1f} GB "
            "free; choose a smaller model, a shorter prompt or a narrower --dtype"
        )


def run(args) -> dict:
    """Everything between the parsed flags and the report; returns what --json prints."""
    cfg = SFIConfig(**{f.name: getattr(args, f.name) for f in fields(SFIConfig)} | ({"policy": "dense"} if args.dense else {}))
    device = choose_device(args.device)
    dtype = choose_dtype(args.dtype, device)
    prompts = read_prompts(args)
    folder = checkpoints.resolve(args.ckpt, weights=False)
    config = ModelConfig.from_dict(read_json(folder / "config.json"))
    config = with_yarn(config, args.yarn) if args.yarn is not None else config
    text = Text(folder)
    ids = [text.encode(prompt, special=True) if args.raw else text.encode(text.chat(prompt)) for prompt in prompts]
    longest = max(map(len, ids))
    check_lengths(config, list(map(len, ids)), args.max_new_tokens)
    check_sampling(args.temperature, args.seed)
    check_memory(config, cfg, len(ids), longest, args.max_new_tokens, dtype, device)

    began = time.perf_counter()
    model = load(checkpoints.resolve(args.ckpt), config, dtype, device)
    load_s = time.perf_counter() - began
    say(args, f"{args.ckpt}: {config.model_type}, {config.num_hidden_layers} layers, {dtype_name(dtype)} on {device}, {REFERENCE.name} backend")
    sizes = dict(batch=len(ids), max_length=longest + args.max_new_tokens, new_tokens=args.max_new_tokens)
    engine = Engine(model, cfg, text.token_text, **sizes)
    result = answer(args, engine, ids, text)
    facts = dict(load_s=load_s, backend=engine.ops.name, device=str(device), dtype=dtype_name(dtype), seed=args.seed, ckpt=args.ckpt)
    return result | facts | {"config": asdict(cfg)}


def answer(args, engine: Engine, ids: list[list[int]], text: Text) -> dict:
    """Decode all prompts, stream the text, count what was read and time it."""
    streams, tally = [Stream(text.tokenizer) for _ in ids], Tally()
    new, reason = [0] * len(ids), ["length"] * len(ids)
    began = prefilled = first = time.perf_counter()
    with tqdm(total=sum(map(len, ids)), desc="prefill", unit="tok", leave=False, disable=args.quiet or None) as bar:

        def progress(n):
            nonlocal prefilled
            if engine.model.device.type == "cuda":
                torch.cuda.synchronize()
            prefilled = time.perf_counter()
            bar.update(n)

        settings = dict(temperature=args.temperature, seed=args.seed, stop_ids=text.stop_ids, progress=progress)
        for made, step in enumerate(decode(engine, ids, max_new_tokens=args.max_new_tokens, **settings)):
            if made == 0:
                first = time.perf_counter()
                bar.close()
            tally.add(step.parts)
            for b, token in enumerate(step.tokens):
                if token is None:
                    continue
                new[b] += 1
                if token in text.stop_ids:
                    reason[b] = "stop"
                else:
                    show(args, streams[b].push(token))
    ended = time.perf_counter()
    for stream in streams:
        show(args, stream.finish())
    show(args, "\n")
    for name, stream in zip(args.prompt or [], streams if len(ids) > 1 else [], strict=False):
        print(f"==> {name} <==\n{stream.text}\n", flush=True)
    steps, per_token = tally.slow + tally.fast, engine.model.config.kv_bytes(engine.model.dtype)
    return {
        "text": [stream.text for stream in streams],
        "prompt_tokens": list(map(len, ids)),
        "new_tokens": new,
        "stop_reason": reason,
        "slow_steps": tally.slow,
        "fast_steps": tally.fast,
        "slow_reasons": {name: tally.reasons[name] for name in SLOW_REASONS},
        "visible_tokens": tally.visible / steps if steps else None,
        "kv_bytes_read": (tally.visible + tally.copied) * per_token,
        "kv_bytes_dense": tally.dense * per_token,
        "prefill_s": prefilled - began,
        "first_token_s": first - began if max(new) else None,
        "decode_s": ended - first,
        "tokens_per_s": steps / (ended - first) if steps else None,
        "fast_visible": tally.fast_visible / tally.fast if tally.fast else None,
    }
