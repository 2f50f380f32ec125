"""When is a step slow?  Mostly when a sentence has said what it is about.

The paper makes the slow step at a sentence's first token.  Its one query does not know yet what the sentence
will need; once a subject is named, the same step finds it (study/RESULTS.md).  So here the slow step comes
with the first word after a name or a number; a sentence that has named nothing after `delay` tokens gets one
there too.  A delay of 0 is the paper's rule.  Pure functions of the tokens' texts, for any tokenizer.  Read
before: `memory.py`; next: `sfi.py`.
"""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

SLOW_REASONS = ("dense", "short", "first", "sentence", "interval", "doubt", "end")

CLOSERS = r"""["'”’»›\)\]\}）］｝】〕」』》〉]"""
ENDED = re.compile(rf"([.?!…。？！])(?:{CLOSERS}|\s)*\Z")
ONLY_CLOSERS = re.compile(rf"(?:{CLOSERS}|\s)*\Z")


def advance(armed: str, text: str) -> tuple[str, bool]:
    """Read one generated token's text: (armed, starts), whether it starts a new sentence.

    `armed` is "no", "space" (a sentence has ended; white space must come next) or "ready" (a new one may
    start).  A start whose first letter is lower-case is none ("e.g. the").  An ender split over several byte
    tokens is not seen.
    """
    if ended := ENDED.search(text):
        return ("ready" if text[-1].isspace() or ended[1] in "。？！" else "space"), False
    if armed != "no" and ONLY_CLOSERS.match(text):
        return ("ready" if re.search(r"\s", text) else armed), False
    if armed == "ready" or (armed == "space" and text[:1].isspace()):
        letter = next((c for c in text if c.isalpha()), "")
        return "no", not letter.islower()
    return "no", False


class Trigger(NamedTuple):
    """Where a row stands in its sentence."""

    armed: str = "no"  # see `advance`
    place: int = -1  # tokens since the sentence's first; -1: nothing more is waited for
    named: bool = False  # whether it has named something


def look(trigger: Trigger, text: str, delay: int) -> tuple[Trigger, bool]:
    """Read one generated token's text: (the trigger after it, whether its step should look at everything).

    That is with the first new word after the sentence's first name (a word with a capital, its first token
    apart) or number; and also `delay` tokens after its start, if it has named nothing before.
    """
    armed, starts = advance(trigger.armed, text)
    place = 0 if starts else trigger.place + 1 if trigger.place >= 0 else -1
    word = text.lstrip()
    after_name = trigger.named and text[:1].isspace() and not word[:1].isupper()
    if place > 0 and after_name:
        return Trigger(armed), True
    named = place > 0 and (trigger.named or word[:1].isupper() or word[:1].isdigit())
    return Trigger(armed, place if delay else -1, named), place == delay


@dataclass
class Row:
    """State of one sequence."""

    tokens: list = field(default_factory=list)  # those in the full cache
    memory: int = 0  # tokens in the compact memory; 0: it has none, so every step is dense
    recent_start: int = 0  # position where the memory's recent window starts
    trigger: Trigger = field(default_factory=Trigger)
    since: int = 0  # fast steps since the last dense pass (policy window: since the last re-anchoring)
    unverified: int = 0  # exact mode: how many of the last tokens only fast steps have read

    @property
    def length(self) -> int:
        """Tokens in the full cache."""
        return len(self.tokens)


def decide(row: Row, cfg, text: str) -> tuple[Trigger, str]:
    """What the step that feeds a token of this text to a row is: (the trigger's new state, the reason).

    cfg is a `sfi.SFIConfig`.  The reason is one of SLOW_REASONS, or "fast", or "re-anchor": fast, after sinks
    and window have been copied anew from the cache (policy window).
    """
    trigger, looks = look(row.trigger, text, cfg.delay)
    length = row.length + (cfg.policy != "window")  # which copies its memory before this token is cached
    if cfg.policy == "dense":
        return trigger, "dense"
    if not row.memory and cfg.candidates(length) <= cfg.budget:
        return trigger, "short"
    if cfg.policy == "window":
        return trigger, "fast" if row.memory and row.since < cfg.max_interval else "re-anchor"
    if not row.memory:
        return trigger, "first"
    if cfg.policy == "sentence" and looks and row.since >= cfg.min_gap:
        return trigger, "sentence"
    if cfg.policy != "never" and row.since >= cfg.max_interval:
        return trigger, "interval"
    return trigger, "fast"
