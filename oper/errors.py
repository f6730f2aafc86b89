"""Every error that OPER raises on purpose.

The message form is ``<what failed>: <name>=<value>, expected <constraint>; <what to do>``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator


class OperError(Exception):
    """Base class of all errors that this package raises on purpose.

    Args:
        what: what failed; the entire message if `name` is None.
        name, value, expected, todo: the other parts of the message, see `fail`.
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
    """A plan is inconsistent, or does not fit its tables or the ranks that are to execute it."""


class PlanInfeasibleError(PlanError):
    """No plan fits the topology's memory; the message states required and available bytes per rank
    and the smallest change that makes a plan feasible.

    Attributes:
        more_memory: how many times as much memory suffices, and the words for this in the message;
            None if that is unknown.
    """

    more_memory: tuple[float, str] | None = None


class MissingDependencyError(OperError, ImportError):
    """A package or the compiled extension is missing; the message states how to install it."""


class _PeerError(OperError):
    """An error of another rank. `rank` is the value that the message names ``rank``, or None."""

    def __init__(self, what: object = "", name: str | None = None, value: object = None,
                 expected: str = "", todo: str = "") -> None:
        super().__init__(what, name, value, expected, todo)
        self.rank = value if name == "rank" and isinstance(value, int) else None


class PeerLostError(_PeerError, RuntimeError):
    """A peer process died or refused its batch while this rank waited for it; `rank` is the peer's.
    """


class DeadlineError(_PeerError, TimeoutError):
    """A peer did not arrive at a collective phase in time; `rank` is the peer's."""


class DesyncError(_PeerError, RuntimeError):
    """Ranks made different collective calls at the same time; `rank` is the one that deviates."""


@contextlib.contextmanager
def needs(what: str, install: str) -> Iterator[None]:
    """Raise MissingDependencyError if a package that the block imports is missing or damaged.

    Args:
        what: what fails without the package.
        install: the requirement to install, such as ``oper[report]``.
    """
    try:
        yield
    except ImportError as error:
        raise MissingDependencyError(what, "import", str(error), "an installed package",
                                     f"pip install '{install}'") from error


def fail(what: str, name: str, value: object, expected: str, todo: str) -> str:
    """Return ``<what>: <name>=<value>, expected <expected>; <todo>``; long values are shortened."""
    try:
        text = repr(value)
    except RecursionError:  # `value` was read from a file that nests too deeply
        text = f"a {type(value).__name__} of many levels"
    except ValueError:  # Python does not print longer integers
        holder = "" if isinstance(value, int) else f"a {type(value).__name__} with "
        text = f"{holder}a number of more than {sys.get_int_max_str_digits()} digits"
    if len(text) > 200:
        text = text[:200] + "..."
    return f"{what}: {name}={text}, expected {expected}; {todo}"


def differing_names(first: str, ours: Collection[str], second: str, theirs: Collection[str]
                    ) -> dict[str, list[str]]:
    """Return, for an error message, ``{first: names only in ours, second: names only in theirs}``,
    sorted, at most four each."""
    return {first: sorted(set(ours) - set(theirs))[:4],
            second: sorted(set(theirs) - set(ours))[:4]}


def require(what: str, todo: str, *checks: tuple[str, object, bool, str]) -> None:
    """Raise InvalidInputError for the first invalid value.

    Args:
        what, todo: the start of the message, and the remedy, see `fail`.
        checks: for each value its name, the value, whether it is valid, and what is expected.
    """
    for name, value, is_right, expected in checks:
        if not is_right:
            raise InvalidInputError(what, name, value, expected, todo)


def require_fields(of: object, what: str, todo: str, *checks: tuple[str, bool, str]) -> None:
    """Raise InvalidInputError for the first invalid field of the object `of`.

    Args:
        of: the object.
        what, todo: the start of the message, and the remedy, see `fail`.
        checks: for each field its name, whether its value is valid, and what is expected.
    """
    require(what, todo, *((name, getattr(of, name), is_right, expected)
                          for name, is_right, expected in checks))
