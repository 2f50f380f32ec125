"""The argument parser of every command: defaults shown, errors in one line, no flag given twice in vain;
and control characters made harmless on a terminal.

Used by `generate.py` and the measurements.
"""

import argparse
import sys

MARKS = {i: 0x2400 + i for i in range(32) if chr(i) not in "\n\t"} | {127: 0x2421}  # control pictures
MARKS |= dict.fromkeys(range(128, 160), 0xFFFD)


def harmless(text: str, file) -> str:
    """`text` with control characters as visible marks where `file` is a terminal, which would obey them."""
    return text.translate(MARKS) if file.isatty() else text


class Parser(argparse.ArgumentParser):
    """An argument parser that shows defaults, refuses abbreviations and reports errors in one line.

    A flag that takes a list may be repeated, and all its values count; a text may be given once; of a number
    or a choice the last counts, as usual.
    """

    def __init__(self, prog, description, epilog=None):
        super().__init__(
            prog, description=description, epilog=epilog, formatter_class=Help, allow_abbrev=False
        )
        self.given = set()
        self.register("action", None, Store)  # instead of "the last one wins"

    def parse_known_args(self, args=None, namespace=None):
        self.given.clear()
        return super().parse_known_args(args, namespace)

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {harmless(' '.join(message.split()), sys.stderr)}; see --help\n")


class Store(argparse.Action):
    """Stores the value of a flag, or all of its values; a text is not silently replaced by another."""

    def __call__(self, parser, namespace, values, option_string=None):
        again = self.dest in parser.given
        parser.given.add(self.dest)
        if again and isinstance(values, list):
            values = [*getattr(namespace, self.dest), *values]
        elif again and self.type is None and self.choices is None:
            raise argparse.ArgumentError(self, "given more than once; give it once")
        setattr(namespace, self.dest, values)


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action):
        """The help text, with its default where there is one worth showing."""
        plain = action.default is None or action.default is False
        return action.help if plain else super()._get_help_string(action)
