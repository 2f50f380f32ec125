"""What is checked of the user's files, before any weights load, and where a NaN came from, after a run.

Each function raises ValueError with one line: what was got, what is allowed, what to do.  Used by
`generate.py`.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from command import story
from command.config import yarn_for
from model import ModelConfig, NotFinite
from sfi import Engine


def read_prompt(name: str) -> str:
    """The text of a file, or of standard input: UTF-8, with or without BOM, line ends as \\n."""
    if name == "-" and sys.stdin is None:
        raise ValueError("--prompt -: standard input is closed; give a file")
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        text = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as e:
        raise ValueError(
            f"--prompt {name}: {e.strerror.lower()}; give a readable text file, or - for standard input"
        ) from None
    except UnicodeDecodeError as e:
        raise ValueError(
            f"--prompt {name}: byte {e.start} is not UTF-8, {looks_like(data)}; "
            "allowed is UTF-8 text: convert the file"
        ) from None
    if "\0" in text:
        at = data.index(b"\0")
        raise ValueError(
            f"--prompt {name}: byte {at} is NUL, {looks_like(data)}; allowed is UTF-8 text: convert the file"
        )
    if not text.strip():
        raise ValueError(f"--prompt {name}: the text is empty; give a file with at least one word")
    return text


def looks_like(data: bytes) -> str:
    """What a file that is not UTF-8 text seems to be, by its first bytes and where its NUL bytes stand."""
    known = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"%PDF": "a PDF", b"PK\x03\x04": "a zip file"}
    known |= {b"\x1f\x8b": "a gzip file", b"\x89PNG": "a picture", b"\xff\xd8\xff": "a picture"}
    for first, kind in known.items():
        if data.startswith(first):
            return f"as in {kind}"
    if 0 not in data[:4000]:
        return "as in Latin-1 or another 8-bit encoding"
    share = lambda part: part.count(0) / max(len(part), 1)
    places = [share(data[i:4000:4]) for i in range(4)]
    if min(places[2:]) > 0.9 or min(places[:2]) > 0.9:
        return "as in UTF-32"
    even, odd = share(data[0:4000:2]), share(data[1:4000:2])
    if max(even, odd) > 0.3 and min(even, odd) < 0.1:
        return "as in UTF-16 without a byte order mark"
    return "as in a file that is no text"


def read_prompts(args) -> list[str]:
    """The texts with their question, checked, and with the flags that go with them."""
    if args.prompt and args.prompt.count("-") > 1:
        raise ValueError("--prompt has - more than once; standard input can be read once")
    for flag, text in (("--question", args.question), ("--system", args.system)):
        if text and any("\ud800" <= c <= "\udfff" for c in text):
            raise ValueError(f"{flag} is not UTF-8; allowed is UTF-8 text")
        if text is not None and not text.strip():
            raise ValueError(f"{flag} is empty; give a text, or leave the flag out")
    if args.raw and (args.system is not None or args.no_thinking):
        name = "--no-thinking" if args.no_thinking else "--system"
        raise ValueError(f"{name} with --raw; it belongs to the chat template, which --raw leaves out")
    texts = [read_prompt(name) for name in args.prompt] if args.prompt else [story.story()]
    question = args.question if args.question is not None or args.prompt else story.QUESTION
    return [f"{text.strip()}\n\n{question}" if question else text for text in texts]


def check_output(flag: str, path: Path | None, endings: tuple, prompts: list[str]):
    """ValueError unless the file can be written; what is there stays as it is."""
    if path is None:
        return
    if path.suffix.lower() not in endings:
        raise ValueError(f"{flag} {path}; allowed is a file name that ends in {' or '.join(endings)}")
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {path}: there is no folder {path.parent}; make it first")
    same = lambda name: os.path.samestat(path.stat(), os.fstat(0) if name == "-" else os.stat(name))
    if path.exists() and any(same(name) for name in prompts if name == "-" or os.path.exists(name)):
        raise ValueError(f"{flag} {path} is a --prompt too; give another file name")
    target = path.resolve()  # of a link that may lead nowhere yet
    new = not target.exists()
    try:
        target.open("ab").close()
    except OSError as e:
        raise ValueError(
            f"{flag} {path} cannot be written ({e.strerror.lower()}); give another file name"
        ) from None
    if new:
        target.unlink()


def check_plot(path: Path | None):
    """ValueError if a picture is wanted and matplotlib is not there."""
    if path is not None and find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib; pip install matplotlib, or leave the flag out")


def check_lengths(model: ModelConfig, prompt_tokens: list[int], max_new_tokens: int):
    """ValueError unless every prompt has tokens and fits, with the new ones, into the model's positions."""
    if not prompt_tokens or min(prompt_tokens) == 0:
        raise ValueError("the prompt is empty; give at least one token of text")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens = {max_new_tokens}; allowed is 0 or more")
    longest = max(prompt_tokens)
    if longest + max_new_tokens > model.max_positions:
        factor = yarn_for(model, longest + max_new_tokens)
        raise ValueError(
            f"prompt of {longest} tokens + {max_new_tokens} new ones = {longest + max_new_tokens}; the model "
            f"has {model.max_positions} positions: shorten the prompt or lower max_new_tokens"
            + f", or stretch the positions with --yarn {factor}"
            * bool(factor)
        )


def where_not_finite(engine: Engine) -> str:
    """What to say of an engine whose last step gave no usable numbers: where they came up first, found by
    running the step's passes again.
    """
    found, passed = [], []

    def look(block, inputs, out):
        passed.append(block)
        where = f"layer {block.self_attn.layer} gives values"
        if not out.isfinite().all():
            found.append(f"{where} that are not finite")
        elif (largest := out.abs().max().item()) > 1e18:  # whose squares, in the next norm, are infinite
            found.append(f"{where} up to {largest:.0e}, too large to be squared")

    hooks = [block.register_forward_hook(look) for block in engine.model.model["layers"]]
    try:
        for each in engine.passes:
            passed.clear()
            logits = engine.forward(*each)
        what = "values that are not finite" if not logits.isfinite().all() else "logits that say nothing"
        found.append(f"the output head gives {what}")
    except NotFinite:
        found.append(f"the attention of layer {len(passed)} gives values that are not finite")
    for hook in hooks:
        hook.remove()
    dtype = str(engine.model.dtype).removeprefix("torch.")
    return f"{found[0]}, in {dtype}; {NotFinite.advice}"
