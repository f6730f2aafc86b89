"""The entire server: scores, metrics, invalid requests, overload, failing workers."""

import contextlib
import http.client
import http.server
import json
import math
import multiprocessing
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oper.errors import DeadlineError, InvalidInputError
from oper.serve import BatchOptions, Client, Request, ServeOptions, Server, metrics, wire
from oper.serve.client import ServerError
from tests.serve_support import (
    SIGNATURE,
    Sums,
    as_json,
    expected,
    post,
    random_request,
    scoring,
    value_of,
)
from tests.support import wait_for

SLOW_S = 0.03


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = ServeOptions(port=0, workers=2, max_bytes=1 << 20,
                           batching=BatchOptions(max_samples=64, max_queued=5_000))
    with Server(Sums(), options) as server:
        yield server


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


def test_gauges_are_of_workers_that_accept_connections() -> None:
    """The lowest epoch may be 0, and a worker that has exited has none."""
    shared = metrics.Shared(multiprocessing.get_context("spawn"), 3)
    for worker, epoch in enumerate((0, 7, 9)):
        predictor = Sums()
        predictor.epoch = epoch
        metrics.WorkerMetrics(shared, worker, predictor).report(10, 1)
    for connections, epoch in (((-1, -1, -1), 0), ((0, 4, -1), 0), ((-1, 4, 0), 7)):
        shared.workers()["connections"] = connections
        page = shared.page().decode()
        assert value_of(page, "oper_weights_epoch") == epoch
        assert value_of(page, "oper_queued_samples") == 10 * sum(x >= 0 for x in connections)


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
        client.score(dense, {}, {"a": np.array([1]), "b": (np.array([1, 2, 3]), [1, 1, 1])})
    assert client.score(dense[:0], {"c": np.zeros(0, np.int64)}, {"b": np.array([5])}).size == 0


@pytest.mark.parametrize("given", [
    {"a": np.array([1, 2, 3]), "b": np.array([1])},
    {"a": (np.array([1, 2, 3]), [1, 1]), "b": (np.array([4]), [1, 1])}])
def test_surplus_ids_of_a_feature_are_not_those_of_another(client: Client, given: Any) -> None:
    with pytest.raises(InvalidInputError, match="number of ids of 'a'=3, expected 2"):
        client.score(np.zeros((2, 2)), given)


def test_requests_are_sent_immediately_and_their_workers_are_remembered(
        server: Server, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    send = socket.socket.sendall
    monkeypatch.setattr(socket.socket, "sendall",
                        lambda self, data: (sent.append(data), send(self, data))[1])
    request = random_request(np.random.default_rng(0), 40)
    assert np.array_equal(client.score_request(request)[0], expected(request))
    whole = sent[-1]
    assert whole.startswith(b"POST /v2/models/sums/infer HTTP/1.1\r\n")
    assert whole.endswith(b"".join(x.tobytes() for x in (request.dense, request.lengths,
                                                         request.ids)))
    assert [c.worker for c in client._idle] in [[str(p)] for p in server.worker_pids]
    assert not client._busy


def test_a_client_without_binary_tensors_gets_json(server: Server) -> None:
    request = random_request(np.random.default_rng(4), 3)
    status, answer = post(server, as_json(request))
    output, = answer["outputs"]
    assert (status, answer["parameters"], answer["model_name"]) == (200, {"epoch": 1}, "sums")
    assert (output["name"], output["shape"], output["data"]) == (
        "scores", [3], expected(request).tolist())
    scores, epoch = wire.decode_scores(json.dumps(answer).encode(), None)
    assert np.array_equal(scores, expected(request)) and epoch == 1
    assert "id" not in answer

    def labelled(label: object, batch: Request) -> tuple[int, Any]:
        return post(server, json.dumps(json.loads(as_json(batch)) | {"id": label}).encode())

    empty = Request(np.zeros((0, 2), np.float32), np.zeros((3, 0), np.int32), np.zeros(0, np.int64))
    for batch in (request, empty):
        status, answer = labelled("mine", batch)
        assert (status, answer["id"], answer["parameters"]) == (200, "mine", {"epoch": 1})
    status, answer = labelled(None, request)
    assert status == 200 and "id" not in answer
    assert labelled(7, request)[0] == 400


def test_bad_requests_do_not_affect_others(server: Server, client: Client) -> None:
    """Valid requests are sent throughout and could be in the same batches as invalid ones."""
    body, length = wire.encode_request(random_request(np.random.default_rng(0), 2))
    binary = {wire.HEADER_LENGTH: str(length)}
    out_of_range = random_request(np.random.default_rng(1), 2, uniform=True)
    out_of_range.ids[-1] = 7
    failing = random_request(np.random.default_rng(2), 2)
    failing.dense[0, 0] = 13
    with scoring(client):
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
    """The answer is status 405 with the allowed methods, as RFC 9110 requires."""
    host, port = server.address.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "POST", "GET", "HEAD"):
        if method in allowed:
            continue
        connection.request(method, path, b"")
        answer = connection.getresponse()
        body = answer.read()
        assert (answer.status, answer.headers["Allow"]) == (405, allowed), method
        assert method == "HEAD" or f"method='{method}', expected {allowed}" in json.loads(body)[
            "error"]
    connection.close()


