"""The optimized path: Triton twins of the leaf operations, and a schedule that selects beside the model.

`triton_ops()` gives an `Ops` for `sfi.Engine`; every function must equal the reference of the same name
(`append` and `rebuild` in `memory.py`, `attend` in `model.py`, `select` in `selector.py`).  Attention is
split along the length, in the manner of Flash-Decoding, so that few rows still fill a GPU.  Rows tell by
`start`, `length` and `recent_start` on the device what they read and whether they are refreshed, so no launch
waits for the host.

    a slow step
    main stream   | append 0, attend 0, mlp 0 | append 1, attend 1, mlp 1 | append 2, attend 2 ... | token
                                  \\ scores 0                  \\ scores 1                  \\
    side stream                    | select 0, rebuild 0 |      | select 1, rebuild 1 |      | select 2 ...

    The next step, if it is slow for some row, waits for the event after rebuild 0 before append 0, and so on,
    layer by layer.  A step that refreshes no row waits for all of them; then it is one CUDA graph, captured
    once and replayed.

The host uploads a few numbers a row, and reads once a token: the tokens, and whether the logits were finite.
The G query heads of a KV head are one tile, so K and V are read once.  A mixture of experts chooses its
experts on the host, so it is not captured.

Nothing here has run on a GPU yet.  In CI every kernel runs in Triton's interpreter (TRITON_INTERPRET=1)
against the reference, whole decodes too, the schedule with a side stream that runs as late as it may,
captured steps with a stand-in that keeps what the first pass read of the host; and `study/compile.py`
compiles every kernel for A100, H100 and B200.  Letters: see `model.py`.  Read before: `sfi.py`; next:
`selector_kernels.py`.
"""

import importlib.util
import math
import sys
from functools import cache, partial
from importlib.machinery import PathFinder
from pathlib import Path

import torch

from memory import InLine, Ops
from selector_kernels import power_of_2, select, tl, triton

LOG2E = tl.constexpr(math.log2(math.e))
PROGRAMS = 512  # attention is split until so many programs run, whatever the GPU: the same sums everywhere
MAX_SPLITS = 64


@triton.jit
def append_kernel(
    k, v, K, V, key_norm, position, slot, T, n_kv, cap, cache_row, cache_head, s_max,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`memory.append`: program (b * T + t, head) writes one token's key and value, and the key's norm."""
    bt, h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, t = (bt // T).to(tl.int64), bt % T
    d = tl.arange(0, BLOCK_D)
    p, m = tl.load(position + b), tl.load(slot + b)
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


def append(k, v, K, V, key_norm, position, slot):
    B, T, n_kv, D = k.shape
    cap = K.shape[2] - key_norm.shape[2]
    append_kernel[(B * T, n_kv)](
        k.contiguous(), v.contiguous(), K, V, key_norm, position, slot, T, n_kv, cap,
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


def attend_sizes(dtype, G: int, T: int, D: int, scored: bool) -> dict:
    """Tile sizes of `attend_kernel`: what fits shared memory and registers from an A100 on."""
    wide, many = dtype == torch.float32, G * T > 16
    if wide:
        return dict(ROWS=32 if many else 16, BLOCK=16 if D > 96 else 32, num_warps=4, num_stages=2)
    small = scored or D > 128  # the addresses of the scores take registers, which a large tile would spill
    rows, block = (16, 64) if not many else (64, 32) if small else (128, 64)
    return dict(ROWS=rows, BLOCK=block, num_warps=8 if many else 4, num_stages=3)


def attend(q, K, V, start, length, scores=None):
    B, T, H, D = q.shape
    n_kv, slots = K.shape[1:3]
    G = H // n_kv
    sizes = attend_sizes(q.dtype, G, T, D, scores is not None)
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
    K, V, slots, recent_start, length, n_kv, cap, n_sink, N, cache_row, cache_head,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`memory.rebuild`: program (block, b * n_kv + head) copies BLOCK slots of one head's memory."""
    bk = tl.program_id(1).to(tl.int64)
    b, h = bk // n_kv, bk % n_kv
    first, n = tl.load(recent_start + b), tl.load(length + b)
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


def rebuild(K, V, slots, cap, n_sink, recent_start, length):
    B, n_kv, _, D = K.shape
    block = 32
    rebuild_kernel[(triton.cdiv(cap, block), B * n_kv)](
        K, V, slots, recent_start, length, n_kv, cap, n_sink, slots.shape[2], K.stride(0), K.stride(1),
        D=D, BLOCK_D=power_of_2(D), BLOCK=block,
    )  # fmt: skip


class Overlap:
    """`memory.InLine`'s twin: a layer's refresh runs on a second stream, beside the next layers' work.

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

    def wait_for(self, layer):
        if self.done[layer] is not None:
            self.cuda.current_stream().wait_event(self.done[layer])
            self.done[layer] = None

    def scores_buffer(self, shape, device):
        self.turn, size = 1 - self.turn, math.prod(shape)
        if self.read[self.turn] is not None:
            self.cuda.current_stream().wait_event(self.read[self.turn])
        if self.ring[self.turn] is None or self.ring[self.turn].numel() < size:
            self.ring[self.turn] = torch.empty(size, dtype=torch.float32, device=device)
        return self.ring[self.turn][:size].view(shape)

    def refresh(self, layer, work, tensors):
        ready, done = self.cuda.Event(), self.cuda.Event()
        ready.record(self.cuda.current_stream())
        self.side.wait_event(ready)
        with self.cuda.stream(self.side):
            work()
            done.record(self.side)
        for tensor in tensors:  # freed on the main stream while the side stream may still read them
            tensor.record_stream(self.side)
        self.done[layer] = self.read[self.turn] = done

    def wait_for_all(self):
        for layer in range(len(self.done)):
            self.wait_for(layer)

    def __del__(self):
        """The engine's memory may now be given to others on the main stream."""
        self.wait_for_all()


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
    capture = Captured if cuda and graphs else None
    return Ops("triton", append, attend, select, rebuild, schedule=schedule, capture=capture)


# transformers looks for a package that is called `kernels` too, and in this folder finds this file.  What it
# asks for is handed on to that package, if it is installed; its modules are found through `__path__`.
OTHERS = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent]
PACKAGE = PathFinder.find_spec("kernels", OTHERS)
__path__ = list(PACKAGE.submodule_search_locations or ()) if PACKAGE else []


@cache
def package():
    module = importlib.util.module_from_spec(PACKAGE)
    PACKAGE.loader.exec_module(module)
    return module


def __getattr__(name):
    if PACKAGE is None or name.startswith("__"):
        raise AttributeError(f"kernels.py has no {name}")
    return getattr(package(), name)
