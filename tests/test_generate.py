"""The command end to end on tiny checkpoints: output, counts, breaking off; the built-in text."""

import importlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import generate
import sampling
from command import story
from command.report import Screen
from command.text import Text
from sampling import Sampling
from sfi import SFIConfig
from tests.conftest import FLAGS, ROOT, run, shell_line
from tests.tiny import byte_tokenizer, edit_config

KEYS = {"text", "prompt_tokens", "new_tokens", "stop_reason", "slow_steps", "fast_steps", "slow_reasons"}
KEYS |= {
    "visible_tokens",
    "kv_bytes_read",
    "kv_bytes_dense",
    "weight_bytes_read",
    "byte_speedup",
    "load_s",
    "prefill_s",
}
KEYS |= {
    "first_token_s",
    "decode_s",
    "tokens_per_s",
    "step_ms",
    "dense_step_ms",
    "backend",
    "device",
    "dtype",
}
KEYS |= {"drafted", "accepted", "seed", "sampling", "ckpt", "config"}


def test_json_line_and_report(capsys, folder, prompt_file):
    out, err, code = run(capsys, "--ckpt", folder, "--prompt", prompt_file, "--json", *FLAGS)
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
    out, _, _ = run(capsys, "--ckpt", folder, "--prompt", prompt_file, "--json", "--dense", *FLAGS)
    r = json.loads(out.splitlines()[-1])
    assert r["fast_steps"] == 0 and r["slow_reasons"]["dense"] == r["slow_steps"] > 0
    assert r["kv_bytes_read"] == r["kv_bytes_dense"] and r["config"]["policy"] == "dense"


def test_everything_fits_is_said(capsys, folder, prompt_file):
    sfi, err, _ = run(capsys, "--ckpt", folder, "--prompt", prompt_file, "--max-new-tokens", 20)
    dense, _, _ = run(capsys, "--ckpt", folder, "--prompt", prompt_file, "--max-new-tokens", 20, "--dense")
    assert "everything fits into the memory of 1,796 tokens: equal to dense decoding, no gain" in err
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
    both, _, _ = run(capsys, "--ckpt", folder, "--prompt", prompt_file, other, "--json", *FLAGS)
    r = json.loads(both.splitlines()[-1])
    alone, _, _ = run(capsys, "--ckpt", folder, "--prompt", prompt_file, "--json", *FLAGS)
    assert r["text"][0] == json.loads(alone.splitlines()[-1])["text"][0]
    assert len(r["text"]) == len(r["prompt_tokens"]) == len(r["stop_reason"]) == 2
    last = both.splitlines(keepends=True)[-1]
    first, second = r["text"]
    assert both == f"==> {prompt_file} <==\n{first}\n\n==> {other} <==\n{second}\n\n{last}"
    argv = ["--ckpt", folder, "--prompt", prompt_file, "--prompt", other, "--json", *FLAGS]
    again, _, _ = run(capsys, *argv)  # a flag given twice once dropped its first value
    assert json.loads(again.splitlines()[-1])["text"] == r["text"]


def test_same_seed_same_text(capsys, folder, prompt_file):
    argv = ["--ckpt", folder, "--prompt", prompt_file, "--temperature", "0.9", *FLAGS]
    first, again, other = (run(capsys, *argv, "--seed", s)[0] for s in (1, 1, 2))
    assert first == again != other


def test_question_raw_and_standard_input(capsys, folder, prompt_file, monkeypatch):
    text = open(prompt_file).read().strip()
    count = lambda *argv: json.loads(
        run(capsys, "--ckpt", folder, "--json", *argv, *FLAGS)[0].splitlines()[-1]
    )["prompt_tokens"][0]
    chat = len("user\n\nassistant\n") + 3  # and three control tokens
    assert count("--prompt", prompt_file, "--question", "Why?") == len(text + "\n\nWhy?") + chat
    assert count("--prompt", prompt_file, "--question", "Why?", "--raw") == len(text + "\n\nWhy?")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfone\r\ntwo")))
    assert count("--prompt", "-", "--raw") == len("one\ntwo")


