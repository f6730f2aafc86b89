"""Bags that several samples share; lookup and dot interaction as one operator."""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from oper.errors import InvalidInputError
from oper.plan import uniform_plan
from oper.shmem.batch import Lookup, SharedBags
from oper.shmem.by_feature import BoundsCheck
from oper.shmem.publication.reader import PublishedTables, Reader, shared_pairs
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests import random_plans as rp, runtime_support as rs
from tests.shmem.test_quantised_rows import published
from tests.world_support import run_world

RWA = rs.OPTIMIZERS["rowwise_adagrad"]
# More samples than bags; as many; bags that no sample has.
SIZES = {"fewer bags": (40, 17), "as many": (300, 300), "more bags": (9, 16)}


def make(case: rs.Case, seed: int, num_samples: int, most: int, in_order: bool) -> Lookup:
    """A batch whose keys have at most `most` bags; features of a key assign its bags to samples
    independently.

    `in_order`: bags are numbered in the order of the samples, as in the loader.
    """
    rng = np.random.default_rng(seed)
    whole = rs.make_batch(case, seed, most)
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


def rows_of(tables: ShardedTables, case: rs.Case, batch: Lookup, by_lookup: bool) -> torch.Tensor:
    """Rows of samples: from the lookup, or copied from the rows of all bags."""
    if by_lookup:
        return tables.lookup(batch)
    assert batch.shared is not None
    plain = Lookup(batch.ids, batch.lengths, batch.key_of, batch.batch_size, batch.weights)
    dims = [case.table(t).dim for _, t in case.features]
    parts = tables.lookup(plain).split(dims, 1)
    return torch.cat([torch.nn.functional.embedding(rows, part)
                      for rows, part in zip(batch.shared.samples, parts, strict=True)], 1)


def train(case: rs.Case, tables: ShardedTables, batches: list[Lookup], by_lookup: bool,
          in_parts: bool = False) -> list[Any]:
    outputs: list[Any] = []
    for k, batch in enumerate(batches):
        with tables.no_sync() if in_parts and k % 2 == 0 else contextlib.nullcontext():
            if batch.weights is not None:
                batch.weights = batch.weights.detach().requires_grad_()
            out = rows_of(tables, case, batch, by_lookup)
            outputs.append(out.detach().clone())
            out.backward(torch.sin(torch.arange(out.numel())).view(out.shape))
            if batch.weights is not None:
                outputs.append(batch.weights.grad)
    tables.barrier()
    return [*outputs, *(tables.read(t.name) for t in case.tables)]


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("in_order", [True, False])
def test_rows_and_updates_equal_those_of_copied_bags(sizes: tuple[int, int], in_order: bool
                                                     ) -> None:
    case = rs.dlrm_case()
    for plan in rp.plans_for(case.tables, 2).values():
        def body(group: Any, plan: Any = plan) -> list[list[Any]]:
            batches = [make(case, 10 * group.rank + s, *sizes, in_order) for s in range(3)]
            found = []
            for by_lookup in (True, False):
                tables = rs.open_tables(case, plan, group, RWA)
                found.append(train(case, tables, batches, by_lookup))
            return found

        for shared, copied in rs.run_ranks(2, body):
            assert shared[0].shape == (sizes[0], case.columns)
            rs.assert_bitwise(shared, copied, "trained on shared bags")


@pytest.mark.parametrize("what", ["guard", "no_sync", "clamp", "repair", "weights"])
def test_gradients_are_those_of_bags(what: str) -> None:
    """For the guard, for clamping, repaired ids and no_sync, and for weights."""
    case = rs.dlrm_case(weighted=what == "weights")
    batches = [make(case, s, 40, 17, s < 3) for s in range(4)]
    if what == "repair":
        for batch in batches:
            batch.ids[::7] = 1 << 40
    optimizer = replace(RWA, max_gradient=0.5) if what == "clamp" else RWA
    found = []
    for by_lookup in (True, False):
        tables = rs.open_alone(case, optimizer)
        tables.guard.choose("stop" if what == "guard" else "off")
        tables.bounds = BoundsCheck("ignore" if what == "repair" else "fatal", tables.features,
                                    tables.specs)
        found.append(train(case, tables, batches, by_lookup, what == "no_sync"))
        assert (tables.bounds.num_bad_ids > 0) == (what == "repair")
    rs.assert_bitwise(found[0], found[1], what)


def test_shared_bags_must_not_change_before_the_update() -> None:
    case = rs.dlrm_case()
    tables, batch = rs.open_alone(case, RWA), make(case, 0, 40, 17, True)
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


@pytest.mark.parametrize("way", ["plain", "no_sync", "max_gradient"])
def test_changes_unseen_by_torch_are_refused_in_the_backward_pass(way: str) -> None:
    """Includes a bag that only other features use."""
    case = rs.dlrm_case()
    optimizer = replace(RWA, max_gradient=0.5) if way == "max_gradient" else RWA
    tables, batch = rs.open_alone(case, optimizer), make(case, 0, 40, 17, True)
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
    rs.assert_bitwise([tables.read(t.name) for t in case.tables], before, "rows")
    tables.lookup(batch).sum().backward()  # the tables go on
    assert not torch.equal(tables.read(case.tables[0].name), before[0])


