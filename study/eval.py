"""Quality: what Slow-Fast Inference and its peers keep of dense decoding, on a real model.

    python -m study.eval --task walk copy --method sfi once window snapkv --samples 100 --share 0.125

Every prompt is read once; each method goes on from there, at the same budget: --share of the prompt's tokens
are visible to a fast step right after it.  `sfi` and `paper` run the engine, with other settings after a
colon (`sfi:delay=0,min_gap=16`); the others are masks over dense attention (`methods.py`), among them
`trial`, which is Slow-Fast Inference as a mask, with variants that the product has not.  Every method's
reading is counted, in cached tokens a step.  Prints a table and one JSON line last; --out is written anew
after every sample, and --resume goes on from what it holds.  Read before: `sfi.py`, `tasks.py`, `methods.py`.
"""

import json
import math
import re
import string
import sys
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from command import checkpoints, story
from command.checks import check_lengths, check_output
from command.config import read_config
from command.loading import load
from command.machine import choose_backend
from command.parser import Parser
from command.text import Text
from model import DTYPES
from selector import SELECTORS
from sfi import Engine, SFIConfig
from study.forcing import force
from study.methods import (
    H2O,
    Prompt,
    Quest,
    SlowFast,
    SnapKV,
    StreamingLLM,
    Tidal,
    by_sign,
    delayed,
    named,
    spaced,
)
from study.steps import commit
from study.tasks import TASKS, Sample, sample

DENSE = SFIConfig(policy="dense")
FREE = ("free", "report")
TAIL = 64  # tokens of the prompt that every engine reads itself: the evidence, and the refresh
PEERS = {"streaming": StreamingLLM, "snapkv": SnapKV, "h2o": H2O, "quest": Quest, "tidal": Tidal}
ENGINE = {  # methods that run the engine -> what they change in its configuration
    "sfi": {},
    "paper": {"selector": "paper"} | dict.fromkeys(SELECTORS["paper"].settings),  # None: its own
    "never": dict(policy="never"),
    "window": dict(policy="window"),
    "fixed": dict(policy="fixed"),  # as many slow steps as the first row with sentences, if there is one
}
TRIAL = ("once", "trial")
SIGNS = ("doubt", "drift", "sinks")


@dataclass
class Method:
    """A row of the table: a name such as `sfi` or `sfi:delay=0`, taken apart, and its samples' scores."""

    name: str
    scores: dict = field(default_factory=dict)

    def __post_init__(self):
        self.kind, _, given = self.name.partition(":")
        if self.kind not in ("dense", *ENGINE, *PEERS, *TRIAL):
            known = ", ".join(("dense", *ENGINE, *PEERS, *TRIAL))
            raise ValueError(f"--method {self.name}; allowed are {known}")
        of = SFIConfig if self.kind in ENGINE else SlowFast
        types = {f.name: f.type for f in fields(of)} | {"looks": str, "gap": int, "interval": int}
        self.settings = {}
        for name, _, value in (part.partition("=") for part in filter(None, given.split(","))):
            kind = str(getattr(types.get(name), "__name__", types.get(name)))
            if name not in types or self.kind in PEERS:
                raise ValueError(f"--method {self.name}: there is no setting {name!r}")
            number = float if "float" in kind else int if "int" in kind else str
            self.settings[name] = tuple(value.split("+")) if name == "steps" else number(value)

    @property
    def on_engine(self) -> bool:
        return self.kind == "dense" or self.kind in ENGINE

    def config(self, budget: int, base: SFIConfig) -> SFIConfig:
        """Of a fast step that sees `budget` tokens right after the prompt."""
        if self.kind == "dense":
            return DENSE
        changes = ENGINE.get(self.kind, {}) | (self.settings if self.kind in ENGINE else {})
        recent = budget - base.n_sink if self.kind == "window" else 64
        n_select = budget - base.n_sink - 64
        if n_select < 1:
            raise ValueError(f"a budget of {budget} tokens leaves {n_select} to select; allowed is 1 or more")
        return replace(base, **{"n_recent": recent, "n_select": n_select} | changes)

    def mask(self, budget: int, base: SFIConfig, s: Sample, texts, prompt: Prompt):
        """The method as a mask over a sample's answer, whose tokens have these texts."""
        if self.kind in PEERS:
            return PEERS[self.kind](budget)
        cfg, settings = self.config(budget, base), dict(self.settings)
        if self.kind == "once":
            return SlowFast(cfg, slide=cfg.max_interval, **settings)
        # looks: such as named@16, start@6, period@8, or a sign and its threshold: doubt@-1, drift@0.3
        rule, _, number = settings.pop("looks", "named").partition("@")
        gap = settings.pop("gap", cfg.min_gap)
        if rule in SIGNS:
            make = lambda looks: SlowFast(cfg, looks, sign=rule, **settings)
            return by_sign(prompt, s.forced, make, float(number), gap, cfg.max_interval)
        wanted = {"named": named, "start": delayed}
        found = wanted[rule](texts, int(number or 16)) if rule in wanted else []
        interval = int(number) - 1 if rule == "period" else settings.pop("interval", cfg.max_interval)
        return SlowFast(cfg, spaced(found, len(texts) - 1, gap, interval), **settings)


