"""The parser of the command line ``oper`` and of its commands."""

from __future__ import annotations

import argparse
from typing import Any


class Parser(argparse.ArgumentParser):
    """A parser with `HelpFormatter`. argparse makes the parsers of commands with the same class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": HelpFormatter, **kwargs})


class HelpFormatter(argparse.HelpFormatter):
    """Breaks lines only at spaces, since flags and paths contain hyphens, and prints the help of a
    command on the line of its name."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        # argparse measures the names of commands without their indent.
        for sub in self._iter_indented_subactions(action):
            length = len(self._format_action_invocation(sub)) + self._current_indent
            self._action_max_length = max(self._action_max_length, length)

    def _split_lines(self, text: str, width: int) -> list[str]:
        import textwrap  # needed for help only

        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + line for line in self._split_lines(text, width - len(indent)))
