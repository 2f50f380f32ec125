"""The argument parser of every command: defaults shown, errors in one line.

Used by `generate.py` and the measurements.
"""

import argparse


class Parser(argparse.ArgumentParser):
    """An argument parser that shows defaults, refuses abbreviations and reports errors in one line."""

    def __init__(self, prog, description, epilog=None):
        super().__init__(
            prog, description=description, epilog=epilog, formatter_class=Help, allow_abbrev=False
        )

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}; see --help\n")


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action):
        """The help text, with its default where there is one worth showing."""
        plain = action.default is None or action.default is False
        return action.help if plain else super()._get_help_string(action)
