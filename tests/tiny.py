"""Tiny random checkpoints and engines for the tests, and plain dense decoding to hold them against."""

import json
import random
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from command.loading import load
from memory import REFERENCE
from model import KVCache, attend
from sfi import Engine, SFIConfig, decode

# Every dimension differs from every other, so that a swapped axis cannot hide.
SIZES = dict(
    vocab_size=97,
    hidden_size=40,
    intermediate_size=56,
    num_hidden_layers=3,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
)
MOE = dict(
    num_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[1],
)

# A config.json for tests that load no weights.
BASE = dict(
    model_type="qwen3",
    vocab_size=97,
    hidden_size=64,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    rms_norm_eps=1e-6,
    max_position_embeddings=4096,
    rope_theta=1e6,
)


# A configuration under which a short prompt sees fast and slow steps.
SMALL = SFIConfig(
    n_sink=2, n_select=10, n_recent=8, align=4, delay=0, min_gap=3, max_interval=7, n_evidence=5, reread=1
)
WORDS = [
    " the",
    " sea",
    ".",
    " Then",
    "\n",
    " it",
    '."',
    " rose",
    "!",
    " Now",
]  # token t has the text WORDS[t % 10]


def token_text(token):
    return WORDS[token % 10]


def prompt(n, seed=0):
    return random.Random(seed).choices(range(97), k=n)


# A chat template in the manner of published ones.
TEMPLATE = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if not enable_thinking | default(true) %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""


def make_checkpoint(
    folder,
    kind="qwen3",
    heads=6,
    kv_heads=2,
    head_dim=16,
    max_shard_size="1GB",
    dtype=torch.float32,
    **config,
):
    """Write a random checkpoint, norms and biases too; returns transformers' model of it in fp32."""
    torch.manual_seed(0)
    config = SIZES | (MOE if kind == "qwen3_moe" else {}) | {"rope_theta": 10000.0} | config
    config |= dict(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim)
    theta = config.pop("rope_theta")
    rope = {"rope_type": "default"} | config.pop("rope_parameters", {}) | {"rope_theta": theta}
    hf = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **config, rope_parameters=rope), attn_implementation="eager"
    )
    for name, p in hf.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(p, mean=float("norm" in name), std=0.3)
        elif p.dim() > 1:
            torch.nn.init.normal_(p, std=1.5 * p.shape[-1] ** -0.5)
    hf.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return transformers_model(folder, torch.float32)


def byte_tokenizer(special=("<|im_start|>", "<|im_end|>")):
    """A token a byte, and control tokens."""
    tokenizer = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return tokenizer


def make_folder(folder):
    """Write a random checkpoint with tokenizer and chat template, in the manner of published ones."""
    folder = Path(folder)
    make_checkpoint(folder, heads=6, kv_heads=2, vocab_size=258, max_position_embeddings=2000)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": {"content": "<|im_end|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def tiny_model(folder):
    """A tiny Qwen3 in fp32: L = 2, K = 3 (so that no step of the Selector is skipped), G = 5, D = 16."""
    make_checkpoint(folder, heads=15, kv_heads=3, head_dim=16, num_hidden_layers=2)
    return load_folder(folder)


def transformers_model(folder, dtype):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).eval()


def edit_config(folder, **changes):
    """Change keys of config.json; None removes one."""
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def load_folder(folder, dtype=torch.float32):
    return load(folder, dtype=dtype)


def dense_logits(model, tokens, first=0):
    """Logits (B, T, V) of one dense pass over tokens (B, T) from position `first`, without the engine."""
    B, T = tokens.shape
    cache = KVCache(model.config, B, T, model.dtype, "cpu")

    def attention(layer, q, k, v):
        cache.k[layer], cache.v[layer] = k.transpose(1, 2), v.transpose(1, 2)
        return attend(
            q, cache.k[layer], cache.v[layer], torch.zeros(B, dtype=torch.int64), torch.full((B,), T)
        )[0]

    return model(tokens, torch.arange(first, first + T).expand(B, T), attention, n_logits=T)


def poisoned(model, cfg, **sizes) -> Engine:
    """An engine with NaN in every slot and key norm that has not been written."""
    engine = Engine(model, cfg, token_text, **sizes)
    for buffer in (engine.cache.k, engine.cache.v, engine.cache.key_norm):
        buffer.fill_(float("nan"))
    return engine


def decoded(model, cfg, prompts, new, *, ops=REFERENCE, **settings):
    """(tokens of every row, steps, engine) of a decode from a poisoned cache."""
    sizes = dict(batch=len(prompts), max_length=max(map(len, prompts)) + new, new_tokens=new)
    engine = poisoned(model, cfg, ops=ops, **sizes)
    steps = list(decode(engine, prompts, max_new_tokens=new, **settings))
    return [[t for s in steps for t in s.tokens[b]] for b in range(len(prompts))], steps, engine
