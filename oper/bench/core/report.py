"""Print a record's entries as text tables of the figures that a benchmark lists."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from oper.support.text import aligned

NOISY_CORES = 0.15  # other programs' mean busy cores above which a case is reported as noisy
_LEAST_WIDTH = 8  # characters of a header line; longer headers wrap at the cells' width


def report(entries: Sequence[Mapping[str, Any]], tables: Sequence[Sequence[str]]) -> str:
    """Text tables of figures, then notes on noisy, skipped, failed and unverified cases.

    Args:
        entries: the ``cases`` of a record.
        tables: for each table, the keys of its columns. Key ``a.b`` is item b of item a, and
            ``a.*.b`` gives an entry one row per item of a. An entry goes into the first table of
            which it can fill the first column, otherwise on a separate line. Columns without any
            figure are omitted.
    """
    text, left = "", list(entries)
    for keys in tables:
        paths = [key.split(".") for key in (*keys, "verified")]
        rows = [_rows(e, paths) for e in left]
        left = [e for e, found in zip(left, rows, strict=True) if not found]
        text += _table_of(keys, [row for found in rows for row in found])
    for e in left:
        numbers = ", ".join(f"{k} {text_of(v)}" for k, v in e.items() if isinstance(v, int | float))
        text += f"{e['name']}: {numbers}\n" if not {"skipped", "failed"} & e.keys() else ""
    return text + noise_note(entries) + "".join(
        f"{why} {e['name']}: {e[why]}\n" for e in entries for why in ("skipped", "failed")
        if why in e) + "".join(
        f"{e['name']} is NOT verified{''.join(_wrong(e))}\n" for e in entries
        if not e.get("verified", True) and "failed" not in e)


def _rows(entry: Mapping[str, Any], paths: Sequence[Sequence[str]]) -> list[list[str]]:
    """Table rows of an entry, each starting with its name; none if it lacks the first figure."""
    first, names = paths[0], [""]
    if "*" in first:
        names = list(_figure(entry, first[:first.index("*")]) or ())
    return [[entry["name"] + (f": {name}" if name else ""),
             *(text_of(_figure(entry, path, name)) for path in paths)]
            for name in names if _figure(entry, first, name) != ""]


def _figure(entry: Mapping[str, Any], path: Sequence[str], name: str = "") -> Any:
    """The item at a path of keys, with ``*`` replaced by `name`; ``""`` if there is none."""
    value: Any = entry
    for key in path:
        value = value.get(name if key == "*" else key, "") if isinstance(value, Mapping) else ""
    return value


def text_of(value: Any) -> str:
    """A figure as text for a table."""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        if "low" in value:
            return f"{value['mean']:.4g} [{value['low']:.4g}, {value['high']:.4g}]"
        return ", ".join(f"{k} {text_of(x)}" for k, x in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(text_of, value))
    return str(value)


def _table_of(keys: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    columns = [(key, cells) for key, *cells in zip(("case", *keys, "verified"), *rows, strict=True)
               if any(cells)]
    heads = []
    for key, cells in columns:
        words = re.sub(r"[_.*]+", " ", key.rpartition("*.")[2])  # each row names the star's item
        heads.append("\n".join(textwrap.wrap(words, max(_LEAST_WIDTH, *map(len, cells)),
                                             break_long_words=False)))
    return table(heads, list(zip(*(cells for _, cells in columns), strict=True))) + "\n"


def _wrong(value: Any, path: str = "") -> Iterator[str]:
    """Yield a text for each failed comparison in an entry, with the path of its keys."""
    if isinstance(value, Mapping):
        if value.get("passed") is False:
            yield f"; {path}: {dict(value)}"
        for key, inner in value.items():
            yield from _wrong(inner, f"{path}.{key}" if path else key)


def noise_note(entries: Sequence[Mapping[str, Any]]) -> str:
    """A line that names the cases disturbed by other programs; ``""`` if there are none.

    Args:
        entries: entries of a record, whose ``other_busy_cores`` is a number or one per phase.
    """
    noisy = {}
    for entry in entries:
        cores = entry.get("other_busy_cores", 0.0)
        worst = max(cores.values()) if isinstance(cores, Mapping) else cores
        if worst > NOISY_CORES:
            noisy[entry["name"]] = worst
    if not noisy:
        return ""
    return ("NOISY, not for the record; cores that other programs kept busy: "
            + ", ".join(f"{name} {cores:.1f}" for name, cores in noisy.items()) + "\n")


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Format a text table: the first column left-aligned, the remaining ones right-aligned. Headers
    may have several lines."""
    lines = [h.split("\n") for h in headers]
    height = max(map(len, lines))
    heads = zip(*([""] * (height - len(h)) + h for h in lines), strict=True)
    found = aligned([[str(x) for x in row] for row in (*heads, *rows)])
    found.insert(height, "-" * max(map(len, found)))
    return "\n".join(found)
