"""Batches and plans that are refused with a specific error, and unusual ones that are valid."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from oper.errors import DeadlineError, InvalidInputError, OperError, PlanError
from oper.plan import uniform_plan
from oper.shmem.batch import Lookup
from oper.shmem.group.groups import SingleGroup
from oper.shmem.optim.optimizers import SGD
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests.runtime_support import (
    Case,
    initial_weights,
    make_batch,
    mixed_plan,
    open_tables,
    rank_loss,
    run_ranks,
)

TABLES = (TableSpec("users", 100, 8, ("user",), "sum", optimizer="sgd"),
          TableSpec("items", 50, 4, ("item", "user"), "mean", optimizer="sgd"))
CASE = Case(TABLES, ("item", "user"))


@pytest.fixture
def tables() -> ShardedTables:
    return open_tables(CASE, uniform_plan(TABLES, 1), SingleGroup(), SGD(lr=0.1))


def lookup(ids: list[int], lengths: list[int], batch_size: int = 2, **fields) -> Lookup:
    both = (torch.tensor(x, dtype=torch.int64) for x in (ids, lengths))
    return replace(Lookup(*both, CASE.key_of, batch_size), **fields)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bad, feature, table, rows", [
    (-1, "item", "items", 50), (50, "item", "items", 50), (2**31 - 1, "item", "items", 50),
    (-(2**31), "item", "items", 50)])
def test_ids_out_of_range_name_feature_table_and_id(tables: ShardedTables, dtype: torch.dtype,
                                                    bad: int, feature: str, table: str, rows: int
                                                    ) -> None:
    batch = lookup([3, bad, 5], [0, 2, 1, 0])
    batch = replace(batch, ids=batch.ids.to(dtype))
    for context in (torch.enable_grad, torch.no_grad):
        with context(), pytest.raises(InvalidInputError) as error:
            tables.lookup(batch)
        text = str(error.value)
        assert f"'{feature}'" in text and f"'{table}'" in text and f"id={bad}," in text
        assert f"id < {rows}" in text


@pytest.mark.parametrize("name", ["ids", "lengths"])
def test_a_batch_in_other_memory_is_refused(tables: ShardedTables, name: str) -> None:
    batch = lookup([3, 4, 5], [0, 2, 1, 0])
    batch = replace(batch, **{name: getattr(batch, name).to("meta")})
    with torch.no_grad(), pytest.raises(InvalidInputError, match=f"device of {name}='meta'"):
        tables.lookup(batch)


@pytest.mark.parametrize("bad", [2**32 + 1, 2**40, -(2**40), 2**63 - 1, -(2**63)])
def test_ids_are_not_truncated_to_32_bits(tables: ShardedTables, bad: int) -> None:
    with pytest.raises(InvalidInputError, match=f"id={bad},"):
        tables.lookup(lookup([bad], [1, 0, 0, 0]))


def test_the_error_of_a_shared_feature_names_the_right_table(tables: ShardedTables) -> None:
    # 70 is a user (of 100) but no item (of 50).
    with pytest.raises(InvalidInputError, match=r"'user' in table 'items': id=70, .* id < 50"):
        tables.lookup(lookup([70], [0, 0, 0, 1]))


def test_the_first_invalid_id_is_reported(tables: ShardedTables) -> None:
    with pytest.raises(InvalidInputError, match="id=-7,"):
        tables.lookup(lookup([1, -7, 60, 1000], [1, 1, 1, 1]))


def test_a_refused_batch_changes_no_row(tables: ShardedTables) -> None:
    with pytest.raises(InvalidInputError):
        tables.lookup(lookup([1, 99, 1000], [1, 0, 1, 1]))
    for name, want in initial_weights(CASE).items():
        assert torch.equal(tables.read(name), want)
    batch = make_batch(CASE, 0, 5)
    rank_loss(tables.lookup(batch.lookup(CASE)), batch.target).backward()


@pytest.mark.parametrize("lengths, total", [([1, 1, 1, 1], 4), ([1, 0, 0, 0], 1),
                                            ([2, 2, -1, 0], 3), ([5, -2, 0, 0], 3)])
def test_lengths_that_do_not_fit(tables: ShardedTables, lengths: list[int], total: int) -> None:
    for dtype in (torch.int32, torch.int64):
        batch = lookup([1, 2, 3], lengths)
        found = rf"min\(lengths\)=\({total}, {min(lengths)}\), expected a sum of 3,"
        with pytest.raises(InvalidInputError, match=found):
            tables.lookup(replace(batch, lengths=batch.lengths.to(dtype)))


@pytest.mark.parametrize("field, value, word", [
    ("ids", torch.tensor([1.0, 2.0, 3.0]), "ids"),
    ("ids", torch.tensor([1, 2, 3], dtype=torch.int16), "ids"),
    ("ids", torch.tensor([[1, 2, 3]]), "ids"),
    ("ids", torch.arange(6)[::2], "ids"),
    ("lengths", torch.tensor([1, 1, 1, 0], dtype=torch.int16), "lengths"),
    ("lengths", torch.tensor([1, 1, 1]), "lengths"),
    ("lengths", torch.tensor([1, 2]), "lengths"),
    ("key_of", torch.tensor([1, -1, 1]), "key_of"),
    ("key_of", torch.tensor([1, 2, 1]), "lengths"),
    ("weights", torch.ones(3, dtype=torch.float64), "weights"),
    ("weights", torch.ones(2), "weights"),
    ("weights", torch.ones(6)[::2], "weights"),
])
def test_tensors_that_kernels_would_misread_are_refused(tables: ShardedTables, field: str,
                                                        value: torch.Tensor, word: str) -> None:
    with pytest.raises(InvalidInputError, match=word):
        tables.lookup(replace(lookup([1, 2, 3], [1, 1, 1, 0]), **{field: value}))


@pytest.mark.parametrize("lengths", [[5000, 3, 0, 1500], [1, 700, 4000, 1], [0, 0, 6000, 2],
                                     [900, 900, 900, 900]])
def test_bags_longer_than_any_buffer(lengths: list[int]) -> None:
    """Pooling is in the order of the bag: bitwise equal to sequential addition."""
    tables = open_tables(CASE, mixed_plan(TABLES, 1, 2), SingleGroup(), None)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 50, (sum(lengths),), generator=generator)
    out = tables.lookup(Lookup(ids, torch.tensor(lengths), CASE.key_of, 2))
    weight = initial_weights(CASE)["users"]
    for sample, part in enumerate(ids.split(lengths)[2:]):  # the key "user"
        want = torch.zeros(8)
        for row in weight[part]:
            want = want + row
        assert torch.equal(out[sample, :8], want)


def test_an_empty_batch_and_a_batch_of_empty_bags(tables: ShardedTables) -> None:
    assert tables.lookup(lookup([], [], 0)).shape == (0, CASE.columns)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            out = tables.lookup(lookup([], [0, 0, 0, 0]))
        assert out.shape == (2, CASE.columns) and not out.any()
    tables.lookup(lookup([], [], 0)).sum().backward()
    tables.lookup(lookup([], [0, 0, 0, 0])).sum().backward()
    assert torch.equal(tables.read("users"), initial_weights(CASE)["users"])


@pytest.mark.parametrize("shape", ["expanded", "transposed", "strided", "sliced"])
def test_gradients_in_any_layout(tables: ShardedTables, shape: str) -> None:
    batch = make_batch(CASE, 1, 6)
    columns = CASE.columns
    g = torch.Generator().manual_seed(0)
    grad = {
        "expanded": torch.tensor(1.0).expand(6, columns),
        "transposed": torch.randn(columns, 6, generator=g).t(),
        "strided": torch.randn(6, 2 * columns, generator=g)[:, ::2],
        "sliced": torch.randn(6, columns + 5, generator=g)[:, 2:columns + 2],
    }[shape]
    tables.lookup(batch.lookup(CASE)).backward(grad)
    other = open_tables(CASE, uniform_plan(TABLES, 1), SingleGroup(), SGD(lr=0.1))
    other.lookup(batch.lookup(CASE)).backward(grad.contiguous().clone())
    for t in TABLES:
        assert torch.equal(tables.read(t.name), other.read(t.name))
        assert not torch.equal(tables.read(t.name), initial_weights(CASE)[t.name])


def test_forward_without_gradient_is_not_collective() -> None:
    """One rank can evaluate alone, any number of times."""
    plan = mixed_plan(TABLES, 2, 0)

    def body(group) -> torch.Tensor | None:
        tables = open_tables(CASE, plan, group, SGD(lr=0.1))
        out = None
        if group.rank == 1:
            with torch.no_grad():
                for k in range(5):
                    out = tables.lookup(make_batch(CASE, k, 4).lookup(CASE))
        return out

    assert run_ranks(2, body, timeout_s=120)[1].shape == (4, CASE.columns)


def test_a_missing_rank_ends_in_a_deadline_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPER_DEADLINE_S", "1")
    plan = uniform_plan(TABLES, 2)
    kept = []

    def body(group) -> str:
        tables = open_tables(CASE, plan, group, SGD(lr=0.1))
        if group.rank == 1:
            kept.append(tables)  # which would close when nobody refers to them
            return ""
        out = tables.lookup(make_batch(CASE, 0, 4).lookup(CASE))
        start = time.monotonic()
        with pytest.raises(DeadlineError, match=r"gradient.*rank=1.*OPER_DEADLINE_S=1"):
            out.sum().backward()
        assert 0.9 < time.monotonic() - start < 5
        with pytest.raises(DeadlineError):  # a broken exchange stays broken
            tables.barrier()
        return "seen"

    assert run_ranks(2, body, timeout_s=120) == ["seen", ""]


def test_read_only_tables_build_no_graph() -> None:
    tables = open_tables(CASE, uniform_plan(TABLES, 1), SingleGroup(), None)
    batch = make_batch(replace(CASE, weighted=True), 0, 4).lookup(CASE)
    assert not tables.lookup(batch).requires_grad
    with pytest.raises(InvalidInputError, match="weights"):
        tables.lookup(replace(batch, weights=batch.weights.requires_grad_()))


@pytest.mark.parametrize("spec, word", [
    (replace(TABLES[0], dim=1025), "dim"),
    (replace(TABLES[0], optimizer="rowwise_adagrad"), "optimizer")])
def test_unsupported_tables_are_refused(spec: TableSpec, word: str) -> None:
    with pytest.raises(PlanError, match=f"'users'.*{word}"):
        ShardedTables(uniform_plan([spec], 1), [("user", "users")], SingleGroup(), SGD())


def test_another_world_and_unknown_tables() -> None:
    with pytest.raises(PlanError, match="world"):
        ShardedTables(uniform_plan(TABLES, 2), CASE.features, SingleGroup(), SGD())
    with pytest.raises(PlanError, match="'nobody'"):
        ShardedTables(uniform_plan(TABLES, 1), [("user", "nobody")], SingleGroup(), SGD())


def test_use_after_close(tables: ShardedTables) -> None:
    passed = tables.lookup(lookup([1], [1, 0, 0, 0]))
    tables.close()
    tables.close()
    for use in (lambda: tables.lookup(lookup([1], [1, 0, 0, 0])), lambda: tables.read("users"),
                lambda: tables.forward(lookup([1], [1, 0, 0, 0])), passed.sum().backward,
                lambda: tables.write("users", torch.zeros(100, 8)), tables.barrier,
                tables.use_huge_pages, tables.traffic):
        with pytest.raises(OperError, match="closed"):
            use()


def test_reads_of_parts_and_states(tables: ShardedTables) -> None:
    want = initial_weights(CASE)["users"]
    assert torch.equal(tables.read("users", 10, 13), want[10:13])
    assert tables.read("users", 5, 5).shape == (0, 8)
    with pytest.raises(InvalidInputError, match=r"'users'.*part='momentum1'.*rows"):
        tables.read("users", part="momentum1")
    tables.read("users").zero_()  # a copy
    assert torch.equal(tables.read("users"), want)


def test_lengths_whose_sum_overflows_are_refused() -> None:
    """The 64-bit sum of the lengths wraps around to the number of ids."""
    lengths = torch.tensor([2**63 - 1, 2**63 - 1, 6, 0])
    batch = Lookup(torch.zeros(4, dtype=torch.int64), lengths, CASE.key_of, 2)
    tables = open_tables(CASE, uniform_plan(TABLES, 1), SingleGroup(), None)
    with pytest.raises(InvalidInputError, match=f"{2**64 + 4}"):
        tables.lookup(batch)
    tables.close()
