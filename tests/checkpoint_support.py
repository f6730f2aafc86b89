"""A model with tables of all kinds, for tests of checkpoints; needs torchrec."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torchrec.modules import embedding_configs as configs
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.optim.optimizers import LAMB, PartialRowWiseAdam
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import oper
from oper.integration.splitting import split_batch
from oper.integration.torch_modules import module_spec
from oper.integration.torchrec_modules import table_specs
from tests.random_plans import mixed_plan, rich_plan
from tests.runtime_support import assert_bitwise
from tests.world_support import run_world

CHUNK = 512  # bytes: every table of more than 16 rows is several chunks
BATCH = 8  # samples of all ranks together
ROWS = {"a": 37, "b": 1, "c": 500, "s": 60}
# One optimizer of each kind; test_fused_optimizer.py tests all optimizers of TorchRec.
OPTIMIZERS = {"ta": oper.RowWiseAdagrad(lr=0.1), "tb": oper.LAMB(lr=0.01, eps=1e-3),
              "tc": oper.PartialRowWiseAdam(lr=0.01, eps=1e-3),
              "ts": oper.SGD(lr=0.1, momentum=0.5)}
_THEIRS = {"ta": RowWiseAdagrad, "tb": LAMB, "tc": PartialRowWiseAdam, "ts": torch.optim.SGD}


class Model(nn.Module):
    """Embedding bags, sequences, a bare embedding and a dense layer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.bags = EmbeddingBagCollection([configs.EmbeddingBagConfig(
            name=f"t{f}", num_embeddings=ROWS[f], embedding_dim=8, feature_names=[f])
            for f in "abc"])
        self.items = EmbeddingCollection([configs.EmbeddingConfig(
            name="ts", num_embeddings=ROWS["s"], embedding_dim=8, feature_names=["s"])])
        self.places = nn.Embedding(5, 8)
        self.dense = nn.Linear(24, 1)

    def forward(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
        size = kjt.stride()
        score = self.dense(self.bags(kjt).values()).tanh().sum()
        rows = self.items(kjt)["s"].values()
        return (score + rows.square().sum() + self.places(kjt.values() % 5).sin().sum()) / size


def random_kjt(rows: Mapping[str, int], size: int, seed: int) -> KeyedJaggedTensor:
    """Draw bags of up to three ids; `rows` has the rows of each key's table."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(rows), size), generator=g)
    ids = [torch.randint(0, n, (int(k.sum()),), generator=g)
           for n, k in zip(rows.values(), lengths, strict=True)]
    return KeyedJaggedTensor(list(rows), torch.cat(ids), lengths=lengths.reshape(-1))


def batch_of(step: int, rank: int, world_size: int) -> KeyedJaggedTensor:
    """Return this rank's share of a step's samples, which do not depend on the number of ranks."""
    return split_batch(random_kjt(ROWS, BATCH, step), world_size)[0][rank]


def sharded(world_size: int, plan_seed: int, seed: int = 0, **options: Any) -> Model:
    """Shard the model by a random plan for `world_size` ranks.

    Plans with a `plan_seed` of 100 or more push and split tables by columns. `options`: arguments
    of `oper.shard`.
    """
    model = Model(seed)
    kinds = {n: o.name for n, o in OPTIMIZERS.items()}
    specs = [*table_specs(model.bags, kinds), *table_specs(model.items, kinds),
             module_spec("places", model.places, "adagrad")]
    for name, parameter in model.named_parameters():
        table = name.split(".")[-2]
        if table in OPTIMIZERS:
            tag(parameter, table)
    plan = (mixed_plan(specs, world_size, plan_seed) if plan_seed < 100 else
            rich_plan(specs, world_size, plan_seed, columns=True))
    return oper.shard(model, plan=plan, optimizer=oper.Adagrad(lr=0.1, eps=1e-2), **options)


def tag(parameter: torch.Tensor, table: str) -> None:
    """Set the attributes that ``apply_optimizer_in_backward`` sets."""
    optimizer = OPTIMIZERS[table]
    parameter._optimizer_classes = [_THEIRS[table]]
    parameter._optimizer_kwargs = [{k: getattr(optimizer, k)
                                    for k in ("lr", "eps", "betas", "momentum")
                                    if hasattr(optimizer, k)}]


def fused(model: Model) -> CombinedOptimizer:
    return CombinedOptimizer([("bags", model.bags.fused_optimizer),
                              ("items", model.items.fused_optimizer)])


def state_of(model: Model) -> dict[str, Any]:
    """Return the state that a user saves: everything, under the names of TorchRec."""
    return {"model": model.state_dict(), "optimizer": fused(model).state_dict(),
            "places": model.places.optimizer_state_dict()}


def train(model: Model, rank: int, world_size: int, steps: range) -> None:
    for step in steps:
        model.dense.zero_grad()
        model(batch_of(step, rank, world_size)).backward()
        with torch.no_grad():
            for p in model.dense.parameters():
                if world_size > 1:
                    torch.distributed.all_reduce(p.grad)
                p -= 0.1 * p.grad / world_size


def restore(model: Model, folder: str) -> None:
    state = state_of(model)
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    fused(model).load_state_dict(state["optimizer"])
    model.places.load_optimizer_state_dict(state["places"])


def go_on(rank: int, world_size: int, plan: int, steps: range, load: str | None = None,
          save: str | None = None, chunk_bytes: int | None = CHUNK) -> dict[str, torch.Tensor]:
    """Load, train and save, in chunks or by DCP; return everything as whole tensors."""
    # A different seed, so that a value that is not loaded makes the test fail.
    model = sharded(world_size, plan, seed=0 if load is None else 99)
    if load is not None and chunk_bytes is None:
        restore(model, load)
    elif load is not None:
        extra = oper.load_checkpoint(load, model, fused(model))
        assert extra["next_step"] == steps.start
        assert_bitwise(extra["sums"], torch.arange(3.0), "a tensor of the user's")
    train(model, rank, world_size, steps)
    state = state_of(model)
    if save is not None and chunk_bytes is None:
        dcp.save(state, checkpoint_id=save)
    elif save is not None:
        oper.save_checkpoint(save, model, fused(model), chunk_bytes=chunk_bytes, extra={
            "next_step": steps.stop, "sums": torch.arange(3.0), "note": {"by": ["a", "b"]}})
    return flat(state)


def flat(state: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return whole tensors by path."""
    if isinstance(state, dict):
        return {k: v for name, value in state.items()
                for k, v in flat(value, f"{prefix}/{name}").items()}
    full = getattr(state, "full_tensor", None)
    return {prefix: (full() if full else state).detach().clone()}


def run_ranks(body: Callable[..., dict[str, torch.Tensor]], world_size: int, *args: Any,
              **options: Any) -> dict[str, torch.Tensor]:
    """Return the result of `body`, which must be the same on all ranks."""
    first, *others = run_world(world_size, body, *args, **options)
    for other in others:
        assert_bitwise(other, first, "two ranks")
    return first


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Read a checkpoint without OPER into plain tensors of the global shapes."""
    metadata = dcp.FileSystemReader(str(folder)).read_metadata()
    state = {name: torch.full(item.size, torch.nan) for name, item
             in metadata.state_dict_metadata.items() if hasattr(item, "size")}
    dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    return state
