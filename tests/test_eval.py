"""The measurements: what they ask, what they count, what each method reads, and what they refuse."""

import json
import random
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from command.text import Text
from sfi import SFIConfig
from study import curves, stability
from study import eval as quality
from study.eval import Bench, Method, f1, forced_sample, free_sample, interval, read_tasks, summary, words
from study.methods import (
    H2O,
    Dense,
    Prompt,
    Quest,
    SlowFast,
    SnapKV,
    StreamingLLM,
    Tidal,
    delayed,
    named,
    spaced,
    starts,
)
from study.tasks import FORMS, Sample, sample
from tests.tiny import dense_logits, load_folder

BASE = SFIConfig(max_interval=8, min_gap=2, delay=3, n_evidence=6, reread=1)


@pytest.fixture(scope="module")
def tiny_text(folder):
    return load_folder(folder), Text(folder)


@pytest.mark.parametrize("task", ["keys", "several", "lookup", "free"])
def test_needles_are_seeded_stand_in_the_prompt_and_have_one_answer(smollm2, task):
    _, text, _ = smollm2
    ask = lambda i: sample(task, i, text, 1500, 0, [])
    s = ask(0)
    assert s == ask(0) != ask(1)
    prompt, said = text.tokenizer.decode(s.prompt), text.tokenizer.decode(s.forced)
    answer = s.answers[0][0] if task == "free" else said.strip(" .")
    assert prompt.count(answer) == (2 if task in ("keys", "free") else 1)
    assert 1200 < len(s.prompt) < 1600
    keys = set(re.findall(r"\b\d{5}\b", prompt))
    assert len(keys) == {"several": 4, "lookup": 16}.get(task, 1) and answer in keys
    assert [text.tokenizer.decode([s.forced[i] for i in fact]) for fact in s.facts] == [answer] * len(s.facts)


def test_a_walk_names_each_fact_of_the_text_once_in_another_order(smollm2):
    _, text, _ = smollm2
    for form in range(len(FORMS)):
        s = sample("walk", form, text, 1500, 0, [])
        prompt, answer = text.tokenizer.decode(s.prompt), text.tokenizer.decode(s.forced)
        digits = [text.tokenizer.decode([s.forced[i] for i in fact]) for fact in s.facts]
        places = [prompt.index(d) for d in digits]
        assert digits == re.findall(r"\d{5}", answer) and len(set(digits)) == 8
        assert all(prompt.count(d) == 1 for d in digits) and places != sorted(places)
        assert max(places) < prompt.index("Which numbers have")
        looks = named([text.token_text(t) for t in s.forced], 99)
        assert len(looks) == 8  # one a sentence
        assert all(any(at < fact[0] for fact in s.facts) for at in looks)


def test_other_tasks_keep_their_answers_in_the_prompt(smollm2):
    _, text, _ = smollm2
    s = sample("copy", 3, text, 1500, 0, [])
    plain = lambda tokens: " ".join(text.tokenizer.decode(tokens).split())
    assert len(s.forced) == 300 and plain(s.forced[:-2]) in plain(s.prompt)
    s = sample("report", 3, text, 1500, 0, [])
    prompt = text.tokenizer.decode(s.prompt)
    assert len(s.answers) == 10
    for name, trade, animal in s.answers:
        assert prompt.count(f"{name} is a {trade} and keeps a {animal}.") == 1
    s = sample("continue", 0, text, 600, 50, list(range(5000)))
    assert s.prompt + s.forced == list(range(s.prompt[0], s.prompt[0] + 650))
    s = sample("code", 0, text, 1200, 200, [])
    assert (len(s.prompt), len(s.forced)) == (1200, 200)
    first = text.tokenizer.decode(s.forced).strip().splitlines()
    assert first[0].lstrip().startswith("def ")


