"""Exact mode on a real model: are its tokens dense decoding's, and how many drafts are right?

    python -m study.exactness --prompts 40 --out study/results/exact_float32.json

Prompts of five kinds, 500 to 6,000 tokens, one budget N each in turn, greedy and sampled.  Drafts are taken
to cost what they do at --draft-cost, since at this model's size, and at these lengths, they would not pay.
Two texts may part where dense decoding's two best tokens are closer than 1e-3 (in logits, noise included):
such places are printed, and anything else is an error, exit code 1.  Read before: `exact.py`."""

import json
import random
import sys
from pathlib import Path

from tqdm import tqdm

from command import checkpoints
from command.checks import check_lengths, check_output
from command.config import read_config
from command.loading import load
from command.parser import Parser
from command.report import Tally
from command.text import Text
from exact import LEADS, Drafts, Speculation
from model import DTYPES
from sampling import GREEDY, Sampling, noisy
from sfi import Engine, SFIConfig, decode
from study.eval import DENSE, TAIL, Bench
from study.steps import commit
from study.tasks import filler, needle

KINDS = ("continuation", "key", "list", "code", "chat")
TIE = 1e-3  # logits
SOURCES = ("model.py", "sfi.py", "selector.py", "generate.py", "study/eval.py")


def prompt(kind: str, i: int, text: Text) -> list[int]:
    """Token ids of the i-th prompt, of 500 to 6,000 tokens."""
    rng = random.Random(f"{kind} {i}")
    tokens = rng.randrange(500, 6001)
    if kind == "key":
        return needle("free", rng, text, tokens).prompt
    if kind == "code":
        source = (Path(__file__).parent.parent / rng.choice(SOURCES)).read_text(encoding="utf-8")
        return text.encode(source)[:tokens]
    prose = "\n\n".join(filler(rng, text, tokens - 60))
    if kind == "continuation":
        return text.encode(prose)
    ask = {
        "list": "List fifty things that this text mentions, one a line, each with a short remark.",
        "chat": "What happens in this text, and who is in it?",
    }
    return text.encode(text.chat(f"{prose}\n\n{ask[kind]}"))


def decoded(bench: Bench, cfg: SFIConfig, new: int, sampling: Sampling):
    """(tokens, Tally, Drafts) of one decode from a copy of what the bench's prompt has cached."""
    engine, tally, tokens = bench.base.fork(cfg), Tally(), []
    speculation = Speculation(engine, sampling) if cfg.exact else None
    settings = dict(max_new_tokens=new, sampling=sampling, speculation=speculation)
    for step in decode(engine, [bench.prompt.ids[-TAIL:]], **settings):
        tally.add(step)
        tokens += step.tokens[0]
    return tokens, tally, speculation and speculation.drafts[0]


def parted(bench: Bench, ids: list[int], dense: list[int], exact: list[int], sampling: Sampling):
    """None where both texts are one; else (where they part, dense decoding's lead there in logits)."""
    at = next((i for i, (a, b) in enumerate(zip(dense, exact, strict=True)) if a != b), None)
    if at is None:
        return None
    known = ids + dense[:at]
    sizes = dict(max_length=len(known), new_tokens=1)
    engine = Engine(bench.model, DENSE, bench.text.token_text, ops=bench.ops, **sizes)
    scores = noisy(engine.prefill(0, known)[0], [(0, len(known))], sampling)
    return at, -scores.topk(2).values.diff().item()


def parser() -> Parser:
    p = Parser("study.exactness", "Exact mode's tokens against dense decoding's, on a real model.")
    add = p.add_argument
    add("--ckpt", default="smollm2", help="as for generate.py; trained weights")
    add("--prompts", type=int, default=40, metavar="N", help="prompts, of five kinds in turn")
    add("--new", type=int, default=200, metavar="N", help="tokens of each")
    add("--n-select", type=int, nargs="+", default=[64, 256, 1024], metavar="N", help="budgets, in turn")
    add("--temperature", type=float, nargs="+", default=[0.0, 0.8], metavar="T", help="0: greedy")
    add("--draft-cost", type=float, default=0.3, metavar="X", help="as for generate.py")
    add("--dtype", choices=DTYPES, default="float32", help="of weights and cache")
    add("--out", type=Path, metavar="FILE.json", help="also write every decode's counts here")
    return p


