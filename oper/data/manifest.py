"""The manifest of a preprocessed folder."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

import oper
from oper.data.folder import FOLDER_KIND, FOLDER_VERSION
from oper.data.rows import MAX_EXAMPLES
from oper.data.writing import Split
from oper.errors import FileFormatError
from oper.files import read_json

if TYPE_CHECKING:
    from oper.data.preprocessing import Job

ABOUT_SUFFIX = ".about.json"  # a file beside a log that says what the log is


def describe_job(job: Job, split: Split, records: Sequence[dict[str, Any]], rows: dict[str, int]
                 ) -> dict[str, Any]:
    """The manifest of a job that is done.

    Args:
        job: the job.
        split: where the parts of the log begin.
        records: what was found out about each unit.
        rows: rows by split.
    """
    recipe, options = job.recipe, job.options
    found = dict.fromkeys(job.paths, 0)
    for unit, record in zip(job.units, records, strict=True):
        found[unit.path] += record["rows"] + record["bad"]
    inputs = [{"path": os.path.abspath(p), "bytes": os.path.getsize(p), "rows": found[p],
               **_about(p)} for p in job.paths]
    sparse = recipe.names("sparse")
    chunk = next((c for r in records for c in r["chunks"]), None)
    multi = [n for n, bag in zip(sparse, chunk["bags"] if chunk else [], strict=False) if bag]
    tables = {name: asdict(job.vocabulary(name).facts) for name in sparse}
    valid, test = job.shares
    return {
        "kind": FOLDER_KIND, "version": FOLDER_VERSION, "job": job.identity(),
        "recipe": {"name": recipe.name, "title": recipe.title,
                   "layouts": sorted({u.layout for u in job.units})},
        "synthetic": any(i.get("synthetic") for i in inputs),
        "inputs": inputs,
        "rows": rows,
        "bad_rows": {"count": sum(r["bad"] for r in records), "max_bad": options.max_bad,
                     "first": [b for r in records for b in r["first"]][:MAX_EXAMPLES]},
        "split": {"by": "rows in order of time" if split.by == "rows" else "time",
                  "order": "of the log" if split.by == "rows"
                  else "of time; rows of one second in the order of the log",
                  "valid": str(valid), "test": str(test),
                  "first_valid_row" if split.by == "rows" else "first_valid_second":
                      split.first_valid, "buckets": split.buckets},
        "columns": {"label": recipe.label, "dense": list(recipe.names("dense")),
                    "sparse": list(sparse), "multi_hot": multi, "bucket": recipe.bucket_column,
                    "time": recipe.time},
        "dense_transforms": {c.name: c.transform for c in recipe.columns if c.kind == "dense"},
        "min_count": job.min_count, "max_rows": options.max_rows, "hash_rows": options.hash_rows,
        "ids_in_hotness_order": options.hash_rows is None,
        "tables": tables,
        "versions": {"oper": oper.__version__, "python": platform.python_version(),
                     "numpy": np.__version__, "pyarrow": pa.__version__},
    }


def _about(path: str) -> dict[str, Any]:
    """What the file beside a log says of it; nothing for logs without one."""
    with contextlib.suppress(FileNotFoundError, FileFormatError):
        about = read_json(path + ABOUT_SUFFIX, "nothing about a log")
        if isinstance(about, dict):
            return {"synthetic": bool(about.get("synthetic", False)), "about": about}
    return {}
