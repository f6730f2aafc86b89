"""The two sides of a program: the unsharded model that defines what is right, and the sharded one.

Actions are written once, against what both sides have in common, as a user's program would be. The
unsharded side computes the batches of all ranks in one process and takes the mean of their losses;
its tables are updated while gradients are accumulated, on the rows that were looked up, by the
formulas of `tests.optimizer_support`. ``sparse=True``, which changes nothing else, says which rows
those are; in 16 bits they are those whose gradient is not 0.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.optimizer_formulas import first_states, update_rows
from tests.programs import optimizers
from tests.programs.models import (
    Batch,
    Spec,
    Table,
    build,
    call_unsharded,
    tables_of,
    tensors_of,
)

DENSE_LR = 0.05


class Talk:
    """Communication between the ranks of a program.

    Args:
        rank, world_size: of this process.
        folder: that all ranks share, for files.
    """

    def __init__(self, rank: int, world_size: int, folder: str) -> None:
        self.rank, self.world_size, self.folder = rank, world_size, folder

    def exchange(self, code: int) -> list[int]:
        """Every rank's number, by rank."""
        if self.world_size == 1:
            return [code]
        mine = torch.tensor([code])
        found = [torch.zeros_like(mine) for _ in range(self.world_size)]
        torch.distributed.all_gather(found, mine)
        return [int(x) for x in found]


class Side:
    """A model under a program: what both sides have in common.

    `Unsharded` and `Sharded` add `computed_ranks`, `call`, what changes the tables' optimizers,
    saves and loads, and what the oracle compares.

    Args:
        spec: the model's, as `models.draw_model` draws it.
        optimizer: of the tables, as `optimizers.draw_optimizer` draws it.
        talk: to the other ranks.

    Attributes:
        core: the model.
        net: the model, or a wrapper around it.
        wrapper: which, on the sharded side; "" for none.
        tables: its tables.
    """

    is_sharded = False

    def __init__(self, spec: Spec, optimizer: dict[str, Any], talk: Talk) -> None:
        self.spec, self.optimizer, self.talk = spec, optimizer, talk
        self.rank, self.world_size = talk.rank, talk.world_size
        self.tables: list[Table] = tables_of(spec)
        self.core: Any = None
        self.net: Any = None
        self.wrapper = ""
        # Learning rates of tables that no torch optimizer stands for.
        lr = float(optimizers.make(optimizer).lr)
        self.clock = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)

    # ---- what a user's program reaches -----------------------------------------------------------

    def table(self, number: int) -> Table:
        """The table with that number, modulo the number of tables."""
        return self.tables[number % len(self.tables)]

    def module(self, table: Table) -> Any:
        """The module that holds a table."""
        return self.core.get_submodule(table.path)

    def weight(self, table: Table, how: str = "attribute") -> torch.Tensor:
        """A table's weight, as users reach it."""
        if how == "named":
            return dict(self.core.named_parameters())[table.key]
        if how == "get":
            return self.core.get_parameter(table.key)
        module = self.module(table)
        if table.kind == "ebc":
            return module.embedding_bags[table.own].weight
        return module.embeddings[table.own].weight if table.kind == "ec" else module.weight

    def dense(self) -> list[nn.Parameter]:
        """Parameters of the dense layer."""
        layer = getattr(self.core, "dense", None)
        return [] if layer is None else list(layer.parameters())

    def batches(self, args: dict[str, Any], offset: int = 0) -> list[Batch]:
        """The batches of a step that this process computes, its own at `mine`."""
        return [Batch(self.spec, args["seed"] + 7919 * offset + 101 * rank, args["shapes"][rank])
                for rank in self.computed_ranks()]

    @property
    def mine(self) -> int:
        """Place of this rank's batch among those of a step."""
        return self.computed_ranks().index(self.rank)

    def outputs(self, batch: Batch) -> list[torch.Tensor]:
        """The tensors of the model's output."""
        return tensors_of(self.call(batch))

    def loss(self, outs: list[list[torch.Tensor]], batches: list[Batch],
             square: float = 0.0) -> torch.Tensor:
        """Mean over the computed ranks of a loss of their outputs."""
        total = torch.zeros(())
        for out, batch in zip(outs, batches, strict=True):
            for k, x in enumerate(out):
                x = x.float()
                total = total + (x * batch.coefficients(k, x)).sum() + square * (x * x).sum()
        return total / len(batches)

    def step_dense(self) -> None:
        """One step of the dense layer's optimizer."""
        if self.dense():
            self.average_dense()
            optimizer = torch.optim.SGD(self.dense(), lr=DENSE_LR)
            optimizer.step()
            optimizer.zero_grad()

    def average_dense(self) -> None:
        """Gradients of the dense layer, averaged over ranks if nothing else does it."""

    # ---- what the oracle compares ----------------------------------------------------------------

    def dense_state(self) -> dict[str, torch.Tensor]:
        """The dense layer's numbers."""
        return {f"dense.{k}": p.detach().clone() for k, p in enumerate(self.dense())}


# ---- unsharded -----------------------------------------------------------------------------------


