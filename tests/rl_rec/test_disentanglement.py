"""DCI and SAP on codes that describe one factor, all factors, the same factor, or none."""

from __future__ import annotations

import math

import numpy as np
import pytest

from oper.errors import InvalidInputError
from oper.rl_rec.disentanglement import disentanglement, scores_of

RNG = np.random.default_rng(0)
FACTORS = RNG.normal(size=(3000, 4)) * [1, 5, 0.1, 2] + 3
NOISE = RNG.normal(size=(3000, 4, 1))


def test_scores_of_importances_by_hand() -> None:
    told, whole = scores_of(np.array([[3.0, 1.0], [0.0, 2.0], [0.0, 0.0]]))
    first = 1 + (0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
    assert told == pytest.approx((4 * first + 2 * 1.0) / 6)
    second = 1 + (math.log(1 / 3) / 3 + 2 * math.log(2 / 3) / 3) / math.log(3)
    assert whole == pytest.approx((1.0 + second) / 2)
    assert scores_of(np.zeros((2, 3))) == (0.0, 0.0)


def test_a_code_for_each_factor() -> None:
    """For any order, scale and rotation of codes, and with additional noise columns."""
    codes = np.concatenate([FACTORS[:, [2, 0, 3, 1], None] * 7, NOISE, NOISE[::-1]], 2)
    rotation = np.linalg.qr(RNG.normal(size=(3, 3)))[0]
    found = disentanglement(codes, FACTORS)
    for name, value in found.items():
        assert value == pytest.approx(1, abs=0.05), name
    turned = disentanglement((codes - codes.mean(0)) / codes.std(0) @ rotation, FACTORS)
    assert turned == pytest.approx(found, abs=0.02)


def test_mixed_codes_tell_everything_and_stand_for_nothing() -> None:
    """Each code is a mean of all factors with the signs of a Hadamard matrix."""
    pairs = np.array([[1, 1], [1, -1]])
    mixed = ((FACTORS - FACTORS.mean(0)) / FACTORS.std(0)) @ np.kron(pairs, pairs) / 2
    found = disentanglement(mixed[..., None], FACTORS)
    assert found["informativeness"] > 0.99
    assert found["disentanglement"] < 0.02 and found["completeness"] < 0.02
    assert found["sap"] < 0.05  # each code explains a quarter of each factor


def test_copies_are_disentangled_and_not_complete() -> None:
    twice = np.concatenate([FACTORS, FACTORS], 1)[..., None]
    found = disentanglement(twice, FACTORS)
    assert found["disentanglement"] == pytest.approx(1, abs=0.01)
    assert found["completeness"] == pytest.approx(1 - math.log(2) / math.log(8), abs=0.01)
    assert found["sap"] == pytest.approx(0, abs=1e-6)


def test_noise_tells_nothing() -> None:
    found = disentanglement(NOISE, FACTORS)
    assert found["informativeness"] < 0.01 and found["sap"] < 0.01
    wide = disentanglement(RNG.normal(size=(400, 4, 90)), FACTORS[:400])  # more numbers than rows
    assert wide["informativeness"] < 0.1
    assert np.isfinite(list(disentanglement(np.zeros((50, 3, 2)), FACTORS[:50]).values())).all()


@pytest.mark.parametrize(("codes", "factors"), [
    (NOISE[:, :1], FACTORS), (NOISE[..., 0], FACTORS), (NOISE, FACTORS[:, :1]),
    (NOISE[:10], FACTORS[:10]), (NOISE[:99], FACTORS), (NOISE * np.nan, FACTORS),
    (NOISE, FACTORS * 0)])
def test_what_cannot_be_scored(codes: np.ndarray, factors: np.ndarray) -> None:
    with pytest.raises(InvalidInputError, match="cannot score codes"):
        disentanglement(codes, factors)
