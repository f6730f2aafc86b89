"""Fault attribution when ranks are not at the same phase: one verdict, the same on all ranks.

Every rank records in shared memory how often it has arrived at each collection's barrier, and for
which phase (csrc/host/barrier.h). A rank whose wait fails reads these records for all ranks and
collections of the group, because ranks may wait at different collections, and determines which rank
is behind. It records this verdict before it raises, and other ranks adopt a recorded verdict.
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

# Names of phases, by number: CollectivePhase and kSharing of csrc/common/exchange.h, STATE_ACCESS,
# MIGRATION, KEYS (kKeys of the same file), and SYNCHRONIZATION.
PHASES = ("forward lookup",) * 3 + ("gradient exchange",) * 4 + (
    "state access", "migration", "update of keys", "synchronization of replica groups")
FORWARD, GRADIENTS, STATE_ACCESS, MIGRATION, KEYS, SYNCHRONIZATION = (0, 1, 2), 3, 7, 8, 9, 10
GIVEN_UP, _CLOSED = 1, 2  # Absence in csrc/host/barrier.h


class CollectivePhase(NamedTuple):
    """A phase of a collection: number of the collection in its `Register`, index in `PHASES`."""

    collection: int
    phase: int

    def pack(self) -> int:
        return (self.collection & 0xFFFFFF) << 8 | self.phase & 0xFF

    @staticmethod
    def unpack(number: int) -> CollectivePhase:
        return CollectivePhase(number >> 8 & 0xFFFFFF, number & 0xFF)


class Verdict(NamedTuple):
    """The attribution of a failure to a rank.

    Attributes:
        code: one of `PEER_FAILURES`.
        rank: the rank to which the failure is attributed.
        at: the phase in which the other ranks wait for it.
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
    """The record of one rank at a collection's barrier, see ``Barrier::positions``.

    Attributes:
        arrivals: number of the rank's arrivals at the barrier.
        phase: index in `PHASES` of its last arrival.
        absent: 0 = present; otherwise `GIVEN_UP`, or `_CLOSED` if it has closed its tables.
        verdict: the rank's verdict (`Verdict.pack`), or 0.
        begun, ended: number of updates of its rows that the rank has begun and ended.
        refuses: 1 if all ranks skip what follows its last arrival, else 0.
    """

    arrivals: int
    phase: int
    absent: int
    verdict: int
    begun: int
    ended: int
    refuses: int


def barrier_states(handle: int) -> list[BarrierState]:
    """Return the barrier states of the ranks of this memory domain; empty with a single rank."""
    flat = torch.ops.oper.context_positions(handle)
    width = len(BarrierState._fields)
    return [BarrierState(*flat[k:k + width]) for k in range(0, len(flat), width)]


# ---- collections of a group ----------------------------------------------------------------------


