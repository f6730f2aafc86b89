"""`oper bench recommenders` on a small log in MovieTweetings' format."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oper.bench.quality import kept, recommenders, trials
from oper.errors import InvalidInputError
from oper.rl_rec import harness
from tests.bench.helpers import bench
from tests.support import run_here


def write_log(folder: Path, forwards: bool = True) -> None:
    """Write ratings of 80 users with two tastes for 40 films; `backwards` reverses their order."""
    rng = np.random.default_rng(0)
    lines = [f"{u}::{1 + 2 * i + u % 2:07d}::{8 + i % 3}::"
             f"{1_380_000_000 + 1000 * (t if forwards else 10 - t) + u}"
             for u in range(1, 81) for t, i in enumerate(rng.permutation(20)[:10])]
    (folder / "movietweetings").mkdir(parents=True, exist_ok=True)
    (folder / "movietweetings" / "ratings.dat").write_text("\n".join(lines) + "\n")


@pytest.fixture(autouse=True)
def no_log_is_known() -> None:
    recommenders.load.cache_clear()


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in OPER_DATA, with a log."""
    write_log(tmp_path)
    monkeypatch.setenv("OPER_DATA", str(tmp_path))
    return tmp_path


def run(folder: Path, cases: str, *more: str) -> tuple[list[dict[str, Any]], str]:
    """Run the benchmark; returns the record's entries and stdout."""
    return bench(folder, "recommenders", "--only", cases, *(more or ["--quick"]), "--runs",
                 str(folder / "runs"), OPER_DATA=str(folder))


def test_a_record_holds_intervals_and_paired_differences(logs: Path) -> None:
    entries, printed = run(logs, "movietweetings/last-two/[pm]*[ye]")
    assert [e["model"] for e in entries] == ["popularity", "multvae", "macridvae"]
    for entry in entries:
        assert entry["verified"] and [r["seed"] for r in entry["runs"]] == [1]
        found = entry["metrics"]["ndcg@10"]
        assert 0 <= found["low"] <= found["mean"] <= found["high"] <= 1
        assert entry["data"]["test_users"] == 80 and entry["data"]["targets_per_test_user"] == 1
        assert entry["protocol"]["data"]["protocol"] == "leave_last_two"
    assert set(entries[2]["against"]) == {"popularity", "multvae"}
    less = entries[1]["against"]["popularity"]["ndcg@10"]
    assert less["mean"] == pytest.approx(
        entries[1]["metrics"]["ndcg@10"]["mean"] - entries[0]["metrics"]["ndcg@10"]["mean"],
        abs=2e-6)
    assert "movietweetings/last-two/macridvae minus multvae: ndcg@10" in printed
    kept, again = run(logs, "movietweetings/last-two/[pm]*[ye]")
    first, second = ([line for line in text.splitlines() if "NOISY" not in line]
                    for text in (printed, again))
    assert first == second  # nothing trained anew
    assert [e["runs"] for e in kept] == [e["runs"] for e in entries]


def test_runs_on_another_log_are_not_used(tmp_path: Path) -> None:
    """They are not used even if the numbers of users, items and interactions are equal."""
    entries = []
    for forwards in (True, False):
        write_log(tmp_path, forwards)
        recommenders.load.cache_clear()
        entries += run(tmp_path, "movietweetings/last-two/popularity")[0]
    assert entries[0]["data"] == entries[1]["data"]
    assert entries[0]["metrics"] != entries[1]["metrics"]


def test_runs_of_other_sources_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    before = kept.place("runs", "name", b"input")
    assert before == kept.place("runs", "name", b"input") != kept.place("runs", "name", b"other")
    monkeypatch.setattr(kept, "_sources", hashlib.sha256)
    assert before != kept.place("runs", "name", b"input")


def test_a_record_has_several_protocols_and_the_graph(logs: Path) -> None:
    entries, printed = run(logs, "movietweetings/*/cadvae")
    assert [e["name"] for e in entries] == [f"movietweetings/{p}/cadvae"
                                            for p in ("last-two", "time", "leave-one-out",
                                                      "held-out-users", "graded")]
    assert [e["protocol"]["data"]["protocol"] for e in entries] == [
        "leave_last_two", "time", "leave_last_two", "held_out_users", "leave_last_two"]
    assert all(e["against"] == {} for e in entries)  # other users: nothing to pair
    for entry in entries:
        graph = np.array(entry["runs"][0]["graph"])
        assert graph.shape == (4, 4) and not graph.diagonal().any()
    assert "movietweetings/time/cadvae" in printed


def test_missing_logs_are_an_error(tmp_path: Path) -> None:
    done = run_here("bench", "recommenders", env={"OPER_DATA": str(tmp_path)})
    assert done.returncode == 1 and "OPER_DATA" in done.stderr


