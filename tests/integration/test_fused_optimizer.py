"""`fused_optimizer` as in TorchRec; freezing, and what a backward pass updates."""

import gc
import warnings
from typing import Any

import pytest
import torch
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.optim import RowWiseAdagrad as TorchRecRowWise, optimizers
from torchrec.optim.keyed import CombinedOptimizer, OptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

import oper
from oper.errors import InvalidInputError, OperError
from oper.integration.optim.tags import tagged_optimizer
from oper.integration.table_tensor import TableTensor
from oper.integration.torchrec_modules import table_specs
from oper.plan import uniform_plan
from tests.integration.module_support import KJT, LR, bag, collection, kjt, rows, shard
from tests.runtime_support import assert_bitwise, default_dtype


def step(model: Any, *ids: int) -> None:
    """Train on the same bag for both tables."""
    model(kjt(torch.tensor(ids * 2))).values().sum().backward()


class _OwnSGD(torch.optim.SGD):
    """An unknown optimizer class with the name of a known one."""


_OwnSGD.__name__ = "SGD"


def weight(model: Any, table: str) -> torch.Tensor:
    return model.state_dict()[f"embedding_bags.{table}.weight"]


@pytest.mark.parametrize("theirs, arguments, ours", [
    (torch.optim.SGD, {"lr": 0.5}, oper.SGD(lr=0.5)),
    (torch.optim.Adagrad, {"lr": 0.5, "eps": 0.25}, oper.Adagrad(lr=0.5, eps=0.25)),
    (torch.optim.Adam, {"lr": 0.5, "betas": (0.5, 0.75), "foreach": None},
     oper.Adam(lr=0.5, betas=(0.5, 0.75))),
    (optimizers.PartialRowWiseAdam, {"lr": 0.5, "weight_decay": 0.5},
     oper.PartialRowWiseAdam(lr=0.5, weight_decay=0.5)),
    (TorchRecRowWise, {"lr": 0.5, "weight_decay": 0.5},
     oper.RowWiseAdagrad(lr=0.5, eps=1e-8, weight_decay=0.5)),
    (TorchRecRowWise, {"initial_accumulator_value": 0.5, "lr_decay": 0, "maximize": False},
     oper.RowWiseAdagrad(lr=0.01, eps=1e-8, initial_accumulator_value=0.5)),
    (torch.optim.SGD, {"lr": 0.5, "momentum": 0.75, "weight_decay": 0.25, "nesterov": False},
     oper.SGD(lr=0.5, momentum=0.75, weight_decay=0.25)),
    (torch.optim.SGD, {}, oper.SGD(lr=1e-3)),  # torch's
    (optimizers.SGD, {}, oper.SGD(lr=1e-2)),  # FBGEMM's: TorchRec's class has none
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.5},
     oper.Adagrad(lr=0.01, eps=1e-8, initial_accumulator_value=0.5)),
    (torch.optim.AdamW, {}, oper.AdamW(lr=1e-3, weight_decay=0.01)),
    (torch.optim.AdamW, {"lr": 0.5, "betas": (0.5, 0.75), "eps": 0.25, "weight_decay": 0.125},
     oper.AdamW(lr=0.5, betas=(0.5, 0.75), eps=0.25, weight_decay=0.125)),
    (optimizers.Adam, {"learning_rate": 0.5, "beta1": 0.5, "beta2": 0.75},
     oper.Adam(lr=0.5, betas=(0.5, 0.75))),
    (optimizers.LAMB, {}, oper.LAMB(lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)),
    (optimizers.LAMB, {"lr": 0.5, "beta2": 0.75, "eps": 0.25, "weight_decay": 0.125},
     oper.LAMB(lr=0.5, betas=(0.9, 0.75), eps=0.25, weight_decay=0.125)),
    (optimizers.PartialRowWiseLAMB, {"lr": 0.5, "gradient_clipping": True, "max_gradient": 2.0},
     oper.PartialRowWiseLAMB(lr=0.5, max_gradient=2.0)),
    (optimizers.SGD, {"lr": 0.5, "gradient_clipping": False, "max_gradient": 2.0},
     oper.SGD(lr=0.5)),
    (optimizers.LarsSGD, {}, oper.LarsSGD(lr=0.01, momentum=0.9, weight_decay=0.0, eta=0.001)),
    (optimizers.LarsSGD, {"lr": 0.5, "momentum": 0.25, "weight_decay": 0.125, "eta": 0.75},
     oper.LarsSGD(lr=0.5, momentum=0.25, weight_decay=0.125, eta=0.75)),
])
def test_tags(theirs: type, arguments: dict[str, Any], ours: Any) -> None:
    model = collection()
    _apply_optimizer_in_backward(theirs, model.parameters(), dict(arguments))
    assert [tagged_optimizer(p) for p in model.parameters()] == [ours, ours]