# ---- dot interaction, against the definition in double precision ---------------------------------

# Features and columns: one block and several of everything that the kernels cut into blocks.
SHAPES = [(1, 4), (2, 16), (3, 20), (7, 64), (15, 12), (16, 33), (26, 64), (31, 128), (40, 96)]
Users = tuple[Lookup, Lookup, torch.Tensor, torch.Tensor]  # what `of_users` makes


@contextmanager
def attached(num_features: int, dim: int, dtype: str = "float32", seed: int = 0
             ) -> Iterator[tuple[PublishedTables, Reader]]:
    """Published tables of 50 normally distributed rows, attached in this process."""
    specs = [TableSpec(f"t{k}", 50, dim, (f"f{k}",), "mean" if k % 3 == 2 else "sum", dtype, "none")
             for k in range(num_features)]
    generator = torch.Generator().manual_seed(seed)
    rows = {s.name: torch.randn(50, dim, generator=generator) for s in specs}
    with published(uniform_plan(specs, 1, "owned"), rows) as (_, (reader,)):
        yield PublishedTables(reader, reader.epoch & 1, [(s.features[0], s.name) for s in specs]
                              ), reader


def batch_of(num_features: int, size: int, weighted: bool = False, seed: int = 1) -> Lookup:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (num_features * size,), generator=generator)
    ids = torch.randint(0, 50, (int(lengths.sum()),), generator=generator)
    weights = torch.randn(ids.numel(), generator=generator) if weighted else None
    return Lookup(ids, lengths, torch.arange(num_features), size, weights)


