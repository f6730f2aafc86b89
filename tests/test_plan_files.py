"""Plans as data: validation, the file and its hand edits, fitting a model and a world."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from oper import cli
from oper.errors import FileFormatError, InvalidInputError, PlanError
from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.tables import TableSpec, check_unique
from tests.support import mixed_plan

Edit = Callable[[dict[str, Any]], object]


def plan_of(*tiers: Tier, num_rows: int = 10, world_size: int = 2) -> Plan:
    table = TableSpec("t", num_rows, 4)
    return Plan(world_size, (TablePlan(table, (Piece(0, 4, tiers),)),))


ALL = Tier(0, 10, "striped", (0, 1))


def test_round_trip(tmp_path: Path) -> None:
    plan = mixed_plan()
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.to_text() == plan.to_text()
    for name in ("world_size", "objective", "batch_size", "topology", "step_us", "lower_bound_us",
                 "notes"):
        assert getattr(loaded, name) == getattr(plan, name)
    for a, b in zip(loaded.tables, plan.tables, strict=True):
        assert (a.table, a.pieces) == (b.table, b.pieces)
        assert a.head_ids.tolist() == b.head_ids.tolist()
    assert loaded.gap == pytest.approx(0.25)


def test_a_plan_without_a_bound_has_no_gap() -> None:
    assert np.isnan(plan_of(ALL).gap)


def edited(tmp_path: Path, edit: Edit) -> Path:
    value = json.loads(mixed_plan().to_text())
    edit(value)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(value, indent=1))
    return path


def tier(value: dict[str, Any], k: int = 0) -> dict[str, Any]:
    result: dict[str, Any] = value["tables"][0]["pieces"][0]["tiers"][k]
    return result


def test_a_hand_edit_is_taken(tmp_path: Path) -> None:
    def edit(value: dict[str, Any]) -> None:
        tier(value, 1)["rows"] = [2, 8]
        tier(value, 2).update(rows=[8, 10], ranks=[0], mode="pull")
        assert tier(value, 2).pop("sbp") == "P"  # repeats the mode; may be left out

    tiers = Plan.load(edited(tmp_path, edit)).table("hot").tiers
    assert tiers[1:] == (Tier(2, 8, "striped", (1, 0), (3, 1)), Tier(8, 10, "owned", (0,)))


@pytest.mark.parametrize(("edit", "words"), [
    (lambda v: v.update(world_size=1), "ranks="),
    (lambda v: v.update(world_size=0), "world_size=0"),
    (lambda v: v.update(objective="speed"), "objective='speed'"),
    (lambda v: v.update(batch_size=-1), "batch_size=-1"),
    (lambda v: v.update(step_us=float("nan")), "step_us=nan"),
    (lambda v: v.update(batch_size=0), "batch_size=0, expected >= 1"),
    (lambda v: v.update(lower_bound_us=1e9), "lower_bound_us=1000000000.0, expected <= step_us"),
    (lambda v: v.update(step_us=0), "lower_bound_us=10.0, expected <= step_us=0"),
    (lambda v: tier(v).update(rows=[1, 2]), r"rows=\[\(1, 2\)"),
    (lambda v: tier(v).update(rows=[0, 3]), "cover 0..10 in order"),
    (lambda v: tier(v).update(place="everywhere"), "placement='everywhere'"),
    (lambda v: tier(v, 1).update(mode="shove"), "mode='shove'"),
    (lambda v: tier(v, 1).update(memory="disk"), "memory='disk'"),
    (lambda v: tier(v, 1).update(ranks=[0, 0]), "distinct ranks"),
    (lambda v: tier(v, 1).update(ranks=[0, 2]), "distinct ranks in 0..1"),
    (lambda v: tier(v, 1).update(ranks=[]), "distinct ranks"),
    (lambda v: tier(v, 2).update(ranks=[0, 1]), "one rank for an owned tier"),
    (lambda v: tier(v).update(mode="push"), "pull for a replicated tier"),
    (lambda v: tier(v, 1).update(weights=[1]), "weights="),
    (lambda v: tier(v, 1).update(weights=[4096, 1]), "sum <= 4096"),
    (lambda v: tier(v, 2).update(weights=[1]), "of a striped tier"),
    (lambda v: tier(v).update(sbp="S"), "sbp='S', expected 'B'"),
    (lambda v: v["tables"][0]["pieces"].clear(), "columns="),
    (lambda v: v["tables"][1]["pieces"][0].update(columns=[0, 1]), "cover 0..4 in order"),
    (lambda v: v["tables"][0]["pieces"][0]["tiers"].clear(), "rows="),
    (lambda v: v["orders"].update(other=v["orders"].pop("hot")), r"unknown tables=\['other'\]"),
])
def test_a_contradiction_is_refused(tmp_path: Path, edit: Edit, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Plan.load(edited(tmp_path, edit))


@pytest.mark.parametrize(("edit", "words"), [
    (lambda v: v.update(kind="oper-stats"), "pass a plan of this release"),
    (lambda v: v.update(version=2), "pass a plan of this release"),
    (lambda v: v.update(version=True), "pass a plan of this release"),
    (lambda v: tier(v).update(speed=3), r"unknown keys=\['tables\[0\].*\.tiers\[0\]\.speed'\]"),
    (lambda v: v.update(speed=3), r"unknown keys=\['speed'\]"),
    (lambda v: v["tables"][0].update(speed=3), r"unknown keys=\['tables\[0\]\.speed'\]"),
    (lambda v: v["tables"][0]["pieces"][0].update(rows=3),
     r"unknown keys=\['tables\[0\]\.pieces\[0\]\.rows'\]"),
    (lambda v: v.update(batch_size=64.0), "batch_size=64.0, expected an integer"),
    (lambda v: v.update(lower_bound_us=True), "lower_bound_us=True, expected a number"),
    (lambda v: tier(v).update(rows=[False, 2]), r"rows\[0\]=False, expected an integer"),
    (lambda v: v["orders"]["hot"].update(crc32=float(v["orders"]["hot"]["crc32"])),
     r"orders\.hot\.crc32=.*, expected an integer"),
    (lambda v: v.pop("kind"), "truncated, damaged or of another kind"),
    (lambda v: v.pop("world_size"), r"missing keys=\['world_size'\]"),
    (lambda v: v.pop("orders"), r"missing keys=\['orders'\]"),
    (lambda v: v.update(world_size="2"), "world_size='2', expected an integer"),
    (lambda v: v.update(step_us="1"), "step_us='1', expected a number"),
    (lambda v: v.update(step_us=10**400), "step_us=10000"),
    (lambda v: v.update(topology=None), "topology=None, expected text"),
    (lambda v: v.update(notes=None), "notes=None, expected a section"),
    (lambda v: v.update(tables=3), "tables=3, expected a list"),
    (lambda v: tier(v).update(rows=[0, 1, 2]), "expected a list of 2 integers"),
    (lambda v: tier(v).update(ranks=1), "ranks=1, expected a list of integers"),
    (lambda v: tier(v).pop("place"), r"missing keys=\['tables\[0\].*\.place'\]"),
    (lambda v: v["orders"].update(hot="abc"), r"orders\.hot='abc', expected a section"),
    (lambda v: v["orders"]["hot"].update(num_ids=2), "crc32"),
    (lambda v: v["orders"]["hot"].update(num_ids=11), "num_ids=11, expected 0..10"),
    (lambda v: v["orders"]["hot"].update(crc32=1), "the file is damaged"),
    (lambda v: v["orders"]["hot"].update(zlib_base64="????"), "packed ids"),
])
def test_a_damaged_file_is_refused(tmp_path: Path, edit: Edit, words: str) -> None:
    with pytest.raises(FileFormatError, match=words):
        Plan.load(edited(tmp_path, edit))


@pytest.mark.parametrize(("field", "value", "words"), [
    ("num_rows", 0, "num_rows=0"), ("num_rows", 9, "num_rows|head_ids|rows"), ("dim", "4", "dim="),
    ("pooling", "max", "pooling='max'"), ("colour", 1, "TableSpec's fields"),
    ("features", "ab", "features='ab'")])
def test_a_damaged_table_is_refused(tmp_path: Path, field: str, value: object, words: str) -> None:
    path = edited(tmp_path, lambda v: v["tables"][0]["table"].update({field: value}))
    with pytest.raises((InvalidInputError, PlanError), match=words):
        Plan.load(path)


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    twice = mixed_plan().to_text().replace('"batch_size"', '"world_size": 2, "batch_size"')
    (tmp_path / "plan.json").write_text(twice)
    with pytest.raises(FileFormatError, match=r"twice: \['world_size'\]"):
        Plan.load(tmp_path / "plan.json")


def test_a_plan_file_says_split_broadcast_or_partial() -> None:
    value = json.loads(mixed_plan().to_text())
    assert [x["sbp"] for x in value["tables"][0]["pieces"][0]["tiers"]] == ["B", "S", "P"]


def test_truncation_anywhere_is_refused(tmp_path: Path) -> None:
    text = mixed_plan().to_text().rstrip()
    for size in range(0, len(text), 11):
        (tmp_path / "plan.json").write_text(text[:size])
        with pytest.raises(FileFormatError, match="truncated, damaged or of another kind"):
            Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"\xff\xfe", b"PK\x03\x04", b"[" * 100_000])
def test_foreign_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(FileFormatError, match="truncated, damaged or of another kind"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("ids", [[1, 1], [-1], [10], [[1, 2]], [1.0]])
def test_bad_orders_are_refused(ids: list[Any]) -> None:
    table = TableSpec("t", 10, 4)
    with pytest.raises(PlanError, match="head_ids="):
        Plan(2, (TablePlan(table, (Piece(0, 4, (ALL,)),), np.array(ids)),))


def test_a_plan_fits_only_its_model_and_world() -> None:
    plan = plan_of(ALL)
    mine = TableSpec("t", 10, 4)
    plan.check_for([mine], 2)
    with pytest.raises(PlanError, match=r"plan\.world_size=2, expected 4"):
        plan.check_for([mine], 4)
    with pytest.raises(PlanError, match=r"'missing from the plan': \['u'\], "
                                        r"'only in the plan': \['t'\]"):
        plan.check_for([replace(mine, name="u")], 2)
    with pytest.raises(PlanError, match=r"\['u'\], 'only in the plan': \[\]"):
        plan.check_for([mine, replace(mine, name="u")], 2)
    for field, value in (("num_rows", 11), ("dim", 8), ("dtype", "float16")):
        with pytest.raises(PlanError, match=f"another table 't': {field}="):
            plan.check_for([replace(mine, **{field: value})], 2)
    planned = replace(plan, step_us=1.0, batch_size=8)
    with pytest.raises(PlanError, match=r"optimizer='rowwise_adagrad', expected 'sgd'.*"
                                        r"--optimizer sgd"):
        planned.check_for([replace(mine, optimizer="sgd")], 2)
    planned.check_for([replace(mine, optimizer="none")], 2)  # for inference
    plan.check_for([replace(mine, optimizer="sgd")], 2)  # no step time: written by hand
    with pytest.raises(PlanError, match="lacks a table: table='u'"):
        plan.table("u")


def test_a_plan_by_hand_needs_neither_time_nor_bound_nor_batch(tmp_path: Path) -> None:
    path = edited(tmp_path, lambda v: v.update(step_us=0, lower_bound_us=0, batch_size=0))
    assert np.isnan(Plan.load(path).gap)
    Plan.load(edited(tmp_path, lambda v: v.update(lower_bound_us=0)))
    Plan.load(edited(tmp_path, lambda v: v.update(lower_bound_us=12.5)))


def test_two_tables_may_not_share_a_name() -> None:
    table = TableSpec("t", 10, 4)
    with pytest.raises(InvalidInputError, match=r"names=\['t'\]"):
        check_unique([table, table])
    with pytest.raises(InvalidInputError, match="no tables"):
        Plan(2, ())


def test_a_column_split_table_has_no_single_tier_list() -> None:
    with pytest.raises(PlanError, match=r"read TablePlan\.pieces"):
        _ = mixed_plan().table("wide").tiers


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_a_weighted_deal_is_exact_even_and_begins_in_order(weights: list[int]) -> None:
    ranks = tuple(range(len(weights)))
    pattern = Tier(0, 1, "striped", ranks, tuple(weights)).pattern()
    total = sum(weights)
    assert [pattern.count(r) for r in ranks] == weights
    assert tuple(pattern[:len(ranks)]) == ranks  # the hottest rows go to the ranks in this order
    for turn in range(1, total + 1):
        for rank, weight in enumerate(weights):
            # A rank is never more than a few rows away from its ideal share of the rows so far.
            assert abs(pattern[:turn].count(rank) - weight * turn / total) < len(weights)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8), st.integers(1, 5),
       st.sampled_from(["replicated", "striped", "owned"]))
def test_uniform_plans_are_valid_for_their_tables(rows: list[int], world_size: int, placement: str
                                                  ) -> None:
    tables = [TableSpec(f"t{k}", n, 8) for k, n in enumerate(rows)]
    plan = uniform_plan(tables, world_size, placement)
    plan.check_for(tables, world_size)
    assert {x.placement for t in plan.tables for x in t.tiers} == {placement}
    if placement == "owned":
        load = [0] * world_size
        for t in plan.tables:
            load[t.tiers[0].ranks[0]] += t.table.num_bytes
        assert max(load) - min(load) <= max(t.num_bytes for t in tables)


def test_explain_asks_for_what_a_plan_by_hand_does_not_state(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unstated batch size is not invented; notes that are no sets of names raise one error."""
    def edit(value: dict[str, Any]) -> None:
        value.update(step_us=0, lower_bound_us=0, batch_size=0)
        del tier(value, 1)["weights"]
        value["tables"][1]["pieces"][0]["tiers"][0].pop("memory")

    words = ["explain", str(edited(tmp_path, edit)), "--topology", "this-host"]
    assert cli.main(words) == 2
    assert "--batch-size" in capsys.readouterr().err
    assert cli.main([*words, "--batch-size", "64"]) == 0
    assert "us" in capsys.readouterr().out
    edited(tmp_path, lambda v: (edit(v), v.update(batch_size=64, notes={"allow": 5})))
    assert cli.main(words) == 1
    assert "allow=[5]" in capsys.readouterr().err
    edited(tmp_path, lambda v: v.update(lower_bound_us=1e9))
    assert cli.main(words) == 1
    out, err = capsys.readouterr()
    assert out == "" and "lower_bound_us=1000000000.0" in err
