"""Makes dataclasses of the plain values in TOML and JSON files and on command lines."""

from __future__ import annotations

import contextlib
import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from oper.ranges import Parsed, Rule, hints_of

T = TypeVar("T")
_KINDS = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
_PLURALS = {int: "integers", float: "numbers", str: "texts"}


@dataclasses.dataclass(frozen=True, slots=True)
class Reader:
    """Makes dataclasses of plain values, whose types and rules it checks.

    Types of fields may be int, float, str, bool, dataclasses, ``tuple[X, ...]``, ``tuple[X, Y]``,
    ``dict[str, X]``, Any (not checked), Annotated with `Rule` or `Parsed`, and the union of a tuple
    with another type. ``X | None`` means that the setting may be left out; a null is an error. A
    single mapping is accepted for a list of dataclasses.

    Attributes:
        error: makes the error to raise from the name of a setting, its value and what is expected;
            the name is "unknown keys" or "missing keys" if the value is a list of such keys.
        from_text: whether numbers, booleans and lists may be given as text, as flags are.
    """

    error: Callable[[str, object, str], Exception]
    from_text: bool = False

    def build(self, kind: type[T], values: Any, prefix: str = "") -> T:
        """Return an instance of the dataclass `kind`.

        Args:
            kind: the dataclass.
            values: a mapping from names of fields, or an instance, which is returned.
            prefix: put before the names of fields in errors.
        """
        if isinstance(values, kind):
            return values
        hints = hints_of(typing.cast(Any, kind))
        if not isinstance(values, Mapping):
            raise self.error(prefix.rstrip(".") or "content", values,
                             f"a section of keys, some of {list(hints)}")
        unknown, missing = values.keys() - hints.keys(), _required(kind) - values.keys()
        if unknown:
            raise self.error("unknown keys", sorted(f"{prefix}{k}" for k in unknown),
                             f"some of {[prefix + k for k in hints]}")
        if missing:
            raise self.error("missing keys", sorted(prefix + k for k in missing), "none")
        return kind(**{k: self._value(prefix + k, x, hints[k]) for k, x in values.items()})

    def _value(self, name: str, value: Any, hint: Any) -> Any:
        origin, parts = typing.get_origin(hint), typing.get_args(hint)
        if hint is Any:
            return value
        if origin is typing.Annotated:
            return self._annotated(name, value, hint)
        if origin in (typing.Union, types.UnionType):
            kinds = [x for x in parts if x is not type(None)]
            is_list = isinstance(value, list | tuple)
            fitting = [x for x in kinds if (typing.get_origin(x) is tuple) == is_list]
            return self._value(name, value, (fitting or kinds)[0])
        if origin is dict:
            if not isinstance(value, Mapping):
                raise self.error(name, value, "a section of values by name")
            return {k: self._value(f"{name}.{k}", x, parts[1]) for k, x in value.items()}
        if origin is tuple:
            return self._sequence(name, value, parts)
        if dataclasses.is_dataclass(hint):
            return self.build(typing.cast(type, hint), value, f"{name}.")
        found = _parsed(value, hint) if self.from_text and isinstance(value, str) else value
        if hint is float and type(found) is int:
            with contextlib.suppress(OverflowError):
                found = float(found)
        if type(found) is not hint:
            raise self.error(name, value, _KINDS[hint])
        return found

    def _annotated(self, name: str, value: Any, hint: Any) -> Any:
        found: Any = None
        for mark in hint.__metadata__:
            if isinstance(mark, Parsed):
                try:
                    return mark.parse(value)
                except (ValueError, TypeError):
                    raise self.error(name, value, mark.expected) from None
            found = self._value(name, value, hint.__origin__)
            if isinstance(mark, Rule) and not mark.allows(found, hint.__origin__):
                raise self.error(name, value, mark.expected)
        return found

    def _sequence(self, name: str, value: Any, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        each = parts[0]
        size = None if parts[-1] is Ellipsis else len(parts)
        if self.from_text and isinstance(value, str):
            value = [x.strip() for x in value.strip("[]() ").split(",") if x.strip()]
        if isinstance(value, Mapping) and dataclasses.is_dataclass(each):
            value = [value]
        if not isinstance(value, list | tuple) or size not in (None, len(value)):
            raise self.error(name, value, "a list of " + ("" if size is None else f"{size} ")
                             + _PLURALS.get(getattr(each, "__origin__", each), "entries"))
        return tuple(self._value(f"{name}[{k}]", x, each) for k, x in enumerate(value))


def _required(kind: Any) -> set[str]:
    return {f.name for f in dataclasses.fields(kind)
            if f.default is f.default_factory is dataclasses.MISSING}


def _parsed(text: str, kind: Any) -> Any:
    """Convert a flag's text; None if it has another form."""
    if kind is bool:
        return {"true": True, "false": False}.get(text)
    try:
        return kind(text)
    except ValueError:
        return None
