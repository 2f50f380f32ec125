"""Exact mode: the tokens of dense decoding, from fast steps that draft and dense passes that verify.

A round: m fast steps draft d_1 .. d_m after the last certain token t; one dense pass over the T = m + 1
tokens [t, d_1 .. d_m] gives, at each, the token that dense decoding picks next.  The longest prefix on which
it agrees with the drafts is accepted, and its own token after that; the rest is rolled back.  So a round
makes 1 to m + 1 tokens, all of them dense decoding's.  (The keys and values that fast steps cached are
approximate: they are dropped before the pass, which writes them anew.  Wrong drafts' queries count in the
selection.)  Draft and dense use the same noise at a place (`sampling.noise`), so they can agree at any
temperature.  The pass is a slow step too: its queries choose the next memory.  This is speculative decoding
(arXiv 2211.17192) in which the model drafts for itself; SparseSpec (2512.01278) and Vegas (2602.07223) also
select from the verifying pass.

How long to draft.  With a dense step as the unit, let a round of m drafts cost p(m): m fast steps, and the
pass over m + 1 tokens that also selects.  If each draft is right with chance a, given that those before are,
the round makes 1 + a + .. + a^m tokens.  The best m maximises the ratio r of tokens to cost, and there one
more draft adds no more than it costs: a^(m+1) <= r (p(m+1) - p(m)).  If no m gives r > 1, the row makes dense
steps.  Chances differ from place to place, and the drafts know: a token that was far ahead of the second best
is rarely wrong.  So a row drafts on while

    P(all drafts so far are right) * (mean chance of a draft)  >  r * (p(m+1) - p(m)),

with chances from what has been seen of this row, and the larger of two r: what its rounds reached, and the
best that one mean chance would allow.  A row that stays dense sees no drafts, so it slowly forgets and tries
again.  `prices` measures p at a decode's first step, so from run to run a round may be longer or shorter; the
tokens are the same.  Read before: `sfi.py`, whose `decode` calls `Speculation.step`.
"""

import math
import time
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, cycle

import numpy as np
import torch

from sampling import draw

LEADS = (0.25, 0.5, 1.0, 2.0, 4.0)  # logits between best and second best: the bounds of six classes
# Drafts of each class, and how many of them were right, before any are seen: SmolLM2's, see study/RESULTS.md.
SEEN = (2.0, 1.7, 2.8, 3.9, 5.1, 8.5)
RIGHT = tuple(n * chance for n, chance in zip(SEEN, (0.73, 0.88, 0.94, 0.97, 0.995, 0.999), strict=True))
TIMED = (1, 8, 16, 25)  # tokens of the passes that are timed; prices between and beyond lie on lines
MOST = 64  # drafts of a round
FORGET = 1 / 256  # of what was seen, with each dense step that no draft preceded


@dataclass
class Drafts:
    """What one row has fed since its last dense pass, and how often dense decoding has agreed so far."""

    fed: list = field(default_factory=list)  # (token, trigger after it): a certain token, then drafts
    classes: list = field(default_factory=list)  # of the drafts, by lead
    chance: float = 1.0  # that all drafts are right
    cost: float = 1.0  # p of this round so far, in dense steps
    right: list = field(default_factory=lambda: list(RIGHT))  # per class
    seen: list = field(default_factory=lambda: list(SEEN))
    rate: float = 1.0  # r of this round
    made: float = 1.0  # tokens, and dense steps' worth of time, of all rounds
    spent: float = 1.0

    def start_round(self):
        self.fed, self.classes, self.chance = [], [], 1.0

    def add(self, lead: float):
        """A fast step has drafted a token, `lead` logits ahead of the second best."""
        i = sum(lead >= bound for bound in LEADS)
        self.classes.append(i)
        self.chance *= self.right[i] / self.seen[i]

    def should_verify(self, token: int, trigger, prices: list[float]) -> bool:
        """Take in a token that is fed next, with the trigger after it, and decide whether its pass
        must be dense, rather than a fast step that drafts another token; prices are p(0), p(1), ..  Nothing
        drafted yet: whether drafts cannot pay.
        """
        self.fed.append((token, trigger))
        m, mean = len(self.classes), sum(self.right) / sum(self.seen)
        self.cost = prices[m]
        if m:
            return m == MOST or self.chance * mean <= self.rate * (prices[m + 1] - prices[m])
        made = accumulate(mean**i for i in range(MOST + 1))  # by a round of so many drafts
        best = max(tokens / p for tokens, p in zip(made, prices, strict=True))
        self.rate = max(best, self.made / self.spent)
        if best <= 1:
            toward = lambda now, first: [x + FORGET * (y - x) for x, y in zip(now, first, strict=True)]
            self.right, self.seen = toward(self.right, RIGHT), toward(self.seen, SEEN)
        return best <= 1

    @property
    def tokens(self) -> list[int]:
        """What the verifying pass is fed."""
        return [token for token, _ in self.fed]

    def accept(self, picked: list[int]) -> int:
        """How many drafts dense decoding accepts, given the T = m + 1 tokens it picks; learns from it."""
        drafts = self.tokens[1:]
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == picked[accepted]:
            accepted += 1
        for i in self.classes[: accepted + 1]:  # of those after a wrong one nothing is known
            self.seen[i] += 1
        for i in self.classes[:accepted]:
            self.right[i] += 1
        self.made += accepted + 1
        self.spent += self.cost
        return accepted


