"""Calls into the planner's C++ code (``csrc/search``) by ctypes; planning does not need torch."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from oper.errors import MissingDependencyError

_int, _double, _array = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


VERSION = 5  # version of the argument structures; equals kSearchVersion in csrc/search/argument.h


class Sums(ctypes.Structure):
    """`OperSums` of ``csrc/search/price.h``."""

    _fields_: ClassVar[list[Any]] = [("num_points", _int), ("first", _double), ("ratio", _double),
                                     ("bytes", _array)]


class Argument(ctypes.Structure):
    """`OperArgument` of ``csrc/search/argument.h``, the header of every argument structure."""

    _fields_: ClassVar[list[Any]] = [("size", _int), ("version", _int)]


class Fit(Argument):
    """`OperFit` of ``csrc/search/price.h``."""

    _fields_: ClassVar[list[Any]] = [
        *((n, _int) for n in ("num_tables", "num_classes", "num_loads", "num_tangents",
                            "num_hot")),
        ("sums", Sums),
        *((n, _array) for n in ("density", "tangents", "per_unit", "asks", "partial", "first",
                                "total_ids", "hot", "may", "narrow", "floor", "most")),
        ("step", _double), *((n, _array) for n in ("mass", "least_sums", "whole", "heavy"))]


class Pricing(Argument):
    """`OperPricing` of ``csrc/search/price.h``."""

    _fields_: ClassVar[list[Any]] = [
        *((n, _int) for n in ("num_tables", "num_options", "num_blocks", "max_parts", "step")),
        ("close", _double), ("piece", _double), ("sums", Sums),
        *((n, _array) for n in (
            "starts", "stay", "stay_more", "one", "tiers", "tiers_pushed", "go", "more", "own",
            "features", "ids", "total_ids", "price", "first", "streams", "mass", "least_sums",
            "narrowest", "heavy", "columns",
            "pushes", "known", "out_value", "out_num_parts", "out_kind", "out_mode", "out_share",
            "out_streams", "out_chosen"))]


class Packing(Argument):
    """`OperPacking` of ``csrc/search/pack.h``."""

    _fields_: ClassVar[list[Any]] = [
        *((n, _int) for n in (
            "num_ranks", "num_classes", "num_loads", "num_groups", "num_tables", "num_parts",
            "num_shares", "num_heads")),
        *((n, _array) for n in (
            "class_of", "rank_of", "base", "partial", "partial_read", "level", "first",
            "num_candidates", "stay", "stay_once", "fill", "fill_once", "column", "stream",
            "column_read", "stream_read", "mate_first", "mates", "mate_level", "partial_mate",
            "column_mate", "stream_mate", "column_ids", "head_at", "head", "asked", "whole",
            "sums", "pushes", "host_of", "domain_of", "squares", "all_squares", "square_link",
            "square_cross", "may_split", "may_stripe", "num_may", "may", "order", "first_width",
            "first_owners")),
        ("max_moves", _int), ("seconds", _double), ("goal", _double), ("seed", ctypes.c_uint64),
        ("resumes", _int),
        *((n, _array) for n in ("candidate", "part_width", "units")), ("capacity", _int),
        ("count", _int),
        *((n, _array) for n in ("table", "piece", "width", "rank", "weight")),
        ("step", _double), ("moves", _int)]


@cache
def _library() -> ctypes.CDLL:
    path = Path(__file__).resolve().parent.parent / "_lib" / "liboper_search.so"
    try:
        library = ctypes.CDLL(str(path))
        for name, kind in (("oper_fit", Fit), ("oper_price", Pricing), ("oper_pack", Packing)):
            function = getattr(library, name)
            function.argtypes, function.restype = [ctypes.POINTER(kind)], ctypes.c_int
    except (OSError, AttributeError) as e:
        raise _unusable("file", str(path), str(e)) from None
    return library


def _unusable(name: str, value: Any, constraint: Any) -> MissingDependencyError:
    return MissingDependencyError(
        "the planner's native library cannot be used", name, value, constraint,
        "build it: python setup.py build_ext --inplace, or install the package")


def call(name: str, kind: type[Argument], arrays: dict[str, np.ndarray], **values: Any) -> Argument:
    """Call a function of the native library and return its argument structure with the outputs.

    Args:
        name: the function, e.g. ``"oper_price"``.
        kind: type of its argument structure.
        arrays: input and output arrays by field, int64, float64 or uint8. Output arrays must be
            contiguous, because others are copied and the caller's array is left unchanged.
        values: all other fields except size and version.

    Raises:
        MissingDependencyError: the library is not built, or was built from another version of the
            sources.
    """
    arrays = {n: np.ascontiguousarray(x) for n, x in arrays.items()}
    assert arrays.keys() >= {x[0] for x in kind._fields_ if x[1] is _array}, "an array is missing"
    argument = kind(size=ctypes.sizeof(kind), version=VERSION,
                    **{n: x.ctypes.data for n, x in arrays.items()}, **values)
    if getattr(_library(), name)(ctypes.byref(argument)):
        raise _unusable(name, f"refuses an argument of {argument.size} bytes",
                        "a library that was built from the same sources")
    return argument
