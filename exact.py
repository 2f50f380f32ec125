"""Exact mode: the tokens of dense decoding, from fast steps that draft and dense passes that check.

A round: m fast steps draft d_1 .. d_m after the last certain token t; one dense pass over the T = m + 1
tokens [t, d_1 .. d_m] gives, at each, the token that dense decoding picks next.  The longest prefix on which
it agrees with the drafts is accepted, and its own token after that, so a round makes 1 to m + 1 tokens, all
of them dense decoding's.  Draft and dense use the same noise at a place (`sampling.noise`), so they can agree
at any temperature.  The pass is a slow step too: its queries choose the next memory.  This is speculative
decoding (arXiv 2211.17192) in which the model drafts for itself; SparseSpec (2512.01278) and Vegas
(2602.07223) also select from the checking pass.  This file decides how long to draft; the rest is in
`sfi.Engine`.

How long.  With a dense step as the unit, let a fast step cost f, a pass of one token that also selects b, and
every further token of it c.  A round of m drafts, each right with chance a if those before are, costs b + m
(f + c) and makes 1 + a + .. + a^m = (1 - a^(m+1)) / (1 - a) tokens.  The best m maximises the ratio r of
tokens to cost, and there one more draft adds no more than it costs: a^(m+1) <= r (f + c).  No m with r > 1:
dense steps are cheaper.  Chances differ from place to place, and the drafts know: a token that was far ahead
of the second best is rarely wrong.  So a row drafts on while

    P(all drafts so far are right) * (mean chance of a draft)  >  r * (f + c),

with chances from what has been seen of this row, and the larger of two r: what its rounds reached, and the
best that one mean chance would allow.  A row that stays dense sees no drafts, so it slowly forgets and tries
again.  Bytes give f; b and c were measured once for each kind of device.  So lengths do not depend on how
busy a machine is.  Read before: `sfi.py`."""

from dataclasses import dataclass, field
from itertools import accumulate

LEADS = (0.25, 0.5, 1.0, 2.0, 4.0)  # logits between best and second best: the bounds of six classes
# Drafts of each class, and how many of them were right, before any are seen: SmolLM2's, see RESULTS.md.
SEEN = (2.0, 1.7, 2.8, 3.9, 5.1, 8.5)
RIGHT = tuple(n * chance for n, chance in zip(SEEN, (0.73, 0.88, 0.94, 0.97, 0.995, 0.999), strict=True))
# b and c: measured on a CPU, where it has to widen what it reads ("narrow") too; on a GPU an estimate.
PASS = {"cpu": (1.35, 0.12), "narrow cpu": (2.0, 0.2), "cuda": (1.05, 0.01)}
APART = 1.6  # dense steps more on a CPU, once a pass has more tokens than evidence: scores are computed apart
FORGET = 1 / 256  # of what was seen, with each dense step that no draft preceded


@dataclass
class Drafts:
    """What one row has fed since its last dense pass, and how often dense decoding has agreed so far."""

    fed: list = field(default_factory=list)  # (token, trigger state after it): a certain token, then drafts
    classes: list = field(default_factory=list)  # of the drafts, by lead
    chance: float = 1.0  # that all drafts are right
    cost: float = 1.0  # of one more draft, f + c
    spent_now: float = 1.0  # by this round, in dense steps
    right: list = field(default_factory=lambda: list(RIGHT))  # per class
    seen: list = field(default_factory=lambda: list(SEEN))
    rate: float = 1.0  # r of this round
    made: float = 1.0  # tokens, and dense steps' worth of time, of all rounds
    spent: float = 1.0

    def clear(self):
        """A new round."""
        self.fed, self.classes, self.chance = [], [], 1.0

    def add(self, lead: float):
        """A fast step has drafted a token, `lead` logits ahead of the second best."""
        i = sum(lead >= bound for bound in LEADS)
        self.classes.append(i)
        self.spent_now += self.cost
        self.chance *= self.right[i] / self.seen[i]

    def enough(self, token: int, armed: str, base: float, cost: float) -> bool:
        """Take in a token that is fed next, `armed` the trigger's state after it, and decide whether its pass
        must be dense, rather than a fast step that drafts another token; base is b, cost f + c.  Nothing
        drafted yet: whether drafts cannot pay.
        """
        self.fed.append((token, armed))
        self.cost, mean = cost, sum(self.right) / sum(self.seen)
        if not self.classes:
            self.spent_now = base
            made = accumulate(mean**m for m in range(65))  # by a round of m = 0, 1, .. drafts
            best = max(tokens / (base + m * cost) for m, tokens in enumerate(made))
            self.rate = max(best, self.made / self.spent)
            if best <= 1:
                toward = lambda now, first: [x + FORGET * (y - x) for x, y in zip(now, first, strict=True)]
                self.right, self.seen = toward(self.right, RIGHT), toward(self.seen, SEEN)
            return best <= 1
        return self.chance * mean <= self.rate * cost

    @property
    def tokens(self) -> list[int]:
        """What the next dense pass is fed."""
        return [token for token, _ in self.fed]

    def check(self, picked: list[int]) -> int:
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
        self.spent += self.spent_now
        return accepted
