"""The compact memory in the cache: the leaf operations that fill it, and when they run.

Layout: in each head slots [0, cap) are the compact memory and [cap, cap + S_max) the full cache, in one
allocation.  Both have the same strides, so a (start, length) per row chooses what it reads, and slow and
fast rows of a batch share one attention call.

The leaf operations (`append`, `attend`, `select`, `rebuild`) come as one `Ops` and may be replaced by faster
twins (`kernels.py`); `REFERENCE` defines what each must return.  Letters: see `model.py`.  Read before:
`model.py`, `selector.py`; next: `sfi.py`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from model import attend
from selector import select


def append(k, v, K, V, key_norm, position, memory):
    """Cache T new tokens of each row: in the full cache, and at a compact-memory slot where one is given.

    k, v (B, T, K, D); K, V (B, K, cap + S_max, D) and key_norm (B, K, S_max) fp32 of one layer, written in
    place. position (B,) int64: full-cache position of the first token, -1 for a row that has ended; memory
    (B,) int64: slot, or -1.
    """
    cap, T = K.shape[2] - key_norm.shape[2], k.shape[1]
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # (B, K, T, D)
    for b, (p, m) in enumerate(zip(position.tolist(), memory.tolist(), strict=True)):
        if p < 0:
            continue
        key_norm[b, :, p : p + T] = k[b].float().norm(dim=-1)
        for slot in (cap + p, m) if m >= 0 else (cap + p,):
            K[b, :, slot : slot + T] = k[b]
            V[b, :, slot : slot + T] = v[b]


def rebuild(K, V, slots, cap, n_sink, high, length):
    """Copy [sinks | selected | recent window] of every refreshed row from its full cache into its memory,
    packed.

    K, V (B, K, cap + S_max, D) of one layer, written in place; slots (B, K, N) int64 ascending positions;
    high, length (B,) int64: row b's recent window is [high[b], length[b]); high[b] = -1: the row is not
    refreshed. Uses n_sink + N + length[b] - high[b] slots.
    """
    n = n_sink + slots.shape[2]
    for b, (first, end) in enumerate(zip(high.tolist(), length.tolist(), strict=True)):
        if first < 0:
            continue
        for cache in (K[b], V[b]):
            full = cache[:, cap:]
            cache[:, :n_sink] = full[:, :n_sink]
            for memory, whole, chosen in zip(cache, full, slots[b], strict=True):  # faster than one index
                torch.index_select(whole, 0, chosen, out=memory[n_sink:n])
            cache[:, n : n + end - first] = full[:, first:end]


class InLine:
    """When a layer's memory is refreshed: at once, before the next layer computes."""

    def __init__(self, layers: int):
        self.buffer = torch.empty(0)

    def before(self, layer: int):
        """Called before a layer's memory, past or key norms are touched: its refresh must have ended."""

    def room(self, shape: tuple, device) -> torch.Tensor:
        """An fp32 buffer for the scores of the layer at hand."""
        if self.buffer.numel() < math.prod(shape):  # kept: fresh memory comes slowly from 32 MB on
            self.buffer = torch.empty(shape, device=device)
        return self.buffer.view(-1)[: math.prod(shape)].view(shape)

    def beside(self, layer: int, work: Callable, tensors: tuple):
        """Do work() after what is already under way; `tensors` are those it reads that nobody keeps."""
        work()

    def join(self):
        """Wait for every layer's refresh."""


class Ops(NamedTuple):
    """One implementation of the leaf operations; `REFERENCE` defines what each must return."""

    name: str
    append: Callable
    attend: Callable
    select: Callable
    rebuild: Callable
    schedule: Callable = InLine  # made with the number of layers, by every engine
    capture: Callable | None = None  # made with a forward pass and its inputs; what it gives replays the pass


REFERENCE = Ops("reference", append, attend, select, rebuild)
