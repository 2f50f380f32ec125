"""The engine of one row, written to be obvious: what `sfi.Engine` is held against, and its configurations."""

from dataclasses import replace

import torch

from selector import select_row
from tests.tiny import SMALL, token_text
from trigger import Trigger, look


class Naive:
    """One row, written to be obvious: keeps every k and v in lists, and hides from attention what a step may
    not see by a mask.
    """

    def __init__(self, model, cfg):
        self.model, self.cfg = model, cfg
        self.k, self.v = ([[] for _ in range(model.config.num_hidden_layers)] for _ in range(2))
        self.tokens = []
        self.visible = None  # per layer and KV head: the set of positions in the memory
        self.past = [torch.zeros(3, 0) for _ in self.k]  # what selector `follow` remembers, per layer
        self.trigger, self.since, self.reasons = Trigger(), 0, []

    def forward(self, tokens, dense, refresh):
        first, n_evidence = len(self.k[0]), min(self.cfg.n_evidence, len(tokens))
        total = first + len(tokens)
        low, high = self.cfg.n_sink, self.cfg.recent_start(total)
        chosen = []

        def attention(layer, q, k, v):
            self.k[layer] += list(k[0])
            self.v[layer] += list(v[0])
            K, V = torch.stack(self.k[layer]), torch.stack(self.v[layer])  # (S, K, D)
            out = torch.zeros_like(q)
            scores = torch.empty(3, 5 * n_evidence, total)
            for t in range(len(tokens)):
                for h in range(15):
                    s = K[:, h // 5] @ q[0, t, h] / 4.0
                    if t >= len(tokens) - n_evidence:
                        scores[h // 5, h % 5 * n_evidence + t - len(tokens) + n_evidence] = s
                    see = torch.arange(total) <= first + t
                    if not dense:
                        see &= torch.tensor(
                            [p in self.visible[layer][h // 5] or p == first + t for p in range(total)]
                        )
                    out[0, t, h] = s.masked_fill(~see, -torch.inf).softmax(0) @ V[:, h // 5]
            if refresh:
                norm = torch.stack([K[low:high, j].norm(dim=-1) for j in range(3)])
                slots = [[]] * 3
                if self.cfg.budget:
                    new = torch.zeros(3, max(high - low - self.past[layer].shape[1], 0))
                    past = self.past[layer] = torch.cat([self.past[layer], new], dim=1)
                    slots = select_row(scores[:, :, low:high], norm, past, self.cfg.n_select, self.cfg)
                chosen.append(
                    [set(range(low)) | {int(p) for p in row} | set(range(high, total)) for row in slots]
                )
            return out

        logits = self.model(torch.tensor([tokens]), torch.arange(first, total)[None], attention)[0, -1]
        if refresh:
            self.visible = chosen
        elif not dense:
            for layer in self.visible:
                for head in layer:
                    head.add(first)
        return logits

    def prefill(self, tokens):
        self.trigger, self.since = Trigger("ready"), 0
        self.tokens += tokens
        total = len(self.k[0]) + len(tokens)
        refresh = self.cfg.policy != "dense" and self.cfg.candidates(total) > self.cfg.budget
        return self.forward(tokens, True, refresh)

    def step(self, token):
        cfg, n = self.cfg, len(self.k[0])
        self.trigger, looks = look(self.trigger, token_text(token), cfg.delay)
        slow = None
        if cfg.policy == "dense":
            slow = "dense"
        elif self.visible is None and cfg.candidates(n + (cfg.policy != "window")) <= cfg.budget:
            slow = "short"
        elif cfg.policy == "window":
            if self.visible is None or self.since == cfg.max_interval:
                memory = set(range(cfg.n_sink)) | set(range(cfg.recent_start(n), n))
                self.visible = [[set(memory) for _ in range(3)] for _ in range(2)]
                self.since = 0
        elif self.visible is None:
            slow = "first"
        elif cfg.policy == "sentence" and looks and self.since >= cfg.min_gap:
            slow = "sentence"
        elif cfg.policy in ("sentence", "fixed") and self.since == cfg.max_interval:
            slow = "interval"
        self.reasons.append(slow or "fast")
        self.since = 0 if slow else self.since + 1
        self.tokens.append(token)
        refresh = slow not in (None, "short", "dense")
        again = self.cfg.reread if refresh else 1  # the last tokens are forgotten and read anew
        for layer in (*self.k, *self.v):
            del layer[n + 1 - again :]
        return self.forward(self.tokens[-again:], bool(slow), refresh)


CONFIGS = {
    "sentence-follow": SMALL,
    "delayed": replace(SMALL, delay=2),
    "reread": replace(SMALL, delay=1, reread=3),
    "reread-more": replace(SMALL, min_gap=2, max_interval=4, reread=7),
    "sentence-paper": replace(SMALL, selector="paper"),
    "geometric": replace(SMALL, selector="paper", fusion="geometric"),
    "fixed": replace(SMALL, policy="fixed", max_interval=5),
    "never": replace(SMALL, policy="never"),
    "window": replace(SMALL, policy="window"),
    "dense": replace(SMALL, policy="dense"),
    "no-sinks": replace(SMALL, n_sink=0, align=1),
    "nothing-selected": replace(SMALL, n_select=0),
    "one-by-one": replace(SMALL, min_gap=0, max_interval=1),
}
