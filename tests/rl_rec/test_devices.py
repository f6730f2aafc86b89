"""Models create tensors on the device of their inputs."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from oper.rl_rec.data.batches import Share
from oper.rl_rec.registry import RECOMMENDERS
from tests.rl_rec.rec_support import SMALL, invented

# ---- tensors are created on the device of the inputs ---------------------------------------------

FACTORIES = {torch.arange, torch.zeros, torch.ones, torch.full, torch.eye, torch.rand, torch.randn,
             torch.randint, torch.tensor, torch.empty, torch.linspace}
SEQUENCES = {key: SMALL[key] for key in ("dim", "layers", "steps", "window", "negatives")}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "gru4rec": [SEQUENCES], "sasrec": [SEQUENCES, SEQUENCES | {"loss": "gbce", "negatives": 9}],
    "sqn": [SEQUENCES], "sa2c": [SEQUENCES], "dqn": [SEQUENCES | {"negatives": 9}],
    "hstu": [SEQUENCES, SEQUENCES | {"rank_weight": 0.5}],
    "dt": [SMALL], "cdt4rec": [SMALL, SMALL | {"tied": False, "negatives": 9,
                                               "returns": "estimated"}],
    "multvae": [{"sampled": 0}, {"sampled": 9}], "macridvae": [{"sampled": 0}, {"sampled": 9}],
    "cadvae": [{"sampled": 9}, {"graph": "free", "sampled": 0}, {"concepts": "learned"},
               {"layer": "nonlinear"}]}


class Watch(TorchFunctionMode):
    """Records the package's calls of tensor factories without a device."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        caller = sys._getframe(1)
        if (func in FACTORIES and kwargs.get("device") is None
                and "/rl_rec/models/" in caller.f_code.co_filename):
            self.found.append(f"{caller.f_code.co_filename}:{caller.f_lineno}")
        return func(*args, **kwargs)


@pytest.mark.parametrize(("name", "changes"), [
    (name, changes) for name in RECOMMENDERS if name != "popularity"
    for changes in SETTINGS.get(name, [{}])])
def test_no_tensor_without_a_device(name: str, changes: dict[str, Any]) -> None:
    data = invented()
    workload = RECOMMENDERS[name]
    config = workload.config(**changes)
    model = workload.build(config, data, "cpu")
    batch = next(iter(workload.batches(config, data).epoch(0, Share(8))))
    with Watch() as watch:
        if workload.trains:
            model.schedule(1, 2)
            model(batch)[0].backward()
            if name != "recvae":
                model.lookups(batch)
        model.eval()
        model.scores(model.encode(batch), torch.arange(1, 5))
        if getattr(config, "rank_weight", 0):
            candidates = torch.arange(1, 5).expand(batch.num_users, -1)
            model.rewards(model.cache(batch), candidates)
    assert watch.found == []


def test_a_tensor_without_a_device_is_noticed() -> None:
    source = "import torch\ndef f():\n    return torch.arange(3)\n"
    space: dict[str, Any] = {}
    exec(compile(source, "/x/rl_rec/models/new.py", "exec"), space)
    with Watch() as watch:
        space["f"]()
        torch.zeros(2)
    assert watch.found == ["/x/rl_rec/models/new.py:3"]