class Bench:
    """The model, and what one prompt's methods share."""

    def __init__(self, model, text: Text, votes: bool):
        self.model, self.text, self.votes = model, text, votes
        self.ops = choose_backend("auto", model.device, DENSE)

    def read(self, ids: list[int], new: int):
        """Read a prompt, to which up to `new` tokens will be added."""
        self.prompt = Prompt(self.model, ids, self.ops.parts, votes=self.votes)
        sizes = dict(max_length=len(ids) + new, new_tokens=new)
        self.base = Engine(self.model, DENSE, self.text.token_text, ops=self.ops, **sizes)
        n, cache = len(ids) - TAIL, self.base.cache
        cache.k[:, 0, :, :n], cache.v[:, 0, :, :n] = self.prompt.k[:, :, :n], self.prompt.v[:, :, :n]
        cache.key_norm[:, 0, :, :n] = self.prompt.k[:, :, :n].float().norm(dim=-1)
        self.base.rows[0].tokens = ids[:n]

    def start(self, cfg: SFIConfig):
        """An engine of a configuration at the prompt's end, and its logits (1, V)."""
        engine = self.base.fork(cfg)
        return engine, engine.prefill(0, self.prompt.ids[-TAIL:])[0]

    def greedy(self, cfg: SFIConfig, new: int) -> list[int]:
        engine, logits = self.start(cfg)
        out = engine.pick(logits)
        while len(out) < new and out[-1] not in self.text.stop_ids:
            out += engine.pick(engine.step(out[-1:])[0])
        return out

    def forced(self, cfg: SFIConfig, tokens: list[int]):
        """Logits (T, V) that predict forced tokens, tokens read or copied a step, and slow steps."""
        engine, first = self.start(cfg)
        logits, did = [first], []
        for some, row_steps in force(engine, 0, tokens[:-1]):
            logits.append(some)
            did += row_steps
        read = sum(row_step.visible + 2 * row_step.copied for row_step in did) / max(len(did), 1)
        return torch.cat(logits), read, sum(row_step.refresh for row_step in did)


def forced_sample(bench: Bench, methods: list[Method], s: Sample, share: float, base: SFIConfig):
    """What each method would have said at every token of a given answer: share of likeliest tokens that are
    the answer's, facts of which all tokens are, KL divergence from dense decoding, NLL lost, tokens read.
    """
    bench.read(s.prompt, len(s.forced))
    target, budget = torch.tensor(s.forced), round(share * len(s.prompt))
    dense, slow_steps = None, None
    texts = [bench.text.token_text(token) for token in s.forced]
    for method in methods:
        if method.on_engine:
            cfg = method.config(budget, base)
            if method.kind == "fixed" and slow_steps is not None and "max_interval" not in method.settings:
                period = (len(s.forced) - 1) // (slow_steps + 1)
                cfg = replace(cfg, min_gap=0, max_interval=max(period, 1))
            logits, read, slow = bench.forced(cfg, s.forced)
            slow_steps = slow if method.kind == "sfi" and slow_steps is None else slow_steps
        else:
            mask = method.mask(budget, base, s, texts, bench.prompt)
            logits, read = bench.prompt.answer(s.forced, mask)
            slow = len(getattr(mask, "looks", ()))
        log_p = logits.log_softmax(-1)
        dense = log_p if method.kind == "dense" else dense
        right = log_p.argmax(-1) == target
        found = {
            "facts": sum(bool(right[places].all()) for places in s.facts) / max(len(s.facts), 1),
            "right": right.float().mean().item(),
            "kl": (dense.exp() * (dense - log_p)).sum(-1).mean().item(),
            "nll_lost": (dense - log_p).gather(1, target[:, None]).mean().item(),
            "read": read,
            "slow": slow,
        }
        for name, value in found.items():
            if s.facts or name != "facts":
                method.scores.setdefault(name, []).append(value)


def free_sample(bench: Bench, methods: list[Method], s: Sample, share: float, base: SFIConfig):
    """Facts found in a freely written answer, and its tokens: all words of one in the same sentence."""
    new = 48 if len(s.answers) == 1 else 320
    bench.read(s.prompt, new)
    for method in methods:
        out = bench.greedy(method.config(round(share * len(s.prompt)), base), new)
        sentences = re.split(r"(?<=[.!?])\s|\n", bench.text.tokenizer.decode(out))
        said = [any(all(word in said for word in fact) for said in sentences) for fact in s.answers]
        method.scores.setdefault("facts", []).append(sum(said) / len(said))
        method.scores.setdefault("tokens", []).append(len(out))