def test_decay_modes_of_fbgemm_in_a_tag() -> None:
    tbe = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    want = {"NONE": oper.RowWiseAdagrad(eps=1e-8),
            "L2": oper.RowWiseAdagrad(eps=1e-8, weight_decay=0.5),
            "DECOUPLE": oper.RowWiseAdagrad(eps=1e-8, weight_decay=0.5, decoupled=True)}
    for mode, ours in want.items():
        model = collection("a")
        _apply_optimizer_in_backward(TorchRecRowWise, model.parameters(), {
            "weight_decay": 0.5, "weight_decay_mode": tbe.WeightDecayMode[mode]})
        assert tagged_optimizer(next(model.parameters())) == ours


@pytest.mark.parametrize("theirs, arguments, named", [
    (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9, "dampening": 0.5}, "SGD.dampening"),
    (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9, "nesterov": True}, "SGD.nesterov"),
    (torch.optim.SGD, {"maximize": True}, "SGD.maximize"),
    (optimizers.SGD, {"eta": 0.5}, "SGD.eta"),
    (torch.optim.Adagrad, {"lr_decay": 0.1}, "Adagrad.lr_decay"),
    (torch.optim.AdamW, {"amsgrad": True}, "AdamW.amsgrad"),
    (torch.optim.Adam, {"decoupled_weight_decay": False}, "Adam.decoupled_weight_decay"),
    (optimizers.LAMB, {"lr": 0.5, "bias_correction": False}, "LAMB.bias_correction"),
    (optimizers.PartialRowWiseLAMB, {"amsgrad": True}, "PartialRowWiseLAMB.amsgrad"),
    (optimizers.LarsSGD, {"eps": 1e-8}, "LarsSGD.eps"),
    (optimizers.LAMB, {"betas": (0.9, 0.99), "beta2": 0.9}, "LAMB: betas"),
    (optimizers.SGD, {"lr": 0.5, "learning_rate": 0.5}, "SGD: lr"),
    (TorchRecRowWise, {"decoupled": True}, "RowWiseAdagrad.decoupled"),
    (TorchRecRowWise, {"max_norm": 1.0}, "RowWiseAdagrad.max_norm"),
    (_OwnSGD, {"lr": 0.5}, r"test_fused_optimizer\.SGD"),
    (torch.optim.Adagrad, {"weight_decay": 0.1}, "Adagrad.weight_decay"),
    (torch.optim.Adam, {"amsgrad": True}, "Adam.amsgrad"),
    (torch.optim.RMSprop, {}, "RMSprop"),
])
def test_unsupported_tags_are_refused(theirs: type, arguments: dict[str, Any], named: str) -> None:
    model = collection("a")
    _apply_optimizer_in_backward(theirs, model.parameters(), arguments)
    with pytest.raises(InvalidInputError, match=named):
        oper.shard(model)


