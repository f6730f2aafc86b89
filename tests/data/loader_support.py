"""Logs, contents of preprocessed folders, and checks of the loader's batches."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from oper.data import Folder, PreprocessOptions, preprocess
from oper.data.generic import Choice, generic_recipe
from oper.data.preprocessing.run import Job
from oper.data.recipe import Recipe

Fields = list[list[str]]


def invent(num_rows: int) -> Fields:
    """Make random rows of 40 text fields in the layout of Criteo Kaggle, many of them empty."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(num_rows):
        dense = ["" if rng.random() < 0.2 else str(rng.integers(-3, 2000)) for _ in range(13)]
        ids = np.minimum(rng.integers(0, 40, 26), rng.integers(0, 40, 26))
        sparse = ["" if rng.random() < 0.1 else f"{(int(i) * 2654435761 + c * 40503) % 2**32:08x}"
                  for c, i in enumerate(ids)]
        rows.append([str(rng.integers(0, 2)), *dense, *sparse])
    return rows


def text_of(rows: Fields) -> str:
    """Return rows as TAB-separated lines."""
    return "".join("\t".join(row) + "\n" for row in rows)


def train_log(folder: Path, rows: Fields | int) -> str:
    """Write ``folder/train.txt``, with these rows or as many invented ones; returns its path."""
    path = folder / "train.txt"
    path.write_text(text_of(invent(rows) if isinstance(rows, int) else rows))
    return str(path)


def made(folder: Path, log: str | bytes | dict[str, Any], how: Choice | Recipe, out: str = "out",
         **options: Any) -> dict[str, Any]:
    """Write a log, preprocess it into ``folder/OUT`` and return the manifest.

    `log`: the text of ``log.csv``, or the columns of ``log.parquet``; `how`: the columns to read,
    or a recipe.
    """
    kind = "parquet" if isinstance(log, dict) else "csv"
    path = folder / f"log.{kind}"
    if isinstance(log, dict):
        pq.write_table(pa.table(log), path)
    else:
        path.write_bytes(log.encode() if isinstance(log, str) else log)
    recipe = generic_recipe(kind, how) if isinstance(how, Choice) else how
    return preprocess(recipe, [str(path)], folder / out, PreprocessOptions(**options))


@contextlib.contextmanager
def interrupted(method: str, after: int = 0, finishes: bool = False) -> Iterator[list[Any]]:
    """Expect that a job is interrupted in the call of one of its methods after `after` others,
    before it does its work or, if `finishes`, after it; yields the arguments of all whole calls."""
    original, calls = getattr(Job, method), list[Any]()

    def call(job: Job, *args: Any) -> Any:
        if len(calls) == after and not finishes:
            raise KeyboardInterrupt
        found = original(job, *args)
        calls.append(args)
        if len(calls) == after + 1 and finishes:
            raise KeyboardInterrupt
        return found

    with mock.patch.object(Job, method, call), pytest.raises(KeyboardInterrupt):
        yield calls


def parquet_bytes(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.parquet"))}


def digest(folder: Path) -> str:
    """Return a digest of all files of a folder, except for the manifest's job id."""
    state = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            if path.name == "manifest.json":
                found = json.loads(data)
                del found["job"]
                data = json.dumps(found).encode()
            state.update(str(path.relative_to(folder)).encode() + data)
    return state.hexdigest()


def ids_of(folder: Path, column: str) -> dict[Any, int]:
    """Return the mapping from a column's raw values to ids."""
    table = pq.read_table(folder / "vocabulary" / f"{column}.parquet").to_pydict()
    return dict(zip(table["value"], table["id"], strict=True))


def encoded(folder: Path, column: str) -> list[Any]:
    """Return the ids, or bags of ids, in the training and validation parts."""
    opened = Folder.open(folder, allow_raw=True)
    return [v for split in ("train", "valid") for part in opened.parts(split)
            for v in opened.read_part(part, (column,)).column(column).to_pylist()]


def decoded(folder: Path, split: str = "train") -> dict[str, list[Any]]:
    """Return a part's columns with ids replaced by raw values; None for missing values and id 0."""
    found = pq.read_table(folder / split).to_pydict()
    for name in Folder.open(folder).sparse:
        value = {i: v for v, i in ids_of(folder, name).items()}
        found[name] = [[value.get(i) for i in x] if isinstance(x, list) else value.get(x)
                       for x in found[name]]
    return found


ROWS = 500
KEYS = ["item", "tags", "history", "user"]


def write_folder(where: Path) -> Path:
    """Write 500 training rows in 11 row groups and three files; column `row` numbers them."""
    rng = np.random.default_rng(0)
    lines = ["label,item,tags,history,user,row,price"]
    for k in range(625):
        tags = "|".join(map(str, rng.integers(0, 30, rng.integers(1, 4))))
        history = "|".join(map(str, rng.integers(0, 200, rng.integers(0, 9))))
        lines.append(f"{k % 3 == 0:d},{rng.integers(0, 99)},{tags},{history},"
                     f"{rng.integers(0, 12)},{k},{k / 8}")
    path = where / "own.csv"
    path.write_text("\n".join(lines) + "\n")
    recipe = generic_recipe("csv", Choice(
        ("item", "tags:|", "history:|", "user"), label="label", dense=("row", "price")))
    preprocess(recipe, [str(path)], where / "out", PreprocessOptions(
        row_group_rows=48, part_rows=200, valid="1/5", unit_bytes=1 << 28))
    return where / "out"


def rows_of(batch: Any) -> list[int]:
    return batch.dense_features[:, 0].int().tolist()


def everything(batch: Any) -> bytes:
    kjt = batch.sparse_features
    tensors = [batch.dense_features, batch.labels, kjt.values(), kjt.lengths(), kjt.offsets()]
    if kjt.weights_or_none() is not None:
        tensors.append(kjt.weights())
    return b"|".join([repr((kjt.keys(), kjt.stride_per_key())).encode()] + [
        repr((t.dtype, t.shape)).encode() + t.numpy().tobytes() for t in tensors])


def check(batch: Any, table: dict[str, list[Any]], keys: list[str] = KEYS) -> None:
    """Compare a batch with the rows of the Parquet files."""
    rows, kjt = rows_of(batch), batch.sparse_features
    assert kjt.keys() == keys
    assert (kjt.values().dtype, kjt.lengths().dtype) == (torch.int64, torch.int32)
    assert batch.dense_features.dtype == batch.labels.dtype == torch.float32
    assert batch.labels.tolist() == [table["label"][r] for r in rows]
    assert batch.dense_features[:, 1].tolist() == [table["price"][r] for r in rows]
    for key in keys:
        bags = [table[key][r] for r in rows]
        found = [x.tolist() for x in kjt[key].to_dense()]
        assert found == [b if isinstance(b, list) else [b] for b in bags], key
