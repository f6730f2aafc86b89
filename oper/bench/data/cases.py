"""Cases of ``oper bench data``: functions from an input size and a folder to a case's figures.

The folder is empty and the case's own. Generated logs are in its parent, for all cases.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import random
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from oper.analysis import Collector, CountOptions, TableCounter, merge_stats
from oper.analysis.presence import Lookups
from oper.bench.core import child
from oper.bench.core.memory import peak_rss_mb
from oper.bench.core.record import elapsed, interleave
from oper.data import (
    Folder,
    PreprocessOptions,
    SyntheticLog,
    analyze_folder,
    load_recipe,
    power_law_ids,
    preprocess as run_preprocess,
    write_synthetic_log,
)
from oper.stats import AccessStats
from oper.tables import TableSpec

_KILLS, _ATTEMPTS = 10, 60  # kills in the case `resume`, and limit of its attempts
_FIELDS = ["label", *(f"I{k}" for k in range(1, 14)), *(f"C{k}" for k in range(1, 27))]


def to_parquet(logs: list[str], target: str, options: dict[str, Any]) -> dict[str, Any]:
    """Preprocess logs in the Criteo format with `options`; returns the manifest."""
    return run_preprocess(load_recipe("criteo-kaggle"), logs, target, PreprocessOptions(**options))


def _parse_by_pyarrow(log: str) -> int:
    """Number of rows of a log, each field of which is parsed to an integer or string."""
    import pyarrow as pa
    from pyarrow import csv

    types = {n: pa.string() if n[0] == "C" else pa.int64() for n in _FIELDS}
    reader = csv.open_csv(
        log, csv.ReadOptions(use_threads=False, column_names=_FIELDS, block_size=1 << 21),
        csv.ParseOptions(delimiter="\t", quote_char=False),
        csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True))
    return sum(batch.num_rows for batch in reader)


def _parse_by_polars(log: str) -> int:
    """As `_parse_by_pyarrow`; counting every column's values prevents skipping any of them."""
    import polars as pl

    types = {n: pl.String if n[0] == "C" else pl.Int64 for n in _FIELDS}
    rows = pl.scan_csv(log, separator="\t", has_header=False, quote_char=None, schema=types)
    counts = rows.select(pl.len(), pl.all().count()).collect(engine="streaming")
    return int(counts["len"][0])


def _parse_by_duckdb(log: str) -> int:
    """As `_parse_by_polars`."""
    import duckdb

    types = ", ".join(f"'{n}': '{'VARCHAR' if n[0] == 'C' else 'BIGINT'}'" for n in _FIELDS)
    counts = ", ".join(f"count({n})" for n in _FIELDS)
    link = duckdb.connect()
    link.execute("set threads = 1")
    found = link.execute(
        f"select count(*), {counts} from read_csv('{log}', delim='\t', header=false, quote='', "
        f"escape='', auto_detect=false, columns={{{types}}})").fetchone()
    return int(found[0])


_LIBRARIES: dict[str, Callable[[str], int]] = {
    "pyarrow.csv": _parse_by_pyarrow, "polars": _parse_by_polars, "duckdb": _parse_by_duckdb}


def _read(log: str) -> int:
    """Number of rows of a log, parsed by OPER's reader."""
    from oper.data.reading.lines import Unit
    from oper.data.reading.readers import read_unit

    return sum(rows.labels.size for rows in read_unit(
        Unit(log, "tsv"), load_recipe("criteo-kaggle"), lambda _: None))


def log_file(folder: Path, num_rows: int) -> Path:
    """A synthetic log of `num_rows` rows in the parent of `folder`; reuses an existing one."""
    path = folder.parent / f"log-{num_rows}.txt"
    if not path.exists():
        write_synthetic_log(path, SyntheticLog(num_rows=num_rows, seed=7))
    return path


def preprocess(num_rows: int, folder: Path) -> dict[str, Any]:
    """Preprocess text to Parquet on one thread, compared with parsing by the fastest library.

    ``mb_per_s_per_core`` is the size of the text divided by the time of all passes. The library
    parses the same file once and discards the values; which library is the fastest is determined on
    a short log.
    """
    log = str(log_file(folder, num_rows))
    megabytes = os.path.getsize(log) / 1e6
    target = folder / "out"
    fastest, rates = _fastest_library(folder)
    parse = child.call(_LIBRARIES[fastest], log)
    read = child.call(_read, log)
    written: dict[str, list[dict[str, Any]]] = {"none": [], "zstd": []}
    for compression in ("none", "zstd", "zstd", "none", "none", "zstd"):
        written[compression].append(child.call(
            to_parquet, [log], str(target), {"compression": compression}))
        shutil.rmtree(target)
        os.sync()  # so that the next run does not wait for the deletion and for dirty pages
    found, packed = (min(runs, key=_taken) for runs in written.values())
    rows = found["value"]["rows"]
    mine, zstd = megabytes / _taken(found), megabytes / _taken(packed)
    theirs = max(rates[fastest], megabytes / parse["seconds"])  # the less disturbed measurement
    return {
        "verified": sum(rows.values()) == num_rows == parse["value"] == read["value"]
        and packed["value"]["rows"] == rows, "rows": num_rows,
        "text_mb": megabytes, "seconds": found["seconds"], "cpu_seconds": found["cpu"],
        "mb_per_s_per_core": mine, "zstd_mb_per_s_per_core": zstd, "zstd_ratio": zstd / mine,
        "peak_rss_mb": found["rss_mb"],
        "library": fastest, "libraries_mb_per_s": rates,
        "library_parse_mb_per_s": theirs,
        "read_mb_per_s_per_core": megabytes / read["seconds"],
        "ratio_to_library": mine / theirs,
        "read_ratio_to_library": megabytes / read["seconds"] / theirs,
    }


