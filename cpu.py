"""The `cpu` backend: the operations of `memory.Ops` in the formulations that are fastest on a CPU.

Three facts shape them.  A large tensor that is allocated anew comes slowly, so what a pass needs again is
kept or made a few heads at a time.  A processor without bfloat16 instructions widens every bf16 or fp16
number before it can multiply, so that is done once, in blocks that stay in its cache.  And PyTorch's products
are fast for some numbers of rows and slow for their neighbours.  Every function must equal the reference of
the same name.  Letters: see `model.py`.  Read before: `memory.py`.
"""

import math

import torch
import torch.nn.functional as F

from memory import REFERENCE, InLine
from model import Parts


def cpu_has(*names) -> bool:
    """Whether the processor has one of these instruction sets; a torch that cannot tell counts as no."""
    has = getattr(torch.cpu, "get_capabilities", dict)()
    return any(has.get(name, False) for name in names)


CPU_HAS_BF16 = cpu_has("avx512_bf16", "amx_bf16", "bf16")  # elsewhere products in bfloat16 are slow
CPU_HAS_AVX512 = cpu_has("avx512_f")
FEW = 32  # rows up to which the products below beat PyTorch's own
FEW_BF16 = 16  # with AVX-512, rows of bf16 up to which PyTorch's own are faster
BLOCK = 2048  # cached tokens that are widened or multiplied at a time


