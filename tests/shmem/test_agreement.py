"""Ranks that construct other tables than rank 0 get an error; none reads or writes other rows."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from oper.errors import InvalidInputError
from oper.plan import uniform_plan
from oper.shmem.group.groups import ThreadGroup
from oper.shmem.optim.optimizers import SGD
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests.runtime_support import run_ranks

TABLES = [TableSpec(name, 30, 4, (name,), "sum", "float32", "sgd") for name in ("first", "second")]
FEATURES = [(t.name, t.name) for t in TABLES]
SAME = uniform_plan(TABLES, 2, "striped")
LARGER = [TABLES[0], replace(TABLES[1], num_rows=60)]
HEADS = (SAME.tables[0], replace(SAME.tables[1], head_ids=np.array([3, 1])))
DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "order of tables": ({"plan": uniform_plan(TABLES[::-1], 2, "striped")}, "table 0 .*second"),
    "rows": ({"plan": uniform_plan(LARGER, 2, "striped")}, "table 1 .*num_rows=60"),
    "placement": ({"plan": uniform_plan(TABLES, 2, "owned")}, "placement of table 0 .*owned"),
    "hottest rows": ({"plan": replace(SAME, tables=HEADS)}, "hottest ids of table 1 .*second"),
    "one table more": ({"plan": uniform_plan([*TABLES, replace(TABLES[0], name="third")], 2,
                                             "striped")}, "table 2 .*third"),
    "message bits": ({"plan": replace(SAME, message_bits=16)}, "message_bits .*16"),
    "order of features": ({"features": FEATURES[::-1]}, "feature 0 .*second"),
    "learning rate": ({"optimizers": SGD(lr=0.2)}, "optimizer 0 .*0.2"),
    "scale": ({"gradient_scale": 1.0}, "gradient_scale .*1.0")}


def _arguments(rank: int, name: str) -> dict[str, Any]:
    same = {"plan": SAME, "features": FEATURES, "optimizers": SGD(lr=0.1), "gradient_scale": 0.5}
    return same | (DIFFERENT[name][0] if rank else {})


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_differ_are_refused_on_all_ranks(name: str) -> None:
    def body(group: ThreadGroup) -> str:
        with pytest.raises(InvalidInputError, match=r"ranks \[1\] construct other") as caught:
            ShardedTables(group=group, **_arguments(group.rank, name))
        return str(caught.value)

    messages = run_ranks(2, body)
    wanted = DIFFERENT[name][1]
    assert re.search(wanted, messages[1]) and wanted.partition(" .*")[0] in messages[0]


def test_a_move_to_different_plans_is_refused_and_the_old_plan_stays() -> None:
    def body(group: ThreadGroup) -> None:
        tables = ShardedTables(SAME, FEATURES, group, SGD(lr=0.1))
        with pytest.raises(InvalidInputError, match="placement of table 0"):
            tables.migrate(uniform_plan(TABLES, 2, "owned" if group.rank else "replicated"))
        assert tables.plan is SAME and tables.migration is None
        tables.close()

    run_ranks(2, body)
