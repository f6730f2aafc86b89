"""Servers of trained models: scores, new weights, starting and stopping."""

import contextlib
import errno
import functools
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oper import cli
from oper.errors import DeadlineError, FileFormatError, InvalidInputError, OperError
from oper.integration.checkpoint.follow import Change, Follower
from oper.serve import BatchOptions, Client, Request, ServeOptions, Server, Signature
from oper.serve.client import _Connection
from oper.serve.model import PublishedModel, kjt_of, load_model
from oper.serve.requests import join
from oper.serve.signals import Signals
from oper.support.processes import free_port
from oper.tables import TableSpec
from oper.train.model import describe, save_state
from oper.train.raw_ids import build_trained
from oper.train.resume import CONFIG, STATE
from tests.serve_support import Sums, expected, random_request, with_user
from tests.support import ROOT, announced, damage_record, read_trace, serving, wait_for

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


@contextlib.contextmanager
def published(folder: Path, **options: Any) -> Iterator[tuple[PublishedModel, Any]]:
    """Publish a folder's model; yields it and a worker's predictor."""
    model = load_model(folder, **options)
    predictor: Any = model.opener()()
    try:
        yield model, predictor
    finally:
        predictor.close()
        model.close()


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
    with published(tmp_path, row_dtype=row_dtype) as (source, predictor):
        scores, epoch = predictor.predict(request)
        assert np.abs(scores - scores_of(model, request)).max() < tolerance
        assert predictor.rows_read()["local"] == request.ids.size
        other = write_run(tmp_path, 2)
        assert source.publish() == predictor.epoch == epoch + 1
        scores, after = predictor.predict(request)
        assert after == epoch + 1
        assert np.abs(scores - scores_of(other, request)).max() < tolerance
        assert source.memory_bytes()["tables"] > 0


class InBfloat16(torch.nn.Module):
    """A DLRM whose logits are bfloat16."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.inner = build_trained(TABLES, 3, CONFIGURATION, device)

    def forward(self, dense: torch.Tensor, kjt: Any) -> torch.Tensor:
        return self.inner(dense, kjt).bfloat16()


def test_logits_of_16_bits_are_scored() -> None:
    signature = Signature("short", ("f0", "f1", "f2"), tuple(t.num_rows for t in TABLES), 3)
    whole, request = InBfloat16("cpu"), request_of(0, 4)
    model = PublishedModel(InBfloat16, whole, signature)
    predictor: Any = model.opener()()
    scores, _ = predictor.predict(request)
    predictor.close()
    model.close()
    assert scores.dtype == np.float32
    assert np.abs(scores - scores_of(whole.inner, request)).max() < 0.01


@pytest.mark.parametrize("row_dtype", [None, "int8"])
def test_candidates_score_as_full_rows_and_user_features_are_computed_once(tmp_path: Path,
                                                                           row_dtype: str | None
                                                                           ) -> None:
    write_run(tmp_path, 1)
    with published(tmp_path, row_dtype=row_dtype) as (source, predictor):
        request = with_user(request_of(0, 30), (1, 2))
        batch = join([request, request])
        assert predictor.shares_bags and batch.shared == (1, 2)
        epochs = set()
        for seed in (1, 2, 3):  # other weights in the other buffer, then in place
            if seed == 2:
                write_run(tmp_path, seed)
                source.publish()
            elif seed == 3:
                source.publish(Change(0, 1, 0.0, {}, {
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


def test_the_command_publishes_changed_weights(tmp_path: Path) -> None:
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
    """An interrupted copy, for instance, leaves such a folder."""
    write_run(tmp_path, 1)
    (tmp_path / CONFIG).unlink()
    assert cli.main(["serve", str(tmp_path)]) == 1
    assert "config.json='missing', expected the file that oper train writes first; name the" in (
        capsys.readouterr().err)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    model = write_run(tmp_path, 1)
    state = {n: v for n, v in model.state_dict().items() if "t0" not in n}
    build = functools.partial(build_trained, TABLES, 3, CONFIGURATION)
    with pytest.raises(InvalidInputError, match="do not fit"):
        PublishedModel(build, state, load_model(tmp_path, "other").signature)


def test_damaged_weights_are_refused_and_the_old_ones_stay_in_service(tmp_path: Path) -> None:
    """Bits are flipped inside a table, which torch.load does not detect."""
    write_run(tmp_path, 1)
    request = request_of(0, 30)
    with published(tmp_path) as (source, predictor):
        before, epoch = predictor.predict(request)
        rows = write_run(tmp_path, 2).sparse_arch.embedding_bag_collection.state_dict()
        table = next(iter(rows.values())).numpy().tobytes()
        damage_record(tmp_path / STATE, table)
        with pytest.raises(FileFormatError, match=r"state\.pt.*CRC-32 of record"):
            source.publish()
        after, same = predictor.predict(request)
        assert same == epoch and np.array_equal(before, after)
    with pytest.raises(FileFormatError, match=r"state\.pt.*CRC-32 of record"):
        load_model(tmp_path)


def test_weights_that_cannot_be_read_now_are_read_again(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As after an error of a network file system, which need not come again."""
    (tmp_path / STATE).touch()
    failures: list[Exception] = [OSError(errno.ESTALE, "stale"), OSError(errno.EIO, "failed"),
                                 OSError(errno.EIO, "failed"), DeadlineError("busy")]
    epochs = []

    def look() -> Path:
        if len(failures) == 4:
            raise failures.pop(0)
        return tmp_path / STATE

    def publish(weights: object = None) -> int:
        if failures:
            raise failures.pop(0)
        epochs.append(2)
        return 2

    server, run = Server(Sums()), Follower(look, in_service=False)
    monkeypatch.setattr(server, "publish", publish)
    counts: Any = types.SimpleNamespace(failed_publications=0)
    server._counts = counts
    while failures or not epochs:
        server.follow(run)
    server.follow(run)
    assert epochs == [2] and counts.failed_publications == 3
    assert [r.getMessage().rpartition(": ")[2] for r in caplog.records
            if r.levelno >= logging.WARNING] == [
        "[Errno 116] stale", "[Errno 5] failed", "busy"]  # each is said once


