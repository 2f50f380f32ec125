"""The sentence trigger, on single rules and on the tokens of two real tokenizers."""

from dataclasses import replace

import pytest

from command.text import Text
from sfi import SFIConfig
from tests.conftest import SHARED
from trigger import Row, Trigger, advance, decide, look

# SmolLM2 has no token for these characters: 他 comes in bytes, the first of which fires, and the bytes of ？
# are no ender.
IN_BYTES = {"他走了。他回来": ["\N{REPLACEMENT CHARACTER}"], "他走了？他回来": []}
FIRINGS = [  # text, and the pieces that must fire, each the first token of a new sentence
    ("It was 98.6 degrees", []),
    ("at 192.168.1.1 today", []),
    ("fruit, e.g. the apple", []),
    ("and so on, i.e. no more", []),
    ("It ended.\n\nThe day", ["The"]),
    ("It ended. The day", [" The"]),
    ("Well... Then it rained", [" Then"]),
    ("What?! No", [" No"]),
    ('She said "go." She left', [" She"]),
    ("He left! (Quietly.) Then", [" (", " Then"]),
    ("他走了。他回来", ["他"]),
    ("他走了？他回来", ["他"]),
    ("“Stop.” He turned", [" He"]),
    ("see www.example.com now", []),
    ("Version 3.14 is out", []),
    ("It ended.  The day", [" The"]),
    ("Is it 5? 6 is more", ["6"]),
]


def fired(pieces):
    armed, out = "no", []
    for piece in pieces:
        armed, fires = advance(armed, piece)
        out += [piece] * fires
    return out


@pytest.mark.parametrize("name", ["qwen3", "smollm2"])
@pytest.mark.parametrize("sentence, want", FIRINGS, ids=[sentence for sentence, _ in FIRINGS])
def test_trigger_on_real_tokens(name, sentence, want, request):
    if name == "qwen3":
        folder = SHARED / "data" / "qwen3_tokenizer"
        if not folder.exists():
            pytest.skip("the published Qwen3 tokenizer is not beside the project")
        text = Text(folder)
    else:
        text, want = request.getfixturevalue("smollm2")[1], IN_BYTES.get(sentence, want)
    pieces = [text.token_text(i) for i in text.encode(sentence)]
    assert fired(pieces) == want, pieces


@pytest.mark.parametrize(
    "pieces, want",
    [
        ([".", " The"], [" The"]),
        ([".", "The"], []),  # no white space between
        ([". ", "The"], ["The"]),
        ([".", " ", "The"], ["The"]),
        ([".", '"', " The"], [" The"]),
        ([".", ' "', "Hello"], ["Hello"]),
        ([".", " the", " The"], []),  # the lower-case start used the ender up
        (["e", ".g", ".", " the"], []),
        (["3", ".", "14"], []),
        (["。", "他"], ["他"]),
        (["。”", "他"], ["他"]),
        (["?!", " No"], [" No"]),
        (["…", " Then"], [" Then"]),
        ([".", "", " The"], [" The"]),  # a token without text, such as half a character
        ([". The", " end"], []),
        ([".", " 7"], [" 7"]),
    ],
)
def test_trigger_rules(pieces, want):
    assert fired(pieces) == want


