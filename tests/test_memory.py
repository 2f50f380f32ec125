"""The compact memory: where tokens are written and copied."""

import torch

from memory import append, rebuild
from model import KVCache
from sfi import Engine
from tests.tiny import SMALL, token_text


def test_append_writes_what_is_named_and_nothing_else():
    torch.manual_seed(0)
    k, v = torch.randn(2, 4, 2, 3, 8)  # (B, T, K, D)
    K, V = torch.full((2, 4, 3, 10 + 20, 8), float("nan"))
    norm = torch.full((4, 3, 20), float("nan"))
    append(k, v, K, V, norm, torch.tensor([5, 0, -1, 18]), torch.tensor([-1, 7, -1, 0]))
    for cache, new in ((K, k), (V, v)):
        want = torch.full_like(cache, float("nan"))
        for row, slots in ((0, [15]), (1, [10, 7]), (3, [28, 0])):
            for slot in slots:
                want[row, :, slot : slot + 2] = new[row].transpose(0, 1)
        torch.testing.assert_close(cache, want, equal_nan=True, rtol=0, atol=0)
    want = torch.full_like(norm, float("nan"))
    for row, p in ((0, 5), (1, 0), (3, 18)):
        want[row, :, p : p + 2] = k[row].square().sum(-1).sqrt().T
    torch.testing.assert_close(norm, want, equal_nan=True)


def test_rebuild_packs_sinks_selected_and_recent():
    """Of the rows that are refreshed; the others stay as they are."""
    torch.manual_seed(0)
    K, V = torch.randn(2, 3, 3, 30 + 50, 8)
    before = K.clone(), V.clone()
    slots = torch.tensor([[5, 9, 20], [2, 3, 4], [7, 21, 22]]) + torch.arange(3)[:, None, None]
    rebuild(K, V, slots, 30, 2, torch.tensor([24, -1, 40]), torch.tensor([33, 50, 41]))
    for cache, old in zip((K, V), before, strict=True):
        for row, recent in ((0, range(24, 33)), (2, range(40, 41))):
            for head in range(3):
                want = [0, 1, *slots[row, head].tolist(), *recent]
                assert torch.equal(cache[row, head, : len(want)], old[row, head, 30:][want])
                assert torch.equal(cache[row, head, len(want) :], old[row, head, len(want) :])
        assert torch.equal(cache[1], old[1])


def test_memory_holds_kv_heads(tiny):
    engine = Engine(tiny, SMALL, token_text, batch=2, max_length=60, new_tokens=10)
    assert engine.cache.k.shape == (2, 2, 3, engine.cache.cap + 60, 16)  # K = 3 of H = 15 heads
    assert isinstance(engine.cache, KVCache)
