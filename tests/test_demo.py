"""A small demo, and the example, from beginning to end."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oper.bench.core import child
from oper.bench.demo.demo import _compare, _timings
from oper.data import SyntheticLog, write_synthetic_log
from oper.train.model import save_state
from tests.forked import FORKS
from tests.support import ROOT, run_here

KEYS = ("rows", "plan_gap", "max_abs_diff", "oper_step_ms", "torchrec_step_ms", "ratio_step",
        "oper_forward_ms", "torchrec_forward_ms", "ratio_forward", "dlrm_ratio_step")
HEADINGS = ("DATA", "PLAN", "CORRECTNESS", "TIME", "VALIDATION")


def test_demo_on_a_given_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "subprocess", FORKS)
    cardinalities = tuple(5 + 37 * k for k in range(26))
    log = write_synthetic_log(tmp_path / "clicks.txt.gz",
                              SyntheticLog(6_000, 3, cardinalities, effect=3.0))
    os.unlink(f"{log}.about.json")  # without it, the demo takes the log for real data
    done = run_here("demo", "--quick", "--data", log, "--out", tmp_path / "out", "--record",
                    tmp_path / "demo.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "demo.json").read_text())
    assert all(math.isfinite(found[key]) for key in KEYS)
    assert found["rows"] == 6_000 and found["synthetic"] is False
    assert "SYNTHETIC" not in done.stdout and all(h in done.stdout for h in HEADINGS)
    assert found["verified"] and found["max_relative_diff"] <= 1e-5
    assert found["checked_steps"] >= 20
    assert found["plan_gap"] >= 0
    assert set(found["auc"]) == {"oper", "unsharded", "torchrec"}
    assert all(0.55 < auc < 1 for auc in found["auc"].values())
    assert found["auc"]["oper"] == pytest.approx(found["auc"]["unsharded"], abs=1e-3)
    for name in ("step", "forward"):
        ratio = found[f"torchrec_{name}_ms"] / found[f"oper_{name}_ms"]
        assert found[f"ratio_{name}"] == pytest.approx(ratio, abs=1e-3)
    assert done.stderr.count("[6/6]") == 1
    assert (tmp_path / "out" / "demo.json").exists()


def test_differences_are_found(tmp_path: Path) -> None:
    import torch

    weights = {"logits": torch.ones(3), "weights/a": torch.tensor([4.0, 2.0])}
    save_state(tmp_path / "unsharded.pt", weights)
    save_state(tmp_path / "same.pt", weights)
    save_state(tmp_path / "off.pt", weights | {"weights/a": torch.tensor([4.0, 3.0])})
    save_state(tmp_path / "nan.pt", weights | {"weights/a": torch.tensor([4.0, float("nan")])})
    assert _compare(tmp_path, "same") == {"logits": 0.0, "weights": 0.0, "relative": 0.0}
    assert _compare(tmp_path, "off") == {"logits": 0.0, "weights": 1.0, "relative": 0.25}
    assert _compare(tmp_path, "nan")["relative"] == float("inf")


def test_bad_input_is_one_message(tmp_path: Path) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_text("1\t2\n" * 100)
    for arguments in (["--data", str(bad)], ["--data", str(tmp_path / "none.txt")]):
        done = run_here("demo", *arguments, "--out", str(tmp_path / "out"))
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert done.stderr.count("oper: ") == 1


# ---- the example ---------------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", [
    [], ["-m", "torch.distributed.run", "--nproc-per-node", "2"]], ids=["alone", "torchrun"])
def test_shard_dlrm(launcher: list[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *launcher, "examples/shard_dlrm.py"], cwd=ROOT,
                          capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(losses) == 4 and losses[-1] < losses[0]


def test_each_time_is_compared_with_its_fastest_plan() -> None:
    ms = {"oper": (1, 1, 1), "table_wise": (2, 6, 8), "mixed": (3, 5, 7)}
    sides = {name: {what: {"median_ms": x} for what, x in zip(
        ("step", "forward", "train_step"), of, strict=True)} for name, of in ms.items()}
    found = _timings(sides, "table_wise")
    assert (found["ratio_step"], found["ratio_forward"], found["dlrm_ratio_step"]) == (2, 5, 7)
    assert found["torchrec_plan"] == "table_wise" and found["torchrec_forward_plan"] == "mixed"
