"""Types of command-line flags for argparse; an invalid value is a usage error."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from oper.errors import OperError
from oper.tables import KEY_EVICTIONS

_MOST = 2**63 - 1  # maximum int64


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
