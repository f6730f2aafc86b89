"""The parser of the command line, and types of its flags; an invalid value is a usage error."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from oper.errors import OperError

_MOST = 2**63 - 1  # maximum int64


class Parser(argparse.ArgumentParser):
    """A parser with `HelpFormatter`; argparse creates the parsers of subcommands with it, too."""

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


def whole(least: int, most: int = _MOST) -> Callable[[str], int]:
    """Return a type for ``add_argument``: integers in [least, most]."""
    limits = f">= {least}" if most == _MOST else f"from {least} to {most}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            wanted = f"from {least} to {most}" if value > most else limits
            raise argparse.ArgumentTypeError(f"{text!r}, expected a whole number {wanted}")
        return value

    return parse


def number(least: float = 0.0, above: bool = False) -> Callable[[str], float]:
    """Return a type for ``add_argument``: finite numbers >= `least`, or > `least` if `above`."""
    limits = "finite number" if least == -math.inf else f"number {'>' if above else '>='} {least:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (least < value if above else least <= value) or math.isinf(value):
            raise argparse.ArgumentTypeError(f"{text!r}, expected a {limits}")
        return value

    return parse


#: Flags that describe a dynamic table, see `add_key_rules`.
KEY_RULES = ("admit_after", "eviction", "half_life", "time_to_live")


def add_key_rules(parser: argparse._ActionsContainer) -> None:
    """Add the flags `KEY_RULES`; all are None by default."""
    from oper.tables import KEY_EVICTIONS  # slow, and `oper --help` does not need it

    parser.add_argument("--admit-after", type=whole(1), metavar="N",
                        help="occurrences after which a key of a dynamic table gets a row "
                             "(default 1)")
    parser.add_argument("--eviction", choices=KEY_EVICTIONS,
                        help="which key of a dynamic table loses its row (default lru)")
    parser.add_argument("--half-life", type=whole(1), metavar="UPDATES",
                        help="updates after which counts of keys are halved (default: never)")
    parser.add_argument("--time-to-live", type=whole(1), metavar="UPDATES",
                        help="updates after which an unused key loses its row (default: never)")


def text_for(check: Callable[[str], Any]) -> Callable[[str], str]:
    """Return a type for ``add_argument``: strings for which `check` raises no OperError."""
    def parse(text: str) -> str:
        try:
            check(text)
        except OperError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return parse


def names(text: str) -> list[str]:
    """Split comma-separated names; a type for ``add_argument``."""
    return [name for name in text.split(",") if name]


def name_values(text: str, separator: str) -> dict[str, str] | None:
    """Parse ``NAME=VALUE`` entries; None if one has another form, or a name occurs twice."""
    pairs = [part.rpartition("=")[::2] for part in text.split(separator) if part.strip()]
    found = {name.strip(): value.strip() for name, value in pairs}
    return found if len(found) == len(pairs) and all(found) else None
