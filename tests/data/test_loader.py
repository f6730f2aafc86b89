"""The loader: rows, shares of ranks, windows and features."""

import copy
import itertools
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from oper.data import Loader, LoaderOptions
from oper.data.folder import MANIFEST
from oper.data.loading.groups import GroupReader
from oper.errors import FileFormatError, InvalidInputError, MissingDependencyError
from oper.integration.variable_batch import padded_lengths, spread
from oper.shmem import library
from oper.support.own_rows import are_own_rows
from tests.data.loader_support import KEYS, ROWS, check, everything, rows_of, write_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return write_folder(tmp_path_factory.mktemp("loader"))


@pytest.fixture(scope="module")
def table(folder: Path) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = pq.read_table(folder / "train").to_pydict()
    assert len(found["label"]) == ROWS
    return found


@pytest.fixture
def groups_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the indices of the row groups that are read."""
    found: list[int] = []
    genuine = GroupReader.read
    monkeypatch.setattr(GroupReader, "read",
                        lambda self, group: (found.append(group), genuine(self, group))[1])
    return found


@pytest.mark.parametrize("window", [0, 1, 100, 1 << 17])
def test_values_in_the_order_of_the_folder_or_shuffled(folder: Path, table: dict[str, list[Any]],
                                                       window: int) -> None:
    loader = Loader(folder, "train", LoaderOptions(64, window=window, seed=4))
    batches = list(loader)
    assert [b.labels.numel() for b in batches] == [64] * 7 + [52] and len(loader) == 8
    for batch in batches:
        check(batch, table)
    order = [r for b in batches for r in rows_of(b)]
    assert sorted(order) == list(range(ROWS))
    assert (order == list(range(ROWS))) == (window == 0)
    assert [] in table["history"]


def test_shuffled_within_windows_only(folder: Path) -> None:
    """Row groups come in random order, and rows stay in the window of their row group."""
    loader = Loader(folder, "train", LoaderOptions(16, window=100, seed=1))
    order = [r for b in loader for r in rows_of(b)]
    groups = loader._groups
    starts = np.cumsum(groups.rows) - groups.rows
    for at in range(0, ROWS, 96):
        window = sorted(order[at:at + 96])
        assert window != order[at:at + 96]
        touched = set((np.searchsorted(starts, window, "right") - 1).tolist())
        assert len(touched) <= 4, "96 rows of groups of 48 and less"
    assert order[:96] != sorted(order[:96]) and sorted(order[:96]) != list(range(96))


def test_seed_and_epoch_choose_the_order(folder: Path) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        loader = Loader(folder, "train", LoaderOptions(32, seed=seed))
        loader.set_epoch(epoch)
        return [r for b in loader for r in rows_of(b)]

    orders = [order(0, 0), order(0, 1), order(1, 0), order(0, 0)]
    assert orders[0] == orders[3]
    assert len({tuple(o) for o in orders}) == 3


@given(world_size=st.integers(1, 9), batch_size=st.integers(1, 600), window=st.sampled_from(
    [0, 1, 70, 300, 5000]), workers=st.integers(1, 5), drop_last=st.booleans(),
    epoch=st.integers(0, 3), interleave=st.integers(1, 4))
def test_every_row_once_over_ranks_and_workers(folder: Path, world_size: int, batch_size: int,
                                               window: int, workers: int, drop_last: bool,
                                               epoch: int, interleave: int) -> None:
    seen: list[int] = []
    lengths = set()
    for rank in range(world_size):
        loader = Loader(folder, "train", LoaderOptions(
            batch_size, window, seed=3, drop_last=drop_last, rank=rank, world_size=world_size,
            prefetch=0, interleave=interleave))
        loader.set_epoch(epoch)
        whole = [everything(b) for b in loader]
        lengths.add(len(whole))
        assert len(whole) == len(loader)
        shares = [list(loader._batches(range(w, len(loader), workers), epoch, -1))
                  for w in range(workers)]
        for k, expected in enumerate(whole):
            batch = shares[k % workers][k // workers]
            assert everything(batch) == expected
            size = batch.labels.numel()
            assert size == batch_size or (k == len(whole) - 1 and not drop_last)
            seen += rows_of(batch)
    assert len(lengths) == 1, "all ranks have the same number of batches"
    assert len(seen) == len(set(seen)) == ROWS - loader.num_dropped
    if not drop_last:
        assert sorted(seen) == list(range(ROWS))
    else:
        assert loader.num_dropped == ROWS - world_size * batch_size * lengths.pop()


def test_a_rank_without_rows_gives_an_empty_batch(folder: Path) -> None:
    """With 500 rows on 499 ranks and batches of one row, only the last rank has two rows."""
    first, last = (list(Loader(folder, "train", LoaderOptions(1, rank=rank, world_size=499)))
                   for rank in (0, 498))
    assert [b.labels.numel() for b in first] == [1, 0]
    assert [b.labels.numel() for b in last] == [1, 1]
    empty = first[1]
    assert empty.dense_features.shape == (0, 2) and empty.sparse_features.stride() == 0
    assert empty.sparse_features.keys() == KEYS and not empty.sparse_features.values().numel()


def test_ranks_read_their_own_row_groups(folder: Path, groups_read: list[int]) -> None:
    for rank in range(3):
        loader = Loader(folder, "train", LoaderOptions(16, 64, rank=rank, world_size=3))
        before = len(groups_read)
        list(loader)
        mine = groups_read[before:]
        assert len(mine) == len(set(mine)), "a group that spans windows is read once"
    assert loader._groups.rows.size == 11 and len(groups_read) <= 11 + 2


@pytest.mark.parametrize("share", ["rows", "batches"])
@pytest.mark.parametrize("interleave", [1, 3])
def test_threads_read_every_group_once(folder: Path, share: str, interleave: int,
                                       groups_read: list[int]) -> None:
    """Each row group is read once for any number of threads, and batches equal those without
    threads."""
    options = {"window": 64, "rank": 1, "world_size": 2, "share": share, "interleave": interleave}
    whole = [everything(b) for b in Loader(folder, "train", LoaderOptions(
        16, prefetch=0, **options))]
    for prefetch in (1, 2, 5):
        groups_read.clear()
        loader = Loader(folder, "train", LoaderOptions(16, prefetch=prefetch, **options))
        assert [everything(b) for b in loader] == whole
        assert len(groups_read) == len(set(groups_read)) > 4


def test_batches_of_windows_alternate(folder: Path, table: dict[str, list[Any]]) -> None:
    """Interleaved windows have the same rows as others; surplus windows are not interleaved."""
    plain, turns = (list(Loader(folder, "train", LoaderOptions(16, 80, seed=1, interleave=n)))
                    for n in (1, 2))
    orders = [[rows_of(b) for b in batches] for batches in (plain, turns)]
    each, whole = 5, 6 // 2 * 2  # 500 rows: six windows of 80 rows and one of 20
    expected = [orders[0][(block + k % 2) * each + k // 2]
                for block in range(0, whole, 2) for k in range(2 * each)]
    assert orders[1] == expected + orders[0][whole * each:] != orders[0]
    for batch in turns:
        check(batch, table)


def test_a_folder_opens_without_opening_its_files(folder: Path, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first file and files with a size that differs from the manifest's are opened."""
    from oper.data import Folder

    opened: list[Path] = []
    genuine = Folder.open_part
    monkeypatch.setattr(Folder, "open_part", staticmethod(lambda part, columns: (
        opened.append(part), genuine(part, columns))[1]))
    whole = Loader(folder, "train", LoaderOptions(64))
    assert len(opened) == 1 < len(whole.folder.parts("train"))
    shutil.copytree(folder, tmp_path / "old")
    manifest = json.loads((folder / MANIFEST).read_text())
    (tmp_path / "old" / MANIFEST).write_text(json.dumps({**manifest, "parts": {}}))
    opened.clear()
    old = Loader(tmp_path / "old", "train", LoaderOptions(64))
    assert len(opened) == 3 and old._groups.rows.tolist() == whole._groups.rows.tolist()
    assert [everything(b) for b in old] == [everything(b) for b in whole]
    for change in ({"parts": []}, {"parts": {"train/x": 1}}, {"parts": {"train/x": [1, -1]}},
                   {"row_group_rows": "64"}, {"row_group_rows": 0},
                   {"parts": {"train/x": [1, 2, 3]}}):
        (tmp_path / "old" / MANIFEST).write_text(json.dumps({**manifest, **change}))
        with pytest.raises(FileFormatError, match="manifest"):
            Loader(tmp_path / "old", "train", LoaderOptions(64))
    # A wrong manifest: more rows than in the files, in groups of other sizes.
    (tmp_path / "old" / MANIFEST).write_text(json.dumps({**manifest, "row_group_rows": 40}))
    with pytest.raises(FileFormatError, match="row"):
        list(Loader(tmp_path / "old", "train", LoaderOptions(64)))


