"""The text that ``oper demo`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oper.bench.core.report import NOISY_CORES, table
from oper.tables import format_bytes

_SHOWN_TABLES = 5
_NAMES = {"table_wise": "table-wise", "mixed": "small tables data-parallel"}


def page(found: Mapping[str, Any]) -> str:
    """Format the result of `demo.demo` together with the items of `record.record`."""
    parts = [_data(found), _plan(found), _correctness(found), _times(found), _quality(found)]
    return "\n\n".join(parts) + f"\n\nEverything is in {found['folder']} " \
        f"(figures: demo.json); {found['seconds']:.0f} s in all.\n"


def _data(found: Mapping[str, Any]) -> str:
    data = found["data"]
    kind = "SYNTHETIC click log" if found["synthetic"] else "click log"
    tables = data["skew"]["tables"]
    largest = sorted(tables, key=lambda n: -tables[n]["num_rows"])[:_SHOWN_TABLES]
    rows = [(n, f"{tables[n]['num_rows']:,}", _share(tables[n]["hottest"]),
             _share(tables[n]["top_1pct"]), _share(tables[n]["top_10pct"])) for n in largest]
    total = sum(t["num_rows"] for t in tables.values())
    # Preprocessing keeps the hottest values of a column that has more than max_table_rows.
    capped = sum(t["num_rows"] >= data["max_table_rows"] for t in tables.values())
    return "\n".join([
        f"DATA  {kind}, Criteo-Kaggle format: {found['rows']:,} rows "
        f"({data['rows']['train']:,} train, {data['rows']['valid']:,} validation, later in time)",
        f"{len(tables)} tables with {total:,} rows"
        + (f", {capped} of them capped at {data['max_table_rows']:,}" if capped else "")
        + "; share of lookups that go to the hottest rows, largest tables:",
        table(("table", "rows", "hottest row", "top 1%", "top 10%"), rows)])


def _plan(found: Mapping[str, Any]) -> str:
    plan = found["plan"]
    tiers = ", ".join(f"{t['tiers']} {name} ({t['rows']:,} rows)"
                      for name, t in plan["tiers"].items())
    loads = [[phase["name"], *(f"{us:.0f}" for us in phase["rank_us"])]
             for phase in plan["phases"]]
    heads = ["load, us (modelled)", *(f"rank {r}" for r in range(plan["world_size"]))]
    held = " ".join(format_bytes(b) for b in plan["domain_bytes"])
    bound = f"not certified: {plan['not_certified']}" if found["plan_gap"] is None else (
        f"lower bound of any plan {plan['lower_bound_us']:.0f} us: gap "
        f"{100 * found['plan_gap']:.2f} %")
    return "\n".join([
        f"PLAN  for {plan['topology']} ({plan['source']} constants), {plan['batch_size']:,} "
        f"samples per rank, memory {held}",
        f"tiers: {tiers}",
        table(heads, loads),
        f"modelled step {plan['step_us']:.0f} us, {bound}, imbalance {plan['imbalance']:.3f}"])


def _correctness(found: Mapping[str, Any]) -> str:
    training = found["training"]
    if found["max_relative_diff"] <= found["tolerance"]:
        verdict = f"equal (at most {found['tolerance']:.0e} is rounding)"
    elif found["verified"]:
        verdict = ("further apart than rounding, though OPER no more than TorchRec: the model has "
                   "amplified rounding")
    else:
        verdict = "NOT EQUAL"
    return "\n".join([
        f"CORRECTNESS  {found['checked_steps']} training steps of {training['world_size']} x "
        f"{training['checked_batch_size']} samples against the unsharded model in one process",
        f"OPER      max difference of logits {found['max_abs_diff_logits']:.1e}, of weights "
        f"{found['max_abs_diff_weights']:.1e}; relative to the tensor's largest value "
        f"{found['max_relative_diff']:.1e}",
        f"TorchRec  max difference {found['torchrec_max_abs_diff']:.1e}, relative "
        f"{found['torchrec_max_relative_diff']:.1e}",
        f"OPER and the unsharded model are {verdict}."])


def _times(found: Mapping[str, Any]) -> str:
    rows = [
        (name, f"{found[f'{p}oper_{w}_ms']:.2f}", f"{found[f'{p}torchrec_{w}_ms']:.2f}",
         f"{found[f'{p}ratio_{w}']:.2f}")
        for name, p, w in (("embeddings alone: forward", "", "forward"),
                           ("embeddings alone: step", "", "step"),
                           ("whole DLRM: training step", "dlrm_", "step"))]
    training, machine = found["training"], found["machine"]
    busy = found["other_busy_cores"]
    return "\n".join([
        f"TIME  {training['world_size']} processes with one thread each, dim {training['dim']}, "
        f"{training['batch_size']:,} samples per process, in turns in one run; medians, ms",
        table(("", "OPER", "TorchRec", "TorchRec / OPER"), rows),
        f"TorchRec by the faster of two plans: {_NAMES[found['torchrec_forward_plan']]} (forward), "
        f"{_NAMES[found['torchrec_plan']]} (step), {_NAMES[found['dlrm_torchrec_plan']]} (DLRM).",
        "Both systems have the allocator settings that make TorchRec fastest.",
        "A step is forward + backward + update. The dense layers are the same work in both.",
        *([f"NOISY: other programs kept {busy:.1f} of {machine['cores']} cores busy meanwhile; "
           "the times of this run are not reliable."] if busy > NOISY_CORES else [])])


def _quality(found: Mapping[str, Any]) -> str:
    rows = [(name, f"{found['auc'][key]:.5f}", f"{found['log_loss'][key]:.5f}")
            for name, key in (("OPER", "oper"), ("unsharded", "unsharded"),
                              ("TorchRec", "torchrec"))]
    lowest = min(found["auc"].values())
    say = ("clearly above 0.5: the model has learnt" if lowest > 0.6 else
           "not clearly above 0.5: this run is too short for a claim about learning")
    return "\n".join([
        f"VALIDATION  after {found['training']['num_steps']:,} steps on the same batches",
        table(("", "AUC", "log loss"), rows), f"AUC is {say}."])


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
