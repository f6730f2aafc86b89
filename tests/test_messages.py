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


def test_bits_by_table() -> None:
    bits = MessageBits.parse({"b": 8, "a": (16, 8), "c": 32})
    assert [bits.of(x) for x in "abcd"] == [MessageBits(16, 8), MessageBits(8, 8), EXACT, EXACT]
    assert bits.to_json() == {"a": [16, 8], "b": [8, 8]}  # exact ones are left out
    assert MessageBits.parse(bits.to_json()) == bits == MessageBits.parse({"a": [16, 8], "b": 8})
    assert MessageBits.from_text("b=8;a=16,8") == bits
    assert MessageBits.parse({"c": 32}) == MessageBits.parse({}) == EXACT
    assert MessageBits(16, 8).of("any") == MessageBits(16, 8)
    assert bits.only({"b", "c"}).to_json() == {"b": [8, 8]}
    even, odd = ([TableSpec(name, 9, dim) for name in "abc"] for dim in (64, 63))
    bits.check_for(even)
    with pytest.raises(InvalidInputError, match=r"message_bits=\['a'\]"):
        bits.check_for(even[1:])
    for four in (MessageBits(32, 4), MessageBits.parse({"b": 4})):
        four.check_for(even)
        with pytest.raises(InvalidInputError, match=r"message_bits\['[ab]'\]=.*with 63 columns"):
            four.check_for(odd)
    assert bits.row_bytes(TableSpec("b", 9, 64), 64) == 72
    assert bits.row_bytes(TableSpec("c", 9, 64), 64) == 256


@pytest.mark.parametrize("value", [0, 5, 64, 8.0, True, "8", None, (8,), (8, 8, 8), (8, 7),
                                   {"t": 5}, {"t": (8,)}, {"t": {"t": 8}}])
def test_other_bits_are_refused(value: Any) -> None:
    with pytest.raises(InvalidInputError, match="invalid bits of messages"):
        MessageBits.parse(value)


def test_bits_on_a_command_line() -> None:
    assert MessageBits.from_text("16") == MessageBits(16, 16)
    assert MessageBits.from_text("8, 32") == MessageBits(8, 32)
    with pytest.raises(InvalidInputError, match=r"message_bits\['b'\]='x', expected one of"):
        MessageBits.from_text("a=8;b=x")
    for text in ("", "eight", "8,", "8,8,8", "-8", "t=", "t=5", "t=8;", "t=8;t=16"):
        with pytest.raises(InvalidInputError, match="invalid bits of messages"):
            MessageBits.from_text(text)


def test_no_row_takes_more_bytes_than_in_float32() -> None:
    assert [number_bytes(32, w) for w in (1, 2, 3, 64)] == [4, 8, 12, 256]
    assert [number_bytes(16, w) for w in (1, 2, 3, 64)] == [2, 4, 6, 128]
    assert [number_bytes(8, w) for w in (1, 2, 3, 64)] == [4, 8, 11, 72]
    assert [number_bytes(4, w) for w in (1, 2, 3, 4, 64)] == [4, 8, 10, 10, 40]


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
    name = plan.tables[0].table.name
    by_table = {**value, "message_bits": {name: [16, 8]}}
    path.write_text(json.dumps(by_table))
    loaded = Plan.load(path)
    assert loaded.message_bits.of(name) == MessageBits(16, 8)
    assert json.loads(loaded.to_text())["message_bits"] == {name: [16, 8]}
    path.write_text(json.dumps({**value, "message_bits": {"nothing": 8}}))
    with pytest.raises(InvalidInputError, match="nothing"):
        Plan.load(path)
    path.write_text(json.dumps({**value, "message_bits": {name: [16, 7]}}))
    with pytest.raises(InvalidInputError, match=rf"message_bits\['{name}'\]=\[16, 7\]"):
        Plan.load(path)
