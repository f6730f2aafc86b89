"""Models ready for training: sharded by OPER, unsharded, or sharded by TorchRec."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from oper.errors import InvalidInputError, fail
from oper.integration.checkpoint.saving import tables_of
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

    The model's ``forward(batch)`` returns a scalar loss and a second value: ``(loss, logits,
    labels)`` for a ``DLRMTrain``, the named terms of the loss for a recommender.

    Attributes:
        module: the module for training steps, wrapped for data parallelism if there are several
            ranks.
        bare: the same model for evaluation, without DistributedDataParallel.
        optimizers: optimizers whose ``step`` is called after the backward pass, which updates
            sharded tables itself.
        collective: whether evaluation is collective: all ranks must evaluate as many batches.
        guard: `TrainConfig.guard`.
        num_steps: number of training steps so far.
    """

    module: nn.Module
    bare: nn.Module
    optimizers: list[Any]
    collective: bool = False
    guard: str = "off"
    num_steps: int = 0

    def step(self, batch: Any) -> tuple[torch.Tensor, Any]:
        """Make one training step and return the detached loss and the second output of ``forward``.

        Collective. With `guard` ``"stop"``, raises InvalidInputError for a non-finite dense
        gradient.
        """
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
        """Whether the dense gradients, which are the same on all ranks, are finite. If not, raise
        InvalidInputError with `guard` ``"stop"``, or warn with ``"skip"``."""
        grads = {name: p.grad for name, p in self.bare.named_parameters() if p.grad is not None}
        norms: Any = torch._foreach_norm(list(grads.values())) if grads else []
        # The norm of finite numbers may overflow.
        bad = next((name for (name, grad), norm in zip(grads.items(), norms, strict=True)
                    if not bool(norm.isfinite()) and not bool(grad.isfinite().all())), "")
        if not bad:
            return True
        text = fail(f"the gradient of {bad!r} in step {self.num_steps} is not finite", "gradient",
                    "inf or nan", "finite numbers", "lower the learning rate, or check the data")
        if self.guard == "stop":
            raise InvalidInputError(text)
        warnings.warn(f"{text}; dense parameters are not updated in this step", stacklevel=2)
        return False

    @torch.no_grad()
    def logits(self, batch: Any) -> torch.Tensor:
        """Return the logits of a ``DLRMTrain``, float32 [B], without autograd."""
        logits: torch.Tensor = self.bare(batch)[1][1]
        return logits


def make_engine(model: nn.Module, config: TrainConfig,
                stats: Callable[[], AccessStats] | None = None) -> Engine:
    """Shard a model as `config.sharding` specifies. Collective.

    Args:
        model: the unsharded model, with its tables in collections.
        config: the run's configuration.
        stats: returns access statistics; called with ``sharding="oper"`` if the configuration has
            neither statistics nor a plan.

    Raises:
        InvalidInputError: the model is not to be sharded, but there are several ranks.
    """
    if config.sharding == "oper":
        given = {} if config.stats or config.plan or stats is None else {"stats": stats()}
        return with_oper(model, config, **given)
    if config.sharding == "torchrec":
        return with_torchrec(model, config)
    if ranks()[1] > 1:
        raise InvalidInputError("cannot train unsharded", "world size", ranks()[1],
                                "1 with sharding='none'", "start one process")
    return unsharded(model, config.optimizer)


def unsharded(model: nn.Module, config: OptimizerConfig) -> Engine:
    """Create the engine of an unsharded model of one rank, in plain PyTorch."""
    tables = SparseTableOptimizer(model, config.tables, config.tables_lr, config.tables_eps)
    return Engine(model, model, [tables, dense_optimizer(config, model)])


def with_oper(model: nn.Module, config: TrainConfig, **shard_arguments: Any) -> Engine:
    """Shard the tables by `oper.shard` and wrap the model in DistributedDataParallel. Collective.

    Args:
        model: the unsharded model.
        config: the run's configuration.
        shard_arguments: arguments of `oper.shard` that override the configuration's.
    """
    import oper

    o = config.optimizer
    arguments: dict[str, Any] = {
        "stats": model_stats(config.stats, config.data) if config.stats else None,
        "plan": model_plan(config.plan) if config.plan else None,
        "topology": config.topology or None, "batch_size": config.batch_size,
        "dynamic": config.dynamic.rule(config.seed) if config.dynamic.is_on else None,
    } | shard_arguments
    sharded = oper.shard(model, optimizer=table_optimizer(o), gradient_guard=config.guard,
                         **arguments)
    # Between hosts, lookups are collective.
    return Engine(data_parallel(sharded), sharded, [dense_optimizer(o, sharded)],
                  any(not tables.is_one_domain for tables in tables_of(sharded)), config.guard)


