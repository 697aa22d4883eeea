"""Bundles: what is written is read back, and whatever is altered, foreign or from another version
is refused in a sentence."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumemnet.errors import BundleError
from gpumemnet.predict.bundle import (
    CARD_FILE,
    MODEL_FILE,
    SUMS_FILE,
    load_bundle,
    save_bundle,
    shipped_bundles,
)
from gpumemnet.predict.predictor import Predictor

ONE = next(bundle for bundle in shipped_bundles() if bundle.card.name == "mlp")
SHIPPED = Path(ONE.source)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SHIPPED, tmp_path / "bundle"))


def rewrite_card(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((folder / CARD_FILE).read_text())
    change(document)
    card = json.dumps(document).encode()
    (folder / CARD_FILE).write_bytes(card)
    sums = "".join(
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n"
        for name in (MODEL_FILE, CARD_FILE)
    )
    (folder / SUMS_FILE).write_text(sums)


def test_shipped_bundles_are_small_and_say_where_they_come_from() -> None:
    for bundle in shipped_bundles():
        assert len(bundle.model) < 2**20
        data = bundle.card.document["training_data"]
        assert data["licence"]
        assert data["rows"] > 0
        assert bundle.card.document["limits"]
        assert b"/" + b"work/" not in bundle.model


def test_saved_is_loaded(tmp_path: Path) -> None:
    original = ONE
    saved = save_bundle(tmp_path / "deep" / "copy", original.model, original.card.document)
    assert saved.card == original.card
    assert saved.model == original.model
    again = save_bundle(
        tmp_path / "deep" / "copy", original.model, {**original.card.document, "version": "next"}
    )
    assert load_bundle(tmp_path / "deep" / "copy").sha256 == again.sha256 != saved.sha256
    assert [entry.name for entry in (tmp_path / "deep").iterdir()] == ["copy"]


def test_an_incomplete_card_is_never_written(tmp_path: Path) -> None:
    original = ONE
    document = {name: value for name, value in original.card.document.items() if name != "support"}
    with pytest.raises(BundleError, match="incomplete card"):
        save_bundle(tmp_path / "copy", original.model, document)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_bundle_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    (tmp_path / SUMS_FILE).write_text("of something else")
    original = ONE
    with pytest.raises(BundleError, match="exists and is no bundle"):
        save_bundle(tmp_path, original.model, original.card.document)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize("name", [MODEL_FILE, CARD_FILE, SUMS_FILE])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(BundleError, match=name):
        load_bundle(folder)


@settings(max_examples=60)
@given(
    st.sampled_from([MODEL_FILE, CARD_FILE]), st.floats(0, 1, exclude_max=True), st.integers(1, 255)
)
def test_one_altered_byte_is_found(
    tmp_path_factory: pytest.TempPathFactory, name: str, where: float, change: int
) -> None:
    folder = Path(shutil.copytree(SHIPPED, tmp_path_factory.mktemp("bundle") / "copy"))
    content = bytearray((folder / name).read_bytes())
    content[int(where * len(content))] ^= change
    (folder / name).write_bytes(content)
    with pytest.raises(BundleError, match="checksum differs"):
        load_bundle(folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda card: card.update(format_version=99), "upgrade gpumemnet"),
        (lambda card: card.pop("format_version"), "no card of a gpumemnet bundle"),
        (lambda card: card.update(feature_schema="0" * 12), "train the bundle again"),
        (lambda card: card.update(families=["rnn"]), "unknown family"),
        (lambda card: card.pop("conformal"), "incomplete card"),
        (lambda card: card.update(encoder="recurrent"), "unknown encoder"),
        (lambda card: card.update(training_data=[]), "incomplete card"),
        (
            lambda card: card["support"]["ranges"].update(flavour=[1, 2]),
            "unknown feature column 'flavour'",
        ),
    ],
)
def test_a_card_that_does_not_fit_is_refused(
    folder: Path, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    rewrite_card(folder, change)
    with pytest.raises(BundleError, match=says):
        load_bundle(folder)


def test_a_graph_that_is_none_is_refused(folder: Path) -> None:
    (folder / MODEL_FILE).write_bytes(b"not a graph")
    rewrite_card(folder, lambda card: None)
    with pytest.raises(BundleError, match="the graph does not load"):
        Predictor.load(folder)


def test_a_card_with_fewer_coverages_than_the_graph_is_refused(folder: Path) -> None:
    def fewer(card: dict[str, Any]) -> None:
        card["conformal"].update(coverages=[0.9, 0.99])
        card["traced_peaks"] = {}
        card["conformal"]["widenings"] = [0.0, 0.1]

    rewrite_card(folder, fewer)
    with pytest.raises(BundleError, match="a bound for each of the card's coverages"):
        Predictor.load(folder)


def test_no_folder_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no such bundle folder"):
        load_bundle(tmp_path / "nowhere")
