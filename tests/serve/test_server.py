"""The entire server: life cycle, invalid requests, draining, failing workers, metrics."""

from __future__ import annotations

import http.client
import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oper import cli
from oper.errors import DeadlineError, InvalidInputError, OperError
from oper.serve import BatchOptions, Client, Request, ServeOptions, Server, metrics, wire
from oper.serve.client import ServerError, _Connection
from oper.serve.signals import Signals
from oper.support.processes import free_port
from tests.serve_support import SIGNATURE, Sums, expected, post, random_request, value_of
from tests.support import ROOT, announced, serving, wait_for

SLOW_S = 0.03


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = ServeOptions(port=0, workers=2, max_bytes=1 << 20,
                           batching=BatchOptions(max_samples=64, max_queued=5_000))
    with Server(Sums(), options) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.address, timeout_s=30) as client:
        yield client


# ---- metrics -------------------------------------------------------------------------------------


def test_metrics_count_every_worker(server: Server) -> None:
    """Must run first: rows are counted twice a second, so rows of an earlier test might be
    included."""
    with Client(server.address) as client:
        before = client.metrics()
        for _ in range(6):  # one connection per request: both workers have their share
            with Client(server.address) as one:
                one.score_request(random_request(np.random.default_rng(0), 5, uniform=True))
        wait_for(lambda: value_of(client.metrics(), "oper_embedding_rows_read_total")
                 - value_of(before, "oper_embedding_rows_read_total") == 6 * 15)
        after = client.metrics()
    for name, grown in (("oper_request_seconds_count", 6), ("oper_batch_samples_sum", 30),
                        ("oper_stage_seconds_count", 6 * 5)):
        assert value_of(after, name) - value_of(before, name) == grown
    stages = {name: value_of(after, rf'oper_stage_seconds_sum{{stage="{name}"}}')
              for name in metrics.STAGES}
    assert all(seconds > 0 for seconds in stages.values()), stages
    between = stages["decode"] + stages["wait"] + stages["score"]
    assert between == pytest.approx(value_of(after, "oper_request_seconds_sum"), rel=1e-6)
    assert value_of(after, "oper_workers") == 2
    for name in ("oper_queued_samples", "oper_weights_epoch", "oper_request_seconds_bucket",
                 "oper_worker_restarts_total", "oper_publications_total"):
        assert re.search(rf"^{name}[ {{]", after, re.M)


# ---- scores --------------------------------------------------------------------------------------


def test_scores_are_those_of_the_model_under_load(server: Server, client: Client) -> None:
    rng = np.random.default_rng(0)
    requests = [random_request(rng, int(n)) for n in rng.integers(0, 20, 300)]
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(client.score_request, requests))
    for (scores, _), request in zip(found, requests, strict=True):
        assert np.array_equal(scores, expected(request))
    assert client.counts.retries == 0
    text = client.metrics()
    assert value_of(text, "oper_batch_requests_sum") > value_of(text, "oper_batch_requests_count")


def test_features_by_name(client: Client) -> None:
    dense = np.array([[1, 0], [0, 2]])
    scores = client.score(dense, {"c": np.array([6, 0]), "a": (np.array([1, 2, 3]), [3, 0])})
    assert scores.tolist() == [1000 + 3 * 6 + 6, 2000]
    with pytest.raises(ServerError, match="unknown features") as error:
        client.score(dense, {"d": np.array([1, 2])})
    assert error.value.status == 400
    with pytest.raises(InvalidInputError, match="shape of lengths"):
        client.score(dense, {"a": (np.array([1]), [1])})


def test_a_user_is_named_once(client: Client) -> None:
    dense = np.array([[1, 0], [0, 2], [0, 0]])
    scores = client.score(dense, {"c": np.array([6, 0, 1])},
                          {"b": np.array([5]), "a": (np.array([1, 2, 3]), [3])})
    assert scores.tolist() == [1000 + 6 + 10 + 3 * 6, 2000 + 6 + 10, 6 + 10 + 3]
    with pytest.raises(InvalidInputError, match="shape of lengths"):
        client.score(dense, {}, {"a": np.array([1, 2])} | {"b": (np.array([1, 2, 3]), [1, 1, 1])})


