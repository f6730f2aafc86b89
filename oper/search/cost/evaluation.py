"""The modelled step time of one plan: phases, every rank's loads in them, and the memory needed.

Phases of a training step (barriers between them) and the work of each rank:

* request (between hosts): the ids of pushed rows are sent to their owners, which answer once all
  have arrived. The ranks' own work for it is counted in forward: all readers do the same work, so
  the sum of the phases is the same.
* forward: every rank reads its distinct rows once from memory or from a peer, repeats from cache,
  and writes its outputs; the owner of pushed rows pools them for all ranks.
* backward: every rank reduces the bag gradients of each distinct pulled row into its send buffer.
* update: owners read the send buffers of all ranks, and reduce the bag gradients of pushed rows;
  they merge these gradients and apply the optimizer. If it keeps one state per row, the owners of
  a row's column pieces send each other their sums of squares for this. A replicated row is updated
  by the holder of its master copy, which then writes all other copies.
* refresh (between hosts whose links differ): changed rows are sent to copies on other hosts, once
  all gradients have arrived. With equal links, this takes all ranks equally long, because master
  copies are assigned round-robin, and is part of update.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from oper.search.cost.links import broadcast
from oper.search.problem.machine import GROUPS, REFRESH, REQUEST, TERMS, Machine, by_group
from oper.search.problem.overlap import RESOLVE
from oper.search.problem.statement import Problem


@dataclass(frozen=True, eq=False)
class Phase:
    """One phase of a step.

    Attributes:
        name: ``"resolve"``, ``"request"``, ``"forward"``, ``"backward"``, ``"update"`` or
            ``"refresh"``.
        units: float64 [9, W]: bytes, or nanoseconds of compute, by term and rank.
        seconds: float64 [9, W]: time of each term; each rank waits for all bytes of a shared link.
        fixed_us: fixed cost, microseconds.
        hidden: float64 [W], seconds of declared dense compute that the phase overlaps with.
        has_local: bool [8], which groups include a rank's own memory and compute time.
    """

    name: str
    units: np.ndarray
    seconds: np.ndarray
    fixed_us: float
    hidden: np.ndarray
    has_local: np.ndarray

    @cached_property
    def groups(self) -> np.ndarray:
        """Seconds by group of terms (`machine.GROUPS`) and rank, float64 [8, W].

        Groups run concurrently. Declared dense compute is subtracted from each, down to 0.
        """
        return np.maximum(by_group(self.seconds, self.has_local) - self.hidden, 0.0)

    @property
    def time_us(self) -> float:
        """Duration of the phase in microseconds: its slowest rank's time plus the fixed cost."""
        return float(self.groups.max()) * 1e6 + self.fixed_us

    @property
    def slowest_rank(self) -> int:
        """The rank with the longest group time."""
        return int(self.groups.max(axis=0).argmax())

    @property
    def binding(self) -> str:
        """The binding resource: the group of terms on which the slowest rank spends most time."""
        return GROUPS[int(self.groups[:, self.slowest_rank].argmax())]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The modelled step of one plan: its phases and memory.

    Attributes:
        phases: the phases in order.
        held_bytes: float64 [W], memory attributed to each rank, including buffers.
        domain_bytes: float64 [num_domains], memory needed in each domain.
        capacity_bytes: float64 [num_domains], memory that each domain has.
        host_bytes: float64 [num_hosts], host memory needed on each host.
        host_capacity_bytes: float64 [num_hosts], host memory that each host has.
        memory_used: float64 [num_domains + num_hosts], used share of each domain's memory, then of
            each host's.
    """

    phases: tuple[Phase, ...]
    held_bytes: np.ndarray
    domain_bytes: np.ndarray
    capacity_bytes: np.ndarray
    host_bytes: np.ndarray
    host_capacity_bytes: np.ndarray
    memory_used: np.ndarray

    @property
    def step_us(self) -> float:
        """Modelled microseconds of a step (of a lookup, for inference)."""
        return sum(p.time_us for p in self.phases)

    @property
    def fits(self) -> bool:
        """Whether no memory, of a domain or of a host, overflows."""
        return self.fullest <= 1 + 1e-9

    @property
    def fullest(self) -> float:
        """Used share of the fullest memory; above 1 if it overflows."""
        return float(self.memory_used.max())

    @property
    def score(self) -> tuple[float, float]:
        """(overflow of the fullest memory, as a share of it; modelled step time in microseconds).
        Of two plans, the one with the lexicographically smaller score is better."""
        return max(0.0, self.fullest - 1.0 - 1e-9), self.step_us

    @property
    def imbalance(self) -> float:
        """max / mean over ranks of the phase times summed over phases."""
        load = sum(p.groups.max(axis=0) for p in self.phases)
        return float(load.max() / max(load.mean(), 1e-30))


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
