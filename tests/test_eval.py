"""The measurements: what they ask, what they count, and what they refuse."""

import json
import random
import re

import numpy as np
import pytest
import torch

from command.text import Text
from sfi import SFIConfig
from study import eval as quality
from study import stability
from study.eval import (
    CHOICES,
    Bench,
    continue_sample,
    f1,
    interval,
    needle,
    needle_sample,
    read_tasks,
    rows,
    summary,
    words,
)
from tests.tiny import dense_logits, load_folder

ALL = ("sentence", "fixed", "never", "window")


@pytest.fixture(scope="module")
def tiny_text(folder):
    return load_folder(folder), Text(folder)


def test_rows_show_the_same_number_of_tokens():
    table = rows(ALL, list(CHOICES), 2000, 0.125, SFIConfig())
    assert [r.policy for r in table] == ["dense"] + ["sentence"] * len(CHOICES) + [
        "fixed",
        "never",
        "window",
    ]
    for row in table[1:]:
        assert row.cfg.n_sink + row.cfg.budget + row.cfg.n_recent == 250
    assert (
        table[1].cfg.n_recent == 64 and rows(ALL, ["follow"], 2000, 0.25, SFIConfig())[1].cfg.n_recent == 128
    )
    with pytest.raises(ValueError, match="leaves -4 to select"):
        rows(ALL, ["follow"], 1024, 0.0625, SFIConfig())


@pytest.mark.parametrize("task", ["keys", "several", "lookup", "free"])
def test_needles_are_seeded_stand_in_the_prompt_and_have_one_answer(smollm2, task):
    _, text, _ = smollm2
    ids, answer, depth = needle(task, random.Random("a"), text, 1500)
    assert (
        (ids, answer, depth)
        == needle(task, random.Random("a"), text, 1500)
        != needle(task, random.Random("b"), text, 1500)
    )
    prompt = text.tokenizer.decode(ids)
    assert prompt.count(answer) == (2 if task in ("keys", "free") else 1)
    assert 1200 < len(ids) < 1600 and abs(prompt.index(answer) / len(prompt) - depth) < 0.1
    keys = set(re.findall(r"\b\d{5}\b", prompt))
    assert len(keys) == {"several": 4, "lookup": 16}.get(task, 1) and answer in keys


def test_forced_continuation_against_plain_dense_passes(tiny_text):
    """Dense differs from itself by nothing; the others by what plain log-probabilities say."""
    model, text = tiny_text
    ids = random.Random(0).choices(range(256), k=300)
    bench = Bench(model, text, 64)
    table = rows(ALL, ["follow", "paper"], 260, 0.7, SFIConfig(max_interval=8, min_gap=2))
    continue_sample(bench, table, ids, 40)
    dense = dense_logits(model, torch.tensor([ids]))[0, -41:-1].log_softmax(-1)
    for row in table:
        score = {name: values[0] for name, values in row.scores.items()}
        assert (score["kl"] < 1e-6) == (score["top1"] == 1.0) == (row.policy == "dense"), row.policy
        log_p, slow, _ = bench.forced(row.cfg, ids[-40:])
        if row.policy != "fixed":  # whose interval is set by the sample
            assert slow == score["slow"]
            kl = (dense.exp() * (dense - log_p)).sum(-1).mean().item()
            nll = -(log_p - dense).gather(1, torch.tensor(ids[-40:])[:, None]).mean().item()
            assert score["kl"] == pytest.approx(kl, abs=1e-4) and score["nll_lost"] == pytest.approx(
                nll, abs=1e-4
            )
    slow = {row.policy: row.scores["slow"][0] for row in table if row.selector != "paper"}
    assert slow["fixed"] == slow["sentence"] > 0 == slow["never"] == slow["window"]


def test_an_answer_is_found_in_what_a_row_generates(tiny_text):
    model, text = tiny_text
    ids = random.Random(0).choices(range(33, 120), k=300)
    bench, table = Bench(model, text, 64), rows(["sentence"], ["follow"], 300, 0.5, SFIConfig())
    bench.prefill(ids)
    out = text.tokenizer.decode(bench.greedy(table[0].cfg, 48)).replace(" ", "")
    needle_sample(bench, table, ids, out[:3], 0.2, True)
    assert table[0].scores["found"] == [True] and table[0].scores["same_tokens"][0] >= 1
    needle_sample(bench, table, ids, "no such answer", 0.9, True)
    assert table[0].scores["found"] == [True, False]
    found = [r for r in summary("free", table, 300, 0.5, bench.depths) if r["metric"] == "found"]
    assert found[0]["score"] == 0.5 and found[0]["by_depth"] == [1.0, None, 0.0]


