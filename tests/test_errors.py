"""Bad input, damaged checkpoints, too little memory: one line, exit code 2, nothing loaded, nothing lost."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

import generate
from command import checks, machine
from command.checks import check_lengths
from command.config import model_config, read_config, with_yarn
from command.machine import cache_bytes
from command.text import Text
from sampling import Sampling
from sfi import SFIConfig
from tests.conftest import FLAGS, ROOT, run, shell_line
from tests.tiny import BASE, byte_tokenizer, edit_config

FILES = {
    "empty.txt": b"",
    "newline.txt": b"\n",
    "blank.txt": b" \n\t",
    "bom.txt": b"\xef\xbb\xbf",
    "utf16.txt": "hello".encode("utf-16"),
    "a.jsonl": b"{}",
    "le.txt": "hello there".encode("utf-16-le"),
    "be.txt": "hello there".encode("utf-16-be"),
    "utf32.txt": "hello there".encode("utf-32-le"),
    "nul.txt": b"some text\0and more of it, and more",
    "mark.txt": "\ufdd0".encode(),  # dropped, see text.BREAK
    "latin.txt": b"caf\xe9",
    "long.txt": b"a " * 1500,
    "ok.txt": b"hello",
}
BAD_INPUTS = [  # CKPT is the tiny checkpoint, DIR/ a folder with FILES
    ("--ckpt nowhere", "'nowhere' is no folder; allowed: a folder, a hub id"),
    ("--ckpt DIR/ --prompt DIR/ok.txt", "config.json ([Errno 2]"),
    ("--ckpt DIR/ok.txt", "is no folder; allowed: a folder, a hub id"),
    ("--fast", "unrecognized arguments: --fast; see --help"),
    ("DIR/ok.txt", "unrecognized arguments: DIR/ok.txt"),
    ("--temp 1", "unrecognized arguments: --temp 1"),
    ("--prompt", "argument --prompt: expected at least one argument"),
    ("--n-select many", "invalid int value: 'many'"),
    ("--n-select 1.5", "invalid int value: '1.5'"),
    ("--policy often", "invalid choice: 'often'"),
    ("--selector best", "invalid choice: 'best'"),
    ("--n-select -5", "n_select = -5; allowed is a whole number of tokens, 0 or more"),
    ("--max-interval 0", "max_interval = 0; allowed is a whole number of tokens, 1 or more"),
    ("--min-gap 70", "min_gap = 70; allowed is at most max_interval = 24"),
    ("--n-recent 8 --n-evidence 16", "n_recent = 8; allowed is at least n_evidence = 16"),
    ("--reread 300", "reread = 300; allowed is at most n_recent = 256"),
    ("--delay -1", "delay = -1; allowed is a whole number of tokens, 0 or more"),
    ("--steps past,magic", "steps has 'magic'; selector follow has past, heads, followers"),
    ("--prompt DIR/absent.txt", "no such file or directory; give a readable text file"),
    ("--prompt DIR/", "is a directory; give a readable text file"),
    ("--prompt DIR/ok.txt DIR/absent.txt", "absent.txt: no such file"),
    ("--prompt DIR/empty.txt", "the text is empty"),
    ("--prompt DIR/newline.txt", "the text is empty"),
    ("--prompt DIR/blank.txt", "the text is empty"),
    ("--prompt DIR/bom.txt", "the text is empty"),
    ("--prompt DIR/latin.txt", "byte 3 is not UTF-8, as in Latin-1 or another 8-bit encoding; allowed"),
    ("--prompt DIR/utf16.txt", "byte 0 is not UTF-8, as in UTF-16; allowed is UTF-8 text: convert the file"),
    ("--prompt DIR/le.txt", "byte 1 is NUL, as in UTF-16 without a byte order mark; allowed is UTF-8 text"),
    ("--prompt DIR/be.txt", "byte 0 is NUL, as in UTF-16 without a byte order mark; allowed is UTF-8 text"),
    ("--prompt DIR/utf32.txt", "byte 1 is NUL, as in UTF-32; allowed is UTF-8 text: convert the file"),
    ("--prompt DIR/nul.txt", "byte 9 is NUL, as in a file that is no text; allowed is UTF-8 text"),
    ("--prompt - -", "- more than once"),
    ("--prompt - --prompt -", "- more than once"),
    ("--question a --question b", "argument --question: given more than once; give it once"),
    ("--ckpt a --ckpt b", "argument --ckpt: given more than once; give it once"),
    ("--prompt DIR/ok.txt --question=", "--question is empty"),
    ("--prompt DIR/ok.txt --system=", "--system is empty"),
    ("--prompt DIR/ok.txt --system x --raw", "--system with --raw; it belongs to the chat template"),
    ("--prompt DIR/ok.txt --no-thinking --raw", "--no-thinking with --raw"),
    ("--ckpt CKPT --prompt DIR/long.txt", "= 3275; the model has 2000 positions: shorten the prompt"),
    ("--ckpt CKPT --prompt DIR/long.txt", "or stretch the positions with --yarn 2"),
    ("--ckpt CKPT --prompt DIR/ok.txt --max-new-tokens 90000", "90024; the model has 2000 positions"),
    ("--ckpt CKPT --prompt DIR/ok.txt --max-new-tokens -1", "max_new_tokens = -1; allowed is 0 or more"),
    ("--ckpt CKPT --prompt DIR/ok.txt --yarn 0.5", "yarn = 0.5; allowed is a factor above 1"),
    ("--ckpt CKPT --prompt DIR/long.txt --yarn 1.5", "has 3000 positions: shorten the prompt"),
    ("--temperature -1", "temperature = -1.0; allowed is a number from 0"),
    ("--temperature nan", "temperature = nan; allowed is"),
    ("--top-k -1", "top_k = -1; allowed is a whole number, 0 (off) or more"),
    ("--top-p 1.5", "top_p = 1.5; allowed is a number from 0 to 1 (off)"),
    ("--min-p -0.1", "min_p = -0.1; allowed is a number from 0 (off) to 1"),
    ("--ckpt CKPT --prompt DIR/ok.txt --top-p 0.9", "top_p = 0.9 at temperature 0, which is greedy"),
    ("--seed -1", "seed = -1; allowed is a whole number"),
    ("--dtype int4", "invalid choice: 'int4'"),
    ("--dense --policy window", "--dense with --policy window; give one of the two"),
    (
        "--ckpt CKPT --prompt DIR/ok.txt --yarn 1e308",
        "yarn = 1e+308; allowed is a factor above 1 and up",
    ),
    ("--ckpt CKPT --prompt DIR/mark.txt --raw", "the prompt is empty; give at least one token"),
    ("--device cuda", "PyTorch sees no CUDA device here; use --device cpu"),
    ("--trace DIR/steps.txt", "allowed is a file name that ends in .jsonl"),
    ("--trace DIR/none/steps.jsonl", "there is no folder DIR/none; make it first"),
    ("--trace DIR/folder.jsonl", "cannot be written (is a directory); give another file name"),
    ("--prompt DIR/a.jsonl --trace DIR/a.jsonl", "is a --prompt too"),
    ("--plot DIR/memory.jpeg", "allowed is a file name that ends in .png or .svg or .pdf"),
    ("--plot /proc/memory.png", "cannot be written ("),
    ("--plot DIR/ok.txt/memory.png", "there is no folder DIR/ok.txt"),
]


@pytest.mark.parametrize("argv, message", BAD_INPUTS)
def test_bad_input_is_one_line_and_exit_code_2(capsys, folder, tmp_path, monkeypatch, argv, message):
    """Before any weights load; nothing on stdout, nothing made, nothing overwritten."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(generate, "load", lambda *a: pytest.fail("the weights were loaded"))
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "folder.jsonl").mkdir()
    inside = lambda text: text.replace("DIR/", f"{tmp_path}/").replace("CKPT", str(folder))
    out, err, code = run(capsys, *map(inside, argv.split()))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert inside(message) in err and err.startswith("generate.py: error: ")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == FILES
    assert len(list(tmp_path.iterdir())) == len(FILES) + 1


