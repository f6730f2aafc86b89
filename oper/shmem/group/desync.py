"""Fault attribution when ranks are not at the same phase: one verdict, the same on all ranks.

Every rank records in shared memory how often it has arrived at each collection's barrier, and for
which phase (csrc/host/barrier.h). A rank that waits in vain reads these records of all ranks and
collections of the group, so that ranks which look up collections in different orders reach the same
conclusion. It records its verdict before it raises, and later ranks repeat it.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from oper.errors import DeadlineError, DesyncError, PeerLostError
from oper.shmem.group.groups import Group
from oper.shmem.group.status import PEER_FAILURES, Status
from oper.shmem.protocol import Collection
from oper.shmem.settings import DEADLINE_ENV, deadline_s

# By number: CollectivePhase and kSharing of csrc/common/exchange.h, those of `barrier`, and kKeys.
PHASES = ("forward lookup",) * 3 + ("gradient exchange",) * 4 + (
    "state access", "migration", "update of keys")
FORWARD, GRADIENTS, STATE_ACCESS, MIGRATION = (0, 1, 2), 3, 7, 8
GIVEN_UP, _CLOSED = 1, 2  # Absence in csrc/host/barrier.h


class CollectivePhase(NamedTuple):
    """A collection, by its number, and one of its phases."""

    collection: int
    phase: int

    def pack(self) -> int:
        return (self.collection & 0xFFFFFF) << 8 | self.phase & 0xFF

    @staticmethod
    def unpack(number: int) -> CollectivePhase:
        return CollectivePhase(number >> 8 & 0xFFFFFF, number & 0xFF)


class Verdict(NamedTuple):
    """Which rank a failure is attributed to.

    Attributes:
        code: one of `PEER_FAILURES`.
        rank: the rank that is behind.
        at: where the others wait for it.
    """

    code: int
    rank: int
    at: CollectivePhase

    def pack(self) -> int:
        return 1 << 62 | self.code << 48 | self.rank << 32 | self.at.pack()

    @staticmethod
    def unpack(number: int) -> Verdict | None:
        if not number:
            return None
        return Verdict(number >> 48 & 0xFF, number >> 32 & 0xFFFF, CollectivePhase.unpack(number))


class BarrierState(NamedTuple):
    """What a rank has recorded at a collection's barrier, see ``Barrier::positions``.

    Attributes:
        arrivals: how often it has arrived.
        phase: the phase of its last arrival.
        absent: 0 = present; otherwise `GIVEN_UP`, or the code for closed tables.
        verdict: its packed verdict on who is behind, see `Verdict.pack`.
        begun, ended: numbers of updates of its rows begun and ended.
    """

    arrivals: int
    phase: int
    absent: int
    verdict: int
    begun: int
    ended: int


def barrier_states(handle: int) -> list[BarrierState]:
    """Barrier states of the ranks of this memory domain, by rank; empty with a single rank."""
    flat = torch.ops.oper.context_positions(handle)
    width = len(BarrierState._fields)
    return [BarrierState(*flat[k:k + width]) for k in range(0, len(flat), width)]


# ---- collections of a group ----------------------------------------------------------------------


class Register:
    """The collections of one group in this process, numbered in the order of their creation.

    The numbers agree on all ranks, since creation is collective.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._titles: dict[int, str] = {}
        self._live: weakref.WeakValueDictionary[int, Collection] = weakref.WeakValueDictionary()

    def add(self, tables: Collection) -> int:
        number = next(self._numbers)
        self._live[number] = tables
        self._titles[number] = _title(tables)
        return number

    def describe(self, at: CollectivePhase) -> str:
        """The name of a phase for error messages. `at` may be invalid, since it can come from a
        peer."""
        tables = self._live.get(at.collection)
        title = _title(tables) if tables is not None else self._titles.get(
            at.collection, f"unknown collection {at.collection}")
        phase = PHASES[at.phase] if at.phase < len(PHASES) else f"phase {at.phase}"
        return f"the {phase} of {title}"

    def barriers(self) -> dict[int, list[BarrierState]]:
        """Barrier states of all ranks, by collection, for the collections whose barriers can be
        read here."""
        found = {}
        for number, tables in sorted(self._live.items()):
            if not tables.is_watched:
                continue
            with contextlib.suppress(AttributeError, RuntimeError):  # not open yet, or closed
                if states := barrier_states(tables.handle):
                    found[number] = states
        return found

    def waits(self, rank: int) -> CollectivePhase | None:
        """Where a rank of this memory domain waits for others of the domain, or did when it gave
        up."""
        for number, states in self.barriers().items():
            mine = states[self._live[number].members.index(rank)]
            if _is_ahead(mine, states):
                return CollectivePhase(number, mine.phase)
        return None


