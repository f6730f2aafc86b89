"""Message bits in the cost model: bytes between hosts, replays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from search_cases import gpus, tables_and_stats
from test_simulate import draw, stated

from oper import cli
from oper.messages import EXACT, MessageBits, number_bytes
from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.rows.traffic import SENT
from oper.search import evaluate
from oper.search.cost.tally import Messages
from oper.search.problem.machine import TERMS, Term
from oper.search.problem.statement import Problem
from oper.search.replay.realized import RealizedLoad
from oper.search.replay.wire import WireReplay

BITS = [(8, 8), (4, 4), (16, 16), (16, 8), (8, 32), (32, 8)]
CROSS = (Term.CROSS_IN, Term.CROSS_OUT)


def hosts(bits: Any, objective: str = "training") -> tuple[Problem, list[np.ndarray]]:
    """Three tables on two hosts of two ranks each."""
    problem, chances = stated(gpus(4, per_host=2), objective)
    return replace(problem, message_bits=MessageBits.parse(bits)), chances


def with_mode(plan: Plan, mode: str) -> Plan:
    return replace(plan, tables=tuple(replace(t, pieces=tuple(replace(p, tiers=tuple(
        replace(x, mode=mode) for x in p.tiers)) for p in t.pieces)) for t in plan.tables))


def one_table(mode: str, bits: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes by term and rank, in request, forward and update, of the table of 64 columns."""
    problem, _ = hosts(bits)
    problem = replace(problem, tables=(problem.table("t1"),))
    plan = with_mode(uniform_plan([problem.tables[0].spec], 4, "striped"), mode)
    request, forward, _, update = evaluate(plan, problem).phases
    return request.units, forward.units, update.units


def test_rows_and_gradients_shrink_between_hosts_alone() -> None:
    exact = one_table("pull", 32)
    slot = 9 / 8  # bytes of a slot of 300 rows
    for bits, answer, gradient in (((8, 8), 72, 72), ((16, 16), 128, 128), ((8, 32), 72, 256),
                                   ((32, 16), 256, 128)):
        found = one_table("pull", bits)
        for n, term in enumerate(TERMS):
            factor = (1.0, *((answer / 256, (gradient + slot) / (256 + slot)) if n in CROSS
                             else (1.0, 1.0)))
            for was, now, f in zip(exact, found, factor, strict=True):
                assert now[n] == pytest.approx(f * was[n], rel=1e-12), (bits, term)


def test_partial_sums_shrink_and_ids_do_not() -> None:
    """Two ranks of the other host send an owner 9 bits, and one, for each id that it pools."""
    exact, num_ids = one_table("push", 32), hosts(32)[0].table("t1").traffic.num_ids
    for bits, factor in (((8, 8), 72 / 256), ((16, 16), 0.5)):
        request, *answers = one_table("push", bits)
        assert request[Term.CROSS_IN].min() > 0
        assert request[Term.CROSS_IN].sum() == pytest.approx(2 * 10 / 8 * num_ids, rel=1e-9)
        for now, was in zip(answers, exact[1:], strict=True):
            assert now[Term.CROSS_IN] == pytest.approx(factor * was[Term.CROSS_IN], rel=1e-12)
            assert now[Term.CROSS_IN].min() > 0


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_each_table_and_direction_has_its_own_bits(mode: str) -> None:
    """Links between hosts carry what the tables alone send with their bits."""
    bits = {"t0": (8, 16), "t1": (16, 8)}
    problem, _ = hosts(bits)
    plan = with_mode(uniform_plan([t.spec for t in problem.tables], 4, "striped"), mode)

    def sent(names: list[str], message_bits: Any) -> list[np.ndarray]:
        part = replace(plan, tables=tuple(plan.table(n) for n in names))
        of = replace(problem, tables=tuple(problem.table(n) for n in names),
                     message_bits=MessageBits.parse(message_bits))
        return [p.units[list(CROSS)] for p in evaluate(part, of).phases]

    alone = [sent([name], bits.get(name, 32)) for name in ("t0", "t1", "t2")]
    for found, *each in zip(sent(["t0", "t1", "t2"], bits), *alone, strict=True):
        assert found == pytest.approx(sum(each), rel=1e-12)
    forward = 1  # the phase after `request`
    assert alone[0][forward] == pytest.approx(24 / 64 * sent(["t0"], 32)[forward], rel=1e-12)
    assert alone[1][forward] == pytest.approx(0.5 * sent(["t1"], 32)[forward], rel=1e-12)


