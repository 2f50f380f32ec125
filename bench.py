"""What a decode step costs: dense, fast and slow steps and the whole loop, against what bytes alone allow.

    python bench.py --contexts 8192 32768 --dtype bfloat16

The model has Qwen3-0.6B's size with random weights, and the cache is random too: fine for seconds,
meaningless as text.  The schedule is real: the trigger reads the built-in text, token by token, because
random tokens almost never end a sentence.  Dense and SFI steps alternate in one process.  Prints a table, one
JSON line last.  Read before: `sfi.py`.
"""

import copy
import json
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

import checkpoints
import story
from checks import choose_device, choose_dtype
from generate import Parser
from model import DTYPES, Model, ModelConfig, inverse_frequencies
from sfi import Engine, SFIConfig
from text import Text

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


def measure(model: Model, cfg: SFIConfig, context: int, tokens: list[int], token_text) -> dict:
    """Alternate dense and SFI steps over a random cache of `context` tokens; times in milliseconds."""
    device = model.device
    engine = Engine(model, cfg, token_text, max_length=context + len(tokens), new_tokens=len(tokens))
    for layer in range(model.config.num_hidden_layers):
        engine.cache.k[layer].normal_()
        engine.cache.v[layer].normal_()
        engine.key_norm[layer] = engine.cache.k[layer, :, :, engine.cap :].float().norm(dim=-1)
    engine.rows[0].length = context
    dense = copy.copy(engine)  # the same cache, with other rows and another policy
    dense.cfg, dense.rows = replace(cfg, policy="dense"), copy.deepcopy(engine.rows)
    times, visible = {"dense": [], "fast": [], "slow": []}, []
    for i, token in enumerate(tqdm(tokens, desc=f"{context} tokens", leave=False, disable=None)):
        times["dense"].append(seconds(lambda token=token: dense.step([token]), device))
        parts = []
        spent = seconds(lambda token=token, parts=parts: parts.extend(engine.step([token])[1]), device)
        if i == 0:  # warm-up, and the first refresh, which the prefill would have done
            times["dense"].clear()
            continue
        times["fast" if parts[0].reason == "fast" else "slow"].append(spent)
        if parts[0].reason == "fast":
            visible.append(parts[0].visible)
    median = {name: statistics.median(t) * 1e3 for name, t in times.items()}
    n_fast, n_slow = len(times["fast"]), len(times["slow"])
    loop = (n_fast * median["fast"] + n_slow * median["slow"]) / (n_fast + n_slow)
    interval = (n_fast + n_slow) / n_slow
    weights, kv = sum(p.nbytes for p in model.parameters()), model.config.kv_bytes(model.dtype)
    seen = statistics.mean(visible)
    per_token = weights + ((interval - 1) * seen + context) * kv / interval
    spread = {
        name: [round(1e3 * q, 2) for q in statistics.quantiles(t, n=4)]
        for name, t in times.items()
        if len(t) > 1
    }
    return {
        "context": context,
        "batch": 1,
        "visible": seen,
        "dense_ms": median["dense"],
        "fast_ms": median["fast"],
        "slow_ms": median["slow"],
        "loop_ms_per_token": loop,
        "mean_interval": interval,
        "speedup": median["dense"] / loop,
        "byte_speedup": (weights + context * kv) / per_token,
        "quartiles_ms": spread,
    }


def main(argv=None):
    p = Parser("bench.py", "What dense, fast and slow steps cost, against what bytes alone allow.")
    p.add_argument(
        "--contexts", type=int, nargs="+", default=[8192, 32768], metavar="N", help="cached tokens"
    )
    p.add_argument("--steps", type=int, default=150, metavar="N", help="tokens fed per context")
    p.add_argument("--dtype", choices=["auto", *DTYPES], default="auto", help="of weights and cache")
    p.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda where there is one"
    )
    p.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON here")
    args = p.parse_args(argv)
    cfg = SFIConfig()
    try:
        if args.steps < 2 * cfg.max_interval or min(args.contexts) < 2 * cfg.n_select:
            least = f"{2 * cfg.max_interval} steps and contexts of {2 * cfg.n_select} tokens"
            raise ValueError(
                f"--steps {args.steps} --contexts {min(args.contexts)}; allowed are at least {least}"
            )
        device = choose_device(args.device)
        dtype = choose_dtype(args.dtype, device)
        text = Text(checkpoints.resolve("smollm2"))
    except ValueError as e:
        p.error(str(e))
    torch.manual_seed(0)
    tokens = text.encode(story.story())[1000 : 1000 + args.steps]
    speed = bandwidth(device)
    model = random_model(ModelConfig.from_dict(QWEN3_06B), dtype, device)
    weights, kv = sum(q.nbytes for q in model.parameters()), model.config.kv_bytes(dtype)
    print(f"random weights of Qwen3-0.6B's size: {weights / 1e9:.2f} GB, {kv / 1e3:.0f} KB of cache a token")
    floor = f"{1e3 * weights / speed:.0f} ms a step + {1e6 * kv / speed:.1f} ms per 1,000 tokens read"
    print(f"this machine reads {speed / 1e9:.1f} GB/s: at least {floor}")
    names = ("dense", "fast", "slow", "loop", "interval", "speedup", "by bytes")
    print(f"{'context':>8}" + "".join(f"{name:>9}" for name in names) + "   (ms a token)")
    rows = []
    for context in args.contexts:
        r = measure(model, cfg, context, tokens, text.token_text)
        rows.append(r)
        ms = [r["dense_ms"], r["fast_ms"], r["slow_ms"], r["loop_ms_per_token"]]
        ratios = [r["mean_interval"], r["speedup"], r["byte_speedup"]]
        print(
            f"{context:8}" + "".join(f"{x:9.0f}" for x in ms) + "".join(f"{x:9.2f}" for x in ratios),
            flush=True,
        )
    result = {
        "model": "qwen3-0.6b (random weights)",
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "bandwidth_gb_s": speed / 1e9,
        "rows": rows,
        "machine": machine(device),
        "torch": torch.__version__,
        "commit": commit(),
        "command": " ".join(["bench.py", *(argv if argv is not None else sys.argv[1:])]),
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
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
