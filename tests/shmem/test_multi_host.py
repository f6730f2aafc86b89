"""Two hosts of two processes each, as network namespaces, started by torchrun on each of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.shmem import multi_host_program as program

ADDRESSES = ("10.213.77.1", "10.213.77.2")
PORT = 29577


def _ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Names of two network namespaces that are connected to each other."""
    if shutil.which("ip") is None:
        pytest.skip("needs ip (iproute2)")
    names = [f"oper-{os.getpid()}-{k}" for k in range(2)]
    links = [f"op{os.getpid() % 1000000}{k}" for k in "ab"]
    try:
        for name in names:
            if _ip("netns", "add", name).returncode:
                pytest.skip("needs the right to make network namespaces")
        if _ip("link", "add", links[0], "type", "veth", "peer", "name", links[1]).returncode:
            pytest.skip("needs the right to make veth interfaces")
        for name, link, address in zip(names, links, ADDRESSES, strict=True):
            for words in (["link", "set", link, "netns", name],
                          ["-n", name, "link", "set", "lo", "up"],
                          ["-n", name, "link", "set", link, "name", "eth0"],
                          ["-n", name, "addr", "add", f"{address}/24", "dev", "eth0"],
                          ["-n", name, "link", "set", "eth0", "up"]):
                done = _ip(*words)
                assert done.returncode == 0, done.stderr
        yield names
    finally:
        for name in names:
            _ip("netns", "del", name)
        _ip("link", "del", links[0])


def _start(host: str, node: int, folder: Path) -> subprocess.Popen[bytes]:
    """Start torchrun on a host; its rank 0 writes ``seen.pt``, and output goes to ``log-NODE``."""
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": root, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
           "OPER_DEADLINE_S": "100"}
    command = ["ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run",
               "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=2",
               f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}",
               "-m", "tests.shmem.multi_host_program", str(folder / "seen.pt")]
    with (folder / f"log-{node}").open("wb") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)


def _reference() -> torch.Tensor:
    model = program.table()
    optimizer = torch.optim.SGD(model.parameters(), lr=program.LR)
    for step in range(program.STEPS):
        losses = []
        for rank in range(4):
            ids, offsets, target = program.batch(step, rank)
            losses.append(((model(ids, offsets) - target) ** 2).mean())
        optimizer.zero_grad()
        (sum(losses) / 4).backward()
        optimizer.step()
    return model.weight.detach()


def test_torchrun_on_two_hosts(hosts: list[str], tmp_path: Path) -> None:
    result = tmp_path / "seen.pt"
    running = [_start(host, node, tmp_path) for node, host in enumerate(hosts)]
    try:
        # The other host first: an agent of torchrun whose ranks are done may wait five minutes for
        # one that has gone without its last message. Its ranks' work is in the file by then.
        running[1].wait(200)
        with contextlib.suppress(subprocess.TimeoutExpired):
            running[0].wait(30)
        waits = running[0].poll() is None and result.exists()
    finally:
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
    logs = "\n".join((tmp_path / f"log-{node}").read_text() for node in range(2))
    assert running[1].returncode == 0 and (waits or running[0].returncode == 0), logs[-4000:]
    seen = torch.load(result, weights_only=False)
    want = _reference()
    for domains, rows, entry, sent in seen:
        assert domains == [0, 0, 1, 1]
        assert torch.equal(rows, seen[0][1]) and torch.equal(entry, rows)
        assert torch.allclose(rows, want, rtol=1e-5, atol=1e-6)
        assert sent > 0
    assert (want - program.table().weight.detach()).abs().max() > 1e-2
