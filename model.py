"""Qwen3, Qwen3-MoE and Llama-type decoders, and the KV cache they run on.

One skeleton serves all three: QK-norm, biases, a tied head and expert MLPs are facts of config.json.
Parameter names are the checkpoint's, so loading (`loading.py`) is a loop.  The attention is an argument of
the forward pass, `attention(layer, q, k, v) -> out`: this file rotates queries and keys and projects the
result, and what is cached and which part of it is read is the caller's business (`sfi.py`).  Sources: the
Qwen3 report (arXiv 2505.09388), RoPE (2104.09864), YaRN (2309.00071), and the published checkpoints.

Letters, here and in every file:
    B rows of the batch    T new tokens    S cached tokens    L layers
    C hidden_size          V vocabulary    D head_dim
    H query heads          K KV heads      G = H/K, and query head h = k*G + g reads KV head k
    N selected tokens      W evidence queries                 R = G*W evidence rows of one KV head
Read next: `selector.py`, then `sfi.py`.
"""

import json
import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODEL_TYPES = ("qwen3", "qwen3_moe", "llama")


def cpu_has_bf16() -> bool:
    """Whether the processor multiplies bfloat16 itself; elsewhere products in it are slow.

    A torch without `get_capabilities` cannot tell, which counts as no.
    """
    has = getattr(torch.cpu, "get_capabilities", dict)()
    return any(has.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


CPU_HAS_BF16 = cpu_has_bf16()


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
    """What config.json says, under its names; what this file does not compute is refused by name."""

    model_type: str
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
        return self.model_type != "llama"

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

    @classmethod
    def from_dict(cls, c: dict) -> "ModelConfig":
        """Check a parsed config.json and keep what is needed; ValueError names the key and its value."""

        def refuse(key, allowed):
            value = json.dumps(c.get(key))
            raise ValueError(f"config.json has {key} = {value}; this loader supports {allowed}")

        def need(key):
            if c.get(key) is None:
                raise ValueError(f"config.json has no {key}; fetch the checkpoint's own config.json")
            return c[key]

        def whole(key):
            if type(need(key)) is not int or c[key] < 1:
                refuse(key, "a whole number, 1 or more")
            return c[key]

        kind = need("model_type")
        if kind not in MODEL_TYPES:
            refuse("model_type", "/".join(MODEL_TYPES) + ": choose such a checkpoint")
        if c.get("quantization_config"):
            refuse("quantization_config", "none: choose an unquantized checkpoint (bf16, fp16 or fp32)")
        if c.get("use_sliding_window") or "sliding_attention" in (c.get("layer_types") or ()):
            key = "use_sliding_window" if c.get("use_sliding_window") else "layer_types"
            refuse(key, "full attention in every layer: sliding-window attention is not computed here")
        if c.get("hidden_act", "silu") != "silu":
            refuse("hidden_act", "silu")
        heads = whole("num_attention_heads")
        kv_heads = heads if c.get("num_key_value_heads") is None else whole("num_key_value_heads")
        if heads % kv_heads:
            refuse("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
        head_dim = whole("hidden_size") // heads if c.get("head_dim") is None else whole("head_dim")
        if head_dim % 2 or not head_dim:
            raise ValueError(f"config.json gives head_dim = {head_dim}; this loader supports an even number")
        moe = {}
        if kind == "qwen3_moe":
            c = {"num_experts": c.get("num_local_experts")} | c  # newer transformers' spelling
            keys = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
            moe = {key: whole(key) for key in keys} | {"norm_topk_prob": bool(c.get("norm_topk_prob", False))}
            if moe["num_experts_per_tok"] > moe["num_experts"]:
                refuse("num_experts_per_tok", f"at most num_experts = {moe['num_experts']}")
            moe |= {"decoder_sparse_step": c.get("decoder_sparse_step", 1)}
            moe |= {"mlp_only_layers": tuple(c.get("mlp_only_layers") or ())}
        return cls(
            model_type=kind,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rope=rope_config(c),
            tie_word_embeddings=bool(c.get("tie_word_embeddings", False)),
            attention_bias=bool(c.get("attention_bias", False)),
            mlp_bias=bool(c.get("mlp_bias", False)),
            dtype=str(c.get("dtype") or c.get("torch_dtype") or "float32"),
            rms_norm_eps=positive(c, "rms_norm_eps"),
            **{key: whole(key) for key in ("vocab_size", "hidden_size", "intermediate_size")},
            **{key: whole(key) for key in ("num_hidden_layers", "max_position_embeddings")},
            **moe,
        )


def rope_config(c: dict) -> RopeConfig:
    """RoPE facts, from `rope_theta` + `rope_scaling` or from `rope_parameters` (newer transformers)."""
    r = {}
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(c.get(key) or {}, dict):
            raise ValueError(f"config.json has {key} = {json.dumps(c[key])}; allowed is an object, or null")
        r |= c.get(key) or {}
    if r.get("rope_theta", c.get("rope_theta")) is None:
        raise ValueError(
            "config.json has no rope_theta, at the top or under rope_parameters; add the model's own"
        )
    theta, kind = positive({**c, **r}, "rope_theta"), r.get("rope_type") or r.get("type") or "default"
    if theta <= 1:
        raise ValueError(f"config.json has rope_theta = {theta}; allowed is a number above 1")
    if kind not in ("default", "yarn"):
        raise ValueError(f"config.json has rope type {kind!r}; this loader supports 'default' and 'yarn'")
    if c.get("partial_rotary_factor", r.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("config.json has a partial_rotary_factor; this loader rotates whole heads only")
    if kind == "default":
        return RopeConfig(theta)
    given = {
        "original_max_position_embeddings": c.get("max_position_embeddings"),
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    given |= {key: value for key, value in r.items() if value is not None}
    original = positive(given, "original_max_position_embeddings")
    factor = positive({"factor": positive(c, "max_position_embeddings") / original} | given, "factor")
    if given.get("attention_factor") is not None:
        scale = positive(given, "attention_factor")
    else:
        scale = yarn_scale(factor, r.get("mscale"), r.get("mscale_all_dim"))
    betas = positive(given, "beta_fast"), positive(given, "beta_slow")
    return RopeConfig(theta, "yarn", factor, original, scale, *betas, r.get("truncate", True))


def positive(c: dict, key: str) -> float:
    """c[key] if it is a finite number above 0, ValueError otherwise."""
    value = c.get(key)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"config.json has {key} = {json.dumps(value)}; allowed is a number above 0")
    return value


def yarn_scale(factor, mscale=None, mscale_all_dim=None) -> float:
    """YaRN's attention factor, 0.1 ln(factor) + 1 (arXiv 2309.00071, eq. 22), or a ratio of two such."""
    scale = lambda m: 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0
    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def with_yarn(config: ModelConfig, factor: float) -> ModelConfig:
    """The same model with its trained positions stretched by `factor`."""
    if not 1.0 < factor <= 1000:
        raise ValueError(
            f"yarn = {factor}; allowed is a factor above 1 and up to 1000, such as 4 for Qwen3's 131072"
        )
    rope = RopeConfig(config.rope.theta, "yarn", factor, trained_positions(config), yarn_scale(factor))
    return replace(config, rope=rope)


def trained_positions(config: ModelConfig) -> int:
    """What YaRN stretches.  Qwen3's 40960 positions are 32768 to read plus 8192 to answer; its model cards
    stretch the 32768.
    """
    reserved = config.qk_norm and config.max_position_embeddings == 40960
    return round(config.rope.original) or (32768 if reserved else config.max_position_embeddings)


def yarn_for(config: ModelConfig, positions: int) -> int | None:
    """The smallest whole factor that makes room for `positions`; None beyond 4, the most that Qwen3's model
    cards vouch for, and for models that YaRN was not made for.
    """
    factor = max(-(-positions // trained_positions(config)), 2)
    return factor if config.qk_norm and factor <= 4 else None


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


def product(x, weight):
    """x @ weight.T, (..., in) and (out, in) -> (..., out), in x's dtype; on a CPU by the way that is fastest
    there.

    PyTorch's own way reads the weight several times for 2 to 32 rows of fp32 (measured: up to 3 times slower
    than the transposed product), and without bf16 instructions its half-precision products run at a fraction
    of the fp32 ones, so for several rows the weight is widened, a block that fits the cache at a time.  Rows
    of zeros are added where more rows are faster: 4 than 3, multiples of 8 than others from 6 on."""
    rows, narrow = x.numel() // x.shape[-1], x.dtype != torch.float32 and not CPU_HAS_BF16
    if x.device.type != "cpu" or rows < (4 if narrow else 2) or (rows > 32 and not narrow):
        return F.linear(x, weight)
    more = -rows % 8 if 5 < rows <= 32 else rows == 3
    flat = F.pad(x.reshape(rows, -1).float(), (0, 0, 0, more))
    by_rows = lambda w: (w @ flat.T).T if rows <= 32 else F.linear(flat, w)
    blocks = weight.split(max(2**20 // weight.shape[1], 1)) if narrow else [weight]
    out = torch.cat([by_rows(w.float()) for w in blocks], dim=1) if narrow else by_rows(weight)
    return out[:rows].to(x.dtype).reshape(*x.shape[:-1], -1)


class Linear(nn.Linear):
    def forward(self, x):
        out = product(x, self.weight)
        return out if self.bias is None else out + self.bias


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(size)), eps

    def forward(self, x):
        """x / rms(x) * weight over the last dimension, in fp32; one rounding at the end (transformers rounds
        before the weight).
        """
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def rotate(x, cos, sin):
    """RoPE by halves: x (B, T, heads, D), cos and sin (B, T, 1, D/2) fp32; pair i is (x[i], x[i + D/2])."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, c.head_dim
        q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, q_size, bias=c.attention_bias)
        self.k_proj = Linear(c.hidden_size, kv_size, bias=c.attention_bias)
        self.v_proj = Linear(c.hidden_size, kv_size, bias=c.attention_bias)
        self.o_proj = Linear(q_size, c.hidden_size, bias=c.attention_bias)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()

    def forward(self, x, cos, sin, attention):
        heads = lambda y: y.unflatten(-1, (-1, self.head_dim))  # (B, T, heads * D) -> (B, T, heads, D)
        q = rotate(self.q_norm(heads(self.q_proj(x))), cos, sin)  # (B, T, H, D)
        k = rotate(self.k_norm(heads(self.k_proj(x))), cos, sin)  # (B, T, K, D)
        out = attention(self.layer, q, k, heads(self.v_proj(x)))  # (B, T, H, D)
        return self.o_proj(out.flatten(-2))


class MLP(nn.Module):
    def __init__(self, hidden_size, width, bias=False):
        super().__init__()
        self.gate_proj = Linear(hidden_size, width, bias=bias)
        self.up_proj = Linear(hidden_size, width, bias=bias)
        self.down_proj = Linear(width, hidden_size, bias=bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """Each token goes through num_experts_per_tok of the MLPs, weighted by the router's softmax (fp32)."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.top_k, self.norm_topk_prob = c.num_experts_per_tok, c.norm_topk_prob
        self.gate = Linear(c.hidden_size, c.num_experts, bias=False)
        self.experts = nn.ModuleList(
            MLP(c.hidden_size, c.moe_intermediate_size) for _ in range(c.num_experts)
        )

    def forward(self, x):
        tokens = x.flatten(0, -2)  # (B*T, C)
        weight, chosen = torch.softmax(self.gate(tokens).float(), dim=-1).topk(
            self.top_k
        )  # (B*T, top_k) both
        if self.norm_topk_prob:
            weight = weight / weight.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for e in chosen.unique().tolist():
            row, place = (chosen == e).nonzero(as_tuple=True)
            out.index_add_(0, row, self.experts[e](tokens[row]) * weight[row, place, None].to(x.dtype))
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, c: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, layer)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = Experts(c) if c.is_sparse(layer) else MLP(c.hidden_size, c.intermediate_size, c.mlp_bias)

    def forward(self, x, cos, sin, attention):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """A decoder.  Build it with `load`, or on the meta device to count its parameters."""

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
    def forward(self, tokens, positions, attention, n_logits=1):
        """Logits (B, n_logits, V) fp32 of the last n_logits of tokens (B, T) at positions (B, T), int64."""
        angle = positions[..., None, None].float() * self.inv_freq  # (B, T, 1, D/2)
        scale = self.config.rope.attention_factor
        cos, sin = angle.cos() * scale, angle.sin() * scale
        x = self.model["embed_tokens"](tokens)  # (B, T, C)
        for block in self.model["layers"]:
            x = block(x, cos, sin, attention)
        x = self.model["norm"](x[:, x.shape[1] - n_logits :])  # (B, n_logits, C)
        head = self.model["embed_tokens"] if self.config.tie_word_embeddings else self.lm_head
        return product(x, head.weight).float()

    def weight_bytes(self, dtype: torch.dtype, tokens: int) -> tuple[int, int]:
        """Bytes of all weights in `dtype`, and of those that a step of so many tokens reads, at most: of a
        mixture of experts those in use, of an embedding that is not the head too a few rows.
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


def score(q, K, scores, block=2048):
    """scores (K, R, n) fp32, written in place: q.k / sqrt(D) of q (K, R, D) with K (K, n, D).

    In blocks: what a product reads, widened to fp32 where it is narrower, then comes from the processor's
    cache.  Which factor comes first is what was fastest on a CPU: the long one as it lies if the other has
    up to 4 rows, else the short one.
    """
    q, wide = q.float(), widener(K, block)
    as_it_lies = K.dtype == torch.float32 and q.shape[1] <= 4
    dots = (lambda keys: (keys @ q.mT).mT) if as_it_lies else lambda keys: q @ wide(keys).mT
    for part, keys in zip(scores.split(block, dim=2), K.split(block, dim=1), strict=True):
        torch.mul(dots(keys), K.shape[-1] ** -0.5, out=part)  # (K, R, block)


def weigh(p, V, block=2048):
    """sum_j p_j v_j in fp32, (K, R, D), of weights p (K, R, n) fp32 and V (K, n, D), in blocks as `score`."""
    R, wide = p.shape[1], widener(V, block)
    if V.dtype == torch.float32 and R in (2, 3):  # slower than 4
        p = F.pad(p, (0, 0, 0, 4 - R))
    out = torch.zeros((*p.shape[:2], V.shape[2]), device=p.device)
    for weights, values in zip(p.split(block, dim=2), V.split(block, dim=1), strict=True):
        out.baddbmm_(weights, wide(values))
    return out[:, :R]


def widener(cache, block):
    """A function that gives at most `block` rows of each head of the cache (K, n, D) in fp32, until the next
    call.
    """
    if cache.dtype == torch.float32:
        return lambda x: x
    room = torch.empty((cache.shape[0], block, cache.shape[2]), device=cache.device)
    return lambda x: room[:, : x.shape[1]].copy_(x)


def attend(q, K, V, start, length, scores=None):
    """Causal attention of each row over its own span of slots: the reference, and on a CPU the fast way too.

    q (B, T, H, D); K, V (B, K, slots, D) of one layer; start, length (B,) int64.  Row b reads slots
    [start, start + length), the last T of which are its own tokens: query t sees length - T + t + 1 of them.
    A row of length 0 gives zeros.  Returns out (B, T, H, D), and `scores`, which, if given, is (B, K, G * W,
    width) fp32 and gets in its first length[b] columns the scaled scores q.k / sqrt(D) of the last W queries,
    not masked; row g * W + w belongs to query head g of the group and query w.

    The G query heads of a KV head become the rows of one product, so K and V are read once, not G times.  A
    few tokens whose scores are all wanted are attended to from these, which saves computing them twice.  The
    lengths are read on the host: nothing on a CPU, one wait a layer on a GPU.
    """
    T, H = q.shape[1:3]
    n_kv, G = K.shape[1], H // K.shape[1]
    out, W = torch.zeros_like(q), scores.shape[2] // G if scores is not None else 0
    for b, (first, n) in enumerate(zip(start.tolist(), length.tolist(), strict=True)):
        if n == 0:
            continue
        keys, values = K[b, :, first : first + n], V[b, :, first : first + n]  # (K, n, D)
        queries = q[b].unflatten(1, (n_kv, -1)).permute(1, 2, 0, 3)  # (K, G, T, D)
        grouped = queries.flatten(1, 2)  # (K, G * T, D)
        if W:
            score(queries[:, :, T - W :].flatten(1, 2), keys, scores[b, ..., :n])
        if W == T <= 32:
            recent = scores[b, ..., n - T : n]  # the only ones that a causal mask touches
            whole = recent.clone()
            recent.masked_fill_(
                torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1).repeat(G, 1), -torch.inf
            )
            few = min(max(2**20 // (G * T * n), torch.get_num_threads()), n_kv)  # heads at a time, in one
            room = torch.empty((few, G * T, n), device=q.device)  # room: fresh memory comes slowly
            parts = zip(scores[b, ..., :n].split(few), values.split(few), strict=True)
            o = torch.cat([weigh(torch.softmax(s, -1, out=room[: len(s)]), v) for s, v in parts])
            recent.copy_(whole)
        else:
            mask = None  # (G * T, n)
            if T > 1:
                mask = torch.ones(T, n, dtype=torch.bool, device=q.device).tril(n - T).repeat(G, 1)
            o = F.scaled_dot_product_attention(grouped[None], keys[None], values[None], attn_mask=mask)[0]
        out[b] = o.unflatten(1, (G, T)).permute(2, 0, 1, 3).flatten(1, 2)  # (T, H, D)
    return out, scores
