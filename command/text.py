"""Text to tokens and back: the checkpoint's tokenizer, chat template and end tokens.

What the model sees is the file, then the question, as one user message of the checkpoint's chat template,
after the system message if one is given.  Control tokens written in a file, such as <|im_end|>, are fed as
the letters they are written with; with --raw there is no template, and they count.  The end tokens of
config.json, generation_config.json and the tokenizer all end an answer and are never printed.  Read next:
`generate.py`.
"""

import json
import re
from datetime import datetime
from functools import lru_cache
from pathlib import Path

from jinja2 import meta
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import DecodeStream

from command.config import read_json

# Stands inside a text where two neighbours must not become one token.  Unicode keeps this code point for such
# use inside programs; in a text from outside it means nothing and is dropped.
BREAK = "\ufdd0"
SPECIAL = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
BYTE = re.compile("<0x[0-9A-F]{2}>")  # how tokenizers with byte fallback name a byte


class Text:
    """Tokenizer, chat template and end tokens of one checkpoint folder."""

    def __init__(self, folder: Path):
        try:
            self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as e:  # tokenizers raises plain Exception for an absent or broken file
            raise ValueError(
                f"cannot read {folder / 'tokenizer.json'} ({e}); fetch the checkpoint's tokenizer.json"
            ) from None
        self.tokenizer.no_truncation()  # settings that some fine-tunes leave behind: nothing but the template
        self.tokenizer.no_padding()  # may shorten or lengthen the user's text
        named = read_json(folder / "special_tokens_map.json", {})
        self.settings = named | read_json(folder / "tokenizer_config.json", {})
        self._add_tokens(read_json(folder / "added_tokens.json", {}))
        self.generation_config = read_json(folder / "generation_config.json", {})
        self.stop_ids = self._stop_ids([read_json(folder / "config.json", {}), self.generation_config])
        self.control = self._control()
        self.template = self._template(folder / "chat_template.jinja")
        self.token_text = lru_cache(maxsize=None)(self._token_text)

    def _add_tokens(self, legacy: dict):
        """Tokens that the files beside tokenizer.json name and it lacks, as transformers adds them: those of
        tokenizer_config.json's added_tokens_decoder, or else of added_tokens.json, each with its id; then
        special tokens, in the order of SPECIAL.
        """
        have = {repr(token) for token in self.tokenizer.get_added_tokens_decoder().values()}
        listed = self.settings.get("added_tokens_decoder")
        try:
            special = [token for token in map(self._named, SPECIAL) if token]
            for key in ("additional_special_tokens", "extra_special_tokens"):
                extra = self.settings.get(key) or []
                special += map(token_content, extra.values() if isinstance(extra, dict) else extra)
            if listed is None:
                listed = {i: {"content": text, "special": text in special} for text, i in legacy.items()}
            wanted = sorted((int(i), AddedToken(**token)) for i, token in listed.items())
        except (TypeError, ValueError, AttributeError) as e:
            reason = " ".join(str(e).split())
            raise ValueError(
                f"the added tokens of tokenizer_config.json cannot be read ({reason}); fetch the file again"
            ) from None
        for i, token in wanted:
            if repr(token) in have:
                continue
            self.tokenizer.add_tokens([token])
            if (got := self.tokenizer.token_to_id(token.content)) != i:
                what = f"tokenizer_config.json gives {token.content!r} the id {i}, tokenizer.json {got}"
                raise ValueError(f"{what}; fetch both")
        known = {token.content for token in self.tokenizer.get_added_tokens_decoder().values()}
        new = [
            AddedToken(text, special=True) for text in dict.fromkeys(special) if text and text not in known
        ]
        self.tokenizer.add_tokens(new)

    def _template(self, file: Path) -> str | None:
        """The chat template: a file of its own, or in tokenizer_config.json, there perhaps one of several."""
        if file.exists():
            try:
                return file.read_text(encoding="utf-8")
            except (OSError, ValueError) as e:
                raise ValueError(f"cannot read {file} ({e}); fetch it again, or use --raw") from None
        found = self.settings.get("chat_template")
        if isinstance(found, list):
            named = {
                t.get("name"): t.get("template")
                for t in found
                if isinstance(t, dict) and isinstance(t.get("name"), str)
            }
            found = named.get("default")
        return found if isinstance(found, str) else None

    def _stop_ids(self, configs: list[dict]) -> frozenset[int]:
        """Every end token that config.json, generation_config.json or tokenizer_config.json names."""
        ids = set()
        for config in configs:
            eos = config.get("eos_token_id")
            named = eos if isinstance(eos, list) else [eos] * (eos is not None)
            if not all(type(i) is int for i in named):
                raise ValueError(
                    f"eos_token_id = {json.dumps(eos)}; allowed is a token id, or a list of such"
                )
            ids |= set(named)
        ids.add(self.tokenizer.token_to_id(self._named("eos_token") or ""))
        return frozenset(ids - {None})

    def _named(self, key: str) -> str | None:
        """A special token of tokenizer_config.json, which writes it as a string or as an object."""
        return token_content(self.settings.get(key))

    def _token_text(self, token: int) -> str:
        """Text of a token inside a text: some decoders strip the white space that a text begins with."""
        before = self.tokenizer.encode("a", add_special_tokens=False).ids
        decode = lambda ids: self.tokenizer.decode(ids, skip_special_tokens=False)
        return decode([*before, token])[len(decode(before)) :]

    def _control(self) -> re.Pattern:
        """Where control tokens stand in a text: those the tokenizer calls special, and any other added token
        in angle brackets, such as <think>.
        """
        added = self.tokenizer.get_added_tokens_decoder().values()
        names = [a.content for a in added if a.special or re.fullmatch("<.+>", a.content)]
        return re.compile("|".join(f"(?={re.escape(name)})" for name in names) or "(?!)")

    def quote(self, text: str) -> str:
        """`text` with every control token in it broken after its first character: `encode` then reads it as
        the letters it is written with.
        """
        text = text.replace(BREAK, "")
        starts = [m.start() + 1 for m in self.control.finditer(text)]
        return BREAK.join(text[i:j] for i, j in zip([0, *starts], [*starts, None], strict=True))

    def encode(self, text: str, special=False) -> list[int]:
        """Token ids of a text, control tokens in it included, unless quoted; `special` adds what the
        tokenizer puts around a text that has no chat template.
        """
        if special:
            return self.tokenizer.encode(text.replace(BREAK, "")).ids
        plain = lambda piece: self.tokenizer.encode(piece, add_special_tokens=False).ids
        first, *others = text.split(BREAK)
        ids, newline = plain(first), plain("\n")
        for piece in others:  # behind a newline, because some tokenizers put a space before whatever begins
            inside = plain("\n" + piece)
            whole = inside[: len(newline)] == newline
            ids += inside[len(newline) :] if whole else plain(piece)
        return ids

    def chat(self, content: str, system: str | None = None, thinking=True) -> str:
        """One user message as the checkpoint's chat template writes it, ready to be encoded and answered.

        What comes from the user is quoted.  thinking = False asks the template for an answer without
        reasoning.  ValueError where the template cannot do what is asked.
        """
        if not self.template:
            raise ValueError("the checkpoint has no chat template; use --raw to feed the text as it is")
        facts = {key: self._named(key) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
        facts = {key: token for key, token in facts.items() if token is not None}
        facts |= dict(add_generation_prompt=True, tools=None, documents=None)
        if not thinking:
            facts["enable_thinking"] = False
        try:
            env = template_environment()
            known = meta.find_undeclared_variables(env.parse(self.template))
            template = env.from_string(self.template)
            made = self._render(template, content, system, facts)
            ignored = system is not None and made == self._render(template, content, None, facts)
        except Exception as e:  # a template is a program, and fails like one
            reason = " ".join(str(e).split())
            raise ValueError(
                f"the checkpoint's chat template fails ({reason}); use --raw to do without"
            ) from None
        if not thinking and "enable_thinking" not in known:
            raise ValueError("the checkpoint's chat template has no thinking to turn off; drop --no-thinking")
        if ignored:
            raise ValueError("the checkpoint's chat template has no place for a system text; drop --system")
        return made

    def _render(self, template, content: str, system: str | None, facts: dict) -> str:
        """What the template makes of the messages, the user's text among it.

        Most templates want a message's content as a string; some want a list of parts, and fail or lose a
        string.
        """
        problem = None
        for form in (lambda text: text, lambda text: [{"type": "text", "text": text}]):
            message = lambda role, text, form=form: {"role": role, "content": form(self.quote(text))}
            messages = [] if system is None else [message("system", system)]
            messages.append(message("user", content))
            try:
                made = template.render(messages=messages, **facts)
                if holds(made, self.quote(content)) and "{'type':" not in made:  # a list, written out
                    return made
                problem = problem or TemplateError("it leaves the text out")
            except Exception as e:
                problem = problem or e
        raise problem


def holds(made: str, text: str) -> bool:
    """Whether a text stands in what a template made of it, white space and letters' case aside."""
    plain = lambda s: "".join(s.casefold().split())
    escaped = json.dumps(text, ensure_ascii=False)[1:-1]
    return plain(text) in plain(made) or plain(escaped) in plain(made)


def token_content(token) -> str | None:
    """The text of a token that a JSON file writes as a string or as an object."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def template_environment() -> ImmutableSandboxedEnvironment:
    """Jinja as published chat templates expect it."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    env.filters["tojson"] = lambda x, **kw: json.dumps(x, **{"ensure_ascii": False} | kw)
    env.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
    return env


class Generation(Extension):
    """{% generation %} .. {% endgeneration %}, which marks the answers for training: just its content."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message):
    raise TemplateError(message)


class Stream:
    """Turns tokens into text as they come, holding back a character until all of its bytes are there."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.stream = tokenizer, DecodeStream(skip_special_tokens=True)
        self.special = {i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
        self.ids, self.held, self.text = [], [], ""

    def push(self, token: int) -> str:
        """The text that `token` completes; "" if none."""
        if token in self.special:
            return ""
        self.ids.append(token)
        self.held.append(token)
        if BYTE.fullmatch(self.tokenizer.id_to_token(token) or ""):
            return ""  # a run of byte tokens is decoded as a whole
        piece, self.held = self.stream.step(self.tokenizer, self.held) or "", []
        self.text += piece
        return piece

    def finish(self) -> str:
        """What was held back: with it the pieces make up the decoded whole."""
        whole = self.tokenizer.decode(self.ids)
        rest = whole[len(self.text) :] if whole.startswith(self.text) else ""
        self.text += rest
        return rest
