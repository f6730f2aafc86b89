"""Two hosts of two processes each, as network namespaces, started by torchrun on each of them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from oper.bench.cluster.network import Links, cluster, why_not
from oper.bench.core.child import ProcessOptions
from tests.shmem import multi_host_program as program
from tests.support import ROOT


def _start(host: ProcessOptions, node: int, folder: Path) -> subprocess.Popen[bytes]:
    """Start torchrun on a host; its rank 0 writes ``seen.pt``, and output goes to ``log-NODE``."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPER_DEADLINE_S": "100",
           "GLOO_SOCKET_IFNAME": host.environment["GLOO_SOCKET_IFNAME"]}
    command = [*host.command, sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
               f"--node-rank={node}", "--nproc-per-node=2",
               f"--master-addr={host.environment['MASTER_ADDR']}",
               f"--master-port={host.environment['MASTER_PORT']}",
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


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made")
def test_torchrun_on_two_hosts(tmp_path: Path) -> None:
    with cluster(Links(2, 0)) as hosts:
        running = [_start(host, node, tmp_path) for node, host in enumerate(hosts)]
        # The other host first: an agent of torchrun whose ranks are done may wait five minutes for
        # one that has gone without its last message. Its ranks' work is in the file by then.
        with contextlib.suppress(subprocess.TimeoutExpired):
            running[1].wait(200)
            running[0].wait(30)
        waits = running[0].poll() is None and (tmp_path / "seen.pt").exists()
    # What still runs in the namespaces has been killed.
    logs = "\n".join((tmp_path / f"log-{node}").read_text() for node in range(2))
    assert running[1].wait(20) == 0 and (waits or running[0].wait(20) == 0), logs[-4000:]
    seen = torch.load(tmp_path / "seen.pt", weights_only=False)
    want = _reference()
    for domains, rows, entry, sent in seen:
        assert domains == [0, 0, 1, 1]
        assert torch.equal(rows, seen[0][1]) and torch.equal(entry, rows)
        assert torch.allclose(rows, want, rtol=1e-5, atol=1e-6)
        assert sent > 0
    assert (want - program.table().weight.detach()).abs().max() > 1e-2
