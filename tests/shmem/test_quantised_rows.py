"""Quantised rows compared with FBGEMM; tables whose hot rows have wider types than cold ones."""

import itertools
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
    IntNBitTableBatchedEmbeddingBagsCodegen,
)

from oper.errors import InvalidInputError, PlanError
from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.rows.directory import TableDirectory
from oper.rows.read_only import with_row_dtypes
from oper.shmem.batch import Lookup
from oper.shmem.group.groups import SingleGroup
from oper.shmem.memory.quantise import as_rows, dequantise, quantise
from oper.shmem.publication.publisher import Publisher
from oper.shmem.publication.reader import PublishedTables, Reader
from oper.shmem.tables import ShardedTables
from oper.tables import CODE_BITS, TableSpec
from tests.runtime_support import bags_of_one
from tests.world_support import run_world

TYPES = {"int8": SparseType.INT8, "int4": SparseType.INT4}
KEY = torch.zeros(1, dtype=torch.int64)


def fbgemm_codes(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """FBGEMM's codes, with scale and bias moved from the end to the front, as in its tables.
    """
    rows = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(
        values, int(dtype.removeprefix("int")))
    return torch.cat([rows[:, -4:], rows[:, :-4]], 1)


def fbgemm_tables(codes: torch.Tensor, dtype: str, dim: int, pooling: str
                  ) -> IntNBitTableBatchedEmbeddingBagsCodegen:
    mode = PoolingMode.SUM if pooling == "sum" else PoolingMode.MEAN
    tables = IntNBitTableBatchedEmbeddingBagsCodegen(
        [("t", codes.shape[0], dim, TYPES.get(dtype, SparseType.FP16), EmbeddingLocation.HOST)],
        device="cpu", pooling_mode=mode, output_dtype=SparseType.FP32, row_alignment=16)
    tables.initialize_weights()
    tables.split_embedding_weights(split_scale_shifts=False)[0][0][:, :codes.shape[1]] = codes
    return tables


def our_tables(dtype: str, num_rows: int, dim: int, pooling: str = "sum") -> ShardedTables:
    spec = TableSpec("t", num_rows, dim, ("f",), pooling, dtype, "none")
    return ShardedTables(uniform_plan([spec], 1), [("f", "t")], SingleGroup(), None)


def differences() -> list[str]:
    """Lookup shapes whose results differ bitwise from FBGEMM's."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for dtype in TYPES:
        for dim in (4, 20, 64, 96, 128, 192, 1024):
            for pooling in ("sum", "mean"):
                values = torch.randn(499, dim, generator=generator)
                codes = fbgemm_codes(values, dtype)
                theirs = fbgemm_tables(codes, dtype, dim, pooling)
                ours = our_tables(dtype, 499, dim, pooling)
                ours.write("t", values)
                lengths = torch.randint(0, 30, (150,), generator=generator)
                offsets = torch.cat([KEY, lengths.cumsum(0)])
                ids = torch.randint(0, 499, (int(offsets[-1]),), generator=generator)
                for weights in (None, torch.randn(ids.numel(), generator=generator)):
                    out = ours.lookup(Lookup(ids, lengths, KEY, 150, weights))
                    if not torch.equal(out, theirs(ids, offsets, weights)):
                        found.append(f"{dtype} {dim} {pooling} weighted={weights is not None}")
                ours.close()
    return found


def other_codes() -> list[tuple[str, int]]:
    """(type, number of the case) of rows whose codes differ from FBGEMM's."""
    generator = torch.Generator().manual_seed(6)
    rows = torch.randn(300, 32, generator=generator)
    cases = [rows, rows * 100, rows * 1e-4, rows * 1e-9, rows.half(), torch.zeros(3, 8),
             torch.full((3, 8), 3.3), rows * 1e-7 + 5, rows.abs() * 1e-12, rows * 1e4,
             rows + 3e4, torch.rand(300, 32, generator=generator) * 65504, rows.round(),
             *(torch.randn(50, dim, generator=generator) for dim in (4, 12, 16, 20, 36, 132))]
    found = [(dtype, k) for k, values in enumerate(cases) for dtype in TYPES
             if not torch.equal(quantise(values, dtype), fbgemm_codes(values, dtype))]
    for dim in (2, 4, 18, 32):
        values = torch.randn(50, dim, generator=generator).bfloat16()
        if not torch.equal(quantise(values, "int8"), fbgemm_codes(values.float(), "int8")):
            found.append(("bfloat16", dim))
        odd = values[:, 1:]  # which FBGEMM does not take
        if not torch.equal(quantise(odd, "int8"), quantise(values[:, [1, *range(1, dim)]], "int8")[
                :, [0, 1, 2, 3, *range(5, dim + 4)]]):
            found.append(("odd", dim))
    return found


def test_values_of_codes_and_unpooled_rows() -> None:
    values = torch.randn(40, 12)
    for dtype in TYPES:
        tables = our_tables(dtype, 40, 12)
        tables.write("t", values)
        numbers = dequantise(quantise(values, dtype), dtype, 12)
        # Scale and bias are float16 numbers, which adds to half a step.
        step = (values.amax(1) - values.amin(1)) / ((1 << int(dtype[3:])) - 1)
        bound = (0.51 * step + 0.005 * values.abs().amax(1))[:, None]
        assert ((numbers - values).abs() <= bound).all()
        assert torch.equal(tables.read("t"), numbers)
        ids = torch.tensor([3, 3, 39])
        out = tables.lookup(Lookup(ids, torch.tensor([3]), KEY, 1, pooled=False))
        assert torch.equal(out, numbers[ids])
        with pytest.raises(InvalidInputError, match="id=40"):
            tables.lookup(Lookup(torch.tensor([40]), torch.tensor([1]), KEY, 1))


def test_values_beyond_float16_are_refused() -> None:
    spec = TableSpec("t", 2, 2, ("f",), dtype="float16")
    kept = torch.tensor([[-65504.0, float("inf")], [float("nan"), 65519.0]])
    assert torch.equal(as_rows(kept, spec).nan_to_num(nan=1.0), torch.tensor(
        [[-65504.0, 65504.0], [1.0, 65504.0]], dtype=torch.float16))
    with pytest.raises(InvalidInputError, match=r"table 't' as float16.*-70000"):
        as_rows(torch.tensor([[1.0, -70000.0]]), spec)


def test_tables_and_values_that_cannot_be_quantised_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="optimizer"):
        TableSpec("t", 4, 4, dtype="int8")
    with pytest.raises(InvalidInputError, match="even"):
        TableSpec("t", 4, 5, dtype="int4", optimizer="none")
    for bad in (float("nan"), float("inf"), -float("inf"), 1e38, -65520.0):
        for column in (0, 1, 20):
            values = torch.ones(2, 21)
            values[1, column] = bad
            with pytest.raises(InvalidInputError, match="cannot quantise"):
                quantise(values, "int8")
    spec = TableSpec("t", 4, 8, ("f",), "sum", "int8", "none")
    halves = tuple(Piece(a, a + 4, (Tier(0, 4, "owned", (0,)),)) for a in (0, 4))
    with pytest.raises(PlanError, match="one piece with all columns"):
        ShardedTables(Plan(1, (TablePlan(spec, halves),)), [("f", "t")], SingleGroup(), None)
    tables = our_tables("int8", 4, 8)
    with pytest.raises(InvalidInputError, match="cannot store rows"):
        tables.write("t", torch.zeros(4, 9, dtype=torch.uint8))