def _taken(run: dict[str, Any]) -> float:
    """The larger of wall time and processor time (s)."""
    return float(max(run["seconds"], run["cpu"]))


def _fastest_library(folder: Path) -> tuple[str, dict[str, float]]:
    """The fastest installed CSV reader, and each one's MB/s: the better of two runs on 500,000
    rows."""
    log = log_file(folder, 500_000)
    rates = {name: max(log.stat().st_size / 1e6 / child.call(parse, str(log))["seconds"]
                       for _ in range(2))
             for name, parse in _LIBRARIES.items() if importlib.util.find_spec(name) is not None}
    return max(rates, key=lambda n: rates[n]), rates


def resume(num_rows: int, folder: Path) -> dict[str, Any]:
    """Kill preprocessing at random times, resume it, and compare its output with that of an
    undisturbed run."""
    log, options = str(log_file(folder, num_rows)), {"unit_bytes": 1 << 24}
    whole, broken = folder / "whole", folder / "broken"
    undisturbed = elapsed(lambda: child.call(to_parquet, [log], str(whole), options))
    rng, kills = random.Random(3), 0
    begin = time.perf_counter()
    for attempt in range(_ATTEMPTS):
        running = child.start(child.measure_call, to_parquet, [log], str(broken), options)
        if not running.pipe.poll(rng.uniform(0.1, 0.5) * undisturbed if kills < _KILLS else 600.0):
            kills += 1
        running.close(0)  # by SIGKILL
        if broken.exists():
            if kills >= _KILLS or attempt == _ATTEMPTS - 1:
                break
            shutil.rmtree(broken)  # it finished before enough kills: start again
    same = _digest(whole) == _digest(broken)
    return {"verified": same and kills >= _KILLS, "rows": num_rows, "kills": kills,
            "identical": same, "undisturbed_seconds": undisturbed,
            "seconds": time.perf_counter() - begin}


def _digest(folder: Path) -> str:
    state = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        state.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return state.hexdigest()


