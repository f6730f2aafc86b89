"""Helpers of the runtime's tests: cases, batches, a reference trainer, virtual ranks.

The reference is plain torch and shares no code with the runtime: dense autograd over the mean of
the ranks' losses, then FBGEMM's exact SGD or row-wise Adagrad in a few lines.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from oper.plan import Plan, uniform_plan
from oper.shmem.batch import Lookup
from oper.shmem.group.groups import SingleGroup, ThreadGroup
from oper.shmem.optim.optimizers import STATE_PARTS, Optimizer
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests.random_plans import with_tables
from tests.references import EVERY, first_states, update_rows

Optimizers = Optimizer | Mapping[str, Optimizer]  # of all tables, or by table

# One optimizer of every kind: the two of most tests, and all others.
OPTIMIZERS = {name: EVERY[name] for name in ("sgd", "rowwise_adagrad")}
OTHER_OPTIMIZERS = {EVERY[name].name: EVERY[name] for name in (
    "adagrad", "adam_decay", "partial_rowwise_adam_decay", "momentum_sgd_decay", "lars_sgd_decay",
    "lamb_decay", "partial_rowwise_lamb_decay")}
ALL_OPTIMIZERS = OPTIMIZERS | OTHER_OPTIMIZERS


# ---- cases and batches ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Tables, the keys of the input, and the form of a batch."""

    tables: tuple[TableSpec, ...]
    keys: tuple[str, ...]
    weighted: bool = False
    id_dtype: torch.dtype = torch.int64
    length_dtype: torch.dtype = torch.int64
    max_length: int = 4
    base_batch: int = 16

    @property
    def features(self) -> list[tuple[str, str]]:
        return [(f, t.name) for t in self.tables for f in t.features]

    @property
    def key_of(self) -> torch.Tensor:
        return torch.tensor([self.keys.index(f) for f, _ in self.features])

    @property
    def columns(self) -> int:
        return sum(t.dim * len(t.features) for t in self.tables)

    @property
    def is_pooled(self) -> bool:
        return self.tables[0].pooling != "none"

    def table(self, name: str) -> TableSpec:
        return next(t for t in self.tables if t.name == name)

    def with_optimizer(self, chosen: str | Mapping[str, Optimizer]) -> Case:
        """Return the case with one optimizer's name for all tables, or one per table."""
        return replace(self, tables=tuple(replace(
            t, optimizer=chosen if isinstance(chosen, str) else chosen[t.name].name)
            for t in self.tables))


@dataclass
class Batch:
    """One rank's input of one step: key-major ids and lengths, and a target for the loss."""

    lengths: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor | None
    target: torch.Tensor

    @property
    def size(self) -> int:
        return self.target.shape[0]

    def lookup(self, case: Case) -> Lookup:
        return Lookup(self.ids, self.lengths, case.key_of, self.size, self.weights, case.is_pooled)


def dlrm_case(optimizer: str = "rowwise_adagrad", **fields: Any) -> Case:
    """Make tables of all widths and sizes, with shared features, and with keys in another order and
    two extra keys."""
    shapes = [
        ("one", 1, 4, ("only",), "sum"),
        ("tiny", 7, 8, ("f1",), "mean"),
        ("two_features", 1000, 12, ("a", "b"), "sum"),
        ("means", 5000, 16, ("f3",), "mean"),
        ("left", 300, 24, ("shared",), "sum"),
        ("large", 20000, 64, ("f5",), "sum"),
        ("right", 310, 96, ("shared",), "mean"),
        ("wide", 3000, 128, ("f7",), "sum"),
        ("widest", 2, 200, ("f8",), "mean"),
    ]
    tables = tuple(TableSpec(n, r, d, f, p, "float32", optimizer) for n, r, d, f, p in shapes)
    keys = ("f8", "zz_extra", "b", "f5", "only", "shared", "a", "f7", "f3", "extra", "f1")
    return Case(tables, keys, **fields)


