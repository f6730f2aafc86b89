"""Forecast of a dynamic table's behaviour on a log of keys, and statistics of its rows.

This is a model, not a replay: lookups are independent draws from the counted frequencies. Keys are
hashed into buckets, and a bucket can be full before the table is; the expected number of rows in
use follows from a Poisson distribution of the keys per bucket. Eviction ``"lru"`` is approximated
as by Che, Tung and Wang ("Hierarchical Web caching systems", 2002): a key has a row if it was seen
within the last T lookups, with T such that the number of these keys equals the rows in use;
``"lfu"`` keeps the keys that are seen most often. With ``"distance_lfu"`` a key of count n has a
row if it was seen within the last n T lookups, since its score is then at least 1 / T.

With a time to live of t lookups, a key has a row only if it was also seen within the last t. A key
that has lost its row must be counted `admit_after` times again: if s is the probability that it was
seen lately, s / (s + (1 - s) admit_after) of its lookups find its row. With a half-life of h
lookups, a count is about the number of occurrences in the last 1.5 h lookups, a Poisson variable.
``"lfu"`` keeps the keys with the highest counts and, among keys whose counts have become 0, those
seen last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from oper.errors import require, require_fields
from oper.ranges import Positive, Rule, one_of, rules_of
from oper.stats import AccessStats, TableStats
from oper.support.numeric import falling_root
from oper.tables import KEY_BUCKET_ROWS, KEY_EVICTIONS


@dataclass(frozen=True, slots=True)
class KeyForecast:
    """Expected behaviour of a dynamic table that is empty at the start of a log.

    Attributes:
        rows: rows available to keys, that is, without the default row.
        keys: distinct keys of the log.
        occupied: rows that keys have at the end of the log, not counting expired keys.
        default_share: share of the lookups that read the default row.
        inserts_per_lookup: number of times that a key gets a row, per lookup.
        evictions_per_lookup: number of times that a key loses its row to another key, per lookup.
        expirations_per_lookup: number of times that a key's time to live ends, per lookup.
        unseen_mass: Good-Turing estimate of the share of the next lookups that bring new keys.
    """

    rows: int
    keys: int
    occupied: float
    default_share: float
    inserts_per_lookup: float
    evictions_per_lookup: float
    expirations_per_lookup: float
    unseen_mass: float


_Rows = Annotated[int, Rule(lambda n: 2 <= n <= 1 << 48,
                            "an integer >= 2, for the default row and a key, and <= 2^48")]
_Time = Annotated[float, Rule(lambda t: t > 0, "None or a number > 0")]


@dataclass(frozen=True, slots=True)
class DynamicRows:
    """Settings of a dynamic table that affect the use of its rows; see `oper.DynamicTable`.

    Attributes:
        num_rows: rows of the table, including the default row; at least 2.
        admit_after, eviction: as there.
        half_life, time_to_live: as there, but in lookups of the table instead of updates.

    Raises:
        InvalidInputError: a value is out of range.
    """

    num_rows: _Rows
    admit_after: Positive = 1
    eviction: Annotated[str, one_of(*KEY_EVICTIONS)] = "lru"
    half_life: _Time | None = None
    time_to_live: _Time | None = None

    def __post_init__(self) -> None:
        require_fields(self, "cannot forecast a dynamic table",
                       "pass num_rows, admit_after and times in range, and an eviction of "
                       "oper.DynamicTable", *rules_of(self))
        require("cannot forecast a dynamic table", "leave it out, or choose another eviction",
                ("half_life", self.half_life, self.half_life is None or self.eviction != "lru",
                 "None with eviction='lru', which does not use counts"))

    def per_update(self, lookups: float) -> DynamicRows:
        """Convert settings whose times are in updates to times in lookups.

        Args:
            lookups: mean number of lookups of the table per update.
        """
        return replace(self, **{name: max(1.0, value * lookups)
                                for name in ("half_life", "time_to_live")
                                if (value := getattr(self, name)) is not None})


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """Keys grouped by access count, hottest first; each array is float64 [K].

    Attributes:
        keys: number of distinct keys.
        held: number of keys that have a row at the end.
        hits, misses: number of lookups that read a key's own row, and the default row.
        inserts: number of times that a key gets a row.
        expires: whether keys lose their rows because their time to live ends, not to other keys.
    """

    keys: np.ndarray
    held: np.ndarray
    hits: np.ndarray
    misses: np.ndarray
    inserts: np.ndarray
    expires: bool


def forecast(table: TableStats, num_rows: int, admit_after: int = 1, eviction: str = "lru",
             half_life: float | None = None, time_to_live: float | None = None) -> KeyForecast:
    """Predict how a dynamic table would behave on a log like the counted one.

    Args:
        table: statistics of the keys, see `oper.analysis.counting.KeyCounter`.
        num_rows, admit_after, eviction, half_life, time_to_live: see `DynamicRows`; times are in
            lookups of the table.

    Raises:
        InvalidInputError: an argument is out of range.
    """
    of = DynamicRows(num_rows, admit_after, eviction, half_life, time_to_live)
    found = _held(table, of)
    lookups, occupied = max(1, table.num_accesses), float(found.held.sum())
    inserts = float(found.inserts.sum())
    lost = max(0.0, inserts - occupied) / lookups
    return KeyForecast(
        of.num_rows - 1, int(found.keys.sum()), occupied, float(found.misses.sum()) / lookups,
        inserts / lookups, 0.0 if found.expires else lost, lost if found.expires else 0.0,
        table.unseen_mass)


def rows_of_keys(table: TableStats, of: DynamicRows) -> TableStats:
    """Predict the statistics of a dynamic table's rows, from which the table can be planned.

    The row that a key will get is unknown, so the head contains only the default row, and the tail
    has the number of rows by access count. The lookups of keys that successively have the same row
    are summed.
    """
    found, num_rows = _held(table, of), of.num_rows
    num_missed = round(float(found.misses.sum()))
    # Whole rows, hottest first; classes of less than one row are merged with colder ones.
    ends = np.rint(np.cumsum(found.held)).astype(np.int64)
    is_row = np.diff(ends, prepend=0) > 0
    rows = np.diff(ends[is_row], prepend=0)
    each = np.rint(np.diff(np.cumsum(found.hits)[is_row], prepend=0.0) / rows).astype(np.int64)
    head = np.array([num_missed] if num_missed else [], np.int64)
    rows = np.append(rows, num_rows - head.size - int(rows.sum()))
    values, at = np.unique(np.append(each, 0), return_inverse=True)
    rows = np.bincount(at, rows, minlength=values.size).astype(np.int64)
    values, rows = values[rows > 0], rows[rows > 0]
    return with_bags_of_keys(
        TableStats(num_rows, np.zeros(head.size, np.int64), head, values, rows), table,
        float(found.misses.sum()) / max(1, table.num_accesses))


def with_bags_of_keys(rows: TableStats, keys: TableStats, default_share: float) -> TableStats:
    """Return the statistics of a dynamic table's rows with the bags and presence of its keys.

    A window of samples touches as many rows as that number of independent lookups of rows with
    which independent lookups of keys would touch as many keys as measured.

    Args:
        rows: access counts of the rows.
        keys: statistics of the keys.
        default_share: share of the lookups that read the default row.
    """
    known, placed = keys.count_histogram(), rows.count_histogram()

    def touched(of: tuple[np.ndarray, np.ndarray], log_lookups: float) -> float:
        """Distinct keys or rows of `count_histogram` that independent lookups touch."""
        counts, number = of
        share = counts / max(1, int(counts @ number))
        return float(number @ -np.expm1(-np.exp(log_lookups) * share))

    def log_lookups(distinct: float) -> float:
        return falling_root(lambda x: distinct - touched(known, x), -5.0, 60.0)

    found = np.array([touched(placed, log_lookups(n)) for n in keys.presence_rows.tolist()])
    return replace(
        rows, default_share=default_share, length_values=keys.length_values,
        length_counts=keys.length_counts, presence_samples=keys.presence_samples,
        presence_windows=keys.presence_windows, presence_rows=np.maximum(1.0, found))


def stats_of_rows(stats: AccessStats, tables: Mapping[str, DynamicRows], samples_per_update: int
                  ) -> AccessStats:
    """Convert the statistics of dynamic tables from keys to rows.

    If row numbers stand for hotness in `stats`, or a table has no accesses, all rows of the dynamic
    table are assumed to be equally hot; only the bag lengths are those of `stats`.

    Args:
        stats: statistics of keys.
        tables: settings of the dynamic tables by name, with times in updates.
        samples_per_update: samples of all ranks in an update.
    """
    found = {}
    for name, of in tables.items():
        keys = stats.tables.get(name)
        if keys is None:
            continue
        if stats.ids_in_hotness_order or not keys.num_accesses:
            each = np.array([min(1, keys.num_accesses)])  # per row; only ratios are meaningful
            found[name] = TableStats(of.num_rows, tail_values=each,
                                     tail_num_rows=np.array([of.num_rows]),
                                     length_values=keys.length_values,
                                     length_counts=keys.length_counts, default_share=0.0)
        else:
            lookups = samples_per_update * keys.num_accesses / max(1, stats.num_samples)
            found[name] = rows_of_keys(keys, of.per_update(lookups))
    return replace(stats, tables=stats.tables | found)


def _held(table: TableStats, of: DynamicRows) -> _Held:
    counts, keys = table.count_histogram()
    counts, keys = counts[counts > 0].astype(float), keys[counts > 0].astype(float)
    waits = np.minimum(counts, of.admit_after)  # lookups of a key until it has a row
    admitted = np.where(counts >= of.admit_after, keys, 0.0)
    share = counts / max(1.0, float(counts @ keys))

    def found(seen_lately: np.ndarray) -> np.ndarray:
        """Probability that a key has its row."""
        has_row: np.ndarray = seen_lately / (seen_lately + (1.0 - seen_lately) * waits)
        return has_row

    # With a time to live, keys that are not seen lately have no row even if rows are free.
    live = np.ones_like(share) if of.time_to_live is None else found(
        -np.expm1(-share * of.time_to_live))
    in_use = _rows_in_use(float(admitted @ live), of.num_rows - 1)
    window = None if of.half_life in (None, np.inf) else 1.5 * of.half_life
    expires = of.time_to_live is not None and in_use >= 0.98 * float(admitted @ live)
    if expires:
        stays = live
    elif of.eviction == "lfu":
        stays = _most_frequent(share, admitted, live, in_use, window)
    else:
        rates = share
        if of.eviction == "distance_lfu":
            rates = share * (counts if window is None else np.minimum(counts, 1 + share * window))
        stays = found(_seen_lately(rates, admitted, in_use, found))
    held = admitted * stays
    hits = admitted * (counts - waits) * stays
    # A key that misses `waits` times gets a row, even if it loses it at the next new key.
    inserts = admitted * (1.0 + (counts - waits) * (1.0 - stays) / waits)
    return _Held(keys, held, hits, counts * keys - hits, inserts, expires)


def _most_frequent(share: np.ndarray, keys: np.ndarray, live: np.ndarray, in_use: float,
                   window: float | None) -> np.ndarray:
    """Return the probability [K] that a key is among the `in_use` live keys with the highest
    counts.

    Args:
        share: share of the lookups of each key, descending, float64 [K].
        keys: number of keys, float64 [K].
        live: probability that a key has not expired, float64 [K].
        in_use: number of keys that have a row.
        window: number of lookups that a count covers; None = all.
    """
    number = keys * live
    before = np.cumsum(number) - number
    whole = live * np.divide(np.clip(in_use - before, 0.0, number), number,
                             out=np.zeros_like(keys), where=number > 0)
    if window is None:
        return whole
    mean = share * window
    most = int(min(200, np.ceil(2 * mean.max(initial=0.0) + 10)))
    above = _more_than(mean, most)  # [K, most]
    numbers = keys @ above  # numbers of keys with a count above 0, 1, ...
    if numbers[-1] > in_use:  # such high counts hardly differ from their means
        return whole
    if numbers[0] < in_use:  # of keys with a count of 0, those seen last have rows as well
        return np.minimum(live, _seen_lately(share, keys, in_use, lambda x: x))
    level = max(1, int(np.argmax(numbers <= in_use)))
    # Only part of the keys with this count have a row.
    part = (in_use - numbers[level]) / max(1e-300, numbers[level - 1] - numbers[level])
    found = above[:, level] + min(1.0, part) * (above[:, level - 1] - above[:, level])
    return np.minimum(live, found)


def _more_than(means: np.ndarray, most: int) -> np.ndarray:
    """Return the probability [n, most] that a Poisson variable of each mean (float64 [n]) is above
    0, 1, ..., most - 1."""
    places = np.arange(most)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, max(1, most))))])[:most]
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where(places == 0, 0.0, places * np.log(means)[:, None])
    below = np.cumsum(np.exp(logs - means[:, None] - log_factorial), axis=1)
    above: np.ndarray = np.maximum(0.0, 1.0 - below)
    return above


def _rows_in_use(num_keys: float, num_rows: int) -> float:
    """Return the expected number of rows in use after hashing `num_keys` keys into the buckets of a
    table with `num_rows` rows."""
    num_buckets = -(-num_rows // KEY_BUCKET_ROWS)
    size, larger = divmod(num_rows, num_buckets)
    # Probabilities that more than 0, 1, ... keys are in a bucket.
    more = _more_than(np.array([num_keys / num_buckets]), size + 1)[0]
    return float(num_buckets * more[:size].sum() + larger * more[size])


def _seen_lately(rates: np.ndarray, keys: np.ndarray, in_use: float,
                 found: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return the probability that a key is seen within T (see the module's docstring), float64 [K].

    Args:
        rates: expected number of a key's occurrences per unit of T, float64 [K].
        keys: number of keys, float64 [K].
        in_use: number of keys that have a row, which determines T.
        found: maps the result to the probability that a key has a row, float64 [K].
    """
    def seen(log_t: float) -> np.ndarray:
        lately: np.ndarray = -np.expm1(-rates * np.exp(log_t))
        return lately

    return seen(falling_root(lambda log_t: in_use - float(keys @ found(seen(log_t))),
                             -60.0, 120.0, 100))