def file_sample(bench: Bench, methods: list[Method], task: dict, share: float, base: SFIConfig):
    """A question of a file, answered freely: exact match and F1 over words, the best over its answers."""
    ids = bench.text.encode(bench.text.chat(f"{task['context'].strip()}\n\n{task['question']}"))
    bench.read(ids, 48)
    for method in methods:
        cfg = method.config(max(round(share * len(ids)), base.n_sink + 64 + 1), base)
        out = bench.text.tokenizer.decode(bench.greedy(cfg, 48))
        method.scores.setdefault("f1", []).append(max(f1(out, a) for a in task["answers"]))
        method.scores.setdefault("exact", []).append(max(words(out) == words(a) for a in task["answers"]))


def words(text: str) -> list[str]:
    """Lower-case words without punctuation and articles, as SQuAD's metric takes them (arXiv 1606.05250)."""
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return [word for word in plain.split() if word not in ("a", "an", "the")]


def f1(got: str, want: str) -> float:
    got, want = words(got), words(want)
    common = sum((Counter(got) & Counter(want)).values())
    return 2 * common / (len(got) + len(want)) if common else float(got == want)


def interval(values) -> list[float]:
    """95 % bootstrap interval of the mean, 2,000 resamples."""
    values, rng = np.asarray(values, dtype=float), np.random.default_rng(0)
    means = rng.choice(values, (2000, len(values))).mean(1)
    return [round(float(x), 4) for x in np.percentile(means, [2.5, 97.5])]


def summary(task: str, methods: list[Method], context: int, share: float) -> list[dict]:
    """A dict for each method and metric; diff: paired difference from dense (the first), or, where dense has
    none to lose (kl, nll_lost), from the second.
    """
    out = []
    for method in methods:
        for metric, values in method.scores.items():
            other = methods[min(int(metric in ("kl", "nll_lost")), len(methods) - 1)].scores[metric]
            diff = [a - b for a, b in zip(values, other, strict=True)]
            found = {
                "task": task,
                "context": context,
                "share": share,
                "method": method.name,
                "metric": metric,
            }
            found |= {"score": round(float(np.mean(values)), 4), "ci": interval(values)}
            found |= {"diff": round(float(np.mean(diff)), 4), "diff_ci": interval(diff)}
            out.append(found | {"samples": len(values)})
    return out


def show(results: list[dict], methods: list[Method]):
    metrics = list(methods[0].scores)
    print(f"{'method':36}" + "".join(f"{m:>24}" for m in metrics))
    for method in methods:
        line = f"{method.name:36}"
        for metric in metrics:
            match = [r for r in results if (r["method"], r["metric"]) == (method.name, metric)]
            line += f"{match[0]['score']:>9.3f} [{match[0]['ci'][0]:.3f}, {match[0]['ci'][1]:.3f}]".rjust(24)
        print(line)


def check_trained(model, text: Text):
    """ValueError for a model that knows nothing: quality of random weights means nothing."""
    ids = text.encode(story.story())[:256]
    engine = Engine(model, DENSE, text.token_text, max_length=256, new_tokens=0)
    logits = torch.cat([some for some, _ in force(engine, 0, ids)])[:-1]
    nll = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])).item()
    if nll > 0.7 * math.log(model.config.vocab_size):
        raise ValueError(
            f"the model predicts plain English at {nll:.1f} nats a token, no better than chance; "
            "quality is measured on trained weights: give another --ckpt"
        )


def read_tasks(path: Path) -> list[dict]:
    """The lines of a JSONL file of context, question and answers."""
    tasks = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            task = json.loads(line)
            if not all(isinstance(task.get(key), str) for key in ("context", "question")):
                raise ValueError("context and question must be texts")
            if not task.get("answers") or not all(isinstance(a, str) for a in task["answers"]):
                raise ValueError("answers must be a list of texts")
            tasks.append(task)
        if not tasks:
            raise ValueError("it is empty")
    except (OSError, ValueError, AttributeError) as e:
        raise ValueError(
            f"--task {path}, line {len(tasks) + 1}: {e}; allowed is a JSON object a line, with context, "
            "question, answers"
        ) from None
    return tasks


def earlier(path: Path, command: list[str]) -> tuple[dict, str]:
    """The scores that an earlier run left in --out, and its commit; ValueError if it was another command, the
    number of samples aside.
    """
    found = json.loads(path.read_text(encoding="utf-8"))
    same = lambda argv: re.sub(r" --resume| --samples \d+", "", " ".join(["", *argv]))
    if same(found["command"]) != same(command):
        raise ValueError(f"--resume: {path} is from another command:{same(found['command'])}; run that again")
    return found["raw"], found["commit"]


