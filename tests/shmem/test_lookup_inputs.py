"""Batches and plans that are refused with a specific error, and unusual ones that are valid."""

import itertools
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode

import oper
from oper.errors import InvalidInputError, OperError, PlanError
from oper.plan import Plan, uniform_plan
from oper.shmem.batch import Lookup
from oper.shmem.by_feature import BoundsCheck
from oper.shmem.group.groups import SingleGroup
from oper.shmem.micro_batches import in_parts
from oper.shmem.optim.optimizers import SGD
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests import random_plans as rp, runtime_support as rs
from tests.references import EVERY
from tests.world_support import run_world

TABLES = (TableSpec("users", 100, 8, ("user",), "sum", optimizer="sgd"),
          TableSpec("items", 50, 4, ("item", "user"), "mean", optimizer="sgd"))
CASE = rs.Case(TABLES, ("item", "user"))


@pytest.fixture
def tables() -> ShardedTables:
    return rs.open_tables(CASE, uniform_plan(TABLES, 1), SingleGroup(), SGD(lr=0.1))


def lookup(ids: list[int], lengths: list[int], batch_size: int = 2, **fields) -> Lookup:
    both = (torch.tensor(x, dtype=torch.int64) for x in (ids, lengths))
    return replace(Lookup(*both, CASE.key_of, batch_size), **fields)


SMALL = [torch.int32, torch.int64]


@pytest.mark.parametrize("ids, lengths, words, dtypes", [
    *(([3, bad, 5], [0, 2, 1, 0], f"'item' in table 'items': id={bad}, .* id < 50", SMALL)
      for bad in (-1, 50, 2**31 - 1, -(2**31))),
    *(([bad], [1, 0, 0, 0], f"id={bad},", SMALL[1:])  # none is truncated to 32 bits
      for bad in (2**32 + 1, 2**40, -(2**40), 2**63 - 1, -(2**63))),
    # A user (of 100) that is no item (of 50).
    ([70], [0, 0, 0, 1], "'user' in table 'items': id=70, .* id < 50", SMALL),
    ([1, -7, 60, 1000], [1, 1, 1, 1], "id=-7,", SMALL)])  # the first one is reported
def test_ids_out_of_range_name_feature_table_and_id(
        tables: ShardedTables, ids: list[int], lengths: list[int], words: str,
        dtypes: list[torch.dtype]) -> None:
    for dtype, context in itertools.product(dtypes, (torch.enable_grad, torch.no_grad)):
        batch = lookup(ids, lengths)
        with context(), pytest.raises(InvalidInputError, match=words):
            tables.lookup(replace(batch, ids=batch.ids.to(dtype)))


@pytest.mark.parametrize("lengths", [
    [1, 1, 1, 1], [1, 0, 0, 0], [2, 2, -1, 0], [5, -2, 0, 0],
    [2**63 - 1, 2**63 - 1, 5, 0]])  # the 64-bit sum wraps around to the number of ids
def test_lengths_that_do_not_fit(tables: ShardedTables, lengths: list[int]) -> None:
    for dtype in SMALL[max(lengths) > 2**31:]:
        batch = lookup([1, 2, 3], lengths)
        found = rf"min\(lengths\)=\({sum(lengths)}, {min(lengths)}\), expected a sum of 3,"
        with pytest.raises(InvalidInputError, match=found):
            tables.lookup(replace(batch, lengths=batch.lengths.to(dtype)))


