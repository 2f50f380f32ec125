"""The Selector `follow` as loops for the `cpu` backend: four short passes over a refresh's scores.

`select` is the twin of `selector.select`; the selector `paper` stays with PyTorch.  Letters: see `model.py`.
Read before: `selector.py`, `loops.py`.
"""

import numpy as np
import torch

from model import NotFinite
from native import HALF, LOG2E, ONE, ZERO, exp2, loop, part, share
from selector import FOLLOWED, FOLLOWERS, PAST
from selector import select as select_in_torch


@loop
def follow_loop(scores, past, first, M, use_past, use_heads, use_followers, slots, workers):
    """`selector.follow` and `selector.top_n` for one row: positions of the M candidates from `first` on into
    slots (K, N); scores (K, R, width) and past (K, S_max) fp32.  Returns whether the scores were finite.

    Four rounds, each of which needs all of the one before: facts of every row of scores, the evidence with
    the past, what heads and followers make of it, the N best.  `cuts` are where the candidates are divided.
    """
    n_kv, R = scores.shape[:2]
    cuts = np.arange(workers + 1) * M // workers
    f, peak = np.empty((n_kv, M), np.float32), np.empty((n_kv, M), np.float32)
    facts, sums = np.empty((3, n_kv, R), np.float32), np.zeros((n_kv, workers), np.float32)
    share(facts_of_rows, (scores, first, M, facts), workers)
    if not np.isfinite(facts[2].sum()):
        return False
    share(evidence_of_heads, (scores, past, first, facts, cuts, use_past, f, peak, sums), workers)
    share(join_heads, (past, first, cuts, sums, use_past, use_heads, use_followers, f, peak), workers)
    share(best_of_heads, (f, first, slots), workers)
    return True


@part
def facts_of_rows(scores, first, M, facts, worker, workers):
    """`softmax_facts` of the M candidates of each row of scores (K, R, width) into facts (3, K, R)."""
    n_kv, R = scores.shape[:2]
    for row in range(worker, n_kv * R, workers):
        h, r = row // R, row % R
        facts[0, h, r], facts[1, h, r], facts[2, h, r] = softmax_facts(scores[h, r, first : first + M])


@part
def evidence_of_heads(scores, past, first, facts, cuts, use_past, f, peak, sums, worker, workers):
    """Each head's evidence f and peaks (K, M), the past added, whose sums over each cut go into `sums`."""
    for cut in range(worker, len(cuts) - 1, workers):
        low, high = cuts[cut], cuts[cut + 1]
        for h in range(len(f)):
            evidence(scores[h], first + low, facts[:, h], f[h, low:high], peak[h, low:high])
            if use_past:
                sums[h, cut] = add_past(f[h, low:high], past[h, first + low : first + high])


@part
def join_heads(past, first, cuts, sums, use_past, use_heads, use_followers, f, peak, worker, workers):
    """Normalise f and keep it in `past`, average it with the mean over heads, let followers count."""
    n_kv = len(f)
    for cut in range(worker, len(cuts) - 1, workers):
        low, high = cuts[cut], cuts[cut + 1]
        if use_past:
            for h in range(n_kv):
                share_of_sum = ONE / sums[h].sum()
                mine, kept = f[h, low:high], past[h, first + low : first + high]
                for j in range(len(mine)):
                    mine[j] *= share_of_sum
                    kept[j] = mine[j]
        if use_heads:
            mean = np.zeros(high - low, np.float32)
            for h in range(n_kv):
                mine = f[h, low:high]
                for j in range(len(mean)):
                    mean[j] += mine[j] * (ONE / np.float32(n_kv))
            for h in range(n_kv):
                mine = f[h, low:high]
                for j in range(len(mean)):
                    mine[j] = (mine[j] + mean[j]) * HALF
        if use_followers:
            for h in range(n_kv):
                follow_peaks(f[h], peak[h], low, high)


@part
def best_of_heads(f, first, slots, worker, workers):
    """`top_n` of each head's f (K, M) into slots (K, N), which are positions from `first` on."""
    for h in range(worker, len(f), workers):
        top_n(f[h].view(np.int32), slots[h])
        slots[h] += first


