"""From training in two processes to scores over HTTP."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from oper.data import Folder
from oper.errors import InvalidInputError
from oper.serve import Client, Request
from oper.serve.model import load_model
from oper.train.model import build_dlrm, load_state
from oper.train.resume import CHECKPOINT, CONFIG, STATE
from oper.train.tasks import click_batches
from oper.train.trained import find_weights
from tests.serve_support import value_of
from tests.support import announced, serving, wait_for
from tests.train.conftest import Prepared
from tests.train.test_train import config, run_ranks, words

SERVER = ("--json", "--workers", "1")


def validation_batch(prepared: Prepared, run: Path) -> tuple[Request, np.ndarray]:
    """Return a validation batch and the trained model's scores for it."""
    trained = config(prepared, run)
    folder = Folder.open(trained.data)
    model = build_dlrm(folder.tables(trained.model.dim), len(folder.dense), trained.model, seed=9)
    model.load_state_dict(load_state(run / STATE), strict=True)
    batch = next(iter(click_batches(trained, "valid")))
    with torch.no_grad():
        _, (_, logits, _) = model.eval()(batch)
    sparse = batch.sparse_features
    assert list(sparse.keys()) == [f for t in folder.tables(8) for f in t.features]
    lengths = sparse.lengths().view(len(sparse.keys()), -1)
    return (Request(batch.dense_features.numpy(), lengths.numpy().astype(np.int32),
                    sparse.values().numpy().astype(np.int64)),
            torch.sigmoid(logits.reshape(-1)).numpy())


def test_two_ranks_train_and_the_server_scores_alike(prepared: Prepared, tmp_path: Path) -> None:
    """The server first uses a checkpoint, as during training, then detects the final state."""
    run = tmp_path / "run"
    run_ranks(words(prepared, run, stats=prepared.stats, batch_size=128, max_steps=20,
                    checkpoint_every=20))
    request, expected = validation_batch(prepared, run)
    assert expected.std() > 1e-3
    os.rename(run / STATE, tmp_path / STATE)
    assert find_weights(run).name == CHECKPOINT
    with serving(run, *SERVER, "--watch") as server:
        client = Client(announced(server)["address"], timeout_s=30)
        scores, first = client.score_request(request)
        assert np.abs(scores - expected).max() < 1e-6
        os.utime(tmp_path / STATE)
        os.rename(tmp_path / STATE, run / STATE)
        wait_for(lambda: client.score_request(request)[1] == first + 1)
        assert np.abs(client.score_request(request)[0] - expected).max() < 1e-6
        # The next checkpoint is damaged: it is refused, and the old weights remain in use.
        data = next(p for p in (run / CHECKPOINT).iterdir() if p.suffix == ".distcp")
        data.write_bytes(data.read_bytes()[:-8])
        os.utime(run / CHECKPOINT / ".metadata")
        wait_for(lambda: "oper_failed_publications_total 1" in client.metrics())
        assert client.score_request(request)[1] == first + 1
        server.send_signal(signal.SIGTERM)
        _, log = server.communicate(timeout=120)
        assert server.returncode == 0
        assert f"loading {run / CHECKPOINT}" in log
        assert f"cannot read the checkpoint {str(run / CHECKPOINT)!r}" in log


