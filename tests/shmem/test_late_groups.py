"""A replica group that has skipped the updates after which synchronizations were due, in a model of
two collections: the other groups wait for it in the order in which they update the collections."""

from __future__ import annotations

import pytest
import torch

from oper.errors import InvalidInputError
from oper.plan import uniform_plan
from oper.shmem.batch import Lookup
from oper.shmem.group.groups import ThreadGroup
from oper.shmem.optim.optimizers import SGD
from oper.shmem.replica_groups.groups import Background, ReplicaGroups
from oper.shmem.replica_groups.synchronizer import Synchronizer
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests.runtime_support import run_ranks

ROWS, EVERY, STEPS = 20, 2, 8
SPECS = [TableSpec(f"t{k}", ROWS, 4, ("f",), "sum", optimizer="sgd") for k in range(2)]
PLANS = [uniform_plan([spec], 1) for spec in SPECS]


def step(both: list[ShardedTables], number: int, shift: int = 0) -> None:
    g = torch.Generator().manual_seed(number)
    batch = Lookup(torch.randint(0, ROWS, (3,), generator=g) + shift,
                   torch.ones(3, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 3)
    outputs = [tables.lookup(batch) for tables in both]
    torch.stack([x.square().mean() for x in outputs]).sum().backward()


def trained(refused: int, what: str, delay: int, bits: int) -> list[list[torch.Tensor]]:
    """Train two groups of one rank; the second refuses batches 3, ..., 2 + `refused`. Then `what`
    follows."""
    whole, across, behind = (ThreadGroup.create(2, 10.0) for _ in range(3))

    def on_rank(group: ThreadGroup) -> list[torch.Tensor]:
        k = group.rank
        groups = ReplicaGroups(whole[k], ThreadGroup.create(1, 10.0)[0], across[k], EVERY, delay,
                               Background(behind[k]) if delay else None, bits)
        both = []
        for spec, plan in zip(SPECS, PLANS, strict=True):
            tables = ShardedTables(plan, [("f", spec.name)], groups.mine, SGD(lr=1.0),
                                   groups.gradient_scale(0.5))
            Synchronizer(tables, groups)
            tables.write(spec.name, torch.randn(
                ROWS, 4, generator=torch.Generator().manual_seed(5)))
            tables.flush_replicas()
            both.append(tables)
        both[0].family.update(both)
        both[1].family = both[0].family
        for number in range(STEPS):
            if k and 3 <= number < 3 + refused:
                with pytest.raises(InvalidInputError):
                    step(both, 10 * number + k, 1000)
            else:
                step(both, 10 * number + k)
            if number == 2 + refused:
                for tables, plan in zip(both, PLANS, strict=True):
                    if what == "synchronize":
                        tables.replicas.synchronize()
                    elif what == "move":
                        tables.migrate(plan)
        for tables in both:
            tables.replicas.synchronize()
        found = [tables.read(spec.name) for tables, spec in zip(both, SPECS, strict=True)]
        for tables in both:
            tables.close()
        return found

    return run_ranks(2, on_rank)


@pytest.mark.parametrize(("delay", "bits"), [(0, 32), (1, 8)])
@pytest.mark.parametrize("what", ["train", "synchronize", "move"])
@pytest.mark.parametrize("refused", [1, 4])
def test_a_late_group_synchronizes_in_the_order_of_updates(refused: int, what: str, delay: int,
                                                           bits: int) -> None:
    first, second = trained(refused, what, delay, bits)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
