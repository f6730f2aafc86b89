"""Device tables of processes that act as separate hosts are bitwise equal to those of one host."""

import os
from typing import Any

import pytest

from oper.plan import Plan, uniform_plan
from oper.shmem.group.groups import ProcessGroup
from tests import random_plans as rp, runtime_support as rs
from tests.cuda import emulated
from tests.cuda.test_domains import small_case
from tests.world_support import caught, run_world


def _train(rank: int, world_size: int, plan: Plan, optimizer: str, rates: tuple[float, ...] = ()
           ) -> tuple[rs.Result | str, dict[str, list[int]]]:
    """Train as a host of one rank; an error is returned as text. `rates`: by step, times the rank,
    what is added to the learning rate."""
    os.environ["OPER_DOMAIN"] = str(rank)
    runtime: Any = rs
    runtime.ShardedTables = emulated.device_tables  # this process is only for this
    emulated.replace_library()
    steps = rs.make_steps(small_case(optimizer), world_size, 2)
    sent: dict[str, list[int]] = {}

    def between(tables: Any, step: int) -> None:
        if step < len(rates):
            tables.param_groups[0]["lr"] += rates[step] * rank
        sent.update(tables.sent_bytes())

    with caught() as errors:
        return rs.train_rank(small_case(optimizer), plan, steps, rs.OPTIMIZERS[optimizer],
                             ProcessGroup(), between), sent
    return errors[0], sent


@pytest.mark.parametrize("world_size", [2, 4])
def test_hosts_over_collectives(emulation: pytest.MonkeyPatch, world_size: int) -> None:
    emulated.load()  # built once, not by every rank
    case = small_case("rowwise_adagrad")
    plan = (rp.rich_plan(case.tables, 2, 1, columns=True) if world_size == 2
            else rp.plans_for(case.tables, 4)["mixed1"])
    found = run_world(world_size, _train, plan, "rowwise_adagrad",
                      env={"OPER_SEND_BUFFER_BYTES": str(4 << 20)})
    host = rs.train_virtual(case, plan, rs.make_steps(case, world_size, 2),
                            rs.OPTIMIZERS["rowwise_adagrad"])
    rs.assert_bitwise(vars(host), vars(rs.merge_ranks([result for result, _ in found])), "result")
    for rank, (_, sent) in enumerate(found):
        assert sum(sent["rows"]) > 0 and sum(sent["gradient_rows"]) > 0 and not sent["rows"][rank]


def test_hosts_with_other_learning_rates_do_not_update(emulation: pytest.MonkeyPatch) -> None:
    emulated.load()
    plan = uniform_plan(small_case("sgd").tables, 2, "striped")
    for error, _ in run_world(2, _train, plan, "sgd", (0.0, 1.0),
                              env={"OPER_SEND_BUFFER_BYTES": str(4 << 20)}):
        assert "different learning rates" in error
