"""Qwen3, Qwen3-MoE, Qwen2 and Llama-type decoders, and the KV cache they run on.

One skeleton serves all: QK-norm, biases, a tied head and expert MLPs are facts of config.json, which
`command/config.py` reads.  Parameter names are the checkpoint's, so loading (`command/loading.py`) is a loop.

Two arguments of the forward pass are operations.  `attention(layer, q, k, v) -> out` decides what is cached
and which part of it is read; `parts` are the steps around it, which may be faster twins of those here.
Nothing here knows of Slow-Fast Inference.  Sources: the Qwen3 report (arXiv 2505.09388), RoPE
(2104.09864), YaRN (2309.00071), and the published checkpoints.

Letters, here and in every file:
    B rows of the batch    T new tokens    S cached tokens    L layers
    C hidden_size          V vocabulary    D head_dim
    H query heads          K KV heads      G = H/K, and query head h = k*G + g reads KV head k
    N selected tokens      W evidence queries                 R = G*W evidence rows of one KV head
Read next: `selector.py`, `memory.py`, `sfi.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: `default`, or `yarn`, which stretches `original` positions by `factor`."""

    theta: float
    type: str = "default"
    factor: float = 1.0
    original: int = 0  # positions the model was trained on, before stretching
    attention_factor: float = 1.0  # cos and sin are multiplied by it, hence q.k by its square
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """The facts of config.json that the model needs, under its names."""

    model_type: str  # qwen3, qwen3_moe, qwen2 or llama
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int  # of the checkpoint; `max_positions` counts what YaRN adds
    rope: RopeConfig
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    dtype: str = "float32"  # of the checkpoint
    num_experts: int = 0  # 0: every MLP is dense
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple = ()

    @property
    def qk_norm(self) -> bool:
        return self.model_type in ("qwen3", "qwen3_moe")

    @property
    def output_bias(self) -> bool:
        """Whether o_proj has a bias too, beside q, k and v."""
        return self.attention_bias and self.model_type != "qwen2"

    @property
    def max_positions(self) -> int:
        """Positions the model can serve: factor * original under YaRN."""
        return (
            round(self.rope.factor * self.rope.original)
            if self.rope.type == "yarn"
            else self.max_position_embeddings
        )

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer's MLP is a mixture of experts."""
        return (
            self.num_experts > 0
            and layer not in self.mlp_only_layers
            and (layer + 1) % self.decoder_sparse_step == 0
        )

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of K and V that one token adds to the cache, all layers together."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * dtype.itemsize


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle per position of each rotated pair, (D/2,) fp32.

    YaRN keeps the pairs that turn more than beta_fast times within the original positions, divides by
    `factor` those that turn less than beta_slow times, and blends linearly, by pair number, in between (arXiv
    2309.00071, section 3.2).
    """
    inv_freq = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.type == "default":
        return inv_freq
    pair = lambda turns: (
        head_dim * math.log(rope.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
    )
    first, last = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001  # as published: one pair wide, not a division by zero
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return inv_freq * (1 - stretched) + inv_freq / rope.factor * stretched


class NotFinite(ValueError):
    """Attention scores or logits that no sound model gives: NaN, infinite, all equal, or 1e6 apart."""

    advice = "try dtype float32 where it is another, or fetch the checkpoint again"

    def __init__(self, what: str):
        super().__init__(f"the {what} are not finite, or all equal, or absurd; {self.advice}")


def norm(x, weight, eps):
    """RMSNorm: x / rms(x) * weight over the last dimension, in fp32; one rounding at the end (transformers
    rounds before the weight).
    """
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def rotate(x, cos, sin, weight=None, eps=0.0):
    """RoPE by halves, after QK-norm where a weight (D,) is given: x (B, T, heads, D), cos and sin
    (B, T, D/2) fp32; pair i is (x[i], x[i + D/2]).
    """
    x = x if weight is None else norm(x, weight, eps)
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def swiglu(gate, up):
    """silu(gate) * up."""
    return F.silu(gate) * up


class Parts(NamedTuple):
    """The steps of a forward pass that a backend may replace by faster twins."""

    linear: Callable = F.linear
    norm: Callable = norm
    rotate: Callable = rotate
    swiglu: Callable = swiglu


PARTS = Parts()


class Linear(nn.Linear):
    """A weight (out, in) and perhaps a bias (out,); the multiplication is the caller's."""

    def forward(self, x, parts):
        return parts.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(size)), eps

    def forward(self, x, parts):
        return parts.norm(x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, c: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, c.head_dim
        q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, q_size, bias=c.attention_bias)
        self.k_proj = Linear(c.hidden_size, kv_size, bias=c.attention_bias)
        self.v_proj = Linear(c.hidden_size, kv_size, bias=c.attention_bias)
        self.o_proj = Linear(q_size, c.hidden_size, bias=c.output_bias)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None

    def forward(self, x, cos, sin, attention, parts):
        heads = lambda y: y.unflatten(-1, (-1, self.head_dim))  # (B, T, heads * D) -> (B, T, heads, D)
        given = lambda norm: (norm.weight, norm.eps) if norm else ()
        q = parts.rotate(heads(self.q_proj(x, parts)), cos, sin, *given(self.q_norm))  # (B, T, H, D)
        k = parts.rotate(heads(self.k_proj(x, parts)), cos, sin, *given(self.k_norm))  # (B, T, K, D)
        v = heads(self.v_proj(x, parts))  # (B, T, K, D)
        out = attention(self.layer, q, k, v)  # (B, T, H, D)
        return self.o_proj(out.flatten(-2), parts)


