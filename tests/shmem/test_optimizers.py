"""Every optimizer against its formula, FBGEMM and torch; weight gradients against autograd."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad as TorchRecRowWiseAdagrad

from oper.errors import InvalidInputError, PlanError
from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.shmem.optim.optimizers import (
    LAMB,
    SGD,
    STATE_PARTS,
    Adagrad,
    Adam,
    AdamW,
    LarsSGD,
    Optimizer,
    PartialRowWiseAdam,
    RowWiseAdagrad,
)
from oper.shmem.tables import ShardedTables
from oper.tables import OPTIMIZERS, TableSpec
from tests import random_plans as rp, runtime_support as rs
from tests.references import EVERY

RATES = (1.0, 1.0, 0.5, 2.0, 0.0, 0.25)


def at(rates: Sequence[float]) -> Callable[[ShardedTables, int], None]:
    """A callback that multiplies the learning rates of each step; the last factor persists."""
    def between(tables: ShardedTables, step: int) -> None:
        for group in tables.param_groups:
            first = group.setdefault("initial_lr", group["lr"])
            group["lr"] = first * rates[min(step, len(rates) - 1)]

    return between


def assert_close(got: rs.Result, want: rs.Result, tolerance: float = 1e-5) -> None:
    """Require every output, weight and state to be within `tolerance` times its largest value."""
    rs.assert_near(vars(got) | {"replicas": {}}, vars(want), "run", tolerance)


def small_case(**fields: object) -> rs.Case:
    """A case with vector widths with and without tails, and shared features."""
    shapes = [("one", 1, 4, ("only",), "sum"), ("narrow", 40, 1, ("n",), "mean"),
              ("two", 300, 16, ("a", "b"), "sum"), ("left", 60, 64, ("shared",), "mean"),
              ("right", 70, 37, ("shared",), "sum"), ("wide", 200, 272, ("w",), "sum")]
    tables = tuple(TableSpec(n, r, d, f, p) for n, r, d, f, p in shapes)
    return rs.Case(tables, ("w", "b", "unused", "shared", "n", "a", "only"), **fields)


@functools.cache
def reference(name: str, world_size: int, dtype: torch.dtype) -> rs.Result:
    case = small_case()
    return rs.train_reference(case, rs.make_steps(case, world_size, len(RATES)), EVERY[name], dtype,
                              RATES)


# ---- against the formulas ------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("name", EVERY)
def test_training_equals_the_formula(name: str, world_size: int) -> None:
    """Compares weights, all states and outputs over steps with changing learning rates."""
    case, optimizer = small_case(), EVERY[name]
    steps = rs.make_steps(case, world_size, len(RATES))
    got = rs.train_virtual(case, rp.mixed_plan(case.tables, world_size, 1), steps, optimizer,
                           between=at(RATES))
    for dtype in (torch.float32, torch.float64):
        assert_close(got, reference(name, world_size, dtype))


@pytest.mark.parametrize("name", EVERY)
def test_plans_are_bitwise_equal(name: str) -> None:
    case, optimizer = small_case(), EVERY[name]
    steps, plans = rs.make_steps(case, 4, 3), rp.plans_for(case.tables, 4)
    want, *others = (rs.train_virtual(case, plans[plan], steps, optimizer, between=at(RATES))
                     for plan in ("striped", "owned", "replicated", "mixed0"))
    for got in others:
        rs.same_bits(got, want, "another plan and striped")


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_mixed_optimizers_in_one_collection(world_size: int) -> None:
    """Tables have different optimizers; two of them share one."""
    case = small_case()
    some = ("adam", "sgd", "rowwise_adagrad_l2", "partial_rowwise_adam", "adagrad", "sgd")
    optimizers = {t.name: EVERY[n] for t, n in zip(case.tables, some, strict=True)}
    steps = rs.make_steps(case, world_size, len(RATES))
    got = rs.train_virtual(case, rp.mixed_plan(case.tables, world_size, 2), steps, optimizers,
                           between=at(RATES))
    want = rs.train_reference(case, steps, optimizers, torch.float64, RATES)
    assert_close(got, want)
    # The optimizers of other tables do not affect a table.
    alone, together = (
        rs.train_virtual(case, uniform_plan(case.tables, world_size), steps[:1], o)
        for o in (EVERY["adam"], optimizers))
    assert torch.equal(alone.weights["one"], together.weights["one"])


# ---- which rows change ---------------------------------------------------------------------------


def one_table(rows: int, dim: int, **fields: Any) -> rs.Case:
    return rs.Case((TableSpec("t", rows, dim, ("f",), "sum"),), ("f",), **fields)


def tiny(optimizer: Optimizer, dim: int = 5) -> tuple[rs.Case, ShardedTables]:
    case = one_table(6, dim)
    return case, rs.open_alone(case, optimizer)


def step_on(case: rs.Case, tables: object, ids: list[int], grad: torch.Tensor) -> None:
    """Make one step in which every id gets the gradient `grad`."""
    batch = rs.Batch(torch.ones(len(ids), dtype=torch.int64), torch.tensor(ids), None,
                     torch.zeros(len(ids), 1))
    tables.lookup(batch.lookup(case)).backward(grad.expand(len(ids), -1))


@pytest.mark.parametrize("name", EVERY)
def test_a_zero_gradient_touches_its_row(name: str) -> None:
    """Weight decay applies to looked-up rows even if their gradient is zero."""
    case, tables = tiny(EVERY[name])
    start = tables.read("t")
    step_on(case, tables, [2], torch.zeros(5))
    moved = (tables.read("t") != start).any(1).nonzero().reshape(-1).tolist()
    assert moved == ([2] if getattr(EVERY[name], "weight_decay", 0) else [])


# ---- against FBGEMM ------------------------------------------------------------------------------

# The optimizers of FBGEMM's CPU operator, which ignores weight decay.
FBGEMM = {"sgd": "EXACT_SGD", "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD",
          "adagrad": "EXACT_ADAGRAD"}


def fbgemm_peer(case: rs.Case, optimizer: Optimizer, **options: Any) -> Any:
    """FBGEMM's tables with the initial weights of the case."""
    peer = SplitTableBatchedEmbeddingBagsCodegen(
        [(t.num_rows, t.dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for t in case.tables],
        optimizer=EmbOptimType[FBGEMM[optimizer.name]], learning_rate=optimizer.lr,
        eps=getattr(optimizer, "eps", 0.0), **options)
    start = rs.initial_weights(case)
    for weight, t in zip(peer.split_embedding_weights(), case.tables, strict=True):
        weight.copy_(start[t.name])
    return peer


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", FBGEMM)
def test_equals_fbgemm(name: str, weighted: bool) -> None:
    """Compares with the optimizers of FBGEMM's CPU operator, with a changing learning rate."""
    tables = tuple(TableSpec(f"t{k}", rows, dim, (f"f{k}",), "sum") for k, (rows, dim) in enumerate(
        [(50, 8), (4000, 64), (300, 132), (1, 16), (900, 128)]))
    optimizer = EVERY[name]
    case = rs.Case(tables, tuple(f"f{k}" for k in range(5)), weighted, max_length=5)
    peer = fbgemm_peer(case, optimizer)
    ours = rs.open_alone(case, optimizer)
    for step, rate in enumerate(RATES * 3):
        ours.param_groups[0]["lr"] = optimizer.lr * rate
        peer.set_learning_rate(optimizer.lr * rate)
        batch = rs.make_batch(case, step, 30)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), batch.lengths.cumsum(0)])
        outs = peer(batch.ids, offsets, batch.weights), ours.lookup(batch.lookup(case))
        assert (outs[1] - outs[0]).abs().max() <= 1e-5 * outs[0].abs().max()
        for out in outs:
            rs.rank_loss(out, batch.target).backward()
    states = peer.split_optimizer_states() or [()] * len(case.tables)
    for t, weight, state in zip(case.tables, peer.split_embedding_weights(), states, strict=True):
        pairs = [(ours.read(t.name), weight)]
        if name != "sgd":
            pairs.append((ours.read(t.name, part="momentum1"), state[0]))
        for mine, theirs in pairs:
            assert mine.shape == theirs.shape
            assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()


