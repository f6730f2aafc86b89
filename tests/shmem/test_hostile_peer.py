"""A rank of another memory domain that asks for rows that there are not: an error, never a crash.

What it may send in a training step is fuzzed, see tests/fuzz/exchange.py.
"""

from __future__ import annotations

import pytest
import torch

from oper.errors import OperError
from oper.shmem.exchange.host import _served


@pytest.mark.parametrize("part, piece, slots", [
    (b"rows", 0, [0, 10]), (b"rows", 0, [-1]), (b"rows", 7, [0]), (b"\xff", 0, [0])])
def test_requests_for_rows_that_there_are_not(part: bytes, piece: int, slots: list[int]) -> None:
    shards = [torch.zeros(10, 4)]

    def serve(name: str, number: int) -> torch.Tensor:
        assert name == "rows"
        return shards[number]

    with pytest.raises(OperError, match="that there are not"):
        _served(serve, (part, piece), torch.tensor(slots), slice(0, 4))
    assert _served(serve, (b"rows\0\0", 0), torch.tensor([9]), slice(0, 4)).numel() == 16
    assert _served(serve, (b"rows\0\0", 0), torch.tensor([9]), slice(1, 3)).numel() == 8
    for columns in (slice(-1, 2), slice(2, 2), slice(3, 5)):
        with pytest.raises(OperError, match="that there are not"):
            _served(serve, (b"rows", 0), torch.tensor([9]), columns)
