"""How much faster a step is than in another checkout of this project: their benches, in turns.

    git worktree add ../before 150d720
    python -m study.versus ../before --out FILE.json -- --dtype bfloat16 --contexts 8192 --steps 130

What follows -- is passed to both.  Prints, for each row, the medians over the rounds and their ratios; the
file keeps every run.  Read before: `bench.py`.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

from command.checks import check_output
from command.parser import Parser

HERE = Path(__file__).resolve().parent.parent
TIMES = "dense_ms", "fast_ms", "slow_ms", "loop_ms_per_token"
READS = "bandwidth_gb_s", "weights_gb_s", "attention_gb_s"


def bench(folder: Path, flags: list[str]) -> dict:
    """The JSON that a checkout's bench prints last; its table goes to stderr as it comes."""
    command = ["bench.py"] if (folder / "bench.py").exists() else ["-m", "study.bench"]
    with subprocess.Popen(
        [sys.executable, *command, *flags], cwd=folder, stdout=subprocess.PIPE, text=True
    ) as run:
        for line in run.stdout:
            if not line.startswith("{"):
                print(line, end="", file=sys.stderr, flush=True)
    if run.returncode:
        raise ValueError(f"the bench of {folder} ended with exit code {run.returncode}")
    return json.loads(line)


def medians(runs: list[dict]) -> dict:
    """(batch, context) -> name -> the median over runs of what a row holds."""
    rows = [row | {"bandwidth_gb_s": run["bandwidth_gb_s"]} for run in runs for row in run["rows"]]
    keys = dict.fromkeys((row["batch"], row["context"]) for row in rows)
    of = lambda key, name: statistics.median(r[name] for r in rows if (r["batch"], r["context"]) == key)
    return {key: {name: of(key, name) for name in TIMES + READS} for key in keys}


def main(argv=None):
    p = Parser("study.versus", "How much faster a step is than in another checkout of this project.")
    p.add_argument("other", type=Path, help="a folder with the other commit")
    p.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each")
    p.add_argument("--out", type=Path, metavar="FILE.json", help="keep every run, as they come")
    p.epilog = "What follows -- is passed to both benches."
    argv = sys.argv[1:] if argv is None else argv
    end = argv.index("--") if "--" in argv else len(argv)
    args, flags = p.parse_args(argv[:end]), argv[end + 1 :]
    runs = {"here": [], "other": []}
    try:
        if args.rounds < 1 or not (args.other / "requirements.txt").exists():
            raise ValueError(
                f"{args.other}, --rounds {args.rounds}; allowed is a checkout, and 1 round or more"
            )
        check_output("--out", args.out, (".json",), [])
        for _ in range(args.rounds):
            for name, folder in (("other", args.other), ("here", HERE)):
                runs[name].append(bench(folder, flags))
                if args.out:
                    args.out.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    except (ValueError, OSError) as e:
        p.error(str(e))
    here, other = medians(runs["here"]), medians(runs["other"])
    print(f"{'batch':>6}{'context':>9}" + "".join(f"{name.split('_')[0]:>23}" for name in TIMES + READS))
    for (batch, context), row in here.items():
        before = other[batch, context]
        cells = [f"{before[n]:.4g} {row[n]:.4g} {before[n] / row[n]:.2f}x" for n in TIMES]
        cells += [f"{before[n]:.3g} {row[n]:.3g}" for n in READS]
        print(f"{batch:6}{context:9}" + "".join(f"{cell:>23}" for cell in cells))


if __name__ == "__main__":
    main()
