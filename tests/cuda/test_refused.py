"""A batch that one rank refuses updates no rank's rows; all ranks continue with the next one."""

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from oper.errors import InvalidInputError, OperError, PeerLostError, PlanError
from oper.plan import Plan, uniform_plan
from oper.rows.directory import MAX_ROWS
from oper.shmem.batch import Lookup
from oper.shmem.group.groups import SingleGroup, ThreadGroup
from oper.shmem.optim.optimizers import SGD
from oper.shmem.passes import Backward
from oper.tables import TableSpec
from tests import random_plans as rp, runtime_support as rs
from tests.cuda import streams
from tests.cuda.emulated import device_tables, has_gpu, moved
from tests.cuda.test_domains import small_case
from tests.world_support import caught

OPTIMIZER = rs.OPTIMIZERS["rowwise_adagrad"]
CASE = small_case("rowwise_adagrad")


def train(tables: Any, batch: rs.Batch, spoil: Callable[[Lookup], Lookup] = replace,
          factor: float = 1.0) -> torch.Tensor:
    out = tables.lookup(spoil(batch.lookup(CASE)))
    (factor * rs.rank_loss(out, batch.target)).backward()
    found: torch.Tensor = out.detach().cpu()
    return found


def bad_id(batch: Lookup) -> Lookup:
    return replace(batch, ids=torch.full_like(batch.ids, 10**6))


SPOILED: dict[str, tuple[str, Callable[[Lookup], Lookup], float]] = {
    "id": ("id=1000000", bad_id, 1.0),
    "sum of lengths": ("lengths of a batch", lambda b: replace(b, lengths=b.lengths + 1), 1.0),
    "negative id": ("id=-1", lambda b: replace(b, ids=torch.full_like(b.ids, -1)), 1.0),
    "negative length": ("=-[19]", lambda b: replace(b, lengths=b.lengths - 1000), 1.0),
    "number of lengths": ("cannot look up", lambda b: replace(b, lengths=b.lengths[1:]), 1.0),
    "no bags": ("lengths of a batch",
                lambda b: replace(b, lengths=b.lengths[:0], batch_size=0), 1.0),
    "gradient": ("is not finite", replace, float("nan")),
}


def compare(size: int, plan: Plan, kind: str, late: bool = False, trains: bool = True) -> None:
    """Train two batches after a refused one and without it; the results must be the same bits.

    The last rank spoils its batch as `kind` says, or all ranks without training (`trains` False).
    `late`: the error is noticed when the later batches have been trained.
    """
    steps = rs.make_steps(CASE, size, 2, seed=1)
    words, spoil, factor = SPOILED[kind]

    def body(group: ThreadGroup, refuses: bool) -> tuple[list[torch.Tensor], list[str]]:
        opened = rs.open_tables(CASE, plan, group, OPTIMIZER)
        tables: Any = getattr(opened, "_tables", opened)
        tables.guard.choose("stop")
        errors: list[str] = []

        def attempt(run: Callable[..., object], *args: Any) -> None:
            with caught(InvalidInputError, PeerLostError) as found:
                run(*args)
            errors.extend(found)

        def train_all() -> list[torch.Tensor]:
            return [train(opened, batches[group.rank]) for batches in steps]

        if late:
            tables.found_error = lambda: (0, 0, 0)
        if refuses and trains:
            is_bad = group.rank == size - 1
            attempt(train, opened, steps[0][group.rank], *((spoil, factor) if is_bad else ()))
        elif refuses:
            with torch.no_grad():
                opened.lookup(spoil(steps[0][group.rank].lookup(CASE)))
        outputs = train_all() if late else []
        if late:
            del tables.found_error
        if refuses and not errors:
            attempt(tables.synchronize)
        outputs = outputs or train_all()
        tables.barrier()
        outputs += [tables.read(name) for name in tables.specs]
        tables.barrier()
        tables.close()
        return outputs, errors

    after, plain = (rs.run_ranks(size, lambda group, refuses=refuses: body(group, refuses))
                    for refuses in (True, False))
    for rank in range(size):
        rs.assert_bitwise(after[rank][0], plain[rank][0], "after an error")
        (message,) = after[rank][1]
        mine = rank == size - 1 or not trains
        assert re.search(words if mine else f"refused its batch.*rank={size - 1}", message), message
        assert not plain[rank][1]


