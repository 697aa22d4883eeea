"""A user's project whose packages are called like ours; ``service`` has no __init__.py."""

import sys
from importlib.util import find_spec
from pathlib import Path

from models.net import tiny
from service.helper import WIDTH


def build():
    assert tiny().out_features == WIDTH
    assert sys.path[0] == str(Path(__file__).parent)
    assert sys.argv == [__file__]
    assert __name__ == "train"
    assert find_spec("dataset_builder") is None
    assert find_spec("tests") is None
    return tiny()


if __name__ == "__main__":
    raise SystemExit("a training loop that must not run")
