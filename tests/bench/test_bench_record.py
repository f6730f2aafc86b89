"""Records, interleaved timing, comparison of tensors, and child processes of benchmarks."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import oper
from oper.bench import verbs
from oper.bench.core import record
from oper.bench.core.child import Child
from oper.bench.core.memory import peak_rss_mb
from oper.bench.core.report import noise_note, report
from oper.bench.core.workload import Workload, batch_ids, collect_stats
from oper.bench.tables.verify import Verdict
from oper.errors import InvalidInputError, OperError
from tests.bench import helpers
from tests.support import ROOT, run_command


def test_interleave_gives_every_contender_the_same_calls_in_turns() -> None:
    seen: list[tuple[str, int]] = []
    aligned: list[int] = []
    runs = {name: (lambda k, name=name: seen.append((name, k))) for name in "ab"}
    taken = record.interleave(runs, lambda: aligned.append(1), rounds=3, per_round=2, lead_in=1)
    assert {n: t.shape for n, t in taken.items()} == {"a": (6,), "b": (6,)}
    assert [k for n, k in seen if n == "a"] == [k for n, k in seen if n == "b"] == list(range(9))
    # The order of the contenders rotates.
    assert "".join(n for n, _ in seen) == "aaabbb" + "bbbaaa" + "aaabbb"
    assert len(aligned) == len(seen)


def test_kept_entries_name_the_machine_and_versions_that_they_are_from(tmp_path: Path) -> None:
    path = str(tmp_path / "record.json")
    cases = [{"name": "a"}, {"name": "b", "failed": "x"}]
    record.write(path, record.record("plan", [], cases, 0.0))
    assert record.resumed(path, None, "plan") == {"a": {"name": "a"}}
    value = json.loads(Path(path).read_text())
    value["machine"]["cpu"], value["versions"]["torch"] = "another", "1.0"
    record.write(path, value)
    entry = record.resumed(path, None, "plan")["a"]
    assert entry["machine"]["cpu"] == "another" and entry["versions"]["torch"] == "1.0"
    record.write(path, record.record("plan", [], [entry], 0.0))
    assert record.resumed(path, None, "plan") == {"a": entry}


def test_figures_are_rounded_to_json() -> None:
    given = {"a": np.float64(1 / 3), "b": (np.int64(2**40), 1234567.8), "c": {"d": np.eye(1)}}
    found = {"a": 0.333333, "b": [2**40, 1234570.0], "c": {"d": [[1.0]]}}
    assert record.rounded(given) == found == json.loads(json.dumps(record.rounded(given)))


def test_a_record_is_json_even_if_a_figure_is_not_finite(tmp_path: Path) -> None:
    record.write(tmp_path / "r.json", {"cases": [{"name": "a", "x": [np.inf, 1.5, np.nan]}]})
    text = (tmp_path / "r.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["cases"][0]["x"] == [None, 1.5, None]


def test_summary_is_in_milliseconds() -> None:
    found = record.summary(np.arange(1, 101) / 1e3)
    assert found["median_ms"] == 50.5 and found["min_ms"] == 1 and found["n"] == 100
    assert found["p10_ms"] < found["median_ms"] < found["p90_ms"]


def test_record_has_the_agreed_keys(tmp_path) -> None:
    value = record.record("train", ["oper", "bench", "train"], [{"name": "x"}], 0.5)
    assert list(value) == ["benchmark", "command", "versions", "machine", "cases"]
    assert value["command"] == "oper bench train" and value["machine"]["load_before"] == 0.5
    assert value["machine"]["cores"] >= 1 and value["versions"]["torch"]
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short=12", "HEAD"],
                            capture_output=True, text=True).stdout.strip()
    is_checkout = commit and (ROOT / ".git").exists()
    version = f"{oper.__version__}+g{commit}" if is_checkout else oper.__version__
    assert value["versions"]["oper"].removesuffix(".dirty") == version
    record.write(tmp_path / "r.json", value)
    assert json.loads((tmp_path / "r.json").read_text()) == value


def test_disturbed_cases_are_named() -> None:
    quiet = {"name": "a", "other_busy_cores": {"step": 0.02, "forward": 0.0}}
    assert noise_note([quiet]) == ""
    noisy = [quiet, {"name": "b", "other_busy_cores": {"step": 0.0, "forward": 1.0}},
             {"name": "c", "other_busy_cores": 0.5}]
    assert "b 1.0, c 0.5" in noise_note(noisy)


def test_a_report_shows_the_figures_that_are_named() -> None:
    entries = [
        {"name": "a", "verified": True, "step_ms": 1234.5, "best": "x", "share": 0.25},
        {"name": "b", "verified": False, "step_ms": None,
         "plans": {"oper": {"verification": {"passed": False, "max": 1.0}}}},
        {"name": "c", "plans": {"p": {"us": {"mean": 1.0, "low": 0.5, "high": 1.5}}, "q": {}}},
        {"name": "d", "number": 7, "text": "no number"},
        {"name": "e", "verified": True, "skipped": "no data"}]
    lines = report(entries, [("step_ms", "best", "share", "absent"), ("plans.*.us",)]).splitlines()
    assert [line.split() for line in lines] == [
        ["case", "step", "ms", "best", "share", "verified"], ["-" * len(lines[1])],
        ["a", "1,234", "x", "0.25", "yes"], ["b", "-", "NO"],
        ["case", "us"], ["-" * len(lines[5])], ["c:", "p", "1", "[0.5,", "1.5]"],
        ["d:", "number", "7"], ["skipped", "e:", "no", "data"],
        ["b", "is", "NOT", "verified;", "plans.oper.verification:", "{'passed':", "False,",
         "'max':", "1.0}"]]


@pytest.mark.parametrize(("ours", "passed"), [
    ([1.0, 2.0], True), ([1.0, 2.0 + 1e-6], True), ([1.0, 2.001], False), ([1.0, 2.0, 3.0], False),
    ([float("nan"), 2.0], False)])
def test_a_comparison_can_fail(ours: list[float], passed: bool) -> None:
    verdict = Verdict()
    assert not verdict.passed  # nothing compared, nothing shown
    verdict.compare("pooled", torch.tensor(ours), torch.tensor([1.0, 2.0]))
    assert verdict.passed is passed
    verdict.compare("pooled", torch.ones(2), torch.ones(2))  # a good tensor heals no bad one
    assert verdict.passed is passed
    assert json.loads(json.dumps(verdict.to_json()))["passed"] is passed


@pytest.mark.parametrize(("ours", "passed"), [
    ([1.1, 0.9, 1.0], True), ([1.1, 0.9, 1.0005], True), ([1.1, 0.8, 1.0], False),
    ([1.0, 1.0, 1.0], False), ([1.1, 0.9], False), ([1.1, 0.9, float("nan")], False)])
def test_changes_of_parameters_are_compared(ours: list[float], passed: bool) -> None:
    verdict = Verdict()
    after = torch.tensor([1.1, 0.9, 1.0])
    verdict.compare_changes("dense", torch.tensor(ours), after, torch.ones(3))
    assert verdict.passed is passed


def test_batches_are_reproducible_and_statistics_come_from_others() -> None:
    work = Workload(num_rows=(50, 7), batch_size=64, pooling=3)
    ids = batch_ids(work, 1, 2, 0)
    assert ids.shape == (2, 32 * 3) and ids[1].max() < 7
    assert np.array_equal(ids, batch_ids(work, 1, 2, 0))
    for other in (batch_ids(work, 0, 2, 0), batch_ids(work, 1, 2, 1), batch_ids(work, 1, 2, 0, 1)):
        assert not np.array_equal(ids, other)
    stats = collect_stats(work, 0, 2, 4)
    assert stats.tables["t0"].num_accesses == 4 * 32 * 3
    assert stats.tables["t0"].pooling_factor == 3


def _run(monkeypatch: pytest.MonkeyPatch, words: list[str], verified: bool) -> int:
    entry = {"verified": verified, "name": "ebc-pool1"}
    monkeypatch.setattr(verbs, "measured", lambda chosen: iter([entry] * len(chosen)))
    return run_command("bench", *words)


def test_an_unverified_case_fails_the_command(monkeypatch, tmp_path, capsys) -> None:
    target = tmp_path / "out.json"
    words = ["train", "--quick", "--only", "ebc-*", "--record", str(target)]
    assert _run(monkeypatch, words, True) == 0
    assert _run(monkeypatch, words, False) == 1
    value = json.loads(target.read_text())
    assert value["benchmark"] == "train" and len(value["cases"]) == 2
    assert value["command"] == f"oper bench {' '.join(words[:1] + words[2:4] + words[1:2])} " \
        f"--exchange shared --record {target}".replace("ebc-*", "'ebc-*'")
    assert all(c["load_before"] >= 0 and c["load_after"] >= 0 for c in value["cases"])
    out, err = capsys.readouterr()
    assert "ebc-pool1 done" in err and "ebc-pool1 is NOT verified" in out


def test_json_prints_the_record(monkeypatch, tmp_path, capsys) -> None:
    """As for all commands. With a file, as in version 0.1, it is a deprecated ``--record``."""
    words = ["train", "--quick", "--only", "ebc-*", "--json"]
    assert _run(monkeypatch, words, True) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["benchmark"] == "train" and value["cases"][0]["name"] == "ebc-pool1"
    target = tmp_path / "out.json"
    with pytest.warns(DeprecationWarning, match="use --record .*; version 0.3 will not accept"):
        assert _run(monkeypatch, [*words, str(target)], True) == 0
    assert "ebc-pool1" in capsys.readouterr().out
    assert json.loads(target.read_text())["command"].endswith(f"--record {target}")


def test_a_pattern_without_cases_is_an_error(monkeypatch) -> None:
    with pytest.raises(InvalidInputError, match=r"nothing to run.*--only='nope'"):
        _run(monkeypatch, ["train", "--cases", "nope"], True)


def test_a_child_executes_commands_and_its_errors_are_raised() -> None:
    child = Child(helpers.doubles, (), "the helper")
    assert child.ask("double", 4) == 8
    with pytest.raises(OperError, match="unsupported operand"):
        child.ask("double", None)
    assert child.ask("double", "a") == "aa"  # an error ends nothing
    with pytest.raises(OperError, match="the helper has failed"):
        child.ask("end")
    assert child.close() == 3


def test_peak_memory_is_that_of_the_process_itself() -> None:
    held = np.ones(40_000_000)  # 320 MB, which a child of this process has nothing to do with
    assert peak_rss_mb() > 320 * held[0]
    code = ("from oper.bench.core.memory import peak_rss_mb; a = peak_rss_mb(); "
            "b = b'x' * 50_000_000; print(a, peak_rss_mb())")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(float, out.stdout.split())
    assert 5 < before < 200 and 45 < after - before < 80


def test_a_record_that_cannot_be_written_is_reported_before_the_run(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(verbs, "measured", lambda chosen: pytest.fail("measured"))
    with pytest.raises(InvalidInputError, match="cannot write the result"):
        run_command("bench", "train", "--quick", "--record", tmp_path)
