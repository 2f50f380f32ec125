"""Is what attention uses stable within a sentence?  Overlap of its top tokens over distance, on a real model.

    python -m study.stability --text novel.txt --samples 20 --out study/results/stability

The paper's premise (arXiv 2603.12038), measured: for every layer and KV head the `--top` old tokens with the
largest dense attention of one query are compared with those of a later query, `distance` tokens on, in the
same sentence or with one or more sentence starts in between.  Overlap is the share of tokens in common; mass
is what the older query's tokens hold of the attention that the later query's own get.  Old tokens are those
of the prompt without sinks and without its last `--recent`, which any memory shows.  Writes FILE.json and
FILE.png. Read before: `eval.py`, `tracing.py`.
"""

import json
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from command import checkpoints
from command.checks import check_lengths, check_output
from command.config import read_config
from command.loading import load
from command.machine import choose_backend
from command.parser import Parser
from command.text import Text
from sfi import Engine, SFIConfig
from study.eval import check_trained, interval
from study.tasks import sample
from trigger import advance

DISTANCES = ((1, 1), (2, 4), (5, 8), (9, 16), (17, 32), (33, 64))
PLACES = ("same sentence", "next sentence", "later sentence")


def sentences(pieces: list[str]) -> torch.Tensor:
    """The number of sentence starts up to each token, (T,), by the trigger's rules."""
    armed, count, out = "no", 0, []
    for piece in pieces:
        armed, fires = advance(armed, piece)
        count += fires
        out.append(count)
    return torch.tensor(out)


def supports(model, text: Text, ids: list[int], new: int, recent: int, top: int):
    """Per layer, overlap and mass (K, T, T) of the last `new` tokens' queries, earlier by later."""
    cfg, found = SFIConfig(n_evidence=new, n_recent=max(new, recent), n_select=1, n_sink=4), []

    def observe(row, layer, did, slots, scores):
        p = scores.unflatten(1, (-1, new)).softmax(-1).mean(1)[..., cfg.n_sink : did.visible - new - recent]
        chosen = torch.zeros_like(p).scatter_(-1, p.topk(top).indices, 1.0)  # (K, T, M)
        held = chosen @ p.transpose(1, 2)  # (K, earlier, later)
        own = held.diagonal(dim1=1, dim2=2)  # (K, T)
        found.append((chosen @ chosen.transpose(1, 2) / top, held / own[:, None]))

    sizes = dict(max_length=len(ids), new_tokens=0)
    ops = choose_backend("auto", model.device, cfg)
    engine = Engine(model, cfg, text.token_text, ops=ops, observe=observe, **sizes)
    engine.prefill(0, ids[:-new])
    found.clear()
    engine.prefill(0, ids[-new:])
    return found


def measure(model, text: Text, ids: list[int], new: int, recent: int, top: int):
    """Means over heads and pairs of queries, (2 metrics, layers, places, distances); nan: no such pair."""
    number = sentences([text.token_text(i) for i in ids[-new:]])
    apart = (number[None] - number[:, None]).clamp(max=2)  # (earlier, later)
    distance = torch.arange(new)[None] - torch.arange(new)[:, None]
    out = []
    for matrices in supports(model, text, ids, new, recent, top):
        cells = []
        for matrix in matrices:
            for place in range(3):
                for low, high in DISTANCES:
                    pairs = (distance >= low) & (distance <= high) & (apart == place)
                    cells.append(matrix[:, pairs].mean().item())
        out.append(np.reshape(cells, (2, len(PLACES), len(DISTANCES))))
    return np.stack(out, axis=1)