def test_an_unexpected_error_of_new_weights_ends_no_server(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Such as torch's when it cannot allocate memory. The next full weights are published."""
    (tmp_path / STATE).touch()
    errors: list[Exception] = [RuntimeError("can't allocate memory")] * 2

    def publish(weights: object = None) -> int:
        if errors:
            raise errors.pop()
        return 2

    server, run = Server(Sums()), Follower(lambda: tmp_path / STATE, in_service=False)
    monkeypatch.setattr(server, "publish", publish)
    counts: Any = types.SimpleNamespace(failed_publications=0)
    server._counts = counts
    for _ in range(2):
        server.follow(run)
    server.try_publish()
    assert not errors and counts.failed_publications == 1
    assert [(r.getMessage(), bool(r.exc_info)) for r in caplog.records] == [
        ("the old weights remain in use: RuntimeError: can't allocate memory", True)] * 2
    (tmp_path / STATE).write_text("newer")
    with caplog.at_level(logging.INFO):
        server.follow(run)
    assert "published epoch 2" in caplog.text


# ---- draining ------------------------------------------------------------------------------------


def test_the_command_drains_on_sigterm(tmp_path: Path,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_model.py").write_text(
        "from tests.serve_support import Sums\ndef make():\n    return Sums(1.0)\n")
    with serving("slow_model:make", "--workers", "2", "--json", folder=tmp_path) as process:
        where = announced(process)
        assert len(where["workers"]) == 2
        client = Client(where["address"], timeout_s=20)
        request = random_request(np.random.default_rng(0), 3)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(client.score_request, [request] * 4))  # opens the connections
            assert len(client._idle) == 4
            sent: list[int] = []
            ask = _Connection.ask
            monkeypatch.setattr(_Connection, "ask",
                                lambda *words: (ask(*words), sent.append(1))[0])
            flying = [pool.submit(client.score_request, request) for _ in range(4)]
            # Two are scored for a second; the others lie in the sockets of workers that are busy.
            wait_for(lambda: len(sent) == 4)
            process.send_signal(signal.SIGTERM)
            for future in flying:  # finished, although the server is going
                assert np.array_equal(future.result()[0], expected(request))
        assert process.wait(timeout=120) == 0
        assert client.counts.retries == 0
        with pytest.raises(DeadlineError, match="ConnectionRefusedError"):
            Client(where["address"], timeout_s=1.0).metadata()
        for pid in where["workers"]:
            assert not Path(f"/proc/{pid}").exists()


