"""Bits of messages as users give them, in plans, and the resulting bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oper.errors import InvalidInputError
from oper.messages import EXACT, MessageBits, number_bytes
from oper.plan import Plan
from oper.tables import TableSpec
from tests.support import mixed_plan


@pytest.mark.parametrize("value, found", [
    (32, EXACT), (8, MessageBits(8, 8)), ((16, 8), MessageBits(16, 8)), ([8, 32], MessageBits(8)),
    (MessageBits(16, 32), MessageBits(16, 32))])
def test_bits_are_for_both_directions_or_for_each(value: Any, found: MessageBits) -> None:
    assert MessageBits.parse(value) == found == MessageBits.parse(found.to_json())


@pytest.mark.parametrize("value", [0, 4, 64, 8.0, True, "8", None, (8,), (8, 8, 8), (8, 7)])
def test_other_bits_are_refused(value: Any) -> None:
    with pytest.raises(InvalidInputError, match="invalid bits of messages"):
        MessageBits.parse(value)


def test_bits_on_a_command_line() -> None:
    assert MessageBits.from_text("16") == MessageBits(16, 16)
    assert MessageBits.from_text("8, 32") == MessageBits(8, 32)
    for text in ("", "eight", "8,", "8,8,8", "-8"):
        with pytest.raises(InvalidInputError, match="invalid bits of messages"):
            MessageBits.from_text(text)


def test_no_row_takes_more_bytes_than_in_float32() -> None:
    assert [number_bytes(32, w) for w in (1, 2, 3, 64)] == [4, 8, 12, 256]
    assert [number_bytes(16, w) for w in (1, 2, 3, 64)] == [2, 4, 6, 128]
    assert [number_bytes(8, w) for w in (1, 2, 3, 64)] == [4, 8, 11, 72]


def test_rows_of_other_types_travel_as_they_are() -> None:
    bits = MessageBits(8, 8)
    assert bits.row_bytes(TableSpec("t", 9, 64), 64) == 72
    assert bits.row_bytes(TableSpec("t", 9, 64), 16) == 24
    assert bits.row_bytes(TableSpec("t", 9, 64, dtype="bfloat16"), 16) == 32
    assert bits.row_bytes(TableSpec("t", 9, 64, dtype="int8", optimizer="none"), 64) == 68


def test_a_plan_states_its_bits(tmp_path: Path) -> None:
    plan = mixed_plan()
    assert "message_bits" not in plan.to_text()
    value = {**json.loads(plan.to_text()), "message_bits": [16, 8]}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(value))
    loaded = Plan.load(path)
    assert loaded.message_bits == MessageBits(16, 8)
    assert Plan.from_text(loaded.to_text()).message_bits == MessageBits(16, 8)
    path.write_text(json.dumps({**value, "message_bits": [16, 4]}))
    with pytest.raises(InvalidInputError, match="gradients=4"):
        Plan.load(path)