def visible_of(method, S=40, T=6, n_kv=2, G=3, D=8, layer=3, layers=32):
    """(visible (K, T, P), s, q, K) of a method on random queries and keys, P = S + T."""
    torch.manual_seed(0)
    prompt = Prompt.__new__(Prompt)
    prompt.ids, prompt.keep = list(range(S)), 33
    K = torch.randn(n_kv, S + T, D)
    prompt.k = torch.zeros(layers, n_kv, S, D)
    prompt.k[layer] = K[:, :S]
    prompt.q = torch.randn(layers, n_kv * G, 33, D)
    prompt.received = torch.rand(layers, n_kv, S)
    q = torch.randn(n_kv, G, T, D)
    s = q @ K[:, None].mT * D**-0.5
    s.masked_fill_(torch.ones(T, S + T, dtype=torch.bool).triu(S + 1), -torch.inf)
    method.start(prompt, T)
    return method.see(layer, s, q, K), s, q, K, prompt


def positions(row):
    return row.nonzero()[:, 0].tolist()


def test_streaming_sees_sinks_and_a_window():
    visible, *_ = visible_of(StreamingLLM(10))
    for t in range(6):
        assert positions(visible[1, t]) == [0, 1, 2, 3, *range(40 + t - 5, 40 + t + 1)]


def test_snapkv_keeps_what_pooled_votes_choose():
    visible, *_, prompt = visible_of(SnapKV(35))
    p = prompt.evidence(3, 32).softmax(-1)
    for h in range(2):
        votes = [p[h, :, :, j].sum().item() / 3 for j in range(8)]
        pooled = [max(votes[max(j - 3, 0) : j + 4]) for j in range(8)]
        best = sorted(range(8), key=lambda j: -pooled[j])[:3]
        if len(set(pooled)) == 8:
            assert positions(visible[h, 0])[:-38] == sorted(best)
        assert visible[h, 0].sum() == 3 + 32 + 6  # later ones fall to the causal mask


def test_h2o_evicts_for_good_what_had_least_attention():
    visible, s, *_, prompt = visible_of(H2O(12))
    for h in range(2):
        had = [*prompt.received[3, h].tolist(), *[0.0] * 6]
        old = sorted(range(34), key=lambda j: -had[j])[:6]
        kept = {*old, *range(34, 40)}
        for t in range(6):
            kept.add(40 + t)
            assert set(positions(visible[h, t])) == kept and len(kept) == 13
            for g in range(3):
                among = sorted(kept)
                for j, x in zip(among, s[h, g, t, among].softmax(0).tolist(), strict=True):
                    had[j] += x
            kept.remove(min((j for j in kept if j <= 40 + t - 6), key=lambda j: had[j]))


def test_quest_reads_the_pages_with_the_largest_bounds():
    visible, s, q, K, _ = visible_of(Quest(12, page=4), S=41)
    for h in range(2):
        for t in range(6):
            at = (41 + t) // 4
            bounds = torch.tensor(
                [
                    [
                        torch.maximum(*(q[h, g, t] * x for x in K[h, p * 4 : p * 4 + 4].aminmax(dim=0))).sum()
                        for p in range(at)
                    ]
                    for g in range(3)
                ]
            )  # fmt: skip
            most = s[h, :, t, : at * 4].unflatten(1, (at, 4)).amax(-1) * 8**0.5
            assert (bounds >= most - 1e-5).all()
            best = (bounds * 8**-0.5).softmax(-1).mean(0).topk(2).indices.tolist()
            want = {p * 4 + i for p in [*best, at] for i in range(4) if p * 4 + i < 47}
            assert set(positions(visible[h, t])) == want
    assert visible_of(Quest(12), layer=1)[0] is None and Quest.extra is not Dense.extra


def test_tidal_layers_use_what_one_layer_chose():
    method = Tidal(5)
    assert visible_of(method, layer=1)[0] is None and visible_of(method, layer=2)[0] is None
    _, s, *_ = visible_of(method, layer=13)
    chosen = s.softmax(-1).mean(1).topk(5).indices
    method.start(visible_of(Dense())[-1], 6)
    visible = method.see(14, s, None, None)
    for h in range(2):
        for t in range(6):
            assert positions(visible[h, t]) == sorted(chosen[h, t].tolist())


