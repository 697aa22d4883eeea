import importlib

import pytest

from gpumemnet.tracing.operators import CORRECTIONS, Correction, cuda_overrides
from tests.gpumemnet.tracing.corrected import platform


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda correction: correction.name)
def test_every_entry_is_corrected_somewhere_or_says_what_is_wrong(correction: Correction) -> None:
    assert correction.on_cuda
    assert correction.source
    if correction.corrected_in is None:
        assert correction.effect
    else:
        importlib.import_module(correction.corrected_in)


def test_names_are_unique() -> None:
    assert len({correction.name for correction in CORRECTIONS}) == len(CORRECTIONS)


def test_every_module_with_overrides_is_in_the_table() -> None:
    modules = {
        override.kernel.__module__
        for override in cuda_overrides(platform())
        if hasattr(override.kernel, "__module__")
    }
    assert modules - {None, "functools"} <= {correction.corrected_in for correction in CORRECTIONS}
