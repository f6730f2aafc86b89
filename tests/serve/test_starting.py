"""Starting and stopping a server: signals, draining, what cannot be served or started."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oper import cli
from oper.errors import DeadlineError, InvalidInputError, OperError
from oper.serve import Client, ServeOptions, Server
from oper.serve.client import _Connection
from oper.serve.signals import Signals
from oper.support.processes import free_port
from tests.serve_support import Sums, expected, random_request
from tests.support import ROOT, announced, serving, wait_for

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
    """As from a terminal or a service manager: starting workers receive the signal, too."""
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


@pytest.mark.parametrize(("model", "words"), [
    ("os:getcwd", "what os:getcwd returns: model='str', expected a PublishedModel"),
    ("builtins:dict", "it lacks epoch, predict, rows_read"), ("os:sep", "not a function"),
    ("os:", "MODULE:FUNCTION"), (":make", "MODULE:FUNCTION"), ("..a:make", "MODULE:FUNCTION")])
def test_what_cannot_be_served_is_one_error(model: str, words: str, tmp_path: Path,
                                            capsys: pytest.CaptureFixture[str],
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """One error instead of a traceback of every worker, and no worker is started."""
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
    """If its address cannot be printed, the server stops instead of running unnoticed."""
    with serving("tests.serve_support:Sums", "--workers", "1", folder=tmp_path) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(120) == 1


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


@pytest.mark.parametrize("fields", [{"workers": 0}, {"port": 70_000}, {"port": -1},
                                    {"max_bytes": 0}, {"drain_s": -1.0}])
def test_bad_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(fields))):
        ServeOptions(**fields)
