"""The compact memory in the cache: the operations that fill it, and the list of what a backend replaces.

Layout: in each head slots [0, cap) are the compact memory and [cap, cap + S_max) the full cache, in one
allocation.  Both have the same strides, so a (start, length) per row chooses what it reads, and slow and
fast rows of a batch share one attention call.

`Ops` lists the operations that a backend may replace by faster twins; `REFERENCE` defines what each must
return.  `cpu.py` and `kernels.py` are backends.  Letters: see `model.py`.  Read before: `model.py`,
`selector.py`; next: `trigger.py`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from model import PARTS, KVCache, Parts, attend
from selector import select


def append(k, v, K, V, key_norm, position, slot):
    """Cache T new tokens of each row: in the full cache, and at a compact-memory slot where one is given.

    k, v (B, T, K, D); K, V (B, K, cap + S_max, D) and key_norm (B, K, S_max) fp32 of one layer, written in
    place.  position (B,) int64: full-cache position of the first token, -1 for a row that has ended; slot
    (B,) int64: in the compact memory, or -1.
    """
    cap, T = K.shape[2] - key_norm.shape[2], k.shape[1]
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # (B, K, T, D)
    for b, (p, s) in enumerate(zip(position.tolist(), slot.tolist(), strict=True)):
        if p < 0:
            continue
        key_norm[b, :, p : p + T] = k[b].float().norm(dim=-1)
        for first in (cap + p, s) if s >= 0 else (cap + p,):
            K[b, :, first : first + T] = k[b]
            V[b, :, first : first + T] = v[b]


def rebuild(K, V, slots, cap, n_sink, recent_start, length):
    """Copy [sinks | selected | recent window] of every refreshed row from its full cache into its memory,
    packed.

    K, V (B, K, cap + S_max, D) of one layer, written in place; slots (B, K, N) int64 ascending positions;
    recent_start, length (B,) int64: row b's recent window is [recent_start[b], length[b]); recent_start[b] =
    -1: the row is not refreshed.  Uses n_sink + N + length[b] - recent_start[b] slots.
    """
    for b, (first, end) in enumerate(zip(recent_start.tolist(), length.tolist(), strict=True)):
        if first < 0:
            continue
        for cache in (K[b], V[b]):  # (K, cap + S_max, D)
            full = cache[:, cap:]
            selected = full.take_along_dim(slots[b, :, :, None], dim=1)  # (K, N, D)
            packed = torch.cat([full[:, :n_sink], selected, full[:, first:end]], dim=1)
            cache[:, : packed.shape[1]] = packed


class InLine:
    """When a layer's memory is refreshed: at once, before the next layer computes."""

    def __init__(self, layers: int):
        pass

    def wait_for(self, layer: int):
        """Called before a layer's memory, past or key norms are touched: its refresh must have ended."""

    def scores_buffer(self, shape: tuple, device) -> torch.Tensor:
        """An fp32 buffer for the scores of the layer at hand."""
        return torch.empty(shape, device=device)

    def refresh(self, layer: int, work: Callable, tensors: tuple):
        """Do work() after what is already under way; `tensors` are those it reads that nobody keeps."""
        work()

    def wait_for_all(self):
        """Wait for every layer's refresh."""


class Ops(NamedTuple):
    """One implementation of the operations that a backend may replace."""

    name: str
    append: Callable
    attend: Callable
    select: Callable
    rebuild: Callable
    parts: Parts = PARTS  # of the model
    schedule: Callable = InLine  # called with the number of layers, once a cache
    capture: Callable | None = (
        None  # called with a forward pass and its inputs; returns what replays the pass
    )


REFERENCE = Ops("reference", append, attend, select, rebuild)


class SlowFastCache(KVCache):
    """A KV cache whose first `cap` slots are the compact memory, with two fp32 numbers a key beside it.

    observe(row, layer, row_step, slots, scores), if given, sees every refresh: what the row does in the pass,
    the selected positions (K, N), and the scores of all positions as `attend` gives them, to be used at once
    (None where the refresh came without a dense pass).
    """

    def __init__(self, model, cfg, ops: Ops, batch: int, max_length: int, new_tokens: int, observe=None):
        self.cfg, self.ops, self.observe = cfg, ops, observe
        self.cap = cfg.capacity(max_length, new_tokens)
        super().__init__(model.config, batch, self.cap + max_length, model.dtype, model.device)
        shape = (*self.k.shape[:3], max_length)  # (L, B, K, S_max)
        self.key_norm = torch.empty(shape, dtype=torch.float32, device=model.device)
        self.past = torch.zeros(shape, dtype=torch.float32, device=model.device)  # see `selector.follow`
        self.schedule = ops.schedule(len(self.k))

    def copy_from(self, other: "SlowFastCache", n: int):
        """Take over the first n tokens of every row of another cache; no compact memory."""
        other.schedule.wait_for_all()
        self.key_norm[..., :n], self.past[..., :n] = other.key_norm[..., :n], other.past[..., :n]
        for mine, theirs in ((self.k, other.k), (self.v, other.v)):
            mine[..., self.cap : self.cap + n, :] = theirs[..., other.cap : other.cap + n, :]

    def attention(self, rows: slice, plans, position, start, length, slot, recent_start):
        """What the model's forward pass calls in each layer, for these rows, which do as `plans` says.

        The five tensors (B,) int64: a row's first new position, the span of slots that it reads, its slot in
        the compact memory, and where the recent window of its new memory starts.  Without a refresh nothing
        else is read of `plans`, so a captured pass may be replayed with other numbers.  (A row with a refresh
        reads its whole cache, so `length` is its number of tokens too, as `rebuild` takes it.)
        """
        refreshed = any(plan.refresh for plan in plans)
        width = -(-max(plan.visible for plan in plans) // 16) * 16  # rows of scores begin aligned

        def attention(layer, q, k, v):
            self.schedule.wait_for(layer)
            K, V = self.k[layer, rows], self.v[layer, rows]  # (B, K, cap + S_max, D)
            self.ops.append(k, v, K, V, self.key_norm[layer, rows], position, slot)
            scores = None
            if refreshed and (self.observe or self.cfg.budget):
                R = q.shape[2] // K.shape[1] * min(self.cfg.n_evidence, q.shape[1])
                scores = self.schedule.scores_buffer((len(plans), K.shape[1], R, width), q.device)
            out, scores = self.ops.attend(q, K, V, start, length, scores)
            if refreshed:
                refresh = lambda: self.refresh(rows, layer, plans, recent_start, length, scores)
                self.schedule.refresh(layer, refresh, (recent_start, length))
            return out

        return attention

    def refresh(self, rows: slice, layer: int, plans, recent_start, length, scores):
        """Make the new memory of one layer, for those of the rows that get one.

        recent_start, length (B,) int64 and the scores of `attend` belong to the rows.
        """
        K, V = self.k[layer, rows], self.v[layer, rows]
        slots = torch.empty((*K.shape[:2], 0), dtype=torch.int64, device=K.device)
        if n := self.cfg.budget:
            key_norm, past = self.key_norm[layer, rows], self.past[layer, rows]
            slots = self.ops.select(scores, key_norm, past, recent_start, n, self.cfg)  # (B, K, N)
        self.ops.rebuild(K, V, slots, self.cap, self.cfg.n_sink, recent_start, length)
        for i, plan in enumerate(plans):
            if self.observe and plan.refresh:
                seen = None if scores is None else scores[i][..., : plan.visible]
                self.observe(rows.start + i, layer, plan, slots[i], seen)
