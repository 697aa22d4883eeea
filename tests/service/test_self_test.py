"""The self-test: every shipped model passes, and whatever a bad export does to the answers is
found."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from gpumemnet.errors import BundleError
from gpumemnet.job.job_table import JobTable
from gpumemnet.predict.bundle import Bundle
from gpumemnet.predict.predictor import BundleModel, GraphOutput, Predictor
from service.served_release import check_golden
from tests.registries import shipped

Bend = Callable[[GraphOutput], GraphOutput]


class Bent(BundleModel):
    """A model whose graph answers what ``bend`` makes of the answer."""

    def __init__(self, bundle: Bundle, bend: Bend) -> None:
        super().__init__(bundle)
        self._bend = bend

    def run(self, jobs: JobTable, features: NDArray[np.float64]) -> GraphOutput:
        return self._bend(super().run(jobs, features))


class Only(Predictor):
    """A predictor of one model."""

    def __init__(self, model: BundleModel) -> None:
        super().__init__([model.bundle])
        self._models = {"mlp": model}


def test_the_shipped_models_pass(predictor: Predictor) -> None:
    check_golden(predictor)


def nothing(answer: GraphOutput) -> GraphOutput:
    return answer


@pytest.mark.parametrize(
    ("bend", "says"),
    [
        (
            lambda answer: answer._replace(expected_bytes=answer.expected_bytes * np.nan),
            "not finite",
        ),
        (lambda answer: answer._replace(bounds_bytes=answer.bounds_bytes * np.inf), "not finite"),
        (
            lambda answer: answer._replace(expected_bytes=answer.expected_bytes * 10),
            "times of what",
        ),
        (
            lambda answer: answer._replace(expected_bytes=answer.expected_bytes * -1),
            "expected bytes, .* times of what tensors",
        ),
        (
            lambda answer: answer._replace(bounds_bytes=(answer.bounds_bytes * 4)[:, ::-1]),
            "do not rise",
        ),
        (
            lambda answer: answer._replace(bounds_bytes=answer.bounds_bytes[:, :1]),
            "is not answered",
        ),
    ],
)
def test_a_senseless_model_is_found(bend: Bend, says: str) -> None:
    bundle = shipped("mlp")
    check_golden(Only(Bent(bundle, nothing)))
    with pytest.raises(BundleError, match=says) as failed:
        check_golden(Only(Bent(bundle, bend)))
    assert bundle.card.name in str(failed.value)
