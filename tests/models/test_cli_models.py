"""``gpumemnet train`` and ``evaluate`` as a person runs them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpumemnet.predict.predictor import Predictor
from tests.jobs import small_job
from tests.models.conftest import FEW
from tests.nightly import nightly
from tests.sites import DATASETS

WORDS = [word for path in FEW for word in ("--dataset", str(path))]


def models(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpumemnet", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def refused(*arguments: str | Path) -> str:
    done = models(*arguments)
    assert done.returncode == 2, done.stdout
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_missing_dataset_and_an_unknown_encoder_are_refused(tmp_path: Path) -> None:
    missing = tmp_path / "none.parquet"
    assert "none.parquet does not exist" in refused("evaluate", "--dataset", missing)
    out = ("--out", tmp_path / "bundles")
    assert "must be one of mlp, transformer, not 'rnn'" in refused(
        "train", "--encoder", "rnn", *out
    )
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    said = refused("train", "--dataset", tmp_path / "x.parquet", *out)
    assert "no whole Parquet file" in said
    zoo = DATASETS / "published_real_models_a100.parquet"
    assert "holds no row to train on" in refused("train", "--dataset", zoo, *out)
    assert not (tmp_path / "bundles").exists()


@pytest.mark.parametrize("encoders", [["mlp"], *nightly([["mlp", "transformer"]])])
def test_training_gives_a_bundle_of_each_encoder(encoders: list[str], tmp_path: Path) -> None:
    asked = [word for encoder in encoders for word in ("--encoder", encoder)]
    out = ("--out", tmp_path / "mine", "--epochs", "1", "--json")
    done = models("train", *WORDS, *asked, *out)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert list(document["bundles"]) == encoders
    predictor = Predictor.load(tmp_path / "mine")
    assert [one.card.encoder for one in predictor.bundles] == encoders
    for encoder in encoders:
        estimate = predictor.predict(small_job(), encoder=encoder)
        assert estimate.estimator == encoder
        assert estimate.safe_bytes is not None
        assert estimate.safe_bytes > estimate.expected_bytes > estimate.context_bytes
