"""Copies on one rank of every host, which the host's other ranks read over its own links.

Between hosts a changed row then travels once per host, and once per rank where it is replicated on
all ranks; in exchange ranks without the copy read it from a neighbour. Which rank of a host has the
copy is free, so that rows are cut into tiers whose copies lie on different ranks.

What such rows ask of the resource rows of a relaxation is a sum over hosts of what follows from the
rank that the host chose, and, for the master copies, from the host that has them. The least of each
is below every choice, and equal to it where ranks are alike.
"""

from __future__ import annotations

import numpy as np

from oper.search.bound.rows import ResourceRows
from oper.search.cost.model import SLOT_BYTES
from oper.search.cost.tally import BROADCAST, HELD, NUM_ROWS, UPDATE_NS, row_bytes
from oper.search.problem.machine import (
    COMPUTE,
    CROSS_IN,
    CROSS_OUT,
    LINK_IN,
    LINK_OUT,
    MEMORY,
    TERMS,
    add_wire,
)
from oper.search.problem.statement import NUM_FEATURES, ROWS, TOUCHED, TOUCHED_ALL, TableProblem


class CopyRows:
    """What a unit of each kind asks of the resource rows; float64 [R] each.

    Attributes:
        need: a byte that every rank reads.
        send: a byte that a master sends to the other copies.
        held: a byte held on every host.
        refresh: a nanosecond of every host's holder in the update.
    """

    def __init__(self, rows: ResourceRows) -> None:
        model = rows.model
        m, world = model.machine, model.machine.world_size
        hosts = range(m.host_capacity_bytes.size)
        first, last = model.phases.index("forward"), len(model.phases) - 1
        each = np.arange(world)
        units = np.zeros((5, world, len(model.phases), len(TERMS), world))
        need, send, receive, refresh = units[:4]
        reads = (m.host[:, None] == m.host[None, :]) & (m.domain[:, None] != m.domain[None, :])
        need[:, first, LINK_IN] = reads
        for term in (LINK_OUT, MEMORY):
            need[each, first, term, each] = reads.sum(axis=1)
        send[each, last, CROSS_OUT, each] = len(hosts) - 1
        for term in (CROSS_IN, MEMORY):
            receive[each, last, term, each] = 1.0
        refresh[each, last, COMPUTE, each] = 1.0
        add_wire(units, m)
        asked = rows.of_units(units)  # [5, W, R]
        held = np.zeros((world, NUM_ROWS, world))
        held[each, HELD, each] = 1.0
        asked[4] = rows.of_rows(held)
        least = np.stack([asked[:, m.host == h].min(axis=1) for h in hosts], axis=1)  # [5, H, R]
        self.need, self.held, self.refresh = (least[k].sum(axis=0) for k in (0, 4, 3))
        # Masters on the host where that is cheapest; every other host receives.
        self.send = (least[1] + least[2].sum(axis=0) - least[2]).min(axis=0)

    def coefficients(self, rows: ResourceRows, t: TableProblem) -> np.ndarray:
        """What a unit of each feature of a table asks; float64 [4, R]."""
        model, width = rows.model, t.spec.dim
        row, _, state = row_bytes(t, width)
        by_class = []
        for ranks in rows.classes.ranks:
            masters = np.zeros((NUM_FEATURES, NUM_FEATURES, model.machine.world_size))
            masters[np.arange(NUM_FEATURES)[:, None], np.arange(NUM_FEATURES)[:, None], ranks] = (
                1 / ranks.size)
            made = model.replica_rows(t, width, masters)
            made[:, BROADCAST] = 0.0
            made[:, HELD] = masters[:, ROWS] * (row + state) if model.training else 0.0
            if model.training:
                made[:, UPDATE_NS] = masters[:, TOUCHED_ALL] * model.odd_ns(t, width, 2)
            by_class.append(rows.of_rows(made))
        out = np.min(by_class, axis=0)
        out[ROWS] += row * self.held
        out[TOUCHED] += row * self.need
        if model.training:
            out[TOUCHED_ALL] += ((row + SLOT_BYTES) * self.send
                                 + model.costs.refresh_ns * self.refresh)
        return np.asarray(out)
