"""The `cpu` backend's loops: what a decode step spends its time on, compiled by Numba for this processor.

A step of few tokens reads every weight and every cached token it attends to once, and computes little with
each, so its cost is what the memory can deliver.  These loops keep up with the memory where PyTorch's
products for few rows do not: they widen bf16 and fp16 numbers as they come, without a copy, and use each for
four rows at once.  Sums are fp32.  Passes of many tokens stay with `cpu.py`.

A loop that adds up must not store to an array while it reads another: LLVM would make two codes for it, which
add in other orders, and choose by how far apart the two arrays lie, which changes from run to run.

    linear, attend, rebuild             the twins of the reference's functions of the same name
    *_loop                              what they compile: plain Python that shares its work by `native.share`
    dot_products, add_weighted, ...     the parts that do the arithmetic

`select` has a file of its own, `selector_loops.py`.  Letters: see `model.py`.  Read before: `memory.py`,
`cpu.py`.
"""

import math

import numpy as np
import torch

import cpu
from cpu import CPU, CPU_HAS_BF16
from model import PARTS, Parts
from native import LN2, LOG2E, ONE, ZERO, ask_for, exp2, loop, narrow, part, share, widen
from selector_loops import follow_loop, select

FEW = 32  # tokens times rows up to which the loops are used
BLOCK = 64  # cached tokens, or rows of a weight, at a time
AHEAD = 1 << 13  # bytes: memory is asked for them before they are needed


