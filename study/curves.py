"""Quality over bytes: what each method keeps of dense decoding against what it reads a token, a panel a task.

    results=study/results/quality_smollm2
    python -m study.curves ${results}_{walk,copy}{,_0.0625,_0.25}.json --out $results.png

From the rows that `study.eval --out` has written at several budgets.  Up is better everywhere.
"""

import json
from pathlib import Path

from command.parser import Parser

METHODS = {  # name in the files -> label, colour, marker; colours that colour blindness keeps apart
    "sfi": ("SFI", "#0072b2", "o"),
    "once": ("selected once", "#56b4e9", "v"),
    "window": ("sinks + window", "#999999", "s"),
    "paper": ("SFI, selector paper", "#e69f00", "D"),
    "snapkv": ("SnapKV", "#009e73", "^"),
    "h2o": ("H2O", "#f0e442", "P"),
    "quest": ("Quest", "#d55e00", "X"),
    "tidal": ("TidalDecode's kind", "#cc79a7", "*"),
}
METRIC = {
    "walk": "facts",
    "keys": "facts",
    "several": "facts",
    "lookup": "facts",
    "copy": "right",
}  # else: NLL
LABEL = {"facts": "facts right", "right": "likeliest tokens right", "nll_lost": "nats a token lost"}


def points(files: list[Path]) -> dict:
    """task -> method -> [(share of dense decoding's reading, score, low, high)], ascending."""
    found = {}
    for file in files:
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
        reads = {(r["task"], r["method"]): r["score"] for r in rows if r["metric"] == "read"}
        for r in rows:
            if r["metric"] == METRIC.get(r["task"], "nll_lost") and r["method"] in ("dense", *METHODS):
                share = reads[r["task"], r["method"]] / reads[r["task"], "dense"]
                point = share, r["score"], *r["ci"]
                found.setdefault(r["task"], {}).setdefault(r["method"], []).append(point)
    return {task: {m: sorted(p) for m, p in methods.items()} for task, methods in found.items()}


def draw(found: dict, path: Path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.6 * len(found), 3.9), layout="constrained")
    figure.patch.set_facecolor("white")
    for i, (task, methods) in enumerate(found.items()):
        ax = figure.add_subplot(1, len(found), i + 1)
        metric = METRIC.get(task, "nll_lost")
        dense = sum(y for _, y, *_ in methods["dense"]) / len(methods["dense"])
        ax.axhline(dense, color="#2e3440", lw=1, ls=":", label="dense" if i == 0 else None)
        for name, (label, colour, marker) in METHODS.items():
            if name in methods:
                x, y, low, high = zip(*methods[name], strict=True)
                error = [
                    [a - b for a, b in zip(y, low, strict=True)],
                    [b - a for a, b in zip(y, high, strict=True)],
                ]
                style = dict(color=colour, marker=marker, ms=6, lw=1.4, elinewidth=0.8)
                ax.errorbar(x, y, error, label=label if i == 0 else None, **style)
        ax.set_title(task, fontsize=11)
        ax.set_xlabel("read a token, share of dense decoding's", fontsize=9)
        ax.set_ylabel(LABEL[metric], fontsize=9)
        ax.invert_yaxis() if metric == "nll_lost" else None
        ax.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=5 * len(found) // 2, fontsize=9, frameon=False)
    figure.savefig(path, dpi=150)


def parser() -> Parser:
    p = Parser("study.curves", "Draw quality over bytes from the results of study.eval.")
    p.add_argument("files", type=Path, nargs="+", metavar="FILE.json", help="written by study.eval --out")
    p.add_argument("--out", type=Path, required=True, metavar="FILE.png", help="the picture")
    return p


def main(argv=None):
    p = parser()
    args = p.parse_args(argv)
    try:
        found = points(args.files)
        if not found:
            raise ValueError("the files hold no rows; give what study.eval --out has written")
    except (OSError, ValueError, KeyError) as e:
        p.error(" ".join(f"{type(e).__name__}: {e}".split()))
    draw(found, args.out)


if __name__ == "__main__":
    main()
