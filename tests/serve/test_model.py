"""Trained models: scores equal the unsharded model's; new weights while requests are served."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oper import cli
from oper.errors import FileFormatError, InvalidInputError
from oper.integration.checkpoint.follow import Change
from oper.serve import Client, Request
from oper.serve.model import PublishedModel, kjt_of, load_model
from oper.serve.requests import join
from oper.tables import TableSpec
from oper.train.model import describe, save_state
from oper.train.raw_ids import build_trained
from oper.train.resume import CONFIG, STATE
from tests.support import announced, damage_record, read_trace, serving, wait_for

TABLES = tuple(TableSpec(f"t{k}", rows, 8, (f"f{k}",)) for k, rows in enumerate((50, 7, 300)))
CONFIGURATION = {"dim": 8, "dense_layers": [16], "over_layers": [16]}


def write_run(folder: Path, seed: int) -> torch.nn.Module:
    """Write a folder like one of ``oper train``; returns its model."""
    torch.manual_seed(seed)
    model: Any = build_trained(TABLES, 3, CONFIGURATION, "cpu")
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(0, 0.5)
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(
        {"config": {"model": {"name": "dlrm", **CONFIGURATION}}, "model": describe(TABLES, 3)}))
    save_state(folder / STATE, {f"model.{n}": v for n, v in model.state_dict().items()})
    return model


def request_of(seed: int, num_samples: int) -> Request:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, (3, num_samples)).astype(np.int32)
    ids = [rng.integers(0, t.num_rows, int(row.sum())) for t, row in zip(TABLES, lengths,
                                                                          strict=True)]
    return Request(rng.random((num_samples, 3), np.float32), lengths, np.concatenate(ids))


@torch.no_grad()
def scores_of(model: torch.nn.Module, request: Request) -> np.ndarray:
    logits = model(torch.from_numpy(request.dense), kjt_of(request, ("f0", "f1", "f2")))
    return torch.sigmoid(logits.reshape(-1)).numpy()


@pytest.mark.parametrize(("row_dtype", "tolerance"), [(None, 1e-6), ("int8", 0.05)])
def test_scores_of_a_worker_are_those_of_the_model(
        tmp_path: Path, row_dtype: str | None, tolerance: float) -> None:
    model, request = write_run(tmp_path, 1), request_of(0, 30)
    published = load_model(tmp_path, row_dtype=row_dtype)
    predictor: Any = published.opener()()
    try:
        scores, epoch = predictor.predict(request)
        assert np.abs(scores - scores_of(model, request)).max() < tolerance
        assert predictor.rows_read()["local"] == request.ids.size
        other = write_run(tmp_path, 2)
        assert published.publish() == predictor.epoch == epoch + 1
        scores, after = predictor.predict(request)
        assert after == epoch + 1
        assert np.abs(scores - scores_of(other, request)).max() < tolerance
        assert published.memory_bytes()["tables"] > 0
    finally:
        predictor.close()
        published.close()


@pytest.mark.parametrize("row_dtype", [None, "int8"])
def test_candidates_score_as_full_rows_and_what_is_their_users_is_computed_once(
        tmp_path: Path, row_dtype: str | None) -> None:
    write_run(tmp_path, 1)
    published = load_model(tmp_path, row_dtype=row_dtype)
    predictor: Any = published.opener()()
    try:
        full = request_of(0, 30)
        lengths = full.lengths.copy()
        lengths[1:, 1:] = 0
        parts = np.split(full.ids, np.cumsum(full.lengths.sum(axis=1))[:-1])
        request = Request(full.dense, lengths, np.concatenate(
            [part[:n] for part, n in zip(parts, lengths.sum(axis=1), strict=True)]), (1, 2))
        batch = join([request, request])
        assert predictor.shares_bags and batch.shared == (1, 2)
        epochs = set()
        for seed in (1, 2, 3):  # other weights in the other buffer, then in place
            if seed == 2:
                write_run(tmp_path, seed)
                published.publish()
            elif seed == 3:
                published.publish(Change(0, 1, 0.0, {}, {
                    name: value for name, value in write_run(tmp_path, seed).state_dict().items()
                    if "embedding_bags" not in name}))
            scores, read = [], [predictor.rows_read()["local"]]
            for each in (batch, batch.expanded()):
                found, epoch = predictor.predict(each)
                scores.append(found)
                read.append(predictor.rows_read()["local"])
                epochs.add(epoch)
            # Sums of the first layer are rounded in another order.
            assert np.abs(scores[0] - scores[1]).max() < 1e-5 and scores[0].std() > 1e-2
            assert np.diff(read).tolist() == [batch.ids.size, batch.expanded().ids.size]
        assert epochs == {1, 2, 4}
    finally:
        predictor.close()
        published.close()


def test_the_command_publishes_what_changes(tmp_path: Path) -> None:
    """One server runs for all checks, since a start takes seconds."""
    folder = tmp_path / "run"
    models, request = {1: write_run(folder, 1)}, request_of(0, 20)
    stop, wrong, trace = threading.Event(), [], tmp_path / "trace.json"
    with (serving(folder, "--json", "--watch", "--workers", "1", "--trace", str(trace),
                  "--trace-s", "1") as process,
          contextlib.ExitStack() as at_end):
        at_end.callback(stop.set)
        client = Client(announced(process)["address"], timeout_s=30)

        def flow() -> None:
            while not stop.is_set():
                scores, epoch = client.score_request(request)
                if np.abs(scores - scores_of(models[epoch], request)).max() > 1e-6:
                    wrong.append(epoch)

        epoch = client.score_request(request)[1]
        models = {epoch: models.pop(1)}
        thread = threading.Thread(target=flow)
        thread.start()
        process.send_signal(signal.SIGUSR1)
        for seed in (2, 3):
            models[epoch + 1] = write_run(tmp_path / "next", seed)
            os.replace(tmp_path / "next" / STATE, folder / STATE)
            wait_for(lambda e=epoch: client.score_request(request)[1] == e + 1)
            epoch += 1
        (folder / STATE).write_bytes(b"rubbish")
        wait_for(lambda: "oper_failed_publications_total 1" in client.metrics())
        assert client.score_request(request)[1] == epoch
        wait_for(trace.exists)
        assert_traced(trace, process.pid)
        stop.set()
        thread.join()
        assert not wrong
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=120)
        assert process.returncode == 0
        assert "the old weights remain in use: cannot read" in log


def assert_traced(path: Path, supervisor: int) -> None:
    """The trace has a publication, and requests, batches and the kernels' lookups of a worker."""
    bars = [e for e in read_trace(path)["traceEvents"] if e["ph"] == "X"]
    assert {e["name"] for e in bars if e["pid"] == supervisor} == {"publication", "switch"}
    of_worker = [e for e in bars if e["pid"] != supervisor]
    batches, lookups, requests = ([e for e in of_worker if e["name"] == name]
                                  for name in ("batch", "lookup", "request"))
    assert requests and all(e["args"]["samples"] == 20 for e in requests)
    assert all(e["args"]["samples"] == 20 * e["args"]["requests"] for e in batches)
    assert len(batches) > 1 and len(batches) >= len(lookups) >= len(batches) - 1
    ends = sorted((e["ts"], e["ts"] + e["dur"]) for e in batches)
    for e in lookups:
        assert any(a <= e["ts"] and e["ts"] + e["dur"] <= b + 0.002 for a, b in ends), e


