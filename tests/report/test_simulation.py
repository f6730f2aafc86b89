"""``oper simulate`` from the command line, over a preprocessed folder and over statistics."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from oper import cli
from oper.data import SyntheticLog, write_synthetic_log
from oper.report.simulation import folder_batches
from oper.stats import AccessStats
from oper.tables import TableSpec
from tests.support import read_trace


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A small preprocessed log, its statistics, and plans for two ranks and for two servers."""
    here = tmp_path_factory.mktemp("simulate")
    write_synthetic_log(here / "log.txt", SyntheticLog(num_rows=4000))
    assert cli.main(["preprocess", "criteo-kaggle", str(here / "log.txt"), "-o",
                     str(here / "data")]) == 0
    assert cli.main(["analyze", str(here / "data"), "-o", str(here / "stats.npz")]) == 0
    for name, machine in (("two", ["this-host"]), ("many", ["h100-2x8"])):
        assert cli.main(["plan", str(here / "stats.npz"), "--topology", *machine, "--dim", "16",
                         "--batch-size", "128", "-o", str(here / f"{name}.json")]) == 0
    return here


def simulated(capsys, *words: object) -> dict:
    capsys.readouterr()
    assert cli.main(["simulate", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_user_features_are_drawn_once_per_request(made: Path, capsys: pytest.CaptureFixture[str]
                                                  ) -> None:
    plan, stats = made / "users.json", made / "stats.npz"
    value = json.loads((made / "two.json").read_text())
    value["notes"]["samples_per_bag"] = {f"C{k}": 32 for k in range(1, 20)}
    plan.write_text(json.dumps(value))
    found = simulated(capsys, plan, "--stats", stats, "--steps", "20")
    for phase in found["phases"]:
        assert phase["replayed_bytes"] == pytest.approx(phase["predicted_bytes"], rel=0.05)
    assert found["replayed_step_us"] == pytest.approx(found["predicted_step_us"], rel=0.1)
    assert cli.main(["simulate", str(plan), "--trace", str(made / "data")]) == 1
    assert "does not record which samples share" in capsys.readouterr().err


def test_a_trace_of_real_batches(made: Path, capsys) -> None:
    trace = made / "trace.json"
    value = simulated(capsys, made / "two.json", "--trace", made / "data", "--steps", 5,
                      "--trace-out", trace, "--dense-us", 100, "--in-flight", 2)
    assert value["num_steps"] == 5 and value["world_size"] == 2
    # One row of 64 bytes is read for every id of 26 columns.
    assert sum(value["bytes_read"]["rows"].values()) == 5 * 2 * 128 * 26 * 64
    assert value["bytes_read_total"] == sum(map(sum, value["bytes_by_pair"]))
    # Statistics of the same log: the prediction is close.
    assert value["replayed_step_us"] == pytest.approx(value["predicted_step_us"], rel=0.05)
    assert value["timeline_step_us"] > 100
    events = read_trace(trace)["traceEvents"]
    assert {e["name"] for e in events if e["ph"] == "X"} >= {
        "forward", "backward", "update", "dense", "ids ahead"}


def test_a_trace_of_bags(tmp_path: Path, capsys) -> None:
    """Every rank gets the bags of its samples, for columns with one id and with several ids."""
    lines = [f"{k % 2},{k % 7},{'|'.join(str(x) for x in range(k % 4))}" for k in range(400)]
    (tmp_path / "log.csv").write_text("\n".join(["label,one,many", *lines]) + "\n")
    log, data, stats, plan = (str(tmp_path / n) for n in ("log.csv", "data", "s.npz", "p.json"))
    assert cli.main(["preprocess", "csv", log, "-o", data, "--label", "label", "--sparse",
                     "one,many:|", "--min-count", "1"]) == 0
    assert cli.main(["analyze", data, "-o", stats]) == 0
    assert cli.main(["plan", stats, "--topology", "this-host", "--dim", "16", "-o", plan]) == 0
    tables = [TableSpec(n, t.num_rows, 16, (n,)) for n, t in AccessStats.load(stats).tables.items()]
    (first, *_), (whole, *_) = (list(folder_batches(data, "train", tables, size, ranks))
                                for size, ranks in ((20, 2), (40, 1)))
    for name in ("one", "many"):
        for field in ("ids", "lengths"):
            parts = [getattr(rank[name], field) for rank in first]
            assert np.array_equal(np.concatenate(parts), getattr(whole[0][name], field))
    assert whole[0]["many"].lengths.tolist() == [k % 4 for k in range(40)]
    value = simulated(capsys, plan, "--trace", data, "--batch-size", 20, "--steps", 3)
    assert sum(value["bytes_read"]["rows"].values()) == 120 * (1 + 1.5) * 64


def test_batches_drawn_from_statistics(made: Path, capsys) -> None:
    words = (made / "many.json", "--stats", made / "stats.npz", "--steps", 3)
    value = simulated(capsys, *words, "--seed", 5)
    assert value["world_size"] == 16 and value["bytes_read"]["rows"]["cross host"] > 0
    assert value["replayed_step_us"] == pytest.approx(value["predicted_step_us"], rel=0.15)
    # Distinct rows are sent between servers, with half the bits if requested. The GPUs of a server
    # read each other's memory.
    sent = value["bytes_sent"]
    assert all([*by] == ["cross host"] for by in sent.values())
    assert 0 < sent["rows"]["cross host"] < value["bytes_read"]["rows"]["cross host"]
    half = simulated(capsys, *words, "--seed", 5, "--message-bits", "16,32", "--clipped", "*")
    half = half["bytes_sent"]
    assert half["rows"]["cross host"] * 2 == sent["rows"]["cross host"]
    assert half["row_ids"] == sent["row_ids"] and "squares" not in half  # no column pieces
    assert half["gradient_rows"] == sent["gradient_rows"]
    assert cli.main(["simulate", *map(str, words), "--clipped", "nobody"]) == 1
    assert value == simulated(capsys, *words, "--seed", 5)
    assert value != simulated(capsys, *words, "--seed", 6)
    capsys.readouterr()
    assert cli.main(["simulate", *map(str, words)]) == 0
    out = capsys.readouterr().out
    assert "timeline" in out and "cross host" in out and "forward" in out


def test_replay_errors_name_the_cause(made: Path, tmp_path: Path, capsys) -> None:
    plan = str(made / "two.json")
    other = (made / "two.json").read_text().replace('"features": ["C1"]', '"features": ["other"]')
    (tmp_path / "other.json").write_text(other)
    assert cli.main(["simulate", plan]) == 2
    assert "--trace DIR or --stats FILE" in capsys.readouterr().err
    for words, text in (
            ([plan, "--trace", str(made / "data"), "--split", "what"], "split"),
            ([plan, "--trace", str(made / "data"), "--batch-size", "100000"], "full batches"),
            ([plan, "--trace", str(tmp_path)], "preprocessed folder"),
            ([plan, "--stats", str(made / "stats.npz"), "--topology", "h100-8"], "world_size=2"),
            ([str(tmp_path / "other.json"), "--trace", str(made / "data")], "missing features")):
        capsys.readouterr()
        assert cli.main(["simulate", *words]) == 1, words
        assert text in capsys.readouterr().err
