"""Deltas of replica groups have the rows of one step."""

from pathlib import Path

import pytest
import torch

import oper
from oper.integration.checkpoint.delta_files import find
from oper.integration.checkpoint.follow import Follower
from tests.checkpoint_support import flat, fused, run_ranks, sharded, state_of, train
from tests.runtime_support import assert_bitwise

# ---- replica groups ------------------------------------------------------------------------------

LAST = 7
TABLES = {"ta": "/model/bags.embedding_bags.ta.weight",
          "tc": "/model/bags.embedding_bags.tc.weight",
          "ts": "/model/items.embeddings.ts.weight", "places": "/model/places.weight"}


def trained_in_groups(rank: int, world_size: int, plan: int, folder: str, every: int, delay: int,
                      bits: int) -> dict[str, torch.Tensor]:
    """Train with deltas after every second step, in ``folder/run``, and whole checkpoints of the
    same steps in ``folder/STEP``; returns the last state."""
    model = sharded(world_size // 2, plan, replica_groups=2, synchronize_every=every,
                    synchronize_delay=delay, synchronize_bits=bits)
    optimizer = fused(model)
    with oper.DeltaCheckpoints(f"{folder}/run", model, optimizer, memory_bytes=20_000) as saver:
        for step in range(1, LAST + 1):
            train(model, rank, world_size, range(step, step + 1))
            if step == 1:
                saver.save_full(step)
            elif step % 2:
                saver.save(step)
            if step % 2:
                oper.save_checkpoint(f"{folder}/{step}", model, optimizer)
        saver.flush()
    return flat(state_of(model))


def loaded(rank: int, world_size: int, folder: str) -> dict[str, torch.Tensor]:
    model = sharded(world_size, 3, seed=9)
    oper.load_checkpoint(folder, model, fused(model))
    return flat(state_of(model))


@pytest.mark.parametrize(("plan", "every", "delay", "bits"), [
    (101, 1, 0, 32), (105, 3, 2, 8)])
def test_a_delta_has_the_rows_of_its_step(plan: int, every: int, delay: int, bits: int,
                                          tmp_path: Path) -> None:
    """Covers deltas between synchronizations, while rows are being sent, and of rounded rows."""
    last = run_ranks(trained_in_groups, 4, plan, str(tmp_path), every, delay, bits)
    chain = find(tmp_path / "run", tmp_path / "run")
    assert [(d.step, d.since, d.world_size, d.is_complete) for d in chain] == [
        (3, 1, 4, True), (5, 3, 4, True), (7, 5, 4, True)]
    assert_bitwise(run_ranks(loaded, 1, str(tmp_path / "run")), last, "all deltas")
    state = run_ranks(loaded, 1, str(tmp_path / "1"))
    follower = Follower(lambda: tmp_path / "run")
    for change in follower.changes():
        whole = run_ranks(loaded, 1, str(tmp_path / str(change.step)))
        for name, key in TABLES.items():
            ids, rows = change.rows[name]
            at = torch.from_numpy(ids)
            assert 0 < at.numel() == at.unique().numel()
            assert (state[key][at] != rows).any(dim=1).float().mean() > 0.9  # few did not change
            state[key][at] = rows
            assert torch.equal(state[key], whole[key]), (change.step, name)
        follower.applied(change)
    assert change.step == LAST
