"""Seeing the method at work: a record of every step, and a picture of what the memory held.

A `Trace` watches an engine's refreshes (`SlowFastCache.observe`) and turns each `Step` of the decode loop
into plain dicts, one for each row, which `generate.py --trace` writes as JSON lines.  One of them, folded:

    {"step": 33, "row": 0, "kind": "slow", "reason": "sentence", "fed": " The", "made": " house",
     "read": 4985, "length": 4985, "copied": 1805, "overlap": 0.8378, "mass_before": 0.9675, "mass": 0.9864,
     "ms": 237.239}

`fed` and `made` are the texts of the token read and of the one chosen; `read`, `length` and `copied` count
tokens: attended to, cached, and copied into a new memory.  At a slow step `overlap` is the share of the newly
selected tokens that the old memory held already, `mass` and `mass_before` the share of the step's true
attention that falls on the new memory and on the one it replaces, means over layers and heads; fast steps do
not know it.  `plot` draws what the trace saw.  Read before: `sfi.py`.
"""

import json
import warnings
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F

from model import ModelConfig
from sfi import RowStep, SFIConfig, Step

BINS = 400  # the picture's rows: positions are averaged into at most so many


@dataclass
class Watched:
    """What is known of one row's memory: the layers' selections in force, and what the last refresh gave."""

    slots: dict = field(default_factory=dict)  # layer -> positions (K, N), and where its recent window starts
    found: dict = field(default_factory=dict)  # name -> one number a layer, since the last step
    held: torch.Tensor | None = None  # (positions,) the share of layers and heads that hold each
    columns: list = field(default_factory=list)  # a step each: the picture, (bins,)
    length: int = 0  # tokens cached after the last step
    slow: list = field(default_factory=list)  # (column, mass_before, mass) of every refresh


