"""A checkpoint's JSON files: what config.json says of the model, and generation_config.json of sampling.

Each fact of config.json is read into a `ModelConfig`, or refused by name.  Two spellings are in use,
transformers' older one (`rope_theta`, `rope_scaling`, `torch_dtype`) and its newer one (`rope_parameters`,
`dtype`); both are understood.  Read before: `model.py`; used by `loading.py`.
"""

import json
import math
from dataclasses import fields, replace
from pathlib import Path

from model import ModelConfig, RopeConfig
from sampling import GREEDY, Sampling

MODEL_TYPES = ("qwen3", "qwen3_moe", "qwen2", "llama")
SUPPORTED = {  # what changes the computation in other models -> the values that change nothing
    # activations and norms
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "qk_layernorm": (False,),
    "clip_qkv": (),
    # positions, and what a token attends to
    "partial_rotary_factor": (1,),
    "rotary_pct": (1,),
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (0,),
    "alibi": (False,),
    "use_sliding_window": (False,),
    "attention_chunk_size": (),
    "parallel_attn": (False,),
    # scales and caps
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "scale_emb": (1,),
    "scale_depth": (),
    # the routing of experts
    "n_group": (1,),
    "topk_group": (1,),
    "routed_scaling_factor": (1,),
    "scoring_func": ("softmax",),
    "n_shared_experts": (0,),
    "num_shared_experts": (0,),
    "shared_expert_intermediate_size": (0,),
    "first_k_dense_replace": (0,),
    "moe_layer_freq": (1,),
}
LARGEST = {"num_hidden_layers": 1000, "num_experts": 10_000}  # a mistake, not a model; each costs time
IGNORED = {  # settings of generation_config.json that are not applied -> the value that asks for nothing
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
    "penalty_alpha": None,
    "guidance_scale": 1.0,
    "num_beams": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
}


def read_json(path: Path, default=None) -> dict:
    """The object in a JSON file; `default` where the file is absent and one is given."""
    if default is not None and not path.exists():
        return default
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ValueError(f"cannot read {path} ({e}); fetch the checkpoint again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object; fetch the checkpoint again")
    return content


def read_config(folder: Path) -> ModelConfig:
    """What a checkpoint folder's config.json says of the model."""
    return model_config(read_json(folder / "config.json"))


class Facts(dict):
    """A parsed config.json; ValueError names a key that is absent or not supported."""

    def refuse(self, key, allowed):
        value = json.dumps(self.get(key))
        raise ValueError(f"config.json has {key} = {value}; this loader supports {allowed}")

    def need(self, key):
        if self.get(key) is None:
            raise ValueError(f"config.json has no {key}; fetch the checkpoint's own config.json")
        return self[key]

    def whole(self, key) -> int:
        most = LARGEST.get(key, 2**53)
        if type(self.need(key)) is not int or not 1 <= self[key] <= most:
            allowed = f"a whole number, 1 to {most:,}" if key in LARGEST else "a whole number, 1 or more"
            self.refuse(key, allowed)
        return self[key]

    def flag(self, key) -> bool:
        if not isinstance(self.get(key, False), bool):
            self.refuse(key, "true or false")
        return self.get(key, False)