def test_when_to_look():
    texts = [".", " The", " age", " of", " Ann", " is", ".", " He", " ran", " home", ".", " No"]
    assert starts(texts) == [1, 7, 11] and delayed(texts, 2) == [3, 9] and named(texts, 3) == [4, 5, 10]
    assert named(texts, 9) == [5] and spaced([1, 3, 7], 20, 2, 6) == [3, 7, 14]


@pytest.mark.parametrize("selector", ["follow", "paper"])
def test_the_mask_of_slow_fast_inference_is_the_engine(tiny_text, selector):
    """Two implementations: slots in a cache, pass by pass, and one pass under a mask."""
    model, text = tiny_text
    ids = random.Random(0).choices(range(256), k=300)
    bench = Bench(model, text, False)
    bench.read(ids[:-60], 60)
    base = SFIConfig(
        n_select=40, n_recent=64, selector=selector, delay=0, min_gap=2, max_interval=9, reread=1
    )
    logits, read, slow = bench.forced(base, ids[-60:])
    looks = spaced(delayed([text.token_text(t) for t in ids[-60:]], 0), 59, 2, 9)
    trial = SlowFast(base, looks, n_evidence=base.n_evidence, kept=0)
    masked, masked_read = bench.prompt.answer(ids[-60:], trial)
    assert slow == len(looks) > 4
    torch.testing.assert_close(masked, logits, atol=2e-4, rtol=0)
    assert masked_read == pytest.approx(read, rel=0.02)  # the engine copies what its window holds by then
    dense, everything = bench.prompt.answer(ids[-60:], Dense())
    want = dense_logits(model, torch.tensor([ids]))[0, -61:-1]
    torch.testing.assert_close(dense, want, atol=2e-4, rtol=0)
    assert everything == 240 + 30 and (masked - dense).abs().max() > 0.05


def test_forced_answers_against_plain_dense_passes(tiny_text):
    """Dense differs from itself by nothing; the others by what plain log-probabilities say."""
    model, text = tiny_text
    ids = random.Random(0).choices(range(256), k=300)
    names = "dense sfi fixed window paper never once streaming snapkv h2o quest".split()
    names += ["trial:kept=2", "trial:layers=0.5@0-0", "trial:looks=doubt@-9", "trial:looks=drift@0.1"]
    bench, methods = Bench(model, text, True), [Method(name) for name in names]
    s = Sample(ids[:-40], ids[-40:], facts=[[3, 4], [9]])
    forced_sample(bench, methods, s, 0.45, BASE)
    dense = dense_logits(model, torch.tensor([ids]))[0, -41:-1].log_softmax(-1)
    target = torch.tensor(ids[-40:])
    for method in methods:
        score = {name: values[0] for name, values in method.scores.items()}
        assert (score["kl"] < 1e-6) == (method.name == "dense"), method.name
        assert score["read"] == pytest.approx(280) if method.name == "dense" else score["read"] < 260
        if method.on_engine and method.name != "fixed":  # whose interval is set by the sample
            log_p = bench.forced(method.config(117, BASE), s.forced)[0].log_softmax(-1)
            right = log_p.argmax(-1) == target
            assert score["right"] == pytest.approx(right.float().mean().item())
            assert score["facts"] == (right[[3, 4]].all().item() + right[9].item()) / 2
            kl = F.kl_div(log_p, dense, log_target=True, reduction="batchmean")
            assert score["kl"] == pytest.approx(kl.item(), abs=1e-4)
            lost = F.nll_loss(log_p, target) - F.nll_loss(dense, target)
            assert score["nll_lost"] == pytest.approx(lost.item(), abs=1e-4)
    slow = {method.name: method.scores["slow"][0] for method in methods}
    assert slow["fixed"] == slow["sfi"] > 0
    assert slow["never"] == slow["window"] == slow["once"] == 0