class Trace:
    """Records what each row's memory holds and covers.  max_length: the engine's, the picture's height.

    file: where the records are written, a line each as they come.  If that fails, on a full disk say, all
    else goes on, and `problem` says so.
    """

    def __init__(
        self, model: ModelConfig, cfg: SFIConfig, token_text, batch: int, max_length: int, file=None
    ):
        self.model, self.cfg, self.token_text = model, cfg, token_text
        self.max_length, self.steps = max_length, 0
        self.width = -(-max_length // BINS)  # positions a bin
        self.rows = [Watched() for _ in range(batch)]
        self.fed = [None] * batch
        self.file, self.problem = file, None
        self._write([], "w")

    def refreshed(self, b: int, layer: int, row_step: RowStep, slots, scores):
        """The engine's `observe`: compare the new memory of one row and layer with the one it replaces.

        overlap: the share of the newly selected positions that the old memory held.  mass: the share of the
        true softmax attention of the evidence queries that falls on the new memory; mass_before: on the old
        one, which is what a fast step would have seen.  Means over the KV heads and their queries.
        """
        row, found = self.rows[b], {}
        length, recent_start = row_step.visible, row_step.recent_start
        new, old = self._mask(slots, recent_start, length), row.slots.get(layer)
        if old is not None:
            before = self._mask(*old, length)
            if slots.shape[1]:
                found["overlap"] = before.gather(1, slots).float().mean()
        if scores is not None:
            p = attention(scores, scores.shape[1] // (self.model.num_attention_heads // len(scores)))
            found["mass"] = (p * new).sum(-1).mean()
            if old is not None:
                found["mass_before"] = (p * before).sum(-1).mean()
        row.slots[layer] = slots, recent_start
        for name, value in found.items():
            row.found.setdefault(name, []).append(value.item())
        share = new.float().mean(0).cpu() / self.model.num_hidden_layers  # (length,)
        row.held = share if layer == 0 else row.held + share

    def _mask(self, slots, recent_start: int, length: int):
        """Which of the first `length` positions a memory shows, (K, length) bool, per KV head."""
        shown = torch.zeros((len(slots), length), dtype=torch.bool, device=slots.device)
        shown[:, : self.cfg.n_sink] = True
        shown[:, recent_start:] = True
        return shown.scatter_(1, slots, True)

    def step(self, step: Step, seconds: float) -> list[dict]:
        """The records of one Step of the decode loop, a row each that has not ended."""
        records = []
        for b, (tokens, did) in enumerate(zip(step.tokens, step.rows, strict=True)):
            if did.reason == "ended":
                continue
            row = self.rows[b]
            kind = did.reason if did.reason in ("prefill", "fast") else "slow"
            mean = {name: round(sum(x) / len(x), 4) for name, x in row.found.items()}
            record = {
                "step": self.steps,  # 0 is the prefill
                "row": b,
                "kind": kind,
                "reason": did.reason,
                "fed": self.fed[b],  # text of the token that the step read (null: the prompt)
                "made": "".join(map(self.token_text, tokens)),
                "read": did.visible,  # tokens attended to
                "length": did.length,  # tokens that dense decoding would have attended to
                "copied": did.copied,  # tokens copied into a new memory
                "overlap": mean.get("overlap"),
                "mass_before": mean.get("mass_before"),
                "mass": mean.get("mass"),
                "ms": round(1e3 * seconds, 3),  # the whole step, all rows
            }
            if self.cfg.exact:
                record |= {"drafted": did.drafted, "accepted": did.accepted}
            records.append(record)
            self.fed[b] = self.token_text(step.fed[b])
            if did.refresh:
                row.slow.append((len(row.columns), mean.get("mass_before"), mean.get("mass")))
            row.length = did.length - did.drafted + did.accepted
            row.columns.append(self._column(row))
            row.found = {}
        self.steps += 1
        self._write(records, "a")
        return records

    def _write(self, records: list[dict], mode: str):
        if self.file is None or self.problem:
            return
        try:
            with open(self.file, mode, encoding="utf-8") as lines:
                lines.write("".join(json.dumps(record) + "\n" for record in records))
        except OSError as e:
            reason = (e.strerror or str(e)).lower()
            self.problem = f"--trace {self.file}: {reason} at step {self.steps}; what came after it is lost"

    def _column(self, row: Watched):
        """What the row's memory shows after the step, (bins,); everything, while there is no memory."""
        shown = torch.full((self.max_length,), torch.nan)
        shown[: row.length] = 1.0
        if row.held is not None:  # what came after the refresh is shown
            row.held = row.held[: row.length]  # wrong drafts have been rolled back
            shown[: len(row.held)] = row.held
        padding = -self.max_length % self.width
        return F.pad(shown, (0, padding), value=torch.nan).view(-1, self.width).nanmean(1)


def attention(scores, n_queries: int):
    """Mean attention (K, length) over the queries of each KV head, from `attend`'s raw scores
    (K, G * n_queries, length) of the last n_queries positions; each sees itself and what precedes it.
    """
    length = scores.shape[-1]
    later = torch.ones(n_queries, length, dtype=torch.bool, device=scores.device).triu(length - n_queries + 1)
    return scores.unflatten(1, (-1, n_queries)).masked_fill(later, -torch.inf).softmax(-1).mean((1, 2))


def plot(trace: Trace, names: list[str], path):
    """Draw, a pair of panels a row: what the memory held at every step, and the attention mass it covered.

    Returns the figure, as it was written to `path`.
    """
    from matplotlib.figure import Figure

    n = len(trace.rows)
    figure = Figure(figsize=(9, 5.6 * n), layout="constrained")
    axes = figure.subplots(2 * n, 1, squeeze=False, height_ratios=[3, 1] * n)[:, 0]
    for row, name, top, below in zip(trace.rows, names, axes[::2], axes[1::2], strict=True):
        _draw_memory(top, row, trace, name)
        _draw_mass(below, row, top.get_xlim())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a name in a script that the font lacks
        figure.savefig(path, dpi=150)
    return figure


def printable(name: str) -> str:
    """A file name, with a mark for each byte that is no text."""
    return name.encode("utf-8", "replace").decode("utf-8")


def _draw_memory(ax, row: Watched, trace: Trace, name: str):
    image = torch.stack(row.columns, dim=1) if row.columns else torch.full((1, 1), torch.nan)  # (bins, steps)
    steps, positions = image.shape[1], image.shape[0] * trace.width
    drawn = ax.imshow(
        image.sqrt().numpy(),  # a position that few heads hold stays visible
        origin="lower",
        aspect="auto",
        extent=(-0.5, steps - 0.5, 0, positions),
        cmap="Blues",
        vmin=0,
        vmax=1,
        interpolation="nearest",
    )
    ax.set_ylim(0, max(row.length, 1))
    ax.set_title(f"{printable(name)}: what the memory holds, step by step", loc="left", parse_math=False)
    ax.set_ylabel("position in the text")
    ax.tick_params(labelbottom=False)
    slow = [x for x, *_ in row.slow]
    if slow:  # an empty plot that is not clipped spoils the layout
        at_top = dict(clip_on=False, transform=ax.get_xaxis_transform())
        ax.plot(slow, [1.0] * len(slow), "v", color="C1", ms=6, **at_top)
    ticks = [0, 0.05, 0.25, 0.5, 1]
    bar = ax.figure.colorbar(drawn, ax=ax, pad=0.01, ticks=[t**0.5 for t in ticks])
    bar.set_ticklabels([f"{t:.0%}" for t in ticks])
    bar.set_label("share of layers and heads")


def _draw_mass(ax, row: Watched, xlim):
    """The mass a memory covers when new, and when the next refresh replaces it; unknown in between."""
    known = [(x, before, mass) for x, before, mass in row.slow if mass is not None]
    for (x, _, mass), (x2, before, _) in pairwise(known):
        ax.plot([x, x2], [mass, before], ":", color="0.6", lw=1)
    ax.plot([x for x, *_ in known], [mass for *_, mass in known], "v", color="C1", label="new memory")
    old = [(x, before) for x, before, _ in known if before is not None]
    ax.plot([x for x, _ in old], [y for _, y in old], "o", color="C0", ms=4, label="the one it replaces")
    ax.set_xlim(xlim)
    lowest = min((share for _, *shares in known for share in shares if share is not None), default=0.0)
    ax.set_ylim(1 - 1.4 * max(1 - lowest, 0.01), 1 + 0.15 * max(1 - lowest, 0.01))
    ax.set_ylabel("attention covered")
    ax.set_xlabel("step (0: the end of the prompt); orange: here a slow step chose a new memory")
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:.1%}")
    ax.grid(axis="y", color="0.9")
    if known:
        ax.legend(loc="lower right", bbox_to_anchor=(1, 0.97), ncols=2, fontsize="small", frameon=False)
    else:
        ax.text(0.5, 0.5, "not known: no dense pass chose a memory", ha="center", transform=ax.transAxes)
