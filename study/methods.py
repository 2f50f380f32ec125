"""What a token may read, method by method: dense attention under a mask, for given answers.

With given tokens the hidden states of a layer depend only on what the layers before it read.  So a method is
a function that says, for one layer and all tokens of the answer, which positions each KV head reads, and the
whole answer is one forward pass, whatever the method.  Slow-Fast Inference is here too (`SlowFast`, held
against the engine by a test), with the variants of it that were tried; the others are written from their
papers.  Nothing here is fast, and nothing of it is part of the product.

Letters: see `model.py`; here S prompt tokens, T answer tokens, P = S + T.  Every method counts what it reads,
in cached tokens of one layer and head: a key alone is half a token.  Read before: `sfi.py`, `selector.py`;
used by `eval.py`.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F

from model import Model
from selector import FOLLOWED, FOLLOWERS, select_row, top_n
from sfi import SFIConfig
from trigger import Trigger, advance, look


class Prompt:
    """A prompt read densely: keys and values (L, K, S, D), and its last `keep` queries (L, H, keep, D).

    votes: also the attention that every key has had from all queries, (L, K, S), which H2O counts.
    """

    def __init__(self, model: Model, ids: list[int], parts, keep=256, votes=False):
        c, self.model, self.ids, self.parts = model.config, model, ids, parts
        shape = (c.num_hidden_layers, c.num_key_value_heads, len(ids), c.head_dim)
        self.k, self.v = (torch.empty(shape, dtype=model.dtype) for _ in range(2))
        self.keep = min(keep, len(ids))  # queries are kept in fp32
        self.q = torch.empty((shape[0], c.num_attention_heads, self.keep, c.head_dim))
        self.received = torch.zeros(shape[:3]) if votes else None
        for first in range(0, len(ids), 512):
            read = lambda *given, first=first: self.read(first, *given)
            self.logits = self.forward(ids[first : first + 512], first, read, 1)  # (1, V) of the last token

    def forward(self, tokens, first, attention, n_logits):
        positions = torch.arange(first, first + len(tokens))[None]
        return self.model(torch.tensor([tokens]), positions, attention, self.parts, n_logits)[0]

    def read(self, first, layer, q, k, v):
        n, n_kv, S = first + q.shape[1], k.shape[2], len(self.ids)
        self.k[layer, :, first:n], self.v[layer, :, first:n] = k[0].transpose(0, 1), v[0].transpose(0, 1)
        q = q.transpose(1, 2)  # (1, H, T, D)
        at = max(first, S - self.keep)
        if at < n:
            self.q[layer, :, at - (S - self.keep) : n - (S - self.keep)] = q[0, :, at - first :]
        K, V = self.k[layer, None, :, :n], self.v[layer, None, :, :n]
        causal = torch.ones(q.shape[2], n, dtype=torch.bool).tril(first)
        if self.received is not None:
            grouped = q[0].unflatten(0, (n_kv, -1)).flatten(1, 2).float()  # (K, G * T, D)
            s = grouped @ K[0].mT.float() * K.shape[-1] ** -0.5
            s.masked_fill_(~causal.repeat(q.shape[1] // n_kv, 1), -torch.inf)
            self.received[layer, :, :n] += s.softmax(-1).sum(1)
        out = F.scaled_dot_product_attention(q, K, V, attn_mask=causal, enable_gqa=True)
        return out.transpose(1, 2)

    def evidence(self, layer: int, n: int):
        """Scores (K, G, n, S) of the prompt's last n queries, -inf for later keys."""
        S, k = len(self.ids), self.k[layer]
        n = min(n, self.keep)
        q = self.q[layer, :, self.keep - n :].unflatten(0, (len(k), -1))  # (K, G, n, D)
        s = q @ k[:, None].mT.float() * k.shape[-1] ** -0.5
        return s.masked_fill_(torch.ones(n, S, dtype=torch.bool).triu(S - n + 1), -torch.inf)

    def answer(self, tokens: list[int], method):
        """Logits (T, V) that predict each of T given tokens, as the method reads; and tokens read a step."""
        S, T = len(self.ids), len(tokens) - 1
        method.start(self, T)
        read = []

        def attention(layer, q, k, v):
            n_kv = k.shape[2]
            K = torch.cat([self.k[layer], k[0].transpose(0, 1)], dim=1).float()  # (K, P, D)
            V = torch.cat([self.v[layer], v[0].transpose(0, 1)], dim=1).float()
            q = q[0].float().unflatten(1, (n_kv, -1)).permute(1, 2, 0, 3)  # (K, G, T, D)
            s = q @ K[:, None].mT * K.shape[-1] ** -0.5  # (K, G, T, P)
            s.masked_fill_(torch.ones(T, S + T, dtype=torch.bool).triu(S + 1), -torch.inf)
            visible = method.see(layer, s, q, K)  # (K, T, P), or None: everything
            if visible is None:
                read.append(float(S + (T + 1) / 2))
            else:
                s = s.masked_fill_(~visible[:, None], -torch.inf)
                causal = torch.ones(T, S + T, dtype=torch.bool).tril(S)
                read.append((visible & causal).sum(-1).float().mean().item() + method.extra(layer))
            p = s.softmax(-1)
            return (p @ V[:, None]).permute(2, 0, 1, 3).flatten(1, 2)[None].to(v.dtype)

        if not T:
            return self.logits, float("nan")
        logits = self.forward(tokens[:-1], S, attention, T)
        return torch.cat([self.logits, logits]), sum(read) / len(read)


