"""The three ways to run a model: sharded by OPER, unsharded, sharded by TorchRec."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from oper.errors import InvalidInputError, fail
from oper.shmem.optim import optimizers
from oper.shmem.optim.optimizers import Optimizer
from oper.stats import AccessStats
from oper.train.config import TABLE_OPTIMIZERS, OptimizerConfig, TrainConfig
from oper.train.model import ranks
from oper.train.names import model_plan, model_stats
from oper.train.reference import SparseTableOptimizer


@dataclass(slots=True)
class Engine:
    """A model that can be trained and evaluated.

    The model's ``forward(batch)`` returns a loss [] and a second value: ``(loss, logits, labels)``
    of a ``DLRMTrain``, the named parts of the loss of a recommender.

    Attributes:
        module: the module that a training step calls, wrapped for data parallelism if there are
            several ranks.
        bare: the same model for evaluation, without DistributedDataParallel.
        optimizers: the optimizers that step after the backward pass; sharded tables are updated
            within it.
        collective: whether evaluation needs all ranks.
        guard: `TrainConfig.guard`.
        num_steps: number of steps made so far.
    """

    module: nn.Module
    bare: nn.Module
    optimizers: list[Any]
    collective: bool = False
    guard: str = "off"
    num_steps: int = 0

    def step(self, batch: Any) -> tuple[torch.Tensor, Any]:
        """One training step; returns the result of the model's forward. Collective."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss, rest = self.module(batch)
        loss.backward()
        self.num_steps += 1
        if self.guard == "off" or self._is_finite():
            for optimizer in self.optimizers:
                optimizer.step()
        return loss.detach(), rest

    def _is_finite(self) -> bool:
        """Whether the dense gradients are finite, which are the same on all ranks; raises
        InvalidInputError otherwise where the run is to stop, and warns where it is to continue."""
        grads = {name: p.grad for name, p in self.bare.named_parameters() if p.grad is not None}
        norms: Any = torch._foreach_norm(list(grads.values())) if grads else []
        # A norm may be infinite where no number is.
        bad = next((name for (name, grad), norm in zip(grads.items(), norms, strict=True)
                    if not bool(norm.isfinite()) and not bool(grad.isfinite().all())), "")
        if not bad:
            return True
        text = fail(f"the gradient of {bad!r} in step {self.num_steps} is not finite", "gradient",
                    "inf or nan", "finite numbers", "lower the learning rate, or look at the data")
        if self.guard == "stop":
            raise InvalidInputError(text)
        warnings.warn(f"{text}; the dense part leaves the step out", stacklevel=2)
        return False

    @torch.no_grad()
    def logits(self, batch: Any) -> torch.Tensor:
        """Logits float32 [B] of a ``DLRMTrain`` without an update."""
        logits: torch.Tensor = self.bare(batch)[1][1]
        return logits


def make_engine(model: nn.Module, config: TrainConfig,
                stats: Callable[[], AccessStats] | None = None) -> Engine:
    """The engine that `config.sharding` names, from an unsharded model. Collective.

    Args:
        model: the model, with its tables in collections.
        config: the run's configuration.
        stats: function that returns access statistics, called if the configuration names none (only
            for ``"oper"``).
    """
    if config.sharding == "oper":
        given = {} if config.stats or config.plan or stats is None else {"stats": stats()}
        return with_oper(model, config, **given)
    if config.sharding == "torchrec":
        return with_torchrec(model, config)
    return unsharded(model, config.optimizer)


def unsharded(model: nn.Module, config: OptimizerConfig) -> Engine:
    """One process, plain PyTorch."""
    if ranks()[1] > 1:
        raise InvalidInputError("cannot train unsharded", "world size", ranks()[1],
                                "1 with sharding='none'", "start one process")
    tables = SparseTableOptimizer(model, config.tables, config.tables_lr, config.tables_eps)
    return Engine(model, model, [tables, dense_optimizer(config, model)])


def with_oper(model: nn.Module, config: TrainConfig, **shard_arguments: Any) -> Engine:
    """Tables sharded by `oper.shard`, dense part under DistributedDataParallel. Collective.

    Args:
        model: unsharded.
        config: optimizers, batch size and, unless given otherwise, statistics, plan and topology.
        shard_arguments: arguments for `oper.shard` that replace the configuration's.
    """
    import oper

    o = config.optimizer
    arguments: dict[str, Any] = {
        "stats": model_stats(config.stats) if config.stats else None,
        "plan": model_plan(config.plan) if config.plan else None,
        "topology": config.topology or None, "batch_size": config.batch_size,
        "dynamic": config.dynamic.rule(config.seed) if config.dynamic.rows else None,
    } | shard_arguments
    sharded = oper.shard(model, optimizer=table_optimizer(o), gradient_guard=config.guard,
                         **arguments)
    module = sharded
    if ranks()[1] > 1:
        from torch.nn.parallel import DistributedDataParallel

        from oper.integration.dense.gradients import average_in_shared_memory

        # The settings of TorchRec's own wrapper, except for buffers: a DLRM has none to broadcast.
        module = DistributedDataParallel(sharded, gradient_as_bucket_view=True, static_graph=True)
        average_in_shared_memory(module)
    return Engine(module, sharded, [dense_optimizer(o, sharded)], guard=config.guard)