def test_a_request_leaves_at_once_and_its_worker_is_remembered(
        server: Server, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    send = http.client.HTTPConnection.send
    monkeypatch.setattr(http.client.HTTPConnection, "send",
                        lambda self, data: (sent.append(data), send(self, data))[1])
    request = random_request(np.random.default_rng(0), 40)
    assert np.array_equal(client.score_request(request)[0], expected(request))
    whole = sent[-1]
    assert whole.startswith(b"POST /v2/models/sums/infer HTTP/1.1\r\n")
    assert whole.endswith(b"".join(x.tobytes() for x in (request.dense, request.lengths,
                                                         request.ids)))
    assert [c.worker for c in client._idle] in [[str(p)] for p in server.worker_pids]
    assert not client._asked


def test_a_client_without_binary_tensors_gets_json(server: Server) -> None:
    request = random_request(np.random.default_rng(4), 3)
    body = json.dumps({"inputs": [
        {"name": name, "datatype": kind, "shape": list(value.shape), "data": value.tolist()}
        for name, kind, value in (("dense", "FP32", request.dense), ("ids", "INT64", request.ids),
                                  ("lengths", "INT32", request.lengths))]}).encode()
    status, answer = post(server, body)
    output, = answer["outputs"]
    assert (status, answer["parameters"], answer["model_name"]) == (200, {"epoch": 1}, "sums")
    assert (output["name"], output["shape"], output["data"]) == (
        "scores", [3], expected(request).tolist())
    scores, epoch = wire.decode_scores(json.dumps(answer).encode(), None)
    assert np.array_equal(scores, expected(request)) and epoch == 1


def test_bad_requests_harm_nobody(server: Server, client: Client) -> None:
    """Valid requests are sent throughout and could be in the same batches as invalid ones."""
    stop, wrong = threading.Event(), []

    def good(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not stop.is_set():
            request = random_request(rng, 3)
            if not np.array_equal(client.score_request(request)[0], expected(request)):
                wrong.append(request)

    threads = [threading.Thread(target=good, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    try:
        body, length = wire.encode_request(random_request(np.random.default_rng(0), 2))
        binary = {wire.HEADER_LENGTH: str(length)}
        out_of_range = random_request(np.random.default_rng(1), 2, uniform=True)
        out_of_range.ids[-1] = 7
        failing = random_request(np.random.default_rng(2), 2)
        failing.dense[0, 0] = 13
        for status, words, answer in [
            (400, "id of feature 'c'=7", post(server, *_message(out_of_range))),
            (400, "size of the message", post(server, body[:-1], binary)),
            (400, "header length", post(server, body, {wire.HEADER_LENGTH: "999999"})),
            *((400, "inference-header-content-length", post(server, body,
                                                            {wire.HEADER_LENGTH: bad}))
              for bad in ("-1", f"{length}.7")),
            (400, "header", post(server, b"\xff\x00junk")),
            (413, "too large", post(server, b"x" * (1 << 20) + b"y")),
            (404, "no such address", post(server, b"", path="/v2/models/other/infer")),
            (405, "method", post(server, b"", method="GET")),
            (500, "ValueError", post(server, *_message(failing))),
        ]:
            assert answer[0] == status
            assert words in answer[1]["error"]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert client.counts.retries == 0


def _message(request: Request) -> tuple[bytes, dict[str, str]]:
    body, length = wire.encode_request(request)
    return body, {wire.HEADER_LENGTH: str(length)}


# ---- health, metadata ----------------------------------------------------------------------------


def test_health_and_metadata(server: Server, client: Client) -> None:
    wait_for(client.is_ready)
    assert client.model == "sums"
    found = client.metadata()
    assert found["parameters"] == {"features": list(SIGNATURE.features),
                                   "num_rows": list(SIGNATURE.num_rows)}
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/sums/ready"):
        assert post(server, b"", path=path, method="GET")[0] == 200


@pytest.mark.parametrize(("path", "allowed"), [
    ("/v2/models/sums/infer", "POST"), *((path, "GET, HEAD") for path in (
        "/metrics", "/v2", "/v2/models/sums", "/v2/models/sums/ready", "/v2/health/live",
        "/v2/health/ready"))])
def test_other_methods_are_refused(server: Server, path: str, allowed: str) -> None:
    """As RFC 9110 requires: status 405 and the allowed methods."""
    host, port = server.address.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "POST", "GET", "HEAD"):
        if method in allowed:
            continue
        connection.request(method, path, b"")
        answer = connection.getresponse()
        told = answer.read()
        assert (answer.status, answer.headers["Allow"]) == (405, allowed), method
        assert method == "HEAD" or f"method='{method}', expected {allowed}" in json.loads(told)[
            "error"]
    connection.close()


def test_connections_are_spread_evenly(server: Server) -> None:
    clients = [Client(server.address) for _ in range(8)]
    wait_for(lambda: not any(w.open_connections for w in server._workers))  # of earlier tests
    before = [w.handed for w in server._workers]
    for client in clients:
        client.metadata()
    # The supervisor counts after it has handed over, while the worker answers already.
    wait_for(lambda: [w.handed - n for w, n in zip(server._workers, before, strict=True)] == [4, 4])
    for client in clients:
        client.close()


# ---- a worker's death (changes the workers: last of those that share the server) -----------------


def test_a_dead_worker_is_replaced_and_clients_retry(server: Server, client: Client) -> None:
    stop, wrong, done = threading.Event(), [], [0] * 6

    def work(k: int) -> None:
        rng = np.random.default_rng(k)
        while not stop.is_set():
            request = random_request(rng, 4)
            if not np.array_equal(client.score_request(request)[0], expected(request)):
                wrong.append(k)
            done[k] += 1

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    first = server.worker_pids[0]
    try:
        wait_for(lambda: sum(done) > 50)
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: server.counts["worker_restarts"] == 1)
        at = sum(done)
        wait_for(lambda: sum(done) > at + 50)  # the other worker serves meanwhile
        wait_for(lambda: len(server.worker_pids) == 2)
        retries = client.counts.retries
        # Connections do not stay where they had to go: the new worker gets its share.
        wait_for(lambda: min(w.open_connections for w in server._workers) >= 2)
        assert client.counts.retries == retries
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert first not in server.worker_pids
    assert 1 <= client.counts.retries <= 12  # connections of the dead worker
    assert value_of(client.metrics(), "oper_worker_restarts_total") == 1


def test_a_request_that_ends_workers_is_given_up(server: Server) -> None:
    before = server.counts["worker_restarts"]
    deadly = random_request(np.random.default_rng(0), 1)
    deadly.dense[0, 0] = 666
    with (Client(server.address, timeout_s=300) as client,  # four workers are started anew
          pytest.raises(ServerError, match="connections lost=4")):
        client.score_request(deadly)
    # A connection that waits for a worker which another one ends is lost without a restart.
    wait_for(lambda: server.counts["worker_restarts"] > before and server.counts["workers"] == 2)
    assert server.counts["worker_restarts"] <= before + 4
    with Client(server.address) as client:
        good = random_request(np.random.default_rng(1), 2)
        assert np.array_equal(client.score_request(good)[0], expected(good))


# ---- overload, deadlines, drain ------------------------------------------------------------------


def test_overload_is_refused_and_deadlines_hold() -> None:
    options = ServeOptions(port=0, workers=1, batching=BatchOptions(
        max_samples=4, max_wait_ms=0, max_queued=8))
    request = random_request(np.random.default_rng(0), 4)
    with Server(Sums(SLOW_S), options) as server, ThreadPoolExecutor(12) as pool:
        with Client(server.address, timeout_s=30) as patient:
            found = list(pool.map(patient.score_request, [request] * 24))
            assert all(np.array_equal(scores, expected(request)) for scores, _ in found)
            assert patient.counts.retries > 0
            assert 'outcome="overloaded"' in patient.metrics()
        with Client(server.address, timeout_s=3 * SLOW_S) as hasty:
            outcomes = list(pool.map(lambda r: _outcome(hasty, r), [request] * 12))
        assert set(outcomes) >= {"late"}
        assert set(outcomes) <= {"late", "ok"}


def _outcome(client: Client, request: Request) -> str:
    try:
        client.score_request(request)
    except DeadlineError:
        return "late"
    except ServerError as error:
        assert error.status == 504
        return "late"
    return "ok"


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


def test_workers_end_with_a_killed_supervisor(tmp_path: Path) -> None:
    code = ("import json, time\nfrom oper.serve import *\nfrom tests.serve_support import Sums\n"
            "if __name__ == '__main__':\n    s = Server(Sums(), ServeOptions(port=0, workers=1))\n"
            "    s.start()\n    print(json.dumps(s.worker_pids), flush=True)\n"
            "    time.sleep(600)\n")
    (tmp_path / "program.py").write_text(code)
    process = subprocess.Popen([sys.executable, "program.py"], stdout=subprocess.PIPE, text=True,
                               cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT),
                                                  "TMPDIR": str(tmp_path)})
    try:
        assert process.stdout is not None
        pids = json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


