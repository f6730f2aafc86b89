"""Every error that OPER raises on purpose.

The message form is ``<what failed>: <name>=<value>, expected <constraint>; <what to do>``.
"""

from __future__ import annotations


class OperError(Exception):
    """Base of all errors raised on purpose by this package.

    Takes the parts of a message in the package's form, or a text alone.
    """

    def __init__(self, what: object = "", name: str | None = None, value: object = None,
                 expected: str = "", todo: str = "") -> None:
        super().__init__(what if name is None else fail(str(what), name, value, expected, todo))


class InvalidInputError(OperError, ValueError):
    """An argument, a table, a batch or a configuration breaks a stated constraint."""


class UsageError(InvalidInputError):
    """A command line has a value out of range or contradicts itself; the exit code is 2."""


class FileFormatError(OperError, ValueError):
    """A file is truncated, damaged, of another kind, or of an unsupported version."""


class PlanError(OperError, ValueError):
    """A plan contradicts itself, its tables, or the world it is executed in."""


class PlanInfeasibleError(PlanError):
    """No plan fits the topology; names need and capacity per rank and the smallest change that
    makes one fit."""


class MissingDependencyError(OperError, ImportError):
    """An optional package or the compiled extension is missing; says how to install it."""


class PeerLostError(OperError, RuntimeError):
    """A peer process died while this rank needed it; names the rank."""

    rank: int | None = None


class DeadlineError(OperError, TimeoutError):
    """A rank did not arrive at a collective phase in time; names rank, phase and collection."""

    rank: int | None = None


class DesyncError(OperError, RuntimeError):
    """Ranks make different collective calls at the same time; names the rank that is off."""

    rank: int | None = None


def fail(what: str, name: str, value: object, expected: str, todo: str) -> str:
    """Format one error message in the package's form."""
    try:
        text = repr(value)
    except RecursionError:  # of a file that nests deeper than Python counts
        text = f"a {type(value).__name__} of many levels"
    if len(text) > 200:
        text = text[:200] + "..."
    return f"{what}: {name}={text}, expected {expected}; {todo}"


def require(what: str, todo: str, *checks: tuple[str, object, bool, str]) -> None:
    """Raise InvalidInputError for the first (name, value, is valid, expected) that is not valid."""
    for name, value, is_right, expected in checks:
        if not is_right:
            raise InvalidInputError(what, name, value, expected, todo)


def require_fields(of: object, what: str, todo: str, *checks: tuple[str, bool, str]) -> None:
    """As `require`, for fields of an object: (name, is valid, expected)."""
    require(what, todo, *((name, getattr(of, name), is_right, expected)
                          for name, is_right, expected in checks))