def model_config(c: dict) -> ModelConfig:
    """The facts of a parsed config.json; ValueError names a key that is absent or not supported."""
    c = Facts({"num_experts": c.get("num_local_experts")} | c)  # the latter is newer transformers' spelling
    check_supported(c)
    heads = c.whole("num_attention_heads")
    kv_heads = heads if c.get("num_key_value_heads") is None else c.whole("num_key_value_heads")
    if heads % kv_heads:
        c.refuse("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    head_dim = c.whole("hidden_size") // heads if c.get("head_dim") is None else c.whole("head_dim")
    if head_dim % 2 or not head_dim:
        raise ValueError(f"config.json gives head_dim = {head_dim}; this loader supports an even number")
    return ModelConfig(
        model_type=c["model_type"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rope=rope_config(c),
        tie_word_embeddings=c.flag("tie_word_embeddings"),
        attention_bias=c.flag("attention_bias") or c["model_type"] == "qwen2",  # which has no such key
        mlp_bias=c.flag("mlp_bias"),
        dtype=str(c.get("dtype") or c.get("torch_dtype") or "float32"),
        rms_norm_eps=c["rms_norm_eps"],
        **{key: c.whole(key) for key in ("vocab_size", "hidden_size", "intermediate_size")},
        **{key: c.whole(key) for key in ("num_hidden_layers", "max_position_embeddings")},
        **(expert_facts(c) if c["model_type"] == "qwen3_moe" else {}),
    )


def check_supported(c: Facts):
    """ValueError for a fact that changes the computation in a way that `model.py` does not know."""
    if c.need("model_type") not in MODEL_TYPES:
        c.refuse("model_type", "/".join(MODEL_TYPES) + ": choose such a checkpoint")
    if c.get("quantization_config") is not None:
        c.refuse("quantization_config", "none: choose an unquantized checkpoint (bf16, fp16 or fp32)")
    for key, neutral in SUPPORTED.items():
        same = lambda x, key=key: c[key] == x and isinstance(c[key], bool) == isinstance(x, bool)
        if c.get(key) is not None and not any(map(same, neutral)):
            c.refuse(
                key, " or ".join(map(json.dumps, neutral)) or "none: what it changes is not computed here"
            )
    c.flag("use_sliding_window")
    layers = c.get("layer_types")
    if layers is not None and (not isinstance(layers, list) or any(x != "full_attention" for x in layers)):
        c.refuse("layer_types", "full attention in every layer")
    if layers is not None and len(layers) != c.whole("num_hidden_layers"):
        c.refuse("layer_types", f"one entry for each of the {c['num_hidden_layers']} layers")
    if "hidden_act" in c and c["hidden_act"] is None:
        c.refuse("hidden_act", "silu")
    if not isinstance(c.need("rms_norm_eps"), float) or not 0 < c["rms_norm_eps"] < 1:
        c.refuse("rms_norm_eps", "a fraction such as 1e-6")


def expert_facts(c: Facts) -> dict:
    """What a mixture of experts needs beside."""
    keys = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    moe = {key: c.whole(key) for key in keys} | {"norm_topk_prob": c.flag("norm_topk_prob")}
    if moe["num_experts_per_tok"] > moe["num_experts"]:
        c.refuse("num_experts_per_tok", f"at most num_experts = {moe['num_experts']}")
    if c.get("decoder_sparse_step") is not None:
        moe["decoder_sparse_step"] = c.whole("decoder_sparse_step")
    dense = c.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(i) is not int for i in dense):
        c.refuse("mlp_only_layers", "a list of layer numbers")
    return moe | {"mlp_only_layers": tuple(dense)}


def rope_config(c: dict) -> RopeConfig:
    """RoPE facts, from `rope_theta` + `rope_scaling` or from `rope_parameters` (newer transformers)."""
    r = {}
    for key in ("rope_parameters", "rope_scaling"):  # if both are there the second counts, as in transformers
        found = c.get(key)
        if found is not None and (
            not isinstance(found, dict) or any(isinstance(x, dict) for x in found.values())
        ):
            allowed = "an object of numbers and names, the same for all layers, or null"
            raise ValueError(f"config.json has {key} = {json.dumps(found)}; allowed is {allowed}")
        r = found or r
    if r.get("rope_theta", c.get("rope_theta")) is None:
        raise ValueError(
            "config.json has no rope_theta, at the top or under rope_parameters; add the model's own"
        )
    theta, kind = positive({**c, **r}, "rope_theta"), r.get("rope_type") or r.get("type") or "default"
    if theta <= 1:
        raise ValueError(f"config.json has rope_theta = {theta}; allowed is a number above 1")
    if kind not in ("default", "yarn"):
        raise ValueError(f"config.json has rope type {kind!r}; this loader supports 'default' and 'yarn'")
    if r.get("partial_rotary_factor") not in (None, 1):
        raise ValueError("config.json has a partial_rotary_factor; this loader rotates whole heads only")
    if not isinstance(r.get("truncate", True), bool):
        raise ValueError(
            f"config.json has truncate = {json.dumps(r['truncate'])}; allowed are true and false"
        )
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
    """The smallest whole factor that makes room for `positions`; None beyond 4, the most that Qwen's model
    cards vouch for, and for models that YaRN was not made for.
    """
    factor = max(-(-positions // trained_positions(config)), 2)
    return factor if config.model_type != "llama" and factor <= 4 else None


def sampling_settings(generation_config: dict, **given) -> Sampling:
    """The checkpoint's own settings where its generation_config.json has do_sample, else greedy; `given`
    values other than None come first.  A filter given for greedy decoding is an error.
    """
    names, own = [f.name for f in fields(Sampling) if f.name != "seed"], {}
    if generation_config.get("do_sample"):
        published = {name: generation_config.get(name) for name in names}
        own = {"temperature": 1.0} | {name: v for name, v in published.items() if v is not None}
        try:
            Sampling(**own)
        except ValueError as e:
            raise ValueError(f"generation_config.json: {e}") from None
    given = {name: value for name, value in given.items() if value is not None}
    made = Sampling(**own | given)
    off = lambda name: given.get(name, getattr(GREEDY, name)) == getattr(GREEDY, name)
    for name in names[1:]:
        if made.temperature == 0 and not off(name):
            what = f"{name} = {given[name]} at temperature 0, which is greedy"
            raise ValueError(f"{what}; give a temperature above 0")
    return made


def not_applied(generation_config: dict) -> str | None:
    """What to say of settings of generation_config.json that would change the text and are not applied."""
    found = {key: generation_config.get(key) for key in IGNORED}
    asked = [f"{key} = {json.dumps(x)}" for key, x in found.items() if x not in (None, IGNORED[key])]
    return f"generation_config.json asks for {', '.join(asked)}, not applied here" if asked else None
