"""What a decode step costs: dense, fast and slow steps and the whole loop, against what bytes alone allow.

    python -m study.bench --contexts 8192 32768 --batches 1 4 --dtype bfloat16 --out study/results/bench

The model has Qwen3-0.6B's size with random weights, and the cache is random too: fine for seconds,
meaningless as text.  The schedule is real: the trigger reads the built-in text, token by token, because
random tokens almost never end a sentence.  All kinds of steps alternate in one process.  Prints the ceiling
(bytes over the bandwidth measured in the same run), a table, and one JSON line last.  Read before: `sfi.py`.
"""

import json
import sys
from pathlib import Path

import torch

from command import checkpoints, story
from command.checks import check_output
from command.config import model_config
from command.machine import BACKENDS, choose_backend, choose_device, choose_dtype
from command.parser import Parser
from command.text import Text
from model import DTYPES, Model
from sfi import SFIConfig
from study import bench_exact, peers
from study.steps import QWEN3_06B, bandwidth, commit, fits, machine, measure, random_model

PEERS = {  # what a row of the table calls them -> what the figure does
    "transformers": "transformers",
    "llama_cpp_bf16": "llama.cpp, BF16",
    "llama_cpp_q8_0": "llama.cpp, Q8_0 weights",
}


def draw(result: dict, path: Path):
    """Milliseconds a token over the context, a panel for each batch size, with the floor that bytes set."""
    from matplotlib.figure import Figure

    batches = sorted({r["batch"] for r in result["rows"]})
    figure = Figure(figsize=(6 * len(batches), 4.5), layout="constrained")
    for ax, batch in zip(figure.subplots(1, len(batches), squeeze=False)[0], batches, strict=True):
        rows = [r for r in result["rows"] if r["batch"] == batch]
        x = [r["context"] for r in rows]
        for name, style in (("dense", "o-"), ("slow", "v:"), ("gather", "x:"), ("fast", "s-")):
            ax.plot(x, [r[f"{name}_ms"] / batch for r in rows], style, label=f"{name} step")
        ax.plot(x, [r["loop_ms_per_token"] for r in rows], "D-", color="k", label="whole loop")
        for name, label in PEERS.items():
            peer = [r for r in rows if f"{name}_ms" in r]
            if peer:
                ax.plot([r["context"] for r in peer], [r[f"{name}_ms"] for r in peer], "^--", label=label)
        ax.plot(x, [r["floor_ms"] / batch for r in rows], "-", color="0.7", label="dense, if bytes were all")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(x, [f"{n // 1024}K" for n in x])
        ax.set_xlabel("cached tokens")
        ax.set_ylabel("ms a token")
        ax.set_title(f"batch {batch}, {result['dtype']}, {result['machine']}", loc="left", fontsize="small")
        ax.grid(color="0.9")
        ax.legend(fontsize="small")
    figure.savefig(path, dpi=130)


def table(args, model: Model, cfg: SFIConfig, tokens: list[int], token_text, ops, speed: float, others):
    """Print a row for every batch size and context, and yield it.  speed: bytes a second; others: None, or
    the Peers to time beside.
    """
    columns = ("dense_ms", "fast_ms", "slow_ms", "gather_ms", "loop_ms_per_token", "mean_interval")
    columns += ("speedup", "byte_speedup", "weights_gb_s", "attention_gb_s")
    heads = (
        "dense",
        "fast",
        "slow",
        "gather",
        "loop/token",
        "interval",
        "speedup",
        "by bytes",
        "W GB/s",
        "KV GB/s",
    )
    print(f"{'batch':>6}{'context':>9}" + "".join(f"{head:>11}" for head in heads) + "   (ms)")
    weights, kv = sum(q.nbytes for q in model.parameters()), model.config.kv_bytes(model.dtype)
    for batch in args.batches:
        for context in args.contexts:
            if not fits(model, cfg, context, batch, args.steps):
                continue
            timed = others.steps(context) if others and batch == 1 else {}
            r = measure(model, cfg, context, batch, tokens, token_text, ops, timed)
            r["floor_ms"] = 1e3 * (weights + batch * context * kv) / speed
            cells = "".join(f"{r[name]:11.{0 if name.endswith('ms') else 2}f}" for name in columns)
            more = "".join(f"   {PEERS[name]} {r[f'{name}_ms']:.0f}" for name in timed)
            print(f"{batch:6}{context:9}{cells}{more}", flush=True)
            yield r


