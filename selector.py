"""The Selector: which cached tokens the next fast steps may read.

A slow step's attention scores are the evidence; each KV head of each layer and row gets its own N positions.
A selector gives every candidate a score, and the N best are selected: `follow`, ours and the default, or
`paper`, the Slow-Fast Inference paper's (arXiv 2603.12038).  `SELECTORS` at the end lists them.
Letters: see `model.py`; M is the number of candidates, the positions n_sink .. n_sink + M - 1.  Read next:
`memory.py`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from model import NotFinite

# The constants of `paper`, from the paper.
ALPHA = 0.5  # power mean over evidence rows
NORM_WEIGHT, PRIOR_WEIGHT, END_WEIGHT = 0.5, 0.7, 0.4
PRIOR_POWER, BETA = 1.8, -math.log(0.6) / 0.9
MAX_FUSION = {1: 0.35}  # largest weight of the prior, by evidence rows; OTHER_FUSION for any other number
OTHER_FUSION = 0.25
NMS_RADIUS = 16  # tokens to either side
HEAD_TEMPERATURE, HEAD_WEIGHT = 2.0, 0.85
TINY = 1e-12
PAST = 9.0  # what earlier refreshes saw counts so many times the present one (ours)
FOLLOWERS, FOLLOWED = 24, 0.01  # the 24 tokens after one score at least 1 % of its attention (ours)


def select(scores, key_norm, past, recent_start, n, cfg):
    """Choose n tokens for every KV head of one layer, for the rows that are refreshed.

    scores (B, K, R, width) fp32 are those of `model.attend`; key_norm, past (B, K, S_max) fp32; recent_start
    (B,) int64: row b's candidates are the positions [n_sink, recent_start[b]), -1 for a row that is not
    refreshed.  Returns positions (B, K, n) int64, ascending and unique; 0 for rows that are not refreshed.
    """
    slots = torch.zeros((*key_norm.shape[:2], n), dtype=torch.int64, device=key_norm.device)
    for b, end in enumerate(recent_start.tolist()):
        if end >= 0:
            candidates = slice(cfg.n_sink, end)
            seen = scores[b][..., candidates], key_norm[b, :, candidates], past[b, :, candidates]
            slots[b] = select_row(*seen, n, cfg)
    return slots


def select_row(scores, key_norm, past, n, cfg):
    """Choose n of the M candidates for every KV head of one layer and row.

    scores (K, R, M) fp32, the scaled q.k of R evidence rows over the candidates, NotFinite where
    they are not finite; key_norm (K, M) fp32; past (K, M) fp32, written in place: what selector `follow`
    remembers from refresh to refresh, zeros before the first; n <= M.  cfg has n_sink, selector, steps and
    fusion (`sfi.SFIConfig`).  Returns positions (K, n) int64, ascending, unique.
    """
    if not scores.sum().isfinite():
        raise NotFinite("attention scores")
    if n > scores.shape[-1]:
        raise ValueError(f"cannot select n = {n} of {scores.shape[-1]} candidates; ask for at most that many")
    return top_n(SELECTORS[cfg.selector].score(scores, key_norm, past, cfg), n) + cfg.n_sink


def top_n(score, n):
    """Indices (K, n) of each row's n largest scores (K, M), ascending; equal scores go to the lower index."""
    if n == 0:
        return score.new_empty((score.shape[0], 0), dtype=torch.int64)
    threshold = score.topk(n, sorted=False).values.amin(-1, keepdim=True)  # (K, 1)
    above, equal = score > threshold, score == threshold
    left = n - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= left))
    return chosen.nonzero()[:, 1].view(-1, n)


def evidence(scores):
    """Mean and maximum over the rows, (K, M) each, of p = softmax of scores (K, R, M) over the candidates."""
    p = (head.softmax(-1, torch.float32) for head in scores)  # (R, M) each, one at a time
    mean, peak = zip(*((x.mean(0), x.amax(0)) for x in p), strict=True)
    return torch.stack(mean), torch.stack(peak)


def follow(scores, key_norm, past, cfg):
    """Score (K, M) of `follow`.

    f is the mean attention over the evidence rows.  past: f is averaged with what earlier refreshes gave,
    which has PAST times its weight, so the prompt's evidence fades slowly; a slow step has few queries.
    heads: then f is averaged with its mean over the KV heads.  followers: copying walks along the text, so a
    token counts at least FOLLOWED times the largest p of the FOLLOWERS tokens before it, over all rows.
    """
    f, peak = evidence(scores)
    if cfg.runs("past"):
        f = f + PAST * past
        f = past.copy_(f / f.sum(-1, keepdim=True))
    if cfg.runs("heads"):
        f = (f + f.mean(0)) / 2
    if cfg.runs("followers"):
        before = F.pad(peak[:, :-1], (FOLLOWERS, 0))  # (K, FOLLOWERS + M - 1)
        f = torch.maximum(f, FOLLOWED * F.max_pool1d(before[None], FOLLOWERS, stride=1)[0])
    return f


