"""`bench.py --check`: what only a GPU can show, in minutes and from this folder alone.

First whether the kernels equal the reference at real sizes and whole decodes give the same tokens, with and
without overlap and captured steps; then what they are worth: attention against a device copy, against the
share of tokens kept, and the steps of whole models.  Weights and caches are random.  Read before: `steps.py`,
`kernels.py`.
"""

import re
import statistics
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

import memory
import model
import selector
from command import story
from command.config import model_config
from command.machine import cache_bytes, check_memory
from exact import seconds
from memory import REFERENCE
from selector_kernels import KERNELS
from sfi import Engine, SFIConfig
from study.steps import QWEN3_06B, machine, measure, random_model

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


def check_attention(device, dtype, name, B, T, n_kv, G, D, slots, spans) -> list[dict]:
    """Output and scores of the kernel against the reference in fp32: errors at most twice those of the
    reference in `dtype`.  The caches are NaN outside of the rows' spans (start, length), the scores at first.
    """
    import kernels

    made = torch.full((2, B, n_kv, slots, D), float("nan"), dtype=dtype, device=device)
    start, length = torch.tensor(spans, device=device).T.contiguous()
    q = (4 * torch.randn(B, T, n_kv * G, D, device=device)).to(dtype)  # few tokens have most of the attention
    width, W = max(n for _, n in spans), min(T, 16)
    scores = torch.full((3, B, n_kv, G * W, width), float("nan"), device=device)
    exact = []
    for b, (first, n) in enumerate(spans):
        made[:, b, :, first : first + n] = torch.randn(2, n_kv, n, D, device=device).to(dtype)
        K, V = made[:, b : b + 1, :, first : first + n].float()
        row = slice(b, b + 1)
        exact.append(model.attend(q[row].float(), K, V, start[:1] * 0, length[row], scores[0, row])[0])
    exact, rows = torch.cat(exact), []
    outs = [m.attend(q, *made, start, length, scores[i])[0] for i, m in ((1, kernels), (2, model))]
    outs.append(kernels.attend(q, *made, start, length)[0])
    ours, plain, unscored = ((out.float() - exact).abs().max().item() for out in outs)
    rows.append({"check": name, "error": max(ours, unscored), "allowed": 2 * plain + 1e-5})
    ours, plain = ((s - scores[0]).nan_to_num(0).abs().max().item() for s in scores[1:])
    if not torch.equal(scores[1].isnan(), scores[0].isnan()):
        ours = float("nan")
    return [*rows, {"check": f"{name}: scores", "error": ours, "allowed": 2 * plain + 1e-3}]


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
        rows += check_attention(device, sizes.dtype, name, *case)
    recent_start, length = torch.tensor(
        [[n - n // 512, -1, n // 2], [n, n, n // 2 + n // 400]], device=device
    )
    for name in KERNELS:
        cfg = SFIConfig(selector=name, n_select=min(1536, n // 8))
        scores = 3 * torch.randn(3, h, 2, n, device=device)
        key_norm, past = torch.rand(2, 3, h, n, device=device) + 0.1
        past /= past.sum(-1, keepdim=True)
        args, both = (recent_start, cfg.n_select, cfg), (past.clone(), past.clone())
        want, got = (
            s.select(scores, key_norm, mine, *args) for s, mine in zip((selector, kernels), both, strict=True)
        )
        error = (both[0] - both[1]).abs().max().item()
        rows.append({"check": f"select, {name}: past", "error": error, "allowed": 1e-5})
        want, got = (s[[0, 2]].flatten(0, 1).tolist() for s in (want, got))
        same = [len(set(x) & set(y)) for x, y in zip(want, got, strict=True)]
        missed = 1 - statistics.mean(same) / cfg.n_select
        rows.append({"check": f"select, {name}: share missed", "error": missed, "allowed": 1e-3})
    n = max(n, far)
    cap = n // 64 + 16
    K, V = torch.randn(2, 3, h, cap + n, 128, dtype=sizes.dtype, device=device)
    copy = K.clone(), V.clone()
    slots = torch.rand(3, h, n // 2 - 4, device=device).topk(cap // 2).indices.sort(-1).values + 4
    memory.rebuild(K, V, slots, cap, 4, recent_start, length)
    kernels.rebuild(*copy, slots, cap, 4, recent_start, length)
    new = torch.randn(2, 3, 1, h, 128, device=device).to(sizes.dtype)
    at = torch.tensor([[n - 1, -1, 5], [cap - 1, -1, -1]], device=device)
    norm = torch.zeros(2, 3, h, n, device=device)
    memory.append(*new, K, V, norm[0], *at)
    kernels.append(*new, *copy, norm[1], *at)
    differ = sum((a != b).sum().item() for a, b in ((K, copy[0]), (V, copy[1])))
    rows.append({"check": "rebuild and append: elements that differ", "error": differ, "allowed": 0})
    error = (norm[0] - norm[1]).abs().max().item()
    return [*rows, {"check": "append: key norms", "error": error, "allowed": 1e-4}]


def check_decodes(device, sizes: Sizes) -> list[dict]:
    """The reference decodes unequal rows in fp32, with mixed steps; then every variant is fed its tokens.
    Logits of the kernels may differ a little, as where two tokens are nearly as good another may be selected;
    with overlap or captured steps off they must be the same bit for bit.
    """
    import kernels

    cuda = device.type == "cuda"
    config = model_config(QWEN3_06B | dict(sizes.base))
    config = replace(config, num_hidden_layers=sizes.layers)
    texts = pieces(10**6)[1]
    lm, rows = random_model(config, torch.float32, device), []
    prompts = [[(7 * i + b) % config.vocab_size for i in range(n)] for b, n in enumerate(sizes.prompts)]
    size = dict(batch=len(prompts), max_length=max(sizes.prompts) + sizes.new, new_tokens=sizes.new)
    variants = {"triton": kernels.triton_ops(cuda)}
    if cuda:
        variants["no overlap"] = kernels.triton_ops(cuda, overlap=False)
        variants["no graphs"] = kernels.triton_ops(cuda, graphs=False)
    for name in KERNELS:
        budget = dict(n_select=sizes.n_select, n_recent=sizes.n_recent, n_evidence=min(16, sizes.n_recent))
        cfg = SFIConfig(**budget, max_interval=24, min_gap=4, selector=name)
        start = lambda ops, cfg=cfg: Engine(lm, cfg, lambda i: texts[i % len(texts)], ops=ops, **size)
        engine = start(REFERENCE)
        want = [torch.cat([engine.prefill(b, prompt)[0] for b, prompt in enumerate(prompts)])]
        tokens, mixed = [engine.pick(want[0])], 0
        for _ in range(sizes.new):
            logits, did = engine.step(tokens[-1])
            mixed += len({row_step.refresh for row_step in did}) == 2
            want.append(logits)
            tokens.append(engine.pick(logits))
        rows.append({"check": f"decode, {name}: no step is mixed", "error": int(mixed == 0), "allowed": 0})
        made = {"reference": want}
        for label, ops in variants.items():
            engine = start(ops)
            made[label] = [torch.cat([engine.prefill(b, prompt)[0] for b, prompt in enumerate(prompts)])]
            made[label] += [engine.step(fed)[0] for fed in tokens[:-1]]
        for label in variants:
            other, allowed = ("reference", 1e-2) if label == "triton" else ("triton", 0)
            error = max((a - b).abs().max().item() for a, b in zip(made[label], made[other], strict=True))
            rows.append({"check": f"decode, {name}: {label}, {other}", "error": error, "allowed": allowed})
    return rows


def in_a_row(work, device, times=20) -> float:
    """Seconds of one of `times` calls; on a GPU they are one graph, so that no launch is timed.  What fits
    the GPU's cache, such as a small share, is then read from there.
    """
    if device.type != "cuda":
        return seconds(work, device)
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            work()
    graph.replay()
    return seconds(graph.replay, device) / times


def attention_speed(device, sizes: Sizes) -> dict:
    """Attention: share of the copy bandwidth by length, batch 8, and how much faster it is by share kept."""
    import kernels

    some = lambda work: statistics.median(in_a_row(work, device) for _ in range(sizes.repeats))
    x = torch.empty(8192 * sizes.length, dtype=torch.int8, device=device)  # 1 GiB
    y = torch.empty_like(x)
    copy = 2 * x.nbytes / some(lambda: y.copy_(x))

    def timed(n, B, slots, attend):
        made = torch.randn(2, B, sizes.n_kv, slots, 128, device=device).to(sizes.dtype)
        q = torch.randn(B, 1, 2 * sizes.n_kv, 128, device=device).to(sizes.dtype)
        start, length = torch.zeros(B, dtype=torch.int64, device=device), torch.full((B,), n, device=device)
        return some(lambda: attend(q, *made, start, length)), made[..., :n, :].numel() * made.itemsize

    def sdpa(q, K, V, start, length):
        return F.scaled_dot_product_attention(q.transpose(1, 2), K, V, enable_gqa=True)

    rows = []
    for n in sizes.speed:
        (ours, read), (torch_s, _) = timed(n, sizes.batch, n, kernels.attend), timed(n, sizes.batch, n, sdpa)
        speed = {"gb_s": read / ours / 1e9, "of_copy": read / ours / copy}
        rows.append({"tokens": n, "ms": 1e3 * ours, "sdpa_ms": 1e3 * torch_s, **speed})
    n, B = sizes.kept_of
    whole, _ = timed(n, B, n, kernels.attend)
    kept = {share: whole / timed(round(n * share), B, n, kernels.attend)[0] for share in sizes.shares}
    return {"copy_gb_s": copy / 1e9, "attention": rows, "faster_by_share_kept": kept}


def main(device, sizes=Sizes()) -> dict:
    """All of it, printed as it comes."""
    from kernels import triton_ops

    cuda, result = device.type == "cuda", {"machine": machine(device), "torch": torch.__version__}
    result["checks"] = check_kernels(device, sizes) + check_decodes(device, sizes)
    for row in result["checks"]:
        verdict = "ok" if row["error"] <= row["allowed"] else "WRONG"
        print(f"{verdict:6}{row['check']:64}{row['error']:12.3g} of {row['allowed']:.3g}", flush=True)
    result |= attention_speed(device, sizes)
    print(f"copy: {result['copy_gb_s']:.0f} GB/s")
    for row in result["attention"]:
        print(
            "attention over {tokens}: {ms:.3f} ms, {of_copy:.0%} of a copy; SDPA {sdpa_ms:.3f} ms".format(
                **row
            )
        )
    print("faster by share kept:", {k: round(v, 1) for k, v in result["faster_by_share_kept"].items()})
    ids, texts = pieces(sizes.steps)
    sizes_of = {"0.6b": QWEN3_06B | dict(sizes.base), "4b": QWEN3_06B | QWEN3_4B}
    result["rows"] = []
    names = ("dense_ms", "fast_ms", "slow_ms", "gather_ms", "speedup", "byte_speedup")
    print(f"{'model':>6}{'batch':>6}{'tokens':>8}" + "".join(f"{name:>14}" for name in names))
    lm, loaded = None, None
    for name, batch in sizes.models:
        if name != loaded:
            lm, loaded = None, name
            config = model_config(sizes_of[name])
            lm = random_model(config, sizes.dtype, device)
        for context in sizes.contexts:
            length = dict(max_length=context + len(ids), new_tokens=len(ids))
            try:
                need = cache_bytes(config, sizes.cfg, batch=batch, dtype=sizes.dtype, **length)
                check_memory(0, need, device)
            except ValueError as e:
                print(f"{name:>6}{batch:6}{context:8}   left out: {str(e).split(';')[0]}")
                continue
            row = measure(lm, sizes.cfg, context, batch, ids, texts.__getitem__, triton_ops(cuda))
            result["rows"].append({"model": name} | row)
            cells = "".join(f"{row[key]:14.2f}" for key in names)
            print(f"{name:>6}{batch:6}{context:8}{cells}", flush=True)
    return result
