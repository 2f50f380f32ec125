"""`bench.py --exact`: what a token costs in exact mode, by how often drafts are right, and in dense decoding.

Weights and cache are random, so whether a draft is right is drawn: at one chance for all, or by classes of
lead as `exactness.py` saw them on a real model.  All else is exact mode's own: the rule that ends a draft,
fast steps, the pass over all drafts, the refresh.  A dense step is timed in every round.  Tokens are counted
as their mean over the draws, given how long the drafts were.  Read before: `bench.py`, `exact.py`."""

import json
import random
import statistics
import time
from functools import partial
from itertools import accumulate
from operator import mul
from pathlib import Path

from tqdm import tqdm

from command.timing import dense_step
from exact import LEADS, SEEN, Speculation, prices, seconds
from sampling import GREEDY
from sfi import Engine, SFIConfig
from study.steps import filled, fits
from trigger import Row

CHANCES = (0.7, 0.8, 0.9, 0.95, 0.99)
PASSES = (1, 4, 8, 16, 17, 24)  # tokens of the passes whose cost is printed
SURE = 1000.0  # drafts that the chances count for, so that the rule knows them


def chances(path: Path | None) -> dict[str, tuple[list[float], list[float]]]:
    """By name: how often a draft is of each class of lead, and the chance that it is right."""
    found = {f"{a:.2f}": ([1.0] * len(SEEN), [a] * len(SEEN)) for a in CHANCES}
    if path:
        try:
            rows = [
                row
                for row in json.loads(path.read_text(encoding="utf-8"))["rows"]
                if len(row["seen"]) == len(SEEN)
            ]
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path} is not what exactness.py writes; run it again with --out") from None
        for n in dict.fromkeys(row["n_select"] for row in rows):
            some = [row for row in rows if row["n_select"] == n]
            seen, right = (
                [sum(c) for c in zip(*(r[k] for r in some), strict=True)] for k in ("seen", "right")
            )
            found[f"N = {n}"] = seen, [(r + 1) / (s + 2) for r, s in zip(right, seen, strict=True)]
    return found


class Drawn(Speculation):
    """Exact mode of one row whose drafts are right by chance; `story` are the tokens it makes."""

    def __init__(self, engine: Engine, shares: list[float], right: list[float], story: list[int]):
        super().__init__(engine, GREEDY)
        self.shares, self.right, self.story, self.rng = shares, right, story, random.Random(0)
        self.expected = 1.0  # tokens that the last pass makes on average, over all draws
        drafts = self.drafts[0]
        drafts.seen = [SURE * share / sum(shares) + 1 for share in shares]
        drafts.right = [chance * seen for chance, seen in zip(right, drafts.seen, strict=True)]

    def draw(self, logits, places):
        super().draw(logits, places)
        drafts, (_, position) = self.drafts[0], places[-1]
        self.expected = 1.0 + sum(accumulate((self.right[i] for i in drafts.classes), mul))
        token = self.story[position % len(self.story)]
        if len(places) > 1:
            wrong = [self.rng.random() > self.right[i] for i in drafts.classes]
            picked = [token + bad for token, bad in zip(drafts.tokens[1:], wrong, strict=True)]
            return [*picked, token], [0.0] * len(places)
        i = self.rng.choices(range(len(self.shares)), self.shares)[0]
        return [token], [(0.0, *LEADS)[i]]


