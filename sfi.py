"""Slow-Fast Inference: configuration, compact memory, trigger and the decode engine.

The paper (arXiv 2603.12038) observes that within a sentence the tokens that attention really uses stay nearly
the same.  So most decode steps are *fast*: attention reads a compact memory, [sinks | selected | recent
window | tokens since the refresh].  At a sentence's start, or after max_interval fast steps, one *slow* step
does dense attention over everything, and its scores choose the next memory.  Nothing is evicted: the full
cache stays, so a later slow step can bring any token back.

Dense decoding, prompt chunks and slow steps are one operation, a dense pass; a fast step is the same forward
pass reading other slots.  In exact mode the fast steps since the last dense pass are drafts, and the next one
feeds all their tokens again and says which are right (`exact.py`).  The leaf operations (`append`, `attend`,
`select`, `rebuild`) come as one `Ops` and may be replaced by faster twins.  Letters: see `model.py`.
Positions are absolute.  Read before: `model.py`, `selector.py`, `memory.py`, `sampling.py`, `exact.py`.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import NamedTuple

import torch

from exact import APART, PASS, Drafts
from memory import REFERENCE
from model import CPU_HAS_BF16, KVCache, Model, ModelConfig, yarn_for
from sampling import GREEDY, noisy
from selector import FUSIONS, STEPS

POLICIES = ("sentence", "fixed", "never", "window", "dense")
SELECTORS = tuple(STEPS)
BACKENDS = ("auto", "reference", "triton")
SLOW_REASONS = ("dense", "short", "first", "sentence", "interval", "doubt", "end")


def option(default, help, choices=None):
    """A field of SFIConfig with the text that the command's --help shows."""
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class SFIConfig:
    """Budgets and intervals, all in tokens; ValueError for what makes no sense."""

    n_sink: int = option(4, "first tokens, always visible")
    n_select: int = option(1536, "N: tokens that each KV head selects at a refresh")
    n_recent: int = option(256, "last tokens visible at a refresh, at least")
    align: int = option(16, "the recent window starts at a multiple of this")
    min_gap: int = option(16, "a sentence start makes a slow step only after this many fast ones")
    max_interval: int = option(64, "a slow step comes after this many fast ones at the latest")
    n_evidence: int = option(16, "last queries of a dense pass whose attention decides the selection")
    policy: str = option("sentence", "when a step is slow", POLICIES)
    selector: str = option("follow", "how tokens are selected", SELECTORS)
    steps: tuple[str, ...] | None = option(None, "selector steps to run, such as past,heads; none given: all")
    fusion: str = option("arithmetic", "how selector `paper` joins evidence and prior", tuple(FUSIONS))
    exact: bool = option(False, "fast steps draft, slow steps check: the tokens of dense decoding in float32")
    draft_cost: float | None = option(
        None, "exact: what one more draft costs, in dense steps; none given: by bytes; 0: long drafts"
    )

    def __post_init__(self):
        least = dict(n_sink=0, n_select=0, n_recent=1, align=1, min_gap=0, max_interval=1, n_evidence=1)
        for name, low in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ValueError(f"{name} = {value!r}; allowed is a whole number of tokens, {low} or more")
        for f in fields(self):
            if f.metadata["choices"] and getattr(self, f.name) not in f.metadata["choices"]:
                raise ValueError(
                    f"{f.name} = {getattr(self, f.name)!r}; allowed are {', '.join(f.metadata['choices'])}"
                )
        if self.steps is not None:
            object.__setattr__(self, "steps", tuple(self.steps))
            if unknown := set(self.steps) - set(known := STEPS[self.selector]):
                raise ValueError(
                    f"steps has {min(unknown)!r}; selector {self.selector} has {', '.join(known) or 'none'}"
                )
        if not isinstance(self.exact, bool):
            raise ValueError(f"exact = {self.exact!r}; allowed are True and False")
        cost = self.draft_cost
        if cost is not None and not self.exact:
            raise ValueError(f"draft_cost = {cost!r} without exact; give both, or none")
        if cost is not None and (type(cost) not in (int, float) or not 0 <= cost < math.inf):
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

    @property
    def budget(self) -> int:
        """N of the policy in force."""
        return 0 if self.policy == "window" else self.n_select

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
        most = lambda n: min(n, max_length)  # whatever is asked for, there are no more tokens
        drafts = self.max_interval if self.exact else 0  # that the pass brought, right or wrong
        growth = new_tokens if self.policy == "never" else most(self.max_interval + drafts)
        selected = min(self.budget, self.candidates(max_length))
        slots = most(self.n_sink) + selected + most(self.n_recent) + self.align - 1 + growth
        return -(-slots // self.align) * self.align


def cache_bytes(
    model: ModelConfig, cfg: SFIConfig, *, batch: int, max_length: int, new_tokens: int, dtype: torch.dtype
) -> int:
    """Bytes the engine allocates: K and V of full cache and compact memory, and two fp32 numbers a key."""
    slots = cfg.capacity(max_length, new_tokens) + max_length
    numbers = 2 * model.num_hidden_layers * model.num_key_value_heads * max_length  # key_norm and past
    return batch * (model.kv_bytes(dtype) * slots + 4 * numbers)


def check_lengths(model: ModelConfig, prompt_tokens: list[int], max_new_tokens: int):
    """ValueError unless every prompt has tokens and fits, with the new ones, into the model's positions."""
    if not prompt_tokens or min(prompt_tokens) == 0:
        raise ValueError("the prompt is empty; give at least one token of text")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens = {max_new_tokens}; allowed is 0 or more")
    longest = max(prompt_tokens)
    if longest + max_new_tokens > model.max_positions:
        factor = yarn_for(model, longest + max_new_tokens)
        raise ValueError(
            f"prompt of {longest} tokens + {max_new_tokens} new ones = {longest + max_new_tokens}; the model "
            f"has {model.max_positions} positions: shorten the prompt or lower max_new_tokens"
            + f", or stretch the positions with --yarn {factor}"
            * bool(factor)
        )


CLOSERS = r"""["'”’»›\)\]\}）］｝】〕」』》〉]"""
ENDED = re.compile(rf"([.?!…。？！])(?:{CLOSERS}|\s)*\Z")
ONLY_CLOSERS = re.compile(rf"(?:{CLOSERS}|\s)*\Z")


def advance(armed: str, text: str) -> tuple[str, bool]:
    """Read one generated token's text: (armed, fires); a token that fires starts a new sentence.

    `armed` is "no", "space" (a sentence has ended; white space must come next) or "ready" (a new one may
    start).  A start whose first letter is lower-case does not fire ("e.g. the").  An ender split over several
    byte tokens is not seen.
    """
    if ended := ENDED.search(text):
        return ("ready" if text[-1].isspace() or ended[1] in "。？！" else "space"), False
    if armed != "no" and ONLY_CLOSERS.match(text):
        return ("ready" if re.search(r"\s", text) else armed), False
    if armed == "ready" or (armed == "space" and text[:1].isspace()):
        letter = next((c for c in text if c.isalpha()), "")
        return "no", not letter.islower()
    return "no", False


@dataclass
class Row:
    """State of one sequence."""

    length: int = 0  # tokens in the full cache
    memory: int = 0  # tokens in the compact memory; 0: never refreshed, every step is dense
    armed: str = "no"  # trigger: see `advance`
    since: int = 0  # fast steps since the last dense pass (policy window: since the last re-anchoring)
    drafts: Drafts = field(default_factory=Drafts)  # exact mode: what those steps were fed


class Part(NamedTuple):
    """One row's part in one forward pass, and afterwards the record of it."""

    reason: str = "ended"  # "prefill", one of SLOW_REASONS, "fast", or "ended": reads and writes nothing
    start: int = 0  # first slot that attention reads
    visible: int = 0  # how many it reads, the new tokens included
    length: int = 0  # tokens in the full cache after the pass: what dense decoding would read
    memory: int = -1  # compact-memory slot of the new token; -1: none
    refresh: bool = False  # whether the pass chooses and copies a new memory
    copied: int = 0  # tokens copied from the full cache into the compact memory
    drafted: int = 0  # tokens of the pass, the last ones, that it checks
    accepted: int = 0  # how many of them were right; the others are taken back


class Engine:
    """Decodes a batch of independent rows on one model.  `prefill` each row, then `step` all rows together.

    max_length counts prompt and new tokens of the longest row.  token_text(id) gives a token's decoded text
    for the sentence trigger.  The engine owns the KV cache; two engines may share a model.

    observe(row, layer, part, slots, scores), if given, sees every refresh: the row's part in the pass, the
    selected positions (K, N), and the scores of all positions as `attend` gives them, to be used at once
    (None where the refresh came without a dense pass)."""

    def __init__(
        self,
        model: Model,
        cfg: SFIConfig,
        token_text,
        *,
        batch=1,
        max_length,
        new_tokens,
        ops=REFERENCE,
        observe=None,
    ):
        self.model, self.cfg, self.ops, self.token_text = model, cfg, ops, token_text
        self.observe = observe
        self.max_length, self.new_tokens = max_length, new_tokens
        self.cap = cfg.capacity(max_length, new_tokens)
        self.cache = KVCache(model.config, batch, self.cap + max_length, model.dtype, model.device)
        shape = (*self.cache.k.shape[:3], max_length)  # (L, B, K, S_max)
        self.key_norm = torch.empty(shape, dtype=torch.float32, device=model.device)
        self.past = torch.zeros(shape, dtype=torch.float32, device=model.device)  # see `selector.follow`
        self.schedule = ops.schedule(model.config.num_hidden_layers)
        self.last = None  # what the last pass was given
        read = lambda tokens: model.weight_bytes(model.dtype, tokens)[1]
        self.weights = read(batch) / batch  # bytes that a step reads for a row
        self.weights_alone, self.weights_further = read(1), read(2) - read(1)  # a pass of one row; its tokens
        # Experts are chosen on the host, so a pass through them cannot be captured.
        self.capture, self.captured = None if model.config.num_experts else ops.capture, None
        self.rows = [Row() for _ in range(batch)]

    def fork(self, cfg: SFIConfig) -> "Engine":
        """An engine of another configuration with the same tokens cached, to be continued with `prefill`."""
        sizes = dict(batch=len(self.rows), max_length=self.max_length, new_tokens=self.new_tokens)
        other = Engine(self.model, cfg, self.token_text, ops=self.ops, **sizes)
        n = max(row.length for row in self.rows)
        self.schedule.join()
        other.key_norm[..., :n] = self.key_norm[..., :n]
        other.past[..., :n] = self.past[..., :n]
        other.cache.k[..., other.cap : other.cap + n, :] = self.cache.k[..., self.cap : self.cap + n, :]
        other.cache.v[..., other.cap : other.cap + n, :] = self.cache.v[..., self.cap : self.cap + n, :]
        other.rows = [Row(length=row.length) for row in self.rows]
        return other

    def prefill(self, b: int, tokens: list[int], chunk=512, progress=lambda n: None):
        """Cache a prompt, or more of one, in row b: dense passes over even chunks; the last refreshes.

        Returns logits (1, V) of the last token and the last pass's Part.  progress(n) is called after each
        chunk of n tokens.
        """
        self._check_room(b, len(tokens))
        row = self.rows[b]
        chunk = max(chunk, 2 * self.cfg.n_evidence)  # then even the half of one holds all evidence queries
        total, pieces = row.length + len(tokens), -(-len(tokens) // chunk)
        refresh = self.cfg.policy != "dense" and self.cfg.candidates(total) > self.cfg.budget
        for i in range(pieces):
            piece = tokens[i * len(tokens) // pieces : (i + 1) * len(tokens) // pieces]
            length = row.length + len(piece)
            part = Part("prefill", self.cap, length, length, refresh=refresh and i == pieces - 1)
            logits, part = self._checked(self._run(b, [piece], [part]))[:, -1], self._finish(row, part)
            progress(len(piece))
        row.armed, row.since = "no", 0
        row.drafts.clear()
        return logits, part

    def step(self, tokens: list[int | None], ending=()):
        """Feed a token to every row (None: it has ended).  Returns logits and what each row did, for
        `settle`: logits (B, V), but of a row that checks drafts T rows, one for each token of its pass.

        Exact mode: `ending` are rows whose next token may be the last, which no draft may decide.
        """
        for b, token in enumerate(tokens):
            if token is None:
                continue
            self._check_room(b, 1)
            if self.cfg.policy == "never" and self.rows[b].memory == self.cap:
                raise ValueError(
                    f"row {b}'s memory is full; the engine was made for {self.new_tokens} new tokens"
                )
        parts = [
            Part() if token is None else self._plan(b, token, b in ending) for b, token in enumerate(tokens)
        ]
        checked = [b for b, part in enumerate(parts) if part.drafted]
        together = [Part() if part.drafted else part for part in parts]  # the checks get a pass each
        passes = []
        if not checked or any(part.reason != "ended" for part in together):
            fed = [
                [0 if part.reason == "ended" else token] for token, part in zip(tokens, together, strict=True)
            ]
            logits, passes = self._run(0, fed, together), self.last
        else:
            logits = torch.zeros((len(parts), 1, self.model.config.vocab_size), device=self.model.device)
        rows = list(logits) if checked else [logits[:, -1]]
        for b in checked:
            fed = self.rows[b].drafts.tokens
            rows[b], passes = self._run(b, [fed], [parts[b]], len(fed))[0], passes + self.last
        self.last, logits = passes, torch.cat(rows) if checked else rows[0]
        return logits, [self._finish(row, part) for row, part in zip(self.rows, parts, strict=True)]

    def pick(self, logits, sampling=GREEDY) -> list[int]:
        """The next token of every row, from the logits (B, V) of the last pass: the one host read of a step.
        ValueError if they are not finite.
        """
        places = [(b, row.length) for b, row in enumerate(self.rows)]
        return [token for token, _ in self._read(logits, places, sampling)]

    def settle(self, logits, parts: list[Part], sampling=GREEDY):
        """What a step came to, from what `step` or `prefill` returned: the token that each row feeds next,
        the tokens of each row that are now certain, and the parts.  `pick`, but in exact mode what a fast
        step picks is a draft, and of the drafts that a pass checks the wrong ones are taken back.
        """
        places = [
            (b, row.length - i)
            for b, (row, part) in enumerate(zip(self.rows, parts, strict=True))
            for i in range(part.drafted, -1, -1)
        ]
        read = iter(self._read(logits, places, sampling))
        fed, certain, settled = [], [], []
        for row, part in zip(self.rows, parts, strict=True):
            picked, leads = zip(*islice(read, part.drafted + 1), strict=True)
            draft = self.cfg.exact and part.reason == "fast"
            if draft:
                row.drafts.add(leads[0])
            if part.drafted:
                part = part._replace(accepted=self._take_back(row, picked))
            fed.append(picked[part.accepted])
            certain.append([] if draft else list(picked[: part.accepted + 1]))
            settled.append(part)
        return fed, certain, settled

    def _read(self, logits, places, sampling) -> list[tuple[int, float]]:
        """The tokens for the (row, position) places, each with its lead: by how many logits it was ahead of
        the second best (exact mode; else 0).
        """
        scores = noisy(logits, places, sampling)
        read = [logits.isfinite().all()[None], scores.argmax(-1)]
        if self.cfg.exact:
            read.append(scores.topk(2).values.diff().neg()[:, 0])
        finite, *read = torch.cat(read).tolist()  # the one host read of a step
        if not finite:
            raise ValueError(self._not_finite())
        tokens, leads = map(int, read[: len(places)]), read[len(places) :] or [0.0] * len(places)
        return list(zip(tokens, leads, strict=True))

    def _take_back(self, row: Row, picked) -> int:
        """Cut a row back to the drafts with which the tokens picked by the pass agree; returns how many."""
        accepted = row.drafts.check(picked)
        wrong = len(picked) - 1 - accepted
        row.length, row.memory = row.length - wrong, row.memory - wrong
        _, row.armed = row.drafts.fed[accepted]
        return accepted

    def force(self, b: int, tokens: list[int]):
        """Feed given tokens to row b, as `step` would one by one, but a run of fast steps in one pass.

        Yields (logits (n, V), n parts), pass by pass.
        """
        if self.cfg.exact:
            raise ValueError("force feeds given tokens, which exact mode would check; use step and settle")
        row, run = self.rows[b], []  # tokens and parts that wait for their pass
        self._check_room(b, len(tokens))

        def passed():
            fed, parts = zip(*run, strict=True)
            run.clear()
            whole = parts[-1]._replace(memory=parts[0].memory)
            return self._checked(self._run(b, [fed], [whole], n_logits=len(fed)))[0], parts

        for token in tokens:
            if run and self.cfg.policy == "window" and row.since >= self.cfg.max_interval:
                yield passed()  # before planning the next, which copies from the cache
            part = self._plan(b, token)
            if run and (part.refresh or part.reason != run[-1][1].reason):
                yield passed()
            run.append((token, self._finish(row, part)))
            if part.refresh:
                yield passed()
        if run:
            yield passed()

    def _check_room(self, b, n):
        if n < 1:
            raise ValueError("no tokens to feed; give at least one")
        if (total := self.rows[b].length + n) > self.max_length:
            raise ValueError(f"row {b} would have {total} tokens; the engine was made for {self.max_length}")

    def _plan(self, b: int, token: int, ending=False) -> Part:
        """Decide whether the step that feeds `token` to row b is slow, and what it reads."""
        cfg, row = self.cfg, self.rows[b]
        row.armed, fires = advance(row.armed, self.token_text(token))
        length, reason, copied, enough = row.length + 1, "", 0, False
        if cfg.exact:
            if not row.since:
                row.drafts.clear()
            enough = row.drafts.enough(token, row.armed, *self._costs(row))
        refreshed_at = length - (cfg.policy == "window")  # which re-anchors before the token is there
        if cfg.policy == "dense":
            reason = "dense"
        elif not row.memory and cfg.candidates(refreshed_at) <= cfg.budget:
            reason = "short"
        elif enough and not row.since:  # drafts cannot pay
            reason = "dense"
        elif cfg.policy == "window":
            if not row.memory or row.since >= cfg.max_interval:
                copied = self._reanchor(b)
        elif not row.memory:
            reason = "first"
        elif cfg.policy == "sentence" and fires and row.since >= cfg.min_gap:
            reason = "sentence"
        elif cfg.policy != "never" and row.since >= cfg.max_interval:
            reason = "interval"
        elif cfg.exact and (enough or ending):
            reason = "doubt" if enough else "end"
        if reason:
            refresh, drafted = reason not in ("dense", "short"), row.since if cfg.exact else 0
            return Part(reason, self.cap, length, length, refresh=refresh, drafted=drafted)
        return Part("fast", 0, row.memory + 1, length, memory=row.memory, copied=copied)

    def _run(self, first: int, tokens, parts: list[Part], n_logits=1):
        """One forward pass: tokens (B', T) for rows first .. first + B' - 1.  Returns the last n_logits
        logits (B', n_logits, V); the rows' state is the caller's business.
        """
        device, T = self.model.device, len(tokens[0])
        first_new = [-1 if p.reason == "ended" else p.length - T for p in parts]
        plan = [
            (new, p.start, p.visible, p.memory, self._high(p))
            for new, p in zip(first_new, parts, strict=True)
        ]
        pinned = device.type == "cuda"  # then the host need not wait for the copy
        upload = lambda x: torch.tensor(x, pin_memory=pinned).to(device, non_blocking=True)
        inputs = upload(tokens), upload(plan)
        self.last = [(first, parts, n_logits, *inputs)]
        all_rows = len(parts) == len(self.rows)
        if self.capture and T == 1 and all_rows and not any(p.refresh for p in parts):
            self.schedule.join()
            if self.captured is None:
                forward = lambda *inputs: self._forward(first, parts, n_logits, *inputs)
                self.captured = self.capture(forward, *inputs)
            return self.captured(*inputs)
        try:
            return self._forward(first, parts, n_logits, *inputs)
        except FloatingPointError:
            raise ValueError(self._not_finite()) from None

    def _forward(self, first: int, parts: list[Part], n_logits: int, tokens, plan):
        """`_run` on the device: tokens (B', T) and plan (B', 5) int64, each row's first position, start,
        length, memory slot and start of the recent window.  Without a refresh nothing else is read of
        `parts`, so a captured pass may be replayed with another plan.
        """
        cached, T = slice(first, first + len(parts)), tokens.shape[1]
        position, start, length, memory, high = (column.contiguous() for column in plan.unbind(1))
        refreshed = any(p.refresh for p in parts)
        wanted = refreshed and (self.observe or self.cfg.budget)
        rows = self.model.config.num_attention_heads * min(self.cfg.n_evidence, T)  # of evidence, K * R

        def attention(layer, q, k, v):
            self.schedule.before(layer)
            K, V = self.cache.k[layer, cached], self.cache.v[layer, cached]  # (B', K, cap + S_max, D)
            self.ops.append(k, v, K, V, self.key_norm[layer, cached], position, memory)
            scores = None
            if wanted:
                width = -(-max(p.visible for p in parts) // 16) * 16  # rows of scores begin aligned
                shape = (len(parts), K.shape[1], rows // K.shape[1], width)
                scores = self.schedule.room(shape, q.device)
            out, scores = self.ops.attend(q, K, V, start, length, scores)
            if refreshed:
                refresh = lambda: self._refresh(cached, layer, parts, high, length, scores)
                self.schedule.beside(layer, refresh, (high, length))
            return out

        positions = position.clamp_min(0)[:, None] + torch.arange(T, device=tokens.device)  # (B', T)
        return self.model(tokens, positions, attention, n_logits)

    def _checked(self, logits):
        """The logits of the last pass; ValueError if they are not finite."""
        if not logits.isfinite().all():
            raise ValueError(self._not_finite())
        return logits

    def _not_finite(self) -> str:
        """What to say of a pass that gave a NaN or an infinity: where it came up first, found by running the
        same pass again.
        """
        found, passed = [], []

        def look(block, inputs, out):
            passed.append(block)
            if not out.isfinite().all():
                found.append(f"layer {block.self_attn.layer}")

        hooks = [block.register_forward_hook(look) for block in self.model.model["layers"]]
        try:
            for each in self.last:
                passed.clear()
                self._forward(*each)
            found.append("the output head")
        except FloatingPointError:
            found.append(f"the attention of layer {len(passed)}")
        for hook in hooks:
            hook.remove()
        dtype = str(self.model.dtype).removeprefix("torch.")
        advice = "try dtype float32 where it is another, or fetch the checkpoint again"
        return f"{found[0]} gives values that are not finite, in {dtype}; {advice}"

    def _high(self, part: Part) -> int:
        """Where the recent window of a part's new memory starts; -1: it gets none.  What is not yet checked
        does not count.
        """
        return self.cfg.recent_start(part.visible - part.drafted) if part.refresh else -1

    def _refresh(self, rows: slice, layer: int, parts: list[Part], high, length, scores):
        """Choose and copy the memory of a layer for those of the rows that are refreshed; high, length (B',)
        int64 and the scores of `attend` belong to the rows.
        """
        K, V = self.cache.k[layer, rows], self.cache.v[layer, rows]
        slots = torch.empty((*K.shape[:2], 0), dtype=torch.int64, device=K.device)
        if n := self.cfg.budget:
            key_norm, past = self.key_norm[layer, rows], self.past[layer, rows]
            slots = self.ops.select(scores, key_norm, past, high, n, self.cfg)  # (B', K, N)
        self.ops.rebuild(K, V, slots, self.cap, self.cfg.n_sink, high, length)
        for i, part in enumerate(parts):
            if self.observe and part.refresh:
                seen = None if scores is None else scores[i][..., : part.visible]
                self.observe(rows.start + i, layer, part, slots[i], seen)

    def _reanchor(self, b: int) -> int:
        """Policy window: rebuild sinks and window without a dense pass.  Returns tokens copied."""
        row, rows = self.rows[b], slice(b, b + 1)
        parts = [Part("fast", visible=row.length, refresh=True)]
        high, length = torch.tensor([[self._high(parts[0])], [row.length]], device=self.model.device)
        for layer in range(self.model.config.num_hidden_layers):
            self._refresh(rows, layer, parts, high, length, None)
        row.memory, row.since = self._memory_size(parts[0]), 0
        return row.memory

    def dense_step(self, lengths: list[int]):
        """A dense step that reads the first lengths[b] tokens of row b and changes no row: to time it."""
        for b in range(len(self.rows)):
            self._check_room(b, 1)
        parts = [
            Part("dense", self.cap, n, row.length + 1) for n, row in zip(lengths, self.rows, strict=True)
        ]
        self._run(0, [[0]] * len(parts), parts)

    def _memory_size(self, part: Part) -> int:
        return self.cfg.n_sink + self.cfg.budget + part.visible - self._high(part)

    def _costs(self, row: Row) -> tuple[float, float]:
        """b and f + c of `exact.py`: a pass of one token, and one more draft with its place in a pass, in
        dense steps.  A row shares fast and dense steps with its batch, but its passes are its own, and of a
        mixture of experts every token may read others.
        """
        kind = self.model.device.type
        widened = kind == "cpu" and self.model.dtype != torch.float32 and not CPU_HAS_BF16
        base, further = PASS["narrow " * widened + kind]
        cached = self.model.config.kv_bytes(self.model.dtype)
        memory = row.memory or self.cfg.n_sink + self.cfg.budget + self.cfg.n_recent
        dense = self.weights + row.length * cached  # bytes of a step
        alone = (self.weights_alone + row.length * cached) / dense
        if (cost := self.cfg.draft_cost) is None:
            cost = (self.weights + memory * cached + self.weights_further) / dense + further * alone
            if kind == "cpu" and row.since + 2 > self.cfg.n_evidence:
                cost += APART
        return base * alone, cost

    def _finish(self, row: Row, part: Part) -> Part:
        """Book a pass into the row's state."""
        if part.reason == "ended":
            return part
        row.length = part.length
        if part.reason == "fast":
            row.memory, row.since = row.memory + 1, row.since + 1
            return part
        row.since, row.memory = 0, self._memory_size(part) if part.refresh else 0
        return part._replace(copied=row.memory)


class Step(NamedTuple):
    """What one step of the decode loop gave: the new tokens of each row (none where it has ended, or where
    exact mode has only drafted; at times several where it has checked) and what made them.
    """

    tokens: list[list[int]]
    parts: list[Part]
    fed: list[int]  # what each row is fed next, if it has not ended


def decode(
    engine: Engine,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    stop_ids=(),
    sampling=GREEDY,
    progress=lambda n: None,
) -> Iterator[Step]:
    """Prefill every prompt (token ids), then generate until stop_ids or max_new_tokens end each row.

    The first Step carries the prefill's parts.  progress(n) reports prompt tokens as they are cached.
    """
    if len(prompts) != len(engine.rows):
        raise ValueError(
            f"{len(prompts)} prompts for an engine of {len(engine.rows)} rows; give one prompt a row"
        )
    check_lengths(engine.model.config, [len(p) for p in prompts], max_new_tokens)
    filled = [engine.prefill(b, prompt, progress=progress) for b, prompt in enumerate(prompts)]
    logits, parts = torch.cat([logits for logits, _ in filled]), [part for _, part in filled]
    new, ahead = [0] * len(prompts), [0] * len(prompts)  # tokens made, and drafts beyond them
    live = [max_new_tokens > 0] * len(prompts)
    while any(live):
        fed, made, parts = engine.settle(logits, parts, sampling)
        for b, tokens in enumerate(made):
            ahead[b] = 0 if tokens else ahead[b] + 1
            last = next((i for i, token in enumerate(tokens) if token in stop_ids), len(tokens))
            made[b] = tokens[: min(last + 1, max_new_tokens - new[b])] if live[b] else []
            new[b] += len(made[b])
            live[b] = live[b] and last == len(tokens) and new[b] < max_new_tokens
        yield Step(made, parts, fed)
        ending = [
            b
            for b, token in enumerate(fed)
            if new[b] + ahead[b] + 1 >= max_new_tokens or (ahead[b] and token in stop_ids)
        ]
        if any(live):
            fed = [token if alive else None for token, alive in zip(fed, live, strict=True)]
            logits, parts = engine.step(fed, ending)
