"""Random damage to a checkpoint's JSON files, its template and the flags, from a seed: an answer that
transformers would give too, or one line that says what is wrong; never a traceback.
"""

import json
import random
import shutil

import pytest
import torch
import transformers

from command.config import SUPPORTED
from tests.conftest import run
from tests.tiny import TEMPLATE, dense_logits, load_folder, make_folder

KEYS = """model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
num_key_value_heads head_dim rms_norm_eps max_position_embeddings rope_theta rope_scaling rope_parameters
tie_word_embeddings attention_bias mlp_bias dtype torch_dtype layer_types quantization_config
my_own_key""".split()
KEYS += SUPPORTED
ROPES = [
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1000, "rope_theta": 1e4},
    {"rope_type": "linear", "factor": 2.0},
    {"type": "default"},
    {"full_attention": {"rope_type": "default", "rope_theta": 5e3}},
    {"rope_theta": -3},
    {"rope_type": ["yarn"]},
]
VALUES = [None, 0, 1, -1, 2, 3, 6, 16, 40, 258, 0.5, 1e308, float("nan"), 2**70, True, False]
VALUES += ["", "x", "true", "1", "silu", "qwen3", "llama", [], [0], ["full_attention"] * 3]
VALUES += [["sliding_attention"], {}, {"a": {"b": 1}}]
TEMPLATES = ["", "{{", "{{ x.y.z }}", "{{ messages }}", "\0", "hi", "{{ messages[0].content | upper }}"]
TEMPLATES += ["{% for m in messages %}{{ m.content }}{% endfor %}", TEMPLATE, TEMPLATE]
TEMPLATES += ["{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"]
FLAGS = """--n-select --n-recent --n-sink --align --min-gap --max-interval --n-evidence --policy --selector
--steps --fusion --draft-cost --temperature --top-k --top-p --min-p --seed --dtype --yarn --max-new-tokens
--system --question""".split()
SETTINGS = ["0", "1", "-1", "16", "0.5", "nan", "", "x", "past", "paper", "1e400"]
SWITCHES = "--exact --dense --raw --no-thinking --json --quiet".split()
FILES = ["generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]
SPECIAL = """eos_token_id do_sample temperature top_k top_p chat_template eos_token pad_token bos_token
added_tokens_decoder additional_special_tokens extra_special_tokens repetition_penalty <tool>""".split()
TOKEN = {"content": "<|im_end|>", "special": True}


def damage(rng, config: dict) -> dict:
    """The object with one to three keys changed, removed or added."""
    config = dict(config)
    for key in rng.choices(KEYS, k=rng.randint(1, 3)):
        value = rng.choice(ROPES if key.startswith("rope_") and rng.random() < 0.7 else VALUES)
        config[key] = value
        if rng.random() < 0.1:
            del config[key]
    return config


def cases(some, many):
    return pytest.mark.parametrize("cases", [some, pytest.param(many, marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("published"))


@cases(150, 2500)
def test_config_json(published, cases):
    """What is accepted is read as transformers reads it."""
    rng, path, answered = random.Random(1), published / "config.json", 0
    whole, tokens = json.loads(path.read_text()), torch.tensor([[5, 7, 11, 200]])
    try:
        for i in range(cases):
            config = damage(rng, whole)
            path.write_text(json.dumps(config))
            what = f"case {i}: " + json.dumps({k: v for k, v in config.items() if whole.get(k) != v})
            try:
                got = dense_logits(load_folder(published), tokens)
            except ValueError as e:
                assert "\n" not in str(e) and len(str(e)) > 10, what
                continue
            try:
                theirs = transformers.AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)
                with torch.no_grad():
                    want = theirs(tokens).logits
            except Exception as e:
                pytest.fail(f"{what}: answered, but transformers refuses: {str(e)[:300]}")
            assert torch.allclose(got, want, atol=1e-4, equal_nan=True), what
            answered += 1
    finally:
        path.write_text(json.dumps(whole))
    print(f"{answered} of {cases} answered as by transformers, the others refused")
    assert 0 < answered < cases


@cases(60, 1500)
def test_files_of_the_tokenizer_and_flags(capsys, published, tmp_path, cases):
    """The command's output: an answer, exit code 0, or one line of error, exit code 2."""
    rng, codes = random.Random(2), []
    (text := tmp_path / "text.txt").write_text("The sea was calm. " * 3)
    for i in range(cases):
        folder = tmp_path / "damaged"
        shutil.copytree(published, folder)
        for name in rng.sample(FILES, rng.randint(0, 2)):
            content = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
            for key in rng.choices(SPECIAL, k=2):
                content[key] = rng.choice([*VALUES, TOKEN, [TOKEN], {"300": TOKEN}])
            content = content if rng.random() < 0.9 else rng.choice(VALUES)
            (folder / name).write_text(json.dumps(content))
        if rng.random() < 0.4:
            (folder / "chat_template.jinja").write_text(rng.choice(TEMPLATES))
        argv = ["--ckpt", folder, "--prompt", text, "--dtype", "float32", "--max-new-tokens", 2]
        for flag in rng.sample(FLAGS, rng.randint(0, 3)):
            argv += [flag, rng.choice(SETTINGS)]
        argv += rng.sample(SWITCHES, rng.randint(0, 2))
        out, err, code = run(capsys, *argv)
        files = {p.name: p.read_text()[:300] for p in folder.glob("*[ng]*") if p.name in FILES}
        what = f"case {i}: {argv[8:]} {files}\n{out[-300:]}{err[-600:]}"
        errors = [line for line in err.splitlines() if line.startswith("generate.py: error: ")]
        assert code in (0, 2) and len(errors) == (code == 2) and "Traceback" not in err, what
        codes.append(code)
        shutil.rmtree(folder)
    assert {0, 2} == set(codes)