@part
def softmax_facts(s):
    """The largest of the scores s, 1 / sum_j e^(s_j - largest), and their sum."""
    largest, total, plain = s[0], ZERO, ZERO
    for j in range(len(s)):
        largest = max(largest, s[j])
        plain += s[j]
    for j in range(len(s)):
        total += exp2((s[j] - largest) * LOG2E)
    return largest, ONE / total, plain


@part
def evidence(scores, first, facts, mean, peak):
    """`selector.evidence` of one head's candidates from `first` on, mean and peak (n,); scores (R, width) and
    what `softmax_facts` found, (3, R).
    """
    R = len(scores)
    for low in range(0, len(mean), 512):
        some, most = mean[low : low + 512], peak[low : low + 512]
        some[:], most[:] = 0, 0
        for r in range(R):
            s, largest, share = scores[r, first + low : first + low + 512], facts[0, r], facts[1, r]
            for j in range(len(some)):
                p = exp2((s[j] - largest) * LOG2E) * share
                some[j] += p * (ONE / np.float32(R))
                most[j] = max(most[j], p)


@part
def add_past(f, past):
    """f += PAST * past, (n,) each; returns the sum."""
    total = ZERO
    for j in range(len(f)):
        f[j] += np.float32(PAST) * past[j]
    for j in range(len(f)):
        total += f[j]
    return total


@part
def follow_peaks(f, peak, low, high):
    """In f[low:high]: at least FOLLOWED times the largest peak of the FOLLOWERS tokens before."""
    n, width = high - low + FOLLOWERS, 1
    most, longer = np.zeros(n, np.float32), np.zeros(n, np.float32)
    known = min(low, FOLLOWERS)
    most[FOLLOWERS - known :] = peak[low - known : high]
    while (
        2 * width <= FOLLOWERS
    ):  # most[i]: the largest of `width` peaks, the last that of low - FOLLOWERS + i
        now, earlier, largest = most[width:], most[: n - width], longer[width:]
        for i in range(len(now)):
            largest[i] = max(now[i], earlier[i])
        most, longer, width = longer, most, 2 * width
    mine, late, early = f[low:high], most[FOLLOWERS - 1 :], most[width - 1 :]
    for j in range(len(mine)):
        mine[j] = max(mine[j], np.float32(FOLLOWED) * max(late[j], early[j]))


@part
def top_n(bits, out):
    """Indices of the N largest numbers into out (N,), ascending; equal ones: the lower index.  bits: of fp32
    numbers that are not negative, which are in the numbers' order.
    """
    N = len(out)
    threshold, beyond = np.int32(0), np.int32(0x7F800001)  # the N-th largest is in [threshold, beyond)
    while beyond - threshold > 1:
        middle = np.int32(threshold + (beyond - threshold) // 2)
        n = count_from(bits, middle)
        if n >= N:
            threshold = middle
        else:
            beyond = middle
        if n == N:
            break
    left, n = N - count_from(bits, threshold + 1), 0  # for those that equal it
    for j in range(len(bits)):
        equal = bits[j] == threshold
        if bits[j] > threshold or (equal and left > 0):
            out[n] = j
            n, left = n + 1, left - equal


@part
def count_from(bits, least):
    """How many are at least so large."""
    n = 0
    for j in range(len(bits)):
        n += bits[j] >= least
    return n


def select(scores, key_norm, past, recent_start, n, cfg):
    if cfg.selector != "follow":
        return select_in_torch(scores, key_norm, past, recent_start, n, cfg)
    slots = torch.zeros((*key_norm.shape[:2], n), dtype=torch.int64)
    steps = [cfg.runs(step) for step in ("past", "heads", "followers")]
    for b, end in enumerate(recent_start.tolist()):
        if end < 0:
            continue
        if n > end - cfg.n_sink:
            raise ValueError(
                f"cannot select n = {n} of {end - cfg.n_sink} candidates; ask for at most that many"
            )
        seen = scores[b].numpy(), past[b].numpy(), cfg.n_sink, end - cfg.n_sink
        if not follow_loop(*seen, *steps, slots[b].numpy(), torch.get_num_threads()):
            raise NotFinite("attention scores")
    return slots