# ---- starting ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_start(number: int, tmp_path: Path) -> None:
    """As from a terminal or a service manager, which also signal the starting workers."""
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
    """An exception in the signal handler could leave the supervisor's thread running."""
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


@pytest.mark.parametrize(("model", "words"), [
    ("os:getcwd", "what os:getcwd returns: model='str', expected a PublishedModel"),
    ("builtins:dict", "it lacks epoch, predict, rows_read"), ("os:sep", "not a function"),
    ("os:", "MODULE:FUNCTION"), (":make", "MODULE:FUNCTION"), ("..a:make", "MODULE:FUNCTION")])
def test_what_cannot_be_served_is_one_error(model: str, words: str, tmp_path: Path,
                                            capsys: pytest.CaptureFixture[str],
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one error instead of a traceback per worker, and no worker is started."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["serve", model, "--port", "0", "--workers", "1"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err
    with pytest.raises(InvalidInputError, match=r"oper\.serve\.Signature"):
        Server(type("Nameless", (), {"epoch": 1, "predict": 0, "rows_read": 0, "signature": 1})())


@pytest.mark.parametrize("flags", [
    ["--row-dtype", "int8"], ["--error-budget", "1e-3"], ["--stats", "counts"], ["--keep-spare"],
    ["--name", "other"]])
def test_options_of_folders_are_refused_for_functions(
        flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "tests.serve_support:Sums", "--port", "0", *flags]) == 2
    assert f"options=['{flags[0]}']" in capsys.readouterr().err


