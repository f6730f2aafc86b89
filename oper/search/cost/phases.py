"""The phases of a step.

Phases of a training step (barriers between them) and the work of each rank:

* request (between hosts): the ids of pushed rows are sent to their owners, which answer once all
  have arrived. The ranks' own work for it is counted in forward: all readers do the same work, so
  the sum of the phases is the same.
* forward: every rank reads its distinct rows once from memory or from a peer, repeats from cache,
  and writes its outputs; the owner of pushed rows pools them for all ranks.
* backward: every rank reduces the bag gradients of each distinct pulled row into its outbox.
* update: owners read the outboxes of all ranks, and the bag gradients of pushed rows, which they
  reduce; they merge them and apply the optimizer; a replicated row is updated by the holder of its
  master copy, which then writes all other copies.
* refresh (between hosts whose links differ): changed rows are sent to copies on other hosts, once
  all gradients have arrived. With equal links, this takes all ranks equally long, because masters
  are assigned round-robin, and is part of update.
"""

from __future__ import annotations

import numpy as np

from oper.search.cost.links import broadcast
from oper.search.problem.machine import REFRESH, REQUEST, TERMS, Machine
from oper.search.problem.overlap import RESOLVE
from oper.search.problem.statement import Problem


def phases_of(problem: Problem) -> tuple[str, ...]:
    """Names of the phases of a step, in order; there is a barrier after each."""
    out: tuple[str, ...] = ("forward", "backward", "update") if problem.training else ("forward",)
    if problem.machine.host.any():
        out = (REQUEST, *out)
        if problem.training and not _refreshes_evenly(problem.machine):
            out = (*out, REFRESH)
    if RESOLVE in problem.overlap and problem.topology.costs.sort_ns > 0:
        out = (RESOLVE, *out)
    return out


def _refreshes_evenly(m: Machine) -> bool:
    """Whether sending changed rows to all other hosts takes all ranks equally long, if their master
    copies are distributed evenly."""
    units, every = np.zeros((len(TERMS), m.world_size)), np.ones(m.world_size)
    broadcast(m, np.zeros_like(units), units, every, every)
    seconds = m.seconds(units)
    return bool(np.allclose(seconds.min(axis=1), seconds.max(axis=1), rtol=1e-9, atol=0.0))
