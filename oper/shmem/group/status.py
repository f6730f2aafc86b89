"""Status codes of the kernels and their bindings; see Status in csrc/common/exchange.h."""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """Why a batch or an exchange failed; 0 means success. The C++ code uses the same numbers."""

    PEER_ENDED = 1
    PEER_LATE = 2
    SEND_BUFFER_FULL = 3
    ID_OUT_OF_RANGE = 4
    BAD_LENGTHS = 5
    PEER_ABORTED = 6
    TRANSPORT_FAILED = 7  # between memory domains; the exchange has stored its error
    OTHER_PHASE = 8
    IMPOSSIBLE_MESSAGE = 9
    BAD_BATCH = 10
    NO_MEMORY_FOR_MESSAGE = 11
    PEER_CLOSED = 12
    PEER_REFUSED_BATCH = 13
    BAG_OUT_OF_RANGE = 14
    OTHER_SETTINGS = 15
    REFUSED_BEFORE = 16  # device memory: refused in its lookup, whose error is no longer stored
    TOO_MANY_KEYS = 17  # device memory: the keys of a batch do not fit their lists
    TOO_MANY_IDS = 24  # device memory
    IDS_WITHOUT_BAGS = 25  # device memory


class Fault(IntEnum):
    """The property of a batch for which `BAD_BATCH` refuses it; numbers as `fault_of` in C++."""

    ELSEWHERE = 1
    IDS = 2
    LENGTHS = 3
    NUM_LENGTHS = 4
    KEY_OF = 5
    WEIGHTS = 6


#: Failures detected before the rank has sent anything to the others for this batch.
NOT_BEGUN = (Status.BAD_BATCH, Status.BAD_LENGTHS, Status.BAG_OUT_OF_RANGE, Status.TOO_MANY_IDS,
             Status.IDS_WITHOUT_BAGS)

#: Failures that `oper.shmem.group.desync` attributes to a rank.
PEER_FAILURES = (Status.PEER_ENDED, Status.PEER_LATE, Status.PEER_ABORTED, Status.OTHER_PHASE,
                 Status.PEER_CLOSED)
