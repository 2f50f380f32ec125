"""Every backend against the reference: each operation on its own, then whole decodes.

A new backend is one more entry in `BACKENDS` below; all tests that take `backend` then hold it.  The Triton
kernels run on a GPU where there is one, else in Triton's interpreter, in fp32, because its bfloat16 is not
exact.
"""

import copy
import sys
from dataclasses import replace

import pytest
import torch

import cpu
import model
import selector
from command.machine import choose_backend
from loops import LOOPS
from memory import REFERENCE
from sampling import Sampling
from sfi import SFIConfig
from tests.naive import CONFIGS
from tests.tiny import SMALL, decoded, prompt

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # log(0) is -inf, meant so
GPU = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = {"cpu": "cpu", "cpu without Numba": "cpu", "triton": GPU}  # name -> the device it is tested on
NAN = float("nan")


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    """(operations, device)"""
    device = BACKENDS[request.param]
    if request.param == "cpu without Numba":
        monkeypatch.setitem(sys.modules, "loops", None)
        return choose_backend("auto", torch.device(device), SFIConfig(), quiet=True), device
    if request.param == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")
    ops = choose_backend(request.param, torch.device(device), SFIConfig())
    assert ops.name == request.param
    return ops, device


def caches(B, n_kv, slots, D, spans, dtype=torch.float32):
    """K and V (B, n_kv, slots, D) that are NaN outside of every row's (start, length)."""
    made = torch.full((2, B, n_kv, slots, D), NAN, dtype=dtype)
    for b, (start, length) in enumerate(spans):
        made[:, b, :, start : start + length] = torch.randn(2, n_kv, length, D)
    return made


def equal(got, want, atol=1e-5):
    torch.testing.assert_close(got, want, atol=atol, rtol=0, equal_nan=True)


GRID = [  # B, T, n_kv, G, D, spans
    (2, 1, 3, 2, 128, [(0, 1), (37, 17)]),
    (2, 1, 2, 5, 80, [(3, 129), (0, 0)]),
    (1, 1, 3, 16, 64, [(5, 200)]),
    (2, 1, 2, 1, 96, [(0, 31), (2, 33)]),
    (3, 4, 2, 3, 64, [(1, 4), (0, 0), (7, 65)]),
    (1, 19, 2, 2, 64, [(11, 70)]),
    (1, 2, 1, 16, 128, [(0, 18)]),
]


@pytest.mark.parametrize("B, T, n_kv, G, D, spans", GRID)
def test_attend(backend, B, T, n_kv, G, D, spans):
    """Poisoned caches and buffers: only what a row reads counts, and what it does not write stays.  Scores of
    some of the queries, of all, and none.
    """
    torch.manual_seed(0)
    ops, device = backend
    q, (K, V) = torch.randn(B, T, n_kv * G, D).to(device), caches(B, n_kv, 240, D, spans).to(device)
    start, length = torch.tensor(spans, device=device).T.contiguous()
    for W in {min(T, 3), T}:
        scores = torch.full((2, B, n_kv, G * W, 211), NAN, device=device)
        want, _ = model.attend(q, K, V, start, length, scores[0])
        got, returned = ops.attend(q, K, V, start, length, scores[1])
        equal(got, want)
        equal(scores[1], scores[0], 1e-4)
        assert returned is not None
    equal(ops.attend(q, K, V, start, length)[0], want)