class Speculation:
    """Exact mode's steps of a decode: each row drafts with fast steps and verifies on its own."""

    def __init__(self, engine, sampling, stop_ids=()):
        self.engine, self.sampling, self.stop_ids = engine, sampling, stop_ids
        self.drafts = [Drafts() for _ in engine.rows]
        self.timed = {}  # by the length of a row at which they were measured: its prices

    def step(self, tokens: list[int | None], left: list[int]):
        """Feed a token to every row (None: it has ended), of which `left` tokens may still be made.

        Returns the tokens of each row that are now certain (none where it drafts), what each row did, and the
        token that each is fed next: after a fast step the draft.
        """
        engine = self.engine
        reasons = [self.next_reason(b, token, left[b]) for b, token in enumerate(tokens)]
        slow = [b for b, reason in enumerate(reasons) if reason not in ("fast", "ended")]
        verifying = [b for b in slow if engine.rows[b].unverified]
        together = ["ended" if b in verifying else reason for b, reason in enumerate(reasons)]
        engine.passes.clear()
        logits, did = [None] * len(tokens), [engine.plan(b, "ended") for b in range(len(tokens))]
        if set(together) != {"ended"}:
            joint, did = engine.feed(tokens, together)
            logits = list(joint[:, None])  # (1, V) a row
        for b, checked in self.verify(verifying, reasons).items():
            logits[b], did[b] = checked
        certain, fed = [[] for _ in tokens], [None] * len(tokens)
        for b, (picked, leads) in self.pick(logits, did).items():
            if did[b].reason == "fast":
                self.add_draft(b, leads[0])
            elif did[b].drafted:
                did[b] = did[b]._replace(accepted=self.roll_back(b, picked))
            fed[b] = picked[did[b].accepted]
            certain[b] = [] if did[b].reason == "fast" else picked[: did[b].accepted + 1]
        return certain, did, fed

    def next_reason(self, b: int, token: int | None, left: int) -> str:
        """What the step that feeds row b a token is, as the engine says; a row also verifies where a further
        draft would not pay ("doubt") and where the text may end ("end"), which no draft may decide.
        """
        reason, row, drafts = self.engine.next_reason(b, token), self.engine.rows[b], self.drafts[b]
        if reason in ("ended", "short"):
            return reason
        if not row.unverified:
            drafts.start_round()
        doubt = drafts.should_verify(token, row.trigger, self.prices(b))
        if doubt and not row.unverified:
            return "dense"
        if reason != "fast":
            return reason
        # A pass now makes up to unverified + 1 tokens, which may be all that may still come.
        may_end = row.unverified + 1 >= left or (row.unverified and token in self.stop_ids)
        return "doubt" if doubt else "end" if may_end else "fast"

    def verify(self, rows: list[int], reasons: list[str]) -> dict:
        """The dense pass over what these rows have fed since their last one, which reads the weights once for
        all of them: by row, logits (m + 1, V) and what it did.
        """
        engine, fed, plans = self.engine, {b: self.drafts[b].tokens for b in rows}, {}
        for b, tokens in fed.items():
            m = len(tokens) - 1
            engine.cut(b, engine.rows[b].length - m)  # drop their keys and values; the pass writes them anew
            plans[b] = engine.dense_plan(b, m + 1, reasons[b], drafted=m)
        logits = engine.run_joined(fed, plans) if fed else {}
        return {b: (logits[b], engine.record(engine.rows[b], plans[b], fed[b])) for b in rows}

    def pick(self, logits: list, did: list) -> dict:
        """The tokens picked by each live row's pass, one for each token that it fed, with their leads."""
        live = [b for b, row_step in enumerate(did) if row_step.reason != "ended"]
        length = lambda b: self.engine.rows[b].length
        places = [(b, length(b) - i) for b in live for i in range(did[b].drafted, -1, -1)]
        tokens, leads = self.draw(torch.cat([logits[b] for b in live]), places)
        picked, i = {}, 0
        for b in live:
            j = i + did[b].drafted + 1
            picked[b], i = (tokens[i:j], leads[i:j]), j
        return picked

    def draw(self, logits, places):
        return draw(logits, places, self.sampling, leads=True)

    def add_draft(self, b: int, lead: float):
        """A fast step of row b has drafted a token, `lead` logits ahead of the second best."""
        self.engine.rows[b].unverified += 1
        self.drafts[b].add(lead)

    def roll_back(self, b: int, picked) -> int:
        """Cut row b back to the drafts with which the picked tokens agree; returns how many."""
        row, drafts = self.engine.rows[b], self.drafts[b]
        accepted = drafts.accept(picked)
        self.engine.cut(b, row.length - (len(picked) - 1 - accepted))
        _, row.trigger = drafts.fed[accepted]
        return accepted

    def prices(self, b: int) -> list[float]:
        """p(0), p(1), .. of row b at about its length."""
        if (cost := self.engine.cfg.draft_cost) is not None:
            return [1 + m * cost for m in range(MOST + 1)]
        n = self.engine.rows[b].length
        about = next((length for length in self.timed if length / 1.25 <= n <= length * 1.25), None)
        if about is None:
            self.timed[n], about = prices(self.engine, b), n
        return self.timed[about]


