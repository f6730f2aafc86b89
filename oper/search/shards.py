"""Pushed shards on ranks: the state that `packing` searches, by its loads alone.

A shard is a column piece of a table's pushed rows on one owner. Its load on the owner is linear in
its width, plus what every id stream costs; readers feel only the sum over shards. Pulled and
replicated rows are divisible, so that here they load all ranks of a class alike. A state is
therefore a matrix of loads by rank and (phase, group), which a change touches in two rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from oper.search.cost import HELD, NUM_ROWS, PARTIALS, Tally
from oper.search.machine import GROUPS
from oper.search.owner_rows import PUSH
from oper.search.pieces import COLUMN_STEP, MIN_COLUMNS, own_load
from oper.search.problem import IDS
from oper.search.recipes import Recipe, RecipeBook

MAX_PARTS = 8  # owners among which a pushed piece is dealt by rows, at most
_POWER = 12  # of the spread that breaks ties
_SPREAD = 0.02  # and its weight
_OVERFLOW = 1e3


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What a table asks under one recipe.

    Attributes:
        stay: float64 [C, G], load of the rows that are not pushed, by class.
        own: float64 [M, C, G], load of a column on its owner, dealt among 1, 2, ... M owners.
        own_stream: float64 [M, C, G], load of an id stream on its owner.
        read: float64 [M, C, C, G], what a column owned in a class puts on the readers by class.
        read_stream: float64 [M, C, C, G], the same for an id stream.
    """

    stay: np.ndarray
    own: np.ndarray
    own_stream: np.ndarray
    read: np.ndarray
    read_stream: np.ndarray

    @property
    def pushes(self) -> bool:
        """Whether any row is pushed."""
        return bool(self.own.size)


class Loads:
    """Loads of recipes and shards on ranks of a relaxation.

    Attributes:
        book: the recipes.
        class_of: int64 [W].
        num_phases: phases P; a load has G = 5 P + 1 entries, the last is the share of memory.
    """

    def __init__(self, book: RecipeBook) -> None:
        self.book, self.relaxation = book, book.relaxation
        self.model = self.relaxation.model
        self.class_of = self.relaxation.classes.of_rank
        ranks = self.relaxation.classes.ranks
        self.num_classes, self.num_phases = len(ranks), len(self.model.phases)
        self.size = np.array([r.size for r in ranks], float)
        self.num_loads = self.num_phases * len(GROUPS) + 1
        # Own load of a unit of a tally row, and what it puts on each class's readers.
        self.own_unit = np.zeros((self.num_classes, NUM_ROWS, self.num_loads))
        self.own_unit[..., :-1] = own_load(self.model, [int(r[0]) for r in ranks]).reshape(
            self.num_classes, NUM_ROWS, -1)
        machine = self.model.machine
        for c, r in enumerate(ranks):
            room = machine.capacity_bytes[machine.domain[r[0]]] / machine.num_near[r[0]]
            self.own_unit[c, HELD, -1] = 1.0 / max(room, 1e-3)
        self.read_unit = self.by_class(self.relaxation.unit)  # [C, 12, C, G], own load included
        for c in range(self.num_classes):
            self.read_unit[c, :, c] -= self.own_unit[c] / self.size[c]
        self._works: dict[tuple[int, Recipe], Work] = {}

    def by_class(self, rows: np.ndarray) -> np.ndarray:
        """Resource rows (float64 [..., R]) as loads by class; float64 [..., C, G]."""
        out = np.zeros((*rows.shape[:-1], self.num_classes, self.num_loads))
        names = self.relaxation.row_names
        for n, (phase, group, c) in enumerate(names):
            out[..., c, phase * len(GROUPS) + GROUPS.index(group)] = rows[..., n]
        machine, classes = self.model.machine, self.relaxation.classes
        memory = self.relaxation.num_rows - classes.num_domain_classes
        for c, ranks in enumerate(classes.ranks):
            out[..., c, -1] = rows[..., memory + classes.of_domain[machine.domain[ranks[0]]]]
        return out

    def work(self, k: int, recipe: Recipe) -> Work:
        """What table `k` asks under `recipe`."""
        key = (k, recipe)
        if key not in self._works:
            self._works[key] = self._work(k, recipe)
        return self._works[key]

    def _work(self, k: int, recipe: Recipe) -> Work:
        t, relaxation = self.relaxation.tables[k], self.relaxation
        amount = self.book.amount(t, recipe)
        pushed = np.array([o.kind == PUSH for o in relaxation.options], bool)
        features = amount[pushed].sum(axis=0)
        amount[pushed] = 0.0
        one = np.ones(1)
        stay = self.by_class(relaxation.resources_of(amount[None], np.array([k]), one, one)[0])
        none = np.zeros(0)
        if features[IDS] <= 0 and not features.any():
            return Work(stay, none, none, none, none)
        first = [int(r[0]) for r in relaxation.classes.ranks]
        each = np.arange(self.num_classes)
        owner = np.zeros((self.num_classes, 4, self.class_of.size))
        owner[each, :, first] = features
        dim = t.spec.dim
        once, twice = (self.model.push_rows(t, w, owner)[each, :, first] for w in (dim, 2 * dim))
        parts = np.arange(1, MAX_PARTS + 1)
        sums = self.model.partial_bytes(t, dim, features[IDS] / parts) / dim  # [M]
        column = ((twice - once) / dim)[None] / parts[:, None, None]  # [M, C, 12]
        column[:, :, PARTIALS] += sums[:, None]
        stream = (2 * once - twice)[None] / parts[:, None, None]
        return Work(stay, np.einsum("mcq,cqg->mcg", column, self.own_unit),
                    np.einsum("mcq,cqg->mcg", stream, self.own_unit),
                    np.einsum("mcq,cqdg->mcdg", column, self.read_unit),
                    np.einsum("mcq,cqdg->mcdg", stream, self.read_unit))

    @cached_property
    def base(self) -> np.ndarray:
        """What every plan puts on each rank; float64 [W, G]."""
        model, tally = self.model, self.relaxation.base_tally
        seconds = model.units(Tally(tally.rows, tally.partial_replicas))
        units = seconds * model.machine.seconds_per_unit * 1e6
        local = units[:, :2].sum(axis=1, keepdims=True)
        groups = np.concatenate([local, units[:, 2:]], axis=1)  # [P, 5, W]
        out = np.zeros((self.class_of.size, self.num_loads))
        groups -= 1e6 * model.hidden[:, None]  # beyond the dense compute that hides it
        out[:, :-1] = groups.reshape(-1, self.class_of.size).T
        machine = model.machine
        held = machine.per_domain(tally.rows[HELD]) / np.maximum(machine.capacity_bytes, 1e-3)
        out[:, -1] = held[machine.domain]
        return out

    def step_us(self, peak: np.ndarray) -> np.ndarray:
        """Step, dearer where memory overflows, of peaks over ranks (float64 [..., G])."""
        phases = peak[..., :-1].reshape(*peak.shape[:-1], self.num_phases, len(GROUPS))
        over = np.maximum(peak[..., -1] - 1.0, 0.0)
        return np.asarray(np.maximum(phases.max(axis=-1), 0.0).sum(axis=-1)
                          * (1.0 + _OVERFLOW * over))

    def busy(self, load: np.ndarray) -> np.ndarray:
        """Busiest group by phase; float64 [..., G] -> [..., P]."""
        shape = (*load.shape[:-1], self.num_phases, len(GROUPS))
        return np.maximum(load[..., :-1].reshape(shape).max(axis=-1), 0.0)