def test_word_scores():
    assert words("The cat, a DOG!") == ["cat", "dog"]
    assert f1("the cat sat", "A cat") == pytest.approx(2 / 3) and f1("x", "y") == 0 and f1("", "the") == 1
    low, high = interval([0.0, 1.0] * 50)
    assert 0.38 < low < 0.42 and 0.58 < high < 0.62 and interval([2.0, 2.0]) == [2.0, 2.0]


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "line 1: it is empty"),
        ("[]", "line 1: "),
        ('{"context": "a", "question": "b", "answers": []}', "answers must be a list of texts"),
        (
            '{"context": "a", "question": "b", "answers": ["c"]}\n{"context": 3}',
            "line 2: context and question",
        ),
    ],
)
def test_question_files(tmp_path, content, message):
    file = tmp_path / "tasks.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_tasks(file)


def test_random_weights_are_refused_and_errors_are_one_line(folder, capsys):
    cases = {"random weights": [], "--task eat; allowed are continue": ["--task", "eat"]}
    cases |= {"--share between 0 and 1": ["--share", "2"], "invalid choice: 'best'": ["--selector", "best"]}
    cases |= {"--n-select below --context": ["--n-select", "2000"], "leaves 0 to": ["--n-select", "0"]}
    for message, argv in cases.items():
        for main in (quality.main, stability.main) if not argv else (quality.main,):
            with pytest.raises(SystemExit) as e:
                main(["--ckpt", str(folder), "--context", "600", *argv])
            err = capsys.readouterr().err
            wanted = "no better than chance" if not argv else message
            assert e.value.code == 2 and err.count("\n") == 1 and wanted in err


def test_the_command_prints_a_table_and_one_json_line(smollm2, capsys, tmp_path):
    file, out = tmp_path / "tasks.jsonl", tmp_path / "out.json"
    task = {"context": "The sea is green. " * 40, "question": "What colour is the sea?", "answers": ["green"]}
    file.write_text(json.dumps(task))
    argv = ["--task", str(file), "keys", "--samples", "1", "--context", "700", "--n-select", "43"]
    quality.main([*argv, "--policy", "window", "--out", str(out)])
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert {r["task"] for r in result["rows"]} == {str(file), "keys"} and "window" in printed
    need = {"task", "policy", "selector", "n_select", "score", "ci", "samples"}
    assert all(need <= set(r) and r["samples"] == 1 and r["share"] == 0.25 for r in result["rows"])
    assert json.loads(out.read_text())["rows"] == result["rows"]
    assert [r["score"] for r in result["rows"] if (r["task"], r["policy"]) == ("keys", "dense")] == [1.0]


def test_sentences_are_counted_by_the_trigger():
    pieces = ["It", " is", ".", " The", " end", ".", " e", ".g", ".", " the"]
    assert stability.sentences(pieces).tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1, 1]


def test_stability_equals_sets_and_loops(tiny_text):
    """Top tokens of two queries as sets, and the mass of the one's tokens in the other's attention."""
    model, text = tiny_text
    ids, new, recent, top, seen = random.Random(3).choices(range(256), k=120), 6, 10, 7, []
    real = stability.Engine

    class Spy(real):
        def __init__(self, *args, observe, **kwargs):
            both = lambda *refresh: (seen.append((*refresh[:4], refresh[4].clone())), observe(*refresh))
            super().__init__(*args, observe=both, **kwargs)

    stability.Engine = Spy
    try:
        found = stability.supports(model, text, ids, new, recent, top)
    finally:
        stability.Engine = real
    for (overlap, mass), (_, _, did, _, scores) in zip(found, seen[-len(found) :], strict=True):
        p = (
            scores.unflatten(1, (-1, new))
            .double()
            .softmax(-1)
            .mean(1)[..., 4 : did.visible - new - recent]
            .tolist()
        )
        for head in range(2):
            sets = [set(np.argsort(q)[-top:].tolist()) for q in p[head]]
            for i in range(new):
                for j in range(new):
                    assert overlap[head, i, j].item() == pytest.approx(len(sets[i] & sets[j]) / top)
                    held, own = (sum(p[head][j][c] for c in sets[k]) for k in (i, j))
                    assert mass[head, i, j].item() == pytest.approx(held / own, rel=1e-4)