def data_parallel(model: nn.Module, **options: Any) -> nn.Module:
    """Wrap a model in DistributedDataParallel, with the settings of TorchRec's wrapper and
    `options`, if there are several ranks. Those that share memory average gradients there instead
    of sending messages."""
    if ranks()[1] == 1:
        return model
    from torch.nn.parallel import DistributedDataParallel

    from oper.integration.dense.gradients import average_in_shared_memory

    module = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True,
                                     **options)
    average_in_shared_memory(module)
    return module


def table_optimizer(config: OptimizerConfig) -> Optimizer:
    name, options = TABLE_OPTIMIZERS[config.tables]
    make: Callable[..., Optimizer] = getattr(optimizers, name)
    return make(lr=config.tables_lr, **{n: getattr(config, f"tables_{n}") for n in options})


def with_torchrec(model: nn.Module, config: TrainConfig,
                  sharding_types: Callable[[Any], list[str] | None] | None = None) -> Engine:
    """Shard a model by TorchRec's planner and ``DistributedModelParallel``. Collective.

    Args:
        model: the unsharded model.
        config: the run's configuration.
        sharding_types: returns the sharding types that TorchRec's planner may choose for a table's
            configuration, None for all; None = all for every table.
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
        None if sharding_types is None else
        lambda table: ParameterConstraints(sharding_types=sharding_types(table)))
    if initial is not None:  # TorchRec initialises tables anew; use the same weights as other runs
        sharded.load_state_dict(initial)
    left = unfused_tables(sharded)
    optimizers: list[Any] = [rule(left, **arguments)] if left else []
    return Engine(sharded, get_unwrapped_module(sharded),
                  [*optimizers, dense_optimizer(o, sharded)], collective=True)


def shard_by_torchrec(model: nn.Module, rule: Any, arguments: dict[str, float], batch_size: int,
                      constrain: Callable[[Any], Any] | None = None,
                      machine: Mapping[str, Any] | None = None) -> tuple[nn.Module, Any]:
    """Shard a model by TorchRec on CPUs. Collective.

    Args:
        model: a model with its tables in TorchRec's collections; TorchRec initialises the rows.
        rule: optimizer class of the tables; it updates them in the backward pass unless they are
            data-parallel, see `unfused_tables`.
        arguments: arguments of `rule`.
        batch_size: samples per rank, for TorchRec's planner.
        constrain: returns the ``ParameterConstraints`` of a table's configuration; None = no
            constraints.
        machine: fields of the ``Topology`` for TorchRec's planner (bandwidths in bytes per
            millisecond); None = TorchRec's defaults, with all ranks on one host.

    Returns:
        The ``DistributedModelParallel``, and its ``ShardingPlan``.

    Raises:
        PlannerError: no plan fits; raised on all ranks.
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
        # A copy, since sharding removes entries from the mapping.
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
    # If no plan fits, `collective_plan` raises only on rank 0, and the other ranks would hang.
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
    """Return the data-parallel tables, which TorchRec does not update in the backward pass."""
    return [p for n, p in sharded.named_parameters()
            if is_table(n) and not hasattr(p, "_in_backward_optimizers")]


def need_group() -> Any:
    """Return the default process group; create one for a single process if there is none."""
    import torch.distributed as dist

    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    group = dist.group.WORLD
    assert group is not None
    return group


def is_table(name: str) -> bool:
    """Whether the parameter `name` is a table of a TorchRec collection."""
    return any(kind in f".{name}" for kind in (".embedding_bags.", ".embeddings."))


def dense_optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Create the optimizer of all parameters that are not tables."""
    kinds: dict[str, Any] = {
        "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
    dense: Iterable[nn.Parameter] = [p for n, p in model.named_parameters() if not is_table(n)]
    optimizer: torch.optim.Optimizer = kinds[config.dense](dense, lr=config.dense_lr)
    return optimizer
