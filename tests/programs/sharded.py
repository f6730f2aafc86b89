"""The sharded side of a program."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.optim.keyed import CombinedOptimizer

import oper
from oper.integration.targets import describe, find_targets, name_tables
from tests.programs import optimizers
from tests.programs.models import LISTS, NAMES, Batch, Spec, Table, build, whole
from tests.programs.sides import Side, Talk, run_schedule
from tests.random_plans import rich_plan
from tests.support import pulled


class Sharded(Side):
    """The same model, sharded by OPER.

    Args:
        plan: seed of the random plan.
        wrapper: "", "ddp before", "ddp after" or "dmp".
    """

    is_sharded = True

    def __init__(self, spec: Spec, optimizer: dict[str, Any], talk: Talk, plan: int = 0,
                 wrapper: str = "") -> None:
        super().__init__(spec, optimizer, talk)
        self.wrapper = wrapper
        self.plan = plan
        self.base_lr = float(optimizers.make(optimizer).lr)
        self.core = self.build(plan)
        self.net = self.core
        if wrapper == "ddp before":  # which `build` has made
            self.core = self.net.module
        elif wrapper:
            self.wrap(wrapper)

    def build(self, plan: int) -> Any:
        """Build and shard a new model."""
        model: Any = build(self.spec)
        chosen = None
        if self.optimizer["by"] == "tag":
            optimizers.tag(self.optimizer, model, {t.key for t in self.tables})
        else:
            chosen = optimizers.make(self.optimizer)
        if self.wrapper == "ddp before":
            model = DistributedDataParallel(model)
        targets = find_targets(model, None)
        for target in targets:
            describe(target, "training", chosen)
        name_tables(targets, model)
        made = rich_plan([s for t in targets for s in t.specs], self.world_size, plan, True)
        return oper.shard(model, plan=_for_sequences(made), optimizer=chosen)

    def wrap(self, wrapper: str) -> None:
        """Put the sharded model into a data-parallel wrapper."""
        if wrapper == "dmp":
            from torchrec.distributed import DistributedModelParallel

            self.net = DistributedModelParallel(self.core, device=torch.device("cpu"))
        else:
            self.net = DistributedDataParallel(self.core)
        self.wrapper = wrapper

    def new_plan(self, seed: int) -> oper.Plan:
        """Make another plan for the model's tables."""
        specs = [s for m in self.sharded_modules() for s in m.tables.specs.values()]
        return _for_sequences(rich_plan(specs, self.world_size, seed, True))

    def sharded_modules(self) -> list[Any]:
        """List the modules that hold tables."""
        return [m for m in self.core.modules() if hasattr(m, "tables")
                and type(m).__module__.startswith("oper.integration")]

    def computed_ranks(self) -> list[int]:
        return [self.rank]

    def call(self, batch: Batch) -> Any:
        return self.net(*batch.arguments)

    def average_dense(self) -> None:
        if self.world_size == 1 or self.wrapper:
            return
        for p in self.dense():
            if p.grad is not None:
                torch.distributed.all_reduce(p.grad)
                p.grad /= self.world_size

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(oper.no_sync(self.core))
            if self.wrapper.startswith("ddp"):
                stack.enter_context(self.net.no_sync())
            yield

    def optimizers(self) -> list[Any]:
        """List the objects on which learning rates are set: optimizers of collections, and other
        modules themselves."""
        found = []
        for table in self.tables:
            module = self.module(table)
            owner = module.fused_optimizer if "tables" in self._emb(table) else module
            if owner not in found:
                found.append(owner)
        return found

    def _emb(self, table: Table) -> Spec:
        return self.spec["embs"][NAMES.index(table.path) if table.path in NAMES else 0]

    def drop_gradients(self) -> None:
        for owner in self.optimizers():
            if hasattr(owner, "zero_grad") and not isinstance(owner, nn.Module):
                owner.zero_grad()
            else:
                owner.tables.drop_gradients()

    def set_lr(self, lr: float) -> None:
        for owner in [self.clock, *self.optimizers()]:
            for group in owner.param_groups:
                group["lr"] = lr

    def schedule(self, factor: float, steps: int) -> None:
        run_schedule(self.clock, factor, steps)
        for owner in self.optimizers():
            if not isinstance(owner, nn.Module):
                run_schedule(owner, factor, steps)
                continue
            for group in owner.param_groups:
                group["lr"] = self.clock.param_groups[0]["lr"]

    def keep_optimizer(self) -> Any:
        kept = []
        for owner in self.optimizers():
            state = (owner.optimizer_state_dict() if isinstance(owner, nn.Module)
                     else owner.state_dict())
            kept.append({"state": {table: {name: whole(x) for name, x in entries.items()}
                                   for table, entries in state["state"].items()}}
                        | {k: v for k, v in state.items() if k != "state"})
        return kept

    def load_optimizer(self, kept: Any) -> None:
        for owner, state in zip(self.optimizers(), kept, strict=True):
            if isinstance(owner, nn.Module):
                owner.load_optimizer_state_dict(state)
            else:
                owner.load_state_dict(state)

    def restart(self, args: dict[str, Any]) -> None:
        state = {n: whole(x) for n, x in self.core.state_dict().items()}
        kept = self.keep_optimizer()
        path = f"{self.talk.folder}/fresh {args['by']}"
        if args["by"] == "checkpoint":
            oper.save_checkpoint(path, self.core, self._combined() if args["optimizer"] else None)
        elif args["by"] == "torch.save" and self.rank == 0:
            torch.save(state, path)
        self.talk.exchange(0)  # all have read
        self.close()
        self.core = self.net = self.build(args["plan"])
        if args["by"] == "checkpoint":
            oper.load_checkpoint(path, self.core, self._combined() if args["optimizer"] else None)
            if args["optimizer"]:
                self.set_lr(self.base_lr)
                return
            # which holds the states of modules of one table in any case
            for owner in self.optimizers():
                _forget(owner)
        else:
            self.core.load_state_dict(torch.load(path) if args["by"] == "torch.save" else state)
            if args["optimizer"]:
                self.load_optimizer(kept)
        self.set_lr(self.base_lr)

    def checkpoint(self, between: Callable[[], Any]) -> None:
        path = f"{self.talk.folder}/checkpoint"
        oper.save_checkpoint(path, self.core, self._combined())
        between()
        oper.load_checkpoint(path, self.core, self._combined())

    def _combined(self) -> Any:
        """Return the optimizers of all collections as one."""
        found = {f"of {k}": x for k, x in enumerate(self.optimizers())
                 if not isinstance(x, nn.Module)}
        return CombinedOptimizer(list(found.items())) if found else None

    def rows(self) -> dict[str, torch.Tensor]:
        with oper.rows_on_demand():
            state = self.core.state_dict()
        found = {}
        for table in self.tables:
            value = state[table.key]
            found[table.key] = value.read(0, table.rows) if hasattr(value, "read") else (
                value.detach().clone())
        return found

    def states(self) -> dict[str, torch.Tensor]:
        found = {}
        with oper.rows_on_demand():
            for table in self.tables:
                module = self.module(table)
                if "tables" in self._emb(table):
                    state = module.fused_optimizer.state_dict()["state"]
                    entries = state[f"{LISTS[table.kind]}.{table.own}.weight"]
                else:
                    entries = module.optimizer_state_dict()["state"]["weight"]
                for name, value in entries.items():
                    part = name.removeprefix(f"{table.own}.")
                    part = {"exp_avg_sq": "momentum2"}.get(part, part)
                    if part != "step":
                        value = value.read(0, table.rows) if hasattr(value, "read") else value
                    found[f"{table.key} {part}"] = value
        return found

    def close(self) -> None:
        """Release the tables."""
        for module in self.sharded_modules():
            module.tables.close()


def _forget(owner: Any) -> None:
    """Reset an optimizer state to that of untrained tables."""
    if isinstance(owner, nn.Module):
        state = owner.optimizer_state_dict()
        entries = state["state"]["weight"]
        entries.update({n: torch.zeros_like(whole(x)) for n, x in entries.items()})
        owner.load_optimizer_state_dict(state)


def _for_sequences(plan: oper.Plan) -> oper.Plan:
    """Change the tiers of unpooled tables to pull, since push pools."""
    return replace(plan, tables=tuple(
        pull if t.table.pooling == "none" else t
        for t, pull in zip(plan.tables, pulled(plan).tables, strict=True)))
