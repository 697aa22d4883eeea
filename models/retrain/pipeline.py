"""Runs a retraining from end to end: collect, train a bundle of each encoder, judge them as one
release, report, put into service.

Trained bundles and the report are stored under the hash of everything that they depend on, and
reused.  A killed run leaves complete results or none, and the next run continues from there.  The
registry is written last: first the bundles, then the release, then the alias, each atomically.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import version
from math import ceil
from pathlib import Path
from typing import Any, Final

import numpy as np

from gpumemnet.atomic_files import Document, json_bytes, locked, remove_staging, replace_file
from gpumemnet.errors import BundleError, DatasetError
from gpumemnet.job.job_files import file_sha256
from gpumemnet.predict.bundle import Bundle, load_bundle, shipped_bundles
from gpumemnet.predict.features import FEATURE_SCHEMA
from gpumemnet.site.releases import SHIPPED, Registry

from ..training.data import LabelledJobs
from .collect import HELD_OUT_RULE, HELD_OUT_SHARE, NEWEST_SHARE, Collected, collect
from .gate import RULE, judge
from .judging import (
    dataset_hashes,
    judged_parts,
    known_files,
    may_know_held_out,
    missing_comparison_data,
    newest_training_observation,
)
from .release import Outcome, Request, RetrainingError, put_into_service

FEWEST_ROWS: Final = 120
"""Fewest training rows of a candidate; a bound at 99 % needs 99."""
FEWEST_OBSERVED_ROWS: Final = 20
"""Fewest observed rows to train on that are worth a training where nothing else is new."""

Progress = Callable[[str, float], None]


def retrain(request: Request, progress: Progress = lambda what, share: None) -> Outcome:
    """Run the retraining that ``request`` describes.

    Raises:
        DatasetError: when a file is missing, damaged or of another schema, or all of them hold
            nothing to learn from.
        RegistryError: when the registry is damaged.
        RetrainingError: when another retraining uses the folder, a file changes meanwhile, or the
            release cannot be made.
        OSError: when the work folder cannot be written to.
    """
    request.work.mkdir(parents=True, exist_ok=True)
    with _locked_work_folder(request.work):
        champion, bundles = _champion(request)
        hashes = {path: file_sha256(path) for path in (*request.datasets, *request.observations)}
        files = [(path.name, sha256) for path, sha256 in hashes.items()]
        chosen = (len(request.datasets), request.encoders, request.seed, request.epochs)
        champion_hashes = [bundle.sha256 for bundle in bundles]
        key = content_hash(files, champion_hashes, chosen, code_hash(), asdict(RULE))
        report = request.work / "runs" / key[:12] / "report.json"
        document = _finished_report(report, request.work)
        if document is None:
            made = _Retraining(request, bundles, hashes, key, progress).document()
            document = {"champion": champion, **made}
            report.parent.mkdir(parents=True, exist_ok=True)
            replace_file(report, json_bytes(document))
        else:
            progress("nothing has changed since this report was made", 1.0)
        document["champion"] = champion  # the same models may have another name now
        try:
            return put_into_service(request, document, report, champion)
        except BundleError as error:  # the registry could be read before
            raise RetrainingError(str(error)) from None


class _Retraining:
    """One retraining: its rows, and the champion's bundles of the encoders that are trained."""

    def __init__(
        self,
        request: Request,
        champion: Sequence[Bundle],
        hashes: dict[Path, str],
        key: str,
        progress: Progress,
    ) -> None:
        self._request = request
        self._champion = champion
        self._key = key
        self._progress = progress
        progress("reading", 0.0)
        # the champion's training data comes first: of contradicting files the later one is refused
        known = {sha256 for bundle in champion for sha256 in dataset_hashes(bundle)}
        datasets = sorted(request.datasets, key=lambda path: hashes[path] not in known)
        self._rows = collect(datasets, request.observations, newest_training_observation(champion))
        for file in self._rows.files:
            if file.sha256 not in hashes.values():
                raise RetrainingError(f"{file.name} was changed while it was read")

    def document(self) -> Document:
        """The report as data: what was trained, and the verdict."""
        request, rows = self._request, self._rows
        replaced = [one for one in self._champion if one.card.encoder in request.encoders]
        hashes = [file.sha256 for file in rows.files]
        obstacle = (
            _too_few(rows)
            or _nothing_new(rows, replaced)
            or missing_comparison_data(replaced, rows, hashes)
        )
        if not replaced:
            obstacle = "the champion has no model of this encoder: put a first one into the registry by hand"
        candidates: list[Bundle] = []
        verdict: Document = {"promote": False, "reasons": [obstacle], "parts": []}
        if obstacle is None:
            try:
                candidates = [self._candidate(bundle.card.encoder) for bundle in replaced]
                verdict = self._verdict(candidates)
            except (DatasetError, ValueError) as error:
                verdict |= {"reasons": [str(error)]}
        return {
            "run": self._key,
            "release": f"retrain-{self._key[:12]}",
            "champion_bundles": [bundle.sha256 for bundle in self._champion],
            "seed": request.seed,
            "epochs": request.epochs,
            "encoders": list(request.encoders),
            "code": {
                "gpumemnet": version("gpumemnet"),
                "sha256": code_hash(),
                "packages": {name: version(name) for name in _PACKAGES},
            },
            "rule": asdict(RULE),
            "files": [asdict(file) for file in rows.files],
            "refused": [asdict(refusal) for refusal in rows.refusals],
            "rows": {
                "training": int(rows.is_training.sum()),
                "held_out": int(rows.is_held_out.sum()),
                "newest": int(rows.is_newest.sum()),
            },
            "candidates": [
                {
                    "name": one.card.name,
                    "version": one.card.version,
                    "encoder": one.card.encoder,
                    "bundle": one.sha256,
                    "folder": str(Path(one.source).relative_to(request.work)),
                }
                for one in candidates
            ],
            "is_trained": bool(candidates),
            **verdict,
        }

    def _verdict(self, candidates: Sequence[Bundle]) -> Document:
        encoders = [one.card.encoder for one in candidates]
        if {one.sha256 for one in candidates} <= {one.sha256 for one in self._champion}:
            reason = "the champion is this same model: nothing has changed"
            return {"promote": False, "reasons": [reason], "parts": []}
        others = [one for one in self._champion if one.card.encoder not in encoders]
        parts = []
        for encoder in encoders:
            self._progress(f"judging {encoder}", 0.9)
            parts += judged_parts(
                [*others, *candidates], encoder, self._champion, self._stand_ins, self._rows
            )
        return asdict(judge(parts))

    def _candidate(self, encoder: str) -> Bundle:
        rows = self._rows
        observed = {*rows.data.sources[rows.is_observed].tolist()}
        datasets = [sha256 for name, sha256 in rows.data.files.items() if name not in observed]
        record = {
            "held_out": HELD_OUT_RULE,
            "datasets": datasets,
            "learned_until": rows.learned_until,
        }
        data = rows.data.take(rows.is_training)
        request = self._request
        return self._trained("candidates", data, encoder, request.seed, request.epochs, record)

    def _stand_ins(self) -> list[Bundle]:
        """The champion's bundles, those that know held-out architectures trained again without
        them."""
        rows = self._rows
        found = []
        for bundle in self._champion:
            if bundle.card.encoder in self._request.encoders and may_know_held_out(bundle):
                known = known_files([bundle], rows.data)
                is_own = np.isin(rows.data.sources, known)
                data = rows.data.take(is_own & rows.is_training)
                # files that the champion does not know are no part of the stand-in's key
                data = replace(data, files={name: rows.data.files[name] for name in known})
                plan = bundle.card.document["training"]
                settings = (bundle.card.encoder, plan["seed"], plan["epochs"])
                bundle = self._trained("stand-ins", data, *settings, {"held_out": HELD_OUT_RULE})
            found.append(bundle)
        return found

    def _trained(
        self,
        kind: str,
        data: LabelledJobs,
        encoder: str,
        seed: int,
        epochs: int | None,
        record: Document,
    ) -> Bundle:
        """The bundle that ``gpumemnet train`` makes of ``data``, with the record of the retraining
        in its card; trained once."""
        key = content_hash(
            *(code_hash(), data.files, encoder, seed, epochs, record),
            *(
                hashlib.sha256(part.tobytes()).hexdigest()
                for part in (data.features, data.label_bytes)
            ),
        )
        folder = self._request.work / kind / key
        with_name = f"{encoder}{' of the champion' * (kind == 'stand-ins')}"
        try:
            found = load_bundle(folder)
            self._progress(f"trained before: {with_name}", 0.5)
            return found
        except BundleError:
            pass
        from ..training.card import save_classifier
        from ..training.classifier import plan_of, train  # loads torch

        step = f"training {with_name}"
        trained = train(
            data, plan_of(encoder, seed, epochs), lambda share: self._progress(step, share)
        )
        folder.parent.mkdir(parents=True, exist_ok=True)
        return save_classifier(
            folder, trained, data, name=encoder, version=key[:12], retraining=record
        )


