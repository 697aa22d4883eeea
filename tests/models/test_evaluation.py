"""Metrics, against figures worked out by hand."""

import numpy as np
import pytest

from gpumemnet.predict.distribution import BinScheme
from gpumemnet.units import GIB, MIB
from models.evaluation import Answers, amount_figures, bin_figures

SCHEME = BinScheme(GIB, 4)
MEASURED = np.array([0.5, 1.5, 1.5, 2.5]) * GIB


def test_bins() -> None:
    figures = bin_figures(MEASURED, np.array([0, 1, 0, 3]), SCHEME)
    assert figures.accuracy == 0.5
    assert figures.under_predicted == 0.25
    # F1 of bin 0: precision 1/2, recall 1 → 2/3; of bin 1: 1 and 1/2 → 2/3; of bin 2: 0.
    assert figures.macro_f1 == pytest.approx((2 / 3 + 2 / 3 + 0) / 3)


def test_amounts() -> None:
    expected = MEASURED + np.array([1, -2, 3, -4]) * MIB
    safe = np.array([1.0, 1.4, np.nan, 3.0]) * GIB
    figures = amount_figures(MEASURED, Answers(expected, safe, {}))
    assert figures.median_error_mib == pytest.approx(2.5)
    assert figures.mean_error_mib == pytest.approx(2.5)
    assert figures.above_safe == pytest.approx(1 / 3)
    assert figures.without_safe == pytest.approx(1 / 4)
    assert figures.wasted == pytest.approx((1.0 + (1.4 / 1.5 - 1) + 0.2) / 3)
    assert figures.wasted_mib == pytest.approx((0.5 - 0.1 + 0.5) * 1024 / 3)
