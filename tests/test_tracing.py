"""The record of the steps and the picture, against sets and loops."""

import json
from dataclasses import replace

import pytest
import torch

from command.report import Tally
from command.tracing import BINS, Trace, attention, plot
from sampling import Sampling
from sfi import Engine, SFIConfig, decode
from tests.tiny import SMALL, prompt, token_text


def traced(model, cfg, prompts, new, **settings):
    """(trace, records, steps, refreshes as `observe` saw them) of a decode."""
    longest = max(map(len, prompts)) + new
    trace, seen = Trace(model.config, cfg, token_text, len(prompts), longest), []

    def observe(row, layer, did, slots, scores):
        seen.append((row, layer, did.visible, slots, scores if scores is None else scores.clone()))
        trace.refreshed(row, layer, did, slots, scores)

    sizes = dict(batch=len(prompts), max_length=longest, new_tokens=new)
    engine = Engine(model, cfg, token_text, observe=observe, **sizes)
    steps, records = [], []
    for step in decode(engine, prompts, max_new_tokens=new, **settings):
        steps.append(step)
        records.append(trace.step(step, 0.5))
    return trace, records, steps, seen


def test_records_are_what_the_rows_did(tiny):
    settings = dict(stop_ids=set(range(3, 97, 10)), sampling=Sampling(0.8, seed=7))
    _, records, steps, _ = traced(tiny, SMALL, [prompt(5, 2), prompt(60), prompt(31, 3)], 40, **settings)
    assert len({sum(len(s.tokens[b]) for s in steps) for b in range(3)}) > 1, "all ended together"
    tally = Tally()
    for i, (lines, step) in enumerate(zip(records, steps, strict=True)):
        tally.add(step)
        assert [r["row"] for r in lines] == [b for b, tokens in enumerate(step.tokens) if tokens]
        for r in lines:
            did, (token,) = step.rows[r["row"]], step.tokens[r["row"]]
            assert (r["step"], r["reason"], r["ms"]) == (i, did.reason, 500.0)
            assert (r["read"], r["length"], r["copied"]) == (did.visible, did.length, did.copied)
            assert r["kind"] == {"prefill": "prefill", "fast": "fast"}.get(did.reason, "slow")
            assert r["made"] == token_text(token)
            assert r["fed"] == (token_text(steps[i - 1].tokens[r["row"]][0]) if i else None)
            assert (r["mass"] is not None) == did.refresh
            assert (r["mass_before"] is not None) == (r["overlap"] is not None)
    flat = [r for lines in records for r in lines]
    assert sum(r["kind"] == "fast" for r in flat) == tally.fast > 0
    assert sum(r["kind"] == "slow" for r in flat) == tally.slow > 0
    assert json.loads(json.dumps(flat)) == flat


def visible(cfg, length, slots, later=0):
    """Per KV head, the set of positions that a memory refreshed at `length` shows `later` tokens on."""
    fixed = set(range(cfg.n_sink)) | set(range(cfg.recent_start(length), length + later))
    return [fixed | set(row) for row in slots.tolist()]


def test_overlap_and_mass_equal_sets_and_loops(tiny):
    """Every refresh: share of the new positions that the old memory showed; true softmax attention of every
    evidence query, over what it sees, that falls on the new memory and on the old.
    """
    _, records, _, seen = traced(tiny, SMALL, [prompt(60)], 30)
    refreshing = [r for lines in records for r in lines if r["mass"] is not None]
    assert len(seen) == 2 * len(refreshing) > 4
    old = {}
    for i, record in enumerate(refreshing):
        found = {"overlap": [], "mass": [], "mass_before": []}
        for b, layer, length, slots, scores in seen[2 * i : 2 * i + 2]:
            assert b == 0 and slots.shape == (3, SMALL.n_select) and length == record["length"]
            new, W = visible(SMALL, length, slots), scores.shape[1] // 5
            assert W == (SMALL.n_evidence if record["kind"] == "prefill" else 1)
            before = None
            if layer in old:
                at, chosen = old[layer]
                before = visible(SMALL, at, chosen, later=length - at)
            for head in range(3):
                for row in range(5 * W):
                    last = length - W + row % W  # the query's own position
                    p = scores[head, row, : last + 1].double().softmax(0).tolist()
                    found["mass"].append(sum(x for j, x in enumerate(p) if j in new[head]))
                    if before:
                        found["mass_before"].append(sum(x for j, x in enumerate(p) if j in before[head]))
                if before:
                    found["overlap"] += [j in before[head] for j in slots[head].tolist()]
            old[layer] = length, slots
        for name, values in found.items():
            want = sum(values) / len(values) if values else None
            assert record[name] == (None if want is None else pytest.approx(want, abs=1e-4)), name
    assert any(r["mass_before"] not in (None, r["mass"]) for r in refreshing)


