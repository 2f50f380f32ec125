"""The sentence trigger, on single rules and on the tokens of two real tokenizers."""

from dataclasses import replace

import pytest

from command.text import Text
from sfi import Row, SFIConfig, advance, decide
from tests.conftest import SHARED

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
    ("dense", Row(length=60), " it", "dense"),
    ("sentence", Row(length=22), " it", "short"),
    ("sentence", Row(length=22, armed="ready"), "It", "short"),
    ("sentence", Row(length=23), " it", "first"),
    ("sentence", Row(length=60), " it", "first"),
    ("sentence", Row(length=60, memory=20), " it", "fast"),
    ("sentence", Row(length=60, memory=20, armed="ready", since=2), "It", "fast"),  # inside min_gap
    ("sentence", Row(length=60, memory=20, armed="ready", since=3), "It", "sentence"),
    ("sentence", Row(length=60, memory=20, armed="ready", since=3), "it", "fast"),
    ("sentence", Row(length=60, memory=20, armed="space", since=3), " It", "sentence"),
    ("sentence", Row(length=60, memory=20, since=6), " it", "fast"),
    ("sentence", Row(length=60, memory=20, since=7), " it", "interval"),
    ("sentence", Row(length=60, memory=20, armed="ready", since=7), "It", "sentence"),
    ("sentence", Row(length=20, memory=20), " it", "fast"),  # with a memory it is used, however short the row
    ("fixed", Row(length=60, memory=20, armed="ready", since=3), "It", "fast"),
    ("fixed", Row(length=60, memory=20, since=7), " it", "interval"),
    ("never", Row(length=23), " it", "first"),
    ("never", Row(length=60, memory=20, armed="ready", since=99), "It", "fast"),
    ("window", Row(length=11), " it", "short"),
    ("window", Row(length=12), " it", "re-anchor"),
    ("window", Row(length=60, memory=20, armed="ready", since=6), "It", "fast"),
    ("window", Row(length=60, memory=20, since=7), " it", "re-anchor"),
]


@pytest.mark.parametrize("policy, row, text, want", TABLE)
def test_what_a_row_does_next(policy, row, text, want):
    sizes = dict(n_sink=2, n_select=10, n_recent=8, align=4, min_gap=3, max_interval=7, n_evidence=5)
    before = replace(row)
    armed, reason = decide(row, SFIConfig(policy=policy, **sizes), text)
    assert reason == want and row == before
    assert armed == advance(row.armed, text)[0]
