"""Steps that are captured in an emulated CUDA graph: what that forbids, and what replays give."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from oper.errors import OperError
from oper.plan import Plan, uniform_plan
from oper.shmem.batch import Lookup
from oper.shmem.group.groups import SingleGroup
from oper.shmem.passes import Backward
from oper.tables import TableSpec
from tests import runtime_support as rs
from tests.cuda import streams
from tests.cuda.emulated import has_gpu

pytestmark = pytest.mark.skipif(has_gpu(), reason="test_on_gpu.py captures steps on a GPU")

OPTIMIZER = rs.OPTIMIZERS["rowwise_adagrad"]
CASE = rs.Case((TableSpec("t", 40, 8, ("a",), "sum"),), ("a",), base_batch=8)


def step(tables: Any, batch: Lookup) -> torch.Tensor:
    out, offsets = tables.forward(batch, collective=True)
    tables.apply_all([Backward((torch.ones_like(out),), batch, offsets)])
    found: torch.Tensor = out
    return found


def batch_of(seed: int) -> Lookup:
    g = torch.Generator().manual_seed(seed)
    return Lookup(torch.randint(0, 40, (24,), generator=g), torch.full((8,), 3), CASE.key_of, 8)


@contextmanager
def opened(patch: pytest.MonkeyPatch, case: rs.Case = CASE, plan: Plan | None = None
           ) -> Iterator[tuple[Any, streams.Stream, list[object]]]:
    """Tables of one rank, its stream, and what keeps the arguments of operators alive."""
    with patch.context() as inner, streams.in_use(inner, None) as given:
        plan = plan or uniform_plan(case.tables, 1)
        tables = rs.open_tables(case, plan, SingleGroup(), OPTIMIZER)
        yield tables, streams.current_stream(), given
        tables.close()


def resolved_on(stream: streams.Stream, tables: Any, batch: Lookup) -> Lookup:
    with streams.stream(stream):
        found: Lookup = tables.resolve(batch)
    stream.synchronize()
    return found


@pytest.mark.parametrize("placement", ["striped", "replicated"])
@pytest.mark.parametrize("ahead", [False, True])
def test_replays_resolve_the_ids_that_they_find(emulation: pytest.MonkeyPatch, placement: str,
                                                ahead: bool) -> None:
    """A batch that was resolved before the capture is resolved again in the graph, since its plan
    is that of earlier ids."""
    plan = uniform_plan(CASE.tables, 1, placement)
    host = rs.open_tables(CASE, plan, SingleGroup(), OPTIMIZER)
    batch = batch_of(0)
    with opened(emulation, plan=plan) as (tables, mine, _):
        step(tables, batch)
        captured = resolved_on(streams.Stream(), tables, batch) if ahead else batch
        with streams.Graph(mine) as graph:
            out = step(tables, captured)
        for seed in range(3):
            mine.synchronize()
            batch.ids.copy_(batch_of(seed).ids)
            graph.replay()
        mine.synchronize()
        for seed in (0, 0, 1, 2):
            expected = step(host, batch_of(seed))
        rs.assert_bitwise([out, tables.read("t")], [expected, host.read("t")], "replays")
    host.close()


def test_a_resolved_batch_that_is_dropped_during_a_capture(emulation: pytest.MonkeyPatch) -> None:
    """The stream that made it waits for its last use only after the capture, since both are not
    part of the graph."""
    with opened(emulation) as (tables, mine, given):
        side = streams.Stream()
        waits = []

        def drop() -> None:
            given.clear()
            waits.append(torch.ops.oper_emulated.stream_given(side.number))

        def use() -> None:
            step(tables, resolved_on(side, tables, batch_of(0)))
            mine.synchronize()
            waits.append(torch.ops.oper_emulated.stream_given(side.number))

        use()
        with streams.Graph(mine):
            drop()
        use()
        drop()
    assert waits[1] == waits[0] and waits[3] == waits[2] + 2


@pytest.mark.parametrize("words, key_of, has_warm_up", [
    ("output rows of an unpooled lookup", [1], True), ("keys of the batch", [0], False)])
def test_steps_that_would_wait_are_refused_and_spoil_no_capture(
        emulation: pytest.MonkeyPatch, words: str, key_of: list[int], has_warm_up: bool) -> None:
    case = rs.Case((TableSpec("t", 40, 8, ("a",), "none"),), ("a",))
    batch = Lookup(torch.arange(8), torch.full((4,), 2), torch.tensor(key_of), 2, pooled=False)
    with opened(emulation, case) as (tables, mine, _):
        if has_warm_up:
            step(tables, batch)
        with streams.Graph(mine), pytest.raises(OperError, match=f"cannot capture.*{words}"):
            step(tables, batch)


def test_memory_that_could_not_be_allocated_is_not_given_out_later(
        emulation: pytest.MonkeyPatch) -> None:
    case = rs.Case((TableSpec("t", 2_200_000, 1, ("a",), "sum"),), ("a",))
    with opened(emulation, case) as (tables, _, _):
        torch.ops.oper_emulated.fail_allocations(2)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="cannot allocate"):
                torch.ops.oper.device_context_mark_changes(tables.handle, True)
        assert torch.ops.oper.device_context_mark_changes(tables.handle, True)
