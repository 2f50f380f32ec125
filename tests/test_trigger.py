"""The sentence trigger, on single rules and on the tokens of two real tokenizers."""

import pytest

from command.text import Text
from sfi import advance
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
