"""Quality: what Slow-Fast Inference keeps of dense decoding, on a real model.

    python -m study.eval --task continue keys --samples 100 --share 0.125

Every prompt is prefilled once; each row of the comparison, a policy with a selector at one budget, continues
from a copy of that cache.  The budget is the share of the context that a fast step sees right after the
prefill. Prints a table and one JSON line last; Ctrl-C stops early and reports the samples done.  Read before:
`sfi.py`.
"""

import json
import math
import random
import re
import string
import sys
from collections import Counter
from dataclasses import dataclass, replace
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
from command.tracing import Trace
from model import DTYPES
from selector import SELECTORS
from sfi import Engine, SFIConfig
from study.forcing import force

DENSE = SFIConfig(policy="dense")
TAIL = 32  # tokens of the prompt that every row prefills itself: the evidence, and the refresh
POLICIES = ("sentence", "fixed", "never", "window")  # in this order: `fixed` is fitted to `sentence`
TASKS = ("continue", "keys", "several", "lookup", "free")
CHOICES = {  # of policy sentence; every other policy selects with the first
    **{name: dict(selector=name) for name in SELECTORS},
    "mean": dict(selector="paper", steps=()),
    "paper geometric": dict(selector="paper", fusion="geometric"),
    **{
        f"{name} without {step}": dict(selector=name, steps=tuple(s for s in steps if s != step))
        for name, (_, steps, _) in SELECTORS.items()
        for step in steps
    },
}


@dataclass
class Row:
    """One line of the table: its configuration and its samples' scores, by metric."""

    policy: str
    selector: str
    cfg: SFIConfig
    scores: dict


def recent_window(share: float) -> int:
    return 64 if share <= 0.125 else 128


def rows(policies, selectors, context: int, share: float, base: SFIConfig) -> list[Row]:
    """Dense first; then all policies and selectors at the same number of visible tokens."""
    recent = recent_window(share)
    n_select = round(share * context) - recent - base.n_sink
    if n_select < 1:
        raise ValueError(
            f"--share {share} of {context} tokens leaves {n_select} to select; allowed is 1 or more"
        )
    cfg = replace(base, n_select=n_select, n_recent=recent)
    made = [Row("dense", "", DENSE, {})]
    for policy in (p for p in POLICIES if p in policies):
        if policy == "window":
            made.append(Row(policy, "", replace(cfg, policy=policy, n_recent=recent + n_select), {}))
        for name in selectors if policy == "sentence" else ["follow"] * (policy in ("fixed", "never")):
            made.append(Row(policy, name, replace(cfg, policy=policy, **CHOICES[name]), {}))
    return made


