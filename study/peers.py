"""Other programs' decode steps, timed on the same weights: transformers, and llama.cpp where it is installed.

llama.cpp is reached through the package llama-cpp-python, with the weights in BF16 and in Q8_0 (8 bits and a
scale for 32 numbers), a cache in F16, flash attention, and as many threads as PyTorch has.  Used by
`bench.py --peer`.  Read before: `steps.py`.
"""

import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from model import Model

LARGEST = 32768  # cached tokens; beyond, a step of transformers takes seconds


def problem() -> str | None:
    """Why transformers cannot be timed; None if it can."""
    try:
        from transformers import Qwen3ForCausalLM  # noqa: F401
    except ImportError as e:
        return " ".join(str(e).split())[:160]


class Peers:
    """Other programs with the weights of a dense Qwen3; `steps` gives what to time."""

    def __init__(self, model: Model, contexts: list[int], new: int):
        self.model, self.llama_cpp = model, {}
        if model.device.type != "cpu" or not find_spec("llama_cpp"):
            return
        longest = max((n for n in contexts if n <= LARGEST), default=0) + new
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("BF16", "Q8_0"):
                file = Path(folder) / f"{kind}.gguf"
                write_gguf(model, file, kind)
                it = LlamaCpp(file, longest, torch.get_num_threads())
                self.llama_cpp[f"llama_cpp_{kind.lower()}"] = it

    def steps(self, context: int) -> dict[str, Callable]:
        """By name, a function that feeds one token to a row that has so many cached; none beyond LARGEST."""
        if context > LARGEST:
            return {}
        for it in self.llama_cpp.values():
            it.resize(context)
        more = {name: partial(it.feed, [5]) for name, it in self.llama_cpp.items()}
        return {"transformers": transformers_step(self.model, context), **more}


def transformers_step(model: Model, context: int) -> Callable:
    """A step of transformers (SDPA attention) with the same weights and a random cache."""
    import transformers

    config = transformers.Qwen3Config(
        **{name: getattr(model.config, name) for name in CONFIG.split()}, rope_theta=model.config.rope.theta
    )
    with torch.device("meta"):
        peer = transformers.Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa")
    peer = peer.to_empty(device=model.device).to(model.dtype).eval()
    peer.load_state_dict(dict(model.named_parameters()), strict=False, assign=True)
    peer.tie_weights()
    peer.model.rotary_emb = type(peer.model.rotary_emb)(config).to(model.device)  # no weights
    shape = (1, config.num_key_value_heads, context, config.head_dim)
    cache = transformers.DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        cache.update(*(torch.randn(shape, dtype=model.dtype, device=model.device) for _ in range(2)), layer)
    token = torch.tensor([[5]], device=model.device)

    @torch.inference_mode()
    def step():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # it renames arguments from version to version
            return peer(token, past_key_values=cache, use_cache=True)

    return step


CONFIG = """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
    head_dim rms_norm_eps max_position_embeddings tie_word_embeddings"""


def write_gguf(model: Model, path: Path, kind: str):
    """A dense Qwen3 as a GGUF file without vocabulary; matrices in `kind`, BF16 or Q8_0, the rest in F32."""
    import gguf

    c, kind = model.config, gguf.GGMLQuantizationType[kind]
    out = gguf.GGUFWriter(path, "qwen3")
    out.add_context_length(c.max_positions)
    out.add_embedding_length(c.hidden_size)
    out.add_block_count(c.num_hidden_layers)
    out.add_feed_forward_length(c.intermediate_size)
    out.add_head_count(c.num_attention_heads)
    out.add_head_count_kv(c.num_key_value_heads)
    out.add_key_length(c.head_dim)
    out.add_value_length(c.head_dim)
    out.add_layer_norm_rms_eps(c.rms_norm_eps)
    out.add_rope_freq_base(c.rope.theta)
    out.add_vocab_size(c.vocab_size)
    out.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, c.num_hidden_layers)
    for name, p in model.named_parameters():
        kept = gguf.GGMLQuantizationType.F32 if p.ndim == 1 else kind
        numbers = gguf.quants.quantize(p.float().cpu().numpy(), kept)
        out.add_tensor(names.get_name(name, try_suffixes=(".weight",)), numbers, raw_dtype=kept)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


class LlamaCpp:
    """A model in llama.cpp with one sequence of tokens in its cache."""

    def __init__(self, path: Path, max_length: int, threads: int):
        import llama_cpp

        self.lib = llama_cpp
        self.quiet = llama_cpp.llama_log_callback(lambda *_: None)  # kept: the library calls it
        llama_cpp.llama_log_set(self.quiet, None)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        how = llama_cpp.llama_context_default_params()
        how.n_ctx, how.n_batch, how.n_ubatch = max_length, 512, 512
        how.n_threads = how.n_threads_batch = threads
        how.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        how.type_k = how.type_v = llama_cpp.GGML_TYPE_F16
        self.context = self.model and llama_cpp.llama_init_from_model(self.model, how)
        if not self.context:
            raise ValueError(f"llama.cpp cannot load {path}; try another version of llama-cpp-python")
        self.length = 0

    def feed(self, tokens: list[int]) -> np.ndarray:
        """Cache more tokens; the logits (V,) of the last one."""
        for i in range(0, len(tokens), 512):
            some = tokens[i : i + 512]
            given = (self.lib.llama_token * len(some))(*some)  # named: the batch only points to it
            batch = self.lib.llama_batch_get_one(given, len(some))
            if self.lib.llama_decode(self.context, batch):
                raise ValueError("llama.cpp cannot decode; lower --contexts")
        self.length += len(tokens)
        vocabulary = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))
        return np.ctypeslib.as_array(self.lib.llama_get_logits(self.context), shape=(vocabulary,)).copy()

    def resize(self, length: int):
        """Have so many tokens cached."""
        if length > self.length:
            self.feed([5] * (length - self.length))
        self.lib.llama_memory_seq_rm(self.lib.llama_get_memory(self.context), 0, length, -1)
        self.length = length
