"""Text to tokens and back: the checkpoint's tokenizer, chat template and end tokens.

Read next: `generate.py`.
"""

import json
from datetime import datetime
from functools import lru_cache
from pathlib import Path

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from model import read_json


class Text:
    """Tokenizer, chat template and end tokens of one checkpoint folder."""

    def __init__(self, folder: Path):
        try:
            self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as e:  # tokenizers raises plain Exception for an absent or broken file
            raise ValueError(
                f"cannot read {folder / 'tokenizer.json'} ({e}); fetch the checkpoint's tokenizer.json"
            ) from None
        self.settings = read_json(folder / "tokenizer_config.json", {})
        configs = [read_json(folder / name, {}) for name in ("config.json", "generation_config.json")]
        self.stop_ids = self._stop_ids(configs)
        self.template = self._template(folder / "chat_template.jinja")
        self.token_text = lru_cache(maxsize=None)(self._token_text)

    def _template(self, file: Path) -> str | None:
        """The chat template: a file of its own, or in tokenizer_config.json, there perhaps one of several."""
        if file.exists():
            try:
                return file.read_text(encoding="utf-8")
            except (OSError, ValueError) as e:
                raise ValueError(f"cannot read {file} ({e}); fetch it again, or use --raw") from None
        found = self.settings.get("chat_template")
        if isinstance(found, list):
            found = {t["name"]: t["template"] for t in found if isinstance(t, dict) and len(t) == 2}.get(
                "default"
            )
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
        token = self.settings.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        return token if isinstance(token, str) else None

    def _token_text(self, token: int) -> str:
        """Text of a token inside a text: some decoders strip the white space that a text begins with."""
        before = self.tokenizer.encode("a", add_special_tokens=False).ids
        decode = lambda ids: self.tokenizer.decode(ids, skip_special_tokens=False)
        return decode([*before, token])[len(decode(before)) :]

    def encode(self, text: str, special=False) -> list[int]:
        """Token ids; `special` adds what the tokenizer puts around a text that has no chat template."""
        return self.tokenizer.encode(text, add_special_tokens=special).ids

    def chat(self, content: str) -> str:
        """One user message as the checkpoint's chat template writes it, ready for the answer."""
        if not self.template:
            raise ValueError("the checkpoint has no chat template; use --raw to feed the text as it is")
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        env.filters["tojson"] = lambda x, **kw: json.dumps(x, ensure_ascii=False, **kw)
        env.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
        tokens = {key: self._named(key) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
        tokens = {key: token for key, token in tokens.items() if token is not None}
        messages = [{"role": "user", "content": content}]
        try:
            return env.from_string(self.template).render(
                messages=messages, add_generation_prompt=True, **tokens
            )
        except Exception as e:  # a template is a program, and fails like one
            reason = " ".join(str(e).split())
            raise ValueError(
                f"the checkpoint's chat template fails ({reason}); use --raw to do without"
            ) from None


def _raise(message):
    raise TemplateError(message)


class Stream:
    """Turns tokens into text as they come, holding back a character until all of its bytes are there."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.stream, self.ids, self.text = (
            tokenizer,
            DecodeStream(skip_special_tokens=True),
            [],
            "",
        )

    def push(self, token: int) -> str:
        """The text that `token` completes; "" if none."""
        self.ids.append(token)
        piece = self.stream.step(self.tokenizer, token) or ""
        self.text += piece
        return piece

    def finish(self) -> str:
        """What was held back: with it the pieces make up the decoded whole."""
        whole = self.tokenizer.decode(self.ids)
        rest = whole[len(self.text) :] if whole.startswith(self.text) else ""
        self.text += rest
        return rest