def _too_few(rows: Collected) -> str | None:
    count = int((rows.is_training & rows.data.is_measured).sum())
    if count >= FEWEST_ROWS:
        return None
    return f"{count} rows to train on are too few: {FEWEST_ROWS} are needed"


def _nothing_new(rows: Collected, champion: Sequence[Bundle]) -> str | None:
    """Why nothing can be learned from the observations, when the champion knows all other files.

    Without this, a site's first few observations would cost minutes of training on data that the
    champion was trained on.
    """
    count = int((rows.is_training & rows.is_observed & rows.data.is_measured).sum())
    datasets = {*rows.data.sources[~rows.is_observed].tolist()}
    if (
        not rows.is_observed.any()
        or count >= FEWEST_OBSERVED_ROWS
        or not datasets <= {*known_files(champion, rows.data)}
    ):
        return None
    missing = ceil((FEWEST_OBSERVED_ROWS - count) / (1 - HELD_OUT_SHARE) / (1 - NEWEST_SHARE))
    return (
        f"{count} observed rows to train on are too few: {FEWEST_OBSERVED_ROWS} are needed, which takes some {missing} "
        "observations more, as a part of them is for judging only; the champion was trained on all other files"
    )


def _finished_report(path: Path, work: Path) -> Document | None:
    """The report of an earlier run, if the bundles that it would promote still exist."""
    try:
        document: Document = json.loads(path.read_bytes())
        if not document["promote"] or all(
            load_bundle(work / entry["folder"]).sha256 == entry["bundle"]
            for entry in document["candidates"]
        ):
            return document
    except (OSError, ValueError, BundleError, LookupError, TypeError):
        pass
    return None