def test_quiet(capsys, folder, prompt_file):
    _, err, code = run(capsys, "--ckpt", folder, "--prompt", prompt_file, "--quiet", *FLAGS)
    assert (err, code) == ("", 0)


def test_help_has_every_setting_and_three_examples(capsys):
    out, _, code = run(capsys, "--help")
    for name in [*SFIConfig.__dataclass_fields__, *Sampling.__dataclass_fields__]:
        assert "--" + name.replace("_", "-") in out
    assert "(default: 1536)" in out and "(default: None)" not in out and "(default: False)" not in out
    groups = re.findall(r"^(\w[\w ]*):$", out, re.M)
    assert groups == ["options", "what", "sampling", "model and machine", "method", "output", "examples"]
    assert len(re.findall(r"^  python generate.py", out, re.M)) == 3 and code == 0


def documented_commands():
    """(module, arguments) of every command in the code blocks of README and CONTRIBUTING, and in --help."""
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")]
    blocks = re.findall(r"^```\n(.*?)^```", "\n".join(texts), re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ") + generate.EXAMPLES
    quoted = re.findall(r"`python -m (study\.\w+) ([^`]*)`", " ".join("".join(texts).split()))
    return [("generate", rest) for rest in re.findall(r"^ *python generate\.py(.*)$", lines, re.M)] + quoted


@pytest.mark.parametrize("module, arguments", documented_commands())
def test_documented_commands_are_understood(module, arguments):
    parser = importlib.import_module(module).parser()
    parser.parse_args(shlex.split(arguments.replace("...", "x"), comments=True))


@pytest.mark.parametrize("redirect", ["| head -c 1", "> /dev/full"])
def test_output_that_cannot_be_written_is_no_traceback(folder, prompt_file, redirect):
    line = shell_line("--ckpt", folder, "--prompt", prompt_file, "--quiet", "--json", *FLAGS)
    done = subprocess.run(f"{line} {redirect}", shell=True, capture_output=True, cwd=ROOT)
    if "full" in redirect:
        assert done.returncode == 2 and done.stderr.startswith(
            b"generate.py: error: [Errno 28] No space left"
        )
        assert done.stderr.count(b"\n") == 1
    else:
        assert (done.returncode, done.stderr) == (0, b"")


def test_closed_pipe_ends_with_the_report_of_what_was_done(folder, prompt_file):
    line = shell_line("--ckpt", folder, "--prompt", prompt_file, "--max-new-tokens", 900)
    done = subprocess.run(f"{line} | head -c 1", shell=True, capture_output=True, cwd=ROOT)
    error = done.stderr.decode()
    last = error.splitlines()[-5:]
    assert re.search(r"new, ended by closed output$", last[0]) and last[1].startswith("steps: "), error
    assert "Traceback" not in error and done.returncode == 0
    assert int(re.search(r"(\d+) new", last[0])[1]) < 900


def test_ctrl_c_ends_with_the_report_of_what_was_done(folder, prompt_file):
    """A real signal, after the first characters have come."""
    argv = shlex.split(
        shell_line("--ckpt", folder, "--prompt", prompt_file, "--json", "--max-new-tokens", 1600)
    )
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    with subprocess.Popen(argv, cwd=ROOT, **pipes) as process:
        first = process.stdout.read(3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    r = json.loads((first + out).splitlines()[-1])
    assert process.returncode == 130 and b"Traceback" not in err
    assert r["stop_reason"] == ["interrupted"] and 3 <= r["new_tokens"][0] < 1600
    assert (first + out).decode().startswith(r["text"][0] + "\n")
    assert re.search(rb"new, ended by Ctrl-C\nsteps: ", err)


@pytest.mark.parametrize("after", [0, 1, 6])
def test_ctrl_c_at_any_place(capsys, folder, prompt_file, tmp_path, monkeypatch, after):
    """In the prefill, before the second token, and later; the trace and the picture stay."""
    real, calls = sampling.noisy, []

    def noisy(*args):
        calls.append(1)
        if len(calls) > after:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(sampling, "noisy", noisy)
    files = ["--trace", tmp_path / "steps.jsonl", "--plot", tmp_path / "memory.png"]
    out, err, code = run(capsys, "--ckpt", folder, "--prompt", prompt_file, "--json", *files, *FLAGS)
    r = json.loads(out.splitlines()[-1])
    assert (code, r["stop_reason"], r["new_tokens"]) == (130, ["interrupted"], [after])
    assert "ended by Ctrl-C" in err and r["dense_step_ms"] is None
    assert len(files[1].read_text().splitlines()) == after
    assert files[3].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("stop", [3, 5, 257])
def test_every_end_token_of_three_files_ends_and_is_not_printed(capsys, damaged, monkeypatch, stop):
    """Reported against Qwen3 and others: one of the end tokens was not known, and its text was printed."""
    folder, argv = damaged
    edit_config(folder, eos_token_id=3)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5]}))
    tokens = iter([65, 66, stop, 67])
    scores = lambda logits, *_: torch.eye(logits.shape[-1])[[next(tokens)]]
    monkeypatch.setattr(sampling, "noisy", scores)
    out, err, _ = run(capsys, *argv, "--max-new-tokens", 10, "--json")
    r = json.loads(out.splitlines()[-1])
    letters = Text(folder).tokenizer.decode([65, 66])
    assert (r["stop_reason"], r["new_tokens"], r["text"]) == (["stop"], [3], [letters])
    assert out.startswith(letters + "\n") and "3 new, ended by end token" in err