def prices(engine, b: int) -> list[float]:
    """What a round of 0, 1, .. MOST drafts of row b costs, in dense steps: m fast steps, and the pass over
    m + 1 tokens that also selects.  A row shares fast and dense steps with its batch.
    """
    cfg, n = engine.cfg, engine.rows[b].length
    kinds = ["dense" if row.length < engine.max_length else "ended" for row in engine.rows]
    dense = [engine.plan(i, kind) for i, kind in enumerate(kinds)]
    memory = cfg.n_sink + cfg.budget + cfg.n_recent
    fast = [plan._replace(start=0, visible=min(memory, plan.visible)) for plan in dense]
    most = min(cfg.max_interval + 1, engine.max_length - n)  # tokens for which the memory has room
    sizes = sorted({min(T, most) for T in TIMED})
    checks = [(b, [engine.dense_plan(b, T, "doubt", drafted=T - 1)], T) for T in sizes]
    step, draft, *check = pass_seconds(engine, b, [(0, dense, 1), (0, fast, 1), *checks])
    step, draft = step / kinds.count("dense"), draft / kinds.count("dense")
    check = np.maximum.accumulate(check)
    slope = (check[-1] - check[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else check[0]
    check, sizes = [*check, check[-1] + slope * (MOST + 1 - sizes[-1])], [*sizes, MOST + 1]
    m = np.arange(MOST + 1)
    return ((m * draft + np.interp(m + 1, sizes, check)) / step).tolist()


def pass_seconds(engine, b: int, passes: list) -> list[float]:
    """Seconds of each of some passes (first row, what its rows do, tokens), the least of several times.

    Where steps are captured, of the whole model; else the head and a layer are timed, so that it takes less
    than a second: each time another layer, which no cache of the processor holds.  All is put back as it was.
    """
    cache, config, device = engine.cache, engine.model.config, engine.model.device
    L, whole = config.num_hidden_layers, engine.capture is not None
    layers = cycle([i for i in range(L) if config.is_sparse(i)] or range(L))
    least, heads, began = [math.inf] * len(passes), {}, time.perf_counter()
    for _ in range(6):
        for j, (first, plans, T) in enumerate(passes):
            i, size = next(layers), (len(plans), T)
            some = slice(None) if whole else slice(i, i + 1)
            touched = [cache.past[some, b], *(x[some, b, :, : cache.cap] for x in (cache.k, cache.v))]
            kept = [x.clone() for x in touched]
            fed = [(row.tokens[-T:] * T)[-T:] for row in engine.rows[first : first + len(plans)]]
            work = partial(engine.run, first, fed, plans, T * whole, some)
            least[j] = min(least[j], seconds(work, device))
            if size not in heads:
                work = partial(engine.run, first, fed, plans, T, slice(0, 0))
                heads[size] = 0.0 if whole else seconds(work, device)
            cache.schedule.wait_for_all()
            for x, was in zip(touched, kept, strict=True):
                x.copy_(was)
        if time.perf_counter() - began > 0.6:
            break
    heads = [heads[len(plans), T] for _, plans, T in passes]
    return [(1 if whole else L) * t + head for t, head in zip(least, heads, strict=True)]


def seconds(work, device: torch.device) -> float:
    """How long work() takes, the device's queued work included."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    began = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - began
