"""What the measurements ask: prompts with given answers, seeded, from the project's own texts.

Most answers are *forced*: every method is given the same tokens, and what it would have said at each is
compared, so that no model need be good at writing lists.  A fact counts if all its tokens are the likeliest.
Read before: `command/story.py`; used by `eval.py`.
"""

import ast
import random
import sysconfig
from pathlib import Path
from typing import NamedTuple

from command import story
from command.text import Text

TASKS = ("keys", "several", "lookup", "walk", "copy", "continue", "code", "free", "report")
FORMS = (  # of the sentences of `walk`: the subject is named 1 to 14 tokens in
    "{} has the number {}.",
    "The number of {} is {}.",
    "As for the number that was given to {}, it is {}.",
    "In the long list that hangs beside the door, the number of {} is {}.",
)


class Sample(NamedTuple):
    prompt: list[int]
    forced: list[int] = ()  # tokens that follow; none: the model writes freely
    facts: list[list[int]] = ()  # places in `forced` of each fact's tokens
    answers: list[tuple[str, ...]] = ()  # of a free answer: what each sentence must hold to count


def filler(rng: random.Random, text: Text, tokens: int) -> list[str]:
    """Paragraphs of the built-in text, another every time, of about so many tokens."""
    paragraphs = story.story(seed=rng.randrange(10**6), paragraphs=tokens // 70).split("\n\n")
    lengths = [len(text.encode(p)) + 1 for p in paragraphs]
    while sum(lengths) > tokens:
        lengths.pop()
        paragraphs.pop()
    return paragraphs


def hidden(rng: random.Random, text: Text, facts: list[str], tokens: int) -> str:
    """A text of about so many tokens in which each fact is a paragraph at a random place."""
    paragraphs = filler(rng, text, tokens - 80 - sum(len(text.encode(fact)) + 4 for fact in facts))
    for fact in facts:
        paragraphs.insert(rng.randrange(len(paragraphs) + 1), fact)
    return "\n\n".join(paragraphs)


def number(rng: random.Random) -> str:
    return "".join(rng.choice("0123456789") for _ in range(5))


def asked(text: Text, whole: str, question: str, start="") -> list[int]:
    """Prompt of a text and a question of it, the answer begun with `start`."""
    return text.encode(text.chat(f"{whole}\n\n{question}")) + text.encode(start)


def placed(text: Text, answer: str, facts: list[str]) -> dict:
    """The answer's tokens, and those that make up each fact, which must stand in it once, in order."""
    encoded, places, at = text.tokenizer.encode(answer, add_special_tokens=False), [], 0
    for fact in facts:
        at = answer.index(fact, at)
        end = at + len(fact)
        places.append([i for i, (a, b) in enumerate(encoded.offsets) if a < end and b > at])
        at = end
    return {"forced": encoded.ids, "facts": places}


def needle(task: str, rng: random.Random, text: Text, tokens: int) -> Sample:
    """Digits hidden in prose, at a random depth, and asked for."""
    key = number(rng)
    if task in ("keys", "free"):
        facts = [f"The pass key is {key}. Remember it. {key} is the pass key."]
        question, start = "What is the pass key?", "The pass key is"
    else:
        several = task == "several"
        what, names, count = ("pass key of", story.PLACES, 4) if several else ("number of", story.NAMES, 16)
        subjects = rng.sample(names, count)
        keys = [key] + [number(rng) for _ in subjects[1:]]
        facts = [f"The {what} {subject} is {key}." for subject, key in zip(subjects, keys, strict=True)]
        question, start = f"What is the {what} {subjects[0]}?", f"The {what} {subjects[0]} is"
    whole = hidden(rng, text, facts, tokens)
    if task == "free":
        return Sample(asked(text, whole, question), answers=[(key,)])
    return Sample(asked(text, whole, question, start), **placed(text, f" {key}.", [key]))


def walk(rng: random.Random, text: Text, tokens: int, form: int, count=8) -> Sample:
    """Numbers of `count` people at as many places; the answer gives them in another order."""
    names = rng.sample(story.NAMES, count)
    said = {name: FORMS[form].format(name, number(rng)) for name in names}
    whole = hidden(rng, text, list(said.values()), tokens - 16 * count)
    rng.shuffle(names)
    question = f"Which numbers have {', '.join(names[:-1])} and {names[-1]}? Answer in this order."
    answer = " ".join(said[name] for name in names)
    digits = [said[name][-6:-1] for name in names]
    return Sample(asked(text, whole, question), **placed(text, answer, digits))


def copy(rng: random.Random, text: Text, tokens: int, count=300) -> Sample:
    """A paragraph of about `count` tokens from the text's middle half, repeated."""
    paragraphs = filler(rng, text, tokens - 80)
    merged, length = [], 0
    first = rng.randrange(len(paragraphs) // 4, len(paragraphs) // 2)
    while length < count:
        merged.append(paragraphs[first + len(merged)])
        length += len(text.encode(merged[-1]))
    paragraph = " ".join(merged)
    paragraphs[first : first + len(merged)] = [paragraph]
    start = " ".join(paragraph.split()[:6])
    question = f'Repeat the paragraph that begins with "{start}".'
    return Sample(asked(text, "\n\n".join(paragraphs), question), forced=text.encode(paragraph)[:count])


def report(rng: random.Random, text: Text, tokens: int, count=10) -> Sample:
    """A sentence on each of ten people, written freely; it counts if it names the trade and the animal."""
    trades = "baker potter sailor tailor miller weaver farmer doctor painter teacher".split()
    animals = "goat parrot donkey cat rabbit horse pig goose sheep dog".split()
    names = rng.sample(story.NAMES, count)
    rng.shuffle(trades)
    rng.shuffle(animals)
    facts = list(zip(names, trades, animals, strict=True))
    said = [f"{name} is a {trade} and keeps a {animal}." for name, trade, animal in facts]
    whole = hidden(rng, text, said, tokens)
    rng.shuffle(facts)
    question = (
        f"Say of each of these people in one sentence what trade they have and which animal they keep: "
        f"{', '.join(name for name, _, _ in facts)}."
    )
    return Sample(asked(text, whole, question), answers=facts)


def continuation(rng: random.Random, text: Text, tokens: int, new: int, source: list[int]) -> Sample:
    """A place in a long text, and the tokens after it."""
    if not source:
        source = text.encode("\n\n".join(filler(rng, text, tokens + new + 200)))
    start = rng.randrange(max(len(source) - tokens - new, 0) + 1)
    ids = source[start : start + tokens + new]
    return Sample(ids[:tokens], ids[tokens:])


def code_files() -> list[Path]:
    """Source files of Python's own library, in a fixed order."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def code(rng: random.Random, text: Text, tokens: int, new: int) -> Sample:
    """The first part of a file of Python's library, some of its functions without their bodies; then those
    functions in full.
    """
    files = code_files()
    while True:
        source = rng.choice(files).read_text(encoding="utf-8")
        if len(source) < 4 * (tokens + new):
            continue
        lines, ids = source.splitlines(), []
        lines = lines[: len(source[: 4 * (tokens + new)].splitlines())]
        nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
        nodes = [n for n in nodes if n.end_lineno < len(lines) and n.end_lineno - n.lineno >= 6]
        rng.shuffle(nodes)
        held, taken = [], set()
        for node in nodes:
            span = set(range(node.lineno, node.end_lineno + 1))
            if len(ids) < new and not span & taken:
                taken |= span
                held.append(node)
                ids += text.encode("\n\n" + "\n".join(lines[node.lineno - 1 : node.end_lineno]))
        gone = {i for n in held for i in range(n.body[0].lineno, n.end_lineno + 1)}
        left = "\n".join(line for i, line in enumerate(lines, 1) if i not in gone)
        prompt = text.encode(left)[-tokens:]
        if len(ids) >= new and len(prompt) == tokens:
            return Sample(prompt, ids[:new])


def sample(task: str, i: int, text: Text, tokens: int, new: int, source: list[int]) -> Sample:
    """The i-th prompt of a task, of about so many tokens; `new` forced tokens of a continuation."""
    rng = random.Random(f"{task} {i}")
    if task == "walk":
        return walk(rng, text, tokens, i % len(FORMS))
    if task == "copy":
        return copy(rng, text, tokens)
    if task == "report":
        return report(rng, text, tokens)
    if task == "continue":
        return continuation(rng, text, tokens, new, source)
    if task == "code":
        return code(rng, text, tokens, new)
    return needle(task, rng, text, tokens)