@pytest.mark.parametrize("text, words", [
    ("{}", "trained with this release"), ("rubbish", "config.*expected JSON"),
    ("[]", "trained with this release"),
    ('{"config": {"model": {}}, "model": {}}', "trained with this release"),
    ('{"config": {"model": []}, "model": {}}', "trained with this release")])
def test_other_folders_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / CONFIG).write_text(text)
    with pytest.raises(FileFormatError, match=words):
        load_model(tmp_path)


def test_a_folder_without_configuration_is_one_error(tmp_path: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    """One of an interrupted copy, say."""
    write_run(tmp_path, 1)
    (tmp_path / CONFIG).unlink()
    assert cli.main(["serve", str(tmp_path)]) == 1
    assert "config.json='missing', expected the file that oper train writes first; name the" in (
        capsys.readouterr().err)


@pytest.mark.parametrize("name", ["nowhere", "a.file"])
def test_a_path_that_is_no_folder_is_reported(name: str, tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.file").touch()
    assert cli.main(["serve", str(tmp_path / name)]) == 1
    assert "a folder that oper train wrote" in capsys.readouterr().err


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_model(tmp_path / "nowhere")


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    model = write_run(tmp_path, 1)
    state = {n: v for n, v in model.state_dict().items() if "t0" not in n}
    build = functools.partial(build_trained, TABLES, 3, CONFIGURATION)
    with pytest.raises(InvalidInputError, match="do not fit"):
        PublishedModel(build, state, load_model(tmp_path, "other").signature)


def test_damaged_weights_are_refused_and_the_old_ones_stay_in_service(tmp_path: Path) -> None:
    """Bits are flipped inside a table, which torch.load does not detect."""
    write_run(tmp_path, 1)
    published = load_model(tmp_path)
    predictor: Any = published.opener()()
    request = request_of(0, 30)
    try:
        before, epoch = predictor.predict(request)
        rows = write_run(tmp_path, 2).sparse_arch.embedding_bag_collection.state_dict()
        table = next(iter(rows.values())).numpy().tobytes()
        damage_record(tmp_path / STATE, table)
        with pytest.raises(FileFormatError, match=r"state\.pt.*CRC-32 of record"):
            published.publish()
        after, same = predictor.predict(request)
        assert same == epoch and np.array_equal(before, after)
    finally:
        predictor.close()
        published.close()
    with pytest.raises(FileFormatError, match=r"state\.pt.*CRC-32 of record"):
        load_model(tmp_path)
