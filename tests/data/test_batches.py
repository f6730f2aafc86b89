"""Batches: every row once, the same global batches for every world size, bounded buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from oper.data import Batches, BatchOptions, PreprocessOptions, load_recipe, preprocess
from oper.data.generic import Choice, generic_recipe
from oper.errors import FileFormatError, InvalidInputError


@pytest.fixture
def folder(tmp_path: Path, invent: Any, write: Any) -> Path:
    rows = invent(700)
    for k, row in enumerate(rows):
        row[5] = str(k)  # I5 tells which row it is
    path = write(tmp_path / "train.txt", rows)
    options = PreprocessOptions(row_group_rows=50, part_rows=170)
    preprocess(load_recipe("criteo-kaggle"), [str(path)], tmp_path / "out", options)
    return tmp_path / "out"


def row_numbers(batch: Any) -> list[int]:
    return np.rint(np.expm1(batch.dense[:, 4].astype(np.float64))).astype(int).tolist()


def test_order_of_time_shapes_and_values(folder: Path) -> None:
    batches = list(Batches(folder, "train", BatchOptions(64, buffer_rows=100)))
    assert [b.num_samples for b in batches] == [64] * 9 + [24]
    first = batches[0]
    assert (first.labels.dtype, first.dense.dtype, first.ids.dtype) == (
        np.float32, np.float32, np.int64)
    assert first.dense.shape == (64, 13) and first.ids.shape == (26, 64)
    assert first.ids.flags.c_contiguous and first.dense.flags.c_contiguous
    assert [n for b in batches for n in row_numbers(b)] == list(range(600))
    table = pq.read_table(folder / "train")
    assert np.concatenate([b.labels for b in batches]).tolist() == table["label"].to_pylist()
    for c in (0, 25):
        found = np.concatenate([b.ids[c] for b in batches]).tolist()
        assert found == table[f"C{c + 1}"].to_pylist()


@pytest.mark.parametrize("buffer_rows", [1, 120, 10_000])
def test_shuffle_visits_every_row_once_in_an_order_of_seed_and_epoch(
    folder: Path, buffer_rows: int
) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        options = BatchOptions(32, shuffle=True, seed=seed, buffer_rows=buffer_rows)
        return [n for b in Batches(folder, "train", options).epoch(epoch) for n in row_numbers(b)]

    orders = [order(0, 0), order(0, 1), order(1, 0)]
    assert order(0, 1) == orders[1]
    for found in orders:
        assert sorted(found) == list(range(600)) and found != list(range(600))
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_share_the_same_global_batches(
    folder: Path, world_size: int, shuffle: bool
) -> None:
    def batches(rank: int, size: int) -> list[Any]:
        options = BatchOptions(70, rank, size, shuffle, seed=3, buffer_rows=100)
        return list(Batches(folder, "train", options).epoch(2))

    whole = batches(0, 1)
    ranks = [batches(r, world_size) for r in range(world_size)]
    assert {len(r) for r in ranks} == {len(whole)} == {9}
    for step, batch in enumerate(whole):
        shares = [r[step] for r in ranks]
        assert max(s.num_samples for s in shares) - min(s.num_samples for s in shares) <= 1
        assert np.array_equal(np.concatenate([s.ids for s in shares], axis=1), batch.ids)
        assert np.array_equal(np.concatenate([s.dense for s in shares]), batch.dense)
        assert np.array_equal(np.concatenate([s.labels for s in shares]), batch.labels)


def test_last_batch_is_kept_or_dropped(folder: Path) -> None:
    kept, dropped = (Batches(folder, "train", BatchOptions(256, 3, 4, last=last))
                     for last in ("keep", "drop"))
    assert (len(kept), len(dropped)) == (3, 2)
    assert [b.num_samples for b in kept] == [64, 64, 22]
    assert [b.num_samples for b in dropped] == [64, 64]
    # 599 = 600 - 1: one sample is left for four ranks, all of which see that batch.
    sizes = [[b.num_samples for b in Batches(folder, "train", BatchOptions(599, r, 4))][-1]
             for r in range(4)]
    assert sizes == [1, 0, 0, 0]


def test_resuming_within_an_epoch(folder: Path) -> None:
    batches = Batches(folder, "train", BatchOptions(64, shuffle=True, buffer_rows=128))
    whole, rest = list(batches.epoch(4)), list(batches.epoch(4, start=6))
    assert len(rest) == len(whole) - 6
    for a, b in zip(whole[6:], rest, strict=True):
        assert np.array_equal(a.ids, b.ids)


def test_validation_split_and_lengths(folder: Path) -> None:
    batches = Batches(folder, "valid", BatchOptions(64))
    assert len(batches) == 2 and batches.num_rows == 100
    assert [n for b in batches for n in row_numbers(b)] == list(range(600, 700))


@pytest.mark.parametrize("options", [
    {"global_batch_size": 0}, {"rank": 2, "world_size": 2}, {"world_size": 0}, {"last": "pad"},
    {"buffer_rows": 0}, {"seed": -1}])
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        BatchOptions(**{"global_batch_size": 8, **options})


def test_bad_splits_and_folders(folder: Path) -> None:
    with pytest.raises(InvalidInputError, match="'dev'"):
        Batches(folder, "dev", BatchOptions(8))
    part = sorted((folder / "train").iterdir())[0]
    table = pq.read_table(part)
    pq.write_table(table.set_column(table.schema.get_field_index("C2"), "C2",
                                    [[-1] * table.num_rows]), part)
    with pytest.raises(FileFormatError, match="C2"):
        list(Batches(folder, "train", BatchOptions(8)))
    part.unlink()
    with pytest.raises(FileFormatError, match="train rows"):
        Batches(folder, "train", BatchOptions(8))


@pytest.fixture
def bags(tmp_path: Path) -> Path:
    """Rows of one id, of bags, and of bags that may be empty."""
    rng = np.random.default_rng(0)
    lines = ["label,item,tags,history"]
    for k in range(300):
        tags = "|".join(map(str, rng.integers(0, 30, rng.integers(1, 4))))
        history = "|".join(map(str, rng.integers(0, 200, rng.integers(0, 9))))
        lines.append(f"{k % 2},{k % 7},{tags},{history}")
    path = tmp_path / "own.csv"
    path.write_text("\n".join(lines) + "\n")
    recipe = generic_recipe("csv", Choice(("item", "tags:|", "history:|"), label="label"))
    preprocess(recipe, [str(path)], tmp_path / "bags", PreprocessOptions(
        row_group_rows=32, part_rows=100, valid="1/10"))
    return tmp_path / "bags"


def lists(batches: list[Any], folder: Path) -> dict[str, list[list[int]]]:
    """Bags by column, sample by sample."""
    names = Batches(folder, "train", BatchOptions(1)).folder.sparse
    found: dict[str, list[list[int]]] = {n: [] for n in names}
    for batch in batches:
        assert batch.ids.dtype == np.int64 and batch.lengths.dtype == np.int32
        assert batch.lengths.shape == (len(names), batch.num_samples)
        pieces = np.split(batch.ids, np.cumsum(batch.lengths.reshape(-1)))
        assert not pieces.pop().size
        for k, name in enumerate(names):
            found[name] += [p.tolist() for p in pieces[k * batch.num_samples:][:batch.num_samples]]
    return found


def test_bags_come_as_they_are_written(bags: Path) -> None:
    table = pq.read_table(bags / "train")
    found = lists(list(Batches(bags, "train", BatchOptions(37, buffer_rows=50))), bags)
    assert found["item"] == [[v] for v in table["item"].to_pylist()]
    assert found["tags"] == table["tags"].to_pylist()
    assert found["history"] == table["history"].to_pylist()
    assert [] in found["history"]


@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_share_bags(bags: Path, shuffle: bool) -> None:
    def batches(rank: int, size: int) -> list[Any]:
        options = BatchOptions(40, rank, size, shuffle, seed=5, buffer_rows=90)
        return list(Batches(bags, "train", options).epoch(1))

    whole = lists(batches(0, 1), bags)
    ranks = [batches(r, 3) for r in range(3)]
    shared = lists([b for step in zip(*ranks, strict=True) for b in step], bags)
    assert shared == whole
    rows = list(zip(*whole.values(), strict=True))
    table = pq.read_table(bags / "train")
    want = list(zip([[v] for v in table["item"].to_pylist()], table["tags"].to_pylist(),
                    table["history"].to_pylist(), strict=True))
    assert (rows != want) == shuffle
    assert sorted(map(str, rows)) == sorted(map(str, want))


def test_bags_train(bags: Path) -> None:
    pytest.importorskip("torchrec")
    from oper.train.batches import to_batch

    data = Batches(bags, "train", BatchOptions(16))
    arrays = next(iter(data))
    kjt = to_batch(arrays, data.folder.sparse).sparse_features
    assert kjt.keys() == ["item", "tags", "history"]
    found = {k: [x.tolist() for x in kjt[k].to_dense()] for k in data.folder.sparse}
    assert found == lists([arrays], bags)
