"""Fixtures of the tests, and how they run the command."""

import os
import shlex
import shutil
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():  # read when the kernels are imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

import generate
from command import checkpoints
from command.text import Text
from tests.tiny import load_folder, make_checkpoint, make_folder, tiny_model

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
# Flags under which a short prompt sees fast and slow steps, in one dtype on every machine.
FLAGS = "--dtype float32 --n-select 20 --n-recent 16 --max-interval 8 --min-gap 2 --max-new-tokens 20".split()


def run(capsys, *argv):
    """(stdout, stderr, exit code) of the command."""
    code = 0
    try:
        generate.main([str(a) for a in argv])
    except SystemExit as e:
        code = e.code
    out = capsys.readouterr()
    return out.out, out.err, code


def shell_line(*argv):
    """The command in a process of its own, as a shell line."""
    return shlex.join([sys.executable, "generate.py", *map(str, argv)])


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A tiny Qwen3 in fp32: L = 2, K = 3 (so that no step of the Selector is skipped), G = 5, D = 16."""
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """As `tiny`, with G = 2: the interpreter takes its time."""
    folder = tmp_path_factory.mktemp("small")
    make_checkpoint(folder, heads=6, kv_heads=3, head_dim=16, num_hidden_layers=2)
    return load_folder(folder)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tiny Qwen3 folder that looks like a published one."""
    return make_folder(tmp_path_factory.mktemp("ckpt"))


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
    return copy, [
        "--ckpt",
        copy,
        "--prompt",
        tmp_path / "hello.txt",
        "--dtype",
        "float32",
        "--max-new-tokens",
        2,
    ]


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


@pytest.fixture(scope="session")
def qwen25():
    """(model in fp32, text, folder) of a Qwen2.5 checkpoint, which is too large to be fetched for a test."""
    if not (folder := os.environ.get("QWEN25")):
        pytest.skip("no Qwen2.5 at hand: QWEN25=FOLDER runs this on a checkpoint")
    return load_folder(Path(folder)), Text(Path(folder)), Path(folder)
