"""Quantised rows compared with FBGEMM: equal codes, and bitwise equal lookups."""

from __future__ import annotations

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
    IntNBitTableBatchedEmbeddingBagsCodegen,
)

from oper.errors import InvalidInputError, PlanError
from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.shmem.batch import Lookup
from oper.shmem.group.groups import SingleGroup
from oper.shmem.memory.quantise import dequantise, quantise
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
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


def differences(rank: int, world_size: int) -> list[str]:
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


@pytest.mark.parametrize("kernels", ["", "avx2", "generic"])
def test_lookups_equal_fbgemm_bit_for_bit(kernels: str) -> None:
    env = {"OPER_CPU_KERNELS": kernels} if kernels else {}
    assert run_world(1, differences, env=env) == [[]]


def other_codes(rank: int, world_size: int) -> list[tuple[str, int]]:
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


@pytest.mark.parametrize("kernels", ["", "avx2", "generic"])
def test_codes_equal_fbgemms(kernels: str) -> None:
    env = {"OPER_CPU_KERNELS": kernels} if kernels else {}
    assert run_world(1, other_codes, env=env) == [[]]


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
        tables.close()


def test_what_is_refused() -> None:
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
    with pytest.raises(PlanError, match="whole rows"):
        ShardedTables(Plan(1, (TablePlan(spec, halves),)), [("f", "t")], SingleGroup(), None)
    tables = our_tables("int8", 4, 8)
    with pytest.raises(InvalidInputError, match="cannot store rows"):
        tables.write("t", torch.zeros(4, 9, dtype=torch.uint8))
    tables.close()