@pytest.fixture(autouse=True)
def opens_on_device(emulation: pytest.MonkeyPatch, on_device: None) -> None:
    emulation.setenv("OPER_DEVICE_THREADS", "1")  # one block per kernel, which is faster


@pytest.mark.parametrize("size, plan, kind", [
    *((size, "mixed", "id") for size in (1, 2, 4, 8)),
    *itertools.product([2], ["pushed", "pulled"], [k for k in SPOILED if k != "negative id"])])
def test_tables_continue_after_a_refused_batch(size: int, plan: str, kind: str) -> None:
    chosen = {"mixed": rp.plans_for(CASE.tables, size)["mixed1"],
              "pushed": rp.rich_plan(CASE.tables, size, 1, columns=True),
              "pulled": uniform_plan(CASE.tables, size, "striped")}[plan]
    compare(size, chosen, kind, late=plan != "mixed" and kind in ("id", "sum of lengths"))


@pytest.mark.parametrize("size, kind", [
    (1, "id"), (2, "id"), (1, "negative id"), (1, "sum of lengths"), (1, "negative length")])
def test_lookups_without_gradients(size: int, kind: str) -> None:
    compare(size, rp.plans_for(CASE.tables, size)["mixed1"], kind, trains=False)


def test_ranks_with_too_many_rows() -> None:
    """Updates number all rows that a rank owns with 32 bits."""
    tables = [TableSpec(name, MAX_ROWS, 1) for name in "abc"]
    plan, features = uniform_plan(tables, 2, "striped"), [(t.name, t.name) for t in tables]

    def body(group: ThreadGroup) -> None:
        with pytest.raises(PlanError, match=r"rows that a rank owns.*<= 4294967296"):
            device_tables(plan, features, group, OPTIMIZER)

    rs.run_ranks(2, body)


def test_a_small_send_buffer(emulation: pytest.MonkeyPatch) -> None:
    """All ranks raise, and no row changes."""
    emulation.setenv("OPER_SEND_BUFFER_BYTES", "4096")
    case = replace(CASE, base_batch=512)
    for plan in (uniform_plan(case.tables, 2, "striped"), rp.rich_plan(case.tables, 2, 1, False)):
        ((batch, _),) = rs.make_steps(case, 2, 1)

        def body(group: ThreadGroup, plan: Plan = plan, batch: rs.Batch = batch) -> None:
            tables = rs.open_tables(case, plan, group, OPTIMIZER)
            before = [tables.read(name) for name in tables.specs]
            with pytest.raises(OperError, match="OPER_SEND_BUFFER_BYTES"):
                train(tables, batch)
                tables.synchronize()  # type: ignore[attr-defined]
            tables.barrier()
            rs.assert_bitwise([tables.read(name) for name in tables.specs], before, "rows")
            tables.barrier()
            tables.close()

        rs.run_ranks(2, body)


