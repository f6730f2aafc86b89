"""`collect` on batches and models."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import oper
from oper import analysis
from oper.errors import InvalidInputError
from oper.stats import AccessStats
from oper.tables import TableSpec
from tests.support import counts_by

TABLES = (TableSpec("t1", 10, 4, ("a", "b")), TableSpec("t2", 6, 4, ("c",)))
BATCH = {
    "a": (np.array([1, 2, 3]), np.array([2, 0, 1])),
    "b": (np.array([3, 9]), np.array([0, 1, 1])),
    "c": (np.array([5, 5, 0]), np.array([1, 1, 1])),
}


def jagged(keys: list[str], values: list[int], lengths: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys, torch.tensor(values), lengths=torch.tensor(lengths))


# Keys in another order than the tables' features, and one that no table has.
KJT = jagged(["c", "x", "b", "a"], [5, 5, 0, 4, 3, 9, 1, 2, 3],
             [1, 1, 1, 0, 1, 0, 0, 1, 1, 2, 0, 1])


def check(stats: AccessStats, times: int = 1) -> None:
    t1, t2 = stats.tables["t1"], stats.tables["t2"]
    assert counts_by(t1.head_ids, t1.head_counts) == {
        3: 2 * times, 1: times, 2: times, 9: times}
    assert t1.head_ids[0] == 3
    assert counts_by(t2.head_ids, t2.head_counts) == {5: 2 * times, 0: times}
    assert t1.length_values.tolist() == [0, 1, 2]
    assert t1.length_counts.tolist() == [2 * times, 3 * times, times]
    assert t2.length_counts.tolist() == [3 * times]
    assert stats.num_samples == 3 * times


@pytest.mark.parametrize("batch", [
    BATCH,
    KJT,
    SimpleNamespace(sparse_features=KJT, labels=[0, 1, 0]),
    (np.zeros(3), KJT, [0, 1, 0]),
    [np.zeros(3), SimpleNamespace(sparse_features=KJT)],
    ({k: BATCH[k] for k in "ab"}, {"c": BATCH["c"][0]}),
], ids=["mapping", "kjt", "batch", "tuple", "list with batch", "two mappings"])
def test_kinds_of_batches(batch: Any) -> None:
    check(analysis.collect([batch, batch], TABLES), 2)
    check(oper.collect(iter([batch]), list(TABLES)))


def test_a_feature_that_a_batch_lacks_is_not_looked_up() -> None:
    stats = analysis.collect([BATCH, {"a": (np.array([7]), np.array([1, 0]))}], TABLES)
    assert stats.tables["t1"].num_accesses == 6
    assert stats.tables["t1"].num_bags == 8
    assert stats.tables["t2"].num_accesses == 3
    assert stats.num_samples == 5


def test_a_table_without_lookups_is_an_error() -> None:
    with pytest.raises(InvalidInputError, match=r"t2.*\['a'\]"):
        analysis.collect([{"a": BATCH["a"]}], TABLES)


@pytest.mark.parametrize(("batch", "words"), [
    (np.zeros(3), ["ndarray", "KeyedJaggedTensor"]),
    ({"a": (np.array([10]), np.array([1]))}, ["'t1'", "10", "num_rows=10"]),
    (jagged(["a", "b"], [1, 2, 3], [1, 1]), ["sum(lengths)", "len(values)=3"]),
    (({"a": BATCH["a"]}, {"a": BATCH["a"]}), ["repeated features", "'a'"]),
    ({"a": np.array([0.5])}, ["'a'", "float64"]),
])
def test_bad_batches(batch: Any, words: list[str]) -> None:
    with pytest.raises(InvalidInputError) as error:
        analysis.collect([batch], TABLES)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("batches", [None, 3, BATCH, jagged(["a"], [1], [1])])
def test_a_single_batch_is_refused(batches: Any) -> None:
    with pytest.raises(InvalidInputError, match="a list of one batch"):
        analysis.collect(batches, TABLES)


def test_variable_batch_sizes_per_feature_are_refused() -> None:
    kjt = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.ones(3).int(),
                            stride_per_key_per_rank=[[1], [2]])
    with pytest.raises(InvalidInputError, match="one batch size"):
        analysis.collect([kjt], TABLES)


def test_buckets_from_batches() -> None:
    batches = [(day, BATCH) for day in ("d1", "d1", "d2")]
    stats = analysis.collect(batches, TABLES, bucket_of=lambda batch: batch[0])
    assert [(b.label, int(b.counts.sum())) for b in stats.tables["t2"].buckets] == [
        ("d1", 6), ("d2", 3)]


def test_statistics_survive_the_file_and_merge(tmp_path: Any) -> None:
    part = analysis.collect([BATCH], TABLES)
    part.save(tmp_path / "part")
    check(AccessStats.load(tmp_path / "part") + part, 2)


def collection(kind: type[Any], *tables: tuple[str, int, list[str]]) -> Any:
    config = EmbeddingBagConfig if kind is EmbeddingBagCollection else EmbeddingConfig
    return kind(tables=[config(name=n, num_embeddings=r, embedding_dim=4, feature_names=f)
                        for n, r, f in tables])


def test_tables_of_a_module_tree() -> None:
    model = nn.ModuleDict({
        "sparse": nn.ModuleDict({"ebc": collection(
            EmbeddingBagCollection, ("t1", 10, ["a", "b"]))}),
        "sequence": collection(EmbeddingCollection, ("t2", 6, ["c"])),
        "user": nn.EmbeddingBag(5, 2), "head": nn.Linear(3, 1)})
    tables = analysis.tables_of(model)
    assert [(t.name, t.num_rows, t.dim, t.features) for t in tables] == [
        ("t1", 10, 4, ("a", "b")), ("t2", 6, 4, ("c",)), ("user", 5, 2, ("user",))]
    assert analysis.tables_of(model.get_submodule("sparse.ebc")) == TABLES[:1]
    users = {"user": (torch.tensor([4, 4, 0]), torch.tensor([2, 0, 1]))}
    stats = analysis.collect([(KJT, users)], model)
    check(stats)
    assert stats.tables["user"].head_ids.tolist() == [4, 0]


def test_tables_of_one_name_are_prefixed_by_their_collection() -> None:
    model = nn.ModuleDict({
        "a": collection(EmbeddingBagCollection, ("t", 10, ["a"]), ("u", 3, ["b"])),
        "b": nn.ModuleDict({"c": collection(EmbeddingCollection, ("t", 6, ["c"]))})})
    assert [(t.name, t.num_rows, t.features) for t in analysis.tables_of(model)] == [
        ("a.t", 10, ("a",)), ("u", 3, ("b",)), ("b.c.t", 6, ("c",))]


def test_models_without_tables_and_other_objects_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="a module with embedding tables"):
        analysis.tables_of(nn.Linear(3, 1))
    with pytest.raises(InvalidInputError, match="sequence of TableSpec"):
        analysis.tables_of([1, 2])
    with pytest.raises(InvalidInputError, match="unique names"):
        analysis.Collector([TABLES[0], TABLES[0]])


def test_analysis_imports_neither_torch_nor_other_packages() -> None:
    code = ("import sys, oper.analysis as a; a.collect, a.skew, a.TableCounter, a.PresenceSampler;"
            "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'torchrec', 'pyarrow')"
            " or m.startswith(('oper.search', 'oper.shmem', 'oper.integration'))];"
            "assert not bad, bad; assert callable(a.collect)")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_live_collector_keeps_to_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated clock: counting takes 3 ms per batch, a step 20 ms; the limit is 5 %."""
    from oper.analysis import Collector, CountOptions, collector

    clock = [0.0]
    counted: list[int] = []
    monkeypatch.setattr(collector.time, "perf_counter", lambda: clock[0])
    live = Collector([TableSpec("t", 10, 4, ("t",))], CountOptions(max_overhead=0.05))
    original = live._add

    def add(batch: Any, bucket: str | None) -> None:
        original(batch, bucket)
        counted.append(1)
        clock[0] += 0.003

    monkeypatch.setattr(live, "_add", add)
    for _ in range(400):
        live.add({"t": np.array([1, 2, 3])})
        clock[0] += 0.02
    assert live.num_left_out == 400 - len(counted)
    assert 0.03 <= 0.003 * len(counted) / clock[0] <= 0.051
    stats = live.finish()
    assert stats.num_samples == 3 * len(counted) == stats.tables["t"].num_accesses
    with pytest.raises(InvalidInputError, match="max_overhead"):
        CountOptions(max_overhead=0.0)
