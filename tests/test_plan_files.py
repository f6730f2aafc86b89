"""Plans and topologies as data: validation, files and hand edits, fitting a model."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from oper import cli
from oper.errors import FileFormatError, InvalidInputError, PlanError
from oper.messages import EXACT, MessageBits, number_bytes
from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.support import kernel
from oper.tables import TableSpec, check_unique
from oper.topology import Costs, Rack, Topology, parse_bytes
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
    (lambda v: tier(v).update(place="everywhere"), "placement of a tier='everywhere'"),
    (lambda v: tier(v, 1).update(mode="shove"), "mode of a tier='shove'"),
    (lambda v: tier(v, 1).update(memory="disk"), "memory of a tier='disk'"),
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


def test_tiers_have_their_split_broadcast_partial_notation() -> None:
    value = json.loads(mixed_plan().to_text())
    assert [x["sbp"] for x in value["tables"][0]["pieces"][0]["tiers"]] == ["B", "S", "P"]


def test_truncation_anywhere_is_refused(tmp_path: Path) -> None:
    text = mixed_plan().to_text().rstrip()
    for size in range(0, len(text), 11):
        (tmp_path / "plan.json").write_text(text[:size])
        with pytest.raises(FileFormatError, match="truncated, damaged or of another kind"):
            Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"\xff\xfe", b"PK\x03\x04", b"[" * 100_000])
def test_files_of_another_kind_are_refused(tmp_path: Path, content: bytes) -> None:
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


def test_a_handwritten_plan_may_omit_time_bound_and_batch(tmp_path: Path) -> None:
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
    with pytest.raises(PlanError, match=r"each of TablePlan\.pieces"):
        _ = mixed_plan().table("wide").tiers


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_a_weighted_stripe_is_exact_even_and_begins_in_order(weights: list[int]) -> None:
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


def test_explain_needs_the_batch_size_that_a_plan_does_not_state(tmp_path: Path,
                                                                 capsys: pytest.CaptureFixture[str]
                                                                 ) -> None:
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


# ---- bits of messages ----------------------------------------------------------------------------


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
    with pytest.raises(InvalidInputError, match=r"unknown tables=\['a'\]"):
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
    with pytest.raises(InvalidInputError, match="invalid message_bits"):
        MessageBits.parse(value)


def test_bits_on_a_command_line() -> None:
    assert MessageBits.from_text("16") == MessageBits(16, 16)
    assert MessageBits.from_text("8, 32") == MessageBits(8, 32)
    with pytest.raises(InvalidInputError, match=r"message_bits\['b'\]='x', expected one of"):
        MessageBits.from_text("a=8;b=x")
    for text in ("", "eight", "8,", "8,8,8", "-8", "t=", "t=5", "t=8;", "t=8;t=16"):
        with pytest.raises(InvalidInputError, match="invalid message_bits"):
            MessageBits.from_text(text)


def test_no_row_takes_more_bytes_than_in_float32() -> None:
    assert [number_bytes(32, w) for w in (1, 2, 3, 64)] == [4, 8, 12, 256]
    assert [number_bytes(16, w) for w in (1, 2, 3, 64)] == [2, 4, 6, 128]
    assert [number_bytes(8, w) for w in (1, 2, 3, 64)] == [4, 8, 11, 72]
    assert [number_bytes(4, w) for w in (1, 2, 3, 4, 64)] == [4, 8, 10, 10, 40]


def test_rows_of_other_types_are_sent_unchanged() -> None:
    bits = MessageBits(8, 8)
    assert bits.row_bytes(TableSpec("t", 9, 64), 64) == 72
    assert bits.row_bytes(TableSpec("t", 9, 64), 16) == 24
    assert bits.row_bytes(TableSpec("t", 9, 64, dtype="bfloat16"), 16) == 32
    assert bits.row_bytes(TableSpec("t", 9, 64, dtype="int8", optimizer="none"), 64) == 68


def test_a_plan_states_its_bits(tmp_path: Path) -> None:
    assert "message_bits" not in mixed_plan().to_text()

    def load(bits: object) -> Plan:
        return Plan.load(edited(tmp_path, lambda v: v.update(message_bits=bits)))

    loaded = load([16, 8])
    assert loaded.message_bits == MessageBits(16, 8)
    assert Plan.from_text(loaded.to_text()).message_bits == MessageBits(16, 8)
    loaded = load({"hot": [16, 8]})
    assert loaded.message_bits.of("hot") == MessageBits(16, 8)
    assert json.loads(loaded.to_text())["message_bits"] == {"hot": [16, 8]}
    with pytest.raises(InvalidInputError, match="nothing"):
        load({"nothing": 8})
    with pytest.raises(InvalidInputError, match=r"message_bits\['hot'\]=\[16, 7\]"):
        load({"hot": [16, 7]})


# ---- topologies ----------------------------------------------------------------------------------

FILE = """
name = "two-hosts"
source = "published"
host_memory_bytes = "1TB"
host_gbps = 20
hosts_share_links = true
[[domain]]
copies = 4
per_host = 2
ranks = 2
memory_bytes = "80GB"
read_gbps = 2000
cache_gbps = 5000
cache_bytes = "50MiB"
link_gbps = 360
cross_gbps = 45
[[domain]]
host = 2
memory_bytes = 1000
read_gbps = 10.5
[[rack]]
hosts = [0, 2]
uplink_gbps = 12.5
[[rack]]
hosts = [1]
uplink_gbps = 25
[costs]
phase_us = 10
"""


def read(tmp_path: Path, text: str) -> Topology:
    path = tmp_path / "machine.toml"
    path.write_text(text)
    return Topology.from_toml(path)


def test_a_file_is_read(tmp_path: Path) -> None:
    topology = read(tmp_path, FILE)
    assert (topology.name, topology.source, topology.world_size, topology.num_hosts) == (
        "two-hosts", "published", 9, 3)
    assert [d.ranks for d in topology.domains] == [(0, 1), (2, 3), (4, 5), (6, 7), (8,)]
    assert [d.host for d in topology.domains] == [0, 0, 1, 1, 2]
    assert topology.domain_of() == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    first, last = topology.domains[0], topology.domains[-1]
    assert (first.memory_bytes, first.cache_bytes, first.cross_gbps) == (80 * 10**9, 50 << 20, 45)
    # Missing values are derived from the given ones.
    assert (last.cache_gbps, last.link_gbps, last.cross_gbps, last.cache_bytes) == (
        10.5, 10.5, 10.5, 0)
    assert topology.costs == Costs(phase_us=10)
    assert topology.host_memory_bytes == 10**12
    assert topology.hosts_share_links
    assert topology.racks == (Rack((0, 2), 12.5), Rack((1,), 25))


def test_links_are_not_shared_unless_the_file_states_it(tmp_path: Path) -> None:
    """Older files: every rank has its own link, and all pairs of hosts are equally fast."""
    start, stop = FILE.index("[[rack]]"), FILE.index("[costs]")
    text = FILE[:start].replace("hosts_share_links = true\n", "") + FILE[stop:]
    topology = read(tmp_path, text)
    assert topology.hosts_share_links is False and topology.racks == ()


@pytest.mark.parametrize(("old", "new", "words"), [
    ('memory_bytes = "80GB"\n', "", r"missing keys=\['domain\[0\]\.memory_bytes'\]"),
    ('memory_bytes = "80GB"', "memory_bytes = 0", r"domain\[0\]\.memory_bytes=0, .*>= 1"),
    ('memory_bytes = "80GB"', 'memory_bytes = "lots"',
     r"domain\[0\]\.memory_bytes='lots', expected a whole number of bytes >= 0, or text"),
    ('memory_bytes = "80GB"', 'memory_bytes = "-1GB"', r"domain\[0\]\.memory_bytes='-1GB'"),
    ('memory_bytes = "80GB"', "memory_bytes = inf", r"domain\[0\]\.memory_bytes=inf"),
    ("read_gbps = 2000\n", "", r"missing keys=\['domain\[0\]\.read_gbps'\]"),
    ("read_gbps = 2000", "read_gbps = nan", r"domain\[0\]\.read_gbps=nan"),
    ("read_gbps = 2000", 'read_gbps = "fast"', r"domain\[0\]\.read_gbps='fast'"),
    ("link_gbps = 360", "link_gbps = -1", r"link_gbps=-1"),
    ("cache_bytes", "cash_bytes", "cash_bytes"),
    ('source = "published"', 'source = "guessed"', "source='guessed'"),
    ('name = "two-hosts"\n', "", "'name'"),
    ("copies = 4", "copies = 0", "copies=0, expected an integer >= 1"),
    ("copies = 4", "copies = 1.5", "copies=1.5"),
    ("ranks = 2", "ranks = 0", "ranks=0"),
    ("per_host = 2", "per_host = 0", "per_host=0"),
    ("host = 2\n", "host = -1\n", "host=-1"),
    ("phase_us = 10", "phase_us = -1", r"costs\.phase_us=-1, expected a finite number >= 0"),
    ("phase_us = 10", "phase_us = 1e300", r"costs\.phase_us=1e\+300, .*at most 1e15"),
    ("phase_us = 10", 'phase_us = "x"', "phase_us='x'"),
    ("phase_us = 10", "phase_ms = 1", "phase_ms"),
    ("host_gbps = 20\n", "", "when host_memory_bytes > 0"),
    ("host_gbps = 20\n", "colour = 3\n", "colour"),
    ("hosts_share_links = true", "hosts_share_links = 1", "hosts_share_links=1, expected true"),
    ("hosts = [1]", "hosts = [0]", r"hosts of racks=\[0, 0, 2\].*each once"),
    ("hosts = [1]", "hosts = [1, 3]", r"hosts of racks=\[0, 1, 2, 3\]"),
    ("hosts = [1]", "hosts = 1", r"rack\[1\]\.hosts=1, expected a list of integers"),
    ("uplink_gbps = 25", "uplink_gbps = 0", r"rack\[1\]\.uplink_gbps=0, .*from 1e-9"),
    ("link_gbps = 360", "link_gbps = 1e300", r"link_gbps=1e\+300, expected a number from 1e-9"),
    ("host_gbps = 20", "host_gbps = 1e300", r"host_gbps=1e\+300, expected a number from 1e-9"),
    ("uplink_gbps = 25", "uplink_mbits = 25", "uplink_mbits"),
    ('name = "two-hosts"', f"name = 0x{'f' * 6000}", "name=a number of more than 4300 digits"),
    ("[costs]", "[costs", "expected TOML"),
])
def test_errors_name_the_invalid_field(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in FILE
    kind = FileFormatError if words == "expected TOML" else InvalidInputError
    with pytest.raises(kind, match=words):
        read(tmp_path, FILE.replace(old, new, 1))


@pytest.mark.parametrize("domain", ["domain = 3", "domain = []", "domain = [1]",
                                    'domain = {ranks = 1}', "[domain]\nranks = 1"])
def test_no_domains_is_an_error(tmp_path: Path, domain: str) -> None:
    with pytest.raises(InvalidInputError, match=r"domain|ranks=\[\]"):
        read(tmp_path, f'name = "x"\n{domain}\n')


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"):
        Topology.from_toml(tmp_path / "nothing.toml")


@pytest.mark.parametrize(("value", "expected"), [
    (7, 7), (1.5e3, 1500), ("80GB", 80 * 10**9), ("24 GiB", 24 << 30), ("1e3", 1000),
    ("0.5kb", 500), ("3B", 3)])
def test_sizes(value: int | float | str, expected: int) -> None:
    assert parse_bytes(value) == expected


@pytest.mark.parametrize("value", ["", "GB", "1XB", "1GBGB", -1, 0.5, float("nan"), True, None,
                                   "inf"])
def test_bad_sizes(value: object) -> None:
    with pytest.raises(InvalidInputError, match="cannot read a size"):
        parse_bytes(value)  # type: ignore[arg-type]


def test_this_host() -> None:
    topology = Topology.this_host(4)
    assert (topology.world_size, topology.num_hosts, topology.source) == (4, 1, "assumed")
    assert 0 < topology.domains[0].memory_bytes < 1 << 50


def test_a_container_has_the_memory_of_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/meminfo": "MemTotal: 1000000 kB"}
    monkeypatch.setattr(kernel, "read", lambda path: files.get(re.sub("/+", "/", path), ""))
    assert Topology.this_host(2).domains[0].memory_bytes == 512_000_000
    files["/proc/self/cgroup"] = "3:cpu:/job\n2:hugetlb,memory:/job/step\n1:name=systemd:/\n0::/job"
    files["/sys/fs/cgroup/memory/memory.limit_in_bytes"] = str(2**63 - 4096)  # none
    assert kernel.memory_limit() == 0
    files["/sys/fs/cgroup/memory/job/step/memory.limit_in_bytes"] = "900"
    files["/sys/fs/cgroup/memory/job/memory.limit_in_bytes"] = "800"
    assert kernel.memory_limit() == 800 and Topology.this_host(2).domains[0].memory_bytes == 400
    files |= {"/proc/self/cgroup": "0::/job", "/sys/fs/cgroup/job/memory.max": "max",
              "/sys/fs/cgroup/memory.max": "700"}
    assert kernel.memory_limit() == 700


@pytest.mark.parametrize("domain_of, ranks", [
    ([0, 0], [(0, 1)]), ([0, 0, 1, 1], [(0, 1), (2, 3)]), ([0, 1, 1, 0], [(0,), (1, 2), (3,)])])
def test_hosts_of_memory_domains(domain_of: list[int], ranks: list[tuple[int, ...]]) -> None:
    made = Topology.of_domains(domain_of)
    assert [d.ranks for d in made.domains] == ranks and made.num_hosts == len(ranks)
    whole = Topology.this_host(1).domains[0].memory_bytes  # of each domain, however it is divided
    assert sum(d.memory_bytes for d in made.domains) == pytest.approx(
        len(set(domain_of)) * whole, rel=1e-6)
    assert made.source == "assumed"