def make_batch(case: Case, seed: int, size: int) -> Batch:
    """Draw skewed ids; about a third of the bags are empty, and extra keys have ids beyond every
    table."""
    rng = np.random.default_rng(seed)
    rows = {k: min((case.table(t).num_rows for f, t in case.features if f == k), default=0)
            for k in case.keys}
    lengths = rng.integers(0, case.max_length + 1, (len(case.keys), size))
    lengths[rng.random(lengths.shape) < 0.2] = 0
    ids = []
    for k, key in enumerate(case.keys):
        n = int(lengths[k].sum())
        hot = (rows[key] * rng.random(n) ** 4).astype(np.int64)
        # Hot rows are scattered: 7919 is prime and divides no table's number of rows.
        ids.append(hot * 7919 % rows[key] if rows[key] else np.full(n, 2**31 - 1))
    flat = np.concatenate(ids) if ids else np.zeros(0, np.int64)
    weights = torch.from_numpy(rng.normal(1, 0.5, flat.size).astype(np.float32))
    target = torch.from_numpy(rng.normal(0, 1, (size, case.columns)).astype(np.float32))
    return Batch(torch.from_numpy(lengths.reshape(-1)).to(case.length_dtype),
                 torch.from_numpy(flat).to(case.id_dtype),
                 weights if case.weighted else None, target)


def bags_of_one(ids: torch.Tensor, num_features: int = 1) -> Lookup:
    """Make one bag for each id, equally many of each feature."""
    return Lookup(ids, torch.ones_like(ids), torch.arange(num_features),
                  ids.numel() // num_features)


def short_bags(specs: Sequence[TableSpec], seed: int, size: int) -> Lookup:
    """Draw bags of up to three ids of one feature per table."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(specs), size), generator=g)
    ids = [torch.randint(0, s.num_rows, (int(n.sum()),), generator=g)
           for s, n in zip(specs, lengths, strict=True)]
    return Lookup(torch.cat(ids), lengths.reshape(-1), torch.arange(len(specs)), size)


def make_steps(case: Case, world_size: int, steps: int, seed: int = 0) -> list[list[Batch]]:
    """Make batches by step and rank; sizes differ between ranks, and some batches are empty."""
    turns = (case.base_batch, case.base_batch // 3, 0, case.base_batch + 7)
    return [[make_batch(case, 1000 * seed + 10 * s + r, turns[(r + s) % 4])
             for r in range(world_size)] for s in range(steps)]


def initial_weights(case: Case) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(7)
    return {t.name: torch.empty(t.num_rows, t.dim, dtype=torch.float32).uniform_(
                -0.5, 0.5, generator=g)
            for t in case.tables}


def rank_loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Compute the mean loss over a rank's own batch; 0 for an empty batch. Every number of a
    sequence counts."""
    if out.shape != target.shape:  # rows of sequences
        target = torch.cos(torch.arange(out.numel())).view(out.shape)
    return ((out - target.to(out.dtype)) ** 2).sum() / max(1, out.shape[0])


# ---- the reference -------------------------------------------------------------------------------


@dataclass
class Result:
    """Results of a training run: outputs [step][rank], weights and states by table."""

    outputs: list[list[torch.Tensor]]
    weights: dict[str, torch.Tensor]
    states: dict[str, torch.Tensor]
    replicas: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)


def pool(weight: torch.Tensor, ids: torch.Tensor, lengths: torch.Tensor, pooling: str,
         weights: torch.Tensor | None = None) -> torch.Tensor:
    """Compute sum or mean of each bag, one row at a time."""
    bags = torch.repeat_interleave(torch.arange(lengths.numel()), lengths.long())
    rows = weight[ids.long()]
    if weights is not None:
        rows = rows * weights.to(rows.dtype)[:, None]
    out = torch.zeros(lengths.numel(), weight.shape[1], dtype=weight.dtype).index_add(0, bags, rows)
    if pooling == "mean":
        out = out / lengths.clamp(min=1).to(out.dtype)[:, None]
    return out


