"""Sharded DLRM in real processes: DDP, DistributedModelParallel, pipelines, checkpoints, moves."""

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torchrec.distributed.model_parallel import DistributedModelParallel as DMP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import oper
from oper.errors import InvalidInputError, PlanError
from oper.plan import uniform_plan
from oper.tables import TableSpec
from tests.checkpoint_support import Model, flat, sharded, state_of, train
from tests.dlrm_support import EBC, make_batch, make_collection, make_dlrm, make_kjt, plan_for
from tests.runtime_support import assert_bitwise, assert_near, whole
from tests.world_support import run_world

LR, STEPS = 0.2, 10


def _shard(model: Any, world_size: int, kind: str, **fields: Any) -> Any:
    plan = plan_for(model.get_submodule(EBC), world_size, kind)
    return oper.shard(model, plan=plan, **{"optimizer": oper.SGD(lr=LR)} | fields)


def _train_unsharded(model: Any, rank: int) -> None:
    for step in range(STEPS):
        model(make_batch(100 * rank + step, 9 + 3 * rank))[0].backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= LR * p.grad
                p.grad = None


# ---- DistributedModelParallel and pipelines ------------------------------------------------------


def _dmp(rank: int, world_size: int, pipelined: bool) -> dict[str, torch.Tensor]:
    from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    plain = make_dlrm(seed=3)
    sharded = _shard(make_dlrm(seed=3), world_size, "mixed0")
    module = sharded.get_submodule(EBC)
    model = DMP(sharded, device=torch.device("cpu"), plan=ShardingPlan({}), sharders=[])
    assert model.module.get_submodule(EBC) is module, "DMP replaced the sharded module"
    assert sorted(model.state_dict()) == sorted(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.SGD(params, lr=LR))
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == [LR, LR]
    pipeline = (TrainPipelineSparseDist if pipelined else TrainPipelineBase)(
        model, optimizer, torch.device("cpu"))
    batches = iter([make_batch(100 * rank + s, 9 + 3 * rank) for s in range(STEPS)])
    begun, used = _watch(module.tables)
    steps = 0
    with contextlib.suppress(StopIteration):
        while True:
            pipeline.progress(batches)
            steps += 1
    assert steps == STEPS
    if pipelined:
        assert len(pipeline._pipelined_modules) == 1
        # Each batch but the first is begun before its predecessor's step.
        assert begun == [max(0, step - 1) for step in range(STEPS)] and used == [True] * STEPS
    else:
        assert not begun and used == [False] * STEPS
    state = whole(model.state_dict())
    return {name: state[name] for name in plain.state_dict()}


def _watch(tables: Any) -> tuple[list[int], list[bool]]:
    """Per batch: steps made when its ids were prefetched, and whether its lookup used them."""
    from oper.integration.prefetch import PrefetchQueue

    begun: list[int] = []
    used: list[bool] = []
    start, lookup = PrefetchQueue.start, tables.lookup

    def started(self: Any, batch: Any) -> Any:
        begun.append(tables.num_steps)
        return start(self, batch)

    def looked_up(batch: Any) -> torch.Tensor:
        used.append(batch.resolved is not None and batch.resolved.fits(tables.handle, batch))
        return lookup(batch)

    PrefetchQueue.start, tables.lookup = started, looked_up  # type: ignore[method-assign]
    return begun, used


def _both_pipelines(rank: int, world_size: int) -> None:
    unsharded = DDP(make_dlrm(seed=3))
    _train_unsharded(unsharded, rank)
    want = whole(unsharded.module.state_dict())
    plain, pipelined = (_dmp(rank, world_size, p) for p in (False, True))
    assert_near(plain, want, "DMP")
    assert_bitwise(pipelined, plain, "pipelined and not")


def test_distributed_model_parallel_and_its_pipelines() -> None:
    run_world(2, _both_pipelines)


