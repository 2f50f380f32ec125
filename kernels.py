"""The optimized path: Triton twins of the leaf operations, and a schedule that selects beside the model.

`triton_ops()` gives an `Ops` for `sfi.Engine`; every function here must equal the reference of the same name
(`append` and `rebuild` in `sfi.py`, `attend` in `model.py`, `select` in `selector.py`).  Attention is split
along the length, in the manner of Flash-Decoding, so that few rows still fill a GPU.  Selection is a handful
of passes over the scores, each a kernel over blocks of positions, joined by small tables of partial results.
Rows tell by `start`, `length` and `high` on the device what they read and whether they are refreshed, so no
launch waits for the host.

Run as a program it compiles every kernel for three GPUs, without one, and prints what each needs.  With
TRITON_INTERPRET=1 in the environment the kernels run on a CPU, slowly.  Letters: see `model.py`.  Read
before: `sfi.py`, `selector.py`.
"""

import math
from functools import partial

import torch
import triton
import triton.language as tl

import selector
from sfi import InLine, Ops

LOG2E = tl.constexpr(math.log2(math.e))
PROGRAMS = 512  # attention is split until so many programs run, whatever the GPU: the same sums everywhere
MAX_SPLITS = 64
CHUNK = 1024  # positions a program of the Selector's passes
TILE = 16  # evidence rows it holds at a time


def power_of_2(n: int) -> int:
    return max(triton.next_power_of_2(n), 16)