def test_an_argument_of_two_lines_is_one_line_of_error(capsys):
    _, err, code = run(capsys, "a\nb")
    assert code == 2 and err == "generate.py: error: unrecognized arguments: a b; see --help\n"


def test_outputs_are_found_out_before_the_run(capsys, folder, prompt_file, tmp_path, monkeypatch):
    """A link to nowhere, standard input redirected from the file, matplotlib not installed."""
    monkeypatch.setattr(generate, "load", lambda *a: pytest.fail("the weights were loaded"))
    argv = ["--ckpt", folder, "--prompt"]
    (tmp_path / "link.png").symlink_to(tmp_path / "none" / "x.png")
    assert "cannot be written" in run(capsys, *argv, prompt_file, "--plot", tmp_path / "link.png")[1]
    assert (tmp_path / "link.png").is_symlink()
    trace = tmp_path / "steps.jsonl"
    trace.write_text("a text")
    line = shell_line(*argv, "-", "--trace", trace)
    done = subprocess.run(f"{line} < {trace}", shell=True, capture_output=True, cwd=ROOT)
    assert done.returncode == 2 and b"is a --prompt too" in done.stderr and trace.read_text() == "a text"
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    assert "--plot needs matplotlib; pip" in run(capsys, *argv, prompt_file, "--plot", tmp_path / "m.png")[1]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_closed_standard_streams(folder, prompt_file, closed):
    name = "-" if closed == "<&-" else prompt_file
    line = shell_line("--ckpt", folder, "--prompt", name, *FLAGS)
    done = subprocess.run(f"{line} {closed}", shell=True, capture_output=True, cwd=ROOT)
    assert b"Traceback" not in done.stderr and done.returncode == (2 if closed == "<&-" else 0)
    assert (b"standard input is closed" in done.stderr) == (closed == "<&-")
    assert bool(done.stdout) == (closed == "2>&-")