def paper(scores, key_norm, past, cfg):
    """The paper's score log s'' (K, M), step by step, in the log domain; it has no past."""
    log_s = power_mean(scores.float().log_softmax(-1), ALPHA if cfg.runs("power_mean") else 1.0)
    if cfg.runs("prior"):
        largest = MAX_FUSION.get(scores.shape[1], OTHER_FUSION)
        log_s = FUSIONS[cfg.fusion](log_s, structural_prior(key_norm), largest)
    if cfg.runs("nms"):
        log_s = suppress_neighbours(log_s)
    if cfg.runs("exclusive"):
        log_s = exclude_across_heads(log_s)
    return log_s


def power_mean(log_p, alpha):
    """log f (K, M): f = (mean_r p_r^alpha)^(1/alpha), renormalised; alpha = 1 is the mean."""
    log_f = (torch.logsumexp(alpha * log_p, dim=1) - math.log(log_p.shape[1])) / alpha
    return log_f if alpha == 1 else log_f.log_softmax(-1)


def structural_prior(key_norm):
    """log r (K, M), normalised: against unusually large key norms (K, M), and against crowding at the recent
    end.
    """
    x = torch.linspace(0, 1, key_norm.shape[-1], device=key_norm.device)  # (M,); a single candidate gets 0
    place = -BETA * x**PRIOR_POWER + END_WEIGHT * torch.log((1 - x).clamp_min(TINY))
    return (-NORM_WEIGHT * torch.log(key_norm.clamp_min(TINY)) + PRIOR_WEIGHT * place).log_softmax(-1)


def fusion_weight(log_f, log_r, largest):
    """lam (K, 1): the weight of r that makes ||(1 - lam) f + lam r||^2 smallest, clipped to [0, largest]; 0/0
    is 0.
    """
    f, r = log_f.exp(), log_r.exp()
    ff, fr, rr = (f * f).sum(-1, keepdim=True), (f * r).sum(-1, keepdim=True), (r * r).sum(-1, keepdim=True)
    spread = ff - 2 * fr + rr
    lam = torch.where(spread > 0, (ff - fr) / spread, 0.0)
    return lam.clamp(0.0, largest)


def fuse_arithmetic(log_f, log_r, largest):
    """log of s = (1 - lam) f + lam r, the minimiser of (1 - lam) KL(f||s) + lam KL(r||s)."""
    lam = fusion_weight(log_f, log_r, largest)
    return torch.logaddexp(log_f + torch.log1p(-lam), log_r + torch.log(lam))


def fuse_geometric(log_f, log_r, largest):
    """log of s ~ f^(1 - lam) r^lam, the minimiser of (1 - lam) KL(s||f) + lam KL(s||r)."""
    lam = fusion_weight(log_f, log_r, largest)
    return ((1 - lam) * log_f + lam * log_r).log_softmax(-1)


FUSIONS = {"arithmetic": fuse_arithmetic, "geometric": fuse_geometric}


def suppress_neighbours(log_s):
    """Soft non-maximum suppression: a score is lowered by its distance to the best within NMS_RADIUS."""
    best = F.max_pool1d(log_s[None], 2 * NMS_RADIUS + 1, stride=1, padding=NMS_RADIUS)[0]  # (K, M)
    return log_s - (best - log_s)


def exclude_across_heads(log_s):
    """A token is worth less to a KV head that scores it low beside the other heads; skipped when K <= 2."""
    if log_s.shape[0] <= 2:
        return log_s
    share = (log_s / HEAD_TEMPERATURE).softmax(0)  # (K, M)
    return log_s + HEAD_WEIGHT * torch.log(share.clamp_min(TINY))


class Selector(NamedTuple):
    """A way to score the candidates."""

    score: Callable  # (scores (K, R, M), key_norm (K, M), past (K, M), cfg) -> (K, M), the larger the better
    steps: tuple[str, ...]  # parts of it that can be switched off; `cfg.runs(step)` says which run
    settings: dict  # of SFIConfig, where none are given: when it looks, and with which queries


SELECTORS = {
    "follow": Selector(
        follow,
        ("past", "heads", "followers"),
        dict(max_interval=24, delay=16, min_gap=2, n_evidence=16, reread=4),
    ),
    "paper": Selector(
        paper,
        ("power_mean", "prior", "nms", "exclusive"),
        dict(max_interval=64, delay=0, min_gap=16, n_evidence=16, reread=1),
    ),
}
