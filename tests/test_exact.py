"""Exact mode: dense decoding's tokens, no trace of wrong drafts, and drafts as long as they pay."""

import copy
import json
import random
from dataclasses import replace

import pytest
import torch

from command.report import Tally
from exact import MOST, RIGHT, SEEN, TIMED, Drafts, Speculation, prices
from model import Model
from sampling import GREEDY, Sampling
from sfi import Engine, SFIConfig, decode
from study import exactness
from study.forcing import force
from tests.conftest import FLAGS, run
from tests.tiny import SMALL, decoded, prompt, token_text
from trigger import advance

EXACT = replace(SMALL, exact=True, draft_cost=0.0)
DENSE = SFIConfig(policy="dense")
SAMPLED = Sampling(0.8, top_k=30, top_p=0.95, seed=11)


def counted(steps):
    tally = Tally()
    for step in steps:
        tally.add(step)
    return tally


def agree(model, prompts, got, want, sampling=GREEDY):
    """Whether the tokens are equal; they may differ after a place where dense decoding nearly ties."""
    for b, (mine, dense) in enumerate(zip(got, want, strict=True)):
        assert len(mine) == len(dense)
        at = next((i for i, pair in enumerate(zip(mine, dense, strict=True)) if pair[0] != pair[1]), None)
        if at is None:
            continue
        known = prompts[b] + dense[:at]
        engine = Engine(model, DENSE, token_text, max_length=len(known), new_tokens=1)
        scores = exactness.noisy(engine.prefill(0, known)[0], [(b, len(known))], sampling)
        if (lead := -scores.topk(2).values.diff().item()) >= exactness.TIE:
            return False
        print(f"row {b} parts at token {at}, lead {lead:.1e}")
    return True


CONFIGS = {
    "plain": EXACT,
    "fixed": replace(EXACT, policy="fixed"),
    "one-draft": replace(EXACT, policy="fixed", max_interval=1, min_gap=0),
    "longer-than-evidence": replace(EXACT, policy="fixed", max_interval=24),
    "stops-early": replace(EXACT, draft_cost=0.4),
    "paper": replace(EXACT, selector="paper"),
    "nothing-selected": replace(EXACT, n_select=0),
    "no-sinks-one-query": replace(EXACT, n_sink=0, n_evidence=1),
}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_dense_decoding(tiny, name, sampling):
    """Rows of unequal lengths, one of which begins with everything in its memory."""
    prompts = [prompt(60), prompt(9, 1), prompt(130, 2)]
    want, _, _ = decoded(tiny, DENSE, prompts, 60, sampling=sampling)
    got, steps, _ = decoded(tiny, CONFIGS[name], prompts, 60, sampling=sampling)
    assert agree(tiny, prompts, got, want, sampling)
    tally = counted(steps)
    assert 0 < tally.accepted < tally.drafted == tally.fast, "some drafts right, some wrong, none lost"
    dense = counted(decoded(tiny, DENSE, prompts, 60, sampling=sampling)[1])
    assert tally.dense == dense.dense and tally.passes.total() > dense.passes.total() / 2


def line(base, cost):
    """Prices of rounds: a pass of one token, and every draft."""
    return [base + m * cost for m in range(MOST + 1)]


def test_rows_are_independent(tiny, monkeypatch):
    """A row in a batch drafts, and is accepted, as alone, if it is told the same prices."""
    monkeypatch.setattr(Speculation, "prices", lambda self, b: line(1.4, 0.1))
    prompts = [prompt(60), prompt(45, 1)]
    together = decoded(tiny, EXACT, prompts, 40)[1]
    alone = decoded(tiny, EXACT, prompts[:1], 40)[1]
    did = lambda steps: [(s.tokens[0], s.rows[0]) for s in steps if s.rows[0].reason != "ended"]
    assert did(together) == did(alone)
    both = [[did.accepted for did in s.rows] for s in together if all(did.drafted for did in s.rows)]
    assert any(a != b for a, b in both), "checked in one step, to different lengths"
    assert any(sum(did.drafted > 0 for did in s.rows) == 1 for s in together), "and one alone"


