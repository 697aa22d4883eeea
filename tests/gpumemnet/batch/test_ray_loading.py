"""How a failing connection to Ray is reported."""

from types import SimpleNamespace

import pytest

from gpumemnet.batch.ray_engine import connect
from gpumemnet.errors import DatasetError


def test_a_ray_node_that_does_not_start_is_one_sentence() -> None:
    def init(**options: object) -> None:
        raise Exception(
            "The raylet log is in /tmp/ray.\nThe current node timed out during startup."
        )

    with pytest.raises(
        DatasetError, match=r"cannot be reached \(The current node timed out during startup\.\)"
    ):
        connect(SimpleNamespace(init=init), {}, DatasetError)