def test_protocols_of_published_tables(tmp_path: Path) -> None:
    """Logs in the original formats are read and measured as in the published tables."""
    rng = np.random.default_rng(0)
    rows = [(u, 1 + 2 * int(i) + u % 2, 1 + int(i) % 5, 1_000_000_000 + 1000 * t + u)
            for u in range(1, 61) for t, i in enumerate(rng.permutation(20)[:12])]
    (tmp_path / "ml-1m").mkdir()
    (tmp_path / "ml-1m" / "ratings.dat").write_text(
        "".join(f"{u}::{i}::{r}::{t}\n" for u, i, r, t in rows))
    entries, printed = run(tmp_path, "ml-1m/ml-1m/[!cdghmr]*")
    models = [e["model"] for e in entries]
    assert {"popularity", "itemknn", "ease", "ials", "sasrec", "sasrec-gbce", "sqn",
            "sa2c"} <= set(models)
    for e in entries:
        assert e["verified"] and e["data"]["training_interactions_per_user"] == 10.0
        assert {"ndcg@10", "recall@10", "recall@200", "ndcg@200"} <= set(e["metrics"])
        assert e["metrics"]["recall@200"]["mean"] == 1.0  # the whole catalogue
        assert e["fit"]["chosen_by"] == "ndcg@10"
        if e["model"].startswith(("sasrec", "sqn", "sa2c")):
            assert e["config"]["steps"] + e["config"]["window"] - 1 == 200
    best = {e["model"]: e["metrics"]["ndcg@10"]["mean"] for e in entries}
    assert best["ease"] > best["popularity"] and "recall@200" in printed

    (tmp_path / "movietweetings").mkdir()
    (tmp_path / "movietweetings" / "ratings.dat").write_text(
        "".join(f"{u}::{i:07}::{2 * r}::{t}\n" for u, i, r, t in rows))
    (entry,), printed = run(tmp_path, "movietweetings/held-out-users/ease")
    assert entry["data"]["test_users"] <= 6 and entry["fit"]["chosen_by"] == "ndcg@100"
    assert set(entry["protocol"]["reported"]) <= set(entry["metrics"])
    assert "recall@50" in printed and entry["data"]["left_out"]["without reward"] > 0
    held = {name: recommenders.DATA_SETS[data].protocols[name].data for data, name in
            (("ml-1m", "ml-1m-all-items"), ("ml-20m", "ml-20m"))}
    assert held["ml-1m-all-items"].item_core == 1 and held["ml-20m"].test == 10_000


def test_graded_rewards_have_the_same_targets(logs: Path) -> None:
    """Models that ignore rewards' sizes get the same figures."""
    graded, binary = (run(logs, f"movietweetings/{p}/[ep]*")[0] for p in ("graded", "last-two"))
    assert {e["model"] for e in graded} == {"popularity", "ease"}
    assert [e["metrics"] for e in graded] == [e["metrics"] for e in binary]
    assert [e["data"] for e in graded] == [e["data"] for e in binary]
    data = recommenders.load("movietweetings", "graded")
    assert set(data.rewards) == set(np.float32([1, 2, 3]) / np.float32(3))


def test_ablations_include_sasrec(logs: Path) -> None:
    found = {c.model for c in recommenders.cases(quick=True, models="ablations")}
    assert found == {"sasrec"} | {n for n, m in recommenders.MODELS.items() if m.ablation}
    assert {c.config.reward_loss for c in recommenders.cases(quick=True, models="ablations")
            if c.protocol == "graded" and c.model != "sasrec"} == {"mse"}


def test_a_search_chooses_settings_on_validation_and_continues(logs: Path) -> None:
    """With more trials, earlier ones are not trained again; ``--seeds 0`` trains nothing."""
    (first,), _ = run(logs, "movietweetings/last-two/ease", "--search", "2", "--seeds", "2")
    before = {path: path.stat().st_mtime_ns for path in (logs / "runs").iterdir()}
    assert len(before) == 2 + 2
    (entry,), printed = run(logs, "movietweetings/last-two/ease", "--search", "4", "--seeds",
                            "2")
    assert {path: path.stat().st_mtime_ns for path in before} == before
    tried, k = entry["search"]["trials"], entry["search"]["chosen"]
    assert tried[:2] == first["search"]["trials"] and len(tried) == 4
    assert [t["settings"] for t in tried] == [trials.settings("ease", k) for k in range(4)]
    assert tried[k]["valid_ndcg@10"] == max(t["valid_ndcg@10"] for t in tried)
    assert not any("test" in key for t in tried for key in t)
    own = dataclasses.asdict(recommenders.MODELS["ease"].config)
    assert entry["config"] == own | tried[k]["settings"] and [
        r["seed"] for r in entry["runs"]] == [1, 2]
    assert entry["runs"][0]["valid_ndcg@10"] == tried[k]["valid_ndcg@10"]  # EASE has no seed
    assert f"trial {k} of 4 chosen" in printed
    (logs / "runs" / "movietweetings-time-sasrec-0123.npz").write_bytes(b"of other sources")
    reported, _ = run(logs, "*", "--search", "4", "--seeds", "0")
    assert [(e["name"], e["search"], e["metrics"]) for e in reported] == [
        (entry["name"], entry["search"], entry["metrics"])]
    done = run_here("bench", "recommenders", "--search", "5", "--seeds", "0", "--runs",
                    str(logs / "runs"))
    assert done.returncode == 1 and "no saved runs" in done.stderr