@pytest.mark.parametrize("field, value, word", [
    ("ids", torch.tensor([1.0, 2.0, 3.0]), "ids"),
    ("ids", torch.tensor([1, 2, 3], dtype=torch.int16), "ids"),
    ("ids", torch.tensor([[1, 2, 3]]), "ids"),
    ("ids", torch.arange(6)[::2], "ids"),
    ("ids", torch.zeros(3, dtype=torch.int64, device="meta"), "device of ids='meta'"),
    ("lengths", torch.zeros(4, dtype=torch.int64, device="meta"), "device of lengths='meta'"),
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
    tables = rs.open_tables(CASE, rp.mixed_plan(TABLES, 1, 2), SingleGroup(), None)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 50, (sum(lengths),), generator=generator)
    out = tables.lookup(Lookup(ids, torch.tensor(lengths), CASE.key_of, 2))
    weight = rs.initial_weights(CASE)["users"]
    for sample, part in enumerate(ids.split(lengths)[2:]):  # the key "user"
        want = torch.zeros(8)
        for row in weight[part]:
            want = want + row
        assert torch.equal(out[sample, :8], want)


@pytest.mark.parametrize("shape", ["expanded", "transposed", "strided", "sliced"])
def test_gradients_in_any_layout(tables: ShardedTables, shape: str) -> None:
    batch = rs.make_batch(CASE, 1, 6)
    columns = CASE.columns
    g = torch.Generator().manual_seed(0)
    grad = {
        "expanded": torch.tensor(1.0).expand(6, columns),
        "transposed": torch.randn(columns, 6, generator=g).t(),
        "strided": torch.randn(6, 2 * columns, generator=g)[:, ::2],
        "sliced": torch.randn(6, columns + 5, generator=g)[:, 2:columns + 2],
    }[shape]
    tables.lookup(batch.lookup(CASE)).backward(grad)
    other = rs.open_tables(CASE, uniform_plan(TABLES, 1), SingleGroup(), SGD(lr=0.1))
    other.lookup(batch.lookup(CASE)).backward(grad.contiguous().clone())
    for t in TABLES:
        assert torch.equal(tables.read(t.name), other.read(t.name))
        assert not torch.equal(tables.read(t.name), rs.initial_weights(CASE)[t.name])


@pytest.mark.parametrize("domains, plan", [
    (None, rp.mixed_plan(TABLES, 2, 0)), ((0, 1), uniform_plan(TABLES, 2, "replicated"))],
    ids=["one domain", "replicated"])
def test_forward_without_gradient_is_not_collective(domains: tuple[int, ...] | None, plan: Plan
                                                    ) -> None:
    """One rank can evaluate alone, any number of times, if it needs no other domain."""
    batches = [rs.make_batch(CASE, k, 4) for k in range(5)]

    def body(group) -> list[torch.Tensor]:
        tables = rs.open_tables(CASE, plan, group, SGD(lr=0.1))
        with torch.no_grad():
            return [tables.lookup(b.lookup(CASE)) for b in batches if group.rank == 1]

    rs.assert_near(rs.run_ranks(2, body, domains=domains)[1],
                   [rs.reference_forward(CASE, rs.initial_weights(CASE), b) for b in batches],
                   "outputs")


@pytest.mark.parametrize("spec, table, world_size, words", [
    (replace(TABLES[0], dim=1025), "users", 1, "'users'.*dim"),
    (replace(TABLES[0], optimizer="rowwise_adagrad"), "users", 1, "'users'.*optimizer"),
    (TABLES[0], "users", 2, "world"), (TABLES[0], "nobody", 1, "'nobody'")])
def test_unsupported_tables_are_refused(spec: TableSpec, table: str, world_size: int, words: str
                                        ) -> None:
    with pytest.raises(PlanError, match=words):
        ShardedTables(uniform_plan([spec], world_size), [("user", table)], SingleGroup(), SGD())


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
    want = rs.initial_weights(CASE)["users"]
    assert torch.equal(tables.read("users", 10, 13), want[10:13])
    assert tables.read("users", 5, 5).shape == (0, 8)
    with pytest.raises(InvalidInputError, match=r"'users'.*part='momentum1'.*rows"):
        tables.read("users", part="momentum1")
    tables.read("users").zero_()  # a copy
    assert torch.equal(tables.read("users"), want)


# ---- bounds of bags, which lookups compute while they pool ---------------------------------------

SPECS = [TableSpec("a", 40, 16, ("f",), "sum", optimizer="none"),
         TableSpec("b", 30, 5, ("g",), "sum", optimizer="none"),
         TableSpec("c", 20, 64, ("h",), "mean", optimizer="none")]
FEATURES = [("f", "a"), ("g", "b"), ("h", "c")]
# Around whole blocks of 1024 bags and whole lines of eight bounds.
SIZES = (1, 7, 8, 1023, 1024, 1025, 2048, 3000, 4096)
KEYS = ((0, 1, 2), (2, 0, 1), (1, 1, 0), (3, 1, 0))  # of each feature: shared and unused ones, too


def _tables() -> ShardedTables:
    tables = ShardedTables(uniform_plan(SPECS, 1), FEATURES, SingleGroup(), None)
    generator = torch.Generator().manual_seed(0)
    for spec in SPECS:
        whole = torch.randint(-9, 10, (spec.num_rows, spec.dim), generator=generator)
        tables.write(spec.name, whole.float())
    return tables


def _wrong(rank: int, world_size: int) -> list[str]:
    """Cases whose bounds or pooled rows differ from torch's; integers make sums exact."""
    tables, wrong = _tables(), []
    generator = torch.Generator().manual_seed(1)
    for size in SIZES:
        for keys in KEYS:
            for dtype in (torch.int32, torch.int64):
                num_keys = max(keys) + 1
                lengths = torch.randint(0, 5, (num_keys * size,), generator=generator, dtype=dtype)
                ids = torch.randint(0, 20, (int(lengths.sum()),), generator=generator)
                out, bounds = tables.forward(Lookup(ids, lengths, torch.tensor(keys), size))
                expected = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
                pooled = []
                for key, spec in zip(keys, SPECS, strict=True):
                    starts = expected[key * size:(key + 1) * size + 1]
                    pooled.append(torch.nn.functional.embedding_bag(
                        ids[starts[0]:starts[-1]], tables.read(spec.name), starts - starts[0],
                        mode=spec.pooling, include_last_offset=True))
                if not (torch.equal(bounds, expected) and torch.equal(out, torch.cat(pooled, 1))):
                    wrong.append(f"{size} samples, keys {keys}, {dtype}")
    return wrong


@pytest.mark.parametrize("kernels", ["", "avx2", "generic"])
def test_bag_bounds_and_pooled_rows_equal_torch(kernels: str) -> None:
    assert run_world(1, _wrong, env={"OPER_CPU_KERNELS": kernels}) == [[]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bad", [{5000: -1, 5001: 3}, {4096: 2}, {4096: 0}, {12287: 9}])
def test_lengths_that_do_not_fit_are_refused(dtype: torch.dtype, bad: dict[int, int]) -> None:
    tables, size = _tables(), 4096
    lengths = torch.ones(3 * size, dtype=dtype)
    ids = torch.zeros(3 * size, dtype=torch.int64)
    for place, length in bad.items():
        lengths[place] = length
    with pytest.raises(InvalidInputError, match="length"):
        tables.lookup(Lookup(ids, lengths, torch.arange(3), size))


def test_an_invalid_id_after_many_bags_is_found() -> None:
    tables, size = _tables(), 4096
    ids = torch.zeros(3 * size, dtype=torch.int64)
    ids[2 * size + 3001] = 20
    with pytest.raises(InvalidInputError, match=r"(?s)h.*20"):
        tables.lookup(Lookup(ids, torch.ones(3 * size, dtype=torch.int32), torch.arange(3), size))


# ---- ids outside their tables: an error, or row 0, as in FBGEMM ----------------------------------


WEIGHTED = rs.Case((TableSpec("a", 40, 8, ("f", "g"), "sum"),
                    TableSpec("b", 50, 4, ("f",), "mean")), ("g", "zz", "f"), True, max_length=5)


def spoiled(seed: int) -> tuple[Lookup, list[torch.Tensor]]:
    """A batch with ids outside one or both tables, and FBGEMM's replaced ids of each feature."""
    batch = rs.make_batch(WEIGHTED, seed, 12).lookup(WEIGHTED)
    ids = batch.ids.clone()
    at = torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(seed))[:12]
    ids[at] = torch.tensor([40, 45, 49, 50, 1 << 40, -2, -7, 44, 41, -(1 << 50), 48, 47])
    pieces = torch.split(ids, batch.lengths.view(3, 12).sum(1).tolist())
    expected = []
    for (_, table), key in zip(WEIGHTED.features, batch.key_of.tolist(), strict=True):
        mine, lengths = pieces[key].clone(), batch.lengths.view(3, 12)[key]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        torch.ops.fbgemm.bounds_check_indices(
            torch.tensor([WEIGHTED.table(table).num_rows]), mine, offsets, 2,
            torch.zeros(1, dtype=torch.int64))
        expected.append(mine)
    return replace(batch, ids=ids), expected


def _opened(group, optimizer=None, plan=None, mode: str = "warning") -> ShardedTables:
    plan = plan or rp.mixed_plan(WEIGHTED.tables, group.world_size, 1)
    tables = rs.open_tables(WEIGHTED, plan, group, optimizer)
    tables.bounds = BoundsCheck(mode, tables.features, tables.specs)
    return tables


def train(group, plan, mode: str, repaired_by_hand: bool, dtype: torch.dtype = torch.int64
          ) -> list[torch.Tensor]:
    tables, found = _opened(group, EVERY["rowwise_adagrad"], plan, mode), []
    for step in range(2):
        batch, expected = spoiled(10 * step + group.rank)
        if dtype == torch.int32:
            batch = replace(batch, ids=batch.ids.clamp(-(2**31), 2**31 - 1).int(),
                            lengths=batch.lengths.int())
        weights = batch.weights.clone().requires_grad_()
        if repaired_by_hand:
            lengths = batch.lengths.view(3, 12)[batch.key_of].reshape(-1)
            parts = torch.split(weights, batch.lengths.view(3, 12).sum(1).tolist())
            out = tables.lookup(Lookup(
                torch.cat(expected).to(batch.ids.dtype), lengths, torch.arange(3), 12,
                torch.cat([parts[k] for k in batch.key_of.tolist()])))
        else:
            out = tables.lookup(replace(batch, weights=weights))
        out.pow(2).sum().backward()
        found += [out.detach(), weights.grad]
    tables.barrier()
    return [*found, tables.read("a"), tables.read("b")]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("world_size", [1, 2])
def test_ignored_ids_are_replaced_as_in_fbgemm(world_size: int, dtype: torch.dtype) -> None:
    """Outputs, rows and weight gradients equal those of FBGEMM's replaced ids, under any plan."""
    for plan in (rp.mixed_plan(WEIGHTED.tables, world_size, 1),
                 rp.rich_plan(WEIGHTED.tables, world_size, 1, True)):
        got, want = (rs.run_ranks(world_size, lambda g, hand=hand, plan=plan: train(
            g, plan, "ignore", hand, dtype)) for hand in (False, True))
        rs.assert_bitwise(got, want, "ignored ids and row 0")


def test_invalid_ids_are_counted_and_warned_of_once() -> None:
    tables, (batch, expected) = _opened(SingleGroup()), spoiled(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tables.lookup(rs.make_batch(WEIGHTED, 5, 12).lookup(WEIGHTED))
        assert not caught and not tables.bounds.num_bad_ids
        for _ in range(3):
            tables.lookup(batch)
    assert len(caught) == 1 and "row 0" in str(caught[0].message)
    pieces = torch.split(batch.ids, batch.lengths.view(3, 12).sum(1).tolist())
    changed = sum(int((pieces[k] != e).sum())
                  for k, e in zip(batch.key_of.tolist(), expected, strict=True))
    assert tables.bounds.num_bad_ids == 3 * changed > 0


def test_a_batch_resolved_in_advance_is_repaired_by_its_lookup() -> None:
    """The lookup, not `resolve`, replaces the ids and counts them, once."""
    ahead, plain = _opened(SingleGroup()), _opened(SingleGroup())
    batch, _ = spoiled(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolved = ahead.resolve(batch)
    assert ahead.bounds.num_bad_ids == 0 and resolved.ids is batch.ids
    with pytest.warns(UserWarning, match="row 0 is looked up instead"):
        found = ahead.lookup(resolved)
    with pytest.warns(UserWarning, match="row 0 is looked up instead"):
        assert torch.equal(found, plain.lookup(batch))
    assert ahead.bounds.num_bad_ids == plain.bounds.num_bad_ids > 0

    again = ahead.resolve(batch)
    batch.ids.copy_(spoiled(4)[0].ids[:batch.ids.numel()].repeat(2)[:batch.ids.numel()])
    batch.weights.mul_(2)
    assert torch.equal(ahead.lookup(again), plain.lookup(batch))
    twice = replace(again, weights=3 * batch.weights)  # a feature processor's
    assert torch.equal(ahead.lookup(twice), plain.lookup(replace(batch, weights=twice.weights)))
    assert ahead.bounds.num_bad_ids == plain.bounds.num_bad_ids


def test_ids_of_a_prefetched_part_must_not_change() -> None:
    tables = _opened(SingleGroup(), EVERY["rowwise_adagrad"])
    batch, _ = spoiled(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with in_parts([tables]), torch.no_grad():
            begun = tables.turns.parts.start(batch).result()
            found = tables.lookup(begun)
            count = tables.bounds.num_bad_ids
            batch.ids.zero_()
            with pytest.raises(InvalidInputError, match="changed in place"):
                tables.lookup(begun)
        assert torch.equal(found, tables.lookup(spoiled(3)[0]))
    assert tables.bounds.num_bad_ids == 2 * count > 0


def test_fatal_is_the_default_and_lengths_are_always_checked() -> None:
    for mode, word in (("fatal", "id="), ("ignore", "lengths")):
        bag = oper.shard(torch.nn.EmbeddingBag(10, 4, mode="sum"), optimizer=oper.SGD(),
                         **({} if mode == "fatal" else {"bounds_check": mode}))
        with pytest.raises(InvalidInputError, match=word):
            bag(torch.tensor([1, 10]), torch.tensor([0, 1 if mode == "fatal" else 5]))
    assert torch.equal(bag(torch.tensor([[10, -3]])), 2 * bag(torch.tensor([[0]])))


def test_fbgemm_modes_are_accepted() -> None:
    def mode_of(mode: Any) -> str:
        return oper.shard(torch.nn.EmbeddingBag(10, 4, mode="sum"), optimizer=oper.SGD(),
                          bounds_check=mode).tables.bounds.mode

    for mode in BoundsCheckMode:
        assert mode_of(mode) == {"NONE": "fatal"}.get(
            mode.name, mode.name.removeprefix("V2_").lower())
    with pytest.raises(InvalidInputError, match=r"bounds_check mode='loud'"):
        mode_of("loud")
