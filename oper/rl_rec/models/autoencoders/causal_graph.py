"""Weighted directed acyclic graphs over n concepts, and fitting them to labels.

``A`` is float [n, n]; ``A[j, k] != 0`` means that concept j is a direct cause of concept k.
"""

from __future__ import annotations

import torch

from oper.errors import InvalidInputError

_L1 = 0.02  # weight of the penalty ``||A||_1`` of NOTEARS


def acyclicity(a: torch.Tensor) -> torch.Tensor:
    """Compute ``h(A) = tr[(I + (A o A) / n)^n] - n``, a scalar; 0 if and only if A is acyclic.

    Yu, Chen, Gao & Yu, "DAG-GNN", ICML 2019, equation 13 with alpha = 1 / n.
    """
    n = a.shape[0]
    step = torch.eye(n, dtype=a.dtype, device=a.device) + a.square() / n
    return torch.linalg.matrix_power(step, n).trace() - n


def descendants(support: torch.Tensor) -> torch.Tensor:
    """Return whether each concept is a direct or indirect effect of each other one: the transitive
    closure of the edges `support`, bool [n, n] each, row = cause. On the diagonal, whether the
    concept is on a cycle."""
    found = support
    for _ in range(len(support).bit_length()):  # each round doubles the length of the paths
        found = found | (found.double() @ found.double() > 0)
    return found


def is_acyclic(support: torch.Tensor) -> bool:
    """Whether the graph `support`, bool [n, n], has no directed cycle."""
    return not bool(descendants(support).diagonal().any())


def topological_order(support: torch.Tensor) -> list[int]:
    """Sort concepts such that causes precede effects; raises InvalidInputError on a cycle.

    Args:
        support: bool [n, n], row = cause.
    """
    found = descendants(support)
    if found.diagonal().any():
        raise InvalidInputError("the graph has a cycle", "concepts",
                                found.diagonal().nonzero()[:, 0].tolist(),
                                "no path from a concept to itself", "remove an edge")
    # An effect has all ancestors of its cause, and the cause.
    order: list[int] = found.sum(0).argsort().tolist()
    return order


def fit_graph(labels: torch.Tensor, *, threshold: float = 0.3) -> torch.Tensor:
    """Fit a linear acyclic graph to labels: ``u = A' u + noise``.

    NOTEARS (Zheng et al., NeurIPS 2018) is used: least squares with an L1 penalty under h(A) = 0,
    by an augmented Lagrangian. Edges below `threshold` are removed, then the weakest edges of
    remaining cycles; the other edges are fitted again without penalty. NOTEARS finds the true
    directions if noise variances are equal and the labels are *not* standardised; standardised
    labels do not determine the directions.

    Args:
        labels: float [N, n]; centred by this function.
        threshold: least absolute weight of an edge.

    Returns:
        float64 [n, n], acyclic.

    Raises:
        InvalidInputError: `labels` is not a matrix of finite numbers.
    """
    if labels.ndim != 2 or not labels.shape[0] or not bool(labels.isfinite().all()):
        raise InvalidInputError("cannot fit a graph", "labels", tuple(labels.shape),
                                "finite numbers [N, n], N >= 1", "correct the labels")
    u = labels.double() - labels.double().mean(0)
    covariance = u.T @ u / len(u)
    return least_squares(covariance, acyclic_support(_notears(covariance), threshold))


def acyclic_support(a: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return the edges with absolute weight >= `threshold`, bool [n, n]; while there is a cycle,
    the weakest edge on one is removed."""
    support = a.abs() >= threshold
    support.fill_diagonal_(False)
    # An edge is on a cycle if its cause is a descendant of its effect.
    while (on_cycle := support & descendants(support).T).any():
        weakest = torch.where(on_cycle, a.abs(), torch.inf).argmin()
        support.view(-1)[weakest] = False
    return support


def least_squares(covariance: torch.Tensor, support: torch.Tensor) -> torch.Tensor:
    """Regress each concept on its causes, given the covariance [n, n]; returns A, [n, n]."""
    a = torch.zeros_like(covariance)
    for k in range(len(a)):
        causes = support[:, k].nonzero()[:, 0]
        if causes.numel():
            a[causes, k] = torch.linalg.lstsq(covariance[causes][:, causes],
                                              covariance[causes, k], driver="gelsd").solution
    return a


def _notears(covariance: torch.Tensor) -> torch.Tensor:
    """Fit A, float64 [n, n], to the labels' covariance by NOTEARS, without thresholding."""
    n = len(covariance)
    off = 1 - torch.eye(n, dtype=torch.float64)
    a = torch.zeros(n, n, dtype=torch.float64, requires_grad=True)
    multiplier, penalty, before = 0.0, 1.0, float("inf")
    for _ in range(30):
        optimizer = torch.optim.LBFGS([a], max_iter=200, line_search_fn="strong_wolfe")

        def objective(optimizer: torch.optim.LBFGS = optimizer, multiplier: float = multiplier,
                      penalty: float = penalty) -> torch.Tensor:
            optimizer.zero_grad()
            edges = a * off
            rest = torch.eye(n, dtype=torch.float64) - edges
            h = acyclicity(edges)
            # A smooth approximation of |x|: L-BFGS needs a gradient at 0.
            size = (edges.square() + 1e-8).sqrt().sum()
            loss = (0.5 * (rest.T @ covariance @ rest).trace() + _L1 * size
                    + multiplier * h + 0.5 * penalty * h * h)
            loss.backward()
            return loss

        optimizer.step(objective)
        with torch.no_grad():
            h = float(acyclicity(a * off))
        if h < 1e-9 or penalty > 1e10:
            break
        multiplier += penalty * h
        penalty *= 10 if h > before / 4 else 1
        before = h
    return (a * off).detach()
