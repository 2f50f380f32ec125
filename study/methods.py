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
from trigger import advance


class Prompt:
    """A prompt read densely: its keys and values, and what its last queries and all queries attended to."""

    def __init__(self, model: Model, ids: list[int], linear, keep=256, votes=False):
        c, self.model, self.ids, self.linear = model.config, model, ids, linear
        shape = (c.num_hidden_layers, c.num_key_value_heads, len(ids), c.head_dim)
        self.k, self.v = torch.empty(shape), torch.empty(shape)
        self.keep = min(keep, len(ids))
        self.q = torch.empty((c.num_hidden_layers, c.num_attention_heads, self.keep, c.head_dim))
        self.received = torch.zeros(shape[:3]) if votes else None  # attention that a key has had in all
        for first in range(0, len(ids), 512):
            piece = ids[first : first + 512]
            logits = self.forward(piece, first, lambda *given, first=first: self.read(first, *given), 1)
        self.logits = logits  # (1, V) of the last token

    def forward(self, tokens, first, attention, n_logits):
        positions = torch.arange(first, first + len(tokens))[None]
        return self.model(torch.tensor([tokens]), positions, attention, self.linear, n_logits)[0]

    def read(self, first, layer, q, k, v):
        n, n_kv = first + q.shape[1], k.shape[2]
        self.k[layer, :, first:n], self.v[layer, :, first:n] = k[0].transpose(0, 1), v[0].transpose(0, 1)
        kept = n - max(first, len(self.ids) - self.keep)
        if kept > 0:
            at = n - kept - (len(self.ids) - self.keep)
            self.q[layer, :, at : at + kept] = q[0, -kept:].transpose(0, 1)
        K, V, q = self.k[layer, None, :, :n], self.v[layer, None, :, :n], q.transpose(1, 2)
        G = q.shape[1] // n_kv
        causal = torch.ones(q.shape[2], n, dtype=torch.bool).tril(first)
        if self.received is None:
            out = F.scaled_dot_product_attention(q, K, V, attn_mask=causal, enable_gqa=True)
            return out.transpose(1, 2)
        s = q[0].unflatten(0, (n_kv, G)).flatten(1, 2) @ K[0].mT * K.shape[-1] ** -0.5  # (K, G * T, n)
        p = s.masked_fill_(~causal.repeat(G, 1), -torch.inf).softmax(-1)
        self.received[layer, :, :n] += p.sum(1)
        return (p @ V[0]).unflatten(1, (G, -1)).flatten(0, 1).transpose(0, 1)[None]

    def evidence(self, layer: int, n: int):
        """Scores (K, G, n, S) of the prompt's last n queries, -inf for later keys."""
        S, k = len(self.ids), self.k[layer]
        n = min(n, self.keep)
        q = self.q[layer, :, self.keep - n :].unflatten(0, (len(k), -1))  # (K, G, n, D)
        s = q @ k[:, None].mT * k.shape[-1] ** -0.5
        return s.masked_fill_(torch.ones(n, S, dtype=torch.bool).triu(S - n + 1), -torch.inf)

    def answer(self, tokens: list[int], method, texts=()):
        """Logits (T, V) that predict each of T given tokens, as the method reads; and tokens read a step.

        texts: the decoded texts of the tokens, for methods that look at them.
        """
        S, T = len(self.ids), len(tokens) - 1
        method.start(self, tokens[:-1], texts)
        read = []

        def attention(layer, q, k, v):
            n_kv = k.shape[2]
            K = torch.cat([self.k[layer], k[0].transpose(0, 1)], dim=1)  # (K, P, D)
            V = torch.cat([self.v[layer], v[0].transpose(0, 1)], dim=1)
            q = q[0].unflatten(1, (n_kv, -1)).permute(1, 2, 0, 3)  # (K, G, T, D)
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
            return (p @ V[:, None]).permute(2, 0, 1, 3).flatten(1, 2)[None]

        if not T:
            return self.logits, float("nan")
        logits = self.forward(tokens[:-1], S, attention, T)
        return torch.cat([self.logits, logits]), sum(read) / len(read)


class Dense:
    """Everything is read."""

    def start(self, prompt: Prompt, tokens, texts):
        self.prompt, self.S, self.T = prompt, len(prompt.ids), len(tokens)

    def see(self, layer, s, q, K):
        return None

    def extra(self, layer) -> float:
        """Tokens' worth of reading a step beside what is visible."""
        return 0.0

    def nothing(self, n_kv):
        return torch.zeros((n_kv, self.T, self.S + self.T), dtype=torch.bool)


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
    return [a + delay for a, b in zip(begins, ends, strict=True) if a + delay < b]


def subjects(texts, latest: int = 10**9) -> list[int]:
    """At the first word after a name or number in each sentence, `latest` tokens after its start in any case.

    A name: a word with a capital, but for the sentence's first token.
    """
    begins = starts(texts)
    ends = [*begins[1:], len(texts)]
    looks = []
    for a, b in zip(begins, ends, strict=True):
        seen = False
        for t in range(a + 1, b):
            word = texts[t].lstrip()
            if (seen and texts[t][:1].isspace() and not word[:1].isupper()) or t - a == latest:
                looks.append(t)
                break
            seen = seen or word[:1].isupper() or word[:1].isdigit()
    return looks


@dataclass
class SlowFast(Dense):
    """Slow-Fast Inference, with the variants that were tried.

    looks: which tokens are fed in a slow step.  n_evidence queries of the prompt choose the first memory.
    past: weight of what earlier refreshes saw; peaks: what a refresh keeps of the largest attention that the
    followers count (0: forgotten); kept: queries of so many fast steps before a look are scored with its own;
    reserve: share of N that the prompt's evidence alone fills; layers: N of each layer, as a multiple.
    """

    cfg: SFIConfig
    looks: list = field(default_factory=list)
    n_evidence: int = 16
    past: float = 0.5
    peaks: float = 0.0
    kept: int = 0
    reserve: float = 0.0
    layers: list | None = None
    slide: int = 0  # without looks: the recent window starts anew after so many steps

    def see(self, layer, s, q, K):
        cfg, S, T = self.cfg, self.S, self.T
        norm = K.norm(dim=-1)
        N = round(cfg.budget * (self.layers[layer] if self.layers else 1))
        visible = self.nothing(len(K))
        visible[..., : cfg.n_sink] = True
        state = {}
        evidence = self.prompt.evidence(layer, self.n_evidence)
        self.memory(visible[:, : self.ends(-1)], layer, evidence, norm, S, N, state)
        bounds = [*self.looks, T]
        for look, end in pairwise(bounds):
            visible[:, look] = True
            first = max(look - self.kept, 0)
            self.memory(
                visible[:, look + 1 : end], layer, s[:, :, first : look + 1], norm, S + look + 1, N, state
            )
        for t in range(self.slide or T, T, self.slide or T):  # the window slides
            visible[:, t:, S - cfg.n_recent : cfg.recent_start(S + t)] = False
            visible[:, t:] |= state["chosen"]
        return visible

    def ends(self, i):
        return self.looks[i + 1] if i + 1 < len(self.looks) else self.T

    def memory(self, visible, layer, scores, norm, length, N, state):
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
        before = F.pad(peak[:, :-1], (FOLLOWERS, 0))
        f = torch.maximum(f, FOLLOWED * F.max_pool1d(before[None], FOLLOWERS, stride=1)[0])
        if self.reserve:
            if "kept" not in state:
                state["kept"] = top_n(f, round(self.reserve * N))
            f = f.scatter(1, state["kept"], torch.inf)
        return top_n(f, N)
