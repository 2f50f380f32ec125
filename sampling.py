"""From logits to the next token: temperature, top-k, top-p, min-p, and noise that belongs to one place.

One order, the one that published generation_config.json files are written for: the logits are divided by the
temperature, then top-k, top-p and min-p each keep some of what the one before left, and one token is drawn.
The draw is argmax(logits / temperature + Gumbel noise), which follows the softmax (the Gumbel-max trick;
Maddison et al., arXiv 1411.0030).  Read next: `sfi.py`.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch

from model import NotFinite


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; the defaults are greedy.  ValueError for what makes no sense."""

    temperature: float = 0.0  # 0: greedy, the likeliest token
    top_k: int = 0  # keep the k likeliest; 0 or at least V: all
    top_p: float = 1.0  # keep the likeliest until their sum reaches p, the one that crosses it included
    min_p: float = 0.0  # keep those at least min_p times as likely as the likeliest
    seed: int = 0

    def __post_init__(self):
        allowed = {
            "temperature": (float, 0, 1e9, "a number from 0 (the likeliest token) to 1e9"),
            "top_k": (int, 0, float("inf"), "a whole number, 0 (off) or more"),
            "top_p": (float, 0, 1, "a number from 0 to 1 (off)"),
            "min_p": (float, 0, 1, "a number from 0 (off) to 1"),
            "seed": (int, 0, 2**64 - 1, "a whole number from 0 to 2^64 - 1"),
        }
        for name, (kind, low, high, text) in allowed.items():
            value = getattr(self, name)
            number = type(value) is int or (kind is float and type(value) is float)
            if not number or not low <= value <= high:
                raise ValueError(f"{name} = {value!r}; allowed is {text}")

    def __str__(self):
        """As the report names it."""
        if self.temperature == 0:
            return "greedy"
        shown = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        shown = dict.fromkeys([*shown, "seed"])
        return ", ".join(f"{name.replace('_', '-')} {getattr(self, name)}" for name in shown)


GREEDY = Sampling()


def kept(logits, s: Sampling):
    """Which tokens may be drawn, (B, V) bool, from logits (B, V); equally likely ones count in any order."""
    # The largest logit first: at a tiny temperature the others then go to -inf, and nothing to nan.
    p = ((logits - logits.amax(-1, keepdim=True)) / s.temperature).softmax(-1)
    V = p.shape[-1]
    p, order = p.topk(min(s.top_k or V, V))  # (B, k) both, likeliest first
    keep = p >= s.min_p * p[:, :1]
    if s.top_p < 1:
        before = p.double().cumsum(-1) - p  # what the likelier ones hold together
        keep &= before < s.top_p * p.sum(-1, keepdim=True)
    keep[:, 0] = True
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, order, keep)


def noise(seed: int, row: int, position: int, size: int) -> torch.Tensor:
    """Gumbel noise (size,) fp32 for the token at one position of one row.

    A counter-based generator (Philox) is asked at (seed; row, position), so no draw depends on another,
    on the batch, or on the device.
    """
    bits = np.random.Philox(key=seed, counter=[0, 0, row, position])
    waits = np.random.Generator(bits).standard_exponential(size)  # in fp64: an fp32 draw is 0 once in 2^23
    return -torch.from_numpy(waits).log().float()


def noisy(logits, places: list[tuple[int, int]], s: Sampling) -> torch.Tensor:
    """(n, V) whose largest entries are the tokens drawn from finite logits (n, V), each for the (row,
    position) where its token is to stand; unit: logits.
    """
    if s.temperature == 0:
        return logits
    drawn = torch.stack([noise(s.seed, row, p, logits.shape[-1]) for row, p in places])
    summed = logits + s.temperature * drawn.to(logits.device)
    all_kept = s.top_k == 0 and s.top_p == 1 and s.min_p == 0
    return summed if all_kept else summed.masked_fill(~kept(logits, s), -torch.inf)


def sound(logits) -> torch.Tensor:
    """Whether logits (n, V) can be a model's, () bool: finite, not all equal, and within reason."""
    spread = logits.amax(-1) - logits.amin(-1)
    return ((spread > 0) & (spread < 1e6)).all()


def draw(logits, places: list[tuple[int, int]], s: Sampling, leads=False) -> tuple[list[int], list[float]]:
    """The tokens drawn from logits (n, V), each for its (row, position), and, if asked for, by how many
    logits, noise included, each was ahead of the second best.  The host reads the device once.
    """
    scores = noisy(logits, places, s)
    read = [sound(logits)[None], scores.argmax(-1)]
    if leads:
        read.append(scores.topk(2).values.diff().neg()[:, 0])
    is_sound, *numbers = torch.cat(read).tolist()
    if not is_sound:
        raise NotFinite("logits")
    return [int(token) for token in numbers[: len(places)]], numbers[len(places) :]
