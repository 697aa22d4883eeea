"""Reads, checks and writes bundles: a trained estimator on disk, without pickle.

A bundle is a folder with three files::

    model.onnx    input  features   float32 [B, 2 F]  gpumemnet.predict.features.model_features
                         sequences  float32 [B, L, S]  transformer only: layer_sequence
                         mask       float32 [B, L]     transformer only: 1 for a token, 0 for padding
                  output weights    float32 [B, K]     mixture weights
                         locations  float32 [B, K]     component means in log-bytes
                         scales     float32 [B, K]     component scales in log-bytes
                         amounts    float32 [B, 2 + L]  log-bytes of the line over the closed form,
                                                       of the mixture's centre, and of a bound for
                                                       each calibrated coverage
    card.json     identity of the model, its training data, support, and calibration
    SHA256SUMS    checksums of both, in the format of sha256sum(1)

All amounts are above the CUDA context.  One bundle serves all job families that it learned from.

Each file is read once and checked.  The checked bytes are passed on, so a file that changes later
has no effect.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

import numpy as np

from gpumemnet.atomic_files import (
    STAGING_PREFIX,
    json_bytes,
    read_file,
    replace_file,
    sync_folder,
)
from gpumemnet.errors import BundleError, first_line
from gpumemnet.predict.bundle_card import BundleCard, parse_card
from gpumemnet.predict.features import FEATURE_NAMES, SEQUENCE_COLUMNS

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

MODEL_FILE: Final = "model.onnx"
CARD_FILE: Final = "card.json"
SUMS_FILE: Final = "SHA256SUMS"
BUNDLE_FILES: Final = frozenset({MODEL_FILE, CARD_FILE, SUMS_FILE})
MAX_FILE_BYTES: Final = 64 * 2**20
GRAPH_OUTPUTS: Final = ("weights", "locations", "scales", "amounts")


@dataclass(frozen=True)
class Bundle:
    """A checked bundle in memory.

    Attributes:
        card: the parsed card.
        files: the content of each of :data:`BUNDLE_FILES`.
        sha256: hash over both files; identifies the bundle in every answer.
        source: the folder that it was loaded from, for messages.
    """

    card: BundleCard
    files: Mapping[str, bytes]
    sha256: str
    source: str

    @property
    def model(self) -> bytes:
        """The ONNX graph, serialised."""
        return self.files[MODEL_FILE]


def load_bundle(folder: str | Path) -> Bundle:
    """Reads and checks the bundle in ``folder``.

    Raises:
        BundleError: when a file is missing or too large, a checksum differs, or the card has
            another format or feature schema.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise BundleError(f"{folder}: no such bundle folder")
    contents = {name: _read(folder / name) for name in sorted(BUNDLE_FILES)}
    sums = contents[SUMS_FILE].splitlines()
    for name in (MODEL_FILE, CARD_FILE):
        if _sum_line(name, contents[name]) not in sums:
            raise BundleError(
                f"{folder / name}: its checksum differs from {SUMS_FILE}: the file was altered or cut short"
            )
    card = parse_card(contents[CARD_FILE], folder / CARD_FILE)
    return Bundle(card, contents, hashlib.sha256(contents[SUMS_FILE]).hexdigest(), str(folder))


def load_bundles(*folders: str | Path) -> tuple[Bundle, ...]:
    """The bundles in ``folders``, or in their folders, as ``gpumemnet calibrate --out`` writes them;
    the shipped ones if no folder is given.

    Raises:
        BundleError: when there is none, or one is damaged.
    """
    if not folders:
        return shipped_bundles()
    return tuple(bundle for folder in folders for bundle in _bundles_in(Path(folder)))


def _bundles_in(folder: Path) -> tuple[Bundle, ...]:
    if not folder.is_dir() or any((folder / name).exists() for name in BUNDLE_FILES):
        return (load_bundle(folder),)
    found = tuple(
        load_bundle(entry) for entry in sorted(folder.iterdir()) if (entry / SUMS_FILE).is_file()
    )
    if not found:
        raise BundleError(
            f"{folder}: holds no bundle: neither {', '.join(sorted(BUNDLE_FILES))} nor folders with them"
        )
    return found


