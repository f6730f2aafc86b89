"""`oper.bench.core.launch.measured`: a case that fails on one rank."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.distributed as dist

from oper.bench.core.launch import Progress, measured


@dataclass(frozen=True)
class FailingCase:
    """A case in which rank 1 fails before rank 0 has its result, after that, or not at all."""

    name: str
    world_size: ClassVar[int] = 2
    threads_per_rank: ClassVar[int] = 1

    def measure(self, progress: Progress) -> dict[str, Any]:
        dist.barrier()
        if dist.get_rank() == 1 and self.name != "neither":
            time.sleep(1.0 if self.name == "after" else 0.0)
            raise ValueError("as rank 1 knows")
        if self.name != "after":
            dist.barrier()
        return {"verified": True}


def test_a_case_that_fails_on_one_rank_is_the_one_reported() -> None:
    """Also if rank 0 already has its figures; the remaining cases are still measured."""
    before, after, neither = measured([FailingCase(n) for n in ("before", "after", "neither")])
    for found in (before, after):
        assert not found["verified"] and "as rank 1 knows" in found["failed"], found
    assert neither == {"name": "neither", "verified": True}
