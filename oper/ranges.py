"""Allowed values of the fields of a dataclass, stated in their types: ``dim: Positive = 64``."""

from __future__ import annotations

import math
import numbers
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

# NumPy's numbers among them.
_NUMBERS: dict[object, type] = {int: numbers.Integral, float: numbers.Real}


@dataclass(frozen=True, slots=True)
class Rule:
    """Allows the values for which `holds` is true; `expected` describes them in an error."""

    holds: Callable[[Any], bool]
    expected: str

    def allows(self, value: object, kind: object = None) -> bool:
        """Whether `holds` is true of a value; not of one of another type than `kind`, such as
        None."""
        number = _NUMBERS.get(kind)
        if number is not None and (isinstance(value, bool) or not isinstance(value, number)):
            return False
        try:
            return bool(self.holds(value))
        except (TypeError, ValueError):  # the latter of an array, which is neither true nor false
            return False


def one_of(*names: str) -> Rule:
    """Allows these texts."""
    return Rule(lambda x: x in names, f"one of {names}")


Positive = Annotated[int, Rule(lambda x: x >= 1, "an integer >= 1")]
Count = Annotated[int, Rule(lambda x: x >= 0, "an integer >= 0")]
Amount = Annotated[float, Rule(lambda x: 0 <= x < math.inf, "a finite number >= 0")]
PositiveAmount = Annotated[float, Rule(lambda x: 0 < x < math.inf, "a finite number > 0")]
Share = Annotated[float, Rule(lambda x: 0 <= x <= 1, "0..1")]
ShareBelowOne = Annotated[float, Rule(lambda x: 0 <= x < 1, ">= 0 and < 1")]
PositiveShare = Annotated[float, Rule(lambda x: 0 < x <= 1, "> 0 and <= 1")]


def rules_of(of: object) -> Iterator[tuple[str, bool, str]]:
    """Checks for `oper.errors.require_fields`: (name, whether the value is valid, expected) for
    every field of the dataclass instance `of` whose type has a `Rule`. None is valid if the type
    allows it."""
    for name, hint in typing.get_type_hints(type(of), include_extras=True).items():
        value, parts = getattr(of, name), typing.get_args(hint)
        for part in (hint, *parts):
            for rule in getattr(part, "__metadata__", ()):
                is_unset = value is None and type(None) in parts
                kind = typing.get_origin(part) and part.__origin__
                yield name, is_unset or rule.allows(value, kind), rule.expected
