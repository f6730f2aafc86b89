"""Synthetic lookups from a specification or from measured statistics, always labelled synthetic."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from oper.analysis.presence import Lookups
from oper.data.generate import published
from oper.data.generate.ids import drifted, scatter_ids, uniform64
from oper.data.generate.popularity import (
    Popularity,
    fit_cardinality,
    fit_locality,
    from_stats,
    power_law,
)
from oper.errors import InvalidInputError, require, require_fields
from oper.stats import AccessStats, TableStats
from oper.support.files import read_toml
from oper.support.numeric import mix64


def _always(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `TableModel.lengths` for bags that all have `length` ids."""
    return np.array([length]), np.array([1.0])


@dataclass(frozen=True, slots=True, eq=False)
class TableModel:
    """A distribution from which the lookups of one synthetic table are drawn.

    Attributes:
        name: name of the table and its feature.
        popularity: popularity of the rows by frequency rank.
        lengths: possible bag lengths int64 [P] and their weights float64 [P], in any scale.
        drift: probability that a hot rank moves to a random row from one day to the next.
        head: rows of the H hottest ranks, int64 [H]; the remaining ranks are assigned to the
            remaining rows in order. None = ranks are scattered by a fixed permutation.
        fixed_bags: whether the first id of a bag determines the other ids (uniform over the rows),
            as in MLPerf's multi-hot data; otherwise the ids of a bag are independent.
    """

    name: str
    popularity: Popularity
    lengths: tuple[np.ndarray, np.ndarray] = field(default_factory=lambda: _always(1))
    drift: float = 0.0
    head: np.ndarray | None = None
    fixed_bags: bool = False

    @property
    def num_rows(self) -> int:
        return self.popularity.num_rows

    @property
    def pooling_factor(self) -> float:
        """Mean ids per bag."""
        values, weights = self.lengths
        return float(values @ weights / weights.sum())

    def draw(self, num_samples: int, day: int, key: int, rng: np.random.Generator) -> Lookups:
        """Draw `num_samples` bags of day `day`; `key` must differ between tables."""
        values, weights = self.lengths
        lengths = (np.full(num_samples, values[0]) if values.size == 1 else
                   rng.choice(values, num_samples, p=weights / weights.sum()))
        one_each = values.size == 1 and values[0] == 1
        size = num_samples if self.fixed_bags else int(lengths.sum())
        ids = self._rows(self.popularity.draw(size, rng), day, key)
        if self.fixed_bags and not one_each:
            ids = self._with_companions(ids, lengths, key)
        return Lookups(ids, None if one_each else lengths)

    def _rows(self, ranks: np.ndarray, day: int, key: int) -> np.ndarray:
        """Map frequency ranks, int64 [n], to the rows that have them on `day`."""
        if self.drift and day:
            ranks = drifted(ranks, day, self.num_rows, key, self.drift)
        if self.head is None:
            return scatter_ids(ranks, self.num_rows)
        ids = np.empty_like(ranks)
        in_head = ranks < self.head.size
        ids[in_head] = self.head[ranks[in_head]]
        taken = np.sort(self.head)
        free = ranks[~in_head] - self.head.size  # index among the rows outside the head
        ids[~in_head] = free + np.searchsorted(taken - np.arange(taken.size), free, side="right")
        return ids

    def _with_companions(self, first: np.ndarray, lengths: np.ndarray, key: int) -> np.ndarray:
        """Add the other ids of every bag: hashes of its first id, of their position and of `key`.

        `first`: int64 [B], unused for empty bags; `lengths`: int64 [B].
        """
        starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
        place = np.arange(starts.size) - starts
        owner = np.repeat(first[lengths > 0], lengths[lengths > 0]).astype(np.uint64)
        mixed = mix64(owner * np.uint64(1009) + place.astype(np.uint64)) ^ np.uint64(key)
        drawn = (uniform64(mixed) * self.num_rows).astype(np.int64)
        return np.where(place == 0, owner.astype(np.int64), drawn)


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Models of several tables, from which batches of synthetic lookups are drawn.

    Attributes:
        name: description of the workload; it contains the word "synthetic".
        tables: one model per table.
        num_days: number of days over which the samples are spread evenly, in order.
        seed: seed of all random draws, in 0..2^32 - 1.
    """

    name: str
    tables: tuple[TableModel, ...]
    num_days: int = 1
    seed: int = 1

    def __post_init__(self) -> None:
        require_fields(self, "invalid workload", "choose a seed in this range",
                       ("seed", 0 <= self.seed < 2**32, "0 <= seed < 2^32"))

    def batches(self, num_samples: int, batch_size: int
                ) -> Iterator[tuple[int, dict[str, Lookups]]]:
        """Yield the day and the lookups by table of each batch; equal arguments give equal ids.

        A batch has up to `batch_size` of the `num_samples` samples, all of one day. To count a
        batch with `oper.collect`, pass ``{name: (x.ids, x.lengths)}``. Raises InvalidInputError.
        """
        require("cannot draw lookups", "choose a value in this range",
                ("num_samples", num_samples, num_samples >= 1, ">= 1"),
                ("batch_size", batch_size, batch_size >= 1, ">= 1"))
        for day in range(self.num_days):
            begin = num_samples * day // self.num_days
            end = num_samples * (day + 1) // self.num_days
            for start in range(begin, end, batch_size):
                count = min(batch_size, end - start)
                yield day, {
                    t.name: t.draw(count, day, self._key(k),
                                   np.random.default_rng((self.seed, k, start)))
                    for k, t in enumerate(self.tables)}

    def _key(self, table: int) -> int:
        return int(mix64(np.array([1_000_003 * self.seed + table], np.uint64))[0])


def workload_from_stats(stats: AccessStats, seed: int = 1) -> Workload:
    """Make a workload with the measured row popularity and bag lengths of every table."""
    return Workload(f"synthetic, after {stats.source}", tuple(
        TableModel(n, from_stats(t), bag_lengths(t), 0.0, t.head_ids)
        for n, t in stats.tables.items()), 1, seed)


def bag_lengths(table: TableStats) -> tuple[np.ndarray, np.ndarray]:
    """Return measured bag lengths as in `TableModel.lengths`; length 1 if none was counted."""
    if not table.num_bags:
        return _always(1)
    return table.length_values, table.length_counts.astype(np.float64)


def load_workload(name_or_path: str | os.PathLike[str], seed: int = 1) -> Workload:
    """Load a workload.

    Args:
        name_or_path: a name in `PRESETS`, the path of a TOML specification (see
            `workload_from_dict`), or the path of a statistics file.
        seed: see `Workload`.

    Raises:
        InvalidInputError: there is no workload of that name, or the specification is invalid.
        FileFormatError: the file is damaged.
    """
    text = os.fspath(name_or_path)
    if text in PRESETS:
        return Workload(f"synthetic, calibrated on published statistics ({text})",
                        tuple(PRESETS[text]()), 1, seed)
    path = Path(text)
    if not path.is_file():
        raise InvalidInputError("no such workload", "workload", text,
                                f"one of {sorted(PRESETS)}, a .toml file or a statistics file",
                                "use one of these names, or the path of a file")
    if path.suffix != ".toml":
        return workload_from_stats(AccessStats.load(path), seed=seed)
    return workload_from_dict(read_toml(path, f"cannot read {text!r} as a workload"), seed)


_TABLE_KEYS = {"rows", "exponent", "shift", "heavy", "length", "lengths", "weights", "drift",
               "fixed_bags", "count"}
_MAX_TABLES = 1 << 16  # per table entry (its `count`)


def workload_from_dict(value: Mapping[str, Any], seed: int = 1) -> Workload:
    """Make a workload from a parsed specification; raises InvalidInputError if it is invalid.

    Its keys are ``name``, ``days`` and ``table``. Each ``table`` entry has ``name``, ``rows``,
    ``exponent`` and ``shift`` of the power law, ``heavy`` (access shares of the hottest rows),
    ``length`` (ids per bag) or ``lengths`` with ``weights``, ``drift``, ``fixed_bags``, and
    ``count`` (number of such tables); only ``name`` and ``rows`` are required.
    """
    what = "invalid workload"
    entries, days = value.get("table", []), value.get("days", 1)
    require(what, "correct the file",
            ("keys", sorted(value), set(value) <= {"name", "days", "table"}
             and isinstance(entries, list) and bool(entries), "name, days and table entries"),
            ("days", days, type(days) is int and 1 <= days <= 127, "1..127"))
    tables = tuple(t for entry in entries for t in _tables(what, entry))
    names = [t.name for t in tables]
    require(what, "correct the file",
            ("table names", names[:12], len(set(names)) == len(names), "unique names"))
    return Workload(f"synthetic, {value.get('name', 'specification')}", tables, days, seed)


def _tables(what: str, entry: Any) -> list[TableModel]:
    keys = set(entry) if isinstance(entry, Mapping) else set()
    require(what, "correct the file",
            ("table", entry, isinstance(entry, Mapping), "[[table]] sections"),
            ("keys of a table", sorted(keys), {"name", "rows"} <= keys <= _TABLE_KEYS | {"name"},
             f"name and rows, and optionally others of {sorted(_TABLE_KEYS)}"))
    try:
        values = np.array(entry.get("lengths", [entry.get("length", 1)]), np.int64)
        weights = np.array(entry.get("weights", [1.0] * values.size), np.float64)
        count, drift = int(entry.get("count", 1)), float(entry.get("drift", 0.0))
        popularity = power_law(int(entry["rows"]), float(entry.get("exponent", 1.05)),
                               float(entry.get("shift", 0.0)), tuple(entry.get("heavy", ())))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(what, "table", entry["name"], f"numbers in range ({error})",
                                "correct the file") from None
    require(what, "correct the file",
            ("lengths, weights", (values.tolist(), weights.tolist()),
             values.shape == weights.shape and values.ndim == 1 and values.min(initial=0) >= 0
             and weights.min(initial=0) >= 0 and bool(np.isfinite(weights).all() and weights.any()),
             "lists of equal size, no negative number, and a positive finite sum of weights"),
            ("drift", drift, 0 <= drift <= 1, "0..1"),
            ("count", count, 1 <= count <= _MAX_TABLES, f"1..{_MAX_TABLES}"))
    names = [str(entry["name"])] if count == 1 else [f"{entry['name']}{k}" for k in range(count)]
    return [TableModel(n, popularity, (values, weights), drift,
                       fixed_bags=bool(entry.get("fixed_bags", False))) for n in names]


@functools.cache  # the fit takes seconds
def criteo_1tb() -> tuple[TableModel, ...]:
    """Model Criteo 1TB by power laws, fitted to its numbers of distinct and of frequent values."""
    return tuple(TableModel(f"C{k + 1}", fit_cardinality(published.CRITEO_1TB_ROWS, *values, 3))
                 for k, values in enumerate(zip(
                     published.CRITEO_1TB_DISTINCT, published.CRITEO_1TB_FREQUENT, strict=True)))


def mlperf_dlrm_v2() -> list[TableModel]:
    """Model MLPerf's multi-hot data: `criteo_1tb` capped at 40,000,000 rows, with
    `TableModel.fixed_bags`."""
    return [replace(t, popularity=_capped(t.popularity, min(published.MLPERF_CAP, distinct)),
                    lengths=_always(length), fixed_bags=True)
            for t, distinct, length in zip(criteo_1tb(), published.CRITEO_1TB_DISTINCT,
                                           published.MLPERF_MULTI_HOT, strict=True)]


def _capped(popularity: Popularity, num_rows: int) -> Popularity:
    """Keep the hottest `num_rows` rows; the mass of colder ones is spread evenly over these."""
    ends = np.cumsum(popularity.rows)
    if ends[-1] <= num_rows:
        return popularity
    rows = np.clip(num_rows - (ends - popularity.rows), 0, popularity.rows)
    weight = popularity.mass / popularity.rows
    folded = 1.0 - float(rows @ weight)
    return Popularity.of(rows[rows > 0], weight[rows > 0] + folded / num_rows)


def meta_2021(scale: float = 1 / 856) -> list[TableModel]:
    """Model Meta's 2021 trace by one table with `scale` times the touched rows of its 856 tables.

    `fit_locality` fits its popularity to the published histogram of accesses per touched row.
    """
    popularity = fit_locality(
        np.array(published.META_2021_ROW_SHARES), np.array(published.META_2021_ACCESS_SHARES),
        published.META_2021_INDICES / published.META_2021_ROWS,
        round(published.META_2021_ROWS * scale))
    return [TableModel("pooled", popularity, _always(16))]


def _deeprecsys(tables: int, rows: int, length: int) -> Callable[[], list[TableModel]]:
    """Return a DeepRecSys preset (Gupta et al. 2020); its power law's exponent is assumed."""
    return lambda: [TableModel(f"t{k}", power_law(rows, 1.05), _always(length))
                    for k in range(tables)]


PRESETS: dict[str, Callable[[], Sequence[TableModel]]] = {
    "criteo-1tb": criteo_1tb, "mlperf-dlrm-v2": mlperf_dlrm_v2, "meta-2021": meta_2021,
    "deeprecsys-rm1": _deeprecsys(8, 4_000_000, 80),
    "deeprecsys-rm2": _deeprecsys(32, 500_000, 120),
    "deeprecsys-rm3": _deeprecsys(10, 2_000_000, 20),
}