class MLP(nn.Module):
    def __init__(self, hidden_size, width, bias=False):
        super().__init__()
        self.gate_proj = Linear(hidden_size, width, bias=bias)
        self.up_proj = Linear(hidden_size, width, bias=bias)
        self.down_proj = Linear(width, hidden_size, bias=bias)

    def forward(self, x, parts):
        return self.down_proj(parts.swiglu(self.gate_proj(x, parts), self.up_proj(x, parts)), parts)


class Experts(nn.Module):
    """Each token goes through num_experts_per_tok of the MLPs, weighted by the router's softmax (fp32)."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.top_k, self.norm_topk_prob = c.num_experts_per_tok, c.norm_topk_prob
        self.gate = Linear(c.hidden_size, c.num_experts, bias=False)
        self.experts = nn.ModuleList(
            MLP(c.hidden_size, c.moe_intermediate_size) for _ in range(c.num_experts)
        )

    def forward(self, x, parts):
        tokens = x.flatten(0, -2)  # (B*T, C)
        p = torch.softmax(self.gate(tokens, parts).float(), dim=-1)  # (B*T, num_experts)
        weight, chosen = p.topk(self.top_k)  # (B*T, top_k) both
        if self.norm_topk_prob:
            weight = weight / weight.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for e in chosen.unique().tolist():
            row, place = (chosen == e).nonzero(as_tuple=True)
            made = self.experts[e](tokens[row], parts)  # (tokens of this expert, C)
            out.index_add_(0, row, made * weight[row, place, None].to(x.dtype))
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, c: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, layer)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = Experts(c) if c.is_sparse(layer) else MLP(c.hidden_size, c.intermediate_size, c.mlp_bias)

    def forward(self, x, cos, sin, attention, parts):
        x = x + self.self_attn(self.input_layernorm(x, parts), cos, sin, attention, parts)
        return x + self.mlp(self.post_attention_layernorm(x, parts), parts)


class Model(nn.Module):
    """A decoder.  `command/loading.py` fills it; on the meta device it serves to count parameters."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.config = c
        blocks = nn.ModuleList(Block(c, layer) for layer in range(c.num_hidden_layers))
        norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        embed = nn.Embedding(c.vocab_size, c.hidden_size)
        self.model = nn.ModuleDict({"embed_tokens": embed, "layers": blocks, "norm": norm})
        if not c.tie_word_embeddings:
            self.lm_head = Linear(c.hidden_size, c.vocab_size, bias=False)
        self.register_buffer("inv_freq", inverse_frequencies(c.rope, c.head_dim), persistent=False)

    @torch.inference_mode()
    def forward(self, tokens, positions, attention, parts=PARTS, n_logits=1, layers=slice(None)):
        """Logits (B, n_logits, V) fp32 of the last n_logits of tokens (B, T) at positions (B, T), int64.

        layers: which of them run; all, except to time a part.
        """
        angle = positions[..., None].float() * self.inv_freq  # (B, T, D/2)
        scale = self.config.rope.attention_factor
        cos, sin = angle.cos() * scale, angle.sin() * scale
        x = self.model["embed_tokens"](tokens)  # (B, T, C)
        for block in self.model["layers"][layers]:
            x = block(x, cos, sin, attention, parts)
        x = self.model["norm"](x[:, x.shape[1] - n_logits :], parts)  # (B, n_logits, C)
        head = self.model["embed_tokens"] if self.config.tie_word_embeddings else self.lm_head
        return parts.linear(x, head.weight).float()

    def weight_bytes(self, dtype: torch.dtype, tokens: int) -> tuple[int, int]:
        """(bytes of all weights in `dtype`, bytes of those that a step of so many tokens reads at most).

        Not read are experts that are not chosen, and the embedding, unless it is the head too.
        """
        c, sizes = self.config, {name: p.numel() * dtype.itemsize for name, p in self.named_parameters()}
        idle = 0 if c.tie_word_embeddings else sizes["model.embed_tokens.weight"]
        if c.num_experts:
            experts = sum(size for name, size in sizes.items() if ".experts." in name)
            idle += int(experts * (1 - min(tokens * c.num_experts_per_tok / c.num_experts, 1)))
        return sum(sizes.values()), sum(sizes.values()) - idle

    @property
    def dtype(self) -> torch.dtype:
        return self.model["embed_tokens"].weight.dtype

    @property
    def device(self) -> torch.device:
        return self.model["embed_tokens"].weight.device


