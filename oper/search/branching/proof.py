"""The JSON form of a bound's proof: a branch-and-bound tree with the prices of its leaves.

The proof of one problem also serves for similar ones: any prices give a bound, so that a tree with
the same branchings and prices is bounded by one pricing per leaf, without a linear program.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from oper.search.branching.tree import Branching, SearchTree, TreeNode
from oper.search.pricing.master import Bound, Pool
from oper.search.pricing.node import PUSHES, STILL, Node
from oper.search.problem.machine import GROUPS
from oper.search.relaxation.relaxation import Relaxation

_SLACK = 1e-9  # relative rounding error of adding barriers to a bound and subtracting them again


def part_to_json(tree: SearchTree, plans: tuple[str, ...], target_us: float) -> dict[str, Any]:
    """Return one part of a proof as values that JSON can represent.

    Args:
        tree: the tree that bounds the part.
        plans: the kinds of plans in the part, from `oper.search.problem.space.PLANS`.
        target_us: the bound to prove, microseconds: the tree is pruned at nodes whose bound is at
            least this.

    Returns:
        ``{"plans", "apart", "rows", "tree"}``. ``apart`` is the load (phase, group) that determines
        the distinguished host, or None. In ``tree``, inner nodes have their branching, leaves their
        prices by row number. ``rows`` describes each row:
        ``["load", phase, group, class of ranks]``, ``["memory", class of domains]``,
        ``["host memory", class of hosts]`` (classes of `oper.search.cost.space.model_classes`), or
        ``[kind, phase, group]`` for an inequality about the owner of the largest piece.
    """
    by_load = tree.bound.relaxation.distinguished
    load = None if by_load is None else load_name(tree.bound.relaxation, by_load)
    return {"plans": list(plans), "apart": load, "rows": _row_names(tree.bound.relaxation),
            "tree": _tree_to_json(tree.root, target_us)}


def grow_as(tree: SearchTree, part: dict[str, Any], step_us: float, scale: float) -> None:
    """Branch as a proof did, and bound the leaves at the proof's prices.

    Args:
        tree: a tree that has only its root; changed in place.
        part: a part of a proof for the same kinds of plans, perhaps of another problem. Branchings
            on tables that this one lacks, and loads that it does not have, are left out.
        step_us: cutoff, the known plan's step time without barriers: only faster plans are bounded.
        scale: factor for the loads at which the proof branches.
    """
    first, relaxation = tree.root.bound, tree.bound.relaxation
    names = {t.spec.name: k for k, t in enumerate(relaxation.tables)}
    rows = {tuple(x): k for k, x in enumerate(_row_names(relaxation))}
    at = {str(n): rows.get(tuple(x)) for n, x in enumerate(part["rows"])}
    loads = {tuple(load_name(relaxation, x.load)): x.load for x in relaxation.inequalities}

    def grown(value: dict[str, Any], node: Node) -> TreeNode:
        if "parts" not in value:
            prices = np.zeros(relaxation.num_rows)
            for number, price in value["prices"].items():
                if (row := at[number]) is not None:
                    prices[row] = price
            prices = relaxation.project_prices(prices)
            bound = node.bound_at(prices, node.price(prices).value) * (1 - _SLACK)
            if not bound > first.lower_bound_us:  # the root's prices prove more
                return TreeNode(replace(first, node=node, pool=Pool()))
            return TreeNode(Bound(bound, bound, prices, node, Pool(), 0.0, 0))
        branching: int | tuple[int, int] | None
        if "table" in value:
            branching = names.get(value["table"])
            children = [] if branching is None else [
                Node(relaxation, node.limits, _with(node.pushes, branching, x))
                for x in (STILL, PUSHES)]
        else:
            branching, limits = loads.get(tuple(value["load"])), node.limits
            cut = scale * value["at_us"]
            children = [] if branching is None else [
                Node(relaxation, replace(limits, most=_with(limits.most, branching, min(
                    limits.most[branching], cut))), node.pushes),
                Node(relaxation, replace(limits, least=_with(limits.least, branching, max(
                    limits.least[branching], cut))), node.pushes)]
        if branching is None:
            return TreeNode(replace(first, node=node, pool=Pool()))
        out = TreeNode(replace(first, lower_bound_us=0.0, node=node, pool=Pool()))
        out.branching = Branching(branching, 0.0, (children[0], children[1]))
        out.children = tuple(grown(x, y) for x, y in zip(value["parts"], children, strict=True))
        return out

    begin = replace(first.node.limits, step=step_us - relaxation.fixed_us)
    root = grown(part["tree"], Node(relaxation, begin, first.node.pushes))
    if root.children:
        tree.adopt(root)


def _with(values: np.ndarray, at: int | tuple[int, int], value: float) -> np.ndarray:
    out = values.copy()
    out[at] = value
    return out


def _row_names(relaxation: Relaxation) -> list[list[Any]]:
    model, classes = relaxation.model, relaxation.classes
    uses_host = relaxation.rows.uses_host
    return [*(["load", model.phases[p], g, c] for p, g, c in relaxation.rows.names),
            *(["memory", k] for k in range(classes.num_domain_classes)),
            *(["host memory", k] for k in range(classes.num_host_classes) if uses_host),
            *([x.kind, *load_name(relaxation, x.at)] for x in relaxation.inequalities)]


def load_name(relaxation: Relaxation, load: tuple[int, int]) -> list[str]:
    """The names of the phase and group of a load."""
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
    return {"load": load_name(relaxation, at), "at_us": at_us, "parts": parts}
