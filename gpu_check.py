"""`bench.py --check`: what only a GPU can show, in minutes and from this folder alone.

First whether the kernels equal the reference at real sizes and whole decodes give the same tokens, with and
without overlap and captured steps; then what they are worth: attention against a device copy, against the
share of tokens kept, and the steps of whole models.  Weights and caches are random.  Read before: `bench.py`,
`kernels.py`.
"""

import re
import statistics
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

import model
import selector
import sfi
import story
from model import ModelConfig
from sfi import REFERENCE, Engine, SFIConfig

DEFAULT = SFIConfig()


@dataclass(frozen=True)
class Sizes:
    """How large the checks are; the defaults are the real ones."""

    dtype: torch.dtype = torch.bfloat16
    cfg: SFIConfig = DEFAULT
    base: tuple = ()  # what differs from the 0.6B, in pairs
    repeats: int = 9  # of what is timed
    n_kv: int = 8  # KV heads of single kernels
    length: int = 131072  # tokens of the longest row
    far: int = 1 << 31  # an element beyond which 32-bit offsets would wrap
    layers: int = 4  # of the model that decodes
    prompts: tuple = (3000, 1700, 2400)
    new: int = 100
    n_select: int = 256
    n_recent: int = 64
    speed: tuple = (32768, 131072)  # tokens of the attention against a copy
    batch: int = 8  # there
    shares: tuple = (0.016, 0.063, 0.125, 0.25, 0.5)  # kept of kept_of tokens
    kept_of: tuple = (16384, 16)  # tokens, batch
    contexts: tuple = (8192, 32768, 131072)
    models: tuple = (("0.6b", 1), ("0.6b", 4), ("0.6b", 8), ("4b", 1), ("4b", 4))  # size, batch
    steps: int = 130


QWEN3_4B = dict(
    hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32
)  # what differs from the 0.6B


def pieces(n: int) -> tuple[list[int], list[str]]:
    """The built-in text as tokens of up to five letters, for the trigger: no tokenizer has to travel."""
    texts = re.findall(r"\s?\w{1,5}|\W", story.story())[:n]
    return list(range(len(texts))), texts


def attention_error(device, dtype, B, T, n_kv, G, D, slots, spans) -> tuple[float, float]:
    """Largest errors of the kernel and of the reference in `dtype`, against the reference in fp32; the caches
    are NaN outside of the spans (start, length) of the rows.
    """
    import kernels

    made = torch.full((2, B, n_kv, slots, D), float("nan"), dtype=dtype, device=device)
    start, length = torch.tensor(spans, device=device).T.contiguous()
    q, exact = torch.randn(B, T, n_kv * G, D, device=device).to(dtype), []
    for b, (first, n) in enumerate(spans):
        made[:, b, :, first : first + n] = torch.randn(2, n_kv, n, D, device=device).to(dtype)
        K, V = made[:, b : b + 1, :, first : first + n].float()
        exact.append(model.attend(q[b : b + 1].float(), K, V, start[:1] * 0, length[b : b + 1])[0])
    exact = torch.cat(exact)
    error = lambda attend: (attend(q, *made, start, length)[0].float() - exact).abs().max().item()
    return error(kernels.attend), error(model.attend)