class Register:
    """The collections of one group in this process, numbered in the order of their creation.

    Creation is collective, so a collection has the same number on all ranks.
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
        """Return the name of a phase for error messages; invalid phases, which a peer might send,
        are named by their numbers."""
        tables = self._live.get(at.collection)
        title = _title(tables) if tables is not None else self._titles.get(
            at.collection, f"unknown collection {at.collection}")
        phase = PHASES[at.phase] if at.phase < len(PHASES) else f"phase {at.phase}"
        return f"the {phase} of {title}"

    def barriers(self) -> dict[int, list[BarrierState]]:
        """Return the barrier states of all ranks by number of the collection, for all collections
        whose barriers this process can read."""
        return {number: states for number, _, states in self._watched()}

    def waits(self, rank: int) -> CollectivePhase | None:
        """Return the phase in which a rank of this memory domain waits for other ranks of the
        domain, or waited when it aborted; None if it does not wait."""
        for number, tables, states in self._watched():
            mine = states[tables.members.index(rank)]
            if _is_ahead(mine, states):
                return CollectivePhase(number, mine.phase)
        return None

    def _watched(self) -> Iterator[tuple[int, Collection, list[BarrierState]]]:
        """Yield number, tables and barrier states of the collections whose barriers this process
        can read, in the order of their numbers."""
        # A list of references, since other threads may create and drop collections meanwhile.
        for reference in self._live.valuerefs():
            tables = reference()
            if tables is None or not tables.is_watched:
                continue
            states: list[BarrierState] = []
            with contextlib.suppress(AttributeError, RuntimeError):  # not open yet, or closed
                states = barrier_states(tables.handle)
            if states:
                yield reference.key, tables, states


def _is_ahead(state: BarrierState, states: list[BarrierState]) -> bool:
    """Return whether a rank waits for another rank at a barrier, or waited when it aborted."""
    return state.absent != _CLOSED and any(x.arrivals < state.arrivals for x in states)


def _title(tables: Collection) -> str:
    names = list(tables.specs)
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"collection {tables.name!r} (tables {listed})" if tables.name else f"tables {listed}"


_REGISTERS: weakref.WeakKeyDictionary[Any, Register] = weakref.WeakKeyDictionary()


def register_of(group: Group) -> Register:
    """Return the register of a group; all `Group` objects of a process group share one."""
    return _REGISTERS.setdefault(getattr(group, "handle", group), Register())


@contextlib.contextmanager
def phase_of(tables: Collection, phase: int) -> Iterator[None]:
    """Set `tables.phase`, by which errors name barriers and reads, inside the block."""
    before, tables.phase = tables.phase, phase
    try:
        yield
    finally:
        tables.phase = before


# ---- who is behind -------------------------------------------------------------------------------


def attribute_failure(tables: Collection, code: int, rank: int) -> Verdict:
    """Attribute a failure at the barrier of `tables` to a rank, and record the verdict.

    Args:
        tables: the tables, whose group is a single memory domain.
        code, rank: status code and rank that the barrier returned.
    """
    barriers = register_of(tables.group).barriers()
    own, me = tables.collection, tables.group.rank
    if own not in barriers:  # the tables have been closed
        return Verdict(code, rank, CollectivePhase(own, STATE_ACCESS))
    here = CollectivePhase(own, barriers[own][me].phase)
    known = (None if code in (Status.OTHER_PHASE, Status.PEER_CLOSED)
             else _recorded_verdict(barriers, own, me, rank))
    if known is None and code == Status.PEER_LATE:
        # A rank that waited at another collection may have recorded a verdict.
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
    torch.ops.oper.context_abort(tables.handle, found.pack())
    return found


def _recorded_verdict(barriers: dict[int, list[BarrierState]], own: int, me: int, peer: int
                      ) -> Verdict | None:
    """Return a verdict that rank `me` or a rank that aborted has recorded at collection `own`, or
    that rank `peer` has recorded at any collection; None if there is none."""
    states = [barriers[own][me], barriers[own][peer], *(b[peer] for b in barriers.values())]
    states += [x for x in barriers[own] if x.absent == GIVEN_UP]
    return _first_verdict(states)


def _first_verdict(states: Iterable[BarrierState]) -> Verdict | None:
    return next((v for v in map(Verdict.unpack, (x.verdict for x in states)) if v), None)


def _latest(barriers: dict[int, list[BarrierState]], here: CollectivePhase, missed: int) -> Verdict:
    """Find the rank that is late.

    Among ranks that wait for no other rank, this is the rank with the fewest arrivals. If all ranks
    wait, it is one that is not at the most common phase (`out_of_step`).

    Args:
        barriers: see `Register.barriers`.
        here: the phase in which this rank has waited.
        missed: the rank for which its barrier has waited.
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
    """Return the verdict if all ranks wait for each other.

    It names a rank that is not at the most common phase (`common_phase`).

    Args:
        code: one of `PEER_FAILURES`.
        phases: the phase in which each rank waits, by rank.
        missed: the rank to name if all ranks are at the same phase.
        arrivals: number of barrier arrivals by rank; of several ranks at other phases, the one with
            the fewest is named. None = the lowest rank.
    """
    common = common_phase(phases)
    others = [r for r, at in enumerate(phases) if at != common]
    behind = min(others, key=lambda r: (arrivals[r] if arrivals else 0, r), default=missed)
    return Verdict(code, behind, common)


def common_phase(phases: Sequence[CollectivePhase]) -> CollectivePhase:
    """Return the most common phase; among equally common ones, the lowest rank's."""
    return Counter(phases).most_common(1)[0][0]  # of equal counts, the first in the list


def raise_peer_failure(tables: Collection, code: int, detail: int) -> tuple[int, int]:
    """Raise the error for a status code in `PEER_FAILURES`; returns other codes and `detail`."""
    if code in PEER_FAILURES:
        verdict = attribute_failure(tables, code, detail)
        raise_verdict(verdict, tables.group, last_seen(tables, verdict.rank))
    return code, detail


# ---- error messages ------------------------------------------------------------------------------


def last_seen(tables: Collection, rank: int) -> str:
    """Describe the last known activity of a rank for a message; "" if it is not known."""
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
    """Raise the error for a verdict; its message and `rank` attribute name the rank.

    Args:
        verdict: the verdict.
        group: the ranks.
        seen: the rank's last known activity (`last_seen`), ending in ``"; "``, or "".
        detail: text of the error that caused this one, or "".
    """
    code, rank, at = verdict
    phase = register_of(group).describe(at)
    who = "this rank" if rank == group.rank else "a peer"
    tail = f" ({detail})" if detail else ""
    same = f"{seen}every rank must run the same lookups and training steps in the same order{tail}"
    if code == Status.PEER_LATE:
        raise DeadlineError(f"{who} did not arrive at {phase}", "rank", rank,
                            f"arrival within {DEADLINE_ENV}={deadline_s():g} s", same)
    if code == Status.OTHER_PHASE:
        raise DesyncError(f"{who} is not at {phase}", "rank", rank, "all ranks at the same call",
                          same)
    what: dict[int, str] = {Status.PEER_ENDED: "a peer process has ended",
                            Status.PEER_CLOSED: f"{who} has closed its tables"}
    raise PeerLostError(
        f"{what.get(code, f'{who} has aborted this exchange')} before {phase}", "rank", rank,
        "all ranks alive" if code == Status.PEER_ENDED else "no error on any rank",
        f"{seen}look at that rank's log and start all ranks again{tail}")