def reference_forward(case: Case, tables: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
    lengths = batch.lengths.reshape(len(case.keys), batch.size)
    ends = [0, *np.cumsum(lengths.sum(1).numpy()).tolist()]
    blocks = []
    for feature, name in case.features:
        k = case.keys.index(feature)
        part = slice(ends[k], ends[k + 1])
        blocks.append(pool(tables[name], batch.ids[part], lengths[k], case.table(name).pooling,
                           None if batch.weights is None else batch.weights[part]))
    return torch.cat(blocks, 1)


@torch.no_grad()
def apply_optimizer(o: Optimizer, step: int, weight: torch.Tensor, state: dict[str, torch.Tensor],
                    grad: torch.Tensor, touched: torch.Tensor, rate: float = 1.0) -> None:
    """Make an exact update of the touched rows, step counted from 1; `rate`: factor on the learning
    rate."""
    w, part, g = weight[touched], {k: s[touched] for k, s in state.items()}, grad[touched]
    if o.max_row_norm is not None:
        for k in range(len(g)):
            row = torch.nn.Parameter(w[k].clone())
            row.grad = g[k].clone()
            torch.nn.utils.clip_grad_norm_([row], o.max_row_norm)
            g[k] = row.grad
    update_rows(o, w, part, g, o.lr * rate, step)
    weight[touched] = w
    for k, s in part.items():
        state[k][touched] = s


def touched_rows(case: Case, table: TableSpec, batches: list[Batch]) -> torch.Tensor:
    """Whether a row of a table is in the global batch, bool [num_rows]."""
    touched = torch.zeros(table.num_rows, dtype=torch.bool)
    for batch in batches:
        ends = [0, *batch.lengths.reshape(len(case.keys), -1).sum(1).cumsum(0).tolist()]
        for feature in table.features:
            k = case.keys.index(feature)
            touched[batch.ids[ends[k]:ends[k + 1]].long()] = True
    return touched


def clip_elements(outs: Sequence[torch.Tensor], limit: float | None) -> None:
    """Clip the gradients of lookups as FBGEMM does."""
    for out in outs:
        if limit is not None and out.requires_grad:
            out.register_hook(lambda g: g.clamp(-limit, limit))


def train_reference(case: Case, steps: list[list[Batch]], optimizer: Optimizers,
                    dtype: torch.dtype = torch.float32, rates: Sequence[float] | None = None
                    ) -> Result:
    """Train the unsharded tables on the mean of the ranks' losses, on one thread.

    `rates`: factor on the learning rates at each step.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    chosen = optimizer if isinstance(optimizer, Mapping) else {
        t.name: optimizer for t in case.tables}
    (limit,) = {o.max_gradient for o in chosen.values()}
    weights = {n: w.to(dtype, copy=True).requires_grad_() for n, w in initial_weights(case).items()}
    states = {n: first_states(chosen[n], w.detach()) for n, w in weights.items()}
    outputs = []
    for step, (batches, rate) in enumerate(
            zip(steps, rates or [1.0] * len(steps), strict=True), 1):
        outs = [reference_forward(case, weights, b) for b in batches]
        clip_elements(outs, limit)
        losses = [rank_loss(o, b.target) for o, b in zip(outs, batches, strict=True)]
        (torch.stack(losses).sum() / len(losses)).backward()
        for name, w in weights.items():
            touched = touched_rows(case, case.table(name), batches)
            apply_optimizer(chosen[name], step, w, states[name], w.grad, touched, rate)
            w.grad = None
        outputs.append([o.detach() for o in outs])
    torch.set_num_threads(threads)
    return Result(outputs, {n: w.detach() for n, w in weights.items()},
                  {f"{n} {part}": x for n, parts in states.items() for part, x in parts.items()})


@functools.cache
def references(case: Case, world_size: int, optimizer: str, num_steps: int
               ) -> tuple[list[list[Batch]], Result, Result]:
    """Return the steps, and the unsharded runs of them in fp32 and float64."""
    steps = make_steps(case, world_size, num_steps)
    args = (case, steps, ALL_OPTIMIZERS[optimizer])
    return steps, train_reference(*args), train_reference(*args, torch.float64)


# ---- virtual ranks -------------------------------------------------------------------------------


def run_ranks(world_size: int, body: Callable[[ThreadGroup], Any], num_threads: int = 1,
              timeout_s: float = 120.0, domains: Sequence[int] | None = None) -> list[Any]:
    """Run `body(group)` on one thread per virtual rank; return results by rank, or raise the first
    error."""
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []
    before = torch.get_num_threads()

    def work(group: ThreadGroup) -> None:
        try:
            torch.set_num_threads(num_threads)
            results[group.rank] = body(group)
        except BaseException as error:
            errors.append(error)
            group.abort()

    threads = [threading.Thread(target=work, args=(g,), daemon=True)
               for g in ThreadGroup.create(world_size, domains=domains)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout_s)
    torch.set_num_threads(before)
    if errors:
        raise errors[0]
    assert not any(t.is_alive() for t in threads), "a virtual rank hangs"
    return results


def open_tables(case: Case, plan: Plan, group: Any, optimizer: Optimizers | None,
                gradient_scale: float | None = None) -> ShardedTables:
    """Open sharded tables with the case's initial weights; no optimizer = read-only."""
    own = case.with_optimizer(optimizer if isinstance(optimizer, Mapping) else
                              optimizer.name if optimizer else "none")
    scale = 1.0 / group.world_size if gradient_scale is None else gradient_scale
    tables = ShardedTables(with_tables(plan, own.tables), case.features, group, optimizer, scale)
    for name, weight in initial_weights(case).items():
        tables.write(name, weight)
    tables.flush_replicas()
    return tables


def read_all(tables: ShardedTables) -> dict[str, torch.Tensor]:
    """Read the rows of all tables while no rank trains. Collective."""
    tables.barrier()
    found = {name: tables.read(name) for name in tables.specs}
    tables.barrier()
    return found


def open_alone(case: Case, optimizer: Optimizers | None) -> ShardedTables:
    """Open the tables on one rank."""
    return open_tables(case, uniform_plan(case.tables, 1), SingleGroup(), optimizer)


def train_rank(case: Case, plan: Plan, steps: list[list[Batch]], optimizer: Optimizers,
               group: Any, between: Callable[[ShardedTables, int], None] | None = None,
               prepared: Callable[[ShardedTables, list[Lookup]], Iterable[Lookup]] | None = None
               ) -> Result:
    """Run one rank's part of a training run; every rank reads all tables at the end. `between` is
    called with the tables and the step number before every step and at the end; `prepared` yields
    this rank's batches in the form in which they are looked up."""
    tables = open_tables(case, plan, group, optimizer)
    outputs = []
    between = between or (lambda tables, step: None)
    mine = [batches[group.rank] for batches in steps]
    lookups: Iterable[Lookup] = [batch.lookup(case) for batch in mine]
    if prepared is not None:
        lookups = prepared(tables, lookups)
    for step, (batch, lookup) in enumerate(zip(mine, lookups, strict=True)):
        between(tables, step)
        out = tables.lookup(lookup)
        rank_loss(out, batch.target).backward()
        outputs.append([out.detach().clone()])
    between(tables, len(steps))
    tables.barrier()
    weights = {t.name: tables.read(t.name) for t in case.tables}
    kinds = {t.name: (optimizer[t.name] if isinstance(optimizer, Mapping) else optimizer).name
             for t in case.tables}
    states = {f"{name} {part}": tables.read(name, part=part)
              for name, kind in kinds.items() for part, _ in STATE_PARTS[kind]}
    # Every rank shares its replicas, since ranks cannot read other memory domains.
    own = {t.name: tables.replica_view(tables.pieces[t.name][0], group.rank).clone()
           for t in case.tables}
    replicas = {(name, r): rows for r, held in enumerate(group.all_gather(own))
                for name, rows in held.items()}
    tables.barrier()
    tables.close()
    return Result(outputs, weights, states, replicas)


def merge_ranks(ranks: list[Result]) -> Result:
    """Merge the results of all ranks; assert that all have read the same tables, bit for bit."""
    first = ranks[0]
    for other in ranks[1:]:
        assert_bitwise(vars(other) | {"outputs": []}, vars(first) | {"outputs": []},
                       "read by two ranks")
    steps = range(len(first.outputs))
    return replace(first, outputs=[[r.outputs[s][0] for r in ranks] for s in steps])


def train_virtual(case: Case, plan: Plan, steps: list[list[Batch]], optimizer: Optimizers,
                  num_threads: int = 1,
                  between: Callable[[ShardedTables, int], None] | None = None,
                  domains: Sequence[int] | None = None) -> Result:
    """Train on virtual ranks of this process."""
    def body(group: ThreadGroup) -> Result:
        return train_rank(case, plan, steps, optimizer, group, between)

    return merge_ranks(run_ranks(plan.world_size, body, num_threads, domains=domains))


# ---- comparisons ---------------------------------------------------------------------------------


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Change torch's default dtype inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def assert_bitwise(a: Any, b: Any, what: str) -> None:
    """Assert equality bit for bit, also inside dicts and lists."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), what
        for key in a:
            assert_bitwise(a[key], b[key], f"{what} {key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), what
        for k, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_bitwise(x, y, f"{what} [{k}]")
    else:
        bits = torch.int16 if a.element_size() == 2 else torch.int32
        assert a.shape == b.shape and a.dtype == b.dtype, what
        assert torch.equal(a.contiguous().view(bits), b.contiguous().view(bits)), (
            f"{what}: bits differ")


def assert_near(got: Any, want: Any, what: str, tolerance: float = 1e-5) -> None:
    """Assert that tensors, also inside dicts and lists, are within `tolerance` of the largest
    value."""
    if isinstance(want, dict):
        assert got.keys() == want.keys(), what
        for key in want:
            assert_near(got[key], want[key], f"{what}: {key}", tolerance)
    elif isinstance(want, list | tuple):
        for k, (x, y) in enumerate(zip(got, want, strict=True)):
            assert_near(x, y, f"{what} [{k}]", tolerance)
    else:
        assert got.shape == want.shape, f"{what}: {tuple(got.shape)} for {tuple(want.shape)}"
        if want.numel():
            gap, largest = (got.double() - want.double()).abs().max(), want.abs().max()
            assert gap <= tolerance * largest, f"{what}: differs by {gap}, largest value {largest}"


def whole(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Copy the tensors of a state_dict, whole. Collective if it contains DTensors."""
    return {k: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach().clone()
            for k, v in state.items()}


def same_bits(got: Result, want: Result, what: str = "runs", replicas: bool = False) -> None:
    """Assert that outputs, weights and states are equal bit for bit; replicas too if both plans
    have the same ones."""
    for part in ("outputs", "weights", "states", *(["replicas"] if replicas else [])):
        assert_bitwise(getattr(got, part), getattr(want, part), f"{what}: {part}")


def _named(case: Case, result: Result) -> dict[str, torch.Tensor]:
    """Return weights, states and, per feature, the outputs of all steps and ranks, as one tensor
    each."""
    found = {f"weight {n}": w for n, w in result.weights.items()}
    found |= {f"state {n}": s for n, s in result.states.items()}
    out = torch.cat([o for step in result.outputs for o in step])
    at = 0
    for feature, name in case.features:
        dim = case.table(name).dim
        found[f"output {feature}@{name}"] = out[:, at:at + dim]
        at += dim
    return found


def assert_exact(case: Case, got: Result, fp32: Result, fp64: Result) -> None:
    """Check the project's criterion for equal results, tensor by tensor.

    Results are within 1e-5 of the largest value of the unsharded fp32 run. Outputs and weights are
    also at most 4 times as far from the float64 run as that run is (plus half a unit in the last
    place, since rounding the exact value is allowed).
    """
    mine, ref, best = _named(case, got), _named(case, fp32), _named(case, fp64)
    for name in mine:
        largest = ref[name].abs().max().item() if ref[name].numel() else 0.0
        gap = (mine[name] - ref[name]).abs().max().item() if ref[name].numel() else 0.0
        assert gap <= 1e-5 * largest, f"{name}: differs by {gap}, largest value {largest}"
        if not ref[name].numel() or name.startswith("state"):
            continue
        error = (mine[name].double() - best[name]).abs().max().item()
        allowed = 4 * (ref[name].double() - best[name]).abs().max().item()
        assert error <= allowed + largest * 2.0**-24, (
            f"{name}: {error} from float64, the unsharded run is {allowed / 4}")