def test_a_reader_that_has_gone_ends_the_command(tmp_path: Path) -> None:
    """If the address cannot be printed, the server stops instead of running unnoticed."""
    with serving("tests.serve_support:Sums", "--workers", "1", folder=tmp_path) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(120) == 1


def test_the_client_refuses_what_is_no_server_or_no_id(server: Server, client: Client) -> None:
    with pytest.raises(InvalidInputError, match=r"ids of 'a'.*float64.*integers"):
        client.score(np.zeros((1, 2)), {"a": np.array([1.5])})
    with pytest.raises(InvalidInputError, match="lengths of 'b'"):
        client.score(np.zeros((1, 2)), {"b": (np.array([1]), np.array([1.0]))})
    assert client.score(np.zeros((1, 2)), {"a": ([], [0])}).tolist() == [0]
    handler = type("Other", (http.server.BaseHTTPRequestHandler,), {
        "do_GET": lambda self: (self.send_response(200), self.end_headers(),
                                self.wfile.write(b"hello")),
        "log_message": lambda *_: None})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        try:
            with Client(f"127.0.0.1:{other.server_port}") as lost:
                with pytest.raises(ServerError, match="is not a scoring server"):
                    assert lost.model
                with pytest.raises(ServerError, match="is not a scoring server"):
                    Client(f"127.0.0.1:{other.server_port}", model="sums").metadata()
        finally:
            other.shutdown()
            thread.join()


def test_what_cannot_be_followed_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main(["serve", "tests.serve_support:Sums", "--port", "0", "--follow",
                     str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "cannot follow a training run" in err


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


def test_of_two_servers_that_start_at_once_one_says_why_not() -> None:
    """Both servers bind the port while their workers start, but only one can listen on it."""
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


@pytest.mark.parametrize("fields", [{"workers": 0}, {"port": 70_000}, {"port": -1},
                                    {"max_bytes": 0}, {"drain_s": -1.0}])
def test_bad_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(fields))):
        ServeOptions(**fields)


@pytest.mark.parametrize("address", ["", "host", "host:x", ":80"])
def test_bad_addresses_are_refused(address: str) -> None:
    with pytest.raises(InvalidInputError, match="address"):
        Client(address)


def test_a_model_without_publish_says_so(server: Server) -> None:
    with pytest.raises(InvalidInputError, match="publish"):
        server.publish()