def _champion(request: Request) -> tuple[str, tuple[Bundle, ...]]:
    if request.registry is None:
        return SHIPPED, shipped_bundles()
    registry = Registry(request.registry)
    name = registry.aliases().champion
    return name, registry.load(name)


@contextmanager
def _locked_work_folder(work: Path) -> Iterator[None]:
    """Lock the work folder, and delete unfinished files of a killed run."""
    busy = f"another retraining is using {work}: wait for it, or give another --work"
    with locked(work / ".lock", 0.0, RetrainingError(busy)):
        remove_staging(work / "candidates", work / "stand-ins", *work.glob("runs/*"))
        yield


# What results depend on.

ROOT: Final = Path(__file__).resolve().parents[__name__.count(".")]
"""The folder that holds our packages."""
_PACKAGES: Final = ("torch", "numpy", "scikit-learn", "onnx", "onnxscript", "onnxruntime", "scipy")


def content_hash(*parts: Any) -> str:
    """Hash of JSON-ready values."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def code_hash() -> str:
    """Hash of the code that trains and judges, of the JSON beside it, and of the packages'
    versions."""
    paths = sorted(
        path
        for package in ("gpumemnet", "models")
        for ending in ("*.py", "*.json")
        for path in (ROOT / package).rglob(ending)
        if "bundles" not in path.parts
    )
    sources = [[str(path.relative_to(ROOT)), file_sha256(path)] for path in paths]
    return content_hash(sources, {name: version(name) for name in _PACKAGES}, FEATURE_SCHEMA)