@triton.jit
def append_kernel(
    k, v, K, V, key_norm, position, memory, T, n_kv, cap, cache_row, cache_head, s_max,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`sfi.append`: program (b * T + t, head) writes one token's key and value, and the key's norm."""
    bt, h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, t = (bt // T).to(tl.int64), bt % T
    d = tl.arange(0, BLOCK_D)
    p, m = tl.load(position + b), tl.load(memory + b)
    if p >= 0:
        source = (bt.to(tl.int64) * n_kv + h) * D + d
        new_k = tl.load(k + source, mask=d < D, other=0.0)
        new_v = tl.load(v + source, mask=d < D, other=0.0)
        wide = new_k.to(tl.float32)
        tl.store(key_norm + (b * n_kv + h) * s_max + p + t, tl.sqrt(tl.sum(wide * wide, 0)))
        base = b * cache_row + h * cache_head + d
        full, compact = base + (cap + p + t) * D, base + (m + t) * D
        tl.store(K + full, new_k, mask=d < D)
        tl.store(V + full, new_v, mask=d < D)
        if m >= 0:
            tl.store(K + compact, new_k, mask=d < D)
            tl.store(V + compact, new_v, mask=d < D)


def append(k, v, K, V, key_norm, position, memory):
    B, T, n_kv, D = k.shape
    cap = K.shape[2] - key_norm.shape[2]
    append_kernel[(B * T, n_kv)](
        k.contiguous(), v.contiguous(), K, V, key_norm, position, memory, T, n_kv, cap,
        K.stride(0), K.stride(1), key_norm.shape[2], D=D, BLOCK_D=power_of_2(D), num_warps=1,
    )  # fmt: skip


@triton.jit
def attend_kernel(
    q, K, V, start, length, scores, acc_out, max_out, sum_out, T, W, n_kv, cache_row, cache_head, width,
    scale, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SCORES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Softmax attention of ROWS queries of one KV head over one split of its span, not yet divided.

    Program (split, tile, b * n_kv + head); query row r = t * G + g.  Writes sum_j exp(s_j - max) v_j, the
    maximum and sum_j exp(s_j - max), and the scores s = q.k * scale of the last W tokens where asked for.
    A split without tokens gives 0, -inf, 0.
    """
    split, tile, bk = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    b, h = bk // n_kv, bk % n_kv
    n = tl.load(length + b).to(tl.int32)
    chunk = tl.cdiv(tl.cdiv(n, tl.num_programs(0)), BLOCK) * BLOCK
    low = split * chunk
    high = tl.minimum(low + chunk, n)
    r, d = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    t, g = r // G, r % G
    live = r < T * G
    last = n - T + t  # (ROWS,) the last position that a query sees
    end = high
    if not SCORES:  # beyond the tile's last query nothing is seen
        end = tl.minimum(high, n - T + tl.minimum((tile * ROWS + ROWS - 1) // G, T - 1) + 1)
    at = (((b * T + t) * n_kv + h) * G + g)[:, None] * D + d[None, :]
    queries = tl.load(q + at, mask=live[:, None] & (d < D)[None, :], other=0.0)  # (ROWS, BLOCK_D)
    base = b * cache_row + h * cache_head + tl.load(start + b) * D
    w = t - (T - W)
    score_row = ((bk * G + g) * W + w)[:, None] * width  # (ROWS, 1)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for j0 in range(low, end, BLOCK):
        j = j0 + tl.arange(0, BLOCK)
        place = base + j.to(tl.int64)[:, None] * D + d[None, :]
        inside = (j < high)[:, None] & (d < D)[None, :]
        keys = tl.load(K + place, mask=inside, other=0.0)  # (BLOCK, BLOCK_D)
        s = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale  # (ROWS, BLOCK)
        if SCORES:
            tl.store(
                scores + score_row + j[None, :], s, mask=(live & (w >= 0))[:, None] & (j < high)[None, :]
            )
        s = tl.where((j[None, :] <= last[:, None]) & (j < high)[None, :], s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2((s - safe[:, None]) * LOG2E)
        fade = tl.exp2((top - safe) * LOG2E)
        total = total * fade + tl.sum(p, 1)
        values = tl.load(V + place, mask=inside, other=0.0)  # (BLOCK, BLOCK_D)
        acc = acc * fade[:, None] + tl.dot(p.to(values.dtype), values, input_precision=PRECISION)
        top = new
    row = (bk * tl.num_programs(0) + split) * T * G + r
    tl.store(max_out + row, top, mask=live)
    tl.store(sum_out + row, total, mask=live)
    tl.store(acc_out + row[:, None] * D + d[None, :], acc, mask=live[:, None] & (d < D)[None, :])


@triton.jit
def merge_kernel(
    acc_in, max_in, sum_in, out, T, n_kv, n_split,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Join the splits s of query row r = t * G + g: sum_s w_s acc_s / sum_s w_s sum_s with
    w_s = e^(max_s - max); 0 where nothing was seen.
    """
    r, bk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    rows = T * G
    top, total = float("-inf"), 0.0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for s0 in range(0, n_split, SPLITS):
        s = s0 + tl.arange(0, SPLITS)
        at = (bk * n_split + s) * rows + r
        tops = tl.load(max_in + at, mask=s < n_split, other=float("-inf"))
        sums = tl.load(sum_in + at, mask=s < n_split, other=0.0)
        inside = (s < n_split)[:, None] & (d < D)[None, :]
        part = tl.load(acc_in + at[:, None] * D + d[None, :], mask=inside, other=0.0)  # (SPLITS, BLOCK_D)
        new = tl.maximum(top, tl.max(tops, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        weight, fade = tl.exp2((tops - safe) * LOG2E), tl.exp2((top - safe) * LOG2E)
        acc = acc * fade + tl.sum(weight[:, None] * part, 0)
        total = total * fade + tl.sum(weight * sums, 0)
        top = new
    result = tl.where(total > 0, acc / tl.where(total > 0, total, 1.0), acc * 0.0)
    b, h = bk // n_kv, bk % n_kv
    t, g = r // G, r % G
    tl.store(out + (((b * T + t) * n_kv + h) * G + g) * D + d, result.to(out.dtype.element_ty), mask=d < D)


def attend_sizes(dtype, G: int, T: int, D: int) -> dict:
    """Tile sizes of `attend_kernel`: what fits shared memory and registers from an A100 on."""
    wide = dtype == torch.float32
    rows = 16 if G * T <= 16 else 32 if wide else 64
    block = (16 if D > 96 else 32) if wide else 64
    return dict(ROWS=rows, BLOCK=block, num_warps=4, num_stages=2 if wide else 3)


def attend(q, K, V, start, length, scores=None):
    B, T, H, D = q.shape
    n_kv, slots = K.shape[1:3]
    G = H // n_kv
    sizes = attend_sizes(q.dtype, G, T, D)
    tiles = triton.cdiv(T * G, sizes["ROWS"])
    n_split = min(MAX_SPLITS, triton.cdiv(PROGRAMS, B * n_kv * tiles), triton.cdiv(slots, sizes["BLOCK"]))
    new = partial(torch.empty, dtype=torch.float32, device=q.device)
    acc, top, total = new(B * n_kv, n_split, T * G, D), *new(2, B * n_kv, n_split, T * G)
    out = torch.empty((B, T, H, D), dtype=q.dtype, device=q.device)
    given, block_d = scores is not None, power_of_2(D)
    attend_kernel[(n_split, tiles, B * n_kv)](
        q.contiguous(), K, V, start, length, scores if given else acc, acc, top, total, T,
        scores.shape[2] // G if given else 0, n_kv, K.stride(0), K.stride(1), scores.shape[3] if given else 0,
        D**-0.5, G=G, D=D, BLOCK_D=block_d, SCORES=given, PRECISION="ieee", **sizes,
    )  # fmt: skip
    merge_kernel[(T * G, B * n_kv)](
        acc, top, total, out, T, n_kv, n_split, G=G, D=D, BLOCK_D=block_d, SPLITS=16, num_warps=2
    )
    return out, scores


@triton.jit
def rebuild_kernel(
    K, V, slots, high, length, n_kv, cap, n_sink, N, cache_row, cache_head,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`sfi.rebuild`: program (block, b * n_kv + head) copies BLOCK slots of one head's memory."""
    bk = tl.program_id(1).to(tl.int64)
    b, h = bk // n_kv, bk % n_kv
    first, n = tl.load(high + b), tl.load(length + b)
    i, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    if first >= 0:
        wanted = i < n_sink + N + n - first
        chosen = wanted & (i >= n_sink) & (i < n_sink + N)
        picked = tl.load(slots + bk * N + i - n_sink, mask=chosen, other=0)
        position = tl.where(i < n_sink, i.to(tl.int64), tl.where(chosen, picked, first + i - n_sink - N))
        base = b * cache_row + h * cache_head + d[None, :]
        inside = wanted[:, None] & (d < D)[None, :]
        source, target = base + (cap + position)[:, None] * D, base + i.to(tl.int64)[:, None] * D
        tl.store(K + target, tl.load(K + source, mask=inside), mask=inside)
        tl.store(V + target, tl.load(V + source, mask=inside), mask=inside)


def rebuild(K, V, slots, cap, n_sink, high, length):
    B, n_kv, _, D = K.shape
    block = 32
    rebuild_kernel[(triton.cdiv(cap, block), B * n_kv)](
        K, V, slots, high, length, n_kv, cap, n_sink, slots.shape[2], K.stride(0), K.stride(1),
        D=D, BLOCK_D=power_of_2(D), BLOCK=block,
    )  # fmt: skip


# The Selector's passes.  Program (block, b * n_kv + head) of each works on CHUNK positions; the candidates of
# row b are low .. high[b] - 1.  Tables hold a partial result a block, (B * n_kv, rows, blocks).


@triton.jit
def partial_kernel(
    x, past, max_out, sum_out, past_out, high, low, R, width, s_max, n_kv,
    PAST: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of every row of x (B, n_kv, R, width): its maximum over a block of the candidates, and
    sum_j e^(x_j - max); of past (B, n_kv, s_max): its sum.
    """
    block, bk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    blocks = tl.num_programs(0)
    j = block * CHUNK + tl.arange(0, CHUNK)
    inside = (j >= low) & (j < tl.load(high + bk // n_kv))
    for r0 in range(0, R, TILE):
        r = r0 + tl.arange(0, TILE)
        both = (r < R)[:, None] & inside[None, :]
        s = tl.load(x + (bk * R + r)[:, None] * width + j[None, :], mask=both, other=float("-inf"))
        top = tl.max(s, 1)
        total = tl.sum(tl.exp(s - tl.where(top == float("-inf"), 0.0, top)[:, None]), 1)
        tl.store(max_out + (bk * R + r) * blocks + block, top, mask=r < R)
        tl.store(sum_out + (bk * R + r) * blocks + block, total, mask=r < R)
    if PAST:
        tl.store(
            past_out + bk * blocks + block, tl.sum(tl.load(past + bk * s_max + j, mask=inside, other=0.0), 0)
        )


@triton.jit
def lse_kernel(max_in, sum_in, lse, blocks, TILE: tl.constexpr):
    """log sum_j e^(x_j) of every row, from its blocks: program row."""
    row = tl.program_id(0).to(tl.int64)
    top, total = float("-inf"), 0.0
    for i0 in range(0, blocks, TILE):
        i = i0 + tl.arange(0, TILE)
        tops = tl.load(max_in + row * blocks + i, mask=i < blocks, other=float("-inf"))
        sums = tl.load(sum_in + row * blocks + i, mask=i < blocks, other=0.0)
        new = tl.maximum(top, tl.max(tops, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(top - safe) + tl.sum(sums * tl.exp(tops - safe), 0)
        top = new
    tl.store(lse + row, top + tl.log(total))


@triton.jit
def evidence_kernel(
    scores, lse, past, past_sums, f_out, peak_out, high, low, R, width, s_max, n_kv, blocks,
    PAST: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """f and the largest p of `selector.follow`, p_r = e^(s_r - lse_r): f is the mean over the R rows, with
    PAST (f + past) / sum(f + past), which becomes past.
    """
    block, bk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    j = block * CHUNK + tl.arange(0, CHUNK)
    inside = (j >= low) & (j < tl.load(high + bk // n_kv))
    f, peak = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
    for r0 in range(0, R, TILE):
        r = r0 + tl.arange(0, TILE)
        both = (r < R)[:, None] & inside[None, :]
        s = tl.load(scores + (bk * R + r)[:, None] * width + j[None, :], mask=both, other=float("-inf"))
        p = tl.exp(s - tl.load(lse + bk * R + r, mask=r < R, other=0.0)[:, None])  # (TILE, CHUNK)
        f += tl.sum(p, 0)
        peak = tl.maximum(peak, tl.max(p, 0))
    f = f / R
    if PAST:
        i = tl.arange(0, BLOCKS)
        total = 1.0 + tl.sum(tl.load(past_sums + bk * blocks + i, mask=i < blocks, other=0.0), 0)
        f = (f + tl.load(past + bk * s_max + j, mask=inside, other=0.0)) / total
        tl.store(past + bk * s_max + j, f, mask=inside)
    tl.store(f_out + bk * width + j, f, mask=j < width)
    tl.store(peak_out + bk * width + j, peak, mask=j < width)


@triton.jit
def follow_kernel(
    f_in, peak_in, score, high, low, width, n_kv, weight,
    HEADS: tl.constexpr, FOLLOWERS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The rest of `selector.follow`: half the mean over the KV heads, and at least `weight` times the largest
    peak of the FOLLOWERS positions before; -inf for what is no candidate.
    """
    bk = tl.program_id(1).to(tl.int64)
    b = bk // n_kv
    j = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = (j >= low) & (j < tl.load(high + b))
    f = tl.load(f_in + bk * width + j, mask=inside, other=0.0)
    if HEADS:
        total = tl.zeros((CHUNK,), tl.float32)
        for h in range(0, n_kv):
            total += tl.load(f_in + (b * n_kv + h) * width + j, mask=inside, other=0.0)
        f = (f + total / n_kv) / 2
    before = tl.zeros((CHUNK,), tl.float32)
    for back in range(1, FOLLOWERS + 1):
        seen = inside & (j - back >= low)
        before = tl.maximum(before, tl.load(peak_in + bk * width + j - back, mask=seen, other=0.0))
    f = tl.maximum(f, weight * before)
    tl.store(score + bk * width + j, tl.where(inside, f, float("-inf")), mask=j < width)


@triton.jit
def power_kernel(
    scores, lse, key_norm, pair, high, low, R, width, s_max, n_kv, alpha, beta, prior_power, norm_weight,
    prior_weight, end_weight, tiny, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The paper's evidence and prior before they are normalised: pair (B, n_kv, 2, width) gets
    log[(mean_r p_r^alpha)^(1/alpha)] and the structural prior's log.
    """
    bk = tl.program_id(1).to(tl.int64)
    end = tl.load(high + bk // n_kv)
    j = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = (j >= low) & (j < end)
    top = tl.full((CHUNK,), float("-inf"), tl.float32)
    total = tl.zeros((CHUNK,), tl.float32)
    for r0 in range(0, R, TILE):
        r = r0 + tl.arange(0, TILE)
        both = (r < R)[:, None] & inside[None, :]
        s = tl.load(scores + (bk * R + r)[:, None] * width + j[None, :], mask=both, other=float("-inf"))
        a = alpha * (s - tl.load(lse + bk * R + r, mask=r < R, other=0.0)[:, None])  # (TILE, CHUNK)
        new = tl.maximum(top, tl.max(a, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(a - safe[None, :]), 0)
        top = new
    log_f = (top + tl.log(total) - tl.log(R + 0.0)) / alpha
    x = (j - low) / tl.maximum(end - 1 - low, 1).to(tl.float32)
    place = -beta * tl.where(x > 0, tl.exp(prior_power * tl.log(tl.maximum(x, tiny))), 0.0)
    place += end_weight * tl.log(tl.maximum(1 - x, tiny))
    norm = tl.load(key_norm + bk * s_max + j, mask=inside, other=1.0)
    log_r = prior_weight * place - norm_weight * tl.log(tl.maximum(norm, tiny))
    tl.store(pair + bk * 2 * width + j, log_f, mask=inside)
    tl.store(pair + (bk * 2 + 1) * width + j, log_r, mask=inside)


@triton.jit
def logs(pair, lse, bk, j, inside, width, NORM_F: tl.constexpr):
    """log f and log r of a block of candidates, normalised (f only with NORM_F)."""
    log_f = tl.load(pair + bk * 2 * width + j, mask=inside, other=float("-inf"))
    log_r = tl.load(pair + (bk * 2 + 1) * width + j, mask=inside, other=float("-inf"))
    if NORM_F:
        log_f -= tl.load(lse + bk * 2)
    return log_f, log_r - tl.load(lse + bk * 2 + 1)


@triton.jit
def dots_kernel(pair, lse, dots, high, low, width, n_kv, NORM_F: tl.constexpr, CHUNK: tl.constexpr):
    """A block's part of <f, f>, <f, r> and <r, r>: dots (B * n_kv, 3, blocks)."""
    block, bk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    blocks = tl.num_programs(0)
    j = block * CHUNK + tl.arange(0, CHUNK)
    inside = (j >= low) & (j < tl.load(high + bk // n_kv))
    log_f, log_r = logs(pair, lse, bk, j, inside, width, NORM_F)
    f, r = tl.exp(log_f), tl.exp(log_r)
    tl.store(dots + (bk * 3 + 0) * blocks + block, tl.sum(f * f, 0))
    tl.store(dots + (bk * 3 + 1) * blocks + block, tl.sum(f * r, 0))
    tl.store(dots + (bk * 3 + 2) * blocks + block, tl.sum(r * r, 0))


@triton.jit
def fuse_kernel(
    pair, lse, dots, log_s, high, low, width, n_kv, blocks, largest,
    NORM_F: tl.constexpr, PRIOR: tl.constexpr, GEOMETRIC: tl.constexpr,
    CHUNK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """`selector.fuse_arithmetic`, or the geometric fusion before it is normalised; without PRIOR log f."""
    bk = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = (j >= low) & (j < tl.load(high + bk // n_kv))
    log_f, log_r = logs(pair, lse, bk, j, inside, width, NORM_F)
    s = log_f
    if PRIOR:
        i = tl.arange(0, BLOCKS)
        ff = tl.sum(tl.load(dots + (bk * 3 + 0) * blocks + i, mask=i < blocks, other=0.0), 0)
        fr = tl.sum(tl.load(dots + (bk * 3 + 1) * blocks + i, mask=i < blocks, other=0.0), 0)
        rr = tl.sum(tl.load(dots + (bk * 3 + 2) * blocks + i, mask=i < blocks, other=0.0), 0)
        spread = ff - 2 * fr + rr
        lam = tl.where(spread > 0, (ff - fr) / tl.where(spread > 0, spread, 1.0), 0.0)
        lam = tl.minimum(tl.maximum(lam, 0.0), largest)
        if GEOMETRIC:
            s = (1 - lam) * log_f + lam * log_r
        else:
            a, c = log_f + tl.log(1 - lam), log_r + tl.log(lam)
            top = tl.maximum(a, c)
            s = top + tl.log(tl.exp(a - top) + tl.exp(c - top))
    tl.store(log_s + bk * width + j, s, mask=inside)


@triton.jit
def nms_kernel(
    log_s, lse, out, high, low, width, n_kv,
    NORM: tl.constexpr, NMS: tl.constexpr, RADIUS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """`selector.suppress_neighbours` where NMS, after subtracting lse where NORM; -inf for what is no
    candidate.
    """
    bk = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    end = tl.load(high + bk // n_kv)
    inside = (j >= low) & (j < end)
    s = tl.load(log_s + bk * width + j, mask=inside, other=float("-inf"))
    best = s
    if NMS:
        for by in range(-RADIUS, RADIUS + 1):
            seen = inside & (j + by >= low) & (j + by < end)
            best = tl.maximum(best, tl.load(log_s + bk * width + j + by, mask=seen, other=float("-inf")))
    s = tl.where(inside, s - (best - s), float("-inf"))
    if NORM:
        s -= tl.load(lse + bk)
    tl.store(out + bk * width + j, s, mask=j < width)


@triton.jit
def exclusive_kernel(log_s, out, width, n_kv, temperature, weight, tiny, CHUNK: tl.constexpr):
    """`selector.exclude_across_heads`: program (block, b * n_kv + head)."""
    bk = tl.program_id(1).to(tl.int64)
    b = bk // n_kv
    j = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    own = tl.load(log_s + bk * width + j, mask=j < width, other=float("-inf"))
    top = tl.full((CHUNK,), float("-inf"), tl.float32)
    total = tl.zeros((CHUNK,), tl.float32)
    for h in range(0, n_kv):
        s = tl.load(log_s + (b * n_kv + h) * width + j, mask=j < width, other=float("-inf")) / temperature
        new = tl.maximum(top, s)
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(top - safe) + tl.exp(s - safe)
        top = new
    share = tl.where(own > float("-inf"), tl.exp(own / temperature - top) / total, 0.0)
    tl.store(out + bk * width + j, own + weight * tl.log(tl.maximum(share, tiny)), mask=j < width)


@triton.jit
def count_kernel(score, threshold, above_out, equal_out, width, CHUNK: tl.constexpr):
    """How many scores of a block are above the row's threshold, and how many equal to it."""
    block, bk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    j = block * CHUNK + tl.arange(0, CHUNK)
    s, at = tl.load(score + bk * width + j, mask=j < width, other=float("-inf")), tl.load(threshold + bk)
    tl.store(above_out + bk * tl.num_programs(0) + block, tl.sum((s > at).to(tl.int32), 0))
    tl.store(equal_out + bk * tl.num_programs(0) + block, tl.sum((s == at).to(tl.int32), 0))


@triton.jit
def pack_kernel(
    score, threshold, above, equal, slots, width, N, blocks, CHUNK: tl.constexpr, BLOCKS: tl.constexpr
):
    """`selector.top_n` from the N-th largest score: the positions above it and the first of the equal ones,
    ascending, each block to its own place.
    """
    block, bk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCKS)
    all_above = tl.load(above + bk * blocks + i, mask=i < blocks, other=0)
    all_equal = tl.load(equal + bk * blocks + i, mask=i < blocks, other=0)
    room = N - tl.sum(all_above, 0)
    above_before = tl.sum(tl.where(i < block, all_above, 0), 0)
    equal_before = tl.sum(tl.where(i < block, all_equal, 0), 0)
    j = block * CHUNK + tl.arange(0, CHUNK)
    s, at = tl.load(score + bk * width + j, mask=j < width, other=float("-inf")), tl.load(threshold + bk)
    ties = (s == at).to(tl.int32)
    chosen = (s > at) | ((ties > 0) & (equal_before + tl.cumsum(ties, 0) <= room))
    place = above_before + tl.minimum(equal_before, room) + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(slots + bk * N + place, j.to(tl.int64), mask=chosen & (j < width) & (place < N))


def top_n(score, n: int):
    """Positions (B, K, n) of the n largest scores of every head (B, K, width), as `selector.top_n`."""
    B, n_kv, width = score.shape
    blocks, device = triton.cdiv(width, CHUNK), score.device
    threshold = score.topk(n, sorted=False).values.amin(-1)  # (B, K)
    above, equal = torch.empty((2, B * n_kv, blocks), dtype=torch.int32, device=device)
    slots = torch.zeros((B, n_kv, n), dtype=torch.int64, device=device)
    grid = (blocks, B * n_kv)
    count_kernel[grid](score, threshold, above, equal, width, CHUNK=CHUNK)
    sizes = dict(CHUNK=CHUNK, BLOCKS=power_of_2(blocks))
    pack_kernel[grid](score, threshold, above, equal, slots, width, n, blocks, **sizes)
    return slots


def select(scores, key_norm, past, high, n, cfg):
    if cfg.selector not in SCORES:
        raise ValueError(
            f"selector {cfg.selector} has no Triton passes; allowed with backend triton are "
            f"{', '.join(SCORES)}: choose one, or backend reference"
        )
    steps = selector.STEPS[cfg.selector] if cfg.steps is None else cfg.steps
    return top_n(SCORES[cfg.selector](Passes(scores, high, cfg.n_sink), key_norm, past, steps, cfg.fusion), n)


class Passes:
    """Launches passes over the candidates of one layer's scores (B, K, R, width)."""

    def __init__(self, scores, high, low: int):
        self.scores, self.high, self.low = scores, high, low
        self.B, self.n_kv, self.R, self.width = scores.shape
        self.blocks = triton.cdiv(self.width, CHUNK)

    def new(self, *shape):
        return torch.empty((self.B, self.n_kv, *shape), dtype=torch.float32, device=self.scores.device)

    def run(self, kernel, *args, **constants):
        kernel[(self.blocks, self.B * self.n_kv)](*args, CHUNK=CHUNK, **constants)

    def lse(self, x, past=None):
        """(log sum_j e^(x_j) of every row of x (B, K, rows, width), sums of past by block)."""
        rows, sums = x.shape[2], self.new(self.blocks)
        top, total, lse = self.new(rows, self.blocks), self.new(rows, self.blocks), self.new(rows)
        self.run(
            partial_kernel, x, sums if past is None else past, top, total, sums, self.high, self.low, rows,
            self.width, 0 if past is None else past.shape[2], self.n_kv, PAST=past is not None, TILE=TILE,
        )  # fmt: skip
        lse_kernel[(lse.numel(),)](top, total, lse, self.blocks, TILE=64, num_warps=1)
        return lse, sums


def follow(passes: Passes, key_norm, past, steps, fusion):
    """`selector.follow`, (B, K, width)."""
    p, keeps = passes, "past" in steps
    lse, sums = p.lse(p.scores, past if keeps else None)
    f, peak, score = p.new(p.width), p.new(p.width), p.new(p.width)
    p.run(
        evidence_kernel, p.scores, lse, past, sums, f, peak, p.high, p.low, p.R, p.width, past.shape[2],
        p.n_kv, p.blocks, PAST=keeps, TILE=TILE, BLOCKS=power_of_2(p.blocks),
    )  # fmt: skip
    weight = selector.FOLLOWED if "followers" in steps else 0.0
    reach = selector.FOLLOWERS if "followers" in steps else 0
    p.run(
        follow_kernel, f, peak, score, p.high, p.low, p.width, p.n_kv, weight,
        HEADS="heads" in steps, FOLLOWERS=reach,
    )  # fmt: skip
    return score


def paper(passes: Passes, key_norm, past, steps, fusion):
    """`selector.paper`, (B, K, width)."""
    p, s = passes, selector
    power, prior, geometric = "power_mean" in steps, "prior" in steps, fusion == "geometric"
    pair, log_s, out = p.new(2, p.width), p.new(1, p.width), p.new(p.width)
    p.run(
        power_kernel, p.scores, p.lse(p.scores)[0], key_norm, pair, p.high, p.low, p.R, p.width,
        key_norm.shape[2], p.n_kv, s.ALPHA if power else 1.0, s.BETA, s.PRIOR_POWER, s.NORM_WEIGHT,
        s.PRIOR_WEIGHT, s.END_WEIGHT, s.TINY, TILE=TILE,
    )  # fmt: skip
    lse, dots = p.lse(pair)[0], p.new(3, p.blocks)
    if prior:
        p.run(dots_kernel, pair, lse, dots, p.high, p.low, p.width, p.n_kv, NORM_F=power)
    p.run(
        fuse_kernel, pair, lse, dots, log_s, p.high, p.low, p.width, p.n_kv, p.blocks,
        s.MAX_FUSION.get(p.R, s.OTHER_FUSION), NORM_F=power, PRIOR=prior, GEOMETRIC=geometric,
        BLOCKS=power_of_2(p.blocks),
    )  # fmt: skip
    normal = prior and geometric
    p.run(
        nms_kernel, log_s, p.lse(log_s)[0] if normal else lse, out, p.high, p.low, p.width, p.n_kv,
        NORM=normal, NMS="nms" in steps, RADIUS=s.NMS_RADIUS,
    )  # fmt: skip
    if "exclusive" not in steps or p.n_kv <= 2:
        return out
    score = p.new(p.width)
    p.run(exclusive_kernel, out, score, p.width, p.n_kv, s.HEAD_TEMPERATURE, s.HEAD_WEIGHT, s.TINY)
    return score


SCORES = {"follow": follow, "paper": paper}


class Overlap:
    """`sfi.InLine`'s twin: a layer's refresh runs on a second stream, beside the next layers' work.

    Three things must not meet.  A refresh reads what the main stream has just written, so the side stream
    waits for an event after it.  The next pass reads the memory and writes key norms, so it waits, layer by
    layer, for the event after that layer's refresh.  Scores lie in a ring of two buffers, so the main stream
    waits before it writes a buffer that an earlier layer's refresh still reads.
    """

    def __init__(self, layers: int, cuda=torch.cuda):
        self.cuda, self.side = cuda, cuda.Stream()
        self.done = [None] * layers  # after a layer's refresh; None: the main stream has waited for it
        self.ring, self.turn = [None, None], 0
        self.read = [None, None]  # after the refresh that reads a buffer of the ring

    def before(self, layer):
        if self.done[layer] is not None:
            self.cuda.current_stream().wait_event(self.done[layer])
            self.done[layer] = None

    def room(self, shape, device):
        self.turn, size = 1 - self.turn, math.prod(shape)
        if self.read[self.turn] is not None:
            self.cuda.current_stream().wait_event(self.read[self.turn])
        if self.ring[self.turn] is None or self.ring[self.turn].numel() < size:
            self.ring[self.turn] = torch.empty(size, dtype=torch.float32, device=device)
        return self.ring[self.turn][:size].view(shape)

    def beside(self, layer, work, tensors):
        ready, done = self.cuda.Event(), self.cuda.Event()
        ready.record(self.cuda.current_stream())
        self.side.wait_event(ready)
        with self.cuda.stream(self.side):
            work()
            done.record(self.side)
        for tensor in tensors:  # freed on the main stream while the side stream may still read them
            tensor.record_stream(self.side)
        self.done[layer] = self.read[self.turn] = done

    def join(self):
        for layer in range(len(self.done)):
            self.before(layer)


class Captured:
    """A forward pass as a CUDA graph: one launch replays it with other inputs of the same shapes."""

    def __init__(self, forward, *inputs):
        self.inputs = [x.clone() for x in inputs]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles and allocates what a capture must not
            for _ in range(2):
                forward(*self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = forward(*self.inputs)

    def __call__(self, *inputs):
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        self.graph.replay()
        return self.out.clone()


def triton_ops(cuda: bool, overlap=True, graphs=True) -> Ops:
    """The optimized path; off a GPU, in Triton's interpreter, without streams and graphs."""
    schedule = Overlap if cuda and overlap else InLine
    return Ops("triton", append, attend, select, rebuild, schedule, Captured if cuda and graphs else None)