@pytest.mark.parametrize("T", [1, 3, 8, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attend_on_a_cpu_over_several_blocks(T, dtype):
    """Longer than what is widened at a time; in half precision at most twice PyTorch's own error."""
    torch.manual_seed(0)
    spans = [(7, 2 * cpu.BLOCK + 5), (0, cpu.BLOCK)]
    q, (K, V) = torch.randn(2, T, 6, 64).to(dtype), caches(2, 2, 5000, 64, spans, dtype)
    start, length = torch.tensor(spans).T.contiguous()
    scores = torch.full((2, 2, 2, 3 * T, 5000), NAN)
    exact, _ = model.attend(q.float(), K.float(), V.float(), start, length, scores[0])
    got, _ = cpu.attend(q, K, V, start, length, scores[1])
    equal(scores[1], scores[0], 1e-4)
    error = lambda out: (out.float() - exact).abs().max().item()
    plain = torch.nn.functional.scaled_dot_product_attention
    whole = [x[1:, :, : cpu.BLOCK].repeat_interleave(3, dim=1) for x in (K, V)]
    mask = torch.ones(T, cpu.BLOCK, dtype=torch.bool).tril(cpu.BLOCK - T)
    rounding = (plain(q[1:].transpose(1, 2), *whole, attn_mask=mask).transpose(1, 2) - exact[1:]).abs().max()
    assert error(got) <= 2 * rounding.item() + 1e-5


def test_attend_in_half_precision():
    """At most twice the error of the same in plain PyTorch.  (The interpreter's bfloat16 is wrong.)"""
    pytest.importorskip("triton", reason="Triton is not installed")
    import kernels

    torch.manual_seed(0)
    spans = [(3, 150), (0, 70)]
    K, V = caches(2, 2, 160, 64, spans, torch.float16).to(GPU)
    q, (start, length) = torch.randn(2, 1, 6, 64, device=GPU).half(), torch.tensor(spans, device=GPU).T
    start, length = start.contiguous(), length.contiguous()
    exact = model.attend(q.float(), K.float(), V.float(), start, length)[0]
    ours = kernels.attend(q, K, V, start, length)[0].float()
    plain = cpu.attend(*(x.cpu() for x in (q, K, V, start, length)))[0].float().to(GPU)
    assert (ours - exact).abs().max() <= 2 * (plain - exact).abs().max()


def test_append(backend):
    torch.manual_seed(0)
    ops, device = backend
    k, v = torch.randn(2, 4, 2, 3, 80, device=device)  # (B, T, n_kv, D)
    position, slot = torch.tensor([[5, 0, -1, 18], [-1, 7, -1, 0]], device=device)
    made = []
    for append in (REFERENCE.append, ops.append):
        K, V = torch.full((2, 4, 3, 10 + 20, 80), NAN, device=device)
        norm = torch.full((4, 3, 20), NAN, device=device)
        append(k, v, K, V, norm, position, slot)
        made.append((K, V, norm))
    for got, want in zip(*made, strict=True):
        equal(got, want)


@pytest.mark.parametrize("n_sink, N", [(2, 7), (0, 3), (4, 0)])
def test_rebuild(backend, n_sink, N):
    torch.manual_seed(0)
    ops, device = backend
    K, V = torch.randn(2, 3, 2, 50 + 90, 80, device=device)
    slots = torch.rand(3, 2, 40).topk(N).indices.sort(-1).values.to(device) + n_sink
    recent_start, length = torch.tensor([[60, -1, 44], [81, 90, 45]], device=device)
    other = K.clone(), V.clone()
    REFERENCE.rebuild(K, V, slots, 50, n_sink, recent_start, length)
    ops.rebuild(*other, slots, 50, n_sink, recent_start, length)
    assert torch.equal(other[0], K) and torch.equal(other[1], V)


def without(name, step):
    return dict(selector=name, steps=tuple(s for s in selector.SELECTORS[name].steps if s != step))


CHOICES = [
    dict(),
    dict(selector="paper"),
    dict(selector="paper", fusion="geometric"),
    dict(selector="paper", steps=()),
    *(without(name, step) for name, some in selector.SELECTORS.items() for step in some.steps),
]
SHAPES = [("follow", 1, 290, 60), ("follow", 19, 130, 50), ("paper", 1, 130, 50)]  # R, width, n


@pytest.mark.parametrize(
    "choice, R, width, n",
    [(choice, 2, 300, 7) for choice in CHOICES] + [(dict(selector=name), *shape) for name, *shape in SHAPES],
    ids=lambda c: "-".join(map(str, c.values())) or "default" if isinstance(c, dict) else str(c),
)
def test_select(backend, choice, R, width, n, monkeypatch):
    """Rows with their own candidates, in two blocks of the kernels, one row left alone.  Sets may differ only
    where scores are as good as equal.
    """
    (ops, device), cfg = backend, SFIConfig(n_sink=3, **choice)
    if ops.name == "triton":
        import selector_kernels

        if reason := selector_kernels.unsupported(cfg):
            pytest.skip(reason)
        monkeypatch.setattr(selector_kernels, "CHUNK", 256)
    torch.manual_seed(0)
    key_norm = (torch.rand(3, 3, width + 9) + 0.5).to(device)
    scores = 3 * torch.randn(3, 3, R, width).to(device)
    recent_start = torch.tensor([width - 8, -1, n + 33], device=device)
    past = torch.rand(3, 3, width + 9).to(device)
    past = torch.stack([past / past[..., 3:300].sum(-1, keepdim=True)] * 2)
    past[:, 2] = 0  # as before the first refresh
    slots = [
        select(scores, key_norm, remembered, recent_start, n, cfg)
        for select, remembered in zip((REFERENCE.select, ops.select), past, strict=True)
    ]
    equal(past[1], past[0], 1e-6)
    for b in (0, 2):
        assert (slots[1][b].diff(dim=-1) > 0).all()
        assert slots[1][b].min() >= 3 and slots[1][b].max() < recent_start[b]
        missed = sum(len(set(x) - set(y)) for x, y in zip(*(s[b].tolist() for s in slots), strict=True))
        assert missed <= 1, "more than one near-tie"


def test_linear(backend):
    torch.manual_seed(0)
    ops, device = backend
    weight, bias = torch.randn(60, 48).to(device), torch.randn(60).to(device)
    for rows in (1, 2, 3, 5, 6, 16, 33):
        x = torch.randn(rows, 1, 48).to(device)
        equal(ops.parts.linear(x, weight), REFERENCE.parts.linear(x, weight))
        equal(ops.parts.linear(x, weight, bias), REFERENCE.parts.linear(x, weight, bias))


@pytest.mark.parametrize("has_bf16, has_avx512", [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    "dtype, within", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]
)
def test_linear_on_a_cpu(dtype, within, has_bf16, has_avx512, monkeypatch):
    """Every way that it takes: rows padded or not, the weight as it is or widened in two blocks, a processor
    with bf16 instructions or without (where several rows in bf16 were once an error).
    """
    monkeypatch.setattr(cpu, "CPU_HAS_BF16", has_bf16)
    monkeypatch.setattr(cpu, "CPU_HAS_AVX512", has_avx512)
    torch.manual_seed(0)
    weight, bias = torch.randn(1100, 1024).to(dtype) / 32, torch.randn(1100).to(dtype)
    for rows in [*range(1, 18), 31, 32, 33]:
        x = torch.randn(rows, 1, 1024).to(dtype)
        out = cpu.linear(x, weight)
        assert out.shape == (rows, 1, 1100) and out.dtype == dtype
        want = x.double() @ weight.double().T
        torch.testing.assert_close(out.double(), want, atol=within, rtol=within)
        biased = cpu.linear(x, weight, bias).double()
        torch.testing.assert_close(biased, want + bias.double(), atol=within, rtol=within)


slow = lambda name: pytest.param(name, marks=pytest.mark.slow)
EXACT = replace(SMALL, exact=True, draft_cost=0.0)


@pytest.mark.parametrize("name", ["reread", slow("sentence-paper"), slow("window"), slow("exact")])
def test_whole_decode(backend, small, name):
    """Unequal rows, mixed steps: tokens and reasons of the reference."""
    cfg = replace((CONFIGS | {"exact": EXACT})[name], n_select=5, n_recent=5, min_gap=1, max_interval=3)
    (ops, device), prompts = backend, [prompt(12), prompt(16, 1)]
    model = copy.deepcopy(small).to(device)
    (want, steps, _), (got, others, _) = (
        decoded(model, cfg, prompts, 9, ops=some) for some in (REFERENCE, ops)
    )
    assert got == want and [s.rows for s in others] == [s.rows for s in steps]
    reasons = [[did.reason for did in s.rows] for s in steps]
    if name != "window":
        assert any("fast" in some and len(set(some)) == 2 for some in reasons[2:6]), "no mixed step"
    if name == "exact":
        assert any(len(tokens) > 1 for s in steps for tokens in s.tokens), "nothing was accepted"


@pytest.mark.parametrize("ops", [cpu.CPU, LOOPS], ids=["PyTorch", "Numba"])
@pytest.mark.parametrize("name", [*CONFIGS, "exact", "exact, long drafts"])
def test_whole_decodes_on_a_cpu(tiny, name, ops):
    """Unequal rows, mixed steps, sampled: tokens and records of the reference."""
    exact = {"exact": EXACT, "exact, long drafts": replace(EXACT, policy="fixed", max_interval=24)}
    cfg, prompts = (CONFIGS | exact)[name], [prompt(9, 1), prompt(60), prompt(31, 2)]
    settings = dict(sampling=Sampling(0.8, top_k=30, seed=7), stop_ids={3, 13, 23})
    want, steps, _ = decoded(tiny, cfg, prompts, 40, **settings)
    got, others, _ = decoded(tiny, cfg, prompts, 40, ops=ops, **settings)
    assert got == want and [s.rows for s in others] == [s.rows for s in steps]


@pytest.mark.parametrize("ops", [cpu.CPU, LOOPS], ids=["PyTorch", "Numba"])
@pytest.mark.parametrize("length", [1, 9, 22])
def test_nothing_to_select_is_identical_to_dense_on_a_cpu(tiny, length, ops):
    both = [
        decoded(tiny, cfg, [prompt(length)], 24 - length, ops=ops)
        for cfg in (SMALL, replace(SMALL, policy="dense"))
    ]
    (got, steps, engine), (want, _, dense) = both
    assert {step.rows[0].reason for step in steps[1:]} <= {"short", "first"} and got == want
    n = min(engine.rows[0].length, 22)
    whole, other = (e.cache.k[:, :, :, e.cache.cap : e.cache.cap + n] for e in (engine, dense))
    assert torch.equal(whole, other)