def test_torchrecs_warmup_reaches_the_tables() -> None:
    """`WarmupOptimizer` adds a parameter of its own to the state, which is saved and loaded."""
    found = []
    for resumes in (False, True):
        model = oper.shard(collection(), optimizer=oper.RowWiseAdagrad(lr=1.0))
        optimizer = WarmupOptimizer(
            model.fused_optimizer, [WarmupStage(WarmupPolicy.LINEAR, 4, 0.25)], lr=0.1)
        rates = []
        for k in range(4):
            rates.append(model.fused_optimizer.param_groups[0]["lr"])
            step(model, 3, k)
            optimizer.step()
            weights = dict(model.state_dict())
            if resumes and k == 1:
                state = optimizer.state_dict()
                step(model, 3)
                optimizer.step()
                model.load_state_dict(weights)
                optimizer.load_state_dict(state)
        assert rates == pytest.approx([0.025, 0.04375, 0.0625, 0.08125])
        found.append(weights)
    assert_bitwise(found[0], found[1], "resumed")
    with pytest.raises(InvalidInputError, match="optimizer state of a table"):
        optimizer.state[model.embedding_bags["a"].weight] = {}


def test_each_optimizer_has_its_parameter_group() -> None:
    tables = collection("abc")
    for name, parameter in tables.named_parameters():
        kind = torch.optim.Adagrad if ".b." in name else torch.optim.SGD
        _apply_optimizer_in_backward(kind, [parameter], {"lr": 0.5})
    model = oper.shard(tables, plan=uniform_plan(
        table_specs(tables, {"a": "sgd", "b": "adagrad", "c": "sgd"}), 1))
    groups = model.fused_optimizer.param_groups
    assert [len(g["params"]) for g in groups] == [2, 1]
    groups[0]["lr"] = 0.0
    before = {n: weight(model, n) for n in "abc"}
    ids = torch.tensor([1] * 3)
    model(kjt(ids, ("f_a", "f_b", "f_c"))).values().sum().backward()
    assert [torch.equal(weight(model, n), before[n]) for n in "abc"] == [True, False, True]


@pytest.mark.parametrize("wrap", [
    lambda o: o, OptimizerWrapper, lambda o: CombinedOptimizer([("", o)]),
    lambda o: CombinedOptimizer([("", OptimizerWrapper(o))])],
    ids=["plain", "wrapped", "combined", "both"])
def test_torchrecs_wrappers_save_and_load_the_state(wrap: Any) -> None:
    """Saved after step 1, loaded after step 2: step 2 repeats itself. Also with groups."""
    model = oper.shard(collection(), optimizer=oper.Adam(lr=0.1))
    optimizer = wrap(model.fused_optimizer)
    optimizer.save_param_groups(True)
    step(model, 1, 2)
    optimizer.param_groups[0]["lr"] = 0.2
    weights = dict(model.state_dict())
    state = optimizer.state_dict()
    step(model, 2, 3)
    want = dict(model.state_dict())
    optimizer.param_groups[0]["lr"] = 0.3
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    # Every way to read the state returns its present values, also repeatedly.
    assert_bitwise(optimizer.state_dict()["state"], state["state"], "state after loading")
    assert model.tables.num_steps == 1 and model.fused_optimizer.param_groups[0]["lr"] == 0.2
    step(model, 2, 3)
    assert_bitwise(dict(model.state_dict()), want, "repeated step")
    later = optimizer.state_dict()["state"]["embedding_bags.a.weight"]
    assert later["a.step"] == 2 and state["state"]["embedding_bags.a.weight"]["a.step"] == 1
    assert not torch.equal(later["a.momentum1"],
                           state["state"]["embedding_bags.a.weight"]["a.momentum1"])


@pytest.mark.parametrize("optimizer, names", [
    (oper.SGD(lr=0.1), ()), (oper.SGD(lr=0.1, momentum=0.5), ("momentum_buffer",)),
    (oper.LarsSGD(lr=0.1), ("momentum1",)), (oper.LAMB(), ("momentum1", "exp_avg_sq", "step")),
    (oper.AdamW(), ("momentum1", "exp_avg_sq", "step")),
    (oper.PartialRowWiseLAMB(), ("momentum1", "exp_avg_sq", "step")),
    (oper.Adagrad(initial_accumulator_value=0.5), ("momentum1",))], ids=str)