class Dense:
    """Everything is read."""

    def start(self, prompt: Prompt, T: int):
        self.prompt, self.S, self.T = prompt, len(prompt.ids), T
        self.n_kv = prompt.k.shape[1]

    def see(self, layer, s, q, K):
        return None

    def extra(self, layer) -> float:
        """Tokens' worth of reading a step beside what is visible."""
        return 0.0

    def nothing(self):
        return torch.zeros((self.n_kv, self.T, self.S + self.T), dtype=torch.bool)


@dataclass
class StreamingLLM(Dense):
    """Sinks and a sliding window (arXiv 2309.17453): `budget` tokens, 4 of them sinks."""

    budget: int

    def see(self, layer, s, q, K):
        visible = self.nothing()
        visible[..., :4] = True
        for t in range(self.T):
            visible[:, t, self.S + t + 1 - (self.budget - 4) : self.S + t + 1] = True
        return visible


@dataclass
class SnapKV(Dense):
    """Chosen once by the prompt's last 32 queries, whose votes are pooled (2404.14469); all later tokens
    stay.
    """

    budget: int

    def see(self, layer, s, q, K):
        window = 32
        p = self.prompt.evidence(layer, window).softmax(-1)[..., : self.S - window]  # (K, G, 32, M)
        votes = F.max_pool1d(p.sum(2).mean(1)[None], 7, stride=1, padding=3)[0]  # (K, M)
        visible = self.nothing()
        visible[..., self.S - window :] = True
        chosen = votes.topk(self.budget - window).indices
        return visible.scatter_(2, chosen[:, None].expand(-1, self.T, -1), True)


@dataclass
class H2O(Dense):
    """Half the budget the latest tokens, half those that had most attention so far; others are evicted for
    good (2306.14048).
    """

    budget: int

    def see(self, layer, s, q, K):
        S, half = self.S, self.budget // 2
        had = torch.zeros(self.n_kv, S + self.T)
        had[:, :S] = self.prompt.received[layer]
        kept = torch.zeros(self.n_kv, S + self.T, dtype=torch.bool)
        kept[:, S - half : S] = True
        kept.scatter_(1, had[:, : S - half].topk(self.budget - half).indices, True)
        visible = self.nothing()
        for t in range(self.T):
            kept[:, S + t] = True
            visible[:, t] = kept
            p = s[:, :, t].masked_fill(~kept[:, None], -torch.inf).softmax(-1)  # (K, G, P)
            had += p.sum(1)
            old = had[:, : S + t + 1 - half].masked_fill(~kept[:, : S + t + 1 - half], torch.inf)
            kept.scatter_(1, old.argmin(1, keepdim=True), False)
        return visible


