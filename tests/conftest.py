"""Shared by the tests: tiny random checkpoints, plain dense decoding, and the real small model."""

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():  # read when the kernels are imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import generate
from command import checkpoints
from command.loading import load, read_json
from command.text import Text
from model import KVCache, ModelConfig, attend

HERE = Path(__file__).resolve().parent.parent  # the project
SHARED = HERE.parent / "shared"
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

# Flags under which a short prompt sees fast and slow steps.
SMALL = "--n-select 20 --n-recent 16 --max-interval 8 --min-gap 2 --max-new-tokens 20".split()

# A chat template in the manner of published ones.
TEMPLATE = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if not enable_thinking | default(true) %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

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


def byte_tokenizer():
    """A token a byte, and two control tokens."""
    tokenizer = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>")]
    )
    return tokenizer


def run(capsys, *argv):
    """(stdout, stderr, exit code) of the command."""
    code = 0
    try:
        generate.main([str(a) for a in argv])
    except SystemExit as e:
        code = e.code
    out = capsys.readouterr()
    return out.out, out.err, code


def command(*argv):
    """The command in a process of its own, as a shell line."""
    return shlex.join([sys.executable, "generate.py", *map(str, argv)])


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
    return load(folder, ModelConfig.from_dict(read_json(Path(folder) / "config.json")), dtype)


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


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A tiny Qwen3 in fp32: L = 2, K = 3 (so that no step of the Selector is skipped), G = 5, D = 16."""
    folder = tmp_path_factory.mktemp("tiny")
    make_checkpoint(folder, heads=15, kv_heads=3, head_dim=16, num_hidden_layers=2)
    return load_folder(folder)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tiny Qwen3 folder that looks like a published one."""
    folder = tmp_path_factory.mktemp("ckpt")
    make_checkpoint(folder, heads=6, kv_heads=2, vocab_size=258, max_position_embeddings=2000)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": {"content": "<|im_end|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def prompt_file(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("The sea was calm. " * 12)
    return str(file)


@pytest.fixture
def damaged(folder, tmp_path):
    """A copy of the folder to damage, and the arguments to run it with."""
    copy = tmp_path / "damaged"
    shutil.copytree(folder, copy)
    (tmp_path / "hello.txt").write_text("hello")
    return copy, ["--ckpt", copy, "--prompt", tmp_path / "hello.txt", "--max-new-tokens", 2]


@pytest.fixture(scope="session")
def smollm2():
    """(model in fp32, text, folder) of SmolLM2; where it cannot be fetched the tests are skipped, in CI they
    fail.
    """
    try:
        folder = checkpoints.resolve("smollm2")
    except ValueError as e:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"SmolLM2 is not to be had: {e}")
    return load_folder(folder), Text(folder), folder