class Unsharded(Side):
    """What defines the right numbers."""

    def __init__(self, spec: Spec, optimizer: dict[str, Any], talk: Talk) -> None:
        super().__init__(spec, optimizer, talk)
        self.core = self.net = build(spec)
        self.rule = optimizers.make(optimizer)
        self.holds = False
        self.hooked: dict[str, torch.Tensor] = {}
        self.steps = dict.fromkeys((t.key for t in self.tables), 0)
        parameters = dict(self.core.named_parameters())
        self.state = {t.key: first_states(self.rule, parameters[t.key].float())
                      for t in self.tables}
        self.prepare()

    def prepare(self) -> None:
        """Update all tables in the backward pass, whatever parameters they have by now."""
        for module in self.core.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                module.sparse = module.weight.dtype == torch.float32  # torch cannot add others
        parameters = dict(self.core.named_parameters())
        for table in self.tables:
            parameter = parameters.get(table.key)
            if parameter is not None and self.hooked.get(table.key) is not parameter:
                self.hooked[table.key] = parameter
                trains = parameter.requires_grad
                parameter.requires_grad_()  # without it torch takes no hook
                parameter.register_post_accumulate_grad_hook(self._updater(table.key))
                parameter.requires_grad_(trains)

    def _updater(self, key: str) -> Callable[[torch.Tensor], None]:
        def update(parameter: torch.Tensor) -> None:
            if not self.holds:
                grad, parameter.grad = parameter.grad, None
                if grad is not None:  # frozen since the forward pass
                    self._update(key, parameter, grad)

        return update

    @torch.no_grad()
    def _update(self, key: str, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        self.steps[key] += 1
        if grad.is_sparse:
            grad = grad.coalesce()
            rows, values = grad.indices()[0], grad.values().float()
        else:
            rows = torch.arange(parameter.shape[0])
            if parameter.dtype != torch.float32:
                rows = grad.ne(0).any(1).nonzero()[:, 0]
            values = grad[rows].float()
        some = parameter.detach()[rows].float()
        state = {part: x[rows] for part, x in self.state[key].items()}
        update_rows(self.rule, some, state, values, self.clock.param_groups[0]["lr"],
                    self.steps[key])
        parameter.data[rows] = some.to(parameter.dtype)
        for part, x in state.items():
            self.state[key][part][rows] = x

    def clone(self) -> Unsharded:
        """An independent copy, for actions that may come to nothing."""
        other: Unsharded = copy.copy(self)
        other.core = copy.deepcopy(self.core)
        other.net, other.hooked = other.core, {}
        other.state, other.steps = copy.deepcopy(self.state), dict(self.steps)
        other.clock = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        other.clock.param_groups[0].update(
            {k: v for k, v in self.clock.param_groups[0].items() if k != "params"})
        other.prepare()
        return other

    def computed_ranks(self) -> list[int]:
        """Ranks whose batches this process computes."""
        return list(range(self.world_size))

    def call(self, batch: Batch) -> Any:
        """The model's output."""
        return call_unsharded(self.net, self.spec, batch)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradient accumulation."""
        before, self.holds = self.holds, True
        try:
            yield
        finally:
            self.holds = before

    def drop_gradients(self) -> None:
        """Drop the tables' gradients of passes under `no_sync`."""
        for table in self.tables:
            self.core.get_parameter(table.key).grad = None

    def set_lr(self, lr: float) -> None:
        self.clock.param_groups[0]["lr"] = lr

    def schedule(self, factor: float, steps: int) -> None:
        run_schedule(self.clock, factor, steps)

    def keep_optimizer(self) -> Any:
        """The state of the tables' optimizers, copied."""
        return copy.deepcopy(self.state), dict(self.steps)

    def load_optimizer(self, kept: Any) -> None:
        self.state, self.steps = copy.deepcopy(kept[0]), dict(kept[1])

    def restart(self, args: dict[str, Any]) -> None:
        """Continue with a new model that has loaded the state of this one."""
        self.core.requires_grad_(True)
        # The fresh model has the dtypes that this one had before it was converted.
        for p, fresh in zip(self.core.parameters(), build(self.spec).parameters(), strict=True):
            p.grad, p.data = None, p.data.to(fresh.dtype)
        self.set_lr(float(self.rule.lr))
        if not args["optimizer"]:
            self.steps = dict.fromkeys(self.steps, 0)
            for state in self.state.values():
                for x in state.values():
                    x.zero_()

    def checkpoint(self, between: Callable[[], Any]) -> None:
        """Save everything to a file, do something, and load it."""
        kept, rows = self.keep_optimizer(), self.rows()
        dense = self.dense_state()
        between()
        self.load_optimizer(kept)
        self.adopt(rows, self.states(), dense)

    def rows(self) -> dict[str, torch.Tensor]:
        """All rows, by state_dict key, copied."""
        parameters = dict(self.core.named_parameters())
        return {t.key: parameters[t.key].detach().clone() for t in self.tables}

    def states(self) -> dict[str, torch.Tensor]:
        """All optimizer states, by state_dict key and part, copied."""
        found = {f"{key} {part}": x.clone() for key, state in self.state.items()
                 for part, x in state.items()}
        if "adam" in self.rule.name:
            found |= {f"{key} step": torch.tensor(float(n)) for key, n in self.steps.items()}
        return found

    @torch.no_grad()
    def adopt(self, rows: dict[str, torch.Tensor], states: dict[str, torch.Tensor],
              dense: dict[str, torch.Tensor]) -> None:
        """Continue from numbers that agree within rounding, so that errors do not add up."""
        parameters = dict(self.core.named_parameters())
        for key, value in rows.items():
            parameters[key].data.copy_(value)
        for key, state in self.state.items():
            for part in state:
                state[part].copy_(states[f"{key} {part}"])
        for k, p in enumerate(self.dense()):
            p.data.copy_(dense[f"dense.{k}"])


def run_schedule(optimizer: Any, factor: float, steps: int) -> None:
    """Some steps of a LambdaLR."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: factor**n)
    for _ in range(steps):
        schedule.step()