def test_an_interrupted_search_continues(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search stopped in the middle of a trial ends with the result of one never stopped."""

    def search(folder: str) -> dict[str, Any]:
        (case,) = (c for c in recommenders.cases(True, runs=str(logs / folder), search=2)
                   if c.name == "movietweetings/last-two/multvae")
        return case.measure(lambda text: None)

    validate, calls = harness._validate, 0

    def killed(*args: Any) -> float:
        nonlocal calls
        calls += 1
        if calls == 4:  # the second validation of the second trial
            raise KeyboardInterrupt
        return validate(*args)

    monkeypatch.setattr(harness, "_validate", killed)
    with pytest.raises(KeyboardInterrupt):
        search("a")
    assert len(list((logs / "a").glob("*.npz"))) == 1  # the first trial
    assert len(list((logs / "a").glob("*.unfinished"))) == 1
    found = search("a")
    assert calls == 4 + 1 + 2  # the rest of the second trial, and the result
    whole = search("b")
    for entry in (found, whole):
        for run_or_trial in (*entry["search"]["trials"], *entry["runs"]):
            run_or_trial.pop("seconds")
    assert found == whole


def test_a_trial_that_cannot_be_trained_does_not_end_the_search(
        logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is recorded, and stored like others; if no trial can be trained, its error is raised."""
    train, bad, calls = recommenders._train_and_test, {1, 2}, 0

    def failing(case: recommenders.Case, *rest: Any) -> harness.Runs:
        nonlocal calls
        calls += 1
        if case.config in [whole.trial(k).config for k in bad]:
            raise InvalidInputError("cannot train", "loss", float("nan"), "a finite number",
                                    "lower the learning rate")
        return train(case, *rest)

    monkeypatch.setattr(recommenders, "_train_and_test", failing)
    (whole,) = (c for c in recommenders.cases(True, runs=str(logs / "runs"), search=3)
                if c.name == "movietweetings/last-two/ease")
    found = whole.measure(lambda text: None)
    tried = found["search"]["trials"]
    assert found["search"]["chosen"] == 0 and [k for k, t in enumerate(tried) if "failed" in t
                                               ] == [1, 2] and "loss=nan" in tried[1]["failed"]
    assert recommenders.totals([found]).keys() <= {"search_processor_hours"}
    assert "trial 0 of 3 chosen" in recommenders.remarks([{"name": "ease", **found}])
    assert calls == 3 + 1 and recommenders.seeds_of(dataclasses.replace(whole, seeds=0)) == [1]
    assert calls == 3 + 1  # failed trials are not trained again
    bad.add(0)
    failed = dataclasses.replace(whole, runs=str(logs / "failed"))
    with pytest.raises(InvalidInputError, match="cannot train: loss=nan"):
        failed.measure(lambda text: None)
    assert recommenders.seeds_of(dataclasses.replace(failed, seeds=0)) == []


def test_a_record_of_another_search_is_not_resumed(logs: Path) -> None:
    """Its entries would have had another number of trials than the new ones."""
    run(logs, "movietweetings/last-two/ease", "--search", "2", "--seeds", "1")
    for search, problem in ((["--search", "3"], "=2, expected 3"), ([], "=2, expected 0")):
        done = run_here("bench", "recommenders", "--resume", str(logs / "record.json"),
                        "--only", "*/last-two/e*", *search)
        assert done.returncode == 1 and problem in done.stderr and "--search" in done.stderr


def test_ranges_of_settings_suit_their_models() -> None:
    """Every trial has a valid configuration, and the first ten of a model differ."""
    for name, space in trials.SPACES.items():
        model = recommenders.MODELS[name]
        drawn = [trials.settings(name, k) for k in range(10)]
        assert drawn[0] == {} and all(found.keys() == space.keys() for found in drawn[1:])
        assert len({repr(trials.with_settings(model.config, model.fit, d)) for d in drawn}) == 10
        for key, values in space.items():
            some = [found[key] for found in drawn[1:]]
            if isinstance(values, trials.Between):
                assert values.low <= min(some) < max(some) <= values.high
            else:
                assert set(some) <= set(values.values) and len(set(some)) > 1
    with pytest.raises(InvalidInputError, match="--models"):
        recommenders.cases(True, models="ablations", search=2)
