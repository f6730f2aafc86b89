"""The example runs alone and under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support import ROOT


@pytest.mark.parametrize("launcher", [
    [], ["-m", "torch.distributed.run", "--nproc-per-node", "2"]], ids=["alone", "torchrun"])
def test_shard_dlrm(launcher: list[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *launcher, "examples/shard_dlrm.py"], cwd=ROOT,
                          capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(losses) == 4 and losses[-1] < losses[0]
