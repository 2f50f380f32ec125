"""Slow-Fast Inference: configuration, the decode engine and the decode loop.

The paper (arXiv 2603.12038) observes that within a sentence the tokens that attention really uses stay nearly
the same.  So most decode steps are *fast*: attention reads a compact memory, [sinks | selected | recent
window | tokens since the refresh].  Once a sentence has named something, or after max_interval fast steps,
one *slow* step does dense attention over everything, and its scores choose the next memory.  Nothing is
evicted: the full cache stays, so a later slow step can bring any token back.

Dense decoding, prompt chunks and slow steps are one operation, a dense pass; a slow step reads the last few
tokens anew, so that several queries choose.  A fast step is the same forward pass reading other slots.
`trigger.decide` says what a step is, `Engine.run` runs a pass as it is told, `decode` is the loop.  Letters:
see `model.py`.  Positions are absolute.  Read before: `trigger.py`; next: `exact.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch

from exact import Speculation
from memory import REFERENCE, SlowFastCache
from model import NotFinite
from sampling import GREEDY, draw, sound
from selector import FUSIONS, SELECTORS
from trigger import Row, Trigger, decide

POLICIES = ("sentence", "fixed", "never", "window", "dense")
WHEN = "when a step is slow: once a sentence, at a fixed period, never, never and with N = 0, always"


def option(default, help, choices=None):
    """A field of SFIConfig with the text that the command's --help shows."""
    return field(default=default, metadata={"help": help, "choices": choices})


def by_selector(name, help):
    """A field whose default goes with the selector; after __init__ it is a number."""
    defaults = [f"{selector.settings[name]} with {key}" for key, selector in SELECTORS.items()]
    return option(None, f"{help} (default: {', '.join(defaults)})")


