"""Resource rows: loads of ranks and use of memories, as means over classes of equal ranks.

A mean never exceeds a maximum, and the mean over a class of interchangeable ranks depends on a plan
only through the amounts that each class owns. So a bound over averaged loads holds for every plan.
The rows are

* one per phase, class and group of terms that run concurrently, in microseconds; the phase time is
  at least each of its rows;
* one per class of memory domains, memory used / capacity, at most 1; and the same per class of
  hosts, if rows may be in host memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oper.search.cost.load_vector import NUM_ROWS, LoadVector, Row
from oper.search.cost.model import CostModel
from oper.search.cost.space import model_classes
from oper.search.problem.machine import GROUPS

#: Least capacity of a class of memories, bytes. If reserved memory exceeds the memory, capacity is
#: about 0, and any need overflows.
LEAST_CAPACITY = 1e-3


@dataclass(frozen=True, slots=True)
class Option:
    """A way to place a block: one of `oper.search.cost.space.KINDS`, and the class of ranks that
    owns the rows or has their master copies (-1: all ranks)."""

    kind: str
    rank_class: int


class ResourceRows:
    """The resource rows of one problem.

    Args:
        model: the cost model.
        distinguished: sets of ranks that form separate classes.

    Attributes:
        classes: classes of ranks.
        uses_host: whether rows may be in host memory.
        names: (phase, group, class) of each timed row; memory rows follow.
        phase_of: int64 [R], phase of each row, -1 for memory.
        unit: float64 [C, 23, R], consumption by a unit of each load-vector row, spread over a
            class.
    """

    def __init__(self, model: CostModel, distinguished: list[list[int]]) -> None:
        self.model = model
        self.classes = model_classes(model, distinguished)
        pinned = [x for c in model.problem.constraints.tables.values() for x in c.tiers or ()]
        self.uses_host = bool(model.machine.host_capacity_bytes.any() and (
            "host" in model.problem.allow or any(x.memory == "host" for x in pinned)))
        num_classes = len(self.classes.ranks)
        spread = np.stack([np.bincount(r, minlength=model.machine.world_size) / r.size
                           for r in self.classes.ranks])  # [C, W], one unit distributed over each
        unit = np.zeros((num_classes, NUM_ROWS, NUM_ROWS, spread.shape[1]))
        for q in range(NUM_ROWS):
            unit[:, q, q] = spread
        time = self._class_means(model.loads(unit))  # [C, 23, phases, groups, classes]
        if not self.uses_host:
            time[..., GROUPS.index("host_memory"), :] = 0.0
        keep = np.argwhere(time.max(axis=(0, 1)) > 0)  # rows that are always zero are left out
        self.names = [(int(p), GROUPS[g], int(c)) for p, g, c in keep]
        num_memories = self.classes.num_domain_classes + (
            self.classes.num_host_classes if self.uses_host else 0)
        self.phase_of = np.concatenate([keep[:, 0], np.full(num_memories, -1)])
        self.unit = np.zeros((num_classes, NUM_ROWS, self.phase_of.size))
        self.unit[:, :, :len(keep)] = time[:, :, keep[:, 0], keep[:, 1], keep[:, 2]]
        self.unit[:, :, len(keep):] = self._memory_share(unit)

    @property
    def first_memory(self) -> int:
        """Index of the first memory row; rows of domain classes come first, then those of host
        classes."""
        return len(self.names)

    def of_load_vector(self, vector: LoadVector) -> np.ndarray:
        """Consumption of the resource rows by a load vector; float64 [..., R].

        The rows of the load vector may have further axes (float64 [..., 23, W]) if `vector.units`
        is 0.
        """
        time = self._class_means(self.model.units(vector))
        out = np.zeros((*time.shape[:-3], self.phase_of.size))
        for k, (phase, group, rank_class) in enumerate(self.names):
            out[..., k] = time[..., phase, GROUPS.index(group), rank_class]
        out[..., self.first_memory:] = self._memory_share(vector.rows)
        return out

    def _class_means(self, units: np.ndarray) -> np.ndarray:
        """[..., 9, W] -> [..., 8, C]: microseconds of groups of terms, mean over each class."""
        groups = self.model.group_us(units)
        return np.stack([groups[..., r].mean(axis=-1) for r in self.classes.ranks], axis=-1)

    def _memory_share(self, rows: np.ndarray) -> np.ndarray:
        """Load-vector rows [..., 23, W] -> share of the capacity of each domain class, then (if
        rows may lie in host memory) of each host class."""
        machine, classes = self.model.machine, self.classes
        groups = [(rows[..., Row.HELD, :], classes.of_domain, machine.domain,
                   machine.capacity_bytes)]
        if self.uses_host:
            groups.append((rows[..., Row.HOST_HELD, :], classes.of_host, machine.host,
                           machine.host_capacity_bytes))
        out = []
        for held, class_of, of_rank, capacity_bytes in groups:
            capacity = np.maximum(np.bincount(class_of, capacity_bytes), LEAST_CAPACITY)
            out += [held[..., class_of[of_rank] == k].sum(axis=-1) / capacity[k]
                    for k in range(capacity.size)]
        return np.stack(out, axis=-1)