def table_optimizer(config: OptimizerConfig) -> Optimizer:
    """The optimizer of sharded tables."""
    name, options = TABLE_OPTIMIZERS[config.tables]
    make: Callable[..., Optimizer] = getattr(optimizers, name)
    return make(lr=config.tables_lr, **{n: getattr(config, f"tables_{n}") for n in options})


def with_torchrec(model: nn.Module, config: TrainConfig, sharding_types: Sequence[str] = ()
                  ) -> Engine:
    """Tables sharded by TorchRec's planner under ``DistributedModelParallel``. Collective.

    Args:
        model: unsharded.
        config: optimizers and batch size.
        sharding_types: sharding types that TorchRec's planner may choose; all by default.
    """
    from torchrec.distributed.model_parallel import get_unwrapped_module
    from torchrec.distributed.planner import ParameterConstraints
    from torchrec.optim import RowWiseAdagrad

    o = config.optimizer
    rule: Any = torch.optim.SGD if o.tables == "sgd" else RowWiseAdagrad
    arguments = {"lr": o.tables_lr} | ({} if o.tables == "sgd" else {"eps": o.tables_eps})
    initial = None if config.tables_on == "meta" else model.state_dict()
    sharded, _ = shard_by_torchrec(
        model, rule, arguments, config.batch_size,
        (lambda table: ParameterConstraints(sharding_types=list(sharding_types)))
        if sharding_types else None)
    if initial is not None:  # TorchRec draws new tables; all kinds of sharding start alike here
        sharded.load_state_dict(initial)
    left = unfused_tables(sharded)
    optimizers: list[Any] = [rule(left, **arguments)] if left else []
    return Engine(sharded, get_unwrapped_module(sharded),
                  [*optimizers, dense_optimizer(o, sharded)], collective=True)


def shard_by_torchrec(model: nn.Module, rule: Any, arguments: dict[str, float], batch_size: int,
                      constrain: Callable[[Any], Any] | None = None,
                      machine: Mapping[str, Any] | None = None) -> tuple[nn.Module, Any]:
    """TorchRec's ``DistributedModelParallel`` on CPU, and its ``ShardingPlan``. Collective.

    Args:
        model: a model with its tables in TorchRec's collections; TorchRec initialises their rows.
        rule, arguments: optimizer of the tables and its arguments; it runs in the backward pass if
            TorchRec fuses it.
        batch_size: samples per rank, for its planner.
        constrain: ``ParameterConstraints`` of a table's configuration; none by default.
        machine: machine description for its planner (fields of its ``Topology``, bandwidths in
            bytes per millisecond); by default all ranks share a host.
    """
    import torch.distributed as dist
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import PlannerError
    from torchrec.distributed.types import ShardingEnv
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

    group, constraints = need_group(), dict[str, Any]()
    for module in model.modules():
        if not isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            continue
        # A copy: sharding takes entries out of the mapping that it is given.
        _apply_optimizer_in_backward(rule, module.parameters(), dict(arguments))
        configs: Any = (module.embedding_bag_configs() if isinstance(module, EmbeddingBagCollection)
                        else module.embedding_configs())
        if constrain is not None:
            constraints |= {config.name: constrain(config) for config in configs}
    sharders: Any = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    size = group.size()
    planner = EmbeddingShardingPlanner(
        topology=Topology(**{"world_size": size, "compute_device": "cpu", "local_world_size": size,
                             **(machine or {})}),
        batch_size=batch_size, debug=False, constraints=constraints or None)
    # Its own `collective_plan` raises on rank 0 alone where nothing fits; the others would wait.
    made: list[Any] = [None]
    if group.rank() == 0:
        try:
            made = [planner.plan(model, sharders)]
        except PlannerError as error:
            made = [error]
    dist.broadcast_object_list(made, 0, group=group)
    if isinstance(made[0], PlannerError):
        raise made[0]
    sharded = DistributedModelParallel(
        model, env=ShardingEnv.from_process_group(group), device=torch.device("cpu"),
        sharders=sharders, plan=made[0])
    return sharded, made[0]


def unfused_tables(sharded: nn.Module) -> list[nn.Parameter]:
    """Tables that TorchRec does not update in the backward pass, that is, data-parallel ones."""
    return [p for n, p in sharded.named_parameters()
            if is_table(n) and not hasattr(p, "_in_backward_optimizers")]


def need_group() -> Any:
    """The default process group, created for a single process if there is none."""
    import torch.distributed as dist

    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    group = dist.group.WORLD
    assert group is not None
    return group


def is_table(name: str) -> bool:
    """Whether a parameter of this name is a table."""
    return any(kind in f".{name}" for kind in (".embedding_bags.", ".embeddings."))


def dense_optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all parameters that are not tables."""
    kinds: dict[str, Any] = {
        "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
    dense: Iterable[nn.Parameter] = [p for n, p in model.named_parameters() if not is_table(n)]
    optimizer: torch.optim.Optimizer = kinds[config.dense](dense, lr=config.dense_lr)
    return optimizer
