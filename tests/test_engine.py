"""The engine: configuration, trigger, compact memory, policies, decode loop, against a naive simulation."""

import copy
import json
import random
from dataclasses import replace

import pytest
import torch

from command.checks import where_not_finite
from command.machine import cache_bytes
from command.report import Tally
from command.timing import dense_step
from model import NotFinite
from selector import select
from sfi import Engine, SFIConfig, decode
from study.forcing import force
from tests.naive import CONFIGS, Naive
from tests.tiny import SMALL, decoded, dense_logits, poisoned, prompt, token_text
from trigger import Trigger


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(n_sink=-1), "n_sink = -1; allowed is a whole number of tokens, 0 or more"),
        (dict(n_select=1.5), "n_select = 1.5; allowed"),
        (dict(n_select=True), "n_select = True; allowed"),
        (dict(align=0), "align = 0; allowed"),
        (dict(max_interval=0), "max_interval = 0; allowed"),
        (dict(n_evidence=0), "n_evidence = 0; allowed"),
        (dict(min_gap=33), "min_gap = 33; allowed is at most max_interval = 24"),
        (dict(n_recent=15, n_evidence=16), "n_recent = 15; allowed is at least n_evidence = 16"),
        (dict(policy="often"), "policy = 'often'; allowed are sentence, fixed, never, window, dense"),
        (dict(selector="best"), "selector = 'best'; allowed are follow, paper"),
        (dict(fusion="harmonic"), "fusion = 'harmonic'; allowed"),
        (
            dict(selector="paper", steps=("prior", "pruning")),
            "steps has 'pruning'; selector paper has power_mean",
        ),
    ],
)
def test_config_errors_say_got_and_allowed(change, message):
    with pytest.raises(ValueError, match=message):
        SFIConfig(**change)


def test_config_defaults_are_the_specified_ones():
    """`paper` brings the published settings with it, `follow` its own; numbers given come first."""
    c, paper = SFIConfig(), SFIConfig(selector="paper")
    assert (c.n_sink, c.n_select, c.n_recent, c.align) == (4, 1536, 256, 16)
    assert (c.policy, c.selector) == ("sentence", "follow")
    own = lambda c: (c.delay, c.min_gap, c.max_interval, c.n_evidence, c.reread)
    assert own(c) == (16, 2, 24, 16, 4) and own(paper) == (0, 16, 64, 16, 1)
    assert paper == SFIConfig(selector="paper", delay=0)
    assert own(SFIConfig(n_recent=3, max_interval=1)) == (16, 1, 1, 3, 3)
    assert own(SFIConfig(delay=2, min_gap=9, max_interval=12, n_evidence=7, reread=1)) == (2, 9, 12, 7, 1)


def test_recent_window_and_candidates_to_the_token():
    c = SFIConfig(n_sink=4, n_recent=256, align=16)
    for length, start in ((255, 0), (256, 0), (271, 0), (272, 16), (287, 16), (288, 32), (1000, 736)):
        assert c.recent_start(length) == start and c.candidates(length) == max(start - 4, 0)
        assert length - start >= min(256, length) and (start == 0 or length - start < 256 + 16)