def test_generation_config_sets_the_sampling(capsys, damaged):
    folder, argv = damaged
    own = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (folder / "generation_config.json").write_text(json.dumps(own))
    settings = lambda *flags: json.loads(run(capsys, *argv, *flags, "--json")[0].splitlines()[-1])["sampling"]
    assert settings() == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "seed": 0}
    changed = settings("--top-k", 7, "--min-p", 0.1, "--seed", 4)
    assert changed == {"temperature": 0.6, "top_k": 7, "top_p": 0.95, "min_p": 0.1, "seed": 4}
    assert (
        "top-p 0.95, seed 0" in run(capsys, *argv)[1]
        and "greedy" in run(capsys, *argv, "--temperature", 0)[1]
    )


def test_settings_of_the_checkpoint_that_are_not_applied_are_said_once(capsys, damaged):
    folder, argv = damaged
    own = {"repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "num_beams": 1, "min_length": 0}
    (folder / "generation_config.json").write_text(json.dumps(own))
    said = (
        "generation_config.json asks for repetition_penalty = 1.1, no_repeat_ngram_size = 3, not applied here"
    )
    assert run(capsys, *argv)[1].count(said) == 1
    assert run(capsys, *argv, "--quiet")[1] == ""


def test_same_seed_same_text_in_another_process_and_another_batch(capsys, folder, prompt_file, damaged):
    hello = damaged[1][3]
    settings = ["--temperature", "0.9", "--top-p", "0.9", "--seed", "3", "--json", "--quiet", *FLAGS]
    out, _, _ = run(capsys, "--ckpt", folder, "--prompt", prompt_file, hello, hello, *settings)
    first, second, third = json.loads(out.splitlines()[-1])["text"]
    other = shlex.split(shell_line("--ckpt", folder, "--prompt", prompt_file, hello, *settings))
    done = subprocess.run(other, capture_output=True, cwd=ROOT)
    assert json.loads(done.stdout.splitlines()[-1])["text"] == [first, second]
    assert second != third  # the same prompt in another row has other noise


def test_trace_and_plot(capsys, folder, prompt_file, tmp_path):
    trace, picture = tmp_path / "steps.jsonl", tmp_path / "memory.png"
    argv = ["--ckpt", folder, "--prompt", prompt_file, "--json", *FLAGS]
    out, _, code = run(capsys, *argv, "--trace", trace, "--plot", picture)
    r, lines = json.loads(out.splitlines()[-1]), [json.loads(x) for x in trace.read_text().splitlines()]
    assert code == 0 and len(lines) == r["new_tokens"][0] == 20
    assert [x["kind"] for x in lines].count("fast") == r["fast_steps"]
    assert sum(x["read"] for x in lines[1:]) == r["visible_tokens"] * 19
    assert "".join(x["made"] for x in lines) == r["text"][0]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(run(capsys, *argv)[0].splitlines()[-1])["text"] == r["text"]  # the same without


def test_report_against_dense(capsys, folder, prompt_file):
    out, err, _ = run(capsys, "--ckpt", folder, "--prompt", prompt_file, "--json", *FLAGS)
    r = json.loads(out.splitlines()[-1])
    ours, dense, ratio = r["step_ms"], r["dense_step_ms"], r["dense_step_ms"] / r["step_ms"]
    assert f"a step takes {ours:.0f} ms, a dense one {dense:.0f} ms: about {ratio:.1f}x (" in err
    assert f"({r['byte_speedup']:.2f}x by bytes)" in err
    assert ours == pytest.approx(1e3 * r["decode_s"] / 19)
    weights = sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
    weights -= 258 * 40 * 4  # the embedding is not the head, so a step reads a row of it
    assert r["weight_bytes_read"] == 19 * weights
    want = (19 * weights + r["kv_bytes_dense"]) / (19 * weights + r["kv_bytes_read"])
    assert r["byte_speedup"] == pytest.approx(want)
    quiet = run(capsys, "--ckpt", folder, "--prompt", prompt_file, "--json", "--quiet", *FLAGS)[0]
    assert json.loads(quiet.splitlines()[-1])["dense_step_ms"] is None


def test_report_of_rows_of_unequal_length(capsys, folder, prompt_file, damaged):
    """What a fast step reads is compared with what dense decoding reads in the same steps, not in all."""
    argv = ["--ckpt", folder, "--prompt", prompt_file, *[damaged[1][3]] * 3, "--json", *FLAGS]
    out, err, _ = run(capsys, *argv)
    r = json.loads(out.splitlines()[-1])
    assert r["slow_reasons"]["short"] == 3 * 19
    seen, dense, share = re.search(r"a fast step reads (\d+) tokens of (\d+), (\d+)%", err).groups()
    assert 40 <= int(seen) <= 70 and 236 <= int(dense) <= 254
    assert int(share) == round(100 * int(seen) / int(dense))


def test_report_says_when_sfi_cannot_pay(capsys, folder, prompt_file):
    """Reported against sparse-attention code: users could not see that it did nothing for them."""
    argv = ["--ckpt", folder, "--prompt", prompt_file, *FLAGS]
    assert "cannot pay" not in run(capsys, *argv)[1]
    nearly_all = run(capsys, *argv, "--n-select", 190)[1]
    assert re.search(r"SFI cannot pay here: it read \d+% of the cache, which is \d+% of what a", nearly_all)
    often = run(capsys, *argv, "--n-select", 150, "--max-interval", 1, "--min-gap", 0)[1]
    few = (
        r"SFI cannot pay here: \d+ of \d+ steps were fast, which does not repay choosing the memory; it gains"
    )
    assert re.search(few, often)
    assert re.search(few, run(capsys, *argv, "--n-select", 150, "--max-new-tokens", 3, "--min-gap", 5)[1])
    assert "cannot pay" not in run(capsys, *argv, "--dense")[1]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_answers_of_a_batch_come_one_after_the_other(folder):
    """The first streams; the second waits, is printed with what it has, and streams on; the third is done."""
    out = io.StringIO()
    screen, letters = Screen(["a", "b", "c"], Text(folder), 3, out), byte_tokenizer()
    push = lambda b, letter: screen.push(b, letters.encode(letter).ids[0], slow=True)
    for b, letter in ((0, "1"), (1, "2"), (2, "3"), (0, "4"), (1, "5")):
        push(b, letter)
    assert out.getvalue() == "==> a <==\n14"
    screen.push(2, 257, slow=False)  # an end token
    push(0, "6")  # the third and last
    assert out.getvalue() == "==> a <==\n146\n\n==> b <==\n25"
    screen.close("interrupted")
    assert out.getvalue() == "==> a <==\n146\n\n==> b <==\n25\n\n==> c <==\n3\n\n"
    assert (screen.new, screen.ends) == ([3, 2, 2], ["length", "interrupted", "stop"])


def test_control_characters_of_an_answer_are_marks_on_a_terminal(folder):
    """Escape characters reached it raw: colours, titles, a cleared screen.  A pipe gets them as they are."""
    written, shown = "a\x1b[2Jb\r\x07c\n\td\x7f", "a␛[2Jb␍␇c\n\td␡"
    for out, want in ((Terminal(), shown), (io.StringIO(), written)):
        screen, letters = Screen(["a"], Text(folder), 99, out), byte_tokenizer()
        for token in letters.encode(written).ids:
            screen.push(0, token, slow=False)
        screen.close("length")
        assert out.getvalue() == want + "\n" and screen.streams[0].text == written


def test_control_characters_of_a_name_are_marks_on_a_terminal(capsys, monkeypatch):
    """An error names files and arguments, whatever they are called."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for argv in (["--prompt", "a\x1b[31mb.txt"], ["a\x1b[31mb"]):
        _, err, code = run(capsys, *argv)
        assert code == 2 and "␛[31mb" in err and "\x1b" not in err


@pytest.mark.parametrize(
    "out, variables, coloured",
    [
        (Terminal(), {}, True),
        (io.StringIO(), {}, False),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
    ],
)
def test_colour_only_on_a_terminal(monkeypatch, folder, out, variables, coloured):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    screen, letters = Screen(["a", "b"], Text(folder), 9, out), byte_tokenizer()
    for letter, slow in (("x", False), ("y", True)):
        screen.push(0, letters.encode(letter).ids[0], slow)
    screen.close("length")
    assert ("\x1b[" in out.getvalue()) == coloured
    if coloured:
        assert out.getvalue() == "\x1b[1m==> a <==\x1b[0m\nx\x1b[36my\x1b[0m\n\n\x1b[1m==> b <==\x1b[0m\n\n\n"


def test_works_without_triton(folder, prompt_file):
    """Reported against others: an import of Triton at the top broke Windows and macOS."""
    code = "import sys; sys.modules['triton'] = None; import generate; generate.main(sys.argv[1:])"
    argv = [
        sys.executable,
        "-c",
        code,
        *shlex.split(shell_line("--ckpt", folder, "--prompt", prompt_file, *FLAGS))[2:],
    ]
    done = subprocess.run(argv, capture_output=True, cwd=ROOT, text=True)
    assert done.returncode == 0 and done.stdout.strip() and "cpu backend" in done.stderr


@pytest.mark.slow  # four processes that import torch and transformers
@pytest.mark.parametrize("triton", ["", "import sys; sys.modules['triton'] = None; "])
@pytest.mark.parametrize("installed", [False, True])
def test_transformers_can_be_imported_beside_kernels_py(tmp_path, triton, installed):
    """It looks for a package of that name, and found this file: without Triton the import failed."""
    code, environment = triton + "import transformers; print(transformers.Qwen3ForCausalLM)", dict(os.environ)
    if installed:  # as if it were, of a version that transformers takes, with all that it asks for
        (tmp_path / "kernels").mkdir()
        anything = "from .inner import x\ndef __getattr__(name): return type(name, (), {})\n"
        (tmp_path / "kernels" / "__init__.py").write_text(anything)
        (tmp_path / "kernels" / "inner.py").write_text("x = 1\n")
        (info := tmp_path / "kernels-0.17.2.dist-info").mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.17.2\n")
        environment["PYTHONPATH"] = str(tmp_path)
        code += "; import kernels; print(kernels.LayerRepository)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0 and "Qwen3ForCausalLM" in done.stdout, done.stderr[-600:]


def test_story_is_seeded_and_has_its_letter():
    text = story.story()
    assert text == story.story(0) != story.story(1)
    assert text.count("read a letter aloud in the lower square") == 1
    assert 20_000 < len(text) < 26_000 and "{" not in text
    paragraphs = text.split("\n\n")
    assert len(paragraphs) == len(set(paragraphs)) == 54  # title, 52 scenes and the letter, none twice