@pytest.mark.parametrize(
    "argv, call",
    [
        (["--n-recent", "8", "--n-evidence", "9"], lambda: SFIConfig(n_recent=8, n_evidence=9)),
        (["--top-k", "-1"], lambda: Sampling(top_k=-1)),
        (["--max-new-tokens", "-1"], lambda: checks.check_lengths(None, [5], -1)),
        (["--prompt", "absent.txt"], lambda: checks.read_prompt("absent.txt")),
    ],
)
def test_the_library_says_what_the_command_says(capsys, folder, argv, call):
    with pytest.raises(ValueError) as e:
        call()
    _, err, _ = run(capsys, "--ckpt", folder, *argv)
    assert err == f"generate.py: error: {e.value}\n"


@pytest.mark.parametrize("free", ["0.9 of the weights", "weights + 0.9 of the cache"])
def test_memory_is_checked_before_the_weights_load(capsys, folder, prompt_file, monkeypatch, free):
    weights = sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
    config = read_config(folder)
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


def test_no_chat_template(capsys, folder, prompt_file, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    (bare / "tokenizer_config.json").unlink()
    edit_config(bare, eos_token_id=[257])
    _, err, code = run(capsys, "--ckpt", bare, "--prompt", prompt_file)
    assert code == 2 and "no chat template; use --raw" in err
    assert run(capsys, "--ckpt", bare, "--prompt", prompt_file, "--raw", *FLAGS)[2] == 0
    assert Text(bare).stop_ids == {257}


def test_positions_that_do_not_fit():
    config = model_config(BASE | {"max_position_embeddings": 64})
    check_lengths(config, [60, 3], 4)
    with pytest.raises(
        ValueError, match="prompt of 61 tokens [+] 4 new ones = 65; the model has 64 positions"
    ):
        check_lengths(config, [61, 3], 4)
    with pytest.raises(ValueError, match="prompt is empty"):
        check_lengths(config, [5, 0], 4)
    with pytest.raises(ValueError, match="max_new_tokens = -1"):
        check_lengths(config, [5], -1)


@pytest.mark.parametrize(
    "changes, tokens, factor",
    [
        (dict(max_position_embeddings=40960), 50_000, 2),  # Qwen3: 32768 positions are stretched
        (dict(max_position_embeddings=40960), 131_072, 4),
        (dict(max_position_embeddings=40960), 131_073, None),
        (dict(max_position_embeddings=262144), 300_000, 2),
        (dict(max_position_embeddings=64, model_type="llama"), 100, None),
    ],
)
def test_too_long_a_prompt_names_the_yarn_that_would_serve(changes, tokens, factor):
    config = model_config(BASE | changes)
    with pytest.raises(ValueError, match=f"new ones = {tokens}; the model has") as e:
        check_lengths(config, [tokens - 10], 10)
    assert f"has {config.max_positions} positions" in str(e.value)
    assert ("--yarn" in str(e.value)) == bool(factor)
    if factor:
        assert str(e.value).endswith(f"or stretch the positions with --yarn {factor}")
        check_lengths(with_yarn(config, factor), [tokens - 10], 10)
        with pytest.raises(ValueError, match="positions"):
            check_lengths(with_yarn(config, factor - 0.9), [tokens - 10], 10)


def control_groups(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


V2 = {
    "proc/self/cgroup": "0::/box/inner\n",
    "sys/fs/cgroup/box/memory.max": "3000\n",
    "sys/fs/cgroup/box/memory.current": "1000\n",
    "sys/fs/cgroup/box/memory.stat": "anon 400\ninactive_file 500\n",
    "sys/fs/cgroup/box/inner/memory.max": "max\n",
    "sys/fs/cgroup/box/inner/memory.current": "900\n",
    "sys/fs/cgroup/box/inner/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/box/cpu.max": "max 100000\n",
}
V1 = {
    "proc/self/cgroup": "7:memory:/box\n3:cpu,cpuacct:/box\n",
    "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "3000\n",
    "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "1000\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "5000\n",
    "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "100000\n",
    "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
}


@pytest.mark.parametrize("files, memory, cores", [(V2, 2500, 2), (V1, 2000, 1), ({}, None, None)])
def test_limits_of_a_container(tmp_path, files, memory, cores):
    """A container's limit once ended in a kill: memory was asked of the whole machine."""
    root = control_groups(tmp_path, files)
    assert machine.container_memory(root) == memory and machine.container_cores(root) == cores


def test_a_containers_memory_is_what_counts(capsys, folder, prompt_file, monkeypatch):
    monkeypatch.setattr(machine, "container_memory", lambda: 1000)
    monkeypatch.setattr(machine, "container_cores", lambda: 1)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = torch.get_num_threads()
    try:
        _, err, code = run(capsys, "--ckpt", folder, "--prompt", prompt_file, "--device", "cpu")
        assert code == 2 and re.search(r"needs \d+\.\d GB .*, this container has 0\.0 GB free", err)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("error", [RuntimeError("unable to mmap 4096 bytes\nx"), MemoryError("no more")])
def test_what_the_system_refuses_is_one_line(capsys, folder, prompt_file, monkeypatch, error):
    monkeypatch.setattr(generate, "load", lambda *a: (_ for _ in ()).throw(error))
    out, err, code = run(capsys, "--ckpt", folder, "--prompt", prompt_file, "--quiet")
    assert (code, out, err) == (2, "", f"generate.py: error: {' '.join(str(error).split())}\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_full_disk_under_the_trace_loses_neither_report_nor_json(capsys, folder, prompt_file, tmp_path):
    trace = tmp_path / "steps.jsonl"
    trace.symlink_to("/dev/full")
    argv = ["--ckpt", folder, "--prompt", prompt_file, "--json", "--trace", trace, *FLAGS]
    out, err, code = run(capsys, *argv)
    assert code == 2 and json.loads(out.splitlines()[-1])["new_tokens"] == [20] and "steps: " in err
    last = (
        f"generate.py: error: --trace {trace}: no space left on device at step 1; what came after it is lost"
    )
    assert err.splitlines()[-1] == last