# ---- types by hotness: places, sums, bits, changes -----------------------------------------------

NUM_ROWS = 499
STOPS = {"float32": 7, "float16": 60, "int8": 180, "int4": NUM_ROWS}  # by type, hottest first
# Types that an error budget chooses from, which have a loop of their own.
CHOSEN = {dtype: STOPS[dtype] for dtype in ("float16", "int8", "int4")}


def placed(dim: int, pooling: str = "sum", tiers: tuple[Tier, ...] | None = None,
           world_size: int = 1, stops: Mapping[str, int] = STOPS) -> Plan:
    """A plan of one table with all types and a hotness order."""
    spec = TableSpec("t", NUM_ROWS, dim, ("f",), pooling, "int8", "none")
    tiers = tiers or (Tier(0, NUM_ROWS, "owned", (0,)),)
    hottest = np.random.default_rng(3).permutation(NUM_ROWS)
    entry = with_row_dtypes(TablePlan(spec, (Piece(0, dim, tiers),)),
                            [(stop, dtype) for dtype, stop in stops.items()], hottest)
    return Plan(world_size, (entry,), "inference")


@contextmanager
def published(plan: Plan, values: torch.Tensor | Mapping[str, torch.Tensor]
              ) -> Iterator[tuple[Publisher, list[Reader]]]:
    """Rows of the one table, or by table, with a reader of each domain within this process."""
    name = f"test-{os.getpid()}-{time.monotonic_ns()}"
    publisher = Publisher(name, plan, {})
    publisher.publish_rows(
        lambda table: [(0, values[table] if isinstance(values, Mapping) else values)], {})
    readers = [Reader(name, domain=d) for d in range(plan.world_size)]
    try:
        yield publisher, readers
    finally:
        for reader in readers:
            reader.close()
        publisher.close()