def linear(x, weight, bias=None):
    """x @ weight.T + bias, (..., in) and (out, in) -> (..., out), in x's dtype.

    PyTorch's own way reads the weight several times for 2 to 32 rows of fp32 (measured: up to 3 times slower
    than the transposed product), and without bf16 instructions its half-precision products run at a fraction
    of the fp32 ones, so for several rows the weight is widened, a block that fits the cache at a time (with
    AVX-512 only from 17 rows of bf16 on: 4 rows would take twice as long).  Rows of zeros are added where
    more rows are faster: 4 than 3, multiples of 8 than others from 6 on.
    """
    rows, half = x.numel() // x.shape[-1], x.dtype != torch.float32
    if half:
        few = FEW_BF16 if CPU_HAS_AVX512 and x.dtype == torch.bfloat16 else 3
        own = CPU_HAS_BF16 or rows <= few
    else:
        own = not 2 <= rows <= FEW
    if own:
        return F.linear(x, weight, bias)
    padding = -rows % 8 if 5 < rows <= FEW else int(rows == 3)
    flat = F.pad(x.reshape(rows, -1).float(), (0, 0, 0, padding))
    multiply = lambda w: (w @ flat.T).T if rows <= FEW else F.linear(flat, w)
    if half:
        blocks = weight.split(max(2**20 // weight.shape[1], 1))
        out = torch.cat([multiply(block.float()) for block in blocks], dim=1)
    else:
        out = multiply(weight)
    out = out[:rows].to(x.dtype).reshape(*x.shape[:-1], -1)
    return out if bias is None else out + bias


def attend(q, K, V, start, length, scores=None):
    """The reference's `attend`, by PyTorch's fused attention, or from the scores where these are wanted.

    The G query heads of a KV head become the rows of one product, so K and V are read once, not G times.  A
    few tokens whose scores are all wanted are attended to from these, which saves computing them twice.
    """
    T, H = q.shape[1:3]
    n_kv, G = K.shape[1], H // K.shape[1]
    out, W = torch.zeros_like(q), scores.shape[2] // G if scores is not None else 0
    for b, (first, n) in enumerate(zip(start.tolist(), length.tolist(), strict=True)):
        if n == 0:
            continue
        keys, values = K[b, :, first : first + n], V[b, :, first : first + n]  # (K, n, D)
        queries = q[b].unflatten(1, (n_kv, -1)).permute(1, 2, 0, 3)  # (K, G, T, D)
        if W:
            dot_products(queries[:, :, T - W :].flatten(1, 2), keys, scores[b, ..., :n])
        if W == T <= FEW:
            o = attend_from_scores(scores[b, ..., :n], values, T)
        else:
            causal = torch.ones(T, n, dtype=torch.bool).tril(n - T).repeat(G, 1) if T > 1 else None
            grouped = queries.flatten(1, 2)  # (K, G * T, D)
            o = F.scaled_dot_product_attention(grouped[None], keys[None], values[None], attn_mask=causal)[0]
        out[b] = o.unflatten(1, (G, T)).permute(2, 0, 1, 3).flatten(1, 2)  # (T, H, D)
    return out, scores


def attend_from_scores(scores, V, T):
    """softmax(scores) V, (K, G * T, D) fp32, with a causal mask: scores (K, G * T, n) fp32 of the last T
    queries, which are left as they were; V (K, n, D).
    """
    n_kv, rows, n = scores.shape
    recent = scores[..., n - T :]  # the only ones that a causal mask touches
    unmasked = recent.clone()
    recent.masked_fill_(torch.ones(T, T, dtype=torch.bool).triu(1).repeat(rows // T, 1), -torch.inf)
    heads = min(max(2**20 // (rows * n), torch.get_num_threads()), n_kv)  # at a time, in one buffer
    p = torch.empty((heads, rows, n))
    parts = zip(scores.split(heads), V.split(heads), strict=True)
    out = torch.cat([weighted_sum(torch.softmax(s, -1, out=p[: len(s)]), values) for s, values in parts])
    recent.copy_(unmasked)
    return out


def dot_products(q, K, scores):
    """scores (K, R, n) fp32, written in place: q.k / sqrt(D) of q (K, R, D) with K (K, n, D), in blocks.

    Which factor comes first is what was fastest: the long one as it lies if the other has up to 4 rows, else
    the short one.
    """
    q, fp32 = q.float(), fp32_reader(K)
    as_it_lies = K.dtype == torch.float32 and q.shape[1] <= 4
    multiply = (lambda keys: (keys @ q.mT).mT) if as_it_lies else lambda keys: q @ fp32(keys).mT
    for part, keys in zip(scores.split(BLOCK, dim=2), K.split(BLOCK, dim=1), strict=True):
        torch.mul(multiply(keys), K.shape[-1] ** -0.5, out=part)  # (K, R, BLOCK)


def weighted_sum(p, V):
    """sum_j p_j v_j in fp32, (K, R, D), of weights p (K, R, n) fp32 and V (K, n, D), in blocks."""
    R, fp32 = p.shape[1], fp32_reader(V)
    if V.dtype == torch.float32 and R in (2, 3):  # slower than 4
        p = F.pad(p, (0, 0, 0, 4 - R))
    out = torch.zeros((*p.shape[:2], V.shape[2]))
    for weights, values in zip(p.split(BLOCK, dim=2), V.split(BLOCK, dim=1), strict=True):
        out.baddbmm_(weights, fp32(values))
    return out[:, :R]


def fp32_reader(cache):
    """A function that gives up to BLOCK tokens of each head of the cache (K, n, D) in fp32, until the next
    call.
    """
    if cache.dtype == torch.float32:
        return lambda x: x
    buffer = torch.empty((cache.shape[0], BLOCK, cache.shape[2]))
    return lambda x: buffer[:, : x.shape[1]].copy_(x)


def rebuild(K, V, slots, cap, n_sink, recent_start, length):
    """The reference's `rebuild`, head by head: faster than one index."""
    n = n_sink + slots.shape[2]
    for b, (first, end) in enumerate(zip(recent_start.tolist(), length.tolist(), strict=True)):
        if first < 0:
            continue
        for cache in (K[b], V[b]):
            full = cache[:, cap:]
            cache[:, :n_sink] = full[:, :n_sink]
            for memory, whole, chosen in zip(cache, full, slots[b], strict=True):
                torch.index_select(whole, 0, chosen, out=memory[n_sink:n])
            cache[:, n : n + end - first] = full[:, first:end]


class KeptBuffer(InLine):
    """`memory.InLine` with one buffer of scores for all layers, which only grows."""

    def __init__(self, layers: int):
        self.buffer = torch.empty(0)

    def scores_buffer(self, shape, device):
        if self.buffer.numel() < math.prod(shape):
            self.buffer = torch.empty(math.prod(shape))
        return self.buffer[: math.prod(shape)].view(shape)


CPU = REFERENCE._replace(
    name="cpu",
    attend=attend,
    rebuild=rebuild,
    parts=Parts(linear=linear),
    schedule=KeptBuffer,
)
