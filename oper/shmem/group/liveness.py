"""Liveness monitor: TCP connections between all ranks of a group, used to identify failed ranks.

A collective that waits for a dead or stalled peer does not report which peer it is. Every pair of
ranks therefore keeps one TCP connection: the kernel closes it when a process exits, a rank that
aborts reports this over it, and a rank that has waited too long requests the peers' progress.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading

from oper.shmem.group.connections import connect, receive
from oper.shmem.group.desync import (
    CollectivePhase,
    Verdict,
    common_phase,
    out_of_step,
    register_of,
)
from oper.shmem.group.groups import Group
from oper.shmem.group.status import Status

_MESSAGE = struct.Struct("<4sqq")  # kind and two numbers
_ASK, _ANSWER, _GAVE_UP, _LEAVE = b"ask?", b"tell", b"gave", b"bye."
_ANSWER_S = 1.0
_WAITS = 1 << 40  # flag in addition to a packed phase


class LivenessMonitor:
    """Connections to all other ranks of a group. Creation is collective.

    Attributes:
        count: number of exchanges that this rank has begun; set by the transport.
        at: phase of the last exchange; set by the transport.
        is_inside: whether that exchange is under way; set by the transport.
        failure: the first verdict on a rank that no longer takes part, or None.
        left: ranks that have closed their connections properly. This is not a failure, since other
            ranks may still complete exchanges for which these ranks have sent all data.
    """

    def __init__(self, group: Group) -> None:
        self.count = 0
        self.at = CollectivePhase(0, 0)
        self.is_inside = False
        self.failure: Verdict | None = None
        self.left: set[int] = set()
        self._is_closed = False
        self._group = group
        self._peers = connect(group)
        # Answers of peers to `_ASK`: number of exchanges begun, phase, and whether they wait there.
        self._answers: dict[int, tuple[int, CollectivePhase, bool]] = {}
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._listen, name="oper-liveness", daemon=True)
        self._thread.start()

    # ---- listening -------------------------------------------------------------------------------

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, peer in self._peers.items():
                selector.register(peer, selectors.EVENT_READ, rank)
            while selector.get_map() and not self._is_closed:
                for key, _ in selector.select():
                    assert isinstance(key.fileobj, socket.socket)
                    if not self._receive(key.data, key.fileobj):
                        selector.unregister(key.fileobj)

    def close(self) -> None:
        """Notify the peers, end the thread, and close the connections. Not collective."""
        self._is_closed = True
        for rank, peer in self._peers.items():
            self._send(rank, _LEAVE, 0, 0)
            with contextlib.suppress(OSError):  # the peer has ended
                peer.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if threading.current_thread() is not self._thread:  # a finalizer may run on any thread
            self._thread.join()
        for peer in self._peers.values():
            peer.close()

    def _receive(self, rank: int, peer: socket.socket) -> bool:
        """Handle a message of a peer; returns False if its connection has ended."""
        try:
            what, a, b = _MESSAGE.unpack(receive(peer, _MESSAGE.size))
        except (OSError, struct.error):
            if not self._is_closed:
                self._record(Verdict(Status.PEER_ENDED, rank, self.at))
            return False
        if what == _LEAVE:
            with self._changed:
                self.left.add(rank)
                self._changed.notify_all()
            return False
        if what == _ASK:
            at, waits = self._status()
            self._send(rank, _ANSWER, self.count, at.pack() + _WAITS * waits)
        elif what == _GAVE_UP:
            self._record(Verdict.unpack(int(a)) or Verdict(Status.PEER_ABORTED, rank, self.at))
        else:
            with self._changed:
                self._answers[rank] = int(a), CollectivePhase.unpack(int(b)), bool(b & _WAITS)
                self._changed.notify_all()
        return True

    def _status(self) -> tuple[CollectivePhase, bool]:
        """Return this rank's phase, and whether it waits there: in an exchange, or at a barrier of
        its memory domain."""
        if self.is_inside:
            return self.at, True
        waiting = register_of(self._group).waits(self._group.rank)
        return (self.at, False) if waiting is None else (waiting, True)

    def _record(self, failure: Verdict) -> None:
        with self._changed:
            self.failure = self.failure or failure
            self._changed.notify_all()

    def _send(self, rank: int, what: bytes, a: int, b: int) -> None:
        with contextlib.suppress(OSError):
            self._peers[rank].sendall(_MESSAGE.pack(what, a, b))

    # ---- finding the failed rank -----------------------------------------------------------------

    def wait_for_failure(self, seconds: float, of: int = -1) -> Verdict | None:
        """Wait up to `seconds` for a verdict, or until the rank `of` has left; returns `failure`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or of in self.left, seconds)
            return self.failure

    def find_late(self, missed: int) -> Verdict:
        """Determine which rank is late by requesting the progress of all peers.

        The late rank is the first of these that exists: the lowest rank that does not answer within
        a second; a rank that has begun fewer exchanges than this one, preferably one that is not
        waiting; a rank in another phase than most ranks; `missed`, the rank that the caller awaits.
        A verdict that a peer has sent takes precedence.
        """
        with self._changed:
            self._answers.clear()
        for rank in self._peers:
            self._send(rank, _ASK, 0, 0)
        with self._changed:
            self._changed.wait_for(lambda: len(self._answers) == len(self._peers), _ANSWER_S)
            answers = dict(self._answers)
        answers[self._group.rank] = self.count, *self._status()
        ranks = sorted(answers)
        silent = [r for r in self._peers if r not in answers]
        late = sorted((r for r in ranks if answers[r][0] < self.count),
                      key=lambda r: (answers[r][2], answers[r][0], r))
        if silent or late:
            behind = min(silent) if silent else late[0]
            waited = [answers[r][1] for r in ranks if answers[r][2] and r != behind]
            found = Verdict(Status.PEER_LATE, behind, common_phase(waited or [self.at]))
        else:
            found = out_of_step(Status.PEER_LATE, [answers[r][1] for r in ranks], missed)
        # A peer that aborted in the meantime has reported its own verdict, which takes precedence.
        return self.failure or found

    def abort(self, verdict: Verdict) -> None:
        """Notify all peers that this rank no longer takes part, and of its verdict; its own next
        exchange, of any collection, fails too."""
        self._record(verdict)
        for rank in self._peers:
            self._send(rank, _GAVE_UP, verdict.pack(), 0)