# N = 10, 2 sinks, 8 recent, aligned to 4: 23 tokens leave 10 candidates, 24 leave 14.
TABLE = [  # policy, row before the step, text of the token, what the step is
    ("dense", Row([0] * 60), " it", "dense"),
    ("sentence", Row([0] * 22), " it", "short"),
    ("sentence", Row([0] * 22, trigger=Trigger("ready")), "It", "short"),
    ("sentence", Row([0] * 23), " it", "first"),
    ("sentence", Row([0] * 60), " it", "first"),
    ("sentence", Row([0] * 60, memory=20), " it", "fast"),
    (
        "sentence",
        Row([0] * 60, memory=20, trigger=Trigger("ready"), since=2),
        "It",
        "fast",
    ),  # inside min_gap
    ("sentence", Row([0] * 60, memory=20, trigger=Trigger("ready"), since=3), "It", "sentence"),
    ("sentence", Row([0] * 60, memory=20, trigger=Trigger("ready"), since=3), "it", "fast"),
    ("sentence", Row([0] * 60, memory=20, trigger=Trigger("space"), since=3), " It", "sentence"),
    ("sentence", Row([0] * 60, memory=20, since=6), " it", "fast"),
    ("sentence", Row([0] * 60, memory=20, since=7), " it", "interval"),
    ("sentence", Row([0] * 60, memory=20, trigger=Trigger("ready"), since=7), "It", "sentence"),
    ("sentence", Row([0] * 20, memory=20), " it", "fast"),  # with a memory it is used, however short the row
    ("fixed", Row([0] * 60, memory=20, trigger=Trigger("ready"), since=3), "It", "fast"),
    ("fixed", Row([0] * 60, memory=20, since=7), " it", "interval"),
    ("never", Row([0] * 23), " it", "first"),
    ("never", Row([0] * 60, memory=20, trigger=Trigger("ready"), since=99), "It", "fast"),
    ("window", Row([0] * 11), " it", "short"),
    ("window", Row([0] * 12), " it", "re-anchor"),
    ("window", Row([0] * 60, memory=20, trigger=Trigger("ready"), since=6), "It", "fast"),
    ("window", Row([0] * 60, memory=20, since=7), " it", "re-anchor"),
]


@pytest.mark.parametrize("policy, row, text, want", TABLE)
def test_what_a_row_does_next(policy, row, text, want):
    sizes = dict(n_sink=2, n_select=10, n_recent=8, align=4, min_gap=3, max_interval=7, n_evidence=5)
    before = replace(row)
    trigger, reason = decide(row, SFIConfig(policy=policy, delay=0, **sizes), text)
    assert reason == want and row == before
    assert trigger == look(row.trigger, text, 0)[0]


SAID = {
    "no name": [*"A| man|.| He| ran| up| the| hill| to| see|.| No|.| So| it| was".split("|")],
    "name": [".", " The", " age", " of", " Mar", "y", " Lee", " is", " not", " told", "."],
    "name first": [".", " Mar", "y", " Lee", ",", " who", " ran"],
    "one name first": [".", " Mary", " ran", " up", " the", " hill"],
    "number": [".", " In", " ", "4", "7", " men", " ran"],
    "quoted": [".", ' "', "I", " saw", " Ann", "\n", " ran"],
    "Chinese": ["。", "他", "说", "他", "在", "北", "京", "。"],
}  # fmt: skip


@pytest.mark.parametrize(
    "text, delay, min_gap, slow",
    [
        ("no name", 0, 0, [3, 11, 13]),  # the paper's rule
        ("no name", 1, 0, [4, 12, 14]),
        ("no name", 2, 0, [5, 15]),  # the sentence "No." has no more than two tokens
        ("no name", 7, 0, [10]),  # its last token
        ("no name", 8, 0, []),
        ("no name", 0, 5, [11]),  # 3 fast steps are too few for the first, 1 for the last
        ("no name", 2, 5, [5, 15]),
        ("no name", 4, 9, []),
        ("name", 0, 0, [1]),
        ("name", 2, 0, [3, 7]),
        ("name", 10, 0, [7]),  # the first word after the name, and not again
        ("name first", 10, 0, [5]),
        ("one name first", 10, 0, []),  # its capital is the sentence's
        ("one name first", 3, 0, [4]),
        ("number", 10, 0, [5]),
        ("quoted", 10, 0, [5]),  # a line break, too, begins something new
        ("Chinese", 4, 0, [5]),
    ],
)
def test_a_sentence_is_looked_up_when_it_has_named_something(text, delay, min_gap, slow):
    """`since` counts from 0 before the text; a sentence that ends before its slow step has none."""
    row, cfg, found = Row([0] * 10**6, memory=1), SFIConfig(delay=delay, min_gap=min_gap), []
    for t, piece in enumerate(SAID[text]):
        row.trigger, reason = decide(row, cfg, piece)
        row.since = 0 if reason == "sentence" else row.since + 1
        found += [t] * (reason == "sentence")
    assert found == slow