def test_workers_of_a_program_score_and_end_with_it(tmp_path: Path) -> None:
    """The workers are new interpreters here, not forks."""
    code = ("import json, time\nfrom oper.serve import *\nfrom tests.serve_support import Sums\n"
            "if __name__ == '__main__':\n    s = Server(Sums(), ServeOptions(port=0, workers=1))\n"
            "    s.start()\n    print(json.dumps([s.address, s.worker_pids]), flush=True)\n"
            "    time.sleep(600)\n")
    (tmp_path / "program.py").write_text(code)
    process = subprocess.Popen([sys.executable, "program.py"], stdout=subprocess.PIPE, text=True,
                               cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT),
                                                  "TMPDIR": str(tmp_path)})
    try:
        assert process.stdout is not None
        address, pids = json.loads(process.stdout.readline())
        request = random_request(np.random.default_rng(0), 3)
        with Client(address, timeout_s=30) as client:
            assert np.array_equal(client.score_request(request)[0], expected(request))
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


# ---- starting ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_start(number: int, tmp_path: Path) -> None:
    """A terminal or service manager signals the workers, too, which are still starting."""
    with serving("tests.serve_support:Sums", folder=tmp_path, env={"TMPDIR": str(tmp_path)},
                 start_new_session=True) as process:
        threads = Path(f"/proc/{process.pid}/task")
        wait_for(lambda: sum(len(p.read_text().split())
                             for p in threads.glob("*/children")) >= 2)  # a worker, at least
        process.send_signal(signal.SIGHUP)  # noted for later
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err and "interrupted" in err, err
    assert not list(tmp_path.glob("pym*"))  # shared memory


def test_sigterm_while_modules_are_imported_ends_a_start() -> None:
    program = """if True:
        import os, signal, sys
        class Sender:
            def find_spec(self, name, *_):
                if name == "oper.serve.options":
                    os.kill(os.getpid(), signal.SIGTERM)
        sys.meta_path.insert(0, Sender())
        from oper.cli import main
        sys.exit(main(["serve", "tests.serve_support:Sums"]))"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                           timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "oper: interrupted\n")


def test_a_stop_that_was_noted_before_the_workers_are_up_ends_them() -> None:
    """An exception from the handler could leave the supervisor's thread running."""
    signals, server = Signals(), Server(Sums(), ServeOptions(port=0, workers=1))
    signals.stop, before = True, threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        server.start(signals)
    assert not signals.interrupts and not server.worker_pids
    assert threading.active_count() == before


def test_ctrl_c_as_the_supervising_thread_starts_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python waits for the supervisor's thread at exit."""
    start, before = threading.Thread.start, threading.active_count()

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "oper-serve":
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    server = Server(Sums(), ServeOptions(port=0, workers=1))
    with pytest.raises(KeyboardInterrupt):
        server.start()
    left = threading.active_count()
    server.stop()
    assert left == before and not server.worker_pids


SUMS = "tests.serve_support:Sums"


@pytest.mark.parametrize(("words", "code", "error"), [
    (["os:getcwd"], 1, "what os:getcwd returns: model='str', expected a PublishedModel"),
    (["builtins:dict"], 1, "it lacks epoch, predict, rows_read"), (["os:sep"], 1, "not a function"),
    *(([model], 1, "MODULE:FUNCTION") for model in ("os:", ":make", "..a:make")),
    *(([path], 1, "a folder that oper train wrote") for path in ("nowhere", "a.file")),
    *(([SUMS, *flags], 2, f"options=['{flags[0]}']") for flags in (
        ["--row-dtype", "int8"], ["--error-budget", "1e-3"], ["--stats", "counts"],
        ["--keep-spare"], ["--name", "other"])),
    ([SUMS, "--follow", "."], 1, "cannot follow a training run"),
    ([SUMS, "--trace-s", "5"], 2, "no value without --trace; add")])
