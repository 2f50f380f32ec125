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

How long to draft.  With a dense step as the unit, let a fast step cost f, a pass of one token that also
selects b, and every further token of it c.  A round of m drafts, each right with chance a if those before
are, costs b + m (f + c) and makes 1 + a + .. + a^m = (1 - a^(m+1)) / (1 - a) tokens.  The best m maximises
the ratio r of tokens to cost, and there one more draft adds no more than it costs: a^(m+1) <= r (f + c).
If no m gives r > 1, the row makes dense steps.  Chances differ from place to place, and the drafts know: a
token that was far ahead of the second best is rarely wrong.  So a row drafts on while

    P(all drafts so far are right) * (mean chance of a draft)  >  r * (f + c),

with chances from what has been seen of this row, and the larger of two r: what its rounds reached, and the
best that one mean chance would allow.  A row that stays dense sees no drafts, so it slowly forgets and tries
again.  Bytes give f; b and c were measured once for each kind of device.  So lengths do not depend on how
busy a machine is.  Read before: `sfi.py`, whose `decode` calls `Speculation.step`.
"""

from dataclasses import dataclass, field
from itertools import accumulate

import torch

from cpu import CPU_HAS_BF16
from sampling import draw

LEADS = (0.25, 0.5, 1.0, 2.0, 4.0)  # logits between best and second best: the bounds of six classes
# Drafts of each class, and how many of them were right, before any are seen: SmolLM2's, see study/RESULTS.md.
SEEN = (2.0, 1.7, 2.8, 3.9, 5.1, 8.5)
RIGHT = tuple(n * chance for n, chance in zip(SEEN, (0.73, 0.88, 0.94, 0.97, 0.995, 0.999), strict=True))
# b and c: measured on a CPU, also where it must widen half precision; on a GPU an estimate.
PASS_COST = {"cpu": (1.35, 0.12), "cpu, half precision": (2.0, 0.2), "cuda": (1.05, 0.01)}
# Dense steps more for a draft that makes a pass longer than its evidence, on a CPU, where scores then come
# apart from attention: more than any draft is worth, so a round ends there.
LONG_PASS_COST = 1.6
FORGET = 1 / 256  # of what was seen, with each dense step that no draft preceded


@dataclass
class Drafts:
    """What one row has fed since its last dense pass, and how often dense decoding has agreed so far."""

    fed: list = field(default_factory=list)  # (token, trigger after it): a certain token, then drafts
    classes: list = field(default_factory=list)  # of the drafts, by lead
    chance: float = 1.0  # that all drafts are right
    cost: float = 1.0  # of one more draft, f + c
    round_cost: float = 1.0  # of this round so far, in dense steps
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
        self.round_cost += self.cost
        self.chance *= self.right[i] / self.seen[i]

    def should_verify(self, token: int, trigger, base: float, cost: float) -> bool:
        """Take in a token that is fed next, with the trigger after it, and decide whether its pass
        must be dense, rather than a fast step that drafts another token; base is b, cost f + c.  Nothing
        drafted yet: whether drafts cannot pay.
        """
        self.fed.append((token, trigger))
        self.cost, mean = cost, sum(self.right) / sum(self.seen)
        if self.classes:
            return self.chance * mean <= self.rate * cost
        self.round_cost = base
        made = accumulate(mean**m for m in range(65))  # by a round of m = 0, 1, .. drafts
        best = max(tokens / (base + m * cost) for m, tokens in enumerate(made))
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
        self.spent += self.round_cost
        return accepted


class Speculation:
    """Exact mode's steps of a decode: each row drafts with fast steps and verifies on its own."""

    def __init__(self, engine, sampling, stop_ids=()):
        self.engine, self.sampling, self.stop_ids = engine, sampling, stop_ids
        self.drafts = [Drafts() for _ in engine.rows]
        read = lambda tokens: engine.model.weight_bytes(engine.model.dtype, tokens)[1]
        batch = len(engine.rows)
        self.weights = read(batch) / batch  # bytes of weights that a step reads for a row
        self.weights_alone, self.weights_per_token = read(1), read(2) - read(1)  # in a pass of one row

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
        for b in verifying:  # each in a pass of its own
            logits[b], did[b] = self.verify(b, reasons[b])
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
        if token is None:
            return reason
        if not row.unverified:
            drafts.start_round()
        doubt = drafts.should_verify(token, row.trigger, *self.costs(b))
        if doubt and not row.unverified and reason != "short":
            return "dense"
        if reason != "fast":
            return reason
        # A pass now makes up to unverified + 1 tokens, which may be all that may still come.
        may_end = row.unverified + 1 >= left or (row.unverified and token in self.stop_ids)
        return "doubt" if doubt else "end" if may_end else "fast"

    def verify(self, b: int, reason: str):
        """The dense pass over what row b has fed since the last one: logits (m + 1, V), and what it did."""
        engine, fed = self.engine, self.drafts[b].tokens
        m = len(fed) - 1
        engine.cut(b, engine.rows[b].length - m)  # drop their keys and values; the pass writes them anew
        return engine.dense_pass(b, fed, reason, n_logits=m + 1, drafted=m)

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

    def costs(self, b: int) -> tuple[float, float]:
        """b and f + c of row b: a pass of one token, and one more draft with its place in a pass, in dense
        steps.  A row shares fast and dense steps with its batch, but its passes are its own, and of a
        mixture of experts every token may read others.
        """
        model, cfg, row = self.engine.model, self.engine.cfg, self.engine.rows[b]
        kind = model.device.type
        widened = kind == "cpu" and model.dtype != torch.float32 and not CPU_HAS_BF16
        base, per_token = PASS_COST["cpu, half precision" if widened else kind]
        cached = model.config.kv_bytes(model.dtype)
        memory = row.memory or cfg.n_sink + cfg.budget + cfg.n_recent
        dense = self.weights + row.length * cached  # bytes of a step
        alone = (self.weights_alone + row.length * cached) / dense
        if (cost := cfg.draft_cost) is None:
            cost = (self.weights + memory * cached + self.weights_per_token) / dense + per_token * alone
            if kind == "cpu" and row.unverified + 2 > cfg.n_evidence:
                cost += LONG_PASS_COST
        return base * alone, cost