def count(num_ids: int, folder: Path) -> dict[str, Any]:
    """Exact counting of ids in memory, and of those in a preprocessed folder."""
    rng = np.random.default_rng(1)
    rates = {}
    for num_rows in (10_000, 1_000_000, 10_000_000):
        ids = power_law_ids(num_rows, num_ids // 3, 1.05, rng).astype(np.int32)
        counter = TableCounter("t", num_rows)
        seconds = elapsed(partial(_count, counter, ids))
        rates[num_rows] = ids.size / seconds
        stats = counter.finish()
        if stats.num_accesses != ids.size or stats.head_counts[0] != np.bincount(ids).max():
            return {"verified": False}
    log = log_file(folder, 1_000_000 if num_ids > 10_000_000 else 60_000)
    child.call(to_parquet, [str(log)], str(folder / "out"), {})
    rows = Folder.open(folder / "out").rows["train"]
    seconds = min(elapsed(lambda: analyze_folder(folder / "out")) for _ in range(3))
    return {"verified": True, "ids_per_s_per_core": len(rates) / sum(1 / r for r in rates.values()),
            **{f"ids_per_s_{n}_rows": r for n, r in rates.items()},
            "ids_per_s_from_parquet": rows * 26 / seconds, "peak_rss_mb": peak_rss_mb()}


def _count(counter: TableCounter, ids: np.ndarray) -> None:
    for part in np.array_split(ids, max(1, ids.size >> 16)):
        counter.add([Lookups(part)])


def sketch(num_ids: int, folder: Path) -> dict[str, Any]:
    """Count ids of a table of 10^9 rows in less memory than a counter for every row would take."""
    found = child.call(_count_sketched, num_ids, str(folder / "sketch.npz"))
    spent, top, hottest, accesses, is_exact, touched = found["value"]
    close = abs(hottest - top) <= 0.1 * top
    return {"verified": close and accesses == num_ids and found["rss_mb"] < 6000,
            "ids": num_ids, "rows": 10**9, "is_exact": is_exact, "touched_rows": touched,
            "ids_per_s_per_core": num_ids / spent, "peak_rss_mb": found["rss_mb"],
            "hottest": hottest, "hottest_exact": top}


def _count_sketched(num_ids: int, path: str) -> list[float]:
    """Time of counting (s); true and counted frequency of the hottest id; number of counted ids;
    whether all counts are exact; number of distinct rows."""
    counter, spent, top = TableCounter("t", 10**9, dense=False), 0.0, 0
    hot = int(power_law_ids(10**9, 1, 50.0, np.random.default_rng(0))[0])
    for k in range(0, num_ids, 1 << 20):
        ids = power_law_ids(10**9, min(1 << 20, num_ids - k), 1.05, np.random.default_rng(k))
        top += int((ids == hot).sum())
        spent += elapsed(partial(counter.add, [Lookups(ids)]))
    begin = time.perf_counter()
    stats = counter.finish()
    AccessStats(num_ids, {"t": stats}).save(path)
    spent += time.perf_counter() - begin
    return [spent, top, int(stats.head_counts[0]), stats.num_accesses, stats.is_exact,
            stats.num_touched_rows]


def merge(num_days: int, folder: Path) -> dict[str, Any]:
    """Merge the statistics files of `num_days` days, each with 26 tables, into one file."""
    rng = np.random.default_rng(2)
    sizes = [1000, 100_000, 2_000_000] * 8 + [50, 500]
    total = np.zeros(len(sizes), np.int64)
    paths = []
    for day in range(num_days):
        tables = {}
        for k, rows in enumerate(sizes):
            counter = TableCounter(f"t{k}", rows, presence_samples=(4096,))
            counter.add([Lookups(power_law_ids(rows, 200_000, 1.05, rng))], f"day {day}")
            tables[f"t{k}"] = counter.finish()
            total[k] += tables[f"t{k}"].num_accesses
        paths.append(folder / f"day{day}.npz")
        AccessStats(200_000, tables, "bench").save(paths[-1])

    def run() -> None:
        merge_stats(AccessStats.load(p) for p in paths).save(folder / "all.npz")

    seconds = elapsed(run)
    found = AccessStats.load(folder / "all.npz")
    same = [t.num_accesses for t in found.tables.values()] == total.tolist()
    entries = sum(t.head_ids.size for t in found.tables.values())
    return {"verified": same and len(found.tables["t0"].buckets) == num_days, "files": num_days,
            "tables": len(sizes), "distinct_rows": entries, "seconds": seconds,
            "peak_rss_mb": peak_rss_mb()}


def collector(num_steps: int, folder: Path) -> dict[str, Any]:
    """Overhead of a live collector, limited to 2 % of the time, on a training step.

    The step is a forward and backward pass of 26 `nn.EmbeddingBag`s and a dense network over 4096
    samples on one thread. Steps with and without a collector alternate.
    """
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = np.random.default_rng(5)
    tables = [TableSpec(f"t{k}", 100_000, 16, (f"t{k}",)) for k in range(26)]
    bags = torch.nn.ModuleList(torch.nn.EmbeddingBag(t.num_rows, t.dim, sparse=True)
                               for t in tables)
    over = torch.nn.Sequential(torch.nn.Linear(26 * 16, 512), torch.nn.ReLU(),
                               torch.nn.Linear(512, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    batches = [{t.name: power_law_ids(t.num_rows, 4096, 1.05, rng) for t in tables}
               for _ in range(16)]
    offsets = torch.arange(4096)
    live = Collector(tables, CountOptions(max_overhead=0.02))
    every = Collector(tables)

    def step(k: int, counter: Collector | None) -> None:
        batch = batches[k % len(batches)]
        pooled = [bag(torch.from_numpy(batch[t.name]), offsets)
                  for bag, t in zip(bags, tables, strict=True)]
        over(torch.cat(pooled, dim=1)).square().mean().backward()
        for parameter in [*bags.parameters(), *over.parameters()]:
            parameter.grad = None
        if counter is not None:
            counter.add(batch)

    counters = {"none": None, "live": live, "every": every}
    taken = interleave({n: partial(step, counter=c) for n, c in counters.items()}, lambda: None,
                       num_steps + 5, 1, lead_in=0)
    # Few steps count their batch, which makes them long: a median would not include them.
    plain, with_live, with_every = (float(np.mean(taken[n][5:])) for n in counters)
    stats = live.finish()
    spent = live.seconds / float(taken["live"][5:].sum())
    return {"verified": stats.num_samples == 4096 * (num_steps + 5 - live.num_left_out),
            "overhead": spent, "overhead_by_step_times": with_live / plain - 1,
            "overhead_of_every_batch": with_every / plain - 1, "step_ms": plain * 1e3,
            "batches_counted": num_steps + 5 - live.num_left_out, "batches": num_steps + 5}
