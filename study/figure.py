"""The picture of the method at the top of the README.

    python -m study.figure --out study/results/method.svg

Drawn from the rules of `trigger.py` and `sfi.py` on a made-up sentence: what a fast and a slow step read.
"""

import random
from pathlib import Path

import matplotlib

from command.parser import Parser

matplotlib.rcParams["svg.hashsalt"] = "sfi"  # the same file from run to run

WORDS = ". Rosa Marsh wrote a long letter home from over the sea".split()
SLOW = ("wrote",)  # the first word after a name
CACHED, N_SINK, N_SELECT, N_RECENT = 64, 3, 9, 8
COLOURS = {
    "sinks": "#4c566a",
    "selected": "#d08770",
    "recent": "#5e81ac",
    "since": "#88c0d0",
    "other": "#e5e9f0",
}


def cells(ax, x, y, kinds, width=1.0):
    """A strip of cached tokens, a cell each."""
    from matplotlib.patches import Rectangle

    for i, kind in enumerate(kinds):
        box = Rectangle((x + i * width, y), 0.86 * width, 3, facecolor=COLOURS[kind], edgecolor="none")
        ax.add_patch(box)


def box(ax, x, y, width, height, text, colour, **style):
    from matplotlib.patches import FancyBboxPatch

    shape = dict(boxstyle="round,pad=0,rounding_size=0.8", facecolor=colour, edgecolor="none")
    ax.add_patch(FancyBboxPatch((x, y), width, height, **shape))
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", **style)


def arrow(ax, start, end, colour, bend=0.0):
    style = dict(
        arrowstyle="-|>", color=colour, lw=1.6, connectionstyle=f"arc3,rad={bend}", shrinkA=2, shrinkB=2
    )
    ax.annotate("", xy=end, xytext=start, arrowprops=style)


def draw(path: Path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.9))
    figure.patch.set_facecolor("white")
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set_xlim(0, 100)
    ax.set_ylim(0, 49)
    ax.axis("off")
    chosen = set(random.Random(4).sample(range(N_SINK, CACHED - N_RECENT), N_SELECT))
    kind = lambda i: (
        "sinks"
        if i < N_SINK
        else "recent"
        if i >= CACHED - N_RECENT
        else "selected"
        if i in chosen
        else "other"
    )
    small, bold = dict(fontsize=10, color="#2e3440"), dict(fontsize=11, weight="bold", color="#2e3440")

    ax.text(4, 45.5, "full KV cache: every token, never evicted", **bold)
    cells(ax, 4, 41, [kind(i) for i in range(CACHED)], 1.44)

    packed = [k for k in map(kind, range(CACHED)) if k != "other"] + ["since"] * 5
    ax.text(53, 23.8, "compact memory: what fast steps read", **bold)
    cells(ax, 53, 19.2, packed, 1.44)
    x = 53.0
    for name, count in (("sinks", N_SINK), ("selected", N_SELECT), ("recent", N_RECENT), ("since", 5)):
        text = "new" if name == "since" else name
        ax.text(x + count * 0.72, 17.6, text, ha="center", va="top", fontsize=9, color=COLOURS[name])
        x += count * 1.44

    box(ax, 33, 28.5, 20, 6.5, "Selector\nper layer and KV head", "#ebcb8b", fontsize=10, color="#2e3440")
    width, left = 7.4, 5.2
    centre = {}
    for i, word in enumerate(WORDS):
        slow = word in SLOW
        colour = "#bf616a" if slow else "#a3be8c"
        box(
            ax,
            left + i * width,
            5.6,
            width - 0.9,
            4.2,
            word,
            colour,
            fontsize=11,
            color="white",
            weight="bold",
        )
        centre[i] = left + i * width + (width - 0.9) / 2
    first, fast = centre[WORDS.index("wrote")], centre[WORDS.index("home")]
    ax.text(left, 2.4, "decoding, a step a token:", **small)
    ax.text(left + 19, 2.4, "slow", fontsize=10, weight="bold", color="#bf616a")
    ax.text(left + 23.2, 2.4, "once a sentence has named what it is about;", **small)
    ax.text(left + 56.5, 2.4, "fast", fontsize=10, weight="bold", color="#7c9a63")
    ax.text(left + 60.3, 2.4, "otherwise", **small)

    arrow(ax, (first - 5, 40.6), (first - 1, 10.2), "#bf616a")
    ax.text(first - 5.4, 25, "1  dense attention\nover everything", ha="right", va="center", **small)
    arrow(ax, (first + 1, 10.2), (40, 28.2), "#bf616a", 0.15)
    ax.text(39.5, 20.5, "2  its scores", va="center", **small)
    arrow(ax, (53.3, 31.7), (66, 26.2), "#d08770", -0.2)
    ax.text(63.5, 32.2, "3  N tokens are chosen\n    and copied, packed", va="center", **small)
    arrow(ax, (70, 15.2), (fast, 10.2), "#7c9a63", 0.15)
    ax.text(72, 12.6, "4  attention over these alone", va="center", **small)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def parser() -> Parser:
    p = Parser("study.figure", "Draw the picture of the method.")
    p.add_argument("--out", type=Path, required=True, metavar="FILE.svg", help="or FILE.png")
    return p


if __name__ == "__main__":
    draw(parser().parse_args().out)
