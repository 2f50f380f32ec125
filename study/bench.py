"""What a decode step costs: dense, fast and slow steps and the whole loop, against what bytes alone allow.

    python -m study.bench --contexts 8192 32768 --batches 1 4 --dtype bfloat16 --out study/results/bench

The model has Qwen3-0.6B's size with random weights, and the cache is random too: fine for seconds,
meaningless as text.  The schedule is real: the trigger reads the built-in text, token by token, because
random tokens almost never end a sentence.  All kinds of steps alternate in one process.  Prints the ceiling
(bytes over the bandwidth measured in the same run), a table, and one JSON line last.  Read before: `sfi.py`.
"""

import copy
import json
import platform
import statistics
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from command import checkpoints, story
from command.checks import check_memory, choose_backend, choose_device, choose_dtype
from command.text import Text
from generate import Parser
from model import DTYPES, Model, ModelConfig, inverse_frequencies
from sfi import BACKENDS, Engine, SFIConfig, cache_bytes
from study import bench_exact

QWEN3_06B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1 << 20,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}


def random_model(config: ModelConfig, dtype: torch.dtype, device) -> Model:
    """A model of the given size with random weights, scaled so that activations stay in range."""
    with torch.device("meta"):
        model = Model(config)
    model = model.to(dtype).to_empty(device=device).requires_grad_(False)
    for name, p in model.named_parameters():
        p.fill_(1.0) if "norm" in name else p.normal_(std=p.shape[-1] ** -0.5)
    model.inv_freq = inverse_frequencies(config.rope, config.head_dim).to(device)
    return model