@part
def dot_products(x, W, out):
    """out[r, j] = x[r] . W[j]; x (R, D) fp32, W (n, D) as stored, out (R, at least n) fp32."""
    n, D = W.shape
    line, ahead = 64 // W.itemsize, AHEAD // (W.itemsize * D)
    for four in range((n + 3) // 4):  # rows of W; the last one again where there are no more
        j0 = 4 * four
        j1, j2, j3 = min(j0 + 1, n - 1), min(j0 + 2, n - 1), min(j0 + 3, n - 1)
        W0, W1, W2, W3 = W[j0], W[j1], W[j2], W[j3]
        for j in range(j0 + ahead, j0 + ahead + 4):
            for i in range(0, D, line):
                ask_for(W, j, i)
        if x.shape[0] % 2 == 1:
            r = x.shape[0] - 1
            x0, r0, r1, r2, r3 = x[r], ZERO, ZERO, ZERO, ZERO
            for i in range(D):
                r0 += widen(W0[i]) * x0[i]
                r1 += widen(W1[i]) * x0[i]
                r2 += widen(W2[i]) * x0[i]
                r3 += widen(W3[i]) * x0[i]
            out[r, j0], out[r, j1], out[r, j2], out[r, j3] = r0, r1, r2, r3
        for two in range(x.shape[0] // 2):  # rows of x
            r, q = 2 * two, 2 * two + 1
            x0, x1 = x[r], x[q]
            r0 = r1 = r2 = r3 = q0 = q1 = q2 = q3 = ZERO
            for i in range(D):
                a, b = x0[i], x1[i]
                w = widen(W0[i])
                r0 += w * a
                q0 += w * b
                w = widen(W1[i])
                r1 += w * a
                q1 += w * b
                w = widen(W2[i])
                r2 += w * a
                q2 += w * b
                w = widen(W3[i])
                r3 += w * a
                q3 += w * b
            out[r, j0], out[r, j1], out[r, j2], out[r, j3] = r0, r1, r2, r3
            out[q, j0], out[q, j1], out[q, j2], out[q, j3] = q0, q1, q2, q3


@part
def add_weighted(p, V, out):
    """out[r] += sum_j p[r, j] V[j]; p (R, at least n) fp32, V (n, D) as stored, out (R, D) fp32."""
    n, D = V.shape
    if p.shape[0] % 2 == 1:
        r, o0 = p[p.shape[0] - 1], out[p.shape[0] - 1]
        for four in range(n // 4):
            j = 4 * four
            V0, V1, V2, V3 = V[j], V[j + 1], V[j + 2], V[j + 3]
            for i in range(D):
                a, b, c, d = widen(V0[i]), widen(V1[i]), widen(V2[i]), widen(V3[i])
                o0[i] += r[j] * a + r[j + 1] * b + r[j + 2] * c + r[j + 3] * d
        for j in range(n // 4 * 4, n):
            for i in range(D):
                o0[i] += r[j] * widen(V[j, i])
    for two in range(p.shape[0] // 2):
        r, q = p[2 * two], p[2 * two + 1]
        o0, o1 = out[2 * two], out[2 * two + 1]
        for four in range(n // 4):
            j = 4 * four
            V0, V1, V2, V3 = V[j], V[j + 1], V[j + 2], V[j + 3]
            for i in range(D):
                a, b, c, d = widen(V0[i]), widen(V1[i]), widen(V2[i]), widen(V3[i])
                o0[i] += r[j] * a + r[j + 1] * b + r[j + 2] * c + r[j + 3] * d
                o1[i] += q[j] * a + q[j + 1] * b + q[j + 2] * c + q[j + 3] * d
        for j in range(n // 4 * 4, n):
            for i in range(D):
                o0[i] += r[j] * widen(V[j, i])
                o1[i] += q[j] * widen(V[j, i])


@loop
def linear_loop(x, W, out, workers):
    """out = x W^T, x (rows, in), W (out, in), out (rows, out), all as stored."""
    wide = np.empty(x.shape, np.float32)
    for r in range(x.shape[0]):
        for i in range(x.shape[1]):
            wide[r, i] = widen(x[r, i])
    share(linear_columns, (wide, W, out), workers)


@part
def linear_columns(x, W, out, worker, workers):
    """This worker's part of the columns of out = x W^T; x fp32, W and out as stored."""
    y = np.empty((x.shape[0], BLOCK), np.float32)
    end = (worker + 1) * W.shape[0] // workers
    for low in range(worker * W.shape[0] // workers, end, BLOCK):
        n = min(BLOCK, end - low)
        dot_products(x, W[low : low + n], y)
        for r in range(x.shape[0]):
            for j in range(n):
                out[r, low + j] = narrow(y[r, j], out.dtype)


@loop
def attend_loop(q, K, V, start, length, scores, out, pieces, workers):
    """`model.attend`: q and out (B, T, H, D), K and V (B, K, slots, D), stored; scores (B, K, G * W, width)
    fp32, of width 0 if they are not wanted.  Each head's span is read in `pieces`, which are then joined.
    """
    B, T, H, D = q.shape
    n_kv = K.shape[1]
    R = T * H // n_kv
    weighted = np.zeros((B, n_kv, pieces, R, D), np.float32)  # sum_j 2^(s_j - top) v_j, row g * T + t
    top = np.full((B, n_kv, pieces, R), -np.inf, np.float32)  # the largest s_j
    total = np.zeros((B, n_kv, pieces, R), np.float32)  # sum_j 2^(s_j - top)
    share(attend_pieces, (q, K, V, start, length, scores, weighted, top, total), workers)
    for b in range(B):
        for h in range(n_kv if length[b] > 0 else 0):
            join_pieces(weighted[b, h], top[b, h], total[b, h], out[b], h)
        if length[b] == 0:
            out[b] = 0


@part
def attend_pieces(q, K, V, start, length, scores, weighted, top, total, worker, workers):
    """This worker's part of the pieces, taken in turn, so that long rows and short ones are shared."""
    B, n_kv, pieces = top.shape[:3]
    for item in range(worker, B * n_kv * pieces, workers):
        b, h, piece = item // (n_kv * pieces), item // pieces % n_kv, item % pieces
        done = weighted[b, h, piece], top[b, h, piece], total[b, h, piece]
        attend_piece(q[b], K[b, h], V[b, h], h, start[b], length[b], piece, pieces, scores[b, h], done)


@part
def attend_piece(q, K, V, h, start, length, piece, pieces, scores, done):
    """One KV head's sums over one piece of one row's span, into `done`; arguments as in `attend_loop`."""
    T, _, D = q.shape
    weighted, top, total = done
    R = len(top)
    G, W = R // T, scores.shape[0] * T // R
    scale = LOG2E / np.float32(np.sqrt(D))
    x, s = np.empty((R, D), np.float32), np.empty((R, BLOCK), np.float32)
    for r in range(R):
        for i in range(D):
            x[r, i] = widen(q[r % T, h * G + r // T, i]) * scale
    end = (piece + 1) * length // pieces
    for low in range(piece * length // pieces, end, BLOCK):
        n = min(BLOCK, end - low)
        dot_products(x, K[start + low : start + low + n], s)
        for r in range(R):
            t = r % T
            if scores.shape[1] > 0 and t >= T - W:
                row = scores[r // T * W + t - (T - W)]
                for j in range(n):
                    row[low + j] = s[r, j] * LN2
            softmax_block(s[r], min(n, length - T + t + 1 - low), top, total, weighted, r)
        add_weighted(s, V[start + low : start + low + n], weighted)


@part
def join_pieces(weighted, top, total, out, h):
    """Out of the pieces of one KV head's rows (pieces, R, D): its part of out (T, H, D), as it is stored."""
    pieces, R, D = weighted.shape
    T = out.shape[0]
    y = np.empty(D, np.float32)
    for r in range(R):
        largest, whole = top[:, r].max(), ZERO
        y[:] = 0
        for piece in range(pieces):
            share = exp2(top[piece, r] - largest)
            whole += share * total[piece, r]
            for i in range(D):
                y[i] += share * weighted[piece, r, i]
        for i in range(D):
            out[r % T, h * (R // T) + r // T, i] = narrow(y[i] / whole, out.dtype)


@part
def softmax_block(s, seen, top, total, out, r):
    """Make weights 2^(s_j - top) of the first `seen` scores s_j and zeros of the others; bring top[r],
    total[r] and out[r], which are of earlier blocks, up to date.
    """
    largest = top[r]
    for j in range(seen):
        largest = max(largest, s[j])
    if largest > top[r]:
        fade = exp2(top[r] - largest)
        top[r] = largest
        total[r] *= fade
        for i in range(out.shape[1]):
            out[r, i] *= fade
    here = ZERO
    for j in range(seen):
        p = exp2(s[j] - largest)
        s[j] = p
        here += p
    total[r] += here
    for j in range(max(seen, 0), s.shape[0]):
        s[j] = 0


@loop
def rebuild_loop(K, V, slots, cap, n_sink, recent_start, length, workers):
    """`memory.rebuild` of numbers of any kind."""
    share(rebuild_heads, (K, V, slots, cap, n_sink, recent_start, length), workers)


@part
def rebuild_heads(K, V, slots, cap, n_sink, recent_start, length, worker, workers):
    B, n_kv, N = slots.shape
    for item in range(worker, 2 * B * n_kv, workers):
        b, h = item // (2 * n_kv), item // 2 % n_kv
        cache = K[b, h] if item % 2 == 0 else V[b, h]
        first, n = recent_start[b], n_sink + N
        if first >= 0:
            for i in range(n + length[b] - first):
                i_full = i if i < n_sink else slots[b, h, i - n_sink] if i < n else first + i - n
                for d in range(cache.shape[1]):
                    cache[i, d] = cache[cap + i_full, d]


@loop
def norm_loop(x, weight, eps, out):
    """`model.norm`: x and out (n, D), weight (D,), stored."""
    for r in range(x.shape[0]):
        squares = ZERO
        for i in range(x.shape[1]):
            squares += widen(x[r, i]) * widen(x[r, i])
        scale = ONE / np.sqrt(squares / np.float32(x.shape[1]) + np.float32(eps))
        for i in range(x.shape[1]):
            out[r, i] = narrow(widen(x[r, i]) * scale * widen(weight[i]), out.dtype)


@loop
def rotate_loop(x, cos, sin, normed, weight, eps, out):
    """`model.rotate`: x and out (tokens, heads, D), weight (D,), stored; cos, sin (tokens, D/2) fp32."""
    tokens, heads, D = x.shape
    half, y = D // 2, np.empty(D, np.float32)
    for t in range(tokens):
        for h in range(heads):
            for i in range(D):
                y[i] = widen(x[t, h, i])
            if normed:
                squares = ZERO
                for i in range(D):
                    squares += y[i] * y[i]
                scale = ONE / np.sqrt(squares / np.float32(D) + np.float32(eps))
                for i in range(D):
                    y[i] = widen(narrow(y[i] * scale * widen(weight[i]), out.dtype))
            for i in range(half):
                a, b = y[i], y[half + i]
                out[t, h, i] = narrow(a * cos[t, i] - b * sin[t, i], out.dtype)
                out[t, h, half + i] = narrow(b * cos[t, i] + a * sin[t, i], out.dtype)


@loop
def swiglu_loop(gate, up, out):
    """`model.swiglu`, numbers as they are stored, (n,) each; silu(x) = x / (1 + e^-x)."""
    for i in range(gate.shape[0]):
        x = widen(gate[i])
        e = exp2(-abs(x) * LOG2E)
        silu = x * (ONE if x >= 0 else e) / (ONE + e)
        out[i] = narrow(silu * widen(up[i]), out.dtype)


def array(x):
    """A tensor's numbers as a NumPy array on the same memory: bf16 as uint16, fp16 as int16."""
    stored = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}.get(x.dtype)
    return (x if stored is None else x.view(stored)).numpy()


def linear(x, weight, bias=None):
    """In PyTorch's way where that is faster: several rows of bf16 where the processor multiplies bf16, and up
    to two of fp16.
    """
    flat = x.contiguous().view(-1, x.shape[-1])
    rows = len(flat)
    own = rows > 1 and CPU_HAS_BF16 if x.dtype == torch.bfloat16 else rows <= 2 and x.dtype == torch.float16
    if own or not 0 < rows <= FEW:
        return cpu.linear(x, weight, bias)
    out = x.new_empty((rows, weight.shape[0]))
    linear_loop(array(flat), array(weight), array(out), torch.get_num_threads())
    out = out.view(*x.shape[:-1], -1)
    return out if bias is None else out + bias


def norm(x, weight, eps):
    if x.numel() > FEW * x.shape[-1]:
        return PARTS.norm(x, weight, eps)
    flat = x.contiguous().view(-1, x.shape[-1])
    out = torch.empty_like(flat)
    norm_loop(array(flat), array(weight), float(eps), array(out))
    return out.view(x.shape)


def rotate(x, cos, sin, weight=None, eps=0.0):
    B, T = x.shape[:2]
    if B * T > FEW:
        return PARTS.rotate(x, cos, sin, weight, eps)
    x, cos, sin = (y.contiguous().view(B * T, *y.shape[2:]) for y in (x, cos, sin))
    out, normed = torch.empty_like(x), weight is not None
    weight = weight if normed else x[0, 0]
    rotate_loop(*map(array, (x, cos, sin)), normed, array(weight), float(eps), array(out))
    return out.view(B, T, *out.shape[1:])


def swiglu(gate, up):
    if gate.numel() > FEW * gate.shape[-1]:
        return PARTS.swiglu(gate, up)
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    swiglu_loop(*(array(y.view(-1)) for y in (gate, up, out)))
    return out


def attend(q, K, V, start, length, scores=None):
    B, T = q.shape[:2]
    if B * T > FEW:
        return cpu.attend(q, K, V, start, length, scores)
    out, workers = torch.empty_like(q), torch.get_num_threads()
    kept = torch.empty((B, 1, 0, 0)) if scores is None else scores
    pieces = workers // math.gcd(K.shape[1], workers)
    attend_loop(*map(array, (q, K, V, start, length, kept, out)), pieces, workers)
    return out, scores


def rebuild(K, V, slots, cap, n_sink, recent_start, length):
    spans = array(recent_start), array(length)
    rebuild_loop(*map(array, (K, V, slots)), cap, n_sink, *spans, torch.get_num_threads())


def must_compile(dtype) -> bool:
    """Whether the loops for numbers of this dtype are not on disk yet; tried with a small one."""
    misses = norm_loop.stats.cache_misses.total()
    norm(torch.zeros((1, 64), dtype=dtype), torch.zeros(64, dtype=dtype), 1e-6)
    return norm_loop.stats.cache_misses.total() > misses


def prepare(dtype):
    """Compile the loops for numbers of this dtype, or take them from disk.

    Without it each compiles at its first call.  May run in a thread: a loop that is called meanwhile waits.
    """
    heads = torch.zeros((1, 1, 1, 64), dtype=dtype)  # (B, T, H, D), or (B, K, slots, D)
    numbers = torch.zeros((1, 1, 1, 1))
    zero, one = torch.tensor([0]), torch.tensor([1])
    norm(heads, heads[0, 0, 0], 1e-6)
    swiglu(heads, heads)
    linear(heads, heads[0, 0])
    rotate(heads, torch.ones(1, 1, 32), torch.zeros(1, 1, 32), heads[0, 0, 0], 1e-6)
    attend(heads, heads, heads, zero, one, numbers)
    slots = torch.zeros((1, 1, 1), dtype=torch.int64)
    follow_loop(numbers[0].numpy(), numbers[0, 0].numpy(), 0, 1, True, True, True, slots[0].numpy(), 1)
    rebuild(heads, heads.clone(), slots[..., :0], 0, 0, zero, one)


LOOPS = CPU._replace(
    name="cpu", attend=attend, select=select, rebuild=rebuild, parts=Parts(linear, norm, rotate, swiglu)
)