def parser() -> Parser:
    p = Parser(
        "study.eval", "What Slow-Fast Inference and its peers keep of dense decoding, on a real model."
    )
    add = p.add_argument
    add("--ckpt", default="smollm2", help="as for generate.py; trained weights")
    add("--task", nargs="+", default=["walk", "continue"], help=f"{', '.join(TASKS)}, or a FILE.jsonl")
    kinds = ", ".join((*ENGINE, *PEERS, *TRIAL))
    add("--method", nargs="+", default=["sfi", "once", "window"], help=f"beside dense: {kinds}")
    add("--share", type=float, default=0.125, help="visible tokens / prompt's tokens right after it")
    add("--n-select", type=int, metavar="N", help="N, where it shall not follow from --share")
    add("--context", type=int, default=2048, metavar="N", help="tokens of a prompt, about")
    add("--new", type=int, default=1024, metavar="N", help="forced tokens of tasks continue and code")
    add("--samples", type=int, default=100, metavar="N", help="prompts a task")
    add("--first", type=int, default=0, metavar="N", help="number of the first prompt")
    add("--text", type=Path, metavar="FILE", help="a long text for task continue; none: the built-in one")
    add("--dtype", choices=DTYPES, default="float32", help="of weights and cache")
    add("--out", type=Path, metavar="FILE", help="also write the results and every sample's scores here")
    add("--resume", action="store_true", help="go on where an earlier run of the command left --out")
    return p


def main(argv=None):
    p = parser()
    args = p.parse_args(argv)
    command, raw, commits = sys.argv[1:] if argv is None else argv, {}, commit()
    try:
        if args.n_select is not None:
            args.share = (SFIConfig.n_sink + args.n_select + 64) / args.context
        if args.samples < 1 or args.new < 2 or args.context < 512 or not 0 < args.share < 1 or args.first < 0:
            raise ValueError(
                "allowed are --samples 1, --new 2, --context 512 or more, --share between 0 and 1, "
                "--n-select below --context, --first 0 or more"
            )
        tables = {task: [Method(name) for name in ("dense", *args.method)] for task in args.task}
        for task, methods in tables.items():
            if task not in TASKS and not task.endswith(".jsonl"):
                raise ValueError(f"--task {task}; allowed are {', '.join(TASKS)} or a FILE.jsonl")
            for method in methods:
                method.config(round(args.share * args.context), SFIConfig())
                if not method.on_engine and (task in FREE or task not in TASKS):
                    raise ValueError(f"--method {method.name} is a mask, and task {task} is written freely")
        files = {t: read_tasks(Path(t)) for t in args.task if t not in TASKS}
        check_output("--out", args.out, (".json",), [])
        if args.resume and args.out and args.out.exists():
            raw, before = earlier(args.out, command)
            commits = ", ".join(dict.fromkeys((before, commits)))
        folder = checkpoints.resolve(args.ckpt)
        config, text = read_config(folder), Text(folder)
        source = text.encode(args.text.read_text(encoding="utf-8-sig")) if args.text else []
        if source and len(source) <= args.context + args.new:
            raise ValueError(f"--text has {len(source)} tokens; give more than --context + --new")
        check_lengths(config, [args.context], max(args.new, 320))
        model = load(folder, config, DTYPES[args.dtype])
        check_trained(model, text)
    except (ValueError, OSError) as e:
        p.error(" ".join(str(e).split()))
    results, rows = [], []

    def keep():  # as they come: a long run that breaks off keeps what it has
        if args.out:
            facts = {"command": command, "commit": commits, "rows": results + rows, "raw": raw}
            args.out.write_text(json.dumps(facts) + "\n", encoding="utf-8")

    for task, methods in tables.items():
        bench = Bench(model, text, any(method.kind == "h2o" for method in methods))
        run = forced_sample if task in TASKS else file_sample
        run = free_sample if task in FREE else run
        count = min(args.samples, len(files[task])) if task in files else args.samples
        for method in methods:
            method.scores = raw.get(task, {}).get(method.name, {})
        raw[task] = {method.name: method.scores for method in methods}
        done = len(next(iter(methods[0].scores.values()), ()))
        for i in tqdm(range(args.first + done, args.first + count), desc=task, disable=None):
            s = files[task][i] if task in files else sample(task, i, text, args.context, args.new, source)
            run(bench, methods, s, args.share, SFIConfig())
            rows = summary(task, methods, args.context, args.share)
            keep()
        rows = summary(task, methods, args.context, args.share)
        print(f"\n{task}: {max(count, done)} prompts of about {args.context} tokens, share {args.share}")
        show(rows, methods)
        results, rows = results + rows, []
    print(json.dumps({"ckpt": args.ckpt, "rows": results}))


if __name__ == "__main__":
    main()