def test_capacity_and_bytes(tiny):
    c = SFIConfig()
    assert c.capacity(100_000, 500) == -(-(4 + 1536 + 256 + 15 + 24) // 16) * 16
    assert (
        c.capacity(1000, 500) == -(-(4 + (736 - 4) + 256 + 15 + 24) // 16) * 16
    )  # no more than can be filled
    assert replace(c, policy="never").capacity(100_000, 500) == -(-(4 + 1536 + 256 + 15 + 500) // 16) * 16
    assert replace(c, policy="window").capacity(100_000, 500) == -(-(4 + 256 + 15 + 24) // 16) * 16
    assert replace(c, policy="dense").capacity(100_000, 500) == 0
    huge = replace(c, n_sink=10**9, n_recent=10**9, max_interval=10**9)  # no text has so many tokens
    assert huge.capacity(1000, 500) <= 3 * 1000 + 2 * c.align
    engine = Engine(tiny, SMALL, token_text, batch=2, max_length=90, new_tokens=20)
    held = sum(x.nbytes for x in (engine.cache.k, engine.cache.v, engine.cache.key_norm, engine.cache.past))
    assert held == cache_bytes(tiny.config, SMALL, batch=2, max_length=90, new_tokens=20, dtype=torch.float32)


def test_prompt_is_split_evenly_so_that_the_last_chunk_is_evidence_enough(tiny):
    for n in (1, 4, 5, 9, 10, 11, 21, 83):
        engine = Engine(tiny, SMALL, token_text, max_length=n, new_tokens=0)
        pieces = []
        engine.prefill(0, prompt(n), chunk=1, progress=pieces.append)
        assert sum(pieces) == n and pieces[-1] >= min(SMALL.n_evidence, n) and max(pieces) - min(pieces) <= 1


@pytest.mark.parametrize("n", [1, 21, 26])
@pytest.mark.parametrize("name", CONFIGS)
def test_engine_equals_naive_simulation(tiny, name, n):
    """Logits and reason of every step; prompts short, just short and just long enough."""
    cfg, tokens, fed = CONFIGS[name], prompt(n, seed=n), prompt(40, seed=1)
    naive = Naive(tiny, cfg)
    engine = poisoned(tiny, cfg, max_length=n + 40, new_tokens=40)
    torch.testing.assert_close(engine.prefill(0, tokens)[0][0], naive.prefill(tokens), atol=1e-4, rtol=0)
    for i, token in enumerate(fed):
        logits, (did,) = engine.step([token])
        torch.testing.assert_close(logits[0], naive.step(token), atol=1e-4, rtol=0)
        assert did.reason == naive.reasons[i] and did.length == n + i + 1
        if did.reason == "fast":
            assert did.visible == len(naive.visible[0][0]) <= engine.cache.cap


@pytest.mark.parametrize("n", [21, 60])
@pytest.mark.parametrize("name", CONFIGS)
def test_forced_tokens_in_few_passes_equal_steps(tiny, name, n):
    """Logits, records and what comes after, at any split into calls."""
    cfg, fed = CONFIGS[name], prompt(60, seed=1)
    stepped, forced = (poisoned(tiny, cfg, max_length=n + 61, new_tokens=61) for _ in range(2))
    for engine in (stepped, forced):
        engine.prefill(0, prompt(n))
    want = [stepped.step([token]) for token in fed]
    passes = [*force(forced, 0, fed[:17]), *force(forced, 0, fed[17:18]), *force(forced, 0, fed[18:])]
    logits, done = torch.cat([x for x, _ in passes]), [p for _, did in passes for p in did]
    torch.testing.assert_close(logits, torch.cat([x for x, _ in want]), atol=1e-4, rtol=0)
    assert done == [p for _, (p,) in want] and forced.rows == stepped.rows
    if name != "one-by-one":
        assert len(passes) < 50
    torch.testing.assert_close(forced.step([5])[0], stepped.step([5])[0], atol=1e-4, rtol=0)


def test_sentence_start_inside_the_gap_is_dropped_not_postponed(tiny):
    """Tokens 2, 3 are ".", " Then"; the start fires at since = 2 < min_gap = 3, and nothing is made up for
    later.
    """
    engine = Engine(tiny, replace(SMALL, max_interval=50), token_text, max_length=100, new_tokens=40)
    engine.prefill(0, prompt(60))
    reasons = [engine.step([t])[1][0].reason for t in (0, 2, 3, 0, 0, 0, 2, 3, 0)]
    assert reasons == ["fast"] * 7 + ["sentence"] + ["fast"]


@pytest.mark.parametrize("around", [-1, 0, 1])
@pytest.mark.parametrize("length", [1, 2, 3, 2 + 8, 23, 24])
def test_nothing_to_select_is_identical_to_dense(tiny, length, around):
    """At every boundary: one token, the sinks, sinks + recent, and 23 tokens, which leave N candidates."""
    n, sizes = max(length + around, 1), dict(max_length=60, new_tokens=27)
    sfi, dense = (Engine(tiny, cfg, token_text, **sizes) for cfg in (SMALL, replace(SMALL, policy="dense")))
    assert torch.equal(sfi.prefill(0, prompt(n))[0], dense.prefill(0, prompt(n))[0])  # the prefill always is
    for token in prompt(27, seed=5):
        (logits, (did,)), (want, _) = sfi.step([token]), dense.step([token])
        if did.reason not in ("short", "first"):
            break
        if did.reason == "short":
            assert torch.equal(logits, want) and did.length <= 23
        else:  # dense as well, but by the operation that keeps its scores
            torch.testing.assert_close(logits, want, atol=1e-5, rtol=0)
    assert did.reason == "fast" and did.length == max(n + 1, 25)


@pytest.mark.parametrize(
    "n, reasons", [(18, ["short"] * 5 + ["first", "fast"]), (23, ["first", "fast"]), (24, ["fast", "fast"])]
)
def test_first_refresh_comes_with_the_first_candidate_too_many(tiny, n, reasons):
    """N = 10, 2 sinks, 8 recent, aligned to 4: 23 tokens leave 10 candidates, 24 leave 14."""
    assert SMALL.candidates(23) == 10 and SMALL.candidates(24) == 14
    engine = Engine(tiny, replace(SMALL, max_interval=30), token_text, max_length=60, new_tokens=30)
    engine.prefill(0, prompt(n))
    assert [engine.step([0])[1][0].reason for _ in reasons] == reasons


def test_rows_agree_in_logits(tiny):
    prompts = [prompt(5, 1), prompt(61, 2)]
    together = Engine(tiny, SMALL, token_text, batch=2, max_length=100, new_tokens=30)
    alone = [Engine(tiny, SMALL, token_text, max_length=100, new_tokens=30) for _ in prompts]
    for b, p in enumerate(prompts):
        torch.testing.assert_close(together.prefill(b, p)[0], alone[b].prefill(0, p)[0], atol=0, rtol=0)
    for token in prompt(30, 9):
        logits, _ = together.step([token, token])
        want = torch.cat([engine.step([token])[0] for engine in alone])
        torch.testing.assert_close(logits, want, atol=1e-5, rtol=0)


def test_counts_bytes_and_ends(tiny):
    tally = Tally()
    tokens, steps, _ = decoded(tiny, SMALL, [prompt(60)], 30)
    for step in steps:
        tally.add(step)
    did = [step.rows[0] for step in steps]
    assert tally.fast + tally.slow == tally.passes.total() == 29 == len(tokens[0]) - 1
    assert tally.dense == sum(range(61, 90))
    assert tally.visible == sum(p.visible for p in did[1:])
    fast = [p for p in did[1:] if p.reason == "fast"]
    assert (
        tally.fast_visible == sum(p.visible for p in fast) < tally.fast_dense == sum(p.length for p in fast)
    )
    assert tally.copied == sum(p.copied for p in did) > did[0].copied > 0
    first = tokens[0][4]
    stopped, _, _ = decoded(tiny, SMALL, [prompt(60)], 30, stop_ids={first})
    assert stopped[0] == tokens[0][: tokens[0].index(first) + 1]
    assert decoded(tiny, SMALL, [prompt(60)], 0)[:2] == ([[]], [])
    assert len(decoded(tiny, SMALL, [prompt(60)], 1)[0][0]) == 1


def test_capacity_is_never_exceeded():
    """Property: over random configurations and lengths the memory stays inside its slots and the window never
    moves back.
    """
    rng = random.Random(0)
    for _ in range(2000):
        n_evidence, interval = rng.randint(1, 8), rng.randint(1, 40)
        cfg = SFIConfig(
            n_sink=rng.randint(0, 6),
            n_select=rng.randint(0, 60),
            n_recent=rng.randint(n_evidence, 40),
            align=rng.randint(1, 20),
            min_gap=0,
            max_interval=interval,
            n_evidence=n_evidence,
            policy=(policy := rng.choice(["sentence", "fixed", "never", "window"])),
            exact=(exact := policy in ("sentence", "fixed") and rng.random() < 0.5),
        )
        length, new = rng.randint(1, 150), rng.randint(1, 60)
        grown = new if cfg.policy == "never" else interval * (1 + exact)  # an exact pass brings its drafts
        for refreshed in range(length, length + new):
            if cfg.candidates(refreshed) > cfg.budget:
                recent = refreshed - cfg.recent_start(refreshed)
                assert cfg.n_recent <= recent < cfg.n_recent + cfg.align
                assert cfg.recent_start(refreshed) > cfg.n_sink
                left = min(grown, length + new - refreshed)
                assert cfg.n_sink + cfg.budget + recent + left <= cfg.capacity(length + new, new)


def test_fork_continues_from_the_same_tokens(tiny):
    base = Engine(tiny, replace(SMALL, policy="dense"), token_text, max_length=90, new_tokens=20)
    base.prefill(0, prompt(60)[:40])
    fork = base.fork(SMALL)
    whole = Engine(tiny, SMALL, token_text, max_length=90, new_tokens=20)
    got, want = fork.prefill(0, prompt(60)[40:])[0], whole.prefill(0, prompt(60))[0]
    for token in [None, *prompt(20, 4)]:
        if token is not None:
            got, want = fork.step([token])[0], whole.step([token])[0]
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    assert whole.cache.past.any()  # and from what the refreshes so far have seen
    later = whole.fork(SMALL)
    for engine in (later, whole):
        engine.prefill(0, prompt(5))
    assert torch.equal(later.cache.past, whole.cache.past) and torch.equal(
        later.step([7])[0], whole.step([7])[0]
    )


def test_cut_forgets_tokens(tiny):
    """Inside the recent window the memory stays, less the tokens that are cut; further back it goes too, and
    with it what the Selector remembers of the tokens.
    """
    sizes = dict(max_length=100, new_tokens=30)
    engine, plain = (Engine(tiny, SMALL, token_text, **sizes) for _ in range(2))
    for e in (engine, plain):
        e.prefill(0, prompt(60))
    before = copy.deepcopy(engine.rows)
    for token in (0, 1, 2):
        engine.step([token])
    engine.cut(0, 60)
    assert engine.rows == [replace(row, trigger=Trigger()) for row in before]
    for token in (5, 6, 0):
        assert torch.equal(engine.step([token])[0], plain.step([token])[0])
    engine.cut(0, 52)  # the window's first token
    assert engine.rows[0].memory == 12 and engine.step([3])[1][0].reason == "fast"
    engine.cut(0, 40)
    assert engine.rows[0].memory == 0 and not engine.cache.past[..., 40:].any()
    logits, (did,) = engine.step([7])
    want = dense_logits(tiny, torch.tensor([[*prompt(60)[:40], 7]]))[0, -1]
    assert did.reason == "first"
    torch.testing.assert_close(logits[0], want, atol=1e-5, rtol=0)
    engine.prefill(0, prompt(9, 2))
    engine.cut(0, 24)  # which leave 14 candidates for N = 10
    engine.prefill(0, [5])
    assert engine.rows[0].memory and engine.rows[0].recent_start == 16
    engine.cut(0, 20)  # inside the window, but 20 tokens leave too few to select from
    assert engine.rows[0].memory == 0 and engine.step([7])[1][0].reason == "short"
    engine.prefill(0, prompt(20, 2))
    with pytest.raises(ValueError, match="cannot cut row 0 to 42 tokens; it has 41"):
        engine.cut(0, 42)


def test_a_decode_that_does_not_fit_is_refused_before_it_reads(tiny):
    engine = Engine(tiny, SMALL, token_text, max_length=30, new_tokens=5)
    with pytest.raises(ValueError, match="row 0 would have 31 tokens; the engine was made for 30"):
        next(decode(engine, [prompt(26)], max_new_tokens=6))
    with pytest.raises(ValueError, match="max_new_tokens = -1; allowed is 0 or more"):
        next(decode(engine, [prompt(26)], max_new_tokens=-1))
    with pytest.raises(ValueError, match="max_length = 5000; the model has 4096 positions"):
        Engine(tiny, SMALL, token_text, max_length=5000, new_tokens=5)
    assert engine.rows[0].length == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_takes_the_same_steps(tiny, dtype):
    """Same schedule and memory sizes as fp32, and with fp32's selection, logits near to fp32's."""
    narrow = copy.deepcopy(tiny).to(dtype)
    narrow.inv_freq = tiny.inv_freq
    engines, chosen = (
        [Engine(m, SMALL, token_text, max_length=100, new_tokens=30) for m in (tiny, narrow)],
        [],
    )
    keep = lambda *args: chosen.append(select(*args)) or chosen[-1]
    for engine, choose in zip(engines, (keep, lambda *args: chosen.pop(0)), strict=True):
        engine.cache.ops = engine.cache.ops._replace(select=choose)
    logits = [engine.prefill(0, prompt(60))[0] for engine in engines]
    for token in prompt(30, 2):
        assert (logits[0] - logits[1]).abs().mean() < 0.15 * logits[0].std()
        logits, done = zip(*(engine.step([token]) for engine in engines), strict=True)
        assert done[0] == done[1]


def test_more_prompt_after_some_steps(tiny):
    """A second prompt in the same row: the trigger starts anew, and the memory is refreshed."""
    engine, naive = Engine(tiny, SMALL, token_text, max_length=130, new_tokens=30), Naive(tiny, SMALL)
    engine.prefill(0, prompt(60))
    naive.prefill(prompt(60))
    for token in (0, 1, 2):  # the last one arms the trigger
        engine.step([token])
        naive.step(token)
    torch.testing.assert_close(
        engine.prefill(0, prompt(9, 8))[0][0], naive.prefill(prompt(9, 8)), atol=1e-4, rtol=0
    )
    row = engine.rows[0]
    assert (row.trigger, row.since, row.length) == (Trigger("ready"), 0, 72)
    torch.testing.assert_close(engine.step([3])[0][0], naive.step(3), atol=1e-4, rtol=0)


def test_a_refused_step_changes_nothing(tiny):
    engine = Engine(tiny, SMALL, token_text, batch=2, max_length=30, new_tokens=5)
    engine.prefill(0, prompt(25))
    engine.prefill(1, prompt(30))
    before = copy.deepcopy(engine.rows)
    with pytest.raises(ValueError, match="row 1 would have 31 tokens"):
        engine.step([2, 2])
    assert engine.rows == before


def test_memory_of_policy_never_is_not_overrun(tiny):
    """It grows with every token; past its slots lies the full cache."""
    engine = Engine(tiny, replace(SMALL, policy="never"), token_text, max_length=100, new_tokens=3)
    engine.prefill(0, prompt(60))
    with pytest.raises(ValueError, match="memory is full; the engine was made for 3 new tokens"):
        for _ in range(12):
            engine.step([0])


def test_one_prompt_a_row(tiny):
    engine = Engine(tiny, SMALL, token_text, batch=1, max_length=30, new_tokens=5)
    with pytest.raises(ValueError, match="2 prompts for an engine of 1 rows"):
        next(decode(engine, [prompt(5), prompt(6)], max_new_tokens=5))


def test_scores_that_are_not_finite_are_named(tiny):
    broken = copy.deepcopy(tiny)
    broken.model["layers"][0].self_attn.k_norm.weight.fill_(float("nan"))
    engine = Engine(broken, SMALL, token_text, max_length=60, new_tokens=5)
    with pytest.raises(NotFinite, match="^the attention scores are not finite, or all equal, or absurd; try"):
        engine.prefill(0, prompt(55))
    want = "the attention of layer 0 gives values that are not finite, in float32; try dtype"
    assert where_not_finite(engine).startswith(want)


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize(
    "part, where",
    [
        (lambda model: model["layers"][0].mlp.up_proj.weight, "layer 0"),
        (lambda model: model["layers"][1].mlp.up_proj.weight, "layer 1"),
        (lambda model: model["norm"].weight, "the output head"),
    ],
)
def test_logits_that_are_not_finite_are_an_error_not_token_0(tiny, part, where, value):
    """The error names the dtype and the first layer that gives them, at whatever step it is."""
    broken, dense = copy.deepcopy(tiny).to(torch.bfloat16), replace(SMALL, policy="dense")
    broken.inv_freq = tiny.inv_freq
    engine = Engine(broken, dense, token_text, max_length=60, new_tokens=5)
    engine.prefill(0, prompt(20))
    part(broken.model)[3] = float(value)
    want = f"{where} gives values that are not finite, in bfloat16; try dtype"
    for feed in (lambda: engine.pick(engine.step([5])[0]), lambda: engine.prefill(0, prompt(7))):
        with pytest.raises(NotFinite, match="^the logits are not finite, or all equal, or absurd; try dtype"):
            feed()
        assert where_not_finite(engine).startswith(want)
    with pytest.raises(ValueError, match=f"^{want}"):
        list(force(engine, 0, [5]))
    other = Engine(broken, SMALL, token_text, max_length=9, new_tokens=2)
    with pytest.raises(NotFinite):
        list(decode(other, [[1, 2]], max_new_tokens=2))


@pytest.mark.parametrize(
    "damage, where",
    [
        (lambda m: m["layers"][1].mlp.down_proj.weight.mul_(1e30), "layer 1 gives values up to "),
        (lambda m: m["norm"].weight.zero_(), "the output head gives logits that say nothing, in float32"),
    ],
)
def test_logits_that_are_all_equal_are_an_error_not_token_0(tiny, damage, where):
    """One projection times 1e30 makes every logit exactly 0, and the answer was "!!!", token 0."""
    broken = copy.deepcopy(tiny)
    engine = Engine(broken, replace(SMALL, policy="dense"), token_text, max_length=60, new_tokens=5)
    engine.prefill(0, prompt(20))
    damage(broken.model)
    with pytest.raises(NotFinite):
        engine.pick(engine.step([5])[0])
    assert where_not_finite(engine).startswith(where)
    with pytest.raises(NotFinite):
        engine.prefill(0, prompt(7))


def test_a_dense_step_for_timing_changes_no_row(tiny):
    """It reads what it is told to, and the steps after it give what they would have given."""
    timed, plain = (Engine(tiny, SMALL, token_text, batch=2, max_length=90, new_tokens=20) for _ in range(2))
    for engine in (timed, plain):
        engine.prefill(0, prompt(60))
        engine.prefill(1, prompt(9))
    for token in prompt(12, 4):
        rows = copy.deepcopy(timed.rows)
        dense_step(timed, [60, 4])
        assert timed.rows == rows
        assert torch.equal(timed.step([token, token])[0], plain.step([token, token])[0])


def test_room_is_checked(tiny):
    engine = Engine(tiny, SMALL, token_text, max_length=5, new_tokens=1)
    engine.prefill(0, prompt(5))
    with pytest.raises(ValueError, match="row 0 would have 6 tokens; the engine was made for 5"):
        engine.step([1])
    with pytest.raises(ValueError, match="no tokens to feed"):
        engine.prefill(0, [])


def test_config_is_json():
    from dataclasses import asdict

    assert json.loads(json.dumps(asdict(SFIConfig())))["n_select"] == 1536