def test_requests_that_do_not_fit_refuse_only_their_batch(emulation: pytest.MonkeyPatch) -> None:
    """The first error is raised between the second batch's forward and backward passes, and only
    the third batch is trained."""
    emulation.setenv("OPER_SEND_BUFFER_BYTES", "16384")
    large = replace(CASE, base_batch=512)
    plan = rp.rich_plan(CASE.tables, 2, 1, columns=True)
    ((too_large, _),) = rs.make_steps(large, 2, 1)
    ((batch, other),) = rs.make_steps(CASE, 2, 1, seed=1)

    def body(group: ThreadGroup, refuses: bool) -> list[torch.Tensor]:
        opened = rs.open_tables(CASE, plan, group, OPTIMIZER)
        tables: Any = getattr(opened, "_tables", opened)
        if refuses:
            looked_up = [moved(too_large.lookup(large), tables.device)] * 2
            passes = [tables.forward(x, collective=True) for x in looked_up[:1]]
            found, tables.found_error = tables.found_error, lambda: (0, 0, 0)
            passes.append(tables.forward(looked_up[1], collective=True))
            tables.found_error = found
            for k, (out, offsets) in enumerate(passes):
                words = "refused in its lookup" if k else "OPER_SEND_BUFFER_BYTES"
                with pytest.raises(OperError, match=words):
                    tables.apply_all([Backward((torch.ones_like(out),), looked_up[k], offsets)])
                    tables.synchronize()
        out = [train(opened, (batch, other)[group.rank])]
        tables.synchronize()
        tables.barrier()
        out += [tables.read(name) for name in tables.specs]
        tables.barrier()
        tables.close()
        return out

    for refused, plain in zip(rs.run_ranks(2, lambda group: body(group, True)),
                              rs.run_ranks(2, lambda group: body(group, False)), strict=True):
        rs.assert_bitwise(refused, plain, "after two refused batches")


def test_outputs_of_a_refused_batch_without_pooling_are_zero() -> None:
    tables = device_tables(uniform_plan([TableSpec("t", 8, 4, ("f",), "none", optimizer="sgd")], 1),
                           [("f", "t")], SingleGroup(), SGD(lr=1.0))
    batch = Lookup(torch.arange(6), torch.tensor([4, 3]), torch.arange(1), 2, pooled=False)
    out, _ = tables.forward(moved(batch, tables.device), collective=True)
    assert out.shape == (6, 4) and not out.any()
    with pytest.raises(InvalidInputError, match="lengths"):
        tables.synchronize()
    tables.close()


def test_ranks_with_other_learning_rates() -> None:
    steps = rs.make_steps(CASE, 2, 3)
    plan = uniform_plan(CASE.tables, 2, "striped")

    def body(group: ThreadGroup, differs: bool) -> list[torch.Tensor]:
        tables: Any = rs.open_tables(CASE, plan, group, SGD(lr=1.0))
        for step, batches in enumerate(steps):
            if step != 1:
                train(tables, batches[group.rank])
            elif differs:
                tables.param_groups[0]["lr"] = 1.0 + group.rank
                with pytest.raises(InvalidInputError, match=f"rank that differs={1 - group.rank}"):
                    train(tables, batches[group.rank])
                    tables.synchronize()
                tables.param_groups[0]["lr"] = 1.0
        rows = [tables.read(name) for name in tables.specs]
        tables.barrier()
        tables.close()
        return rows

    rs.assert_bitwise(rs.run_ranks(2, lambda group: body(group, True)),
                      rs.run_ranks(2, lambda group: body(group, False)), "rows")


@pytest.mark.skipif(has_gpu(), reason="the emulation delays")
@pytest.mark.parametrize("kind", ["id", "sum of lengths"])
def test_one_rank_whose_step_is_launched_before_the_error_is_found(
        emulation: pytest.MonkeyPatch, kind: str) -> None:
    words, spoil, _ = SPOILED[kind]
    plan = uniform_plan(CASE.tables, 1)
    (batch,), = rs.make_steps(CASE, 1, 1)
    with emulation.context() as patch, streams.in_use(patch, None):
        tables: Any = rs.open_tables(CASE, plan, SingleGroup(), OPTIMIZER)
        # The first lookup of a layout of keys waits for the map of these keys.
        tables.forward(batch.lookup(CASE), collective=False)
        tables.synchronize()
        before = [tables.read(name) for name in tables.specs]
        bad = spoil(batch.lookup(CASE))
        out, offsets = tables.forward(bad, collective=True)
        tables.apply_all([Backward((torch.ones_like(out),), bad, offsets)])
        with pytest.raises(InvalidInputError, match=words):
            tables.synchronize()
        rs.assert_bitwise([tables.read(name) for name in tables.specs], before, "rows")
        tables.close()
