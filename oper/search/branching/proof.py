"""The JSON form of a bound's proof: a branch-and-bound tree with the prices of its leaves."""

from __future__ import annotations

from typing import Any

import numpy as np

from oper.search.branching.tree import SearchTree, TreeNode
from oper.search.problem.machine import GROUPS
from oper.search.relaxation.relaxation import Relaxation

_SLACK = 1e-9  # relative rounding error of adding barriers to a bound and subtracting them again


def part_to_json(tree: SearchTree, plans: tuple[str, ...], target_us: float) -> dict[str, Any]:
    """Write a part of a proof: its tree, pruned at nodes whose bound is at least `target_us`.

    Inner nodes have their branching, leaves the prices by row number. `rows` describes each row:
    ``["load", phase, group, class of ranks]``, ``["memory", class of domains]``,
    ``["host memory", class of hosts]`` (classes of `oper.search.cost.space.model_classes`), or
    ``[kind, phase, group]`` for a row about the owner of the largest piece.
    """
    relaxation = tree.bound.relaxation
    model, classes, uses_host = (relaxation.model, relaxation.classes, relaxation.rows.uses_host)
    by_load = relaxation.distinguished
    load = None if by_load is None else _load_name(relaxation, by_load)
    return {
        "plans": list(plans), "apart": load,
        "rows": [
            *(["load", model.phases[p], g, c] for p, g, c in relaxation.rows.names),
            *(["memory", k] for k in range(classes.num_domain_classes)),
            *(["host memory", k] for k in range(classes.num_host_classes) if uses_host),
            *([x.kind, *_load_name(relaxation, x.at)] for x in relaxation.inequalities)],
        "tree": _tree_to_json(tree.root, target_us)}


def _load_name(relaxation: Relaxation, load: tuple[int, int]) -> list[str]:
    return [relaxation.model.phases[load[0]], GROUPS[load[1]]]


def _tree_to_json(node: TreeNode, target_us: float) -> dict[str, Any]:
    # A child whose solution was cut short has its parent's bound, but not its parent's prices.
    if node.branching is None or node.bound.lower_bound_us >= target_us * (1 - _SLACK):
        prices = node.bound.relaxation.project_prices(node.bound.prices)
        return {"prices": {str(k): float(f"{prices[k]:.7g}")
                           for k in np.flatnonzero(prices).tolist()}}
    relaxation, at = node.bound.relaxation, node.branching.at
    parts = [_tree_to_json(x, target_us) for x in node.children]
    if isinstance(at, int):
        return {"table": relaxation.tables[at].spec.name, "parts": parts}
    at_us = float(node.branching.children[1].limits.least[at])
    return {"load": _load_name(relaxation, at), "at_us": at_us, "parts": parts}
