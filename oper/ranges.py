"""Allowed values of dataclass fields, declared in the field's type: ``dim: Positive = 64``.

`oper.support.settings.build` makes such dataclasses of the values in files.
"""

from __future__ import annotations

import math
import numbers
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

# Abstract types, which NumPy's scalars match as well.
_NUMBERS: dict[object, type] = {int: numbers.Integral, float: numbers.Real}


@dataclass(frozen=True, slots=True)
class Rule:
    """A constraint: values are allowed if `holds` is true; `expected` describes them in an error.
    """

    holds: Callable[[Any], bool]
    expected: str

    def allows(self, value: Any, kind: object = None) -> bool:
        """Return whether `holds(value)` is true and, if `kind` is int or float, `value` is a number
        of that kind (bool is not)."""
        number = _NUMBERS.get(kind)
        if number is not None and (isinstance(value, bool) or not isinstance(value, number)):
            return False
        try:
            return bool(self.holds(float(value) if kind is float else value))
        except (TypeError, ValueError, OverflowError):  # ValueError: arrays have no truth value
            return False


@dataclass(frozen=True, slots=True)
class Parsed:
    """How to convert a field from its form in a file, if that differs from its form in memory.

    Attributes:
        parse: converts the value of the file; raises ValueError or TypeError if it is invalid.
        expected: describes the accepted values in an error.
    """

    parse: Callable[[Any], Any]
    expected: str


def one_of(*names: str) -> Rule:
    """Return a rule that allows these strings."""
    return Rule(lambda x: x in names, f"one of {names}")


def within(least: int, most: int) -> Rule:
    """Return a rule that allows numbers in [least, most]."""
    return Rule(lambda x: least <= x <= most, f"{least}..{most}")


Positive = Annotated[int, Rule(lambda x: x >= 1, "an integer >= 1")]
Count = Annotated[int, Rule(lambda x: x >= 0, "an integer >= 0")]
Amount = Annotated[float, Rule(lambda x: 0 <= x < math.inf, "a finite number >= 0")]
Finite = Annotated[float, Rule(math.isfinite, "a finite number")]
PositiveAmount = Annotated[float, Rule(lambda x: 0 < x < math.inf, "a finite number > 0")]
Share = Annotated[float, Rule(lambda x: 0 <= x <= 1, "0..1")]
ShareBelowOne = Annotated[float, Rule(lambda x: 0 <= x < 1, ">= 0 and < 1")]
PositiveShare = Annotated[float, Rule(lambda x: 0 < x <= 1, "> 0 and <= 1")]


@lru_cache
def hints_of(kind: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name, with the metadata of `Annotated`."""
    return typing.get_type_hints(kind, include_extras=True)


def rules_of(of: Any) -> Iterator[tuple[str, bool, str]]:
    """Yield the checks for `oper.errors.require_fields`, (name, whether the value is valid,
    expected), for every field of the dataclass instance `of` whose type has a `Rule`. None is valid
    if the type allows it."""
    for name, hint in hints_of(typing.cast(Any, type(of))).items():
        value, parts = getattr(of, name), typing.get_args(hint)
        for part in (hint, *parts):
            for rule in getattr(part, "__metadata__", ()):
                if isinstance(rule, Rule):
                    is_unset = value is None and type(None) in parts
                    kind = typing.get_origin(part) and part.__origin__
                    yield name, is_unset or rule.allows(value, kind), rule.expected
