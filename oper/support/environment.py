"""Environment variables that OPER reads, with their purpose and validation.

The command line, `oper.shard`, `oper.publish`, `oper.attach` and the loader of the native library
validate all run-time variables before they begin; ``setup.py`` validates build variables, and
``oper doctor`` all. An empty variable counts as unset.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from oper.errors import InvalidInputError

RUN, BUILD = "run", "build"


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable.

    Attributes:
        about: purpose of the variable.
        expected: the constraint on values, for error messages; "" = any value is allowed.
        accepts: whether a value is allowed.
        at: time at which the variable is read, ``"run"`` or ``"build"``.
    """

    about: str
    expected: str = ""
    accepts: Callable[[str], bool] = lambda text: True
    at: str = RUN


def _number(least: float) -> Callable[[str], bool]:
    """Return a predicate for texts of finite numbers > 0 and >= `least`."""
    def accepts(text: str) -> bool:
        try:
            value = float(text)
        except ValueError:
            return False
        return 0 < value < math.inf and value >= least

    return accepts


def _one_of(about: str, *names: str, at: str = RUN) -> Variable:
    return Variable(about, f"one of {', '.join(names)}", lambda text: text in names, at)


def _count(about: str, at: str = RUN) -> Variable:
    return Variable(about, "a whole number above 0",
                    lambda text: re.fullmatch(r"[0-9]{1,18}", text) is not None and int(text) > 0,
                    at)


_ARCH = r"([89][0-9]|[1-9][0-9]{2})[af]?"  # >= 80, since kernels use asynchronous copies
# All variables OPER_* that the package, its build or its tests read, and others of the build.
VARIABLES: dict[str, Variable] = {
    "OPER_DATA": Variable("folder of real data for tests and benchmarks"),
    "OPER_DEBUG": _one_of("1: print the traceback of an error", "0", "1"),
    "OPER_SEND_BUFFER_BYTES": Variable("upper limit of a rank's send buffer (summed gradients)",
                                       "a number of bytes above 0", _number(1)),
    "OPER_DEVICE_HEAP": _one_of("how ranks share device memory",
                                "symmetric", "virtual"),
    "OPER_FBGEMM": Variable("folder of the fbgemm_gpu package to compare with on a GPU",
                            "a folder that holds the package fbgemm_gpu",
                            lambda text: os.path.isdir(os.path.join(text, "fbgemm_gpu"))),
    "OPER_DEVICE_THREADS": _count("threads per kernel launch, instead of the device's number"),
    "OPER_DEVICE_OVERLAP": _one_of("0: a kernel starts only after the previous one has ended",
                                   "0", "1"),
    "OPER_DEADLINE_S": Variable("seconds that a rank waits for its peers (default 300)",
                                "a number of seconds above 0", _number(0)),
    "OPER_DOMAIN": Variable("ranks with different values do not share memory"),
    "OPER_CPU_KERNELS": _one_of("instruction set, instead of the best that the processor supports",
                                "generic", "avx2", "avx512"),
    "OPER_CUDA": _one_of("build: whether to build the GPU library", "auto", "0", "1", at=BUILD),
    "OPER_CUDA_ARCHS": Variable(
        "build: compute capabilities, e.g. 80;90", "compute capabilities from 80 on such as 80;90",
        lambda text: re.fullmatch(rf"[ ;,]*{_ARCH}([ ;,]+{_ARCH})*[ ;,]*", text) is not None,
        BUILD),
    "CUDA_HOME": Variable("build: folder of the CUDA toolkit", at=BUILD),
    "CXX": Variable("build: the C++ compiler", at=BUILD),
    "MAX_JOBS": _count("build: number of parallel compiler processes", BUILD),
}
RENAMED = {"OPER_OUTBOX_BYTES": "OPER_SEND_BUFFER_BYTES"}  # refused, as it would have no effect


def setting(name: str, what: str = "cannot start") -> str:
    """Return the value of a variable; "" if it is unset.

    Raises:
        InvalidInputError: the value is not allowed; the message begins with `what`.
    """
    text = os.environ.get(name, "")
    variable = VARIABLES[name]
    if text and not variable.accepts(text):
        raise InvalidInputError(what, f"environment variable {name}", text, variable.expected,
                                f"set it to such a value, or unset it ({variable.about})")
    return text


def check_environment(what: str = "cannot start", at: str = RUN) -> None:
    """Raise InvalidInputError for the first variable whose value is not allowed, or whose name was
    changed.

    Args:
        what: beginning of the message.
        at: checks variables that are read at ``"run"`` or at ``"build"`` time.
    """
    for name, variable in VARIABLES.items():
        if variable.at == at:
            setting(name, what)
    for old, new in RENAMED.items():
        if VARIABLES[new].at == at and os.environ.get(old):
            raise InvalidInputError(what, f"environment variable {old}", os.environ[old],
                                    "an unset variable", f"set {new}, its new name, and unset it")


def problems() -> Iterator[str]:
    """Yield an error message for every variable whose value is not allowed, or whose name was
    changed."""
    for name, variable in VARIABLES.items():
        text = os.environ.get(name, "")
        if text and not variable.accepts(text):
            yield (f"{name}={text!r}, expected {variable.expected}; set it to such a value, or "
                   "unset it")
    for old, new in RENAMED.items():
        if os.environ.get(old):
            yield f"{old}={os.environ[old]!r}, expected an unset variable; set {new}, its new name"