def test_features_share_one_values_tensor(folder: Path) -> None:
    kjt = next(iter(Loader(folder, "train", LoaderOptions(64)))).sparse_features
    base = kjt.values()
    assert base.is_contiguous() and base.storage_offset() == 0
    at = 0
    for key in KEYS:
        part = kjt[key].values()
        assert part.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        assert part.storage_offset() == at
        at += part.numel()
    assert at == base.numel() == base.untyped_storage().nbytes() // 8


def test_batches_may_be_overwritten(folder: Path) -> None:
    loader = Loader(folder, "train", LoaderOptions(32))
    untouched = [everything(b) for b in loader]
    found = []
    for batch in loader:
        found.append(everything(batch))
        for tensor in (batch.dense_features, batch.labels, batch.sparse_features.values(),
                       batch.sparse_features.lengths(), batch.sparse_features.offsets()):
            tensor.fill_(7)
    assert found == untouched


@pytest.mark.parametrize("options", [
    {"batch_size": 0}, {"batch_size": 1.0}, {"window": -1}, {"seed": -1}, {"prefetch": -1},
    {"interleave": 0},
    {"rank": 2, "world_size": 2}, {"rank": 0}, {"world_size": 2}, {"rank": 0, "world_size": 0},
    {"group_by": "user", "window": 0}])
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="cannot make a loader"):
        LoaderOptions(**{"batch_size": 8, **options})


