"""Exact mode: the tokens of dense decoding, from fast steps that draft and dense passes that check.

A round: m fast steps draft d_1 .. d_m after the last certain token t; one dense pass over the T = m + 1
tokens [t, d_1 .. d_m] gives, at each, the token that dense decoding picks next.  The longest prefix on which
it agrees with the drafts is accepted, and its own token after that, so a round makes 1 to m + 1 tokens, all
of them dense decoding's.  Draft and dense use the same noise at a place (`sampling.noise`), so they can agree
at any temperature.  The pass is a slow step too: its queries choose the next memory.  This is speculative
decoding (arXiv 2211.17192) in which the model drafts for itself; SparseSpec (2512.01278) and Vegas
(2602.07223) also select from the checking pass.  This file decides how long to draft; the rest is in
`sfi.Engine`.

How long.  With a dense step as the unit, let a fast step cost f and every further token of a pass c.  A round
of m drafts, each right with chance a if those before are, costs 1 + m (f + c) and makes 1 + a + .. + a^m = (1
- a^(m+1)) / (1 - a) tokens.  The best m maximises the ratio r of the two, and there one more draft would add
no more than it costs: a^(m+1) <= r (f + c).  Chances differ from place to place, and the drafts know: a token
that was far ahead of the second best is rarely wrong.  So a row drafts on while

    P(all drafts so far are right) * (mean chance of a draft)  >  r * (f + c),

with chances and r from what has been seen of this row.  Bytes give f, whatever the machine, so that the same
run drafts the same lengths; c is measured.  Read before: `sfi.py`.
"""

from dataclasses import dataclass, field

LEADS = (0.25, 0.5, 1.0, 2.0, 4.0)  # logits between best and second best: the bounds of six classes
FIRST = (0.55, 0.75, 0.8, 0.9, 0.98, 0.995)  # chance of a class before anything was seen
WEIGHT = 4  # drafts that FIRST counts for
PASS = {"cpu": 0.17, "cuda": 0.01}  # c: on a CPU measured (RESULTS.md), on a GPU an estimate


@dataclass
class Drafts:
    """What one row has fed since its last dense pass, and how often dense decoding has agreed so far."""

    fed: list = field(default_factory=list)  # (token, trigger state after it): a certain token, then drafts
    classes: list = field(default_factory=list)  # of the drafts, by lead
    chance: float = 1.0  # that all drafts are right
    cost: float = 1.0  # of one more draft, f + c
    right: list = field(default_factory=lambda: [WEIGHT * chance for chance in FIRST])  # per class
    seen: list = field(default_factory=lambda: [float(WEIGHT) for _ in FIRST])
    made: float = 1.0  # tokens, and dense steps' worth of time: r is their ratio
    spent: float = 1.0

    def clear(self):
        self.fed, self.classes, self.chance = [], [], 1.0

    def add(self, lead: float):
        """A fast step has drafted a token, `lead` logits ahead of the second best."""
        i = sum(lead >= bound for bound in LEADS)
        self.classes.append(i)
        self.chance *= self.right[i] / self.seen[i]

    def enough(self, token: int, armed: str, draft_cost: float) -> bool:
        """Take in a token that is fed next, `armed` the trigger's state after it, and decide whether its pass
        must be dense, rather than a fast step that drafts another token at f + c = draft_cost.  Nothing
        drafted yet: whether drafts cannot pay.
        """
        self.fed.append((token, armed))
        self.cost = draft_cost
        mean = sum(self.right) / sum(self.seen)
        rate = max(self.made / self.spent, 1.0) if self.classes else 1.0
        return self.chance * mean <= rate * draft_cost

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
        self.spent += 1 + len(drafts) * self.cost
        return accepted
