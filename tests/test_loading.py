"""Checkpoint folders: what config.json may say, and damaged or unusual tensors."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from command.config import model_config, with_yarn
from tests.tiny import BASE, dense_logits, edit_config, load_folder, make_checkpoint

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def test_yarn_flag_is_the_model_cards_setting(tmp_path):
    make_checkpoint(tmp_path, max_position_embeddings=40960, rope_theta=1e6)
    config = json.loads((tmp_path / "config.json").read_text())
    ours = with_yarn(model_config(config), 4.0)
    card = model_config(config | {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": YARN})
    assert ours.rope == card.rope and ours.max_positions == 131072
    assert ours.rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    with pytest.raises(ValueError, match="yarn = 0.5; allowed"):
        with_yarn(ours, 0.5)


def test_rope_theta_in_either_place_gives_the_same_logits(tmp_path):
    """The newer spelling nests rope_theta; a loader that misses it falls back to 10000 and garbles text."""
    make_checkpoint(tmp_path, rope_theta=5e5)
    tokens = torch.arange(40)[None] % 97
    nested = dense_logits(load_folder(tmp_path), tokens)
    edit_config(tmp_path, rope_parameters=None, rope_theta=5e5)
    assert torch.equal(dense_logits(load_folder(tmp_path), tokens), nested)
    edit_config(tmp_path, rope_theta=None)
    with pytest.raises(ValueError, match="rope_theta"):
        load_folder(tmp_path)


def test_both_spellings_of_dtype():
    for key in ("dtype", "torch_dtype"):
        assert model_config(BASE | {key: "bfloat16"}).dtype == "bfloat16"


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(model_type="gemma3"), 'model_type = "gemma3"'),
        (dict(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "rope type 'llama3'"),
        (dict(quantization_config={"quant_method": "fp8"}), "quantization_config"),
        (dict(use_sliding_window=True, sliding_window=128), "use_sliding_window = true"),
        (dict(layer_types=["full_attention", "sliding_attention"]), "layer_types"),
        (dict(hidden_act="gelu"), 'hidden_act = "gelu"'),
        (dict(num_key_value_heads=3), "num_key_value_heads = 3"),
        (dict(hidden_size=None), "no hidden_size"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (dict(vocab_size="97"), 'vocab_size = "97"'),
        (dict(num_hidden_layers=-1), "num_hidden_layers = -1"),
        (dict(num_attention_heads=2.5), "num_attention_heads = 2.5"),
        (dict(max_position_embeddings=float("nan")), "max_position_embeddings = NaN"),
        (dict(rms_norm_eps=-1), "rms_norm_eps = -1"),
        (dict(rope_theta="x"), 'rope_theta = "x"'),
        (dict(rope_theta=1.0, rope_scaling=YARN), "rope_theta = 1.0"),
        (dict(rope_scaling="yarn"), 'rope_scaling = "yarn"'),
        (dict(rope_scaling=YARN | {"factor": "4"}), 'factor = "4"'),
        (dict(rope_scaling=YARN | {"factor": 0.0}), "factor = 0.0"),
        (dict(num_key_value_heads=0), "num_key_value_heads = 0"),
        (dict(model_type="qwen3_moe"), "no num_experts"),
        (dict(final_logit_softcapping=30.0), "final_logit_softcapping = 30.0"),
        (dict(embedding_multiplier=12), "embedding_multiplier = 12"),
        (dict(residual_multiplier=0.2), "residual_multiplier = 0.2"),
        (dict(n_shared_experts=1), "n_shared_experts = 1"),
        (dict(hidden_activation="gelu_pytorch_tanh"), "hidden_activation"),
        (dict(layer_types="full_attention"), "layer_types"),
        (dict(tie_word_embeddings="false"), 'tie_word_embeddings = "false"'),
        (dict(attention_bias=1), "attention_bias = 1"),
        (dict(num_hidden_layers=10**9), "num_hidden_layers = 1000000000"),
        (dict(rope_parameters={"rope_type": "linear"}), "rope type 'linear'"),
        (dict(rope_parameters={"sliding_attention": {"rope_theta": 1e4}}), "rope_parameters"),
        (dict(rope_scaling=YARN | {"truncate": "no"}), 'truncate = "no"'),
    ],
)
def test_unsupported_configs_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match="config.json has.*" + message.split("no ")[-1].replace("[", r"\[")):
        model_config(BASE | change)


def test_rope_by_kind_of_layer_is_refused():
    """Beside a top-level rope_theta it lost YaRN without a word."""
    nested = {"full_attention": YARN | {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}
    for key in ("rope_parameters", "rope_scaling"):
        with pytest.raises(ValueError, match=f"config.json has {key} = .*the same for all layers"):
            model_config(BASE | {key: nested})
    both = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": YARN}
    assert model_config(BASE | both).rope == model_config(BASE | {"rope_scaling": YARN}).rope


def test_values_that_change_nothing_are_accepted():
    neutral = dict(hidden_activation="silu", logits_scaling=1.0, n_group=1, clip_qkv=None, no_rope_layers=[])
    other = dict(_name_or_path="x", use_cache=True, torchscript=False, pretraining_tp=1, my_own_key={"a": 1})
    assert model_config(BASE | neutral | other) == model_config(BASE)


def test_inactive_sliding_window_is_ignored():
    c = model_config(
        BASE
        | dict(
            use_sliding_window=False,
            sliding_window=128,
            max_window_layers=1,
            layer_types=["full_attention"] * 2,
        )
    )
    assert c == model_config(BASE)


def test_tied_head_and_its_redundant_copy(tmp_path):
    make_checkpoint(tmp_path, tie_word_embeddings=True)
    tokens = torch.arange(9)[None]
    want = dense_logits(load_folder(tmp_path), tokens)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    assert torch.equal(dense_logits(load_folder(tmp_path), tokens), want)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, file)
    with pytest.raises(ValueError, match="lm_head.weight differs from the embedding"):
        load_folder(tmp_path)


@pytest.mark.parametrize(
    "index", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": ""}}']
)
def test_broken_index(tmp_path, index):
    make_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match="model.safetensors.index.json"):
        load_folder(tmp_path)


def test_a_tensor_in_two_files(tmp_path):
    make_checkpoint(tmp_path, max_shard_size="20KB")
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    other = next(file for file in weight_map.values() if file != weight_map["model.norm.weight"])
    save_file(load_file(tmp_path / other) | {"model.norm.weight": torch.zeros(40)}, tmp_path / other)
    with pytest.raises(ValueError, match="has model.norm.weight twice"):
        load_folder(tmp_path)


def test_untied_head_missing(tmp_path):
    make_checkpoint(tmp_path, tie_word_embeddings=True)
    edit_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(ValueError, match="lacks lm_head.weight"):
        load_folder(tmp_path)


def test_index_naming_a_missing_file_or_tensor(tmp_path):
    make_checkpoint(tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name, file = next(iter(content["weight_map"].items()))
    shard = load_file(tmp_path / file)
    save_file({k: v for k, v in shard.items() if k != name} | {"x": torch.zeros(1)}, tmp_path / file)
    with pytest.raises(ValueError, match=f"{file} lacks {name}".replace(".", r"\.")):
        load_folder(tmp_path)
    (tmp_path / file).unlink()
    with pytest.raises(ValueError, match=f"names {file}, which is not in"):
        load_folder(tmp_path)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda t: t.pop("model.norm.weight"), "lacks model.norm.weight"),
        (lambda t: t.update({"model.extra.weight": torch.zeros(3)}), "has model.extra.weight"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(3)}),
            r"model.norm.weight has shape \(3,\).*\(40,\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(40).to(torch.float8_e4m3fn)}),
            "model.norm.weight is torch.float8_e4m3fn",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(40, dtype=torch.int8)}),
            "model.norm.weight is torch.int8",
        ),
    ],
)
def test_damaged_files_are_refused_by_tensor(tmp_path, damage, message):
    make_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_folder(tmp_path)


def test_files_that_are_no_safetensors(tmp_path):
    make_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        load_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no model.safetensors.*pytorch_model.bin"):
        load_folder(tmp_path)


def test_old_llama_rotary_buffers_are_accepted(tmp_path):
    make_checkpoint(tmp_path, kind="llama", hidden_size=42)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)},
        tmp_path / "model.safetensors",
    )
    load_folder(tmp_path)


def test_two_sets_of_weights_are_named(tmp_path):
    """A complete model.safetensors beside an index with old shards."""
    make_checkpoint(tmp_path, max_shard_size="20KB")
    save_file({"model.norm.weight": torch.zeros(40)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="two sets of weights, model.safetensors and those of .*older"):
        load_folder(tmp_path)


def test_a_half_fetched_checkpoint_says_what_is_missing(tmp_path):
    """In the hub's cache, after an interrupted fetch; the advice was to convert it to safetensors."""
    snapshot = tmp_path / "models--Qwen--Qwen3-4B" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    make_checkpoint(snapshot, max_shard_size="20KB")
    for file in sorted(snapshot.glob("model-*.safetensors"))[1:]:
        file.unlink()
    again = "the download of Qwen/Qwen3-4B is not complete: run again with a network"
    with pytest.raises(ValueError, match=f"names model-00002-of-.* and .* more, which is not in .*; {again}"):
        load_folder(snapshot)
    for file in snapshot.glob("model*"):
        file.unlink()
    with pytest.raises(ValueError, match=f"has no model.safetensors or index .*; {again}"):
        load_folder(snapshot)
    (snapshot / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match="found: pytorch_model.bin.*; convert pytorch_model.bin to safe"):
        load_folder(snapshot)
