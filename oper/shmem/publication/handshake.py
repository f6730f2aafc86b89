"""The handshake by which a reader of published tables finds its publisher.

A publisher listens on an abstract socket named after its user and name. It sends `HANDSHAKE`, the
descriptors of its segments, and a JSON text.
"""

from __future__ import annotations

import os
import socket
import struct
import time

from oper.errors import InvalidInputError, OperError
from oper.shmem.group.connections import receive
from oper.shmem.group.domains import peer_credentials

MAGIC = b"OPERPUB1"
HANDSHAKE = struct.Struct("<8sI")  # magic, bytes of the text that follows
_MAX_TEXT = 1 << 30
_MAX_FDS = 253  # the kernel's limit per message
_RETRY_S = 0.02


def check_name(name: str) -> str:
    """Return `name` if it is valid for a publication; raises InvalidInputError otherwise."""
    allowed = isinstance(name, str) and 1 <= len(name) <= 64 and all(
        c.isascii() and (c.isalnum() or c in "._-") for c in name)
    if not allowed:
        raise InvalidInputError("invalid name of a publication", "name", name,
                                "1 to 64 characters of A-Z a-z 0-9 . _ -", "choose another name")
    return name


def socket_name(name: str) -> str:
    """Return the name of the abstract socket of this user's publication `name`."""
    return f"\0oper-publication-{os.getuid()}-{name}"


def connect(name: str, timeout_s: float) -> socket.socket:
    """Connect to this user's publisher of that name; raises OperError if there is none."""
    deadline = time.monotonic() + timeout_s
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(max(timeout_s, 1.0))
            connection.connect(socket_name(name))
            if peer_credentials(connection)[1] == os.getuid():
                return connection
            reason = "another user has taken this name"
        except OSError as error:
            reason = str(error)
        connection.close()
        if time.monotonic() >= deadline:
            raise OperError("no such publication", "name", name,
                            f"a publisher of this user on this host within {timeout_s:g} s",
                            f"start one with oper.publish ({reason})")
        time.sleep(_RETRY_S)


def receive_handshake(connection: socket.socket) -> tuple[str, list[int]]:
    """Receive a publisher's handshake text and the descriptors of its segments.

    Raises:
        OperError: the publisher has closed the connection, or does not answer in time.
        ValueError: the message is not a handshake of this version.
    """
    fds: list[int] = []
    try:
        head, received, _, _ = socket.recv_fds(connection, HANDSHAKE.size, _MAX_FDS)
        fds = list(received)
        text, size = b"", HANDSHAKE.size
        if len(head) == size:
            magic, size = HANDSHAKE.unpack(head)
            if magic != MAGIC or size > _MAX_TEXT:
                raise ValueError(f"handshake {magic!r}")
            text = receive(connection, size)
        if len(text) < size:
            raise OperError("a publisher closed the connection", "missing bytes", size - len(text),
                            "0", "attach again, or check the publisher's log")
        return text.decode(), fds
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        if not isinstance(error, OSError):
            raise
        raise OperError("cannot attach to a publisher", "handshake", str(error),
                        "a complete handshake in time", "check that the publisher runs") from None
