"""The planning benchmark: its record, its table, and TorchRec's planner in a child process."""

import json
from collections.abc import Iterator

import numpy as np
import pytest

from oper.bench.plan import suite as plan, torchrec_planner
from oper.bench.plan.workloads import Workload, cluster, drawn, machine
from oper.errors import InvalidInputError
from oper.plan import Plan
from oper.search.peers import baselines
from oper.search.problem.space import EVERYTHING
from oper.search.problem.statement import Problem, make_problem
from tests.bench import helpers
from tests.search.search_cases import tables_and_stats
from tests.support import run_command

KEYS = ("gap", "certificate_checked", "uncapped_bound_us", "bound_method", "proved_gap",
        "proved_nodes", "seconds", "modelled_step_us", "best_peer", "best_peer_step_us",
        "ratio_vs_torchrec", "ratio_vs_best_peer", "lower_bound_us",
        "peak_rss_mb", "verified")


def small(seed: int = 0) -> Workload:
    return Workload(*tables_and_stats(6, seed, min_rows=50, lengths=(1,)), 512)


def bench(*words: str) -> int:
    return run_command("bench", "plan", *words)


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_WORKLOADS", {"small": small, "absent": lambda seed: None})
    monkeypatch.setattr(baselines, "_PROPOSALS", 100)  # else it takes longer than all other peers
    plan._workload.cache_clear()


def test_record_and_table(suite, tmp_path, capsys) -> None:
    target = tmp_path / "plan.json"
    assert bench("--only", "*/8/training/*", "--seeds", "3", "--torchrec-seconds", "0",
                 "--record", str(target)) == 0
    value = json.loads(target.read_text())
    assert value["command"] == (
        "oper bench plan --only '*/8/training/*' --seeds 3 --constants published "
        f"--torchrec-seconds 0.0 --prove-seconds 20.0 --record {target}")
    case, absent = value["cases"]
    assert case["name"] == "published/small/8/training/3" and set(KEYS) <= set(case)
    assert case["lower_bound_us"] <= case["modelled_step_us"] <= case["best_peer_step_us"]
    assert case["ratio_vs_torchrec"] is None and case["torchrec"] is None
    assert case["proved_gap"] <= case["gap"]
    assert absent["name"] == "published/absent/8/training/3" and absent["verified"]
    assert absent["skipped"] == "its data is not in the folder named by OPER_DATA"
    out = capsys.readouterr().out
    assert "small/8/training" in out and "skipped published/absent/8/training/3" in out
    assert "all: published/training" in out
    assert "inference" not in out
    figures, = value["groups"].values()
    assert value["groups"] == {"published/training": figures}
    assert figures["num_cases"] == figures["certified"] == 1 and figures["peers_ahead"] == 0
    assert figures["worst_gap"] == figures["median_gap"] == case["gap"]
    assert figures["worst_seconds"] == case["seconds"]
    assert figures["least_ratio_vs_torchrec"] is None


def test_totals_are_separate_by_constants_and_objective() -> None:
    def entry(name: str, gap: float | None, ratio: float | None, **more: float) -> dict:
        return {"name": name, "gap": gap, "proved_gap": 0.01, "seconds": 2.0,
                "ratio_vs_torchrec": ratio, "certificate_checked": gap is not None,
                "modelled_step_us": 100.0, "peers_step_us": more}

    found = plan.totals([
        entry("measured/a/8/training/0", 0.02, 2.0, x=99.0, y=98.0, z=100.0),
        entry("measured/b/8/training/0", 0.04, None), entry("measured/c/8/training/0", None, 3.0),
        entry("measured/a/8/inference/0", 0.0, 4.0), entry("published/a/8/training/1", 0.5, 5.0),
        {"name": "published/b/8/training/1", "skipped": "why", "verified": True}])["groups"]
    assert list(found) == ["measured/inference", "measured/training", "published/training"]
    training = found["measured/training"]
    assert (training["num_cases"], training["certified"], training["peers_ahead"]) == (3, 2, 2)
    assert training["median_gap"] == 0.04 and training["worst_gap"] is None
    assert training["median_ratio_vs_torchrec"] == 2.5 and training["least_ratio_vs_torchrec"] == 2
    assert found["published/training"]["num_cases"] == 1


