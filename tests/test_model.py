"""The model against transformers, and its parts against formulas."""

import json

import numpy as np
import pytest
import torch

from command.config import model_config
from command.loading import load
from model import PARTS, KVCache, Model, attend, inverse_frequencies
from tests.tiny import BASE, dense_logits, edit_config, load_folder, make_checkpoint, transformers_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    "made",
    [
        dict(heads=4, kv_heads=2, head_dim=64, tie_word_embeddings=True),
        dict(heads=6, kv_heads=2, head_dim=16, tie_word_embeddings=False),
        dict(heads=5, kv_heads=1, head_dim=128, tie_word_embeddings=True, attention_bias=True),
        dict(kind="qwen3_moe", heads=6, kv_heads=2, tie_word_embeddings=False),
        dict(
            kind="qwen3_moe",
            heads=4,
            kv_heads=2,
            norm_topk_prob=False,
            decoder_sparse_step=2,
            mlp_only_layers=[],
        ),
        dict(kind="llama", heads=6, kv_heads=3, head_dim=20, hidden_size=42, tie_word_embeddings=True),
        dict(
            kind="llama",
            heads=6,
            kv_heads=3,
            head_dim=20,
            hidden_size=42,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=False,
        ),
        dict(kind="qwen2", heads=6, kv_heads=2, hidden_size=96, tie_word_embeddings=True),
        dict(kind="qwen2", heads=4, kv_heads=1, hidden_size=64, tie_word_embeddings=False),
        dict(heads=6, kv_heads=2, max_shard_size="20KB", tie_word_embeddings=False),
    ],
    ids="tied-g2 untied-g3 bias-g5 moe moe-sparse-step llama llama-biases qwen2 qwen2-untied shards".split(),
)
def test_logits_equal_transformers(tmp_path, made):
    hf = make_checkpoint(tmp_path, **made)
    assert (tmp_path / "model.safetensors.index.json").exists() == ("max_shard_size" in made)
    tokens = torch.randint(0, 97, (2, 37), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = hf(tokens).logits
    assert want.std() > 0.5  # not a flat answer that anything equals
    torch.testing.assert_close(dense_logits(load_folder(tmp_path), tokens), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("first", [0, 31000, 32760, 90000])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"attention_factor": 1.3},
        {"beta_fast": 16.0, "beta_slow": 2.0},
        {"truncate": False},
        {"mscale": 1.2, "mscale_all_dim": 0.7},
    ],
    ids=["plain", "factor", "betas", "untruncated", "mscales"],
)
def test_yarn_equals_transformers_below_and_above_the_original_length(tmp_path, first, extra):
    hf = make_checkpoint(
        tmp_path, head_dim=64, max_position_embeddings=131072, rope_theta=1e6, rope_parameters=YARN | extra
    )
    tokens = torch.randint(0, 97, (1, 37), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = hf(tokens, position_ids=torch.arange(first, first + 37)[None]).logits
    model = load_folder(tmp_path)
    torch.testing.assert_close(dense_logits(model, tokens, first), want, atol=1e-4, rtol=0)
    plain = dense_logits(load_folder(make_plain(tmp_path)), tokens, first)
    assert (plain - want).abs().max() > 1e-2  # the test sees YaRN


def make_plain(folder):
    edit_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    return folder


def test_yarn_ramp_is_not_a_division_by_zero():
    config = model_config(BASE | {"rope_scaling": YARN | {"original_max_position_embeddings": 8}})
    assert torch.isfinite(inverse_frequencies(config.rope, config.head_dim)).all()


def test_head_dim_explicit_and_absent():
    """The query width is heads * head_dim, which Qwen3-0.6B does not make equal to hidden_size."""
    for head_dim, width in ((32, 128), (None, 64)):
        with torch.device("meta"):
            model = Model(model_config(BASE | {"head_dim": head_dim}))
        assert model.model["layers"][0].self_attn.q_proj.weight.shape == (width, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(tmp_path, dtype):
    hf = make_checkpoint(tmp_path, dtype=dtype)
    tokens = torch.arange(31)[None]
    with torch.no_grad():
        want = hf(tokens).logits
    torch.testing.assert_close(
        dense_logits(load_folder(tmp_path, torch.float32), tokens), want, atol=1e-4, rtol=0
    )
    model = load(tmp_path, model_config(json.loads((tmp_path / "config.json").read_text())))
    assert model.dtype == dtype
    with torch.no_grad():
        plain = transformers_model(tmp_path, dtype)(tokens).logits.float()
    ours = dense_logits(model, tokens)
    assert (ours - want).abs().mean() <= 2 * (
        plain - want
    ).abs().mean() + 1e-6  # as good as plain PyTorch at that precision


def test_only_the_last_row_goes_through_the_head(tmp_path):
    make_checkpoint(tmp_path)
    model = load_folder(tmp_path)
    seen = []
    model.model["norm"].register_forward_hook(lambda module, args, out: seen.append(args[0].shape))
    tokens = torch.zeros((2, 8192), dtype=torch.int64)
    logits = model(tokens, torch.arange(8192).expand(2, -1), lambda layer, q, k, v: q)
    assert logits.shape == (2, 1, 97) and seen == [(2, 1, 40)]


def test_qk_norm_per_head_then_rope_by_halves(tmp_path):
    """An independent NumPy formula, at positions above 0, for the queries and keys that the model hands to
    the attention.
    """
    make_checkpoint(tmp_path)
    model = load_folder(tmp_path)
    got = {}
    tokens = torch.tensor([[5, 7, 11]])
    model(tokens, torch.tensor([[100, 101, 102]]), lambda layer, q, k, v: got.setdefault(layer, (q, k)) and q)
    attn = model.model["layers"][0].self_attn
    embedded = model.model["embed_tokens"](tokens)
    x = model.model["layers"][0].input_layernorm(embedded, PARTS)[0].numpy().astype(np.float64)
    for projection, norm, ours in (
        (attn.q_proj, attn.q_norm, got[0][0]),
        (attn.k_proj, attn.k_norm, got[0][1]),
    ):
        y = (x @ projection.weight.numpy().T.astype(np.float64)).reshape(3, -1, 16)
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-5) * norm.weight.numpy()
        for t, position in enumerate((100, 101, 102)):
            for i in range(8):
                angle = position * 10000.0 ** (-2 * i / 16)
                a, b = y[t, :, i].copy(), y[t, :, i + 8].copy()
                y[t, :, i] = a * np.cos(angle) - b * np.sin(angle)
                y[t, :, i + 8] = b * np.cos(angle) + a * np.sin(angle)
        np.testing.assert_allclose(ours[0].numpy(), y, atol=1e-5)


def explicit_attention(q, K, V, start, length):
    """Loops over rows, heads and queries: out (B, T, H, D) and the scaled scores (B, T, H, length) of unequal
    lengths, as lists.
    """
    B, T, H, D = q.shape
    G = H // K.shape[1]
    out, scores = torch.zeros_like(q), [[[None] * H for _ in range(T)] for _ in range(B)]
    for b in range(B):
        for t in range(T):
            for h in range(H):
                k, v = (X[b, h // G, start[b] : start[b] + length[b]] for X in (K, V))
                s = (k * q[b, t, h]).sum(-1) / D**0.5
                scores[b][t][h] = s
                s = s[: length[b] - T + t + 1]
                if len(s):
                    out[b, t, h] = (s.softmax(0)[:, None] * v[: len(s)]).sum(0)
    return out, scores


@pytest.mark.parametrize("T, n_scores", [(1, 1), (2, 2), (5, 2), (5, 5)])
@pytest.mark.parametrize("G, D", [(1, 64), (2, 80), (3, 128), (5, 96)])
def test_attend_equals_loops(T, n_scores, G, D):
    torch.manual_seed(T)
    q = torch.randn(3, T, 2 * G, D)
    K, V = torch.full((2, 3, 2, 40, D), float("nan"))
    start, length = (
        torch.tensor([3, 11, 0]),
        torch.tensor([T, 29, 0]),
    )  # one row as short as can be, one empty
    for b in range(3):
        K[b, :, start[b] : start[b] + length[b]] = torch.randn(2, length[b], D)
        V[b, :, start[b] : start[b] + length[b]] = torch.randn(2, length[b], D)
    out, scores = attend(q, K, V, start, length, torch.full((3, 2, G * n_scores, 31), float("nan")))
    want, want_scores = explicit_attention(q, K, V, start, length)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=0)
    assert (out[2] == 0).all() and scores[2].isnan().all()
    for b in range(2):
        assert scores[b, ..., length[b] :].isnan().all()
        for h in range(2 * G):
            for w in range(n_scores):
                row = scores[b, h // G, h % G * n_scores + w, : length[b]]
                torch.testing.assert_close(row, want_scores[b][T - n_scores + w][h], atol=1e-5, rtol=0)
    assert attend(q, K, V, start, length)[1] is None


def test_cache_holds_kv_heads_of_the_tokens_asked_for():
    """K heads, not H; sized to the sequence, never to max_position_embeddings."""
    config = model_config(BASE | {"num_key_value_heads": 2})
    cache = KVCache(config, 3, 50, torch.bfloat16, "cpu")
    assert cache.k.shape == cache.v.shape == (2, 3, 2, 50, 16)
    assert cache.k.nbytes + cache.v.nbytes == 3 * 50 * config.kv_bytes(torch.bfloat16)