@dataclass(frozen=True)
class SFIConfig:
    """The method's settings, lengths in tokens; ValueError for what makes no sense."""

    n_sink: int = option(4, "first tokens, always visible")
    n_select: int = option(1536, "N: tokens that each KV head selects at a refresh")
    n_recent: int = option(256, "last tokens visible at a refresh, at least")
    align: int = option(16, "the recent window starts at a multiple of this")
    max_interval: int | None = by_selector(
        "max_interval", "a slow step comes after so many fast ones at the latest"
    )
    delay: int | None = by_selector(
        "delay", "it comes after a sentence's first name; if there is none, so many tokens in"
    )
    min_gap: int | None = by_selector("min_gap", "but not before this many fast steps")
    reread: int | None = by_selector("reread", "last tokens that a slow step reads, the new one included")
    n_evidence: int | None = by_selector(
        "n_evidence", "last queries of a dense pass that decide the selection"
    )
    policy: str = option("sentence", WHEN, POLICIES)
    selector: str = option("follow", "how tokens are selected", tuple(SELECTORS))
    steps: tuple[str, ...] | None = option(None, "selector steps to run, such as past,heads; none given: all")
    fusion: str = option("arithmetic", "how selector `paper` joins evidence and prior", tuple(FUSIONS))
    exact: bool = option(
        False, "fast steps draft, slow steps verify: the tokens of dense decoding in float32"
    )
    draft_cost: float | None = option(
        None, "exact: what one more draft costs, in dense steps; none given: measured; 0: long drafts"
    )

    def __post_init__(self):
        least = dict(n_sink=0, n_select=0, n_recent=1, align=1)
        own = dict(max_interval=1, delay=0, min_gap=0, n_evidence=1, reread=1)
        for name, low in (least | own).items():
            value = getattr(self, name)
            if value is None and name in own:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ValueError(f"{name} = {value!r}; allowed is a whole number of tokens, {low} or more")
        for f in fields(self):
            if f.metadata["choices"] and getattr(self, f.name) not in f.metadata["choices"]:
                raise ValueError(
                    f"{f.name} = {getattr(self, f.name)!r}; allowed are {', '.join(f.metadata['choices'])}"
                )
        most = {"n_evidence": "n_recent", "reread": "n_recent", "min_gap": "max_interval"}
        for name, value in SELECTORS[self.selector].settings.items():
            if getattr(self, name) is None:
                at_most = getattr(self, most[name]) if name in most else value
                object.__setattr__(self, name, min(value, at_most))
        if self.steps is not None:
            object.__setattr__(self, "steps", tuple(self.steps))
            if unknown := set(self.steps) - set(known := SELECTORS[self.selector].steps):
                raise ValueError(
                    f"steps has {min(unknown)!r}; selector {self.selector} has {', '.join(known) or 'none'}"
                )
        if not isinstance(self.exact, bool):
            raise ValueError(f"exact = {self.exact!r}; allowed are True and False")
        cost = self.draft_cost
        if cost is not None and not self.exact:
            raise ValueError(f"draft_cost = {cost!r} without exact; give both, or none")
        if cost is not None and (type(cost) not in (int, float) or not 0 <= cost < float("inf")):
            raise ValueError(f"draft_cost = {cost!r}; allowed is a number of dense steps, 0 or more, or none")
        if self.exact and self.policy not in ("sentence", "fixed"):
            raise ValueError(
                f"exact with policy = {self.policy!r}; allowed are sentence and fixed, which have slow steps"
            )
        if self.min_gap > self.max_interval:
            raise ValueError(
                f"min_gap = {self.min_gap}; allowed is at most max_interval = {self.max_interval}"
            )
        if self.n_recent < self.n_evidence:
            raise ValueError(
                f"n_recent = {self.n_recent}; allowed is at least n_evidence = {self.n_evidence}, so that "
                "every evidence query sees all candidates: raise n_recent or lower n_evidence"
            )
        if self.n_recent < self.reread:
            raise ValueError(f"reread = {self.reread}; allowed is at most n_recent = {self.n_recent}")

    @property
    def budget(self) -> int:
        """N, or 0 where the policy selects nothing."""
        return 0 if self.policy == "window" else self.n_select

    def runs(self, step: str) -> bool:
        """Whether this step of the selector is switched on."""
        return self.steps is None or step in self.steps

    def recent_start(self, length: int) -> int:
        """Position where the recent window starts if the memory is refreshed at `length` cached tokens."""
        return max(length - self.n_recent, 0) // self.align * self.align

    def candidates(self, length: int) -> int:
        """How many positions may be selected at `length` cached tokens: [n_sink, recent_start)."""
        return max(self.recent_start(length) - self.n_sink, 0)

    def capacity(self, max_length: int, new_tokens: int) -> int:
        """Slots of the compact memory for up to max_length tokens, new_tokens of them generated."""
        if self.policy == "dense":
            return 0
        at_most = lambda n: min(n, max_length)  # whatever is asked for, there are no more tokens
        drafts = self.max_interval if self.exact else 0  # that the verifying pass brought, right or wrong
        growth = new_tokens if self.policy == "never" else at_most(self.max_interval + drafts)
        selected = min(self.budget, self.candidates(max_length))
        slots = at_most(self.n_sink) + selected + at_most(self.n_recent) + self.align - 1 + growth
        return -(-slots // self.align) * self.align


class RowStep(NamedTuple):
    """What one row does in one forward pass: the plan, and afterwards the record of it."""

    reason: str = "ended"  # "prefill", "fast", one of SLOW_REASONS, or "ended": reads and writes nothing
    start: int = 0  # first slot that attention reads
    visible: int = 0  # how many it reads, the new tokens included
    length: int = 0  # tokens in the full cache after the pass, drafts included
    slot: int = -1  # of the new token in the compact memory; -1: none
    recent_start: int = -1  # where the recent window of its new memory starts; -1: it gets none
    copied: int = 0  # tokens copied from the full cache into the compact memory
    drafted: int = 0  # exact mode: tokens of the pass, the last ones, that it verifies
    accepted: int = 0  # and how many of them were right; the others are rolled back

    @property
    def refresh(self) -> bool:
        """Whether the pass chooses and copies a new memory."""
        return self.recent_start >= 0


class Engine:
    """Decodes a batch of independent rows on one model.  `prefill` each row, then `step` all rows together.

    model is a `model.Model`, cfg an SFIConfig.  max_length counts prompt and new tokens of the longest row.
    token_text(id) gives a token's decoded text for the sentence trigger.  ops is the backend; observe is
    `memory.SlowFastCache`'s.  The engine owns the cache; two engines may share a model.
    """

    def __init__(
        self, model, cfg, token_text, *, batch=1, max_length, new_tokens, ops=REFERENCE, observe=None
    ):
        if max_length > model.config.max_positions:
            raise ValueError(
                f"max_length = {max_length}; the model has {model.config.max_positions} positions: lower it, "
                "or stretch the positions (YaRN)"
            )
        self.model, self.cfg, self.token_text = model, cfg, token_text
        self.max_length, self.new_tokens = max_length, new_tokens
        self.cache = SlowFastCache(model, cfg, ops, batch, max_length, new_tokens, observe)
        self.captured = None
        self.capture = None if model.config.num_experts else ops.capture  # experts are chosen on the host
        self.passes = []  # arguments of the passes of the step at hand, to find where a NaN came from
        self.rows = [Row() for _ in range(batch)]

    def fork(self, cfg: SFIConfig) -> "Engine":
        """An engine of another configuration with the same tokens cached, to be continued with `prefill`."""
        sizes = dict(batch=len(self.rows), max_length=self.max_length, new_tokens=self.new_tokens)
        other = Engine(self.model, cfg, self.token_text, ops=self.cache.ops, **sizes)
        other.rows = [Row(row.tokens[: row.length - row.unverified]) for row in self.rows]
        other.cache.copy_from(self.cache, max(row.length for row in other.rows))
        return other

    def prefill(self, b: int, tokens: list[int], chunk=512, progress=lambda n: None):
        """Cache a prompt, or more of one, in row b: dense passes over even chunks; the last refreshes.

        Returns logits (1, V) of the last token and the last pass's RowStep.  progress(n) is called after each
        chunk of n tokens.
        """
        self.check_room(b, len(tokens))
        self.cut(b)
        chunk = max(chunk, 2 * self.cfg.n_evidence)  # then even the half of one holds all evidence queries
        pieces = -(-len(tokens) // chunk)
        for i in range(pieces):
            piece = tokens[i * len(tokens) // pieces : (i + 1) * len(tokens) // pieces]
            self.passes.clear()
            logits, row_step = self.dense_pass(b, piece, "prefill", refresh=i == pieces - 1)
            if not sound(logits):
                raise NotFinite("logits")
            progress(len(piece))
        self.rows[b].trigger = Trigger("ready")  # what comes may begin a sentence
        return logits, row_step

    def dense_pass(self, b: int, tokens: list[int], reason: str, *, refresh=True, n_logits=1, drafted=0):
        """Feed T tokens to row b in one dense pass; it refreshes if there is more than the memory holds.

        Returns the logits (n_logits, V) of the last tokens and the RowStep.  The last `drafted` tokens are
        not yet certain, so the new memory's recent window begins as if they were not there.
        """
        plan = self.dense_plan(b, len(tokens), reason, refresh, drafted)
        return self.run(b, [tokens], [plan], n_logits)[0], self.record(self.rows[b], plan, tokens)

    def dense_plan(self, b: int, T: int, reason: str, refresh=True, drafted=0) -> RowStep:
        """What row b does in a dense pass over T new tokens; see `dense_pass`."""
        cfg, length = self.cfg, self.rows[b].length + T
        plan = RowStep(reason, self.cache.cap, length, length, drafted=drafted)
        if refresh and cfg.policy != "dense" and cfg.candidates(length) > cfg.budget:
            plan = plan._replace(recent_start=cfg.recent_start(length - drafted))
        return plan

    def step(self, tokens: list[int | None]):
        """Feed a token to every row (None: it has ended).  Returns logits (B, V) and what each row did."""
        live = [b for b, token in enumerate(tokens) if token is not None]
        for b in live:
            self.check_room(b, 1)
            if self.cfg.policy == "never" and self.rows[b].memory == self.cache.cap:
                raise ValueError(
                    f"row {b}'s memory is full; the engine was made for {self.new_tokens} new tokens"
                )
        for b in live:
            self.cut(b)
        self.passes.clear()
        return self.feed(tokens, [self.next_reason(b, token) for b, token in enumerate(tokens)])

    def next_reason(self, b: int, token: int | None) -> str:
        """What the step that feeds row b a token is; advances its trigger."""
        if token is None:
            return "ended"
        self.rows[b].trigger, reason = decide(self.rows[b], self.cfg, self.token_text(token))
        return reason

    def feed(self, tokens: list[int | None], reasons: list[str]):
        """Feed a token to every row, each as its reason says; as `step`.

        Rows that choose a new memory read their last cfg.reread tokens anew, in a pass of their own.
        """
        plans = [self.plan(b, reason) for b, reason in enumerate(reasons)]
        live = [b for b, plan in enumerate(plans) if plan.reason != "ended"]
        slow = [] if self.cfg.exact else [b for b in live if plans[b].refresh]
        if len(slow) in (0, len(live)) or self.cfg.reread == 1:
            logits = self.together(tokens, live, plans, self.cfg.reread if slow else 1)
        else:
            logits = self.together(tokens, [b for b in live if b not in slow], plans, 1)
            first, last = slow[0], slow[-1] + 1
            late = self.together(tokens, slow, plans, self.cfg.reread, first, last)
            is_slow = torch.tensor([[b in slow] for b in range(first, last)], device=logits.device)
            late = torch.where(is_slow, late, logits[first:last])
            logits = torch.cat([logits[:first], late, logits[last:]])
        done = zip(self.rows, plans, tokens, strict=True)
        return logits, [self.record(row, plan, [token]) for row, plan, token in done]

    def together(self, tokens, live, plans: list[RowStep], T: int, first=0, last=None):
        """One pass of T tokens, the last one new, of the `live` rows, of rows [first, last), as `plans` says.
        Returns logits (last - first, V).
        """
        rows = range(first, len(plans) if last is None else last)
        known = lambda b: self.rows[b].tokens[self.rows[b].length + 1 - T :]
        fed = [[*known(b), tokens[b]] if b in live else [0] * T for b in rows]
        return self.run(first, fed, [plans[b] if b in live else RowStep() for b in rows])[:, -1]

    def pick(self, logits, sampling=GREEDY) -> list[int]:
        """The next token of every row, from the logits (B, V) of the last step: the one host read of a step.

        NotFinite, a ValueError, if they are no numbers that a model gives.
        """
        places = [(b, row.length) for b, row in enumerate(self.rows)]
        return draw(logits, places, sampling)[0]

    def cut(self, b: int, length: int | None = None):
        """Forget the tokens of row b from position `length` on (None: those that no dense pass has verified).
        The memory stays if they all lie in its recent window; else the next step is dense.
        """
        row = self.rows[b]
        length = row.length - row.unverified if length is None else length
        if not 0 <= length <= row.length:
            raise ValueError(f"cannot cut row {b} to {length} tokens; it has {row.length}")
        removed = row.length - length
        del row.tokens[length:]
        row.since = max(row.since - removed, 0)
        row.unverified = max(row.unverified - removed, 0)
        row.trigger = Trigger() if removed else row.trigger
        if row.memory and length >= row.recent_start and self.cfg.candidates(length) > self.cfg.budget:
            row.memory -= removed
        elif removed:
            row.memory = 0
            self.cache.schedule.wait_for_all()
            self.cache.past[:, b, :, length:] = 0

    def check_room(self, b: int, n: int):
        """ValueError unless row b takes n more tokens, one at least, after those that are verified."""
        row = self.rows[b]
        if n < 1:
            raise ValueError("no tokens to feed; give at least one")
        if (total := row.length - row.unverified + n) > self.max_length:
            raise ValueError(f"row {b} would have {total} tokens; the engine was made for {self.max_length}")

    def plan(self, b: int, reason: str) -> RowStep:
        """What row b reads and writes in a step of one token that is what `decide` says; re-anchors."""
        row, length = self.rows[b], self.rows[b].length + 1
        if reason == "ended":
            return RowStep()
        if reason in ("fast", "re-anchor"):
            copied = self.reanchor(b) if reason == "re-anchor" else 0
            return RowStep("fast", 0, row.memory + 1, length, slot=row.memory, copied=copied)
        recent_start = -1 if reason in ("dense", "short") else self.cfg.recent_start(length)
        return RowStep(reason, self.cache.cap, length, length, recent_start=recent_start)

    def record(self, row: Row, done: RowStep, tokens: list[int]) -> RowStep:
        """Bring a row's state up to date after a pass with these new tokens; returns the pass's record."""
        if done.reason == "ended":
            return done
        row.tokens += tokens
        if done.reason == "fast":
            row.memory, row.since = row.memory + 1, row.since + 1
            return done
        row.since, row.unverified, row.memory = 0, 0, 0
        if done.refresh:
            row.recent_start = done.recent_start
            row.memory = self.cfg.n_sink + self.cfg.budget + done.visible - done.recent_start
        return done._replace(copied=row.memory)

    def run(self, first: int, tokens, plans: list[RowStep], n_logits=1, layers=slice(None)):
        """One forward pass: tokens (B', T) for rows first .. first + B' - 1, as `plans` says.

        Returns the last n_logits logits (B', n_logits, V).  The rows' state is the caller's business.
        layers: which run; all, except to time a part.
        """
        inputs = self.upload(tokens, plans)
        self.passes.append((first, plans, n_logits, *inputs))
        T, all_rows = len(tokens[0]), len(plans) == len(self.rows)
        if self.capture and T == 1 and all_rows and not any(p.refresh for p in plans):
            self.cache.schedule.wait_for_all()
            if self.captured is None:
                forward = lambda *inputs: self.forward(first, plans, n_logits, *inputs)
                self.captured = self.capture(forward, *inputs)
            return self.captured(*inputs)
        return self.forward(first, plans, n_logits, *inputs, layers)

    def run_joined(self, tokens: dict[int, list[int]], plans: dict[int, RowStep]) -> dict:
        """Passes of single rows, of any number of tokens each, that read the weights once for all of them.
        Returns each row's logits (T, V).
        """
        inputs = {b: self.upload([tokens[b]], [plans[b]]) for b in tokens}
        self.passes += [(b, [plans[b]], len(tokens[b]), *inputs[b]) for b in tokens]
        places, attentions = zip(*(self.reads(b, [plans[b]], *inputs[b]) for b in tokens), strict=True)
        lengths = [len(row) for row in tokens.values()]

        def attention(layer, q, k, v):
            pieces = zip(attentions, *(x.split(lengths, dim=1) for x in (q, k, v)), strict=True)
            return torch.cat([attend(layer, *piece) for attend, *piece in pieces], dim=1)

        fed = torch.cat([row for row, _ in inputs.values()], dim=1)  # (1, all of them)
        places, parts = torch.cat(places, dim=1), self.cache.ops.parts
        logits = self.model(fed, places, attention, parts, n_logits=sum(lengths))[0]
        return dict(zip(tokens, logits.split(lengths), strict=True))

    def upload(self, tokens, plans: list[RowStep]):
        """What a pass takes on the device: tokens (B', T) and numbers (B', 5), int64, as
        `SlowFastCache.attention` takes them.
        """
        device, T = self.model.device, len(tokens[0])
        numbers = [
            (-1 if p.reason == "ended" else p.length - T, p.start, p.visible, p.slot, p.recent_start)
            for p in plans
        ]
        pinned = device.type == "cuda"  # then the host need not wait for the copy
        return tuple(
            torch.tensor(x, pin_memory=pinned).to(device, non_blocking=True) for x in (tokens, numbers)
        )

    def reads(self, first: int, plans: list[RowStep], tokens, numbers):
        """The positions (B', T) of these tokens, and the attention of their rows."""
        position, *more = (column.contiguous() for column in numbers.unbind(1))
        attention = self.cache.attention(slice(first, first + len(plans)), plans, position, *more)
        positions = position.clamp_min(0)[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        return positions, attention

    def forward(self, first, plans: list[RowStep], n_logits, tokens, numbers, layers=slice(None)):
        """`run` on the device."""
        places, attention = self.reads(first, plans, tokens, numbers)
        return self.model(tokens, places, attention, self.cache.ops.parts, n_logits, layers)

    def reanchor(self, b: int) -> int:
        """Policy window: rebuild sinks and window without a dense pass.  Returns tokens copied."""
        n = self.rows[b].length
        plan = RowStep("re-anchor", visible=n, length=n, recent_start=self.cfg.recent_start(n))
        at, length = torch.tensor([[plan.recent_start], [n]], device=self.model.device)
        for layer in range(self.model.config.num_hidden_layers):
            self.cache.refresh(slice(b, b + 1), layer, [plan], at, length, None)
        return self.record(self.rows[b], plan, []).copied


class Step(NamedTuple):
    """What one step of the decode loop gave: the new tokens of each row (none where it has ended, or where
    exact mode has only drafted; at times several where it has verified) and what the rows did.
    """

    tokens: list[list[int]]
    rows: list[RowStep]
    fed: list[int]  # what each row is fed next, if it has not ended


def decode(
    engine: Engine,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    stop_ids=(),
    sampling=GREEDY,
    progress=lambda n: None,
    speculation: Speculation | None = None,
) -> Iterator[Step]:
    """Prefill every prompt (token ids), then generate until stop_ids or max_new_tokens end each row.

    The first Step carries the prefill's RowSteps.  progress(n) reports prompt tokens as they are cached.
    speculation: exact mode's state, if the caller wants to look into it afterwards.
    """
    if len(prompts) != len(engine.rows):
        raise ValueError(
            f"{len(prompts)} prompts for an engine of {len(engine.rows)} rows; give one prompt a row"
        )
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens = {max_new_tokens}; allowed is 0 or more")
    for b, prompt in enumerate(prompts):
        engine.check_room(b, len(prompt) + max(max_new_tokens - 1, 0))  # the last token is not fed
    filled = [engine.prefill(b, prompt, progress=progress) for b, prompt in enumerate(prompts)]
    if not max_new_tokens:
        return
    if engine.cfg.exact and speculation is None:
        speculation = Speculation(engine, sampling, stop_ids)
    rows = [row_step for _, row_step in filled]
    fed = engine.pick(torch.cat([logits for logits, _ in filled]), sampling)
    made, left = [[token] for token in fed], [max_new_tokens] * len(prompts)
    while True:
        for b, tokens in enumerate(made):
            end = next((i + 1 for i, token in enumerate(tokens) if token in stop_ids), None)
            made[b] = tokens[: left[b] if end is None else min(end, left[b])]
            left[b] = left[b] - len(made[b]) if end is None else 0
        yield Step(made, rows, fed)
        if not any(left):
            return
        fed = [token if n else None for token, n in zip(fed, left, strict=True)]
        if speculation:
            made, rows, fed = speculation.step(fed, left)
        else:
            logits, rows = engine.step(fed)
            fed = engine.pick(logits, sampling)
            made = [[token] for token in fed]