def test_columns_that_do_not_fit(folder: Path) -> None:
    for options, word in (({"group_by": "tags"}, "group_by"), ({"group_by": "x"}, "group_by"),
                          ({"weights": {"x": "price"}}, "weights"),
                          ({"weights": {"item": "user"}}, "weights"),
                          ({"deduplicate": ("x",)}, "deduplicate"),
                          ({"weights": {"item": "price"}, "deduplicate": ("user",)}, "one of")):
        with pytest.raises(InvalidInputError, match=word):
            Loader(folder, "train", LoaderOptions(8, **options))
    with pytest.raises(FileFormatError, match="missing columns"):
        Loader(folder, "train", LoaderOptions(8, weights={"item": "x"}))
    with pytest.raises(InvalidInputError, match="'dev'"):
        Loader(folder, "dev", LoaderOptions(8))
    test = Loader(folder, "test", LoaderOptions(8))
    assert len(test) == 0 and list(test) == []


def changed(folder: Path, change: Any) -> Path:
    """Replace the table of every training file by `change(table)`."""
    for part in sorted((folder / "train").iterdir()):
        pq.write_table(change(pq.read_table(part)), part, row_group_size=48)
    return folder


def replaced(table: pa.Table, name: str, array: Any) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, [array])


def test_int64_ids(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    top = 1 << 40

    def widen(table: pa.Table) -> pa.Table:
        items = table["item"].combine_chunks().cast(pa.int64()).to_numpy() + top
        tags = table["tags"].combine_chunks()
        wide = pa.array(tags.values.to_numpy().astype(np.int64) + top)
        table = replaced(table, "tags", pa.ListArray.from_arrays(tags.offsets, wide))
        return replaced(table, "item", pa.array(items))

    changed(folder, widen)
    manifest = json.loads((folder / MANIFEST).read_text())
    for name in ("item", "tags"):
        manifest["tables"][name]["num_rows"] = top + 200
    (folder / MANIFEST).write_text(json.dumps(manifest))
    table = pq.read_table(folder / "train").to_pydict()
    for batch in Loader(folder, "train", LoaderOptions(64)):
        check(batch, table)
        assert int(batch.sparse_features["tags"].values().min()) >= top


@pytest.mark.parametrize("ids", [[-1], [1 << 32], [1 << 63 | 1]])
def test_ids_outside_their_table(tmp_path: Path, ids: list[int]) -> None:
    """Includes ids that would wrap around to valid ids in a narrower type."""
    kind = pa.uint64() if ids[0] >= 1 << 63 else pa.int64()
    folder = changed(write_folder(tmp_path), lambda t: replaced(
        t, "item", pa.array(ids * t.num_rows, kind)))
    with pytest.raises(FileFormatError, match="item"):
        list(Loader(folder, "train", LoaderOptions(8)))


@pytest.mark.parametrize(("name", "array", "shown"), [
    ("item", lambda n: pa.array([None] * n, pa.int32()), r"int32, [1-9]\d* null values"),
    ("price", lambda n: pa.array([None] * n, pa.float32()), r"float, [1-9]\d* null values"),
    ("item", lambda n: pa.array([1.5] * n), "double, 0 null"),
    ("label", lambda n: pa.array(["1"] * n), "string, 0 null"),
    ("tags", lambda n: pa.array([1] * n), "int64, 0 null rows', expected lists"),
    ("item", lambda n: pa.array([[1]] * n), "list.*', expected integers"),
    ("tags", lambda n: pa.array([None] * n, pa.list_(pa.int32())), r"[1-9]\d* null rows"),
    ("tags", lambda n: pa.array([[1, None]] * n, pa.list_(pa.int32())), r"[1-9]\d* null values")])
def test_columns_of_another_kind(tmp_path: Path, name: str, array: Any, shown: str) -> None:
    folder = changed(write_folder(tmp_path), lambda t: replaced(t, name, array(t.num_rows)))
    with pytest.raises(FileFormatError, match=f"{name}='.*{shown}"):
        list(Loader(folder, "train", LoaderOptions(8)))


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_folder_that_changes_while_it_is_read(tmp_path: Path, prefetch: int) -> None:
    folder = write_folder(tmp_path)
    loader = Loader(folder, "train", LoaderOptions(8, prefetch=prefetch))
    changed(folder, lambda t: t.slice(1))
    with pytest.raises(FileFormatError, match="changed"):
        list(loader)
    with pytest.raises(FileFormatError, match="manifest"):
        Loader(folder, "train", LoaderOptions(8))
    part = sorted((folder / "train").iterdir())[0]
    part.write_bytes(part.read_bytes()[:-9])
    with pytest.raises(FileFormatError, match="part-"):
        Loader(folder, "train", LoaderOptions(8))


def test_weights(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)

    def weigh(table: pa.Table) -> pa.Table:
        history = table["history"].combine_chunks()
        weights = np.arange(len(history.values), dtype=np.float64) / 4
        return table.append_column("history_weight", pa.ListArray.from_arrays(
            history.offsets, pa.array(weights)))

    changed(folder, weigh)
    table = pq.read_table(folder / "train").to_pydict()
    loader = Loader(folder, "train", LoaderOptions(64, weights={
        "item": "price", "history": "history_weight"}))
    for batch in loader:
        check(batch, table)
        kjt, rows = batch.sparse_features, rows_of(batch)
        assert kjt.weights().dtype == torch.float32
        assert kjt["item"].weights().tolist() == [table["price"][r] for r in rows]
        assert kjt["history"].weights().tolist() == [
            w for r in rows for w in table["history_weight"][r]]
        assert set(kjt["tags"].weights().tolist()) == {1.0}
    changed(folder, lambda t: replaced(t, "history_weight", pa.array([[1.0]] * t.num_rows)))
    with pytest.raises(FileFormatError, match="history_weight"):
        list(Loader(folder, "train", LoaderOptions(8, weights={"history": "history_weight"})))


def test_rows_of_a_user_stay_together_in_order(folder: Path, table: dict[str, list[Any]]) -> None:
    loader = Loader(folder, "train", LoaderOptions(16, 160, group_by="user", seed=3))
    batches = list(loader)
    for batch in batches:
        check(batch, table)
    order = [r for b in batches for r in rows_of(b)]
    assert sorted(order) == list(range(ROWS))
    firsts = []
    for at in range(0, ROWS, 160):
        window = order[at:at + 160]
        users = [table["user"][r] for r in window]
        starts = [0, *(k for k in range(1, len(users)) if users[k] != users[k - 1]), len(users)]
        assert len(starts) - 1 == len(set(users)), "each user's rows are neighbours"
        for a, b in itertools.pairwise(starts):
            assert window[a:b] == sorted(window[a:b])
        firsts.append([users[a] for a in starts[:-1]])
    assert firsts[0] != sorted(firsts[0]) and firsts[0] != firsts[1]


def test_equal_bags_once_with_inverse_indices(folder: Path, table: dict[str, list[Any]]) -> None:
    loader = Loader(folder, "train", LoaderOptions(
        64, 128, group_by="user", deduplicate=("user", "tags", "history")))
    plain = Loader(folder, "train", LoaderOptions(64, 128, group_by="user"))
    fewer = 0
    for batch, whole in zip(loader, plain, strict=True):
        assert torch.equal(batch.dense_features, whole.dense_features)
        kjt, size = batch.sparse_features, batch.labels.numel()
        keys, inverse = kjt.inverse_indices()
        assert keys == KEYS and inverse.shape == (4, size) and inverse.dtype == torch.int64
        assert kjt.stride_per_key()[0] == size
        assert are_own_rows(inverse) == (kjt.stride_per_key() == [size] * 4)
        for c, key in enumerate(KEYS):
            distinct = [x.tolist() for x in kjt[key].to_dense()]
            assert len(distinct) == kjt.stride_per_key()[c] == int(inverse[c].max()) + 1
            if key != "item":
                assert len({tuple(x) for x in distinct}) == len(distinct)
                fewer += size - len(distinct)
            assert [distinct[k] for k in inverse[c].tolist()] == [
                x.tolist() for x in whole.sparse_features[key].to_dense()]
    assert fewer > 100


def test_batches_without_equal_bags_are_recognised(folder: Path) -> None:
    for batch in Loader(folder, "train", LoaderOptions(1, 128, deduplicate=("user", "history"))):
        _, inverse = batch.sparse_features.inverse_indices()
        assert are_own_rows(inverse) and inverse.tolist() == [[0]] * 4
    inverse += 1
    assert not are_own_rows(inverse)


@pytest.mark.parametrize("guard", ["off", "stop"])
def test_deduplicated_batches_pool_to_the_same(folder: Path, guard: str) -> None:
    """Checked in a sharded collection (variable batch size per feature) and a published one."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    import oper

    torch.manual_seed(0)
    options = LoaderOptions(50, 100, group_by="user")
    plain = Loader(folder, "train", options)
    rows = dict(zip(plain.folder.sparse, plain.folder.num_rows, strict=True))
    model = EmbeddingBagCollection([EmbeddingBagConfig(
        name=k, num_embeddings=rows[k], embedding_dim=8, feature_names=[k]) for k in KEYS])
    batch = next(iter(plain))
    once = next(iter(Loader(folder, "train", LoaderOptions(
        50, 100, group_by="user", deduplicate=("user", "history")))))
    expected = model(batch.sparse_features).values()
    stats = oper.collect([batch.sparse_features], model)
    pooled, trained = [], []
    for kjt in (batch.sparse_features, once.sparse_features):
        sharded: Any = oper.shard(copy.deepcopy(model), stats, optimizer=oper.SGD(lr=0.1),
                                  gradient_guard=guard)
        pooled.append(sharded(kjt).values())
        pooled[-1].backward(torch.linspace(-1, 1, expected.numel()).view(expected.shape))
        trained.append(sharded(batch.sparse_features).values().detach())
    assert torch.allclose(pooled[0], expected, atol=1e-6) and torch.equal(*pooled)
    assert torch.allclose(*trained, atol=1e-6) and not torch.allclose(trained[0], expected)
    name = f"oper-once-{os.getpid()}"
    with oper.publish(torch.nn.Sequential(model), name):
        served: Any = oper.attach(torch.nn.Sequential(copy.deepcopy(model)), name)
        assert torch.equal(served(batch.sparse_features).values(),
                           served(once.sparse_features).values())


def test_samples_take_the_rows_of_their_bags() -> None:
    """Outputs are in the order of features, also if the keys of the KJT are in another order."""
    library.load()

    def found(*samples: list[int], num_distinct: int = 3, shares: bool = True) -> Any:
        kjt = KeyedJaggedTensor(
            ["b", "a"], torch.arange(2 * num_distinct), lengths=torch.ones(2 * num_distinct).int(),
            stride_per_key_per_rank=[[num_distinct]] * 2,
            inverse_indices=(["b", "a"], torch.tensor(samples)))
        return kjt, *padded_lengths(kjt, ["a", "b"], True, shares)

    # If all bags differ, nothing is shared.
    assert found([0, 1, 2], [0, 1, 2])[3] is None
    kjt, lengths, size, shared = found([2, 0, 2, 2], [0, 1, 2, 2])
    assert size == 4 and lengths.tolist() == [1, 1, 1, 0] * 2
    assert shared.bags.tolist() == [3, 3]
    assert shared.samples.tolist() == [[0, 1, 2, 2], [2, 0, 2, 2]]
    assert found([2, 0], [0, 1])[2] == 3  # a bag that no sample has is kept
    # If the lookup does not expand bags to samples, `spread` copies them.
    assert found([2, 0, 2, 2], [0, 1, 2, 2], shares=False)[2:] == (3, None)
    values = torch.randn(3, 3, requires_grad=True)
    copied = spread(values, [0, 1, 3], ["a", "b"], kjt)
    assert torch.equal(copied, torch.cat([values[[0, 1, 2, 2], :1], values[[2, 0, 2, 2], 1:]], 1))
    for wrong in ([0, 3, 1, 1], [-1, 0, 1, 1]):  # indices of bags that do not exist
        with pytest.raises(IndexError):
            spread(torch.randn(4, 3), [0, 1, 3], ["a", "b"], found([0, 1, 2, 2], wrong)[0])


def test_share_of_the_process_group(folder: Path, tmp_path: Path) -> None:
    alone = Loader(folder, "train", LoaderOptions(8))
    assert (alone.rank, alone.world_size) == (0, 1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert Loader(folder, "train", LoaderOptions(8)).world_size == 1
        explicit = Loader(folder, "train", LoaderOptions(8, rank=2, world_size=3))
        assert (explicit.rank, explicit.world_size) == (2, 3)
    finally:
        torch.distributed.destroy_process_group()


def test_without_torchrec(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchrec.datasets.utils", None)
    with pytest.raises(MissingDependencyError, match="torchrec"):
        next(iter(Loader(folder, "train", LoaderOptions(8))))


def test_the_threads_end_with_the_iterator(folder: Path) -> None:
    import threading

    before = threading.active_count()
    iterator = iter(Loader(folder, "train", LoaderOptions(8, 16, prefetch=4)))
    next(iterator)
    assert before < threading.active_count() <= before + 4
    iterator.close()
    assert threading.active_count() == before


@pytest.mark.gpu
def test_pinned_memory(folder: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    plain = Loader(folder, "train", LoaderOptions(32, pin_memory=False))
    for batch, other in zip(Loader(folder, "train", LoaderOptions(32)), plain, strict=True):
        kjt = batch.sparse_features
        for tensor in (batch.dense_features, batch.labels, kjt.values(), kjt.lengths(),
                       kjt.offsets()):
            assert tensor.is_pinned()
        assert everything(batch) == everything(other)
    data = DataLoader(Loader(folder, "train", LoaderOptions(32)), batch_size=None, num_workers=1,
                      pin_memory=True)
    assert [everything(b) for b in data] == [everything(b) for b in plain]