def _is_ahead(state: BarrierState, states: list[BarrierState]) -> bool:
    """Whether a rank waits for another one at a collection, or did when it gave up."""
    return state.absent != _CLOSED and any(x.arrivals < state.arrivals for x in states)


def _title(tables: Collection) -> str:
    names = list(tables.specs)
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"collection {tables.name!r} (tables {listed})" if tables.name else f"tables {listed}"


_REGISTERS: weakref.WeakKeyDictionary[Any, Register] = weakref.WeakKeyDictionary()


def register_of(group: Group) -> Register:
    """The register of a group's collections; one for all that are made over a process group."""
    key: Any = group
    if hasattr(group, "process_group"):
        import torch.distributed as dist

        key = group.process_group or dist.group.WORLD
    return _REGISTERS.setdefault(key, Register())


@contextlib.contextmanager
def phase_of(tables: Collection, phase: int) -> Iterator[None]:
    """Set the phase to which barriers and reads of tables belong inside the block."""
    before, tables.phase = tables.phase, phase
    try:
        yield
    finally:
        tables.phase = before


# ---- who is behind -------------------------------------------------------------------------------


def attribute_failure(tables: Collection, code: int, rank: int) -> Verdict:
    """Attribute a failure seen at the barrier of `tables` to a rank.

    `code` and `rank` are what the barrier reported; the group is a single memory domain. The
    verdict is recorded for the other ranks.
    """
    barriers = register_of(tables.group).barriers()
    own, me = tables.collection, tables.group.rank
    if own not in barriers:  # closed meanwhile
        return Verdict(code, rank, CollectivePhase(own, STATE_ACCESS))
    here = CollectivePhase(own, barriers[own][me].phase)
    known = (None if code in (Status.OTHER_PHASE, Status.PEER_CLOSED)
             else _left_by_others(barriers, own, me, rank))
    if known is None and code == Status.PEER_LATE:
        # The verdict of a rank that waited elsewhere, for another rank.
        known = _first_verdict(state for states in barriers.values() for state in states)
    if known is not None:
        found = known
    elif code == Status.PEER_LATE:
        found = _latest(barriers, here, rank)
    elif code == Status.OTHER_PHASE:
        phases = [CollectivePhase(own, state.phase) for state in barriers[own]]
        found = out_of_step(code, phases, rank)
    else:
        found = Verdict(code, rank, here)
    torch.ops.oper.context_give_up(tables.handle, found.pack())
    return found


def _left_by_others(barriers: dict[int, list[BarrierState]], own: int, me: int, peer: int
                    ) -> Verdict | None:
    """A verdict already recorded: by this rank, or by the peer that it waits for, at any
    collection."""
    states = [barriers[own][me], barriers[own][peer], *(b[peer] for b in barriers.values())]
    states += [x for x in barriers[own] if x.absent == GIVEN_UP]
    return _first_verdict(states)


def _first_verdict(states: Iterable[BarrierState]) -> Verdict | None:
    return next((v for v in map(Verdict.unpack, (x.verdict for x in states)) if v), None)