def test_rows_are_checked_in_one_pass(tiny, monkeypatch):
    """However many drafts each has: the weights are read once."""
    ran, forward = [], Model.forward
    monkeypatch.setattr(Model, "forward", lambda *args, **kw: ran.append(1) or forward(*args, **kw))
    monkeypatch.setattr(Speculation, "prices", lambda self, b: line(1.4, 0.1))
    prompts, unequal = [prompt(60), prompt(45, 1), prompt(70, 2)], 0
    engine = Engine(tiny, EXACT, token_text, batch=3, max_length=140, new_tokens=60)
    for step in decode(engine, prompts, max_new_tokens=60):
        drafted = [did.drafted for did in step.rows if did.drafted]
        others = any(did.reason != "ended" and not did.drafted for did in step.rows)
        if step.rows[0].reason != "prefill" and drafted:
            assert len(ran) == 1 + others
            unequal += len(set(drafted)) > 1
        ran.clear()
    assert unequal


@pytest.mark.parametrize("new", [0, 1, 2, 3, 7, 30])
def test_ends_where_dense_decoding_ends(tiny, new):
    """At max_new_tokens, and at end tokens: in a draft, and as the pass's own token."""
    prompts = [prompt(60), prompt(75, 4)]
    free, _, _ = decoded(tiny, DENSE, prompts, 30)
    for stop in [set(), *({token} for token in free[0][:4])]:
        want, _, _ = decoded(tiny, DENSE, prompts, new, stop_ids=stop)
        got, steps, engine = decoded(tiny, EXACT, prompts, new, stop_ids=stop)
        assert got == want
        if steps:
            assert all(row.length <= engine.max_length for row in engine.rows)
            assert counted(steps).dense == counted(decoded(tiny, DENSE, prompts, new, stop_ids=stop)[1]).dense


def state(engine, length):
    """What the engine has cached of row 0's first tokens."""
    cache, cap = engine.cache, engine.cache.cap
    whole = slice(cap, cap + length)
    return cache.k[:, 0, :, whole], cache.v[:, 0, :, whole], engine.cache.key_norm[:, 0, :, :length]


def test_wrong_drafts_leave_no_trace(tiny):
    """Drafts that are right up to a random place: accepted just so far, and keys, values and norms are those
    of a fresh prefill of the accepted text; the memory ends with the same tokens as the full cache.  (What
    the queries of wrong drafts attended to does count in the selection.)
    """
    rng, ids, new = random.Random(5), prompt(70), 80
    (dense,), _, _ = decoded(tiny, DENSE, [ids], new)
    cfg = replace(EXACT, policy="fixed", max_interval=9)
    engine = Engine(tiny, cfg, token_text, max_length=len(ids) + new, new_tokens=new)
    logits, _ = engine.prefill(0, ids)
    (token,), speculation = engine.pick(logits), Speculation(engine, GREEDY)
    done, lengths = 0, set()  # the token to feed is dense[done]
    while done + 12 < new:
        m, right = rng.randint(1, 8), rng.randint(0, 8)
        drafts = dense[done + 1 : done + 1 + min(m, right)]
        drafts += [(dense[done + 1 + i] + 1) % 97 for i in range(len(drafts), m)]
        for i, fed in enumerate([token, *drafts]):
            left = m + 1 if i == m else 1000  # the last one may end the text, so the pass verifies
            (made,), (did,), (token,) = speculation.step([fed], [left])
            assert (did.reason == "fast") == (i < m) and bool(made) == (i == m)
        accepted = min(m, right)
        assert (did.drafted, did.accepted) == (m, accepted)
        assert made == dense[done + 1 : done + 2 + accepted]
        done += accepted + 1
        lengths.add((m, accepted))
        text = ids + dense[:done]  # dense[done] is not fed yet
        row, fresh = engine.rows[0], Engine(tiny, DENSE, token_text, max_length=len(text), new_tokens=1)
        fresh.prefill(0, text)
        assert row.length == len(text)
        for mine, want in zip(state(engine, len(text)), state(fresh, len(text)), strict=True):
            torch.testing.assert_close(mine, want, atol=1e-4, rtol=0)
        recent = row.memory - 2 - 10  # beyond sinks and selected
        assert recent >= 8
        for cache in (engine.cache.k, engine.cache.v):
            whole = cache[:, 0, :, engine.cache.cap : engine.cache.cap + row.length]
            assert torch.equal(cache[:, 0, :, 12 : row.memory], whole[:, :, -recent:])
            assert torch.equal(cache[:, 0, :, :2], whole[:, :, :2])
    assert len(lengths) > 5