def parser() -> Parser:
    p = Parser("study.bench", "What dense, fast and slow steps cost, against what bytes alone allow.")
    add, number = p.add_argument, dict(type=int, metavar="N")
    add("--contexts", nargs="+", default=[2048, 8192, 32768, 65536, 131072], help="cached tokens", **number)
    add("--batches", nargs="+", default=[1, 4], help="rows; those that do not fit are left out", **number)
    add("--steps", default=150, help="tokens fed per row of the table", **number)
    add("--dtype", choices=["auto", *DTYPES], default="auto", help="of weights and cache")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda where there is one")
    add("--backend", choices=["auto", *BACKENDS], default="auto", help="auto: triton on cuda, else cpu")
    add("--check", action="store_true", help="kernels, decodes and speed of the optimized path, with a GPU")
    add("--exact", action="store_true", help="rounds of exact mode, batch 1, by how often drafts are right")
    add("--measured", type=Path, metavar="FILE.json", help="with --exact: also as exactness.py saw it")
    add("--rounds", default=12, help="with --exact: of each row", **number)
    add(
        "--peer",
        action="store_true",
        help="also time transformers and, where installed, llama.cpp on the same weights",
    )
    add("--out", type=Path, metavar="FILE", help="also write FILE.json and FILE.png")
    return p


def main(argv=None):
    p = parser()
    args = p.parse_args(argv)
    cfg = SFIConfig()
    try:
        least = cfg.n_sink + cfg.n_select + cfg.n_recent + cfg.align
        if args.steps < 2 * cfg.max_interval or min(args.contexts) < least or min(args.batches) < 1:
            raise ValueError(
                f"allowed are --steps {2 * cfg.max_interval}, --contexts {least}, --batches 1 or more"
            )
        device = choose_device(args.device)
        if args.check and device.type != "cuda":
            raise ValueError("--check needs a CUDA device; on a CPU the kernels are checked by pytest")
        dtype = choose_dtype(args.dtype, device)
        ops = choose_backend("triton" if args.check else args.backend, device, cfg)
        if args.exact and (args.check or args.peer or args.batches != p.get_default("batches")):
            raise ValueError("--exact with --check, --peer or --batches; it times rounds of one row")
        if (args.measured and not args.exact) or args.rounds < 2:
            raise ValueError("--measured and --rounds (2 or more) belong to --exact")
        if args.peer and (problem := peers.problem()):
            raise ValueError(f"--peer: {problem}; pip install transformers, or leave the flag out")
        check_output("--out", args.out and args.out.with_suffix(".json"), (".json",), [])
        drawn = bench_exact.chances(args.measured)
        text = None if args.check else Text(checkpoints.resolve("smollm2"))
    except (ValueError, OSError) as e:
        p.error(str(e))
    if args.check:
        from study import gpu_check

        result = gpu_check.main(device) | {"commit": commit()}
        if args.out:
            args.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(result))
        sys.exit(not all(row["error"] <= row["allowed"] for row in result["checks"]))
    torch.manual_seed(0)
    tokens = text.encode(story.story())[1000 : 1000 + args.steps]
    speed = bandwidth(device)
    model = random_model(model_config(QWEN3_06B), dtype, device)
    weights, kv = sum(q.nbytes for q in model.parameters()), model.config.kv_bytes(dtype)
    print(f"random weights of Qwen3-0.6B's size: {weights / 1e9:.2f} GB, {kv / 1e3:.0f} KB of cache a token")
    floor = f"{1e3 * weights / speed:.0f} ms a step + {1e6 * kv / speed:.1f} ms per 1,000 tokens read"
    print(f"this machine reads {speed / 1e9:.1f} GB/s: at least {floor}")
    if args.exact:
        more = tokens, text.token_text, ops, args.rounds
        made = bench_exact.rows(model, args.contexts, drawn, *more)
    else:
        others = peers.Peers(model, args.contexts, args.steps) if args.peer else None
        made = table(args, model, cfg, tokens, text.token_text, ops, speed, others)
    result = {
        "model": "qwen3-0.6b (random weights)",
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "backend": ops.name,
        "bandwidth_gb_s": speed / 1e9,
        "rows": [],
        "machine": machine(device),
        "torch": torch.__version__,
        "commit": commit(),
        "command": " ".join(["python -m study.bench", *(argv if argv is not None else sys.argv[1:])]),
    }
    for row in made:
        result["rows"].append(row)
        if args.out:  # as they come: a long run that breaks off keeps what it has
            args.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.out and not args.exact:
        draw(result, args.out.with_suffix(".png"))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