def test_state_has_torchrecs_names_and_restores_a_step(optimizer: Any, names: tuple[str, ...]
                                                       ) -> None:
    """Another model that loads weights and state repeats the next step, bit for bit."""
    model, other = (oper.shard(collection(), optimizer=optimizer) for _ in range(2))
    step(model, 1, 2)
    step(model, 2, 3, 3)
    with default_dtype(torch.bfloat16):  # which cannot represent every step count
        state = model.fused_optimizer.state_dict()
    entries = state["state"]["embedding_bags.a.weight"]
    assert entries.keys() == {f"a.{n}" for n in names}
    assert all(x.dtype == torch.float32 for x in entries.values())
    other.load_state_dict(model.state_dict())
    other.fused_optimizer.load_state_dict(state)
    for m in (model, other):
        step(m, 3, 4)
    assert_bitwise(dict(other.state_dict()), dict(model.state_dict()), "next step")
    assert_bitwise(other.fused_optimizer.state_dict()["state"],
                   model.fused_optimizer.state_dict()["state"], "its state")


def test_a_state_dict_is_a_copy() -> None:
    model = oper.shard(collection(), optimizer=oper.RowWiseAdagrad(lr=0.1))
    step(model, 1)
    state = model.fused_optimizer.state_dict()["state"]["embedding_bags.a.weight"]["a.momentum1"]
    before = state.clone()
    step(model, 1)
    assert torch.equal(state, before)
    state.fill_(7.0)
    now = model.fused_optimizer.state_dict()["state"]["embedding_bags.a.weight"]["a.momentum1"]
    assert now[1] == 2.0 and now[0] == 0.0


def test_no_copy_of_the_state_stays_in_memory() -> None:
    """Neither construction, nor wrapping, nor saving keeps a copy of the optimizer state."""
    def large() -> dict[int, torch.Tensor]:
        gc.collect()
        return {x.data_ptr(): x for x in gc.get_objects()
                if isinstance(x, torch.Tensor) and x.numel() >= 50_000 and not x.is_meta
                and not isinstance(x, TableTensor)}  # that has no memory

    model = oper.shard(collection(rows=50_000), optimizer=oper.RowWiseAdagrad(lr=0.1))
    before = large()  # also tensors of other tests, which this reference keeps alive
    optimizer = CombinedOptimizer([("", OptimizerWrapper(model.fused_optimizer))])
    state = optimizer.state_dict()
    assert len(large().keys() - before.keys()) == 2
    optimizer.load_state_dict(state)
    del state
    assert not large().keys() - before.keys()


def test_a_state_of_other_tables_is_refused() -> None:
    model = oper.shard(collection(), optimizer=oper.Adam(lr=0.1))
    state = model.fused_optimizer.state_dict()
    entry = state["state"]["embedding_bags.a.weight"]
    with pytest.raises(ValueError, match=r"cannot load the state.*entries="):
        model.fused_optimizer.load_state_dict(
            {"state": state["state"] | {"embedding_bags.a.weight": {
                "a.momentum1": entry["a.momentum1"]}}})
    adagrad, momentum = (oper.shard(collection(), optimizer=o).fused_optimizer for o in (
        oper.Adagrad(lr=0.1), oper.SGD(lr=0.1, momentum=0.5)))
    for mine, theirs in ((adagrad, momentum), (momentum, adagrad)):
        with pytest.raises(ValueError, match=r"momentum_buffer.*of a model with these tables"):
            mine.load_state_dict(theirs.state_dict())
        with pytest.raises(KeyError):
            CombinedOptimizer([mine]).load_state_dict(theirs.state_dict())
    lars = oper.shard(collection(), optimizer=oper.LarsSGD(lr=0.1))
    lars(kjt(torch.tensor([1, 1]))).values().sum().neg().backward()
    with pytest.raises(ValueError, match=r"least number of 'a.momentum1'.*squares"):
        adagrad.load_state_dict(lars.fused_optimizer.state_dict())
    with pytest.raises(ValueError, match=r"least number of 'a.momentum1'.*squares"):
        CombinedOptimizer([adagrad]).load_state_dict(lars.fused_optimizer.state_dict())
    assert not adagrad.state_dict()["state"]["embedding_bags.a.weight"]["a.momentum1"].any()
    del state["state"]["embedding_bags.a.weight"]
    with pytest.raises(ValueError, match=r"cannot load the state.*entries=\[\]"):
        model.fused_optimizer.load_state_dict(state)