def test_evidence_and_candidates(tiny):
    """The last queries of a pass decide, of tokens that were certain before it."""
    seen, cfg = [], CONFIGS["longer-than-evidence"]
    engine = Engine(tiny, cfg, token_text, max_length=140, new_tokens=80)
    engine.cache.observe = lambda row, layer, did, slots, scores: seen.append((did, slots, scores.shape))
    for _ in decode(engine, [prompt(60)], max_new_tokens=80):
        pass
    seen = [(did, *rest) for did, *rest in seen if did.drafted]
    assert any(did.drafted < 4 for did, *_ in seen) and any(did.drafted > 9 for did, *_ in seen)
    for did, slots, shape in seen:
        assert shape == (3, 5 * min(did.drafted + 1, 5), did.visible)
        assert slots.max() < cfg.recent_start(did.visible - did.drafted) and slots.min() >= 2


def test_the_trigger_forgets_wrong_drafts(tiny):
    """The state after a pass is that of the accepted text alone."""
    ids, new = prompt(70), 40
    (dense,), _, _ = decoded(tiny, DENSE, [ids], new)
    want, _ = advance("no", token_text(dense[0]))
    for drafts in ([0], [2, 0]):
        engine = Engine(tiny, EXACT, token_text, max_length=len(ids) + new, new_tokens=new)
        engine.prefill(0, ids)
        speculation, row, before = Speculation(engine, GREEDY), engine.rows[0], "no"
        for i, token in enumerate([dense[0], *drafts]):
            before, _ = advance(before, token_text(token))
            _, (did,), _ = speculation.step([token], [i + 1 if i == len(drafts) else 1000])
        assert did.drafted == len(drafts) and did.accepted == 0
        assert row.trigger.armed == want != before


@pytest.mark.parametrize("then", ["prefill", "step", "fork"])
def test_what_is_not_verified_does_not_stay(tiny, then):
    """Whatever comes after a step that only drafted, the context is what was certain: once the draft stayed,
    and the next logits were off by .07.
    """
    engine = Engine(tiny, replace(EXACT, policy="fixed"), token_text, max_length=140, new_tokens=40)
    steps = decode(engine, [prompt(60)], max_new_tokens=40)
    certain = []
    for step in steps:
        certain += step.tokens[0]
        if engine.rows[0].unverified == 3 and len(certain) > 3:
            break
    known = prompt(60) + certain[:-1]  # the last certain token has been fed to fast steps alone
    assert engine.rows[0].length == len(known) + 3
    plain = Engine(tiny, DENSE, token_text, max_length=140, new_tokens=40)
    plain.prefill(0, known)
    if then == "step":
        engine.step(certain[-1:])
        assert engine.rows[0].length == len(known) + 1
        return
    other = engine.fork(DENSE) if then == "fork" else engine
    got, _ = other.prefill(0, [*certain[-1:], 7])
    torch.testing.assert_close(got, plain.prefill(0, [*certain[-1:], 7])[0], atol=1e-4, rtol=0)


def test_accepting_always_is_noticed(tiny, monkeypatch):
    prompts = [prompt(60)]
    want, _, _ = decoded(tiny, DENSE, prompts, 60)
    monkeypatch.setattr(Drafts, "accept", lambda self, picked: len(picked) - 1)
    got, steps, _ = decoded(tiny, EXACT, prompts, 60)
    assert counted(steps).accepted == counted(steps).drafted > 0
    assert not agree(tiny, prompts, [got[0][:60]], want)


def clock(monkeypatch, per_layer, per_head, per_cached=0.0, per_token=0.0, noise=lambda: 0.0):
    """Replace what `exact.prices` reads of a clock by a sum; returns the passes that were run."""
    ran = []

    def seconds(work, device):
        work()
        _, tokens, plans, n_logits, layers = work.args
        ran.append((len(plans), len(tokens[0]), plans[0].reason, plans[0].visible, layers))
        n_layers, T = len(range(*layers.indices(2))), len(plans) * len(tokens[0])
        read = per_layer + per_cached * sum(p.visible for p in plans) + per_token * T
        return n_layers * read + per_head * (n_logits > 0) + noise()

    monkeypatch.setattr("exact.seconds", seconds)
    return ran


def test_nothing_is_drafted_where_it_cannot_pay(tiny, monkeypatch):
    """By time at this length, and at a cost of a whole dense step: dense decoding, bit for bit."""
    clock(monkeypatch, per_layer=1000, per_head=1000, per_cached=1)
    prompts = [prompt(60), prompt(80, 1)]
    want, _, dense = decoded(tiny, DENSE, prompts, 30)
    for change in (dict(draft_cost=None, n_select=30), dict(draft_cost=1.0)):
        got, steps, engine = decoded(tiny, replace(EXACT, **change), prompts, 30)
        assert got == want and not counted(steps).drafted
        assert {p.reason for s in steps[1:] for p in s.rows} == {"dense"}
        for b, row in enumerate(engine.rows):
            whole, other = (
                e.cache.k[:, b, :, e.cache.cap : e.cache.cap + row.length] for e in (engine, dense)
            )
            assert torch.equal(whole, other)