def draw(mean, path: Path):
    """Left: over distance, for each place; right: by layer, at 9 to 16 tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    names = [f"{a}" if a == b else f"{a}-{b}" for a, b in DISTANCES]
    for row, metric in enumerate(("overlap of the top tokens", "attention still covered")):
        left, right = figure.add_subplot(2, 2, 2 * row + 1), figure.add_subplot(2, 2, 2 * row + 2)
        for place, (name, marker) in enumerate(zip(PLACES, "o^s", strict=True)):
            left.plot(names, mean[row].mean(0)[place], marker=marker, label=name)
            right.plot(mean[row][:, place, 3], marker=marker, label=name)
        left.set_ylabel(metric)
        left.set_xlabel("distance in tokens")
        right.set_xlabel("layer (at a distance of 9 to 16 tokens)")
        for ax in (left, right):
            ax.set_ylim(0, 1)
            ax.grid(color="0.9")
            ax.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
        left.legend()
    figure.savefig(path, dpi=130)


def parser() -> Parser:
    p = Parser("study.stability", "Overlap of the top attention tokens over distance and sentence ends.")
    p.add_argument("--ckpt", default="smollm2", help="as for generate.py; trained weights")
    p.add_argument("--text", type=Path, metavar="FILE", help="a long text; none: the built-in one")
    p.add_argument("--samples", type=int, default=20, metavar="N", help="places in the text")
    p.add_argument("--context", type=int, default=2048, metavar="N", help="tokens before the compared ones")
    p.add_argument("--new", type=int, default=128, metavar="N", help="tokens compared with each other")
    p.add_argument("--recent", type=int, default=64, metavar="N", help="last tokens left out")
    p.add_argument("--top", type=int, default=64, metavar="N", help="tokens a query's support has")
    p.add_argument("--out", type=Path, metavar="FILE", help="write FILE.json and FILE.png")
    return p


def main(argv=None):
    p = parser()
    args = p.parse_args(argv)
    try:
        room = args.context - 4 - args.top
        if min(args.samples, args.new - 1, args.top) < 1 or not 0 <= args.recent <= room:
            least = "--samples 1, --new 2, --top 1, --recent 0"
            raise ValueError(f"allowed: {least} or more, a --context of more than these")
        check_output("--out", args.out and args.out.with_suffix(".json"), (".json",), [])
        folder = checkpoints.resolve(args.ckpt)
        text = Text(folder)
        source = text.encode(args.text.read_text(encoding="utf-8-sig")) if args.text else []
        if source and len(source) <= args.context + args.new:
            raise ValueError(f"--text has {len(source)} tokens; give more than --context + --new")
        config = read_config(folder)
        check_lengths(config, [args.context], args.new)
        model = load(folder, config, torch.float32)
        check_trained(model, text)
    except (ValueError, OSError) as e:
        p.error(" ".join(str(e).split()))
    cells = []
    for i in tqdm(range(args.samples), disable=None):
        s = sample("continue", i, text, args.context, args.new, source)
        cells.append(measure(model, text, s.prompt + s.forced, args.new, args.recent, args.top))
    cells = np.ma.masked_invalid(cells)  # (samples, 2, layers, places, distances)
    mean, rows = cells.mean(0).filled(np.nan), []
    print(f"{'distance':>10}" + "".join(f"{place:>38}" for place in PLACES))
    for d, (low, high) in enumerate(DISTANCES):
        line = f"{f'{low}-{high}':>10}"
        for place, name in enumerate(PLACES):
            values = cells[:, :, :, place, d].mean(2)  # (samples, 2)
            values = values[~np.ma.getmaskarray(values).any(1)].data
            if not len(values):
                line += f"{'-':>38}"
                continue
            (overlap, mass), spans = values.mean(0).tolist(), [interval(values[:, m]) for m in range(2)]
            rows.append({"distance": [low, high], "place": name, "overlap": round(overlap, 4)})
            rows[-1] |= {"overlap_ci": spans[0], "mass": round(mass, 4), "mass_ci": spans[1]}
            rows[-1] |= {"samples": len(values)}
            cell = f"{overlap:.3f} [{spans[0][0]:.3f}, {spans[0][1]:.3f}], mass {mass:.3f}"
            line += f"{cell:>38}"
        print(line)
    result = {"ckpt": args.ckpt, "top": args.top, "context": args.context, "rows": rows}
    if args.out:
        layers = {"overlap_by_layer": mean[0].tolist(), "mass_by_layer": mean[1].tolist()}
        args.out.with_suffix(".json").write_text(json.dumps(result | layers) + "\n", encoding="utf-8")
        draw(mean, args.out.with_suffix(".png"))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