def filler(rng: random.Random, text: Text, tokens: int) -> list[str]:
    """Paragraphs of the built-in text, another every time, of about so many tokens."""
    paragraphs = story.story(seed=rng.randrange(10**6), paragraphs=tokens // 70).split("\n\n")
    lengths = [len(text.encode(p)) + 1 for p in paragraphs]
    while sum(lengths) > tokens:
        lengths.pop()
        paragraphs.pop()
    return paragraphs


def needle(task: str, rng: random.Random, text: Text, tokens: int):
    """(prompt ids, answer, depth) of a retrieval task: digits hidden in prose, at a random depth (0 to 1)."""
    digits = lambda: "".join(rng.choice("0123456789") for _ in range(5))
    if task in ("keys", "free"):
        facts = [(f"The pass key is {(key := digits())}. Remember it. {key} is the pass key.", key)]
        question, start = "What is the pass key?", "The pass key is"
    else:
        several = task == "several"
        what, names, count = ("pass key of", story.PLACES, 4) if several else ("number of", story.NAMES, 16)
        subjects = rng.sample(names, count)
        facts = [(f"The {what} {subject} is {(key := digits())}.", key) for subject in subjects]
        question, start = f"What is the {what} {subjects[0]}?", f"The {what} {subjects[0]} is"
    paragraphs = filler(rng, text, tokens - 80 - 25 * len(facts))
    for fact, _ in facts:
        paragraphs.insert(rng.randrange(len(paragraphs) + 1), fact)
    whole, (fact, answer) = "\n\n".join(paragraphs), facts[0]
    ids = text.encode(text.chat(f"{whole}\n\n{question}"))
    ids += [] if task == "free" else text.encode(f" {start}".lstrip())
    return ids, answer, whole.index(fact) / len(whole)


class Bench:
    """The model, and what one prompt's rows share."""

    def __init__(self, model, text: Text, new: int):
        self.model, self.text, self.new = model, text, new
        self.ops = choose_backend("auto", model.device, DENSE)
        self.depths = []  # of the answers in the prompts, for the retrieval tasks

    def prefill(self, ids: list[int]):
        sizes = dict(max_length=len(ids) + self.new, new_tokens=self.new)
        self.base = Engine(self.model, DENSE, self.text.token_text, ops=self.ops, **sizes)
        self.base.prefill(0, ids[:-TAIL])
        self.tail = ids[-TAIL:]

    def start(self, cfg: SFIConfig, observe=None):
        """An engine of the row's configuration at the prompt's end, and its logits (1, V)."""
        engine = self.base.fork(cfg)
        engine.cache.observe = observe
        return engine, engine.prefill(0, self.tail)[0]

    def greedy(self, cfg: SFIConfig, new: int) -> list[int]:
        engine, logits = self.start(cfg)
        out = engine.pick(logits)
        while len(out) < new and out[-1] not in self.text.stop_ids:
            out += engine.pick(engine.step(out[-1:])[0])
        return out

    def forced(self, cfg: SFIConfig, tokens: list[int]):
        """Log-probabilities (T, V) of forced tokens, slow steps, and the mass that old memories covered."""
        trace = Trace(self.model.config, cfg, self.text.token_text, 1, self.base.max_length)
        engine, first = self.start(cfg, trace.refreshed)
        logits, slow = [first], 0
        for some, row_steps in force(engine, 0, tokens[:-1]):
            logits.append(some)
            slow += sum(row_step.refresh for row_step in row_steps)
        covered = trace.rows[0].found.get("mass_before")
        return torch.cat(logits).log_softmax(-1), slow, float(np.mean(covered)) if covered else math.nan


def continue_sample(bench: Bench, table: list[Row], ids: list[int], new: int):
    """Forced continuation: KL to dense, top-1 agreement, NLL lost, attention mass kept by old memories."""
    bench.prefill(ids[:-new])
    tokens, slow_steps = ids[-new:], None
    target = torch.tensor(tokens)[:, None]
    for row in table:
        cfg = row.cfg
        if cfg.policy == "fixed" and slow_steps is not None:  # as many as the sentence trigger made
            cfg = replace(cfg, max_interval=(new - 1) // (slow_steps + 1), min_gap=0)
        log_p, slow, mass = bench.forced(cfg, tokens)
        slow_steps = slow if row.policy == "sentence" else slow_steps
        if row.policy == "dense":
            dense = log_p
        nll = lambda x: -x.gather(1, target).mean().item()
        found = {
            "kl": (dense.exp() * (dense - log_p)).sum(-1).mean().item(),
            "top1": (dense.argmax(-1) == log_p.argmax(-1)).float().mean().item(),
            "nll_lost": nll(log_p) - nll(dense),
            "mass": mass,
            "slow": slow,
        }
        for name, value in found.items():
            row.scores.setdefault(name, []).append(value)


def needle_sample(bench: Bench, table: list[Row], ids: list[int], answer: str, depth: float, free: bool):
    """Whether the answer is found; in free generation also where the text first differs from dense's."""
    bench.prefill(ids)
    bench.depths.append(depth)
    outs = [bench.greedy(row.cfg, 48 if free else 8) for row in table]
    for row, out in zip(table, outs, strict=True):
        text = re.sub(r"\s", "", bench.text.tokenizer.decode(out))
        row.scores.setdefault("found", []).append(answer in text)
        if free:  # the first row is dense
            differ = (i for i, (a, b) in enumerate(zip(out, outs[0], strict=False)) if a != b)
            row.scores.setdefault("same_tokens", []).append(next(differ, len(outs[0])))


def file_sample(bench: Bench, table: list[Row], task: dict):
    """A question of a file, answered freely: exact match and F1 over words, the best over its answers."""
    ids = bench.text.encode(bench.text.chat(f"{task['context'].strip()}\n\n{task['question']}"))
    bench.prefill(ids)
    for row in table:
        out = bench.text.tokenizer.decode(bench.greedy(row.cfg, 48))
        row.scores.setdefault("f1", []).append(max(f1(out, a) for a in task["answers"]))
        row.scores.setdefault("exact", []).append(max(words(out) == words(a) for a in task["answers"]))


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


def summary(task: str, table: list[Row], context: int, share: float, depths=()) -> list[dict]:
    """A dict for each row and metric; diff: paired difference from the first row after dense; by_depth: means
    over the thirds of the text that the answer lay in.
    """
    out = []
    for row in table:
        for metric, values in row.scores.items():
            if np.isnan(values).any():
                continue
            other = table[min(1, len(table) - 1)].scores[metric]
            diff = [a - b for a, b in zip(values, other, strict=True)]
            out.append(
                {
                    "task": task,
                    "context": context,
                    "share": share,
                    "policy": row.policy,
                    "selector": row.selector,
                    "n_select": None if row.policy == "dense" else row.cfg.budget,
                    "metric": metric,
                    "score": round(float(np.mean(values)), 4),
                    "ci": interval(values),
                    "diff": round(float(np.mean(diff)), 4),
                    "diff_ci": interval(diff),
                    "samples": len(values),
                }
            )
            if depths:
                thirds = [
                    [v for v, d in zip(values, depths, strict=False) if int(3 * d) == i] for i in range(3)
                ]
                out[-1]["by_depth"] = [round(float(np.mean(t)), 3) if t else None for t in thirds]
    return out


def show(results: list[dict], table: list[Row]):
    metrics = [m for m in table[0].scores if any(r["metric"] == m for r in results)]
    print(f"{'policy':10}{'selector':28}{'N':>6}" + "".join(f"{m:>26}" for m in metrics))
    for row in table:
        line = f"{row.policy:10}{row.selector:28}" + f"{'' if row.policy == 'dense' else row.cfg.budget:>6}"
        for metric in metrics:
            match = [r for r in results if (r["policy"], r["selector"]) == (row.policy, row.selector)]
            match = [r for r in match if r["metric"] == metric]
            cell = "{score:.3f} [{ci[0]:.3f}, {ci[1]:.3f}]".format(**match[0]) if match else "-"
            line += f"{cell:>26}"
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


def samples(task: str, text: Text, context: int, new: int, count: int, source: list[int], tasks: list[dict]):
    """Arguments of each sample of a task, seeded by its number."""
    for i in range(min(count, len(tasks)) if tasks else count):
        rng = random.Random(f"{task} {i}")
        if tasks:
            yield (tasks[i],)
        elif task == "continue":
            if source:
                start = rng.randrange(len(source) - context - new)
                yield source[start : start + context + new], new
            else:
                long = "\n\n".join(filler(rng, text, context + new + 200))
                yield text.encode(long)[: context + new], new
        else:
            yield *needle(task, rng, text, context), task == "free"


def parser() -> Parser:
    p = Parser("study.eval", "What Slow-Fast Inference keeps of dense decoding, on a real model.")
    add = p.add_argument
    add("--ckpt", default="smollm2", help="as for generate.py; trained weights")
    add("--task", nargs="+", default=["continue", "keys"], help=f"{', '.join(TASKS)}, or a FILE.jsonl")
    add("--policy", nargs="+", choices=POLICIES, default=POLICIES, help="rows, beside dense")
    add(
        "--selector",
        nargs="+",
        choices=CHOICES,
        default=["follow", "paper"],
        help="rows of policy sentence",
    )
    add("--share", type=float, default=0.125, help="visible tokens / context right after the prefill")
    add("--n-select", type=int, metavar="N", help="N, where it shall not follow from --share")
    add("--context", type=int, default=2048, metavar="N", help="tokens of a prompt, about")
    add("--new", type=int, default=128, metavar="N", help="forced tokens of task continue")
    add("--samples", type=int, default=100, metavar="N", help="prompts a task")
    add("--min-gap", type=int, default=16, metavar="N", help="of the sentence trigger")
    add("--text", type=Path, metavar="FILE", help="a long text for task continue; none: the built-in one")
    add("--dtype", choices=DTYPES, default="float32", help="of weights and cache")
    add("--out", type=Path, metavar="FILE", help="also write the results and every sample's scores here")
    return p


def main(argv=None):
    p = parser()
    args = p.parse_args(argv)
    try:
        if args.n_select is not None:
            visible = lambda share: (SFIConfig.n_sink + args.n_select + recent_window(share)) / args.context
            args.share = visible(visible(0.0))
        if args.samples < 1 or args.new < 2 or args.context < 512 or not 0 < args.share < 1:
            raise ValueError(
                "allowed are --samples 1, --new 2, --context 512 or more, --share between 0 and 1, "
                "--n-select below --context"
            )
        for task in args.task:
            if task not in TASKS and not task.endswith(".jsonl"):
                raise ValueError(f"--task {task}; allowed are {', '.join(TASKS)} or a FILE.jsonl")
        base = SFIConfig(min_gap=args.min_gap, max_interval=max(64, args.min_gap))
        tables = {t: rows(args.policy, args.selector, args.context, args.share, base) for t in args.task}
        files = {t: read_tasks(Path(t)) for t in args.task if t not in TASKS}
        check_output("--out", args.out, (".json",), [])
        folder = checkpoints.resolve(args.ckpt)
        config, text = read_config(folder), Text(folder)
        source = text.encode(args.text.read_text(encoding="utf-8-sig")) if args.text else []
        if source and len(source) <= args.context + args.new:
            raise ValueError(f"--text has {len(source)} tokens; give more than --context + --new")
        check_lengths(config, [args.context], max(args.new, 48))
        model = load(folder, config, DTYPES[args.dtype])
        check_trained(model, text)
    except (ValueError, OSError) as e:
        p.error(" ".join(str(e).split()))
    results, raw = [], {}
    for task, table in tables.items():
        bench = Bench(model, text, max(args.new, 48))
        run = {"continue": continue_sample}.get(task, needle_sample if task in TASKS else file_sample)
        made = samples(task, text, args.context, args.new, args.samples, source, files.get(task, []))
        try:
            for sample in tqdm(made, total=args.samples, desc=task, disable=None):
                run(bench, table, *sample)
        except KeyboardInterrupt:
            done = min(len(values) for row in table for values in row.scores.values() or [[]])
            for row in table:
                row.scores = {name: values[:done] for name, values in row.scores.items()}
            bench.depths = bench.depths[:done]
            print(f"{task}: stopped after {done} samples", file=sys.stderr)
            if not done:
                break
        found = summary(task, table, args.context, args.share, bench.depths)
        print(f"\n{task}: {found[0]['samples']} prompts of about {args.context} tokens, share {args.share}")
        show(found, table)
        results += found
        scores = [{"policy": r.policy, "selector": r.selector, "scores": r.scores} for r in table]
        raw[task] = {"depths": bench.depths, "rows": scores} if bench.depths else {"rows": scores}
        if args.out:
            args.out.write_text(json.dumps({"rows": results, "raw": raw}) + "\n", encoding="utf-8")
    print(json.dumps({"ckpt": args.ckpt, "rows": results}))


if __name__ == "__main__":
    main()