def test_facts_are_found_in_what_a_method_writes(tiny_text):
    model, text = tiny_text
    ids = random.Random(0).choices(range(33, 120), k=300)
    bench, methods = Bench(model, text, False), [Method("dense"), Method("sfi")]
    bench.read(ids, 48)
    out = text.tokenizer.decode(bench.greedy(methods[0].config(0, BASE), 48))
    said = re.split(r"(?<=[.!?])\s|\n", out)[0]
    free_sample(bench, methods, Sample(ids, answers=[(said[:2], said[1:3])]), 0.5, BASE)
    assert methods[0].scores["facts"] == [1.0]
    free_sample(bench, methods, Sample(ids, answers=[("no such", "answer")]), 0.5, BASE)
    assert methods[0].scores["facts"] == [1.0, 0.0]
    (found,) = [
        r for r in summary("free", methods, 300, 0.5) if (r["method"], r["metric"]) == ("dense", "facts")
    ]
    assert found["score"] == 0.5 and found["samples"] == 2 and found["diff"] == 0


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
    cases = {"random weights": [], "--task eat; allowed are keys": ["--task", "eat"]}
    cases |= {"--share between 0 and 1": ["--share", "2"], "--method best; allowed are": ["--method", "best"]}
    cases |= {"--n-select below --context": ["--n-select", "2000"], "leaves 0 to": ["--n-select", "0"]}
    cases |= {
        "there is no setting 'luck'": ["--method", "sfi:luck=3"],
        "is a mask": ["--method", "h2o", "--task", "free"],
    }
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
    quality.main([*argv, "--method", "window", "--out", str(out)])
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert {r["task"] for r in result["rows"]} == {str(file), "keys"} and "window" in printed
    assert all({"method", "score", "ci", "diff_ci"} <= set(r) and r["samples"] == 1 for r in result["rows"])
    written = json.loads(out.read_text())
    assert written["rows"] == result["rows"] and written["raw"]["keys"]["dense"]["facts"] == [1.0]
    argv[argv.index("1")] = "2"  # of the file's task there is one
    quality.main([*argv, "--method", "window", "--out", str(out), "--resume"])
    more = json.loads(out.read_text())
    assert more["raw"][str(file)] == written["raw"][str(file)]
    assert len(more["raw"]["keys"]["dense"]["facts"]) == 2 and more["rows"][-1]["samples"] == 2
    with pytest.raises(SystemExit) as e:
        quality.main([*argv, "--method", "never", "--out", str(out), "--resume"])
    assert e.value.code == 2 and "is from another command: --task" in capsys.readouterr().err
    assert json.loads(out.read_text()) == more


def test_curves_join_the_budgets_of_several_files(tmp_path, capsys):
    row = lambda task, method, metric, score: dict(
        task=task, method=method, metric=metric, score=score, ci=[0, 1]
    )
    files = []
    for i, read in enumerate((250, 125)):
        rows = [row("walk", "dense", "read", 1000), row("walk", "dense", "facts", 0.9)]
        rows += [row("walk", "sfi", "read", read), row("walk", "sfi", "facts", 0.8 - i / 10)]
        rows += [row("walk", "sfi:delay=0", "read", read), row("walk", "sfi", "kl", 7)]  # neither is drawn
        files.append(tmp_path / f"{i}.json")
        files[-1].write_text(json.dumps({"rows": rows}))
    found = curves.points(files)
    assert found["walk"]["sfi"] == [(0.125, pytest.approx(0.7), 0, 1), (0.25, 0.8, 0, 1)]
    assert set(found["walk"]) == {"dense", "sfi"}
    curves.main([*map(str, files), "--out", str(tmp_path / "out.png")])
    assert (tmp_path / "out.png").stat().st_size > 10_000
    with pytest.raises(SystemExit) as e:
        curves.main([str(tmp_path / "none.json"), "--out", str(tmp_path / "out.png")])
    assert e.value.code == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_a_small_walk_on_a_real_model(smollm2):
    """What the trigger is for: most of dense decoding's facts, more than with looks at sentence starts."""
    model, text, _ = smollm2
    names = ["dense", "sfi", "sfi:delay=0"]
    bench, methods = Bench(model, text, False), [Method(name) for name in names]
    for i in range(2):
        forced_sample(bench, methods, sample("walk", i, text, 1024, 0, []), 0.25, SFIConfig())
    dense, named, start = (sum(method.scores["facts"]) for method in methods)
    assert dense > 0.7 and named >= 0.7 * dense and named > start


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