def check_kernels(device, sizes: Sizes) -> list[dict]:
    """Each kernel against the reference: name, error, the error allowed."""
    import kernels

    torch.manual_seed(0)
    n, h, rows = sizes.length, sizes.n_kv, []
    far = -(-sizes.far // (2 * sizes.n_kv * 128))  # slots that put row 2 beyond it
    cases = [
        ("attend, decode", (2, 1, h, 2, 128, n + n // 64, [(n // 64, n), (0, n // 72)])),
        ("attend, prefill", (1, min(512, n // 16), h, 2, 128, n, [(0, n)])),
        ("attend, groups of 5, D 80", (3, 1, 2, 5, 80, n // 2, [(0, n // 2), (0, 1), (7, n // 4 + 1)])),
        ("attend, far offsets", (3, 1, h, 2, 128, far + 200, [(0, 64), (3, 1), (far, 200)])),
    ]
    for name, case in cases:
        ours, plain = attention_error(device, sizes.dtype, *case)
        rows.append({"check": name, "error": ours, "allowed": 2 * plain + 1e-4})
    high, length = torch.tensor([[n - n // 512, -1, n // 2], [n, n, n // 2 + n // 400]], device=device)
    for name in ("follow", "paper"):
        cfg = SFIConfig(selector=name, n_select=min(1536, n // 8))
        scores = 3 * torch.randn(3, h, 2, n, device=device)
        key_norm, past = torch.rand(2, 3, h, n, device=device) + 0.1
        past /= past.sum(-1, keepdim=True)
        args = high, cfg.n_select, cfg
        want, got = (s.select(scores, key_norm, past.clone(), *args) for s in (selector, kernels))
        want, got = (s[[0, 2]].flatten(0, 1).tolist() for s in (want, got))
        same = [len(set(x) & set(y)) for x, y in zip(want, got, strict=True)]
        missed = 1 - statistics.mean(same) / cfg.n_select
        rows.append({"check": f"select, {name}: share missed", "error": missed, "allowed": 1e-3})
    cap = n // 64 + 16
    K, V = torch.randn(2, 3, h, cap + n, 128, device=device).to(sizes.dtype)
    copy = K.clone(), V.clone()
    slots = torch.rand(3, h, n // 2 - 4, device=device).topk(cap // 2).indices.sort(-1).values + 4
    sfi.rebuild(K, V, slots, cap, 4, high, length)
    kernels.rebuild(*copy, slots, cap, 4, high, length)
    new = torch.randn(2, 3, 1, h, 128, device=device).to(sizes.dtype)
    at = torch.tensor([[n - 1, -1, 5], [cap - 1, -1, -1]], device=device)
    norm = torch.zeros(2, 3, h, n, device=device)
    sfi.append(*new, K, V, norm[0], *at)
    kernels.append(*new, *copy, norm[1], *at)
    differ = sum((a != b).sum().item() for a, b in ((K, copy[0]), (V, copy[1])))
    rows.append({"check": "rebuild and append: elements that differ", "error": differ, "allowed": 0})
    error = (norm[0] - norm[1]).abs().max().item()
    return [*rows, {"check": "append: key norms", "error": error, "allowed": 1e-4}]


def check_decodes(device, sizes: Sizes, make) -> list[dict]:
    """Whole decodes of unequal rows in fp32, mixed steps: tokens that differ from the reference's, and with
    overlap and captured steps on and off from each other's.
    """
    import kernels

    cuda = device.type == "cuda"
    config = ModelConfig.from_dict(make.QWEN3_06B | dict(sizes.base))
    config = replace(config, num_hidden_layers=sizes.layers)
    texts = pieces(10**6)[1]
    token_text = lambda token: texts[token % len(texts)]
    lm = make.random_model(config, torch.float32, device)
    prompts = [[(7 * i + b) % config.vocab_size for i in range(n)] for b, n in enumerate(sizes.prompts)]
    rows = []
    for name in ("follow", "paper"):
        budget = dict(n_select=sizes.n_select, n_recent=sizes.n_recent, n_evidence=min(16, sizes.n_recent))
        cfg = SFIConfig(**budget, max_interval=24, min_gap=4, selector=name)
        made = {}
        variants = {"reference": REFERENCE, "triton": kernels.triton_ops(cuda)}
        if cuda:
            variants["no overlap"] = kernels.triton_ops(cuda, overlap=False)
            variants["no graphs"] = kernels.triton_ops(cuda, graphs=False)
        for label, ops in variants.items():
            size = dict(batch=len(prompts), max_length=max(sizes.prompts) + sizes.new, new_tokens=sizes.new)
            engine = Engine(lm, cfg, token_text, ops=ops, **size)
            steps = sfi.decode(engine, prompts, max_new_tokens=sizes.new)
            made[label] = [(step.tokens, [part.reason for part in step.parts]) for step in steps]
        for other in [name for name in made if name != "reference"]:
            label = "reference" if other == "triton" else "triton"
            differ = sum(a != b for a, b in zip(made[label], made[other], strict=True))
            rows.append({"check": f"decode, {name}, {other} / {label}: steps that differ", "error": differ})
    return [row | {"allowed": 0} for row in rows]


def attention_speed(device, sizes: Sizes, seconds) -> dict:
    """Attention: share of the copy bandwidth by length, batch 8, and how much faster it is by share kept."""
    import kernels

    some = lambda work: statistics.median(seconds(work, device) for _ in range(sizes.repeats))
    x = torch.empty(8192 * sizes.length, dtype=torch.int8, device=device)  # 1 GiB
    y = torch.empty_like(x)
    some(lambda: y.copy_(x))
    copy = 2 * x.nbytes / some(lambda: y.copy_(x))

    def timed(n, B, slots, attend):
        made = torch.randn(2, B, sizes.n_kv, slots, 128, device=device).to(sizes.dtype)
        q = torch.randn(B, 1, 2 * sizes.n_kv, 128, device=device).to(sizes.dtype)
        start, length = torch.zeros(B, dtype=torch.int64, device=device), torch.full((B,), n, device=device)
        work = lambda: attend(q, *made, start, length)
        some(work)
        return some(work), made[..., :n, :].numel() * made.itemsize

    def sdpa(q, K, V, start, length):
        n = int(length[0])
        return F.scaled_dot_product_attention(q.transpose(1, 2), K[:, :, :n], V[:, :, :n], enable_gqa=True)

    rows = []
    for n in sizes.speed:
        (ours, read), (torch_s, _) = timed(n, sizes.batch, n, kernels.attend), timed(n, sizes.batch, n, sdpa)
        speed = {"gb_s": read / ours / 1e9, "of_copy": read / ours / copy}
        rows.append({"tokens": n, "ms": 1e3 * ours, "sdpa_ms": 1e3 * torch_s, **speed})
    n, B = sizes.kept_of
    whole, _ = timed(n, B, n, kernels.attend)
    kept = {share: whole / timed(round(n * share), B, n, kernels.attend)[0] for share in sizes.shares}
    return {"copy_gb_s": copy / 1e9, "attention": rows, "faster_by_share_kept": kept}


def main(device, make, sizes=Sizes()) -> dict:
    """All of it, printed as it comes; `make` is the bench module."""
    from kernels import triton_ops

    cuda, result = device.type == "cuda", {"machine": make.machine(device), "torch": torch.__version__}
    result["checks"] = check_kernels(device, sizes) + check_decodes(device, sizes, make)
    for row in result["checks"]:
        verdict = "ok" if row["error"] <= row["allowed"] else "WRONG"
        print(f"{verdict:6}{row['check']:64}{row['error']:12.3g} of {row['allowed']:.3g}", flush=True)
    result |= attention_speed(device, sizes, make.seconds)
    print(f"copy: {result['copy_gb_s']:.0f} GB/s")
    for row in result["attention"]:
        print(
            "attention over {tokens}: {ms:.3f} ms, {of_copy:.0%} of a copy; SDPA {sdpa_ms:.3f} ms".format(
                **row
            )
        )
    print("faster by share kept:", {k: round(v, 1) for k, v in result["faster_by_share_kept"].items()})
    ids, texts = pieces(sizes.steps)
    sizes_of = {"0.6b": make.QWEN3_06B | dict(sizes.base), "4b": make.QWEN3_06B | QWEN3_4B}
    result["rows"] = []
    names = ("dense_ms", "fast_ms", "slow_ms", "gather_ms", "speedup", "byte_speedup")
    print(f"{'model':>6}{'batch':>6}{'tokens':>8}" + "".join(f"{name:>14}" for name in names))
    lm, loaded = None, None
    for name, batch in sizes.models:
        if name != loaded:
            lm, loaded = None, name
            config = ModelConfig.from_dict(sizes_of[name])
            lm = make.random_model(config, sizes.dtype, device)
        for context in sizes.contexts:
            row = make.measure(lm, sizes.cfg, context, batch, ids, texts.__getitem__, triton_ops(cuda))
            result["rows"].append({"model": name} | row)
            cells = "".join(f"{row[key]:14.2f}" for key in names)
            print(f"{name:>6}{batch:6}{context:8}{cells}", flush=True)
    return result