# ---- freezing ------------------------------------------------------------------------------------


def test_frozen_before_sharding_and_read_only() -> None:
    plain = bag()
    plain.weight.requires_grad = False
    model = shard(plain)
    assert not model.weight.requires_grad and not model(torch.tensor([[1]])).requires_grad
    model.requires_grad_(True)
    before = rows(model)
    model(torch.tensor([[1]])).sum().backward()
    assert not torch.equal(rows(model), before)
    served = shard(bag(), objective="inference", optimizer=None)
    assert not served.weight.requires_grad
    with pytest.raises(InvalidInputError, match="sharded for inference"):
        served.requires_grad_(True)


# ---- what a backward pass updates ----------------------------------------------------------------


def test_autograd_grad_updates_nothing() -> None:
    model = shard(bag())
    before = rows(model)
    dense, weights = torch.ones(4, requires_grad=True), torch.ones(1, 1, requires_grad=True)

    def loss() -> torch.Tensor:
        return (model(torch.tensor([[1]]), per_sample_weights=weights) * dense).sum()

    (gradient,) = torch.autograd.grad(loss(), weights)
    assert torch.equal(gradient, before[1].sum().view(1, 1))
    torch.autograd.grad(loss(), dense)
    loss().backward(inputs=[dense])
    assert torch.equal(rows(model), before) and torch.equal(dense.grad, before[1])
    loss().backward()
    before[1] -= LR
    assert torch.equal(rows(model), before)


def test_an_assigned_gradient_is_not_ignored() -> None:
    model = shard(collection())
    weight = model.embedding_bags["a"].weight
    weight.grad = torch.ones(weight.shape)
    with pytest.raises(InvalidInputError, match=r"weight.grad=\['a'\], expected none"):
        model.fused_optimizer.step()
    model.fused_optimizer.zero_grad()
    model.fused_optimizer.step()


def test_assigned_state_keeps_the_dtype() -> None:
    for model, key in ((shard(bag()), "weight"), (shard(collection()), "embedding_bags.a.weight")):
        state = model.state_dict()
        state[key] = state[key].double()
        with pytest.warns(UserWarning, match="keeps its dtype"):
            model.load_state_dict(state, assign=True)
        assert model.state_dict()[key].dtype == torch.float32
        model.load_state_dict(dict(state))
        model.load_state_dict({k: x.float() for k, x in state.items()}, assign=True)


def test_calling_one_table_of_a_collection_is_refused() -> None:
    with pytest.raises(OperError, match="call the collection"):
        shard(collection()).embedding_bags["a"](torch.tensor([[1]]))


# ---- tensors that change between passes ----------------------------------------------------------


def test_a_collection_refuses_changed_ids_and_keeps_lengths() -> None:
    model = shard(collection("a"))
    ids, lengths = torch.tensor([1, 2, 3]), torch.tensor([1, 2])
    batch = KJT(["f_a"], ids, lengths=lengths)
    before = rows(model.embedding_bags["a"])
    out = model(batch).values()
    lengths.copy_(torch.tensor([2, 1]))  # the forward pass has read them
    out[1].sum().backward()
    before[2:4] -= LR
    assert torch.equal(rows(model.embedding_bags["a"]), before)
    out = model(batch).values()
    ids.fill_(7)
    with pytest.raises(InvalidInputError, match=r"changed in place.*ids"):
        out.sum().backward()


def test_buffers_may_be_reused_while_gradients_accumulate() -> None:
    want, model = shard(bag()), shard(bag())
    for batch in ([1, 2], [3, 4], [1, 5]):
        last = batch == [1, 5]
        with oper.no_sync(want) if not last else warnings.catch_warnings():
            want(torch.tensor([batch])).pow(2).sum().backward()
    ids, gradient = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 4)
    for batch in ([1, 2], [3, 4], [1, 5]):
        last = batch == [1, 5]
        with oper.no_sync(model) if not last else warnings.catch_warnings():
            ids.copy_(torch.tensor([batch]))
            out = model(ids)
            gradient.copy_(2 * out.detach())
            out.backward(gradient)
    assert torch.equal(rows(model), rows(want))