def seconds(step, device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def bandwidth(device, gigabytes=1.0) -> float:
    """Bytes per second at which a large tensor can be read: the median of nine sums."""
    x = torch.ones(int(gigabytes * 2**28), device=device)
    return x.nbytes / statistics.median(seconds(x.sum, device) for _ in range(9))


def attention_seconds(engine: Engine, length: int) -> float:
    """Median seconds of a dense step's attention, all layers, over `length` tokens of every row; captured
    where a step is.
    """
    model, device, B = engine.model.config, engine.model.device, len(engine.rows)
    q = torch.randn((B, 1, model.num_attention_heads, model.head_dim), device=device).to(engine.model.dtype)

    def layers(start, length):
        for K, V in zip(engine.cache.k, engine.cache.v, strict=True):
            out, _ = engine.ops.attend(q, K, V, start, length)
        return out

    inputs = [torch.full((B,), n, device=device) for n in (engine.cap, length)]
    step = engine.capture(layers, *inputs) if engine.capture else layers
    return statistics.median(seconds(lambda: step(*inputs), device) for _ in range(6))


def gathering(positions, attend):
    """`attend` for fast steps over tokens picked by index from where they lie, as it would be without a
    compact memory: positions (K, n) int64, sorted.
    """
    heads, n = torch.arange(len(positions), device=positions.device)[:, None], positions.shape[1]

    def pick(cache):  # (B, K, slots, D) -> (B, K, n, D)
        if cache.device.type == "cuda":
            return cache[:, heads, positions]
        rows = [
            torch.stack([x.index_select(0, p) for x, p in zip(row, positions, strict=True)]) for row in cache
        ]
        return torch.stack(rows)  # on a CPU several times faster than one index

    def attend_by_index(q, K, V, start, length, scores=None):
        return attend(q, pick(K), pick(V), torch.zeros_like(start), torch.full_like(length, n))

    return attend_by_index


def filled(engine: Engine, context: int) -> Engine:
    """The engine, as if `context` random tokens were cached in every row."""
    for layer in range(len(engine.cache.k)):
        engine.cache.k[layer].normal_()
        engine.cache.v[layer].normal_()
        engine.key_norm[layer] = engine.cache.k[layer, :, :, engine.cap :].float().norm(dim=-1)
    for row in engine.rows:
        row.length = context
    return engine


def fits(model: Model, cfg: SFIConfig, context: int, batch: int, new: int) -> bool:
    """Whether the caches of so many tokens fit into memory; a line says so where they do not."""
    sizes = dict(batch=batch, max_length=context + new, new_tokens=new, dtype=model.dtype)
    try:
        check_memory(0, cache_bytes(model.config, cfg, **sizes), model.device)
    except ValueError as e:
        print(f"{batch:6}{context:9}   left out: {str(e).split(';')[0]}")
        return False
    return True


def measure(
    model: Model, cfg: SFIConfig, context: int, batch: int, tokens: list[int], token_text, ops
) -> dict:
    """Alternate SFI steps over a random cache of `context` tokens with dense and gathering ones; milliseconds
    a step of the whole batch.
    """
    device, new = model.device, len(tokens)
    sizes = dict(batch=batch, max_length=context + new, new_tokens=new)
    engine = filled(Engine(model, cfg, token_text, ops=ops, **sizes), context)
    n_kv, about = model.config.num_key_value_heads, cfg.n_sink + cfg.n_select + cfg.n_recent
    about += (cfg.align + cfg.max_interval) // 2  # what a fast step sees
    positions = torch.rand(n_kv, context, device=device).topk(about).indices.sort(-1).values + engine.cap
    gather = copy.copy(engine)
    gather.ops = ops._replace(attend=gathering(positions, ops.attend))
    gather.cfg = replace(cfg, policy="never")  # a fast step, whatever the token says
    times = {name: [] for name in ("dense", "fast", "slow", "gather")}
    visible = []

    def timed(name, step):
        times[name].append(seconds(step, device))

    for i, token in enumerate(tqdm(tokens, desc=f"{context} tokens", leave=False, disable=None)):
        if i % 5 == 1:
            timed("dense", lambda: engine.dense_step([row.length for row in engine.rows]))
            gather.rows = copy.deepcopy(engine.rows)
            if all(row.memory and row.since < cfg.max_interval for row in gather.rows):
                timed("gather", lambda: gather.step([0] * batch))
        parts = []
        timed("fast", lambda token=token, parts=parts: parts.extend(engine.step([token] * batch)[1]))
        if i == 0:  # warm-up, and the first refresh, which the prefill would have done
            times["fast"].clear()
        elif parts[0].reason == "fast":
            visible.append(parts[0].visible)
        else:
            times["slow"].append(times["fast"].pop())
    median = {name: statistics.median(t) * 1e3 for name, t in times.items()}
    n_fast, n_slow = len(times["fast"]), len(times["slow"])
    loop = (n_fast * median["fast"] + n_slow * median["slow"]) / (n_fast + n_slow)
    every = (n_fast + n_slow) / n_slow
    weights, kv = sum(p.nbytes for p in model.parameters()), model.config.kv_bytes(model.dtype) * batch
    seen = statistics.mean(visible)
    reads = attention_seconds(engine, context)
    return {
        "context": context,
        "batch": batch,
        "visible": seen,
        **{f"{name}_ms": value for name, value in median.items()},
        "loop_ms_per_token": loop / batch,
        "mean_interval": every,
        "speedup": median["dense"] / loop,
        "byte_speedup": (weights + context * kv) / (weights + ((every - 1) * seen + context) * kv / every),
        "weights_gb_s": weights / (median["dense"] / 1e3 - reads) / 1e9,
        "attention_gb_s": context * kv / reads / 1e9,
        "quartiles_ms": {
            name: [round(1e3 * q, 2) for q in statistics.quantiles(t, n=4)]
            for name, t in times.items()
            if len(t) > 1
        },
    }


def transformers_ms(model: Model, context: int, steps=7) -> float:
    """Median milliseconds of a step of transformers (SDPA attention), same weights and cache size."""
    import transformers

    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
    names += ("num_attention_heads", "num_key_value_heads", "tie_word_embeddings")
    config = transformers.Qwen3Config(
        **{name: QWEN3_06B[name] for name in names}, max_position_embeddings=1 << 20
    )
    with torch.device("meta"):
        peer = transformers.Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa")
    peer = peer.to_empty(device=model.device).to(model.dtype).eval()
    peer.load_state_dict(dict(model.named_parameters()), strict=False, assign=True)
    peer.tie_weights()
    peer.model.rotary_emb = type(peer.model.rotary_emb)(config).to(model.device)  # its angles are no weights
    shape = (1, config.num_key_value_heads, context, config.head_dim)
    cache = transformers.DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        cache.update(*(torch.randn(shape, dtype=model.dtype, device=model.device) for _ in range(2)), layer)
    token, times = torch.tensor([[5]], device=model.device), []
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it renames arguments from version to version
        for _ in range(steps):
            step = lambda: peer(token, past_key_values=cache, use_cache=True)
            times.append(seconds(step, model.device))
    return statistics.median(times[1:]) * 1e3


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
        if any("transformers_ms" in r for r in rows):
            peer = [r for r in rows if "transformers_ms" in r]
            ax.plot(
                [r["context"] for r in peer],
                [r["transformers_ms"] for r in peer],
                "^--",
                label="transformers",
            )
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


def table(args, model: Model, cfg: SFIConfig, tokens: list[int], token_text, ops, speed: float):
    """Print a row for every batch size and context; returns the rows.  speed: bytes a second."""
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
    rows = []
    for batch in args.batches:
        for context in args.contexts:
            if not fits(model, cfg, context, batch, args.steps):
                continue
            r = measure(model, cfg, context, batch, tokens, token_text, ops)
            r["floor_ms"] = 1e3 * (weights + batch * context * kv) / speed
            if args.peer and batch == 1 and context <= 32768:
                r["transformers_ms"] = transformers_ms(model, context)
            rows.append(r)
            cells = "".join(f"{r[name]:11.{0 if name.endswith('ms') else 2}f}" for name in columns)
            peer = f"   transformers {r['transformers_ms']:.0f}" if "transformers_ms" in r else ""
            print(f"{batch:6}{context:9}{cells}{peer}", flush=True)
    return rows


def main(argv=None):
    p = Parser("bench.py", "What dense, fast and slow steps cost, against what bytes alone allow.")
    add, number = p.add_argument, dict(type=int, metavar="N")
    add("--contexts", nargs="+", default=[2048, 8192, 32768, 65536, 131072], help="cached tokens", **number)
    add("--batches", nargs="+", default=[1, 4], help="rows; those that do not fit are left out", **number)
    add("--steps", default=150, help="tokens fed per row of the table", **number)
    add("--dtype", choices=["auto", *DTYPES], default="auto", help="of weights and cache")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda where there is one")
    add("--backend", choices=BACKENDS, default="auto", help="auto: triton on cuda, else reference")
    add("--check", action="store_true", help="kernels, decodes and speed of the optimized path, with a GPU")
    add("--exact", action="store_true", help="rounds of exact mode, batch 1, by how often drafts are right")
    add("--measured", type=Path, metavar="FILE.json", help="with --exact: also as exactness.py saw it")
    add("--rounds", default=12, help="with --exact: of each row", **number)
    add("--peer", action="store_true", help="also time transformers on the same weights, up to 32768 tokens")
    add("--out", type=Path, metavar="FILE", help="also write FILE.json and FILE.png")
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
        drawn = bench_exact.chances(args.measured)
        text = None if args.check else Text(checkpoints.resolve("smollm2"))
    except (ValueError, OSError) as e:
        p.error(str(e))
    if args.check:
        from study import gpu_check

        result = gpu_check.main(device, sys.modules[__name__]) | {"commit": commit()}
        if args.out:
            args.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(result))
        sys.exit(not all(row["error"] <= row["allowed"] for row in result["checks"]))
    torch.manual_seed(0)
    tokens = text.encode(story.story())[1000 : 1000 + args.steps]
    speed = bandwidth(device)
    model = random_model(ModelConfig.from_dict(QWEN3_06B), dtype, device)
    weights, kv = sum(q.nbytes for q in model.parameters()), model.config.kv_bytes(dtype)
    print(f"random weights of Qwen3-0.6B's size: {weights / 1e9:.2f} GB, {kv / 1e3:.0f} KB of cache a token")
    floor = f"{1e3 * weights / speed:.0f} ms a step + {1e6 * kv / speed:.1f} ms per 1,000 tokens read"
    print(f"this machine reads {speed / 1e9:.1f} GB/s: at least {floor}")
    if args.exact:
        more = tokens, text.token_text, ops, args.rounds
        rows = bench_exact.rows(sys.modules[__name__], model, args.contexts, drawn, *more)
    else:
        rows = table(args, model, cfg, tokens, text.token_text, ops, speed)
    result = {
        "model": "qwen3-0.6b (random weights)",
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "backend": ops.name,
        "bandwidth_gb_s": speed / 1e9,
        "rows": rows,
        "machine": machine(device),
        "torch": torch.__version__,
        "commit": commit(),
        "command": " ".join(["bench.py", *(argv if argv is not None else sys.argv[1:])]),
    }
    if args.out:
        args.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if not args.exact:
            draw(result, args.out.with_suffix(".png"))
    print(json.dumps(result))


def commit() -> str | None:
    """The commit of this checkout, None outside of one."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
    except FileNotFoundError:
        return None


def machine(device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = getattr(torch.cpu, "get_capabilities", dict)().get("cpu_name") or platform.processor()
    return f"{name}, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    main()