def measure(engine: Engine, shares, right, story: list[int], rounds: int) -> dict:
    """Time so many rounds of a row that was just filled, and a dense step in each; milliseconds."""
    model, context = engine.model, engine.rows[0].length
    drawn, token, drafted = Drawn(engine, shares, right, story), story[0], 0
    times, seen = {"dense": [], "fast": [], "pass": []}, []
    made, spent = [], []  # by every round: tokens, seconds

    def step():
        nonlocal token, did, certain
        (certain,), (did,), (token,) = drawn.step([token], [engine.max_length])

    for i in range(rounds + 1):
        did, certain, took = None, [], []
        while not certain:
            took.append(seconds(step, model.device))
            seen += [did.visible] if did.reason == "fast" else []
        dense = seconds(lambda: dense_step(engine, [engine.rows[0].length]), model.device)
        if i == 0:  # warm-up, and the first refresh
            seen.clear()
            continue
        times["dense"].append(dense)
        times["fast"] += took[:-1]
        times["pass"].append(took[-1])
        made.append(drawn.expected)
        spent.append(sum(took))
        drafted += did.drafted
    median = {f"{name}_ms": 1e3 * statistics.median(t) if t else None for name, t in times.items()}
    weights, kv = model.weight_bytes(model.dtype, 1)[1], model.config.kv_bytes(model.dtype)
    bytes_ = (drafted + rounds) * weights + (sum(seen) + rounds * context) * kv
    return {
        "context": context,
        **median,
        "drafts_per_pass": drafted / rounds,
        "tokens_per_pass": sum(made) / rounds,
        "ms_per_token": 1e3 * sum(spent) / sum(made),
        "speedup": sum(made) * statistics.median(times["dense"]) / sum(spent),
        "byte_speedup": sum(made) * (weights + context * kv) / bytes_,
        "quartiles_ms": {
            name: [round(1e3 * q, 1) for q in statistics.quantiles(t, n=4)]
            for name, t in times.items()
            if len(t) > 1
        },
        "rounds": [(round(n, 2), round(1e3 * s)) for n, s in zip(made, spent, strict=True)],  # tokens, ms
    }


def pass_costs(engine: Engine, story: list[int]) -> dict[int, float]:
    """Dense steps that a pass of T tokens of a full row costs that also selects, by T: medians of five.

    `exact.prices` finds them in less than a second, from one layer; these are of the whole model.
    """
    length, device = engine.rows[0].length, engine.model.device
    times = {T: [] for T in (0, *PASSES)}  # 0: a dense step

    def step(T):
        if T:
            engine.dense_pass(0, story[:T], "doubt", n_logits=T, drafted=T - 1)
        else:
            dense_step(engine, [length])

    for i in range(6):
        for T in times:
            took = seconds(partial(step, T), device)
            engine.cut(0, length)
            times[T] += [took] if i else []  # the first is a warm-up
    median = {T: statistics.median(t) for T, t in times.items()}
    return {T: median[T] / median[0] for T in PASSES}


def rows(model, contexts, all_drawn: dict, story: list[int], token_text, ops, rounds: int):
    """Print the table row by row, and yield the rows."""
    columns = ("dense_ms", "fast_ms", "pass_ms", "drafts_per_pass", "tokens_per_pass", "ms_per_token")
    columns += ("speedup", "byte_speedup")
    print(f"{'context':>9}{'right':>10}" + "".join(f"{name.replace('_per_', '/'):>15}" for name in columns))
    cfg = SFIConfig(exact=True)
    for context in contexts:
        new = (rounds + 1) * (cfg.max_interval + 2)
        if not fits(model, cfg, context, 1, new):
            continue
        sizes = dict(max_length=context + new, new_tokens=new)
        engine = filled(Engine(model, cfg, token_text, ops=ops, **sizes), context)
        costs = pass_costs(engine, story)
        cells = ", ".join(f"{T}: {cost:.2f}" for T, cost in costs.items())
        print(f"{context:9} a pass of so many tokens costs dense steps: {cells}")
        began = time.perf_counter()
        p = prices(engine, 0)
        found = ", ".join(f"{T - 1}: {p[T - 1]:.2f}" for T in PASSES)
        print(f"{context:9} a round of so many drafts, found in {time.perf_counter() - began:.2f} s: {found}")
        for name, chance in tqdm(all_drawn.items(), leave=False, disable=None):
            engine.rows = [Row([0] * context)]
            engine.cache.past.zero_()
            r = measure(engine, *chance, story, rounds)
            cells = [f"{'' if r[c] is None else format(r[c], '.2f'):>15}" for c in columns]
            print(f"{context:9}{name:>10}" + "".join(cells), flush=True)
            yield {"right": name, **r, "pass_costs": costs, "prices": p}
