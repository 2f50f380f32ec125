"""What the benchmarks share: a random model and cache of real size, the steps they time, the machine's facts.

Read before: `sfi.py`; used by `bench.py`, `bench_exact.py`, `gpu_check.py`.
"""

import copy
import platform
import statistics
import subprocess
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from command.machine import cache_bytes, check_memory
from command.timing import dense_step
from exact import seconds
from model import Model, ModelConfig, inverse_frequencies
from sfi import Engine, SFIConfig

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
            out, _ = engine.cache.ops.attend(q, K, V, start, length)
        return out

    inputs = [torch.full((B,), n, device=device) for n in (engine.cache.cap, length)]
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
        engine.cache.key_norm[layer] = engine.cache.k[layer, :, :, engine.cache.cap :].float().norm(dim=-1)
    for row in engine.rows:
        row.tokens = [0] * context
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


def gathering_engine(engine: Engine, context: int) -> Engine:
    """The same engine and cache, but fast steps gather what they read, as many tokens as a fast step sees."""
    c, cfg, device = engine.model.config, engine.cfg, engine.model.device
    seen = cfg.n_sink + cfg.n_select + cfg.n_recent + (cfg.align + cfg.max_interval) // 2
    places = torch.rand(c.num_key_value_heads, context, device=device).topk(min(seen, context)).indices
    gather = copy.copy(engine)
    gather.cache, ops = copy.copy(engine.cache), engine.cache.ops
    positions = places.sort(-1).values + engine.cache.cap
    gather.cache.ops = ops._replace(attend=gathering(positions, ops.attend))
    gather.cfg = replace(cfg, policy="never")  # a fast step, whatever the token says
    return gather


def measure(
    model: Model, cfg: SFIConfig, context: int, batch: int, tokens: list[int], token_text, ops, others=None
) -> dict:
    """Alternate SFI steps over a random cache of `context` tokens with dense and gathering ones, and with
    `others` by name; milliseconds a step of the whole batch.
    """
    others = others or {}
    device, new = model.device, len(tokens)
    sizes = dict(batch=batch, max_length=context + new, new_tokens=new)
    engine = filled(Engine(model, cfg, token_text, ops=ops, **sizes), context)
    gather = gathering_engine(engine, context)
    times = {name: [] for name in ("dense", "fast", "slow", "gather", *others)}
    visible = []

    def timed(name, step):
        times[name].append(seconds(step, device))

    for i, token in enumerate(tqdm(tokens, desc=f"{context} tokens", leave=False, disable=None)):
        if i % 5 == 1:
            timed("dense", lambda: dense_step(engine, [row.length for row in engine.rows]))
            gather.rows = copy.deepcopy(engine.rows)
            if all(row.memory and row.since < cfg.max_interval for row in gather.rows):
                timed("gather", lambda: gather.step([0] * batch))
            for name, step in others.items():
                timed(name, step)
        did = []
        timed("fast", lambda token=token, did=did: did.extend(engine.step([token] * batch)[1]))
        if i == 0:  # warm-up, and the first refresh, which the prefill would have done
            times["fast"].clear()
        elif did[0].reason == "fast":
            visible.append(did[0].visible)
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