class KVCache:
    """k and v, (L, B, K, slots, D) each: one allocation for all keys and one for all values.

    Keys are cached after QK-norm and RoPE.  A slot has no value before it is written.
    """

    def __init__(self, c: ModelConfig, batch: int, slots: int, dtype: torch.dtype, device):
        shape = (c.num_hidden_layers, batch, c.num_key_value_heads, slots, c.head_dim)
        self.k, self.v = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))


def attend(q, K, V, start, length, scores=None):
    """Causal attention softmax(q.k / sqrt(D)) v of each row over its own span of slots.

    q (B, T, H, D); K, V (B, K, slots, D) of one layer; start, length (B,) int64.  Row b reads slots
    [start, start + length), the last T of which are its own tokens: query t sees length - T + t + 1 of them.
    A row of length 0 gives zeros.  Returns out (B, T, H, D), and `scores`, which, if given, is (B, K, G * W,
    width) fp32 and gets in its first length[b] columns the scaled scores q.k / sqrt(D) of the last W queries,
    not masked; row g * W + w belongs to query head g of the group and query w.
    """
    T, D, n_kv = q.shape[1], q.shape[3], K.shape[1]
    out = torch.zeros_like(q)
    for b, (first, n) in enumerate(zip(start.tolist(), length.tolist(), strict=True)):
        if n == 0:
            continue
        keys, values = K[b, :, first : first + n].float(), V[b, :, first : first + n].float()  # (K, n, D)
        queries = q[b].float().unflatten(1, (n_kv, -1)).permute(1, 2, 0, 3)  # (K, G, T, D)
        s = queries.flatten(1, 2) @ keys.mT / D**0.5  # (K, G * T, n)
        s = s.unflatten(1, (-1, T))  # (K, G, T, n)
        if scores is not None:
            W = scores.shape[2] // s.shape[1]
            scores[b, ..., :n] = s[:, :, T - W :].flatten(1, 2)
        later = torch.ones(T, n, dtype=torch.bool, device=q.device).triu(n - T + 1)
        p = s.masked_fill_(later, -torch.inf).softmax(-1)
        o = (p.flatten(1, 2) @ values).unflatten(1, (-1, T))  # (K, G, T, D)
        out[b] = o.permute(2, 0, 1, 3).flatten(1, 2)  # (T, H, D)
    return out, scores
