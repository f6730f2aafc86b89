"""The manifest of a preprocessed folder."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import oper
from oper.data.folder import FOLDER_KIND, FOLDER_VERSION, SPLITS
from oper.data.preprocessing.spec import JobSpec
from oper.data.preprocessing.staging import kinds_of
from oper.data.preprocessing.workfolder import OUT
from oper.data.preprocessing.writing import Split
from oper.data.reading import store
from oper.data.reading.rows import MAX_EXAMPLES
from oper.data.recipe import Recipe
from oper.data.vocabulary.finished import numbering_of
from oper.errors import FileFormatError
from oper.support.files import read_json

_YEAR_S = 365 * 86400
ABOUT_SUFFIX = ".about.json"  # a file next to a log that describes it


def describe(job: JobSpec, split: Split, records: Sequence[dict[str, Any]], rows: dict[str, int],
             tables: dict[str, dict[str, Any]], unseen: dict[str, Any]) -> dict[str, Any]:
    """Make the manifest of a finished job, JSON-serializable.

    Args:
        job: the job.
        split: the boundaries of the log's parts.
        records: the record of each unit, see `Stage.record`.
        rows: rows by split.
        tables: by sparse column, facts about its values (`VocabularyFacts`, or those of raw ids).
        unseen: by sparse column, number of distinct values and of accesses in the training part
            that a finished vocabulary lacks, and their share of the accesses.
    """
    recipe, options, raw = job.recipe, job.options, job.options.raw_ids
    found = dict.fromkeys(job.paths, 0)
    for unit, record in zip(job.units, records, strict=True):
        found[unit.path] += record["rows"] + record["bad"]
    inputs = [{"path": store.full_name(p), "bytes": store.size(p), "rows": found[p],
               **_about(p)} for p in job.paths]
    sparse = recipe.sparse
    chunk = next((c for r in records for c in r["chunks"] if c["rows"]), None)
    multi = [n for n, bag in zip(sparse, chunk["bags"] if chunk else [], strict=False) if bag]
    valid, test = job.shares
    joins = [{"file": store.full_name(join.file), "key": join.key,
              "unmatched_rows": sum(r["unmatched"][k] for r in records)}
             for k, join in enumerate(recipe.joins)]
    found_problems = _problems(recipe, rows, {"valid": valid, "test": test}, tables, split)
    found_problems += [f"the side table {j['file']!r} has no row for {j['unmatched_rows']} of the "
                       f"{sum(rows.values())} rows, by column {j['key']!r}" for j in joins
                       if 2 * j["unmatched_rows"] > sum(rows.values())]
    return {
        "kind": FOLDER_KIND, "version": FOLDER_VERSION, "job": job.identity(),
        "recipe": {"name": recipe.name, "title": recipe.title,
                   "layouts": sorted({u.layout for u in job.units})},
        "synthetic": any(i.get("synthetic") for i in inputs),
        "inputs": inputs,
        "rows": rows, "row_group_rows": options.row_group_rows,
        "parts": parts_of(job.work / OUT),
        "bad_rows": {"count": sum(r["bad"] for r in records), "max_bad": options.max_bad,
                     "first": [b for r in records for b in r["first"]][:MAX_EXAMPLES]},
        "split": {"by": "rows in order of time" if split.by == "rows" else "time",
                  "order": "of the log" if split.by == "rows"
                  else "of time; rows of one second in the order of the log",
                  "valid": str(valid), "test": str(test),
                  "first_valid_row" if split.by == "rows" else "first_valid_second":
                      split.first_valid, "buckets": split.buckets,
                  **({"first_second": split.start, "seconds": split.span}
                     if split.by == "time" else {})},
        "columns": {"label": recipe.label, "dense": list(recipe.dense),
                    "sparse": list(sparse), "multi_hot": multi, "bucket": recipe.bucket_column,
                    "time": recipe.time},
        "dense_transforms": {c.name: c.transform for c in (
            *recipe.layout(job.units[0].layout).columns,
            *(c for join in recipe.joins for c in join.columns))
            if c.kind == "dense"},
        **({"joins": joins} if joins else {}),
        "raw_ids": raw, "min_count": None if raw else job.min_count,
        "max_rows": options.max_rows, "hash_rows": options.hash_rows,
        "ids_in_hotness_order": options.hash_rows is None and job.finished is None and not raw,
        "numbering": _numbering(job, records), "tables": tables,
        **({} if job.finished is None else {
            "vocabulary": {"path": os.path.abspath(job.finished.path),
                           "digest": job.finished.digest}, "unseen": unseen}),
        "problems": found_problems,
        "versions": {"oper": oper.__version__, "python": platform.python_version(),
                     "numpy": np.__version__, "pyarrow": pa.__version__},
    }


def _numbering(job: JobSpec, records: Sequence[dict[str, Any]]) -> str:
    """Return an id of the mapping from values to rows; checkpoints load only if it is equal."""
    if job.finished is not None:
        return job.finished.numbering
    if job.options.raw_ids or job.options.hash_rows is not None:
        # The text 17 and the integer 17 have different keys and hashes.
        sparse = job.recipe.sparse
        kinds = kinds_of(records, [u.path for u in job.units], sparse)
        texts = [name for name, kind in zip(sparse, kinds, strict=True) if kind == "S"]
        how = "raw ids" if job.options.raw_ids else f"hashes, {job.options.hash_rows} rows"
        return f"{how}; hashes of texts: {', '.join(texts) or 'none'}"
    return numbering_of(job.work / OUT / "vocabulary")


def _problems(recipe: Recipe, rows: dict[str, int], shares: dict[str, Fraction],
              tables: dict[str, dict[str, Any]], split: Split) -> list[str]:
    """List reasons, one sentence each, why a result is nearly useless although nothing failed."""
    found = [f"the {part} part is empty although {share} of the rows was requested: the log is too "
             "short" + (", or its last minute alone holds more" if split.by == "time" else "")
             for part, share in shares.items() if share and not rows[part]]
    found += [f"all values of column {name!r} share row 0 of its table: " + (
              "lower --min-count" if table["num_distinct"] else "the training part has none")
              for name, table in tables.items() if table.get("num_rows") == 1]
    if not recipe.names("label"):
        found.append(f"the log has no label, so {recipe.label!r} is 1 in every row: a click model "
                     "learns nothing from it (its AUC is undefined); a recommender needs no label")
    leaks = {c.name for layout in recipe.layouts for label in layout.of("label")
             for c in layout.columns if c.kind in ("dense", "sparse")
             and set(c.sources) & set(label.sources)}
    found += [f"feature {name!r} is read from the label's column: it leaks the label to a model"
              for name in sorted(leaks)]
    if "unix_ms" in {c.parse for layout in recipe.layouts for c in layout.of("time")} and (
            split.by == "time" and split.start >= 0 and split.start + split.span < 2 * _YEAR_S):
        found.append("all times lie in 1970 or 1971: they look like seconds read as milliseconds")
    return found


def parts_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Return bytes and rows of each Parquet file, by ``SPLIT/FILE``."""
    found = sorted(p for split in SPLITS for p in (folder / split).glob("part-*.parquet"))
    return {str(p.relative_to(folder)): (p.stat().st_size, pq.read_metadata(p).num_rows)
            for p in found}


def _about(path: str) -> dict[str, Any]:
    """Read the description in ``PATH.about.json`` next to a log; empty if there is none."""
    with contextlib.suppress(FileNotFoundError, FileFormatError):
        about = {} if store.is_url(path) else read_json(path + ABOUT_SUFFIX, "nothing about a log")
        if isinstance(about, dict):
            return {"synthetic": bool(about.get("synthetic", False)), "about": about}
    return {}
