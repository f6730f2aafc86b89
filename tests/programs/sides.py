"""The two sides of a program: the unsharded model, which defines what is right, and the sharded
one.

Actions are written once, against the common interface of both sides, like a user's program. The
unsharded side computes the batches of all ranks in one process and takes the mean of their losses.
While gradients are accumulated, it updates the rows that were looked up by the formulas of
`tests.references`; ``sparse=True``, which changes nothing else, shows which rows these are.
With 16-bit tables they are the rows whose gradient is not 0.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.programs import optimizers
from tests.programs.models import (
    LISTS,
    Batch,
    Spec,
    Table,
    build,
    call_unsharded,
    tables_of,
    tensors_of,
)
from tests.references import first_states, update_rows

DENSE_LR = 0.05


class Talk:
    """Communication between the ranks of a program.

    Args:
        rank, world_size: this process's rank and the number of ranks.
        folder: a folder for files that all ranks share.
    """

    def __init__(self, rank: int, world_size: int, folder: str) -> None:
        self.rank, self.world_size, self.folder = rank, world_size, folder

    def exchange(self, code: int) -> list[int]:
        """Gather every rank's number, by rank."""
        if self.world_size == 1:
            return [code]
        mine = torch.tensor([code])
        found = [torch.zeros_like(mine) for _ in range(self.world_size)]
        torch.distributed.all_gather(found, mine)
        return [int(x) for x in found]


class Side:
    """A model under a program: what both sides have in common.

    `Unsharded` and `Sharded` add `computed_ranks`, `call`, methods that change the tables'
    optimizers, save and load, and what the oracle compares.

    Args:
        spec: the model, as drawn by `models.draw_model`.
        optimizer: the tables' optimizer, as drawn by `optimizers.draw_optimizer`.
        talk: connection to the other ranks.

    Attributes:
        core: the model.
        net: the model, or a wrapper around it.
        wrapper: kind of this wrapper, on the sharded side; "" for none.
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
        # Learning rates of tables without a torch optimizer.
        lr = float(optimizers.make(optimizer).lr)
        self.clock = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)

    # ---- what a user's program reaches -----------------------------------------------------------

    def table(self, number: int) -> Table:
        """Return table `number` modulo the number of tables."""
        return self.tables[number % len(self.tables)]

    def module(self, table: Table) -> Any:
        """Return the module that holds a table."""
        return self.core.get_submodule(table.path)

    def weight(self, table: Table, how: str = "attribute") -> torch.Tensor:
        """Return a table's weight, in one of the ways in which users access it."""
        if how == "named":
            return dict(self.core.named_parameters())[table.key]
        if how == "get":
            return self.core.get_parameter(table.key)
        return self.owner(table).weight

    def owner(self, table: Table) -> Any:
        """Return the module whose ``weight`` a table is."""
        module = self.module(table)
        if table.kind in ("bag", "embedding"):
            return module
        return getattr(module, LISTS[table.kind])[table.own]

    def dense(self) -> list[nn.Parameter]:
        """List the parameters of the dense layer."""
        layer = getattr(self.core, "dense", None)
        return [] if layer is None else list(layer.parameters())

    def batches(self, args: dict[str, Any], offset: int = 0) -> list[Batch]:
        """List the batches of a step that this process computes; this rank's own is at index
        `mine`."""
        return [Batch(self.spec, args["seed"] + 7919 * offset + 101 * rank, args["shapes"][rank])
                for rank in self.computed_ranks()]

    @property
    def mine(self) -> int:
        """Index of this rank's batch among those of a step."""
        return self.computed_ranks().index(self.rank)

    def outputs(self, batch: Batch) -> list[torch.Tensor]:
        """Return the tensors of the model's output."""
        return tensors_of(self.call(batch))

    def loss(self, outs: list[list[torch.Tensor]], batches: list[Batch],
             square: float = 0.0) -> torch.Tensor:
        """Return the mean over the computed ranks of a loss of their outputs."""
        total = torch.zeros(())
        for out, batch in zip(outs, batches, strict=True):
            for k, x in enumerate(out):
                x = x.float()
                total = total + (x * batch.coefficients(k, x)).sum() + square * (x * x).sum()
        return total / len(batches)

    def step_dense(self) -> None:
        """Make one step of the dense layer's optimizer."""
        if self.dense():
            self.average_dense()
            optimizer = torch.optim.SGD(self.dense(), lr=DENSE_LR)
            optimizer.step()
            optimizer.zero_grad()

    def average_dense(self) -> None:
        """Average gradients of the dense layer over ranks, unless a wrapper does it."""

    # ---- what the oracle compares ----------------------------------------------------------------

    def dense_state(self) -> dict[str, torch.Tensor]:
        """Return the dense layer's weights."""
        return {f"dense.{k}": p.detach().clone() for k, p in enumerate(self.dense())}


# ---- unsharded -----------------------------------------------------------------------------------


class Unsharded(Side):
    """The reference, which defines the right numbers."""

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
        """Register updates of all tables in the backward pass, for the parameters that they have
        now."""
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
        """Make an independent copy, for actions whose effect may be discarded."""
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
        """Return the model's output."""
        return call_unsharded(self.net, self.spec, batch)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients inside the block."""
        before, self.holds = self.holds, True
        try:
            yield
        finally:
            self.holds = before

    def drop_gradients(self) -> None:
        """Discard the tables' gradients of passes under `no_sync`."""
        for table in self.tables:
            self.core.get_parameter(table.key).grad = None

    def set_lr(self, lr: float) -> None:
        self.clock.param_groups[0]["lr"] = lr

    def schedule(self, factor: float, steps: int) -> None:
        run_schedule(self.clock, factor, steps)

    def keep_optimizer(self) -> Any:
        """Copy the state of the tables' optimizers."""
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
        """Save everything to a file, call `between`, and load the file."""
        kept, rows = self.keep_optimizer(), self.rows()
        dense = self.dense_state()
        between()
        self.load_optimizer(kept)
        self.adopt(rows, self.states(), dense)

    def rows(self) -> dict[str, torch.Tensor]:
        """Copy all rows, by state_dict key."""
        parameters = dict(self.core.named_parameters())
        return {t.key: parameters[t.key].detach().clone() for t in self.tables}

    def states(self) -> dict[str, torch.Tensor]:
        """Copy all optimizer states, by state_dict key and part."""
        found = {f"{key} {part}": x.clone() for key, state in self.state.items()
                 for part, x in state.items()}
        if "adam" in self.rule.name:
            found |= {f"{key} step": torch.tensor(float(n)) for key, n in self.steps.items()}
        return found

    @torch.no_grad()
    def adopt(self, rows: dict[str, torch.Tensor], states: dict[str, torch.Tensor],
              dense: dict[str, torch.Tensor]) -> None:
        """Continue from numbers that agree within rounding, so that rounding errors do not
        accumulate."""
        parameters = dict(self.core.named_parameters())
        for key, value in rows.items():
            parameters[key].data.copy_(value)
        for key, state in self.state.items():
            for part in state:
                state[part].copy_(states[f"{key} {part}"])
        for k, p in enumerate(self.dense()):
            p.data.copy_(dense[f"dense.{k}"])


def run_schedule(optimizer: Any, factor: float, steps: int) -> None:
    """Make some steps of a LambdaLR."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: factor**n)
    for _ in range(steps):
        schedule.step()