class Shards:
    """A state: a recipe per table, and its pushed shards on ranks.

    Attributes:
        recipe: per table.
        parts: int64 [T], owners among which each column piece is dealt by rows.
        table, width, rank: int64 [S], the shards; pieces dealt among several owners are several
            shards of one `piece` number.
        load: float64 [W, G], without the readers' part.
        every: float64 [C, G], what all ranks of a class carry alike.
        column, stream: float64 [T, C, G], load of a column and of an id stream on their owner.
        column_read, stream_read: float64 [T, C, C, G], the same on readers.
    """

    def __init__(self, loads: Loads, recipes: list[Recipe]) -> None:
        self.loads = loads
        self.recipe = list(recipes)
        self.parts = np.ones(len(recipes), np.int64)
        self.table, self.width, self.rank, self.piece = np.zeros((4, 0), np.int64)
        self.load = loads.base.copy()
        self.every = np.zeros((loads.num_classes, loads.num_loads))
        shape = (len(recipes), loads.num_classes)
        self.column, self.stream = np.zeros((2, *shape, loads.num_loads))
        self.column_read, self.stream_read = np.zeros((2, *shape, *shape[1:], loads.num_loads))
        for k in range(len(recipes)):
            self.every += self.work(k).stay
            self._renew(k)
        self._next = 0

    def copy(self) -> Shards:
        """A state that can be changed without changing this one."""
        other = Shards.__new__(Shards)
        other.__dict__.update(self.__dict__)
        other.recipe = list(self.recipe)
        for name in ("parts", "table", "width", "rank", "piece", "load", "every", "column",
                     "stream", "column_read", "stream_read"):
            setattr(other, name, getattr(self, name).copy())
        return other

    def work(self, k: int) -> Work:
        """What table `k` asks."""
        return self.loads.work(k, self.recipe[k])

    def _renew(self, k: int) -> None:
        w, m = self.work(k), self.parts[k] - 1
        if w.pushes:
            self.column[k], self.stream[k] = w.own[m], w.own_stream[m]
            self.column_read[k], self.stream_read[k] = w.read[m], w.read_stream[m]

    def set_parts(self, k: int, parts: int) -> None:
        """Deal the pieces of table `k`, which has no shards now, among `parts` owners each."""
        self.parts[k] = parts
        self._renew(k)

    def own(self, k: np.ndarray | int, width: np.ndarray | int,
            rank: np.ndarray | int) -> np.ndarray:
        """Load of shards of tables `k` on their owners; float64 [..., G]."""
        c = self.loads.class_of[rank]
        return np.asarray(np.asarray(width)[..., None] * self.column[k, c] + self.stream[k, c])

    def read(self, k: np.ndarray | int, width: np.ndarray | int,
             rank: np.ndarray | int) -> np.ndarray:
        """Load of shards of tables `k` on readers by class; float64 [..., C, G]."""
        c = self.loads.class_of[rank]
        wide = np.asarray(width)[..., None, None]
        return np.asarray(wide * self.column_read[k, c] + self.stream_read[k, c])

    def total(self) -> np.ndarray:
        """float64 [W, G], loads of all ranks."""
        return self.load + self.every[self.loads.class_of]

    def score(self) -> float:
        """Step (us) and the spread that breaks ties."""
        total = self.total()
        busy = self.loads.busy(total)
        spread = ((busy / np.maximum(busy.max(axis=0), 1e-30)) ** _POWER).mean(axis=0)
        return float(self.loads.step_us(total.max(axis=0))
                     + _SPREAD * (busy.max(axis=0) * spread).sum())

    @property
    def step_us(self) -> float:
        """Modelled step without fixed costs."""
        return float(self.loads.step_us(self.total().max(axis=0)))

    def mine(self, k: int) -> np.ndarray:
        """Indices of table `k`'s shards."""
        return np.flatnonzero(self.table == k)

    def add(self, k: int, width: int, rank: int, piece: int | None = None) -> int:
        """Add a shard; returns its piece number."""
        if piece is None:
            piece, self._next = self._next, self._next + 1
        self.load[rank] += self.own(k, width, rank)
        self.every += self.read(k, width, rank)
        self.table = np.append(self.table, k)
        self.width = np.append(self.width, width)
        self.rank = np.append(self.rank, rank)
        self.piece = np.append(self.piece, piece)
        return piece

    def drop(self, index: np.ndarray | list[int]) -> None:
        """Remove shards."""
        for i in np.atleast_1d(np.asarray(index, np.int64)).tolist():
            k, width, rank = int(self.table[i]), int(self.width[i]), int(self.rank[i])
            self.load[rank] -= self.own(k, width, rank)
            self.every -= self.read(k, width, rank)
        keep = np.ones(self.table.size, bool)
        keep[index] = False
        for name in ("table", "width", "rank", "piece"):
            setattr(self, name, getattr(self, name)[keep])

    def resize(self, i: int, width: int, rank: int) -> None:
        """Give shard `i` another width and owner."""
        k = int(self.table[i])
        for sign, w, r in ((-1, int(self.width[i]), int(self.rank[i])), (1, width, rank)):
            self.load[r] += sign * self.own(k, w, r)
            self.every += sign * self.read(k, w, r)
        self.width[i], self.rank[i] = width, rank

    def retier(self, k: int, recipe: Recipe) -> None:
        """Another recipe for table `k`, its shards as they are (dropped when nothing is pushed)."""
        mine = self.mine(k)
        old = [(int(self.width[i]), int(self.rank[i])) for i in mine]
        for width, rank in old:
            self.load[rank] -= self.own(k, width, rank)
            self.every -= self.read(k, width, rank)
        self.every += self.loads.work(k, recipe).stay - self.work(k).stay
        self.recipe[k] = recipe
        self._renew(k)
        if not self.work(k).pushes:
            keep = self.table != k
            for name in ("table", "width", "rank", "piece"):
                setattr(self, name, getattr(self, name)[keep])
            return
        for width, rank in old:
            self.load[rank] += self.own(k, width, rank)
            self.every += self.read(k, width, rank)

    def clear(self, k: int) -> None:
        """Remove all shards of table `k`."""
        mine = self.mine(k)
        if mine.size:
            self.drop(mine)

    def layout(self) -> dict[int, list[tuple[int, tuple[int, ...]]]]:
        """By table, its pieces: columns, and the ranks that own them."""
        out: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        for piece in dict.fromkeys(self.piece[np.lexsort((self.piece, self.table))].tolist()):
            at = np.flatnonzero(self.piece == piece)
            out.setdefault(int(self.table[at[0]]), []).append(
                (int(self.width[at[0]]), tuple(self.rank[at].tolist())))
        return out

    def may_split(self, k: int) -> bool:
        """Whether table `k` may be cut by columns."""
        dim = self.loads.relaxation.tables[k].spec.dim
        return ("columns" in self.loads.model.problem.allow and dim % COLUMN_STEP == 0
                and dim >= 2 * MIN_COLUMNS)