def expected(pooled: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    """The interaction computed pair by pair in float64."""
    rows = torch.cat([dense, pooled], 1).double().reshape(dense.shape[0], -1, dense.shape[1])
    n = rows.shape[1]
    pairs = [(rows[:, i] * rows[:, j]).sum(1, keepdim=True) for i in range(n)
             for j in range(i + 1, n)]
    return torch.cat([dense.double(), *pairs], 1)


def differences(rank: int, world_size: int) -> tuple[list[str], str]:
    """Batch shapes with wrong results, and a digest of all results."""
    wrong, digest = [], hashlib.sha256()
    for dtype, shapes in (("float32", SHAPES), ("int8", SHAPES[4:7]), ("float16", SHAPES[2:4])):
        for num_features, dim in shapes:
            with attached(num_features, dim, dtype) as (tables, reader), reader.pinned():
                for size, weighted in ((1, False), (64, False), (131, True)):
                    batch = batch_of(num_features, size, weighted)
                    dense = torch.randn(size, dim, generator=torch.Generator().manual_seed(2))
                    found = tables.lookup_interaction(batch, dense)
                    pooled = tables.lookup(batch)
                    want = expected(pooled, dense)
                    # A sum of `dim` rounded products.
                    norms = torch.cat([dense, pooled], 1).reshape(size, -1, dim).norm(dim=2)
                    bound = float(norms.max()) ** 2 * dim * 2.0 ** -23
                    if found.shape != want.shape or not bool(
                            ((found.double() - want).abs() <= bound).all()):
                        wrong.append(f"{dtype} {num_features} {dim} {size}")
                    digest.update(found.numpy().tobytes())
                    wrong += [f"{dtype} {num_features} {dim} {size}: {x}" for x in shared_differs(
                        tables, of_users(num_features, size), dense)]
    return wrong, digest.hexdigest()


def test_tables_of_several_dims_have_no_interaction() -> None:
    specs = [TableSpec(n, 50, dim, (n,), "sum", "float32", "none")
             for n, dim in (("a", 32), ("b", 96))]
    rows = {s.name: torch.zeros(50, s.dim) for s in specs}
    with published(uniform_plan(specs, 1, "owned"), rows) as (_, (reader,)), reader.pinned():
        tables = PublishedTables(reader, reader.epoch & 1, [(s.name, s.name) for s in specs])
        with pytest.raises(InvalidInputError, match=r"dims of the tables=\[32, 96\], expected one"):
            tables.lookup_interaction(batch_of(2, 4), torch.zeros(4, 32))


def test_products_equal_the_definition_on_every_processor() -> None:
    wrong, digest = differences(0, 1)
    assert wrong == []
    for kernels in ("avx2", "generic"):
        assert run_world(1, differences, env={"OPER_CPU_KERNELS": kernels}) == [([], digest)]


def test_a_sample_depends_neither_on_its_batch_nor_on_threads() -> None:
    with attached(26, 64, "int8") as (tables, reader), reader.pinned():
        batch, dense = batch_of(26, 200), torch.randn(200, 64)
        whole = tables.lookup_interaction(batch, dense)
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            assert torch.equal(tables.lookup_interaction(batch, dense), whole)
        finally:
            torch.set_num_threads(before)
        for sample in (0, 63, 64, 199):
            assert torch.equal(
                tables.lookup_interaction(_only(batch, sample), dense[sample:sample + 1]),
                whole[sample:sample + 1])
        traffic = tables.traffic()
        assert int(traffic.counts.sum()) == 2 * batch.ids.numel() + sum(
            _only(batch, s).ids.numel() for s in (0, 63, 64, 199))


@pytest.mark.parametrize("size", [1, 64, 150])
def test_shared_bags_are_looked_up_once(size: int) -> None:
    """A batch has three users, whose shared bags may be anywhere in it."""
    with attached(26, 64, "int8") as (tables, reader), reader.pinned():
        batch, full, first, keys = of_users(26, size)
        dense = torch.randn(size, 64)
        assert shared_differs(tables, (batch, full, first, keys), dense) == []
        tables.traffic(reset=True)
        tables.lookup_interaction(full, dense)
        counts = [int(tables.traffic(reset=True).counts.sum())]
        tables.lookup_shared_interaction(batch, dense, first, keys)
        counts.append(int(tables.traffic(reset=True).counts.sum()))
        assert counts[0] == full.ids.numel() and (size == 1 or counts[1] < counts[0] / 2)


def of_users(num_features: int, size: int) -> Users:
    """A batch of up to three users, with two thirds of the keys shared; the same batch with a bag
    per sample; the first sample of each sample's user; which keys are shared."""
    batch = batch_of(num_features, size)
    first = torch.tensor([0] * (size // 3) + [size // 3] * (size // 2), dtype=torch.int64)
    first = torch.nn.functional.pad(first, (0, size - first.numel()), value=size // 3 + size // 2)
    keys = torch.arange(num_features) % 3 < 2
    batch.key_of = torch.randperm(num_features, generator=torch.Generator().manual_seed(0))
    ends = batch.lengths.cumsum(0).reshape(num_features, size)
    lengths = batch.lengths.reshape(num_features, size)
    of = torch.where(keys[:, None], first, torch.arange(size))  # whose bag each sample has
    bags = [[batch.ids[int(ends[k, b] - lengths[k, b]):int(ends[k, b])] for b in of[k]]
            for k in range(num_features)]
    full = Lookup(torch.cat([bag for row in bags for bag in row]),
                  lengths.gather(1, of).reshape(-1), batch.key_of, size)
    return batch, full, first, keys


def shared_differs(tables: PublishedTables, users: Users, dense: torch.Tensor) -> list[str]:
    """The outputs of the shared interaction that differ bitwise from those of complete rows."""
    batch, full, first, keys = users
    want = tables.lookup_interaction(full, dense)
    pairs, samples, user_of = tables.lookup_shared_interaction(batch, dense, first, keys)
    of_users, of_samples = shared_pairs(dense.shape[1], keys[batch.key_of].tolist())
    assert sorted(of_users + of_samples) == list(range(want.shape[1]))
    begins = first.unique()
    return [name for name, found, right in (
        ("pairs of users", pairs, want[begins][:, of_users]),
        ("samples", samples, want[:, of_samples]), ("users", begins[user_of], first))
        if not torch.equal(found, right)]


def _only(batch: Lookup, sample: int) -> Lookup:
    """The batch of a single sample."""
    lengths = batch.lengths.reshape(-1, batch.batch_size)
    ends = batch.lengths.cumsum(0).reshape(lengths.shape)
    parts: Sequence[torch.Tensor] = [
        batch.ids[int(e) - int(n):int(e)] for e, n in zip(ends[:, sample], lengths[:, sample],
                                                          strict=True)]
    return Lookup(torch.cat(list(parts)), lengths[:, sample].contiguous(), batch.key_of, 1)


def test_bad_batches_are_refused_by_name() -> None:
    with attached(3, 8) as (tables, reader), reader.pinned():
        batch, dense = batch_of(3, 70), torch.zeros(70, 8)
        for bad in (torch.zeros(70, 9), torch.zeros(69, 8), torch.zeros(70, 8).double()):
            with pytest.raises(InvalidInputError, match="dense"):
                tables.lookup_interaction(batch, bad)
        ids = batch.ids.clone()
        ids[-1] = 50
        with pytest.raises(InvalidInputError, match=r"feature 'f2' .* id=50"):
            tables.lookup_interaction(Lookup(ids, batch.lengths, batch.key_of, 70), dense)
        with pytest.raises(InvalidInputError, match="lengths"):
            tables.lookup_interaction(Lookup(ids[1:], batch.lengths, batch.key_of, 70), dense)
        none = Lookup(ids[:0], batch.lengths[:0], batch.key_of, 0)
        assert tables.lookup_interaction(none, dense[:0]).shape == (0, 8 + 6)