@pytest.mark.parametrize("batch", [1, 3])
def test_prices(tiny, monkeypatch, batch):
    """A batch shares the weights of fast and dense steps; a pass over drafts grows with its tokens.  Of all
    times the least counts, so a disturbed clock changes nothing; and at these prices a long row drafts.
    """
    shock = lambda: 50.0 * (ran[-1][-1].stop > 0 and len(ran) < 11)  # layers, the first time
    ran = clock(monkeypatch, 300, 200, 3, 5, noise=shock)
    cfg = replace(EXACT, draft_cost=None, max_interval=24)
    prompts = [prompt(400, i) for i in range(batch)]
    engine = Engine(tiny, cfg, token_text, batch=batch, max_length=440, new_tokens=40)
    for b, tokens in enumerate(prompts):
        engine.prefill(b, tokens)
    found = prices(engine, batch - 1)
    layers = tiny.config.num_hidden_layers
    dense = (layers * (300 + batch * (3 * 401 + 5)) + 200) / batch
    fast = (layers * (300 + batch * (3 * 20 + 5)) + 200) / batch
    check = lambda T: layers * (300 + 3 * (400 + T) + 5 * T) + 200
    assert found == pytest.approx([(m * fast + check(m + 1)) / dense for m in range(MOST + 1)])
    assert {T for rows, T, *_ in ran if rows == 1} >= set(TIMED)
    assert {(layers.start, layers.stop) for *_, layers in ran} == {(0, 0), (0, 1), (1, 2)}, "one at a time"

    got, steps, engine = decoded(tiny, cfg, prompts, 30)
    assert got == decoded(tiny, DENSE, prompts, 30)[0]
    assert counted(steps).drafted > 0
    clock(monkeypatch, 300, 200, per_cached=3, per_token=10_000)  # a draft would cost too much
    got, steps, _ = decoded(tiny, cfg, prompts, 10)
    assert not counted(steps).drafted and got == decoded(tiny, DENSE, prompts, 10)[0]


def test_measuring_prices_changes_nothing(tiny, monkeypatch):
    """Keys, values, past, memory and rows stay; it is done once, and again for a longer row."""
    clock(monkeypatch, 300, 200, per_cached=3)
    engine = Engine(tiny, replace(EXACT, draft_cost=None), token_text, batch=2, max_length=140, new_tokens=60)
    for b in range(2):
        engine.prefill(b, prompt(60 + 20 * b, b))
    engine.step([3, 4])
    cache, before = engine.cache, copy.deepcopy((engine.rows, engine.cache.past))
    held = lambda: [
        x[:, b, :, part]
        for x in (cache.k, cache.v)
        for b, row in enumerate(engine.rows)
        for part in (slice(0, row.memory), slice(cache.cap, cache.cap + row.length))
    ]
    was = [x.clone() for x in held()]
    speculation = Speculation(engine, GREEDY)
    first = speculation.prices(0)
    assert all(map(torch.equal, held(), was))
    assert engine.rows == before[0] and torch.equal(cache.past, before[1])
    assert speculation.prices(0) is first
    engine.prefill(0, prompt(30, 5))
    assert speculation.prices(0) is not first and len(speculation.timed) == 2
    engine.prefill(0, prompt(engine.max_length - engine.rows[0].length - 2, 5))  # no room for long passes
    assert len(speculation.prices(0)) == MOST + 1


def test_a_dense_row_tries_again():
    """Drafts were wrong, so it stays dense; dense steps teach nothing, but let it forget."""
    drafts = Drafts(right=[0.0] * len(SEEN), seen=[5.0] * len(SEEN))
    tries = 0
    while drafts.should_verify(1, "no", line(1.4, 0.3)):
        drafts.start_round()
        tries += 1
    assert 20 < tries < 2000
    bad = Drafts()
    for _ in range(2000):  # at this price it never pays
        bad.start_round()
        assert bad.should_verify(1, "no", line(1.4, 1.0))


