"""The emulation aborts where code accesses memory that it could not address on hardware."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cuda.emulated import has_gpu
from tests.forked import Forked

pytestmark = pytest.mark.skipif(has_gpu(), reason="the emulation checks")

_PROGRAM = """
import os
os.environ["OPER_OUTBOX_BYTES"] = str(1 << 20)
import torch
from dataclasses import replace
from oper.plan import uniform_plan
from oper.shmem.device.tables import DeviceTables
from oper.shmem.optim.optimizers import SGD
from tests import runtime_support
from tests.cuda import emulated
from tests.cuda.test_domains import small_case

emulated.replace_library()
emulated.load()
fault = {fault!r}


def of_device(rank, tensor):
    memory = torch.ops.oper_emulated.memory(rank, False, 8 * tensor.numel()).view(torch.int64)
    return memory.copy_(tensor)


class Planted(DeviceTables):
    opens = False

    def _create_context(self):
        self.opens = fault == "neighbours"
        handle = super()._create_context()
        self.opens = False
        return handle

    @property
    def members(self):
        return [self.group.rank] if self.opens else super().members

    def lookup(self, batch):
        mine, other = self.group.rank, 1 - self.group.rank
        if fault == "ids":
            batch = replace(batch, ids=of_device(other, batch.ids))
        if fault == "keys":
            batch = replace(batch, key_of=of_device(mine, batch.key_of))
        if fault == "none":
            batch = replace(batch, ids=of_device(mine, batch.ids))
        return super().lookup(batch)


runtime_support.ShardedTables = lambda *args: Planted(*args, device="cpu")
case = small_case("sgd")
runtime_support.train_virtual(case, uniform_plan(case.tables, 2, "striped"),
                              runtime_support.make_steps(case, 2, 1), SGD(lr=0.1))
print("done")
"""


@pytest.mark.parametrize("fault, told", [
    ("neighbours", "a kernel of device {0} accesses the arena of device {1}"),
    ("ids", "a kernel of device {0} accesses memory of device {1}"),
    ("keys", "host code for device {0} accesses memory of device {0}"), ("none", "")])
def test_memory_of_another_device(emulation: pytest.MonkeyPatch, fault: str, told: str) -> None:
    process = Forked([sys.executable, "-c", _PROGRAM.format(fault=fault)], text=True,
                     stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate()
    if fault == "none":
        assert process.returncode == 0 and out == "done\n", err
    else:
        assert process.returncode != 0 and out == ""
        assert any(told.format(a, 1 - a) in err for a in range(2)), err