def test_a_server_follows_the_steps_of_a_run(prepared: Prepared, tmp_path: Path) -> None:
    """Every delta copied to a store is served, with its lag; a damaged one is refused."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    run_ranks(words(prepared, run, stats=prepared.stats, batch_size=128, max_steps=9,
                    checkpoint_every=5, delta_every=1))
    request, expected = validation_batch(prepared, run)
    chain = next((run / f"{CHECKPOINT}.deltas").iterdir())
    deltas = sorted(chain.iterdir())
    assert [d.name for d in deltas] == [f"{k:06d}" for k in range(4)]  # of steps 6 to 9
    os.rename(run / STATE, tmp_path / STATE)
    there = copy / f"{CHECKPOINT}.deltas" / chain.name
    copy.mkdir()
    with serving(run, *SERVER, "--follow", copy.as_uri()) as server:
        client = Client(announced(server)["address"], timeout_s=30)
        assert client.score_request(request)[1] == 1
        shutil.copytree(run / CHECKPOINT, copy / CHECKPOINT)
        wait_for(lambda: client.score_request(request)[1] == 2)
        before = client.score_request(request)[0]
        for k, delta in enumerate(deltas[:3]):
            shutil.copytree(delta, tmp_path / "delta")
            there.mkdir(parents=True, exist_ok=True)
            os.rename(tmp_path / "delta", there / delta.name)
            wait_for(lambda epoch=4 + 2 * k: client.score_request(request)[1] == epoch)
            scores = client.score_request(request)[0]
            assert np.abs(scores - before).max() > 0
            before = scores
        wait_for(lambda: value_of(client.metrics(), "oper_weights_lag_seconds") > 0)
        shutil.copytree(deltas[3], tmp_path / "delta")
        part = next((tmp_path / "delta").iterdir())
        part.write_bytes(part.read_bytes()[:-9])
        os.rename(tmp_path / "delta", there / deltas[3].name)
        assert server.stderr is not None
        lines = iter(server.stderr.readline, "")
        assert "the old weights remain in use until the next full checkpoint" in next(
            line for line in lines if deltas[3].name in line)
        assert client.score_request(request)[1] == 8
        os.utime(tmp_path / STATE)
        os.rename(tmp_path / STATE, copy / STATE)
        wait_for(lambda: client.score_request(request)[1] == 9)
        assert np.abs(client.score_request(request)[0] - expected).max() < 1e-6
        # The last delta leads to the weights with which the run ends.
        shutil.rmtree(there / deltas[3].name)
        shutil.copytree(deltas[3], there / deltas[3].name)
        os.unlink(copy / STATE)
        wait_for(lambda: client.score_request(request)[1] == 10 + 2 * 4)
        assert np.abs(client.score_request(request)[0] - expected).max() < 1e-6
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=120)
        assert server.returncode == 0


def test_the_newest_weights_are_served(tmp_path: Path) -> None:
    from oper.errors import FileFormatError

    with pytest.raises(FileFormatError, match="first checkpoint"):
        find_weights(tmp_path)
    previous = tmp_path / f"{CHECKPOINT}.previous"
    for k, path in enumerate((previous / ".metadata", tmp_path / CHECKPOINT / ".metadata",
                              tmp_path / STATE)):
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
        os.utime(path, (k, k))
        assert find_weights(tmp_path) == (path if path.name == STATE else path.parent)
    os.utime(tmp_path / CHECKPOINT / ".metadata", (9, 9))
    assert find_weights(tmp_path) == tmp_path / CHECKPOINT


def test_weights_whose_rows_are_numbered_otherwise_are_refused(prepared: Prepared, tmp_path: Path
                                                               ) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    run_ranks(words(prepared, run, stats=prepared.stats, batch_size=128, max_steps=1,
                    checkpoint_every=1), 1)
    shutil.copytree(run, other)
    about = json.loads((other / CONFIG).read_text())
    numbering = about["model"]["numbering"]
    assert numbering == Folder.open(prepared.folder).manifest["numbering"]
    about["model"]["numbering"] = "another"
    (other / CONFIG).write_text(json.dumps(about))
    for served in (STATE, CHECKPOINT):
        if served == CHECKPOINT:
            os.unlink(run / STATE)
        model = load_model(run)
        model.reads_again(lambda model=model: model.read_folder(other))
        try:
            with pytest.raises(InvalidInputError,
                               match=f"numbering.*='another', expected {numbering}"):
                model.publish()
        finally:
            model.close()
    os.unlink(other / STATE)  # its checkpoint has the numbering of the data
    model = load_model(other)
    model.reads_again(lambda: model.read_folder(run))
    try:
        assert model.publish() == 2
    finally:
        model.close()