@pytest.mark.parametrize(("values", "lengths", "changed", "to", "read"), [
    ([1, 2], [2], 0, [5, 6], (5, 6)),
    ([1, 2, 3], [1, 2], 1, [2, 1], (1, 2)),
], ids=["ids", "lengths"])
def test_a_prefetched_batch_that_changes(values: list[int], lengths: list[int], changed: int,
                                         to: list[int], read: tuple[int, int]) -> None:
    model = shard(collection("a"))
    parts = torch.tensor(values), torch.tensor(lengths)
    batch = KJT(["f_a"], parts[0], lengths=parts[1])
    model.prefetch(batch)
    for *_, started in model._prefetched.queued.values():
        started.result()
    parts[changed].copy_(torch.tensor(to))
    want = rows(model.embedding_bags["a"])
    assert torch.equal(model(batch).values()[0], want[read[0]] + want[read[1]])


@pytest.mark.parametrize("changed", ["strided ids", "float64 weights", "ids of inference mode"])
def test_a_prefetched_batch_whose_copy_is_outdated(changed: str) -> None:
    """Changes show even where a lookup has a copy, or the tensors have no version counter."""
    model = shard(collection("a", is_weighted=True))
    table = rows(model.embedding_bags["a"])
    with torch.inference_mode(changed == "ids of inference mode"):
        ids, weights = torch.tensor([1, 0, 2, 0])[::2], torch.ones(2, dtype=torch.float64)
        if changed == "ids of inference mode":
            ids, weights = ids.contiguous(), weights.float()
        batch = KJT(["f_a"], ids, weights, torch.tensor([2]))
        model.prefetch(batch)
        for *_, started in model._prefetched.queued.values():
            started.result()
        (weights if changed == "float64 weights" else ids).copy_(torch.tensor([5, 6]))
        want = (5 * table[1] + 6 * table[2] if changed == "float64 weights"
                else table[5] + table[6])
        with torch.no_grad():
            torch.testing.assert_close(model(batch).values()[0], want)


def test_weights_prefetched_without_gradients_still_get_theirs() -> None:
    model = shard(collection("a", is_weighted=True))
    table = rows(model.embedding_bags["a"])
    weights = torch.ones(2, dtype=torch.float64, requires_grad=True)
    batch = KJT(["f_a"], torch.tensor([1, 2]), weights, torch.tensor([2]))
    with torch.no_grad():
        model.prefetch(batch)
    model(batch).values().sum().backward()
    assert weights.grad is not None
    torch.testing.assert_close(weights.grad.float(), table[1:3].sum(dim=1))


def test_second_derivatives_through_a_lookup_are_refused() -> None:
    sharded = shard(bag())
    weights = torch.ones(1, 2, requires_grad=True)
    out = sharded(torch.tensor([[1, 2]]), per_sample_weights=weights)
    first, = torch.autograd.grad(out.square().sum(), weights, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


def test_weights_other_than_the_prefetched_ones() -> None:
    """Batches with the same ids may have different weights."""
    model = shard(collection("a", is_weighted=True))
    ids, lengths = torch.tensor([1, 2]), torch.tensor([2])
    old = KJT(["f_a"], ids, torch.tensor([1.0, 1.0]), lengths)
    model.prefetch(old)
    weights = torch.tensor([3.0, 0.5], requires_grad=True)
    table = rows(model.embedding_bags["a"])
    out = model(KJT(["f_a"], ids, weights, lengths)).values()
    assert torch.equal(out[0], 3 * table[1] + table[2] / 2)
    out.sum().backward()
    assert weights.grad is not None
    torch.testing.assert_close(weights.grad, table[1:3].sum(dim=1))
    split = KJT(["f_a"], ids, torch.tensor([1.0, 1.0]), torch.tensor([1, 1]))
    with torch.no_grad():
        model.prefetch(old)
        assert model(split).values().shape == (2, 4)
        assert model(old).values().shape == (1, 4)  # still queued
    assert not model._prefetched.queued