def test_connections_are_spread_evenly(server: Server) -> None:
    clients = [Client(server.address) for _ in range(8)]
    counts = server._shared.workers()["connections"]
    wait_for(lambda: not counts.any())  # of earlier tests
    for client in clients:
        client.metadata()
    assert counts.tolist() == [4, 4]
    for client in clients:
        client.close()


def test_a_worker_that_is_busy_keeps_no_connection_waiting() -> None:
    """Nor does it keep those waiting that it should get because it has the fewest connections."""
    request = random_request(np.random.default_rng(0), 2)
    with (Server(Sums(3.0), ServeOptions(port=0, workers=2)) as server,
          ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as clients):
        slow = clients.enter_context(Client(server.address, timeout_s=60))
        assert slow.model == "sums"
        scores = pool.submit(slow.score_request, request)
        time.sleep(0.2)
        for _ in range(6):
            clients.enter_context(Client(server.address)).metadata()
        assert not scores.done()
        assert server._shared.workers()["connections"].sum() >= 6
        assert np.array_equal(scores.result()[0], expected(request))


def test_connections_that_arrive_during_a_batch_share_the_next_one() -> None:
    """Accepted one per batch, 24 connections would take 24 batches."""
    body = as_json(random_request(np.random.default_rng(0), 1))
    with (Server(Sums(0.2), ServeOptions(port=0, workers=1)) as server,
          ThreadPoolExecutor(24) as pool, Client(server.address) as client):
        answers = list(pool.map(lambda _: post(server, body)[0], range(24)))
        assert answers == [200] * 24
        assert value_of(client.metrics(), "oper_batch_requests_count") <= 12


# ---- a worker's death (changes the workers: last of those that share the server) -----------------


def test_a_dead_worker_is_replaced_and_clients_retry(
        server: Server, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    start, failures = server._start_worker, [OSError("no more file descriptors")]

    def fail_first(place: int) -> None:
        if failures:
            raise failures.pop()
        start(place)

    monkeypatch.setattr(server, "_start_worker", fail_first)
    first = server.worker_pids[0]
    with scoring(client) as done:
        wait_for(lambda: sum(done) > 50)
        os.kill(first, signal.SIGSTOP)  # it is killed while it has requests
        at = sum(done)
        wait_for(lambda: sum(done) > at + 50)
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: server.counts["worker_restarts"] == 1)
        at = sum(done)
        wait_for(lambda: sum(done) > at + 50)  # the other worker serves meanwhile
        wait_for(lambda: len(server.worker_pids) == 2)
        retries = client.counts.retries
        # Connections do not stay where they had to go: the new worker gets its share.
        wait_for(lambda: server._shared.workers()["connections"].min() >= 2)
        assert client.counts.retries == retries
    assert not failures
    assert first not in server.worker_pids
    assert 1 <= client.counts.retries <= 12  # connections of the dead worker
    assert value_of(client.metrics(), "oper_worker_restarts_total") == 1