def test_sums_are_exact_in_each_direction() -> None:
    problem, _ = hosts(32)
    t = problem.table("t1")
    for a in (32, 16, 8, 4):
        for g in (32, 16, 8, 4):
            m = Messages(MessageBits.parse({"t1": (a, g)}))
            for width in (1, 2, 3, 16, 64):
                assert m.sum_rows(t, width).tolist() == [
                    4 * width, number_bytes(a, width), number_bytes(g, width)]
            assert m.per_byte(t) @ [0, 256, 0] == number_bytes(a, 64)


# ---- replays -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [(32, 32), *BITS, {"t1": 8, "t2": (16, 8)}], ids=str)
def test_replayed_loads_are_the_messages_that_are_sent(bits: Any) -> None:
    """With one rank per host, bytes between hosts equal those of `WireReplay` except for headers,
    numbers of requested rows, and up to one word per pair of ranks and table."""
    problem, chances = stated(gpus(3, per_host=1))
    problem = replace(problem, message_bits=MessageBits.parse(bits))
    specs = [t.spec for t in problem.tables]
    pulled = uniform_plan(specs, 3, "striped")
    tiers = (Tier(0, 9, "replicated", (0, 1, 2)), Tier(9, 300, "striped", (0, 1, 2), mode="push"))
    pushed = replace(pulled, tables=tuple(
        TablePlan(t.table, (Piece(0, 64, tiers),)) if t.table.name == "t1" else t
        for t in pulled.tables))
    batch = draw(problem, chances, np.random.default_rng(1))
    for plan in (pulled, pushed):
        plan = replace(plan, message_bits=problem.message_bits)
        sent = dict(zip(SENT, WireReplay(plan, [0, 1, 2], training=True).step(batch), strict=True))
        request, forward, _, update = RealizedLoad(plan, problem).step(batch).phases
        answers = sent["rows"] + sent["partial_sums"]
        back = sent["gradient_rows"] + sent["bag_gradients"] + sent["refreshed_rows"]
        for phase, wanted in ((request, sent["ids"]), (forward, answers), (update, back)):
            for axis, term in ((1, Term.CROSS_OUT), (0, Term.CROSS_IN)):
                assert phase.units[term] == pytest.approx(wanted.sum(axis=axis), abs=36)


# ---- the command line ----------------------------------------------------------------------------


def test_plans_state_their_bits_and_are_verified_with_them(tmp_path: Path, capsys) -> None:
    _, stats = tables_and_stats(2, 4, lengths=(4,))
    file, made, edited = (str(tmp_path / n) for n in ("stats.npz", "plan.json", "edited.json"))
    stats.save(file)
    words = ["plan", file, "--topology", "h100-2x8", "--dim", "16", "--batch-size", "64",
             "-o", made, "--message-bits"]
    assert cli.main([*words, "8,16"]) == 0
    assert "between hosts: answers of 8 bits, gradients of 16 bits" in capsys.readouterr().out
    assert Plan.load(made).message_bits == MessageBits(8, 16)
    assert cli.main(["verify", made, "--stats", file]) == 0
    Path(edited).write_text(Path(made).read_text().replace('  "message_bits": [8, 16],\n', ""))
    assert Plan.load(edited).message_bits == EXACT
    assert cli.main(["verify", edited, "--stats", file]) == 1
    assert "message bits differ" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "12"])
    assert ended.value.code == 2 and "message_bits=12" in capsys.readouterr().err