def test_seeds_and_measured_machines(suite, tmp_path) -> None:
    target = tmp_path / "plan.json"
    assert bench("--only", "*/small/8/training/*", "--seeds", "4-5", "--constants", "measured",
                 "--torchrec-seconds", "0", "--prove-seconds", "0", "--record", str(target)) == 0
    value = json.loads(target.read_text())
    assert [c["name"] for c in value["cases"]] == [f"measured/small/8/training/{s}" for s in (4, 5)]
    assert all(c["modelled"] == "measured" for c in value["cases"])
    assert "--seeds 4-5" in value["command"]
    machines = [cluster(16, seed) for seed in range(12)]
    links = np.array([d.cross_gbps for m in machines for d in m.domains])
    assert 0.1 * 0.5 <= links.min() < 1 < links.max() <= 12.5
    assert len({max(d.host for d in m.domains) for m in machines}) > 1
    unequal = [len({d.cross_gbps for d in m.domains}) == 2 for m in machines]
    assert unequal == [seed % 3 == 2 for seed in range(12)]
    sizes = [len(drawn(seed).tables) for seed in range(3)]
    assert min(sizes) < 10 and max(sizes) > 400


def test_a_failed_case_keeps_the_others_and_is_run_again_on_resume(
        suite, tmp_path, capsys, monkeypatch) -> None:
    target, whole = tmp_path / "plan.json", plan.run_case
    words = ("--only", "*/small/[81]*/inference/*", "--torchrec-seconds", "0",
             "--record", str(target), "--resume", str(target))  # which does not exist yet

    def fails_at_16(case, *rest):
        if case.num_ranks == 16:
            raise RuntimeError("the solver broke")
        return whole(case, *rest)

    monkeypatch.setattr(plan, "run_case", fails_at_16)
    assert bench(*words) == 1
    first, broken, last = json.loads(target.read_text())["cases"]
    assert broken["name"] == "published/small/16/inference/0" and not broken["verified"]
    assert broken["failed"] == "RuntimeError: the solver broke"
    out = capsys.readouterr().out
    assert "failed published/small/16/inference/0: RuntimeError: the solver broke" in out
    asked = []
    monkeypatch.setattr(plan, "run_case", lambda case, *rest: asked.append(case.name)
                        or whole(case, *rest))
    assert bench(*words) == 0
    assert asked == ["published/small/16/inference/0"]
    again = json.loads(target.read_text())["cases"]
    # The record's earlier cases come first, so that none is lost if the run ends early.
    assert again[:2] == [first, last] and again[2]["verified"]
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"benchmark": "train", "cases": again}))
    with pytest.raises(InvalidInputError, match="a record of oper bench plan"):
        bench(*words[:-1], str(other))
    with pytest.raises(InvalidInputError, match="--resume"):
        bench(*words[:-1], str(tmp_path / "absent.json"))


def test_a_plan_slower_than_a_peers_is_not_verified(suite, monkeypatch, capsys) -> None:
    monkeypatch.setattr(plan, "score_peers", lambda *a: {"faster": 1e-3})
    assert bench("--only", "*/small/8/training/*", "--torchrec-seconds", "0") == 1
    assert "faster" in capsys.readouterr().out


def test_torchrec_is_a_peer(suite, tmp_path) -> None:
    target = tmp_path / "plan.json"
    assert bench("--only", "*/small/8/training/*", "--torchrec-seconds", "10",
                 "--record", str(target)) == 0
    case, = json.loads(target.read_text())["cases"]
    theirs = {k: v for k, v in case["peers_step_us"].items() if k.startswith("torchrec: ")}
    assert theirs and case["torchrec"] == "best of its proposers"
    assert case["ratio_vs_torchrec"] == pytest.approx(
        min(theirs.values()) / case["modelled_step_us"], rel=1e-5)
    assert case["ratio_vs_torchrec"] >= 1


@pytest.fixture
def stated() -> Problem:
    work = small()
    return make_problem(work.tables, work.stats, machine(8), batch_size=512, allow=EVERYTHING)


@pytest.fixture
def no_planner() -> Iterator[None]:
    """No planner runs at the beginning, nor afterwards."""
    def end() -> None:
        if torchrec_planner._planner.cache_info().currsize:
            torchrec_planner._planner().close(0)
        torchrec_planner._planner.cache_clear()

    end()
    yield
    end()


def test_a_planner_that_does_not_return_is_ended(stated: Problem, no_planner: None) -> None:
    assert torchrec_planner.propose(stated, -1.9) == {}  # gives up after a tenth of a second
    assert not torchrec_planner._planner.cache_info().currsize
    again = torchrec_planner.propose(stated, 10.0)
    assert again and all(isinstance(p, Plan) for p in again.values())


def test_a_planner_that_dies_counts_as_one_without_plans(stated, monkeypatch, no_planner) -> None:
    monkeypatch.setattr(torchrec_planner, "_serve", helpers.dies)
    for _ in range(2):
        assert torchrec_planner.propose(stated, 30.0) == {}