def test_a_query_sees_nothing_later_than_itself():
    scores = torch.zeros(2, 3 * 4, 9)  # G = 3, W = 4: the queries see 6, 7, 8 and 9 positions
    want = [sum(1 / n for n in (6, 7, 8, 9) if j < n) / 4 for j in range(9)]
    torch.testing.assert_close(attention(scores, 4), torch.tensor([want, want]))


def test_picture_is_the_share_of_layers_and_heads_that_hold_a_position(tiny):
    trace, records, steps, seen = traced(tiny, SMALL, [prompt(60)], 30)
    assert trace.width == 1 and len(trace.rows[0].columns) == len(steps) == 30
    layers = iter(seen)
    for step, column in zip(steps, trace.rows[0].columns, strict=True):
        did = step.rows[0]
        if did.refresh:
            memory = [next(layers) for _ in range(2)]
        _, _, refreshed, *_ = memory[0]
        later = did.length - refreshed
        sets = [s for *_, slots, _ in memory for s in visible(SMALL, refreshed, slots, later)]
        want = [sum(p in s for s in sets) / len(sets) for p in range(did.length)]
        torch.testing.assert_close(column[: did.length], torch.tensor(want))
        assert column[did.length :].isnan().all()
    slow = [x for x, *_ in trace.rows[0].slow]
    assert slow == [i for i, (r,) in enumerate(records) if r["mass"] is not None]


def assert_drawn(trace, folder):
    """No warning, a PNG, and panels that fill their share of it."""
    drawn = plot(trace, ["cost_$5_^{6$"] * len(trace.rows), folder / "memory.png")
    assert (folder / "memory.png").read_bytes().startswith(b"\x89PNG")
    panels = [ax.get_position() for ax in drawn.axes[: 2 * len(trace.rows)]]
    for top, below in zip(panels[::2], panels[1::2], strict=True):
        assert top.width > 0.6 and below.width > 0.6
        assert len(trace.rows) * top.height > 0.5 and len(trace.rows) * below.height > 0.1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["日本.txt", "cost_$5_^{6$.txt", "byte\udcff.txt"])
def test_any_file_name_may_stand_in_the_picture(tiny, name, tmp_path):
    trace, *_ = traced(tiny, SMALL, [prompt(60)], 4)
    plot(trace, [name], tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 5000


@pytest.mark.filterwarnings("error")
def test_a_picture_of_long_and_short_rows_and_of_no_steps(tiny, tmp_path):
    assert_drawn(traced(tiny, SMALL, [prompt(60), prompt(5), prompt(3)], 12)[0], tmp_path)
    assert_drawn(traced(tiny, SMALL, [prompt(60)], 0)[0], tmp_path)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "cfg",
    [
        replace(SMALL, policy="dense"),
        replace(SMALL, policy="window"),
        replace(SMALL, n_select=0),
        SFIConfig(),  # everything fits
    ],
    ids=["dense", "window", "nothing selected", "short"],
)
def test_policies_without_a_selection(tiny, cfg, tmp_path):
    """What is not known is null, not an error; the picture is drawn all the same."""
    trace, records, _, _ = traced(tiny, cfg, [prompt(60)], 20)
    flat = [r for lines in records for r in lines]
    assert all(r["overlap"] is None for r in flat)
    known = {r["reason"] for r in flat if r["mass"] is not None}
    if cfg.n_select == 0:  # sinks and a window, refreshed by dense passes, which know
        assert known >= {"prefill", "interval"}
    else:
        assert known == ({"prefill"} if cfg.policy == "window" else set())
    if cfg.policy == "dense":
        assert all(torch.equal(c[:60], torch.ones(60)) for c in trace.rows[0].columns)
    assert_drawn(trace, tmp_path)


def test_long_texts_are_averaged_into_bins(tiny, tmp_path):
    trace, _, steps, _ = traced(tiny, SMALL, [prompt(930), prompt(40, 1)], 20)
    (column, *_), length = trace.rows[0].columns, steps[0].rows[0].length
    assert trace.width == -(-950 // BINS) == 3 and len(column) == -(-950 // 3)
    held = trace.rows[0].columns[0].nan_to_num() * 3
    shown = SMALL.n_sink + SMALL.n_select + length - SMALL.recent_start(length)
    assert held.sum().item() == pytest.approx(shown, abs=1e-3)
    for name in ("memory.png", "memory.svg", "memory.pdf"):
        plot(trace, ["one", "two"], tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5000


def test_tracing_changes_nothing(tiny):
    _, _, steps, _ = traced(tiny, SMALL, [prompt(60), prompt(20)], 30)
    engine = Engine(tiny, SMALL, token_text, batch=2, max_length=90, new_tokens=30)
    assert list(decode(engine, [prompt(60), prompt(20)], max_new_tokens=30)) == steps