def save_bundle(folder: str | Path, model: bytes, document: Mapping[str, Any]) -> Bundle:
    """Writes a bundle atomically: ``folder`` then holds a complete, loadable bundle.

    Raises:
        BundleError: when the card is incomplete, or the folder exists and is not a bundle.
    """
    folder = Path(folder)
    check_replaceable(folder)
    files = {MODEL_FILE: model, CARD_FILE: json_bytes(document)}
    sums = b"".join(_sum_line(*file) + b"\n" for file in files.items())
    return write_bundle(folder, {**files, SUMS_FILE: sums})


def write_bundle(folder: Path, files: Mapping[str, bytes]) -> Bundle:
    """Writes the files of a bundle atomically, in place of the folder that is there.

    Raises:
        BundleError: when they are no bundle.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=folder.parent))
    try:
        for name, content in files.items():
            replace_file(staging / name, content)
        staging.chmod(0o755)
        load_bundle(staging)
        if folder.exists():
            retired = staging.with_name(staging.name + ".old")
            folder.rename(retired)
            staging.rename(folder)
            shutil.rmtree(retired)
        else:
            staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    sync_folder(folder.parent)
    return load_bundle(folder)


def check_replaceable(folder: Path) -> None:
    """Raises an error when ``folder`` holds anything but the files of a bundle.

    Raises:
        BundleError: names the folder.
    """
    if folder.exists() and (
        not folder.is_dir() or {entry.name for entry in folder.iterdir()} - BUNDLE_FILES
    ):
        raise BundleError(f"{folder}: exists and is no bundle; choose another folder")


def shipped_bundles() -> tuple[Bundle, ...]:
    """Loads the bundles inside the package."""
    return load_bundles(str(resources.files("gpumemnet").joinpath("bundles")))


_SESSIONS: Final = WeakValueDictionary[tuple[bytes, str, int], "InferenceSession"]()
"""Sessions in use, by graph, encoder and number of coverages: releases that follow each other have
most graphs in common."""


def load_session(bundle: Bundle) -> InferenceSession:
    """Loads the bundle's graph into onnxruntime and runs it once; predictors in one process share
    the sessions of equal graphs.

    Raises:
        BundleError: when the graph does not load or run, or has other inputs or outputs than a
            bundle's graph.
    """
    key = bundle.model, bundle.card.encoder, len(bundle.card.coverages)
    session = _SESSIONS.get(key)
    if session is None:
        session = _SESSIONS[key] = _checked_session(bundle)
    return session


def _checked_session(bundle: Bundle) -> InferenceSession:
    import onnxruntime  # takes most of an import's time, and whoever reads cards needs none of it

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = (
        1  # for graphs this small a second thread costs more than it saves
    )
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(
            bundle.model, options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # onnxruntime raises undocumented exception classes
        raise BundleError(
            f"{bundle.source}: the graph does not load ({type(error).__name__})"
        ) from None
    shapes: dict[str, tuple[int, ...]] = {"features": (1, 2 * len(FEATURE_NAMES))}
    if bundle.card.encoder == "transformer":
        shapes |= {"sequences": (1, 1, len(SEQUENCE_COLUMNS)), "mask": (1, 1)}
    try:
        given = {name: np.ones(shape, dtype=np.float32) for name, shape in shapes.items()}
        answer = session.run(GRAPH_OUTPUTS, given)
        has_numbers = all(np.isfinite(output).all() for output in answer)
    except Exception as error:
        raise BundleError(
            f"{bundle.source}: the graph does not map {', '.join(shapes)} to {', '.join(GRAPH_OUTPUTS)} ({first_line(error, 200)})"
        ) from None
    if answer[-1].shape != (1, 2 + len(bundle.card.coverages)):
        raise BundleError(
            f"{bundle.source}: the graph does not give a bound for each of the card's coverages"
        )
    if not has_numbers:
        raise BundleError(
            f"{bundle.source}: the graph gives infinity or no number where an amount should stand"
        )
    return session


def _read(path: Path) -> bytes:
    try:
        return read_file(path, MAX_FILE_BYTES)
    except OSError as error:
        raise BundleError(
            f"{path}: cannot be read ({error.strerror}): a bundle holds {MODEL_FILE}, {CARD_FILE}, {SUMS_FILE}"
        ) from None


def _sum_line(name: str, content: bytes) -> bytes:
    """The line of ``sha256sum`` for a file."""
    return f"{hashlib.sha256(content).hexdigest()}  {name}".encode()
