"""The Selector as Triton passes: `select`, the twin of `selector.select`, for `follow` and `paper`.

A handful of launches, each over blocks of positions of all rows and heads, joined by small tables of partial
results (B * n_kv, rows, blocks).  Program (block, b * n_kv + head) works on CHUNK positions; the candidates
of row b are n_sink .. recent_start[b] - 1.  Letters: see `model.py`.  Read before: `selector.py`; used by
`kernels.py`.
"""

from types import SimpleNamespace

import torch

import selector

try:
    import triton
    import triton.language as tl
except ImportError:  # then nothing here can run, but `import kernels` must work all the same: see there
    triton, tl = SimpleNamespace(jit=lambda kernel: kernel), SimpleNamespace(constexpr=lambda x: x)

CHUNK = 1024  # positions a program
TILE = 4  # evidence rows it holds at a time; with more, registers spill


def power_of_2(n: int) -> int:
    return max(triton.next_power_of_2(n), 16)


@triton.jit
def partial_kernel(
    x, past, max_out, sum_out, past_out, recent_start, n_sink, R, width, s_max, n_kv,
    PAST: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of every row of x (B, n_kv, R, width): its maximum over a block of the candidates, and
    sum_j e^(x_j - max); of past (B, n_kv, s_max): its sum.
    """
    block, bk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    blocks = tl.num_programs(0)
    j = block * CHUNK + tl.arange(0, CHUNK)
    inside = (j >= n_sink) & (j < tl.load(recent_start + bk // n_kv))
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
    scores, lse, past, past_sums, f_out, peak_out, recent_start, n_sink, R, width, s_max, n_kv, blocks,
    PAST: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """f and the largest p of `selector.follow`, p_r = e^(s_r - lse_r): f is the mean over the R rows, with
    PAST (f + PAST * past) / sum(f + PAST * past), which becomes past.
    """
    block, bk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    j = block * CHUNK + tl.arange(0, CHUNK)
    inside = (j >= n_sink) & (j < tl.load(recent_start + bk // n_kv))
    f, peak = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
    for r0 in range(0, R, TILE):
        r = r0 + tl.arange(0, TILE)
        both = (r < R)[:, None] & inside[None, :]
        s = tl.load(scores + (bk * R + r)[:, None] * width + j[None, :], mask=both, other=float("-inf"))
        p = tl.exp(s - tl.load(lse + bk * R + r, mask=r < R, other=0.0)[:, None])  # (TILE, CHUNK)
        f += tl.sum(p, 0)
        peak = tl.maximum(peak, tl.max(p, 0))
    f = f / R
    if PAST > 0:
        i = tl.arange(0, BLOCKS)
        total = 1.0 + PAST * tl.sum(tl.load(past_sums + bk * blocks + i, mask=i < blocks, other=0.0), 0)
        f = (f + PAST * tl.load(past + bk * s_max + j, mask=inside, other=0.0)) / total
        tl.store(past + bk * s_max + j, f, mask=inside)
    tl.store(f_out + bk * width + j, f, mask=j < width)
    tl.store(peak_out + bk * width + j, peak, mask=j < width)


@triton.jit
def follow_kernel(
    f_in, peak_in, score, recent_start, n_sink, width, n_kv, weight,
    HEADS: tl.constexpr, FOLLOWERS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The rest of `selector.follow`: half the mean over the KV heads, and at least `weight` times the largest
    peak of the FOLLOWERS positions before; -inf for what is no candidate.
    """
    bk = tl.program_id(1).to(tl.int64)
    b = bk // n_kv
    j = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = (j >= n_sink) & (j < tl.load(recent_start + b))
    f = tl.load(f_in + bk * width + j, mask=inside, other=0.0)
    if HEADS:
        total = tl.zeros((CHUNK,), tl.float32)
        for h in range(0, n_kv):
            total += tl.load(f_in + (b * n_kv + h) * width + j, mask=inside, other=0.0)
        f = (f + total / n_kv) / 2
    before = tl.zeros((CHUNK,), tl.float32)
    for back in range(1, FOLLOWERS + 1):
        seen = inside & (j - back >= n_sink)
        before = tl.maximum(before, tl.load(peak_in + bk * width + j - back, mask=seen, other=0.0))
    f = tl.maximum(f, weight * before)
    tl.store(score + bk * width + j, tl.where(inside, f, float("-inf")), mask=j < width)


@triton.jit
def power_kernel(
    scores, lse, key_norm, pair, recent_start, n_sink, R, width, s_max, n_kv, alpha, beta, prior_power,
    norm_weight, prior_weight, end_weight, tiny, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The paper's evidence and prior before they are normalised: pair (B, n_kv, 2, width) gets
    log[(mean_r p_r^alpha)^(1/alpha)] and the structural prior's log.
    """
    bk = tl.program_id(1).to(tl.int64)
    end = tl.load(recent_start + bk // n_kv)
    j = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = (j >= n_sink) & (j < end)
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
    x = (j - n_sink) / tl.maximum(end - 1 - n_sink, 1).to(tl.float32)
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
def dots_kernel(
    pair, lse, dots, recent_start, n_sink, width, n_kv, NORM_F: tl.constexpr, CHUNK: tl.constexpr
):
    """A block's part of <f, f>, <f, r> and <r, r>: dots (B * n_kv, 3, blocks)."""
    block, bk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    blocks = tl.num_programs(0)
    j = block * CHUNK + tl.arange(0, CHUNK)
    inside = (j >= n_sink) & (j < tl.load(recent_start + bk // n_kv))
    log_f, log_r = logs(pair, lse, bk, j, inside, width, NORM_F)
    f, r = tl.exp(log_f), tl.exp(log_r)
    tl.store(dots + (bk * 3 + 0) * blocks + block, tl.sum(f * f, 0))
    tl.store(dots + (bk * 3 + 1) * blocks + block, tl.sum(f * r, 0))
    tl.store(dots + (bk * 3 + 2) * blocks + block, tl.sum(r * r, 0))


@triton.jit
def fuse_kernel(
    pair, lse, dots, log_s, recent_start, n_sink, width, n_kv, blocks, largest,
    NORM_F: tl.constexpr, PRIOR: tl.constexpr, GEOMETRIC: tl.constexpr,
    CHUNK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """`selector.fuse_arithmetic`, or the geometric fusion before it is normalised; without PRIOR log f."""
    bk = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = (j >= n_sink) & (j < tl.load(recent_start + bk // n_kv))
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
    log_s, lse, out, recent_start, n_sink, width, n_kv,
    NORM: tl.constexpr, NMS: tl.constexpr, RADIUS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """`selector.suppress_neighbours` where NMS, after subtracting lse where NORM; -inf for what is no
    candidate.
    """
    bk = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    end = tl.load(recent_start + bk // n_kv)
    inside = (j >= n_sink) & (j < end)
    s = tl.load(log_s + bk * width + j, mask=inside, other=float("-inf"))
    best = s
    if NMS:
        for by in range(-RADIUS, RADIUS + 1):
            seen = inside & (j + by >= n_sink) & (j + by < end)
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
    left = N - tl.sum(all_above, 0)
    above_before = tl.sum(tl.where(i < block, all_above, 0), 0)
    equal_before = tl.sum(tl.where(i < block, all_equal, 0), 0)
    j = block * CHUNK + tl.arange(0, CHUNK)
    s, at = tl.load(score + bk * width + j, mask=j < width, other=float("-inf")), tl.load(threshold + bk)
    ties = (s == at).to(tl.int32)
    chosen = (s > at) | ((ties > 0) & (equal_before + tl.cumsum(ties, 0) <= left))
    place = above_before + tl.minimum(equal_before, left) + tl.cumsum(chosen.to(tl.int32), 0) - 1
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


def unsupported(cfg) -> str | None:
    """Why these passes cannot select as cfg says; None if they can."""
    if cfg.selector not in KERNELS:
        return f"there are no kernels for selector {cfg.selector}; give one of {', '.join(KERNELS)}"


def select(scores, key_norm, past, recent_start, n, cfg):
    """`selector.select`, without reading anything on the host; ValueError for a selector without kernels."""
    if problem := unsupported(cfg):
        raise ValueError(problem)
    return top_n(KERNELS[cfg.selector](Passes(scores, recent_start, cfg.n_sink), key_norm, past, cfg), n)


class Passes:
    """Launches passes over the candidates of one layer's scores (B, K, R, width)."""

    def __init__(self, scores, recent_start, n_sink: int):
        self.scores, self.recent_start, self.n_sink = scores, recent_start, n_sink
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
            partial_kernel, x, sums if past is None else past, top, total, sums, self.recent_start,
            self.n_sink, rows, self.width, 0 if past is None else past.shape[2], self.n_kv,
            PAST=past is not None, TILE=TILE,
        )  # fmt: skip
        lse_kernel[(lse.numel(),)](top, total, lse, self.blocks, TILE=64, num_warps=1)
        return lse, sums


def follow(passes: Passes, key_norm, past, cfg):
    """`selector.follow`, (B, K, width)."""
    p, keeps = passes, cfg.runs("past")
    lse, sums = p.lse(p.scores, past if keeps else None)
    f, peak, score = p.new(p.width), p.new(p.width), p.new(p.width)
    p.run(
        evidence_kernel, p.scores, lse, past, sums, f, peak, p.recent_start, p.n_sink, p.R, p.width,
        past.shape[2], p.n_kv, p.blocks, PAST=selector.PAST if keeps else 0.0, TILE=TILE,
        BLOCKS=power_of_2(p.blocks),
    )  # fmt: skip
    weight = selector.FOLLOWED if cfg.runs("followers") else 0.0
    reach = selector.FOLLOWERS if cfg.runs("followers") else 0
    p.run(
        follow_kernel, f, peak, score, p.recent_start, p.n_sink, p.width, p.n_kv, weight,
        HEADS=cfg.runs("heads"), FOLLOWERS=reach,
    )  # fmt: skip
    return score


def paper(passes: Passes, key_norm, past, cfg):
    """`selector.paper`, (B, K, width)."""
    p, s = passes, selector
    power, prior, geometric = cfg.runs("power_mean"), cfg.runs("prior"), cfg.fusion == "geometric"
    pair, log_s, out = p.new(2, p.width), p.new(1, p.width), p.new(p.width)
    p.run(
        power_kernel, p.scores, p.lse(p.scores)[0], key_norm, pair, p.recent_start, p.n_sink, p.R, p.width,
        key_norm.shape[2], p.n_kv, s.ALPHA if power else 1.0, s.BETA, s.PRIOR_POWER, s.NORM_WEIGHT,
        s.PRIOR_WEIGHT, s.END_WEIGHT, s.TINY, TILE=TILE,
    )  # fmt: skip
    lse, dots = p.lse(pair)[0], p.new(3, p.blocks)
    if prior:
        p.run(dots_kernel, pair, lse, dots, p.recent_start, p.n_sink, p.width, p.n_kv, NORM_F=power)
    p.run(
        fuse_kernel, pair, lse, dots, log_s, p.recent_start, p.n_sink, p.width, p.n_kv, p.blocks,
        s.MAX_FUSION.get(p.R, s.OTHER_FUSION), NORM_F=power, PRIOR=prior, GEOMETRIC=geometric,
        BLOCKS=power_of_2(p.blocks),
    )  # fmt: skip
    normal = prior and geometric
    p.run(
        nms_kernel, log_s, p.lse(log_s)[0] if normal else lse, out, p.recent_start, p.n_sink, p.width, p.n_kv,
        NORM=normal, NMS=cfg.runs("nms"), RADIUS=s.NMS_RADIUS,
    )  # fmt: skip
    if not cfg.runs("exclusive") or p.n_kv <= 2:
        return out
    score = p.new(p.width)
    p.run(exclusive_kernel, out, score, p.width, p.n_kv, s.HEAD_TEMPERATURE, s.HEAD_WEIGHT, s.TINY)
    return score


KERNELS = {"follow": follow, "paper": paper}