# ---- against torch and TorchRec ------------------------------------------------------------------


@pytest.mark.parametrize("ours, theirs, options, sparse", [
    (SGD, torch.optim.SGD, {}, True), (Adagrad, torch.optim.Adagrad, {"eps": 1e-6}, True),
    (Adagrad, torch.optim.Adagrad, {"eps": 1e-8, "initial_accumulator_value": 0.5}, True),
    # SparseAdam adds eps before its bias correction: equal for an eps that does not matter.
    (Adam, torch.optim.SparseAdam, {"eps": 1e-12}, True),
    (Adam, torch.optim.Adam, {}, False),
    *((RowWiseAdagrad, TorchRecRowWiseAdagrad, {"eps": 1e-8, **options}, False) for options in (
        {}, {"weight_decay": 0.1}, {"initial_accumulator_value": 0.5})),
    *((SGD, torch.optim.SGD, options, False) for options in (
        {"weight_decay": 0.2}, {"momentum": 0.8}, {"momentum": 0.8, "weight_decay": 0.2})),
    (AdamW, torch.optim.AdamW, {}, False), (AdamW, torch.optim.AdamW, {"weight_decay": 0.3}, False),
], ids=lambda x: getattr(x, "__name__", str(x)))
def test_equals_torch(ours: Any, theirs: Any, options: dict[str, float], sparse: bool) -> None:
    """Sparse optimizers are equal in any case, dense ones if each step touches every row."""
    rows = 12
    case = one_table(rows, 20, max_length=5)
    tables = rs.open_alone(case, ours(lr=0.1, **options))
    bag = torch.nn.EmbeddingBag(rows, 20, mode="sum", sparse=sparse,
                                _weight=rs.initial_weights(case)["t"])
    optimizer = theirs(list(bag.parameters()), lr=0.1, **options)
    for step in range(8):
        batch = rs.make_batch(case, step, 10)
        if not sparse:
            batch = rs.Batch(torch.cat([batch.lengths, torch.tensor([rows])]),
                             torch.cat([batch.ids, torch.arange(rows)]), None,
                             torch.cat([batch.target, torch.ones(1, 20)]))
        rs.rank_loss(tables.lookup(batch.lookup(case)), batch.target).backward()
        optimizer.zero_grad()
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), batch.lengths.cumsum(0)[:-1]])
        rs.rank_loss(bag(batch.ids, offsets), batch.target).backward()
        optimizer.step()
    rs.assert_near(tables.read("t"), bag.weight.detach(), "rows")