@dataclass
class Quest(Dense):
    """At every step the pages of 16 tokens with the largest bound of q.k, and the page at hand; the first two
    layers are dense (2406.10774).  The query heads of a KV head choose together.
    """

    budget: int
    page: int = 16

    def see(self, layer, s, q, K):
        if layer < 2:
            return None
        pages = -(-K.shape[1] // self.page)
        padded = F.pad(K, (0, 0, 0, pages * self.page - K.shape[1]), mode="constant", value=0.0)
        paged = padded.unflatten(1, (pages, self.page))  # (K, pages, page, D)
        low, high = paged.amin(2)[:, None], paged.amax(2)[:, None]
        bound = (q.clamp_min(0) @ high.mT + q.clamp_max(0) @ low.mT) * K.shape[-1] ** -0.5
        at = (self.S + torch.arange(self.T)) // self.page  # (T,): the page at hand
        before = torch.arange(pages) < at[:, None]  # (T, pages): only whole pages
        score = bound.masked_fill(~before, -torch.inf).softmax(-1).mean(1)  # (K, T, pages)
        chosen = score.topk(self.budget // self.page - 1).indices
        visible = torch.zeros(score.shape, dtype=torch.bool).scatter_(2, chosen, True) & before
        visible |= torch.arange(pages) == at[:, None]
        return visible.repeat_interleave(self.page, 2)[..., : K.shape[1]]

    def extra(self, layer):
        return (self.S + self.T / 2) / self.page  # a page's two bounds are as long as one key and value


@dataclass
class Tidal(Dense):
    """At every step two layers choose tokens for those after them, and are dense, as the first two
    (TidalDecode, 2410.05076).
    """

    budget: int

    def see(self, layer, s, q, K):
        layers = self.prompt.k.shape[0]
        if layer in (2, round(layers * 13 / 32)):
            score = s.softmax(-1).mean(1)  # (K, T, P)
            self.chosen = self.nothing().scatter_(2, score.topk(self.budget).indices, True)
            return None
        return None if layer < 2 else self.chosen


# When to look: which of the answer's tokens, given their texts, are fed in a slow step.


def starts(texts) -> list[int]:
    """The first tokens of the sentences, as the engine's trigger sees them."""
    armed, found = "no", []
    for t, text in enumerate(texts):
        armed, fires = advance(armed, text)
        found += [t] * fires
    return found


def spaced(wanted, T: int, min_gap: int, max_interval: int) -> list[int]:
    """Looks at the wanted tokens that come min_gap fast steps after the last, and after max_interval."""
    looks, since, wanted = [], 0, set(wanted)
    for t in range(T):
        slow = (t in wanted and since >= min_gap) or since >= max_interval
        looks += [t] * slow
        since = 0 if slow else since + 1
    return looks


def delayed(texts, delay: int) -> list[int]:
    """`delay` tokens after each sentence's start, if it lasts so long."""
    begins = starts(texts)
    ends = [*begins[1:], len(texts)]
    return [a + delay for a, b in zip(begins, ends, strict=False) if a + delay < b]


def named(texts, delay: int = 16) -> list[int]:
    """The engine's rule: after each sentence's first name or number, or `delay` tokens in."""
    trigger, found = Trigger("ready"), []  # as after a prompt
    for t, text in enumerate(texts):
        trigger, looks = look(trigger, text, delay)
        found += [t] * looks
    return found


@dataclass
class SlowFast(Dense):
    """Slow-Fast Inference, with the variants that were tried.

    looks: which tokens are fed in a slow step.  n_evidence: queries of the prompt that choose the first
    memory.  past: weight of what earlier refreshes saw.  peaks: what a refresh keeps of the largest
    attention (0: nothing), which `reach` followers count.  kept: the queries of so many steps before a look
    are scored with its own.  reserve: share of N that the prompt's evidence alone fills.  layers: such as
    "0.5@3-10", these layers get so much of N, the others what that leaves.
    """

    cfg: SFIConfig
    looks: list = field(default_factory=list)
    n_evidence: int = 16
    past: float = 0.9
    peaks: float = 0.0
    kept: int = 3
    reach: int = FOLLOWERS
    reserve: float = 0.0
    layers: str = ""
    slide: int = 0  # without looks: the recent window starts anew after so many steps
    sign: str = ""  # what `by_sign` looks at: drift, sinks or doubt

    def see(self, layer, s, q, K):
        cfg, S, T = self.cfg, self.S, self.T
        norm, state = K.norm(dim=-1), {}
        N = self.selected(layer)
        visible = self.nothing()
        visible[..., : cfg.n_sink] = True
        evidence = self.prompt.evidence(layer, self.n_evidence)
        bounds = [*self.looks, T]
        self.memory(visible[:, : bounds[0]], evidence, norm, S, N, state)
        for at, end in pairwise(bounds):
            visible[:, at] = True
            scores = s[:, :, max(at - self.kept, 0) : at + 1]
            self.memory(visible[:, at + 1 : end], scores, norm, S + at + 1, N, state)
        for t in range(self.slide or T, T, self.slide or T):  # the window slides
            visible[:, t:, cfg.n_sink : cfg.recent_start(S + t)] = False
            visible[:, t:] |= state["chosen"]
        self.signs = self.signs + self.read_sign(s, q, visible) if layer else self.read_sign(s, q, visible)
        return visible

    def selected(self, layer):
        """N of a layer."""
        if not self.layers:
            return self.cfg.budget
        share, _, places = self.layers.partition("@")
        first, last = map(int, places.split("-"))
        n, L = last - first + 1, len(self.prompt.k)
        return round(
            self.cfg.budget * (float(share) if first <= layer <= last else (L - n * float(share)) / (L - n))
        )

    def read_sign(self, s, q, visible):
        """(T,), the larger the more a step needs a look, by its own attention: how far its query has turned
        from that of the last look (RefreshKV, 2411.05787), or the attention that falls on the sinks.
        """
        if self.sign == "sinks":
            p = s.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
            return p[..., : self.cfg.n_sink].sum(-1).mean((0, 1))
        if self.sign == "drift":
            last = torch.tensor([max((at for at in self.looks if at <= t), default=0) for t in range(self.T)])
            return 1 - F.cosine_similarity(q, q[:, :, last], dim=-1).mean((0, 1))
        return torch.zeros(self.T)

    def extra(self, layer):
        """Copies: a token is read and written."""
        return 2 * len(self.looks) * (self.cfg.n_sink + self.cfg.budget + self.cfg.n_recent) / self.T

    def memory(self, visible, scores, norm, length, N, state):
        """Mark what the memory made at `length` tokens holds; scores (K, G, W, P)."""
        cfg, end = self.cfg, self.cfg.recent_start(length)
        visible[..., end:] = True
        if not N or end - cfg.n_sink <= N:
            visible[:] = True
            return
        low = cfg.n_sink
        R = scores[..., low:end].flatten(1, 2)
        if cfg.selector == "follow":
            chosen = self.follow(R, state, N)
        else:
            chosen = select_row(R, norm[:, low:end], torch.zeros_like(norm[:, low:end]), N, cfg) - low
        chosen = chosen + low
        visible.scatter_(2, chosen[:, None].expand(-1, visible.shape[1], -1), True)
        state["chosen"] = visible.new_zeros(len(visible), 1, visible.shape[2]).scatter_(
            2, chosen[:, None], True
        )

    def follow(self, scores, state, N):
        p = scores.softmax(-1)  # (K, R, M)
        f, peak = p.mean(1), p.amax(1)
        M = f.shape[1]
        if "past" in state:
            grown = lambda x: F.pad(x, (0, M - x.shape[1]))
            f = self.past * grown(state["past"]) + (1 - self.past) * f
            peak = torch.maximum(peak, self.peaks * grown(state["peak"]))
        state["past"], state["peak"] = f, peak
        f = (f + f.mean(0)) / 2
        before = F.pad(peak[:, :-1], (self.reach, 0))
        f = torch.maximum(f, FOLLOWED * F.max_pool1d(before[None], self.reach, stride=1)[0])
        if self.reserve:
            if "kept" not in state:
                state["kept"] = top_n(f, round(self.reserve * N))
            f = f.scatter(1, state["kept"], torch.inf)
        return top_n(f, N)


def by_sign(prompt: Prompt, tokens: list[int], make, threshold: float, min_gap: int, max_interval: int):
    """`make(looks)`, a SlowFast, with looks where its sign passes a threshold: the fast step that shows it is
    taken again as a slow one.  Doubt is the lead of the likeliest token over the second, in logits, with a
    minus.  A pass over the answer for each look.
    """
    looks, layers = [], len(prompt.k)
    while True:
        method = make(looks)
        logits, _ = prompt.answer(tokens, method)
        signs = method.signs / layers
        if method.sign == "doubt":
            signs = logits[1:].topk(2).values.diff()[:, 0]
        first = looks[-1] + 1 if looks else 0
        wanted = (
            t
            for t in range(first, len(tokens) - 1)
            if t - first >= max_interval or (t - first >= min_gap and signs[t] > threshold)
        )
        if (t := next(wanted, None)) is None:
            return method
        looks.append(t)