def _latest(barriers: dict[int, list[BarrierState]], here: CollectivePhase, missed: int) -> Verdict:
    """Find the rank that is late.

    Of the ranks that wait for no other, that is the one with the fewest arrivals; if all wait, at
    different phases, one that is not at the most common phase.
    """
    size = len(barriers[here.collection])
    waits: list[CollectivePhase | None] = [None] * size
    for number, states in barriers.items():
        for r, state in enumerate(states):
            if _is_ahead(state, states):
                waits[r] = CollectivePhase(number, state.phase)
    arrivals = [sum(states[r].arrivals for states in barriers.values()) for r in range(size)]
    free = [r for r in range(size) if waits[r] is None]
    if not free:
        return out_of_step(Status.PEER_LATE, [w for w in waits if w], missed, arrivals)
    behind = min(free, key=lambda r: (arrivals[r], r))
    return Verdict(Status.PEER_LATE, behind, common_phase([w for w in waits if w] or [here]))


def out_of_step(code: int, phases: Sequence[CollectivePhase], missed: int,
                arrivals: Sequence[int] | None = None) -> Verdict:
    """The verdict where all ranks wait, each at one of `phases` [W].

    It names a rank that is not at the most common phase (see `common_phase`), or `missed` if all
    are at one phase.
    """
    common = common_phase(phases)
    others = [r for r, at in enumerate(phases) if at != common]
    behind = min(others, key=lambda r: (arrivals[r] if arrivals else 0, r), default=missed)
    return Verdict(code, behind, common)


def common_phase(phases: Sequence[CollectivePhase]) -> CollectivePhase:
    """The phase of most ranks; among equally common ones, that of the lowest rank."""
    return Counter(phases).most_common(1)[0][0]  # counted in order, and sorted stably


def raise_peer_failure(tables: Collection, code: int, detail: int) -> tuple[int, int]:
    """Raise the error for a status code about peers; other codes are returned with their detail."""
    if code in PEER_FAILURES:
        verdict = attribute_failure(tables, code, detail)
        raise_verdict(verdict, tables.group, last_seen(tables, verdict.rank))
    return code, detail


# ---- telling -------------------------------------------------------------------------------------


def last_seen(tables: Collection, rank: int) -> str:
    """What a rank was seen to do, for a message; "" if this rank cannot see it."""
    register = register_of(tables.group)
    if not tables.is_one_domain:
        return ""
    at = register.waits(rank)
    states = register.barriers().get(tables.collection, [])
    if at is not None:
        return f"it waits in {register.describe(at)}; "
    if rank < len(states) and states[rank].arrivals:
        state = states[rank]
        at = CollectivePhase(tables.collection, state.phase)
        return f"it was last seen in {register.describe(at)}; "
    return ""


def raise_verdict(verdict: Verdict, group: Group, seen: str = "", detail: str = "") -> NoReturn:
    """Raise the error that a verdict stands for, naming the rank.

    Args:
        verdict: who is behind.
        group: the ranks.
        seen: what that rank was seen to do, ending in ``"; "``, or nothing.
        detail: detail of the error that caused this one.
    """
    code, rank, at = verdict
    phase = register_of(group).describe(at)
    who = "this rank" if rank == group.rank else "a peer"
    tail = f" ({detail})" if detail else ""
    same = f"{seen}every rank must run the same lookups and training steps in the same order{tail}"
    error: PeerLostError | DeadlineError | DesyncError
    if code == Status.PEER_LATE:
        error = DeadlineError(f"{who} did not arrive at {phase}", "rank", rank,
                              f"arrival within {DEADLINE_ENV}={deadline_s():g} s", same)
    elif code == Status.OTHER_PHASE:
        error = DesyncError(f"{who} is not at {phase}", "rank", rank, "all ranks at the same call",
                            same)
    else:
        what: dict[int, str] = {Status.PEER_ENDED: "a peer process has ended",
                                Status.PEER_CLOSED: f"{who} has closed its tables"}
        error = PeerLostError(f"{what.get(code, f'{who} has given up this exchange')} before "
                              f"{phase}", "rank", rank,
                              "all ranks alive" if code == Status.PEER_ENDED
                              else "no error on any rank",
                              f"{seen}look at that rank's log and start all ranks again{tail}")
    error.rank = rank
    raise error