def _prefetched(rank: int, world_size: int) -> None:
    """DDP with `prefetch` and a migration gives the same results as without `prefetch`."""
    batches = [make_batch(100 * rank + s, 40) for s in range(STEPS)]
    found = []
    for ahead in (False, True):
        model = _shard(make_dlrm(seed=3), world_size, "mixed0")
        collection = model.get_submodule(EBC)
        wrapped, losses = DDP(model), []
        begun, used = _watch(collection.tables)
        for step, batch in enumerate(batches):
            if ahead and step + 1 < STEPS:
                collection.prefetch(batches[step + 1].sparse_features)
                ((*_, started),) = list(collection._prefetched.queued.values())[-1:]
                started.result()  # so that the one before the switch is surely of the old plan
            loss, _ = wrapped(batch)
            loss.backward()
            with torch.no_grad():
                for p in wrapped.parameters():
                    if p.grad is None:  # of a sharded table
                        continue
                    p -= LR * p.grad
                    p.grad = None
            losses.append(loss.detach())
            if ahead and step == 2:
                plan = plan_for(make_dlrm().get_submodule(EBC), world_size, "mixed1")
                collection.tables.start_migration(plan, 100_000)
        if ahead:
            assert collection.tables.migration is None, "the move has ended"
            # Batch 0 was not prefetched; one was resolved for the plan before the switch.
            assert begun == list(range(STEPS - 1)) and used.count(False) == 2, used
        found.append((whole(model.state_dict()), losses))
    assert_bitwise(found[1], found[0], "prefetched and not")


def test_prefetch_under_ddp_and_a_changing_plan() -> None:
    run_world(2, _prefetched)


def test_prefetched_batches_without_lookups_are_dropped() -> None:
    collection = make_collection()
    sharded = oper.shard(collection, plan=plan_for(collection, 1), optimizer=oper.SGD(lr=LR))
    batches = [make_kjt(s, 5) for s in range(20)]
    for kjt in batches:
        sharded.prefetch(kjt)
    assert len(sharded._prefetched.queued) == 8
    bad = make_kjt(30, 5)
    bad.values()[:] = 10**6
    sharded.prefetch(bad)
    with torch.no_grad():
        with pytest.raises(oper.InvalidInputError, match="id=1000000"):
            sharded(bad)
        want = oper.shard(make_collection(), plan=plan_for(collection, 1),
                          optimizer=oper.SGD(lr=LR))(batches[-1]).values()
        assert_bitwise(sharded(batches[-1]).values(), want, "prefetched long ago")


# ---- state ---------------------------------------------------------------------------------------