@pytest.mark.parametrize("cost", [0.08, 0.2, 0.34, 0.6])
@pytest.mark.parametrize("chance", [0.5, 0.7, 0.9, 0.97])
def test_draft_length_is_near_the_best(cost, chance):
    """Drafts all right with one chance: the tokens per cost come near those of the best fixed m."""
    rng, drafts, base = random.Random(3), Drafts(), 1.35
    made = spent = rounds = 0
    while rounds < 1500:
        drafts.start_round()
        while not drafts.should_verify(7, "no", line(base, cost)):
            drafts.add(1.5)
        m = len(drafts.tokens) - 1
        right = next((i for i in range(m) if rng.random() > chance), m)
        assert drafts.accept([7] * right + [8] * (m + 1 - right)) == right
        rounds += 1
        if rounds > 500:
            made, spent = made + right + 1, spent + (base + m * cost if m else 1)
    ratio = lambda m: (1 - chance ** (m + 1)) / (1 - chance) / (base + m * cost if m else 1)
    assert made / spent > 0.93 * max(map(ratio, range(MOST + 1)))


def test_what_is_learnt():
    """Drafts before the first wrong one were right, it was wrong, and those after it tell nothing."""
    drafts = Drafts()
    for token, lead in [(5, 0.1), (6, 0.1), (7, 9.0), (8, 1.2), (9, None)]:
        drafts.should_verify(token, "no", line(1.2, 0.1))
        if lead is not None:
            drafts.add(lead)
    assert drafts.accept([6, 7, 1, 9, 3]) == 2
    assert [s - Drafts().seen[i] for i, s in enumerate(drafts.seen)] == [2, 0, 0, 0, 0, 1]
    assert [r - Drafts().right[i] for i, r in enumerate(drafts.right)] == [2, 0, 0, 0, 0, 0]
    assert drafts.made == 4 and drafts.spent == pytest.approx(1 + 1.2 + 4 * 0.1)
    chances = [right / seen for right, seen in zip(RIGHT, SEEN, strict=True)]
    assert chances == sorted(chances) and chances[-1] < 1


def test_command(capsys, folder, prompt_file, tmp_path):
    """--exact: dense decoding's text, printed as it becomes certain; the drafts in report, JSON and trace."""
    argv = ["--ckpt", folder, "--prompt", prompt_file, "--json", *FLAGS, "--max-new-tokens", 40]
    trace = tmp_path / "steps.jsonl"
    exact = ["--exact", "--draft-cost", 0.0, "--trace", trace, "--plot", tmp_path / "memory.png"]
    for more in ([], ["--temperature", 0.9, "--seed", 3]):
        dense = json.loads(run(capsys, *argv, *more, "--dense")[0].splitlines()[-1])
        out, err, code = run(capsys, *argv, *more, *exact)
        r = json.loads(out.splitlines()[-1])
        assert code == 0 and r["text"] == dense["text"] and out.startswith(r["text"][0] + "\n")
        assert r["kv_bytes_dense"] == dense["kv_bytes_dense"] and r["new_tokens"] == dense["new_tokens"]
        assert 0 < r["accepted"] <= r["drafted"] == r["fast_steps"]
        share, per_pass = r["accepted"] / r["drafted"], (r["accepted"] + r["slow_steps"]) / r["slow_steps"]
        right = f"{r['accepted']} of {r['drafted']} drafts right, {share:.0%}"
        assert f"exact: {right}; {per_pass:.1f} tokens a dense pass" in err and ", exact, " in err
        assert "a token takes" in err
        lines = [json.loads(line) for line in trace.read_text().splitlines()]
        assert sum(len(line["made"]) for line in lines) == r["new_tokens"][0]  # a token a byte
        for name in ("drafted", "accepted"):
            assert sum(line[name] for line in lines) == r[name]
        assert {line["made"] for line in lines if line["kind"] == "fast"} == {""}
    err = run(capsys, *argv, "--exact", "--draft-cost", 1)[1]
    assert "exact mode cannot pay here: drafts would cost too much" in err


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(exact=True, policy="never"), "exact with policy = 'never'; allowed are sentence and fixed"),
        (dict(exact=True, policy="window"), "exact with policy = 'window'"),
        (dict(exact=True, policy="dense"), "exact with policy = 'dense'"),
        (dict(exact=1), "exact = 1; allowed are True and False"),
        (dict(draft_cost=0.3), "draft_cost = 0.3 without exact"),
        (dict(exact=True, draft_cost=-1.0), "draft_cost = -1.0; allowed is a number of dense steps"),
        (dict(exact=True, draft_cost=float("nan")), "draft_cost = nan; allowed"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        SFIConfig(**settings)


def test_forcing_tokens_is_refused(tiny):
    engine = Engine(tiny, EXACT, token_text, max_length=80, new_tokens=10)
    engine.prefill(0, prompt(60))
    with pytest.raises(ValueError, match="force feeds given tokens, which exact mode would verify"):
        list(force(engine, 0, [5]))