def test_what_cannot_be_served_is_one_error(
        words: list[str], code: int, error: str, tmp_path: Path,
        capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One error instead of a traceback of every worker, and no worker is started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.file").touch()
    assert cli.main(["serve", *words, "--port", "0", "--workers", "1"]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and error in err


def test_a_predictor_needs_a_signature() -> None:
    with pytest.raises(InvalidInputError, match=r"oper\.serve\.Signature"):
        Server(type("Nameless", (), {"epoch": 1, "predict": 0, "rows_read": 0, "signature": 1})())


def test_a_reader_that_has_gone_ends_the_command(tmp_path: Path) -> None:
    """If its address cannot be printed, the server stops instead of running unnoticed."""
    with serving("tests.serve_support:Sums", "--workers", "1", folder=tmp_path) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(120) == 1


class Unloadable(Sums):
    """Raises an error when a worker unpickles it."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise OperError("cannot be loaded")


def test_a_worker_that_cannot_start_is_an_error() -> None:
    with pytest.raises(OperError, match="a worker could not start"):
        Server(Unloadable(), ServeOptions(port=0, workers=1)).start()


def test_a_taken_port_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OperError, match="cannot listen"):
            Server(Sums(), ServeOptions(port=taken.getsockname()[1])).start()


def test_the_second_of_two_servers_on_a_port_reports_the_error() -> None:
    """Both bind the port while their workers start; only one can listen on it."""
    port = free_port()

    def start(_: int) -> Server | OperError:
        try:
            return Server(Sums(), ServeOptions(port=port, workers=1)).start()
        except OperError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(start, range(2)))
    servers = [x for x in outcomes if isinstance(x, Server)]
    errors = [x for x in outcomes if isinstance(x, OperError)]
    for server in servers:
        server.stop()
    assert len(servers) == 1
    assert "cannot listen" in str(errors[0])


@pytest.mark.parametrize(("kind", "name", "value", "words"), [
    (ServeOptions, "workers", 0, "workers"), (ServeOptions, "port", 70_000, "port"),
    (ServeOptions, "port", -1, "port"), (ServeOptions, "max_bytes", 0, "max_bytes"),
    (ServeOptions, "drain_s", -1.0, "drain_s"),
    (ServeOptions, "trace_s", 5.0, r"trace_s=.*, expected None without trace"),
    *((functools.partial(ServeOptions, trace="t.json"), "trace_s", x, "above 0, at most 600")
      for x in (0.0, -1.0, 601.0, math.nan)),
    (BatchOptions, "max_samples", 0, "max_samples"), (BatchOptions, "max_queued", 0, "max_queued"),
    *((BatchOptions, "max_wait_ms", x, "max_wait_ms") for x in (-1, math.nan))])
def test_bad_options_are_refused(kind: Any, name: str, value: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        kind(**{name: value})


@pytest.mark.parametrize("by_signal", [True, False])
def test_a_stopping_server_does_not_wait_for_readers_of_old_weights(
        tmp_path: Path, caplog: pytest.LogCaptureFixture, by_signal: bool) -> None:
    """Otherwise SIGTERM would take effect only after the minute that publications wait."""
    write_run(tmp_path, 1)
    model = load_model(tmp_path)
    reader = model.opener()()
    server, signals = Server(model), Signals()
    with ThreadPoolExecutor(1) as pool, reader._served.pinned():
        server.start()
        server.publish()  # into the other buffer
        begin = time.monotonic()
        if by_signal:
            signals.reload = True
            pool.submit(lambda: (time.sleep(0.5), setattr(signals, "stop", True)))
            server.serve_until_signalled(signals=signals)
        else:
            waiting = pool.submit(server.try_publish)
            time.sleep(0.5)
            server.stop()
            waiting.result()
        assert 0.5 <= time.monotonic() - begin < 20
    assert "old weights remain in use" in caplog.text
    assert "before the publisher stops" in caplog.text
    reader.close()