def _states(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """The state of a trained model is loaded under another plan; meta tables get values."""
    from torch.distributed.tensor import DTensor

    model = _shard(make_dlrm(seed=3), world_size, "mixed0")
    for step in range(2):
        model(make_batch(10 * rank + step, 8))[0].backward()
    state = model.state_dict()
    for name in (n for n in state if "embedding_bags" in n):
        assert isinstance(state[name], DTensor)
        assert state[name].shape == make_dlrm().state_dict()[name].shape
    other = _shard(make_dlrm(seed=6), world_size, "replicated")
    other.load_state_dict(state)
    assert_bitwise(whole(other.state_dict()), whole(state), "DTensors")
    meta = make_dlrm(device="meta")
    torch.manual_seed(11 + rank)  # rank 0's seed rules
    meta = whole(_shard(meta, world_size, "mixed2").state_dict())
    return {k: v for k, v in meta.items() if "embedding_bags" in k}


def test_states_and_meta_tables_under_other_plans_and_world_sizes() -> None:
    """Meta tables have the values of one process with rank 0's seed."""
    first, second = run_world(2, _states)
    assert_bitwise(first, second, "tables on both ranks")
    model = make_dlrm(device="meta")
    torch.manual_seed(11)
    alone = _shard(model, 1, "striped").state_dict()
    assert_bitwise({k: alone[k] for k in first}, first, "one process")


def _refuse_early(rank: int, world_size: int) -> None:
    """Two calls of `shard` for two collections; rank 0's batches lack their features."""
    model: Any = torch.nn.ModuleList([make_collection(), make_collection(seed=1)])
    for k in range(2):
        oper.shard(model, modules=[str(k)], optimizer=oper.SGD(lr=LR))
    good = make_kjt(0, 4)
    bad = KeyedJaggedTensor(["other"], good.values(), lengths=good.lengths()[:4]) if (
        rank == 0) else good

    def looked_up(module: Any, features: Any, pipelined: bool) -> Any:
        if not pipelined:
            module.prefetch(features)
            return module(features).values().sum()
        ctx = module.create_context()
        out = module.compute(ctx, module.input_dist(ctx, features).wait().wait())
        return module.output_dist(ctx, out).wait().values().sum()

    for pipelined in (False, True):
        for wrong in range(2):
            with pytest.raises(oper.PeerLostError if rank else oper.InvalidInputError,
                               match="" if rank else "missing features"):
                sum(looked_up(m, bad if k == wrong else good, pipelined)
                    for k, m in enumerate(model)).backward()
            sum(looked_up(m, good, pipelined) for m in model).backward()
    assert [m.tables.num_steps for m in model] == [4, 4]


def test_invalid_features_release_the_other_ranks() -> None:
    run_world(2, _refuse_early, env={"OPER_DEADLINE_S": "20"})


def _subgroup(rank: int, world_size: int) -> dict[str, torch.Tensor] | None:
    import torch.distributed as dist

    group = dist.new_group([2, 1])
    if rank == 0:
        return None
    # Ranks of the group are not those of the world, and their weights differ.
    model = _shard(make_dlrm(seed=rank), 2, "mixed0", process_group=group)
    start = whole(model.state_dict())
    model(make_batch(0))[0].backward()
    end = whole(model.state_dict())
    assert any((start[n] != end[n]).any() for n in start)
    return start


def test_a_process_group_of_some_ranks() -> None:
    _, first, second = run_world(3, _subgroup)
    want = make_dlrm(seed=1).state_dict()  # new_group sorts its ranks: rank 1 is its first
    for name in (n for n in want if "embedding_bags" in n):
        assert_bitwise(first[name], want[name], name)
        assert_bitwise(second[name], want[name], name)


# ---- the plan changes during training ------------------------------------------------------------


def _trained(rank: int, world_size: int, move_to: str | None) -> dict[str, torch.Tensor]:
    model = sharded(world_size, 1)
    if move_to is not None:
        train(model, rank, world_size, range(2))
        kinds = [module.tables.page_kind for module in _sharded(model)]
        tables = [t.table for module in _sharded(model) for t in module.tables.plan.tables]
        plan = uniform_plan(tables, world_size, move_to)
        with pytest.raises(PlanError):  # the last collection's table is missing: none moves
            oper.migrate(model, uniform_plan(tables[:-1], world_size))
        assert all(module.tables.migration is None for module in _sharded(model))
        oper.migrate(model, plan, bytes_per_step=36_000)
        train(model, rank, world_size, range(2, 8))
        for module in _sharded(model):
            assert module.tables.migration is None, "the move has ended"
            entries = module.tables.plan.tables
            assert {x.placement for t in entries for x in t.tiers} == {move_to}
        assert [module.tables.page_kind for module in _sharded(model)] == kinds
        oper.migrate(model, uniform_plan(tables, world_size, "owned"))
    else:
        train(model, rank, world_size, range(8))
    train(model, rank, world_size, range(8, 10))
    return flat(state_of(model))


def _sharded(model: Model) -> list[Any]:
    return [model.bags, model.items, model.places]


@pytest.mark.parametrize("move_to", ["striped", "replicated"])
def test_training_continues_bitwise(move_to: str) -> None:
    for got, want in zip(run_world(2, _trained, move_to), run_world(2, _trained, None),
                         strict=True):
        assert_bitwise(got, want, f"moved to {move_to}")


def test_models_without_sharded_tables_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="nothing to move"):
        oper.migrate(nn.Linear(2, 2), uniform_plan([TableSpec("t", 3, 4)], 1))