def main(argv=None):
    p = parser()
    args = p.parse_args(argv)
    try:
        if args.prompts < 1 or args.new < 2:
            raise ValueError("allowed are --prompts 1, --new 2 or more")
        check_output("--out", args.out, (".json",), [])
        configs = [
            SFIConfig(exact=True, n_select=n, n_recent=128, draft_cost=args.draft_cost) for n in args.n_select
        ]
        samplings = [Sampling(t, seed=1) if t else GREEDY for t in args.temperature]
        folder = checkpoints.resolve(args.ckpt)
        config, text = read_config(folder), Text(folder)
        check_lengths(config, [6000], args.new)
        model = load(folder, config, DTYPES[args.dtype])
    except (ValueError, OSError) as e:
        p.error(" ".join(str(e).split()))
    rows, wrong, bench = [], 0, Bench(model, text, False)
    result = dict(ckpt=args.ckpt, dtype=args.dtype, draft_cost=args.draft_cost, new=args.new, commit=commit())

    def keep():  # as they come: a long run that breaks off keeps what it has
        if args.out:
            args.out.write_text(json.dumps(result | {"rows": rows}) + "\n", encoding="utf-8")

    for i in tqdm(range(args.prompts), disable=None):
        kind, cfg = KINDS[i % len(KINDS)], configs[i % len(configs)]
        ids = prompt(kind, i, text)
        bench.read(ids, args.new)
        for sampling in samplings:
            (dense, *_), (exact, tally, drafts) = [
                decoded(bench, c, args.new, sampling) for c in (DENSE, cfg)
            ]
            place = parted(bench, ids, dense, exact, sampling)
            row = dict(kind=kind, prompt=len(ids), n_select=cfg.n_select, temperature=sampling.temperature)
            row |= dict(new=len(exact), fast=tally.fast, passes=tally.slow, reasons=dict(tally.reasons))
            row |= dict(drafted=tally.drafted, accepted=tally.accepted, parted=place)
            seen, right = (  # by class of lead, without what was assumed before
                [
                    round(have - first)
                    for have, first in zip(getattr(drafts, name), getattr(Drafts(), name), strict=True)
                ]
                for name in ("seen", "right")
            )
            row |= dict(seen=seen, right=right)
            rows.append(row)
            keep()
            if place:
                tie = place[1] < TIE
                wrong += not tie
                what = "a tie" if tie else "no tie"
                print(f"prompt {i} ({kind}): parts at token {place[0]}, lead {place[1]:.1e}: {what}")
    show(rows)
    print(json.dumps({"decodes": len(rows), "parted": sum(r["parted"] is not None for r in rows)}))
    sys.exit(wrong > 0 and args.dtype == "float32")


def show(rows: list[dict]):
    """Print the table: a line for every kind, budget and temperature."""
    heads = ("decodes", "equal", "drafted", "right", "drafts/pass", "tokens/pass")
    print(f"{'':>16}" + "".join(f"{head:>13}" for head in heads))
    for key in ("kind", "n_select", "temperature"):
        for value in dict.fromkeys(r[key] for r in rows):
            some = [r for r in rows if r[key] == value]
            total = lambda name, some=some: sum(r[name] for r in some)
            drafted, accepted, passes = total("drafted"), total("accepted"), total("passes")
            equal = sum(r["parted"] is None for r in some)
            line = f"{value!s:>16}{len(some):13}{equal:13}{drafted:13}{accepted / max(drafted, 1):13.1%}"
            print(line + f"{drafted / passes:13.1f}{(accepted + passes) / passes:13.2f}")
    seen, right = (
        [sum(counts) for counts in zip(*(r[name] for r in rows), strict=True)] for name in ("seen", "right")
    )
    print("right, by lead of the draft in logits:")
    for low, all_, ok in zip((0, *LEADS), seen, right, strict=True):
        print(f"{f'from {low}':>16}{ok:13} of {all_}" + f", {ok / max(all_, 1):.1%}")


if __name__ == "__main__":
    main()
