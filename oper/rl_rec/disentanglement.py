"""Measures of disentanglement of a representation, for data whose true factors are known.

DCI (Eastwood and Williams, ICLR 2018) and SAP (Kumar, Sattigeri and Balakrishnan, ICLR 2018), for C
vector codes z_c and K factors v_k. Ridge regressions are fitted on half of the rows, and all scores
are computed on the other half. Scores do not depend on the order of codes or on rotations of one.

    importance       R_ck = std(z_c' w_ck), the term of code c in the ridge regression of v_k on all
                     codes
    disentanglement  sum_c rho_c (1 - H_K(R_c. / sum_k R_ck)), rho_c = sum_k R_ck / sum R: 1 if
                     every code describes one factor only
    completeness     mean_k (1 - H_C(R_.k / sum_c R_ck)): 1 if one code describes each factor
    informativeness  mean over k of the R^2 of v_k given all codes
    sap              mean over k of the R^2 of v_k given the best single code, minus the R^2 given
                     the second best

H_n is the entropy with logarithms to base n. Unlike here, DCI's authors define R by Lasso weights
or random forest importances, and informativeness by the prediction error.
"""

from __future__ import annotations

import numpy as np

from oper.errors import InvalidInputError

_PENALTIES = tuple(10.0 ** k for k in range(-4, 3))  # ridge penalties, divided by the rows


def disentanglement(codes: np.ndarray, factors: np.ndarray) -> dict[str, float]:
    """Compute the four scores of the module docstring, by name.

    Args:
        codes: float [N, C, d], C >= 2; d = 1 if each code is a single number.
        factors: float [N, K], K >= 2, none of them constant.

    Raises:
        InvalidInputError: other shapes, fewer than 20 rows, non-finite numbers, or a factor that is
            constant in a half.
    """
    codes, factors = np.asarray(codes, np.float64), np.asarray(factors, np.float64)
    if (codes.ndim != 3 or factors.ndim != 2 or len(codes) != len(factors) or len(codes) < 20
            or min(codes.shape[1], factors.shape[1]) < 2 or not codes.shape[2]):
        raise InvalidInputError("cannot score codes", "shapes of codes and factors",
                                (codes.shape, factors.shape), "[N, C, d] and [N, K], N >= 20, C "
                                "and K >= 2", "pass codes and factors of the same rows")
    order = np.random.default_rng(0).permutation(len(codes))
    learn, test = order[::2], order[1::2]
    if not (np.isfinite(codes).all() and np.isfinite(factors).all()
            and all(factors[half].std(0).all() for half in (learn, test))):
        raise InvalidInputError("cannot score codes", "codes and factors", "NaN, inf or constant",
                                "finite numbers, and factors that vary in each half",
                                "drop rows that are not finite, and factors of (nearly) one value")
    codes, factors = (_standardised(x, learn) for x in (codes, factors))
    count, width = codes.shape[1:]
    weights = _ridge(codes[learn].reshape(-1, count * width), factors[learn])
    terms = np.einsum("ncd,cdk->nck", codes[test], weights.reshape(count, width, -1))
    alone = np.stack([_explained(codes[test, c] @ _ridge(codes[learn, c], factors[learn]),
                                 factors[test]) for c in range(count)])
    best = np.sort(alone, axis=0)[::-1]
    disentangled, complete = scores_of(terms.std(axis=0))
    return {"disentanglement": disentangled, "completeness": complete,
            "informativeness": float(_explained(terms.sum(axis=1), factors[test]).mean()),
            "sap": float((best[0] - best[1]).mean())}


def scores_of(importance: np.ndarray) -> tuple[float, float]:
    """Return disentanglement and completeness, given the importances R_ck, float [C, K], >= 0."""
    return (float(_certainty(importance) @ importance.sum(1) / max(importance.sum(), 1e-300)),
            float(_certainty(importance.T).mean()))


def _certainty(importance: np.ndarray) -> np.ndarray:
    """Return 1 - entropy of each normalised row (log base = row length); 0 for rows of zeros."""
    shares = importance / np.maximum(importance.sum(axis=1, keepdims=True), 1e-300)
    logs = np.log(np.where(shares > 0, shares, 1.0))
    found = 1 + (shares * logs).sum(axis=1) / np.log(importance.shape[1])
    return np.where(importance.any(axis=1), found, 0.0)


def _standardised(x: np.ndarray, learn: np.ndarray) -> np.ndarray:
    """Standardise columns by mean and deviation on the rows `learn`; constant columns become 0."""
    std = x[learn].std(axis=0)
    return (x - x[learn].mean(axis=0)) / np.where(std > 0, std, 1.0)


def _explained(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Compute the R^2 of predictions [N, K] by column, clipped at 0; [K]."""
    return np.maximum(1 - ((found - wanted) ** 2).mean(axis=0) / wanted.var(axis=0), 0.0)


def _ridge(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Regress centred y [n, K] on x [n, p] with a ridge penalty per column that minimises the
    generalised cross-validation error (Golub, Heath and Wahba 1979); returns weights [p, K]."""
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    seen = u.T @ y
    errors, weights = [], []
    for penalty in _PENALTIES:
        kept = s ** 2 / (s ** 2 + penalty * len(x))
        left = 1 - (1 + kept.sum()) / len(x)
        error = ((y - u @ (kept[:, None] * seen)) ** 2).mean(axis=0)
        errors.append(error / left ** 2 if left > 0 else np.full_like(error, np.inf))
        weights.append(vt.T @ ((s / (s ** 2 + penalty * len(x)))[:, None] * seen))
    best = np.argmin(errors, axis=0)
    return np.stack(weights)[best, :, np.arange(y.shape[1])].T
