"""Samples that share bags: results as if each bag were copied to its samples."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from oper.errors import InvalidInputError
from oper.shmem.batch import Lookup, SharedBags
from oper.shmem.by_feature import BoundsCheck
from oper.shmem.tables import ShardedTables
from tests.runtime_support import (
    OPTIMIZERS,
    Case,
    assert_bitwise,
    dlrm_case,
    make_batch,
    open_alone,
    open_tables,
    plans_for,
    run_ranks,
)

RWA = OPTIMIZERS["rowwise_adagrad"]
# More samples than bags; as many; bags that no sample has.
SIZES = {"fewer bags": (40, 17), "as many": (300, 300), "more bags": (9, 16)}


def make(case: Case, seed: int, num_samples: int, most: int, in_order: bool) -> Lookup:
    """A batch whose keys have at most `most` bags; features of a key assign its bags to samples
    independently.

    `in_order`: bags are numbered in the order of the samples, as in the loader.
    """
    rng = np.random.default_rng(seed)
    whole = make_batch(case, seed, most)
    lengths = whole.lengths.view(len(case.keys), most)
    bags = rng.integers(1, most + 1, len(case.keys))
    bags[0] = most
    bounds = np.cumsum([0, *lengths.sum(1).tolist()])
    size = max(num_samples, most)
    padded, ids, weights = torch.zeros(len(case.keys), size, dtype=lengths.dtype), [], []
    for k, n in enumerate(bags.tolist()):
        padded[k, :n] = lengths[k, :n]
        end = bounds[k] + int(padded[k].sum())
        ids.append(whole.ids[bounds[k]:end])
        if whole.weights is not None:
            weights.append(whole.weights[bounds[k]:end])
    samples = []
    for k, key in enumerate(case.key_of.tolist()):
        n = int(bags[key])
        if k == 0 and n == num_samples:
            samples.append(np.arange(n))
        elif in_order:
            steps = rng.random(num_samples) < n / (2 * num_samples)
            steps[0] = False
            samples.append(np.minimum(np.cumsum(steps), n - 1))
        else:
            samples.append(rng.integers(0, n, num_samples))
    shared = SharedBags(torch.from_numpy(bags), torch.from_numpy(np.stack(samples)))
    return Lookup(torch.cat(ids), padded.view(-1), case.key_of, size,
                  torch.cat(weights) if weights else None, True, shared)


def rows_of(tables: ShardedTables, case: Case, batch: Lookup, by_lookup: bool) -> torch.Tensor:
    """Rows of samples: from the lookup, or copied from the rows of all bags."""
    if by_lookup:
        return tables.lookup(batch)
    assert batch.shared is not None
    plain = Lookup(batch.ids, batch.lengths, batch.key_of, batch.batch_size, batch.weights)
    dims = [case.table(t).dim for _, t in case.features]
    parts = tables.lookup(plain).split(dims, 1)
    return torch.cat([torch.nn.functional.embedding(rows, part)
                      for rows, part in zip(batch.shared.samples, parts, strict=True)], 1)


def train(case: Case, tables: ShardedTables, batches: list[Lookup], by_lookup: bool,
          in_parts: bool = False) -> list[Any]:
    outputs: list[Any] = []
    for k, batch in enumerate(batches):
        with tables.no_sync() if in_parts and k % 2 == 0 else contextlib.nullcontext():
            out = rows_of(tables, case, batch, by_lookup)
            outputs.append(out.detach().clone())
            out.backward(torch.sin(torch.arange(out.numel())).view(out.shape))
    tables.barrier()
    return [*outputs, *(tables.read(t.name) for t in case.tables)]


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("in_order", [True, False])
def test_rows_and_updates_equal_those_of_copied_bags(sizes: tuple[int, int], in_order: bool
                                                     ) -> None:
    case = dlrm_case()
    for plan in plans_for(case.tables, 2).values():
        def body(group: Any, plan: Any = plan) -> list[list[Any]]:
            batches = [make(case, 10 * group.rank + s, *sizes, in_order) for s in range(3)]
            found = []
            for by_lookup in (True, False):
                tables = open_tables(case, plan, group, RWA)
                found.append(train(case, tables, batches, by_lookup))
                tables.close()
            return found

        for shared, copied in run_ranks(2, body):
            assert shared[0].shape == (sizes[0], case.columns)
            assert_bitwise(shared, copied, "trained on shared bags")


@pytest.mark.parametrize("what", ["guard", "no_sync", "clamp"])
def test_guard_clamp_and_no_sync_get_gradients_of_bags(what: str) -> None:
    case = dlrm_case()
    batches = [make(case, s, 40, 17, True) for s in range(4)]
    optimizer = replace(RWA, max_gradient=0.5) if what == "clamp" else RWA
    found = []
    for by_lookup in (True, False):
        tables = open_alone(case, optimizer)
        tables.guard.choose("stop" if what == "guard" else "off")
        found.append(train(case, tables, batches, by_lookup, what == "no_sync"))
        tables.close()
    assert_bitwise(found[0], found[1], what)


def test_gradients_of_weights() -> None:
    case = dlrm_case(weighted=True)
    batch, found = make(case, 3, 40, 17, True), []
    tables = open_alone(case, RWA)
    for by_lookup in (True, False):
        assert batch.weights is not None
        batch.weights = batch.weights.detach().requires_grad_()
        out = rows_of(tables, case, batch, by_lookup)
        found.append(torch.autograd.grad(out, batch.weights, torch.cos(out.detach()))[0])
    tables.close()
    assert_bitwise(found[0], found[1], "gradients of weights")
    assert found[0].abs().max() > 0


def test_shared_bags_must_not_change_before_the_update() -> None:
    case = dlrm_case()
    tables, batch = open_alone(case, RWA), make(case, 0, 40, 17, True)
    out = tables.lookup(batch)
    assert batch.shared is not None
    batch.shared.samples[0, 0] = 1
    with pytest.raises(InvalidInputError, match="inverse_indices"):
        out.sum().backward()
    for outside in (-1, 1 << 40, int(batch.shared.bags[case.key_of[0]])):
        batch.shared.samples[0, 0] = outside
        with pytest.raises(InvalidInputError, match=f"inverse_indices of {case.features[0][0]}.*"
                           f"{outside}.*0 <= bag < "):
            tables.lookup(batch)
    tables.close()


@pytest.mark.parametrize("way", ["plain", "no_sync", "max_gradient"])
def test_changes_unseen_by_torch_are_refused_in_the_backward_pass(way: str) -> None:
    """Includes a bag that only other features use."""
    case = dlrm_case()
    optimizer = replace(RWA, max_gradient=0.5) if way == "max_gradient" else RWA
    tables, batch = open_alone(case, optimizer), make(case, 0, 40, 17, True)
    assert batch.shared is not None
    before = [tables.read(t.name) for t in case.tables]
    counts = batch.shared.bags[batch.key_of]
    f = int(counts.argmin())
    assert counts[f] < counts.max() <= batch.batch_size
    for outside in (-1, 1 << 40, int(counts[f])):
        was = int(batch.shared.samples[f, 3])
        out = tables.lookup(batch)
        batch.shared.samples.numpy()[f, 3] = outside
        held = tables.no_sync() if way == "no_sync" else contextlib.nullcontext()
        with pytest.raises(InvalidInputError, match=f"inverse_indices of {case.features[f][0]}"), \
                held:
            out.sum().backward()
        batch.shared.samples.numpy()[f, 3] = was
        if way == "no_sync":
            with pytest.raises(InvalidInputError, match="no rank makes this update"):
                tables.lookup(batch).sum().backward()
    assert_bitwise([tables.read(t.name) for t in case.tables], before, "rows")
    tables.lookup(batch).sum().backward()  # the tables go on
    assert not torch.equal(tables.read(case.tables[0].name), before[0])
    tables.close()


@pytest.mark.parametrize("in_order", [True, False])
def test_repaired_batches_keep_shared_bags(in_order: bool) -> None:
    case = dlrm_case()
    found = []
    for by_lookup in (True, False):
        tables, batch = open_alone(case, RWA), make(case, 0, 40, 17, in_order)
        batch.ids[::7] = 1 << 40
        tables.bounds = BoundsCheck("ignore", tables.features, tables.specs)
        found.append(train(case, tables, [batch], by_lookup))
        assert tables.bounds.num_bad_ids > 0
        tables.close()
    assert_bitwise(found[0], found[1], "outputs and rows")