# ---- norms of rows -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in EVERY if "lars" in n or "lamb" in n])
def test_norms_of_zero_make_no_step(name: str) -> None:
    """A row of zeros does not change, as in FBGEMM; 0 / 0 counts as no step."""
    case, tables = tiny(EVERY[name])
    tables.write("t", torch.zeros(6, 5))
    tables.flush_replicas()
    step_on(case, tables, [1, 2], torch.zeros(5))
    step_on(case, tables, [1, 3], torch.ones(5))
    for part in ("rows", *(p for p, _ in STATE_PARTS[EVERY[name].name])):
        assert tables.read("t", part=part).isfinite().all(), part
    assert not tables.read("t").any()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whole_rows_are_not_split_by_columns(name: str) -> None:
    table = TableSpec("t", 10, 16, ("f",), "sum", optimizer=name)
    tier = Tier(0, 10, "owned", (0,))
    split = TablePlan(table, (Piece(0, 8, (tier,)), Piece(8, 16, (tier,))))
    if name in ("lars_sgd", "lamb", "partial_rowwise_lamb"):
        with pytest.raises(PlanError, match=f"{name} needs the norms of whole rows"):
            Plan(1, (split,))
    else:
        assert Plan(1, (split,)).tables == (split,)


# ---- first states --------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(initial_accumulator_value=0.75),
                                       Adagrad(initial_accumulator_value=0.75)], ids=str)
def test_accumulators_start_at_the_given_value(optimizer: Optimizer) -> None:
    """Accumulators have their initial value on every rank, and keep changes in a migration."""
    case = small_case().with_optimizer(optimizer.name)
    split = rp.rich_plan(case.tables, 2, 1, columns=True)

    def body(group: object) -> dict[str, torch.Tensor]:
        plan = rp.mixed_plan(case.tables, 2, 1)
        tables = ShardedTables(plan, case.features, group, optimizer, 0.5)
        found = {t.name: tables.read(t.name, part="momentum1") for t in case.tables}
        tables.barrier()
        tables.write("two", torch.full_like(found["two"], 2.0), 0, "momentum1")
        tables.flush_replicas()
        tables.migrate(split)
        found |= {f"{t.name} moved": tables.read(t.name, part="momentum1") for t in case.tables}
        return found

    for found in rs.run_ranks(2, body):
        for name, state in found.items():
            assert torch.equal(state, torch.full_like(state, 2.0 if name == "two moved" else 0.75))


@pytest.mark.parametrize("make, word", [
    *((lambda x=x: SGD(max_gradient=x), "max_gradient") for x in (0.0, float("nan"))),
    *((lambda x=x: SGD(max_row_norm=x), "max_row_norm") for x in (-1.0, "1")),
    (lambda: SGD(lr=1e39), "lr=1e"), (lambda: SGD(momentum=-0.5), "momentum=-0.5"),
    (lambda: LarsSGD(eta=float("nan")), "eta=nan"), (lambda: LAMB(betas=(0.9, 1.0)), r"betas\[1\]"),
    (lambda: Adagrad(initial_accumulator_value=-1), "initial_accumulator_value=-1"),
    (lambda: RowWiseAdagrad(eps="0"), "eps='0'"),
    (lambda: Adam(betas=0.9), "betas=0.9"), (lambda: Adam(betas=(0.9,)), "two numbers"),
    (lambda: Adam(betas=(0.9, "0.99")), r"betas\[1\]='0.99'"),
    (lambda: PartialRowWiseAdam(betas=(0.9, 1 - 1e-10)), r"betas\[1\]"),  # 1 in fp32
])
def test_invalid_settings_are_refused(make: object, word: str) -> None:
    with pytest.raises(InvalidInputError, match=word):
        make()


def test_betas_may_be_a_list() -> None:
    assert Adam(betas=[0.8, 0.9]) == Adam(betas=(0.8, 0.9))
    assert hash(Adam(betas=[0.8, 0.9])) == hash(Adam(betas=(0.8, 0.9)))
