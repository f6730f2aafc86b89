"""benchmarks/gpu.py: failed or hanging parts do not stop a run, and a later call resumes it."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import forked

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_script", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "WORK", tmp_path / "work")
    return module  # type: ignore[no-any-return]


def call(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
    return int(gpu.main())


def test_a_call_survives_failing_parts_and_the_next_one_continues(gpu: Any, tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch,
                                                                  capsys: pytest.CaptureFixture[str]
                                                                  ) -> None:
    entry = {"verified": True, "forward_fraction_of_floor": 0.7, "ratio_forward_fbgemm": 1.4}
    found = tmp_path / "work" / "case.json"
    runs = tmp_path / "runs"
    write = f"open({str(found)!r}, 'w').write('''{json.dumps({'cases': [entry]})}''')"

    def parts(quick: bool) -> Iterator[Any]:
        python = [sys.executable, "-c"]
        yield gpu.Part("build", [*python, f"open({str(runs)!r}, 'a').write('x')"], 60)
        yield gpu.Part("broken", [*python, "raise SystemExit(3)"], 60)
        yield gpu.Part("hangs", [*python, "import time; print('begun', flush=True); "
                                 "time.sleep(600)"], 3)
        yield gpu.Part("absent", ["no-such-tool-at-all"], 60)
        yield gpu.Part("lookup-pool1-uniform", [*python, write], 60, found)

    monkeypatch.setattr(gpu, "parts", parts)
    out = tmp_path / "out"
    assert call(gpu, monkeypatch, "--out", str(out), "--only", "[!l]*") == 1
    states = {n: p["state"] for n, p in json.loads((out / "gpu.json").read_text())["parts"].items()}
    assert states == {"build": "ok", "broken": "failed with 3", "absent": "not there",
                      "hangs": "out of time after 3 s"}
    assert "begun" in (out / "log.txt").read_text()
    # Elsewhere, from the first call's record: finished parts are not repeated, except the build.
    again = tmp_path / "again"
    assert call(gpu, monkeypatch, "--out", str(again), "--resume", str(out / "gpu.json"),
                "--only", "[!bh]*") == 1
    assert call(gpu, monkeypatch, "--out", str(again), "--only", "build") == 1
    record = json.loads((again / "gpu.json").read_text())["parts"]
    assert record["lookup-pool1-uniform"]["record"]["cases"] == [entry]
    assert runs.read_text() == "xx"
    text = (again / "summary.md").read_text()
    assert "| lookup-pool1-uniform | yes | forward_fraction_of_floor | 0.7 | >= 0.8 | NO |" in text
    assert "| lookup-pool1-uniform | yes | ratio_forward_fbgemm | 1.4 | >= 1.3 | yes |" in text
    assert "hangs: out of time" in text
    assert call(gpu, monkeypatch, "--out", str(again), "--limit", "1") == 1
    assert "left for the next call" in capsys.readouterr().out


def test_the_first_parts_are_the_most_informative(gpu: Any, monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    """The build and tests of exactness, pipeline, processes and graphs precede all timings."""
    assert call(gpu, monkeypatch, "--out", "unused", "--list") == 0
    names = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert names[:7] == ["machine", "driver", "build", "tests-first", "first-pipeline",
                         "first-two-processes", "first-graph"]
    assert names.index("kernels-pool10") < names.index("tests-ranks")
    assert len(names) == len(set(names))


def test_first_parts_name_existing_tests() -> None:
    chosen = ("pipeline", "mixed-2-", "in_a_graph")
    found = forked.run("-m", "pytest", "--collect-only", "-q", "-o", "addopts=", "-p",
                       "no:cacheprovider", "tests/cuda/test_on_gpu.py", "-k", " or ".join(chosen),
                       cwd=SCRIPT.parent.parent)
    assert all(name in found.stdout for name in chosen), found.stdout + found.stderr