def look_up(reader: Reader, batch: Lookup) -> torch.Tensor:
    with reader.pinned() as epoch:
        return PublishedTables(reader, epoch & 1, [("f", "t")]).lookup(batch)


def stored(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """The values that rows stored as a type represent."""
    if dtype in CODE_BITS:
        return dequantise(quantise(values, dtype), dtype, values.shape[1])
    return values.to(getattr(torch, dtype)).float()


def expected_rows(plan: Plan, values: torch.Tensor, stops: Mapping[str, int] = STOPS
                  ) -> torch.Tensor:
    positions = TableDirectory(plan.tables[0], plan.world_size).position_of(np.arange(NUM_ROWS))
    out, begin = torch.empty_like(values), 0
    for dtype, stop in stops.items():
        at = torch.from_numpy((positions >= begin) & (positions < stop))
        out[at] = stored(values[at], dtype)
        begin = stop
    return out


def read_from(plan: Plan, domain: int) -> list[int]:
    """Number of rows that a reader in `domain` reads from each domain."""
    counts = np.zeros(plan.world_size, int)
    for x, _, owner, _ in TableDirectory(plan.tables[0], plan.world_size).by_tier(
            np.arange(NUM_ROWS)):
        owner = np.full_like(owner, domain) if x.tier.placement == "replicated" else owner
        counts += np.bincount(owner, minlength=plan.world_size)
    return counts.tolist()


def bags(generator: torch.Generator, ids: torch.Tensor | None = None
         ) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.randint(0, 30, (150,), generator=generator)
    ids = torch.arange(NUM_ROWS) if ids is None else ids
    return ids[torch.randint(0, ids.numel(), (int(lengths.sum()),), generator=generator)], lengths


def differences_by_hotness() -> list[str]:
    """Cases with wrong results, over dims, poolings and weights."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for dim in (4, 16, 20, 64, 96, 128, 192, 1024):
        values = torch.randn(NUM_ROWS, dim, generator=generator)
        for pooling, stops in itertools.product(("sum", "mean"), (STOPS, CHOSEN)):
            plan = placed(dim, pooling, stops=stops)
            rows = expected_rows(plan, values, stops)
            with published(plan, values) as (_, (reader,)):
                for weighted in (False, True):
                    ids, lengths = bags(generator)
                    weights = torch.randn(ids.numel(), generator=generator) if weighted else None
                    out = look_up(reader, Lookup(ids, lengths, KEY, 150, weights))
                    offsets = torch.cat([KEY, lengths.cumsum(0)[:-1]])
                    one = (1.0 if weights is None else weights[:, None]) * rows[ids]
                    want = torch.nn.functional.embedding_bag(
                        torch.arange(ids.numel()), one.double(), offsets, mode=pooling)
                    if not torch.allclose(out.double(), want, rtol=1e-5, atol=1e-5):
                        found.append(f"{dim} {pooling} {weighted}")
                    found += bits_differ(reader, plan, stops, values, weighted, generator)
                    found += singles_differ(reader, weighted, generator)
    return found


def singles_differ(reader: Reader, weighted: bool, generator: torch.Generator) -> list[str]:
    """Sizes of batches with one id per bag whose results depend on empty bags between them."""
    found = []
    for size in (1, 31, 32, 33, 150, 2000):
        ids = torch.randint(0, NUM_ROWS, (size,), generator=generator)
        weights = torch.randn(size, generator=generator) if weighted else None
        ones = torch.ones(size, dtype=torch.int64)
        out = look_up(reader, Lookup(ids, ones, KEY, size, weights))
        lengths = torch.stack([ones, 0 * ones], 1).reshape(-1)
        other = look_up(reader, Lookup(ids, lengths, KEY, 2 * size, weights))
        if not torch.equal(out, other[::2]) or other[1::2].any():
            found.append(f"bags of one id: {size} {weighted}")
    return found


def bits_differ(reader: Reader, plan: Plan, stops: Mapping[str, int], values: torch.Tensor,
                weighted: bool, generator: torch.Generator) -> list[str]:
    """Ranges whose lookups differ bitwise from FBGEMM's for a table of the range's type."""
    spec = plan.tables[0].table
    directory, begin, found = TableDirectory(plan.tables[0], 1), stops.get("float32", 0), []
    for dtype in ("float16", "int8", "int4"):
        ids = torch.from_numpy(directory.ids_at(np.arange(begin, stops[dtype])))
        begin = stops[dtype]
        some, lengths = bags(generator, ids)
        weights = torch.randn(some.numel(), generator=generator) if weighted else None
        out = look_up(reader, Lookup(some, lengths, KEY, 150, weights))
        codes = (quantise(values, dtype) if dtype in CODE_BITS
                 else values.half().view(torch.uint8))
        theirs = fbgemm_tables(codes, dtype, spec.dim, spec.pooling)
        offsets = torch.cat([KEY, lengths.cumsum(0)])
        if not torch.equal(out, theirs(some, offsets, weights)):
            found.append(f"bits of {dtype} {spec.dim} {spec.pooling} {weighted}")
    return found


def compare(rank: int, world_size: int) -> None:
    assert other_codes() == []
    assert differences() == []
    assert differences_by_hotness() == []


@pytest.mark.parametrize("kernels", ["", "avx2", "generic"])
def test_codes_and_lookups_equal_fbgemm_bit_for_bit(kernels: str) -> None:
    """Tables of one type, and of types by hotness."""
    run_world(1, compare, env={"OPER_CPU_KERNELS": kernels} if kernels else {})


@pytest.mark.parametrize("tiers", [
    (Tier(0, NUM_ROWS, "striped", (1, 0)),),
    (Tier(0, 90, "replicated", (0, 1)), Tier(90, NUM_ROWS, "striped", (0, 1), (3, 1))),
    (Tier(0, 30, "owned", (1,)), Tier(30, 200, "replicated", (1, 0)),
     Tier(200, NUM_ROWS, "owned", (0,)))])
def test_domains_hold_and_read_all_types(tiers: tuple[Tier, ...]) -> None:
    values = torch.randn(NUM_ROWS, 20, generator=torch.Generator().manual_seed(1))
    plan = placed(20, tiers=tiers, world_size=2)
    rows = expected_rows(plan, values)
    batch = bags_of_one(torch.arange(NUM_ROWS))
    with published(plan, values) as (publisher, readers):
        for domain, reader in enumerate(readers):
            with reader.pinned() as epoch:
                tables = PublishedTables(reader, epoch & 1, [("f", "t")])
                assert torch.equal(tables.lookup(batch), rows)
                assert tables.traffic().counts.sum((0, 1)).tolist() == read_from(plan, domain)
                assert torch.equal(tables.read("t"), rows)
                assert torch.equal(tables.read("t", 40, 77), rows[40:77])
        widths = {"float32": 80, "float16": 40, "int8": 24, "int4": 14}
        begins = [0, *STOPS.values()]
        held = sum((stop - begin) * widths[dtype]
                   for (dtype, stop), begin in zip(STOPS.items(), begins, strict=False))
        # Replicated rows have a copy besides their masters; every range begins at a cache line.
        copies = 2 * sum(t.stop - t.start for t in tiers if t.placement == "replicated") * 80
        assert held <= publisher.memory_bytes()["tables"] <= held + copies + 64 * 40


def test_changed_rows_equal_a_full_publication() -> None:
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(NUM_ROWS, 64, generator=generator)
    plan = placed(64)
    with published(plan, values) as (publisher, (reader,)):
        ids = np.random.default_rng(0).permutation(NUM_ROWS)[:120]
        values[torch.from_numpy(ids)] = new = torch.randn(120, 64, generator=generator)
        publisher.commit(publisher.prepare_rows({"t": (ids, new)}, {}))
        changed = reader.sums()
        publisher.publish_rows(lambda _: [(100, values[100:]), (0, values[:100])], {})
        assert reader.sums() == changed
        with pytest.raises(InvalidInputError, match="before quantisation"):
            publisher.commit(publisher.prepare_rows({"t": (ids, quantise(new, "int8"))}, {}))
        new[7, 3] = float("nan")
        with pytest.raises(InvalidInputError, match=f"row {ids[7]}"):
            publisher.commit(publisher.prepare_rows({"t": (ids, new)}, {}))
        assert reader.sums() == changed


def test_rows_without_counts_follow_in_the_order_of_ids() -> None:
    """A range of one type may end among the rows without counts."""
    spec = TableSpec("t", NUM_ROWS, 20, ("f",), "sum", "int8", "none")
    hottest = np.array([250, 3, 17])
    entry = with_row_dtypes(
        TablePlan(spec, (Piece(0, 20, (Tier(0, NUM_ROWS, "owned", (0,)),)),)),
        [(2, "float16"), (100, "int8"), (NUM_ROWS, "int4")], hottest)
    values = torch.randn(NUM_ROWS, 20, generator=torch.Generator().manual_seed(6))
    wanted = stored(values, "int4")
    wanted[:99] = stored(values[:99], "int8")  # 17, and the 97 first of the others
    wanted[hottest[:2]] = stored(values[hottest[:2]], "float16")
    batch = bags_of_one(torch.arange(NUM_ROWS))
    with published(Plan(1, (entry,), "inference"), values) as (_, (reader,)):
        assert torch.equal(look_up(reader, batch), wanted)


def test_a_range_of_one_type_equals_a_table_of_that_type() -> None:
    """They are equal even if the type of all tiers differs from the table's."""
    values = torch.randn(NUM_ROWS, 20, generator=torch.Generator().manual_seed(4))
    spec = TableSpec("t", NUM_ROWS, 20, ("f",), "sum", "int8", "none")
    for dtype in ("int4", "float16", "int8"):
        tier = Tier(0, NUM_ROWS, "owned", (0,), dtype=dtype)
        plan = Plan(1, (TablePlan(spec, (Piece(0, 20, (tier,)),)),), "inference")
        batch = bags_of_one(torch.arange(NUM_ROWS))
        with published(plan, values) as (_, (reader,)):
            assert torch.equal(look_up(reader, batch), stored(values, dtype))


def test_plan_files_keep_the_types() -> None:
    plan = placed(20)
    again = Plan.from_text(plan.to_text())
    assert [(t.stop, t.dtype) for t in again.tables[0].tiers] == [
        (7, "float32"), (60, "float16"), (180, "int8"), (NUM_ROWS, "")]
    assert again.tables[0].table.dtype == "int4"
    assert again.to_text() == plan.to_text()


def test_refused_types() -> None:
    plan = placed(20)
    with pytest.raises(PlanError, match=r"publish it with oper\.publish"):
        ShardedTables(plan, [("f", "t")], SingleGroup(), None)
    entry = plan.tables[0]
    for table, tier in ((replace(entry.table, dtype="float16"), "int8"),
                        (entry.table, "int2"),
                        (replace(entry.table, dim=5, dtype="int8"), "int4")):
        tiers = (Tier(0, NUM_ROWS, "owned", (0,), dtype=tier),)
        with pytest.raises(PlanError, match="dtype"):
            Plan(1, (TablePlan(table, (Piece(0, table.dim, tiers),)),), "inference")
    with pytest.raises(PlanError, match="the same statistics"):
        with_row_dtypes(entry, [(9, "int8"), (NUM_ROWS, "int4")], np.arange(9))
    assert entry.head_ids.size > 9
    with pytest.raises(PlanError, match="from position 2"):  # the order of ids would follow
        with_row_dtypes(entry, [(9, "int8"), (NUM_ROWS, "int4")], entry.head_ids[:2])