def test_the_client_gives_up_a_request_that_kills_workers(server: Server) -> None:
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


# ---- overload, deadlines -------------------------------------------------------------------------


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


def test_the_client_refuses_other_servers_and_invalid_ids(server: Server, client: Client) -> None:
    with pytest.raises(InvalidInputError, match=r"ids of 'a'.*float64.*integers"):
        client.score(np.zeros((1, 2)), {"a": np.array([1.5])})
    with pytest.raises(InvalidInputError, match="lengths of 'b'"):
        client.score(np.zeros((1, 2)), {"b": (np.array([1]), np.array([1.0]))})
    wrong: dict[str, tuple[Any, dict[Any, Any]]] = {
        "32-bit integers": (np.zeros((1, 2)), {"b": ([1], [2**40 + 1])}),
        "2, ids and lengths": (np.zeros((1, 2)), {"b": ([1], [1], [1])}),
        "names of type str": (np.zeros((1, 2)), {b"b": [1]}),
        "dense=.*expected numbers": ([["a", "b"]], {}),
        "dense=.*inhomogeneous.*expected numbers": ([[1, 2], [1]], {})}
    for text, arguments in wrong.items():
        with pytest.raises(InvalidInputError, match=text):
            client.score(*arguments)
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


def test_an_answer_that_arrives_in_parts_has_one_deadline() -> None:
    def answer(source: socket.socket) -> None:
        with source.accept()[0] as connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            for part in (b"HTTP/1.1 200 OK\r\n", *[b"x: y\r\n"] * 8, b"content-length: 8\r\n\r\n",
                         *[b"x"] * 8):
                time.sleep(0.1)
                connection.sendall(part)

    with socket.create_server(("127.0.0.1", 0)) as source, ThreadPoolExecutor() as pool:
        done = pool.submit(answer, source)
        with (Client(f"127.0.0.1:{source.getsockname()[1]}", timeout_s=0.5, model="m") as client,
              pytest.raises(DeadlineError, match="no answer")):
            client.score(np.zeros((1, 2)), {})
        done.result()


@pytest.mark.parametrize(("name", "value"), [
    *(("address", x) for x in ("", "host", "host:x", ":80", "host:65536", "https://host:80")),
    *(("timeout_s", x) for x in (-1, math.inf, math.nan, "1"))])
def test_bad_arguments_of_clients_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=name):
        Client(**{"address": "host:80", name: value})


def test_a_model_without_publish_raises_an_error(server: Server) -> None:
    with pytest.raises(InvalidInputError, match="publish"):
        server.publish()


def test_a_server_before_its_start_publishes_and_counts_nothing() -> None:
    model: Any = Sums()
    model.opener = model.close = lambda: None
    model.prepare = lambda weights: pytest.fail("weights were published")
    server = Server(model)
    for use in (server.publish, lambda: server.counts):
        with pytest.raises(InvalidInputError, match=r"state='not started', .*call start\(\)"):
            use()


def cpu_s(pid: int) -> float:
    """Processor time of a process in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_an_idle_worker_polls_for_a_while() -> None:
    """With `spin_us` a worker polls after each request, then sleeps; scores are the same."""
    options = ServeOptions(port=0, workers=1, spin_us=5e5)
    with Server(Sums(), options) as server, Client(server.address, timeout_s=30) as client:
        (pid,) = server.worker_pids
        request = random_request(np.random.default_rng(0), 3)
        for _ in range(3):
            assert np.array_equal(client.score_request(request)[0], expected(request))
        begin = cpu_s(pid)
        wait_for(lambda: cpu_s(pid) > begin + 0.1)
        time.sleep(0.7)
        idle = cpu_s(pid)
        time.sleep(0.4)
        assert cpu_s(pid) < idle + 0.1
