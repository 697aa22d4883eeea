"""Runs a retraining from end to end: collect, train and judge one candidate after another, report,
release.  The result of each
step is stored and reused.

A killed run leaves complete results or none, and the next run continues from there.  The registry
is written last: first the bundles, then the release, then the alias, each atomically.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from gpumemnet.atomic_files import STAGING_PREFIX, locked
from gpumemnet.errors import BundleError, DatasetError
from gpumemnet.job.measurement import OBSERVED
from gpumemnet.predict.bundle import Bundle, load_bundle, shipped_bundles
from gpumemnet.site.releases import SHIPPED, Registry

from ..training.data import LabelledJobs, labelled_jobs
from .collect import Collected, Row, collect
from .gate import RULE
from .judging import (
    dataset_hashes,
    judge_candidate,
    known_held_out_architectures,
    missing_comparison_data,
    newest_training_observation,
    parts_of,
    slot_of,
    without_answer,
)
from .release import Outcome, Request, RetrainingError, put_into_service, write_report
from .row_splits import RowSplit, calibration_split, split_rows, too_few, training_data
from .step_cache import cached_bundle, cached_document, code_hash, code_version, content_hash

NOTHING_NEW: Final = "not trained: the champion was trained on these data, and the observations are too few to learn from"

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
        hashes = {path: _sha256(path) for path in (*request.datasets, *request.observations)}
        files = [(path.name, sha256) for path, sha256 in hashes.items()]
        chosen = (request.encoders, request.seed, request.epochs)
        key = content_hash(
            *(
                files,
                len(request.datasets),
                [bundle.sha256 for bundle in bundles],
                chosen,
                code_hash(),
                asdict(RULE),
            )
        )
        # the champion's training data comes first: of contradicting files the later one is refused
        known = {origin for bundle in bundles for origin in dataset_hashes(bundle)}
        datasets = sorted(request.datasets, key=lambda path: hashes[path] not in known)
        folder = request.work / "runs" / key[:12]
        document, is_cached = cached_document(
            folder / "report.json",
            lambda: _judged_candidates(
                request, datasets, set(hashes.values()), bundles, key, progress
            ),
            lambda found: _promoted_bundles_exist(request.work, found),
        )
        document["champion"] = champion  # the same models may have another name now
        if is_cached:
            progress("nothing has changed since this report was made", 1.0)
        report = write_report(folder / "report.md", document)
        try:
            return put_into_service(request, document, report, champion)
        except BundleError as error:  # the registry could be read before
            raise RetrainingError(str(error)) from None


def _judged_candidates(
    request: Request,
    datasets: Sequence[Path],
    hashes: Collection[str],
    bundles: Sequence[Bundle],
    key: str,
    progress: Progress,
) -> dict[str, Any]:
    share = 0.0

    def report_step(step: str) -> None:
        progress(step, share)

    report_step("reading")
    collected = collect(datasets, request.observations)
    if changed := [file.name for file in collected.files if file.sha256 not in hashes]:
        raise RetrainingError(f"{changed[0]} was changed while it was read")
    splits, left_out = split_rows(collected.rows, newest_training_observation(bundles))
    runner = CandidateRunner(request, collected, splits, bundles, report_step)
    tasks = [(split, encoder) for split in splits for encoder in request.encoders]
    missing = _missing_observations(
        request, splits, bundles, [file.sha256 for file in collected.files]
    )
    entries = []
    for done, (split, encoder) in enumerate(tasks):
        share = done / len(tasks)
        entries.append(runner.run(split, encoder, NOTHING_NEW if missing else None))
    return {
        "run": key,
        "release": f"retrain-{key[:12]}",
        "champion_bundles": [bundle.sha256 for bundle in bundles],
        "seed": request.seed,
        "epochs": request.epochs,
        "encoders": list(request.encoders),
        "code": code_version(),
        "rule": asdict(RULE),
        "files": [asdict(file) for file in collected.files],
        "refused": [asdict(refusal) for refusal in collected.refusals],
        "left_out": left_out,
        "missing": missing,
        "candidates": entries,
        "promoted": [entry["bundle"] for entry in entries if entry["promote"]],
    }


def _missing_observations(
    request: Request, splits: Sequence[RowSplit], champion: Sequence[Bundle], files: Sequence[str]
) -> list[str]:
    """Why nothing can be learned from the observations, when the champion knows all other files;
    empty when there is something.

    Without this, a site's first few observations would cost minutes of training on data that the
    champion was trained on.
    """
    known = {origin for bundle in champion for origin in dataset_hashes(bundle)}
    observed = [split for split in splits if split.provenance == OBSERVED]
    obstacles = {split.name: too_few(split) for split in observed}
    if not request.observations or None in obstacles.values():
        return []
    own = {
        row.origin
        for split in observed
        for row in (*split.training, *split.held_out, *split.newest)
    }
    if any(sha256 not in known | own for sha256 in files):
        return []
    return [f"{name}: {obstacle}" for name, obstacle in obstacles.items()]


def _promoted_bundles_exist(work: Path, document: dict[str, Any]) -> bool:
    """Whether the bundles that a report would promote still exist."""
    try:
        return all(
            load_bundle(work / entry["folder"]).sha256 == entry["bundle"]
            for entry in document["candidates"]
            if entry["promote"]
        )
    except (BundleError, LookupError, TypeError):
        return False


def _champion(request: Request) -> tuple[str, tuple[Bundle, ...]]:
    if request.registry is None:
        return SHIPPED, shipped_bundles()
    registry = Registry(request.registry)
    name = registry.aliases().champion
    return name, registry.load(name)


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except FileNotFoundError:
        raise DatasetError(f"{path} does not exist") from None
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}") from None


@contextmanager
def _locked_work_folder(work: Path) -> Iterator[None]:
    """Lock the work folder, and delete unfinished files of a killed run."""
    try:
        with locked(work / ".lock", 0.0):
            for name in ("candidates", "stand-ins"):
                for unfinished in (work / name).glob(".*"):
                    shutil.rmtree(unfinished, ignore_errors=True)
            for pattern in ("verdicts", "runs/*"):
                for unfinished in work.glob(f"{pattern}/{STAGING_PREFIX}*"):
                    unfinished.unlink(missing_ok=True)
            yield
    except TimeoutError:
        raise RetrainingError(
            f"another retraining is using {work}: wait for it, or give another --work"
        ) from None


class CandidateRunner:
    """The splits of one run, and the current bundles: the champion's, or those that have replaced
    them in this run."""

    def __init__(
        self,
        request: Request,
        collected: Collected,
        splits: Sequence[RowSplit],
        champion: Sequence[Bundle],
        say: Callable[[str], None],
    ) -> None:
        self._request = request
        self._folder = request.work
        self._splits = splits
        self._current = {slot_of(bundle): bundle for bundle in champion}
        self._file_names = {file.sha256: file.name for file in collected.files}
        self._say = say

    def run(self, split: RowSplit, encoder: str, nothing_new: str | None = None) -> dict[str, Any]:
        """Train and judge the candidate of one split; returns its entry in the report.

        Args:
            split, encoder: of the candidate.
            nothing_new: why no split needs training in this run.
        """
        entry: dict[str, Any] = {
            "name": split.name,
            "family": split.family,
            "encoder": encoder,
            "provenance": split.provenance,
            "gpu": split.gpu,
            "label_source": split.label_source,
            "rows": {
                name: len(getattr(split, name))
                for name in ("training", "held_out", "newest", "borrowed")
            },
            "promote": False,
            "bundle": None,
            "verdict": None,
        }
        champion = [
            bundle for slot, bundle in self._current.items() if slot[:2] == (split.family, encoder)
        ]
        obstacle = too_few(split) or nothing_new
        if obstacle is None and not champion:
            obstacle = "the champion has no model for these jobs: put a first one into the registry by hand"
        obstacle = obstacle or missing_comparison_data(
            split, champion, self._splits, self._file_names, RULE.fewest_guard_rows
        )
        if obstacle:
            return {**entry, "reasons": [obstacle]}
        try:
            candidate = self._candidate(split, encoder)
        except ValueError as error:
            return {**entry, "reasons": [str(error)]}
        entry |= {
            "bundle": candidate.sha256,
            "model": {"name": candidate.card.name, "version": candidate.card.version},
        }
        entry |= {
            "folder": str(Path(candidate.source).relative_to(self._folder)),
            "retraining": candidate.card.document["retraining"],
        }
        if any(bundle.sha256 == candidate.sha256 for bundle in champion):
            return {**entry, "reasons": ["the champion is this same model: nothing has changed"]}
        try:
            verdict = self._verdict(split, candidate, champion)
        except ValueError as error:
            return {**entry, "reasons": [str(error)]}
        if verdict["promote"]:
            self._current[slot_of(candidate)] = candidate
        return {
            **entry,
            "promote": verdict["promote"],
            "reasons": verdict["reasons"],
            "verdict": verdict,
        }

    def _candidate(self, split: RowSplit, encoder: str) -> Bundle:
        calibration = calibration_split(split, self._splits)
        key = content_hash(
            *(
                code_hash(),
                split.name,
                split.label_source,
                encoder,
                self._request.seed,
                self._request.epochs,
            ),
            *([row.key for row in part] for part in (split.training, split.borrowed)),
            *(
                split.origins,
                calibration and [row.key for row in calibration.training],
            ),
        )
        description = f"{split.name}, {encoder}"

        def train(folder: Path) -> Bundle:
            data = training_data(split)
            self._say(f"training {description}")
            from .training import train_candidate  # loads torch

            return train_candidate(
                folder,
                split,
                data,
                _labelled_rows(calibration),
                encoder=encoder,
                seed=self._request.seed,
                epochs=self._request.epochs,
                version=key[:12],
            )

        bundle, is_cached = cached_bundle(self._folder / "candidates" / key, train)
        if is_cached:
            self._say(f"trained before: {description}")
        return bundle

    def _verdict(
        self, split: RowSplit, candidate: Bundle, champion: Sequence[Bundle]
    ) -> dict[str, Any]:
        parts = parts_of(
            split,
            self._splits,
            candidate.card.document["retraining"]["moved_bytes"],
            self._file_names,
            RULE,
        )
        known = {
            bundle.sha256: known_held_out_architectures(bundle, self._splits) for bundle in champion
        }
        key = content_hash(
            *(code_hash(), candidate.sha256, asdict(RULE)),
            sorted([sha256, sorted(keys)] for sha256, keys in known.items()),
            [self._stand_in_key(bundle) for bundle in champion if known[bundle.sha256]],
            [
                [part.name, part.gpu, [[row.key, row.measurement.label_bytes] for row in part.rows]]
                for part in parts
            ],
        )

        def make() -> dict[str, Any]:
            self._say(f"judging {split.name}, {candidate.card.encoder}")
            if count := without_answer(candidate, split):
                raise ValueError(f"its answer is no finite number for {count} of the jobs")
            return judge_candidate(
                candidate,
                champion,
                parts,
                lambda bundle: known[bundle.sha256],
                self._stand_in,
                RULE,
            ).document()

        return cached_document(self._folder / "verdicts" / f"{key}.json", make)[0]

    def _stand_in(self, champion: Bundle) -> Bundle:
        """The champion's plan, trained again without the held-out architectures."""
        rows = self._training_rows(champion)
        if not rows:
            raise ValueError(f"no row is left to train a stand-in of {champion.card.name}")

        def train(folder: Path) -> Bundle:
            self._say(f"training a stand-in of {champion.card.name}")
            from .training import train_stand_in

            measurements = [row.measurement for row in rows]
            return train_stand_in(
                folder, champion, measurements, _labelled_rows(self._calibration_of(champion))
            )

        return cached_bundle(self._folder / "stand-ins" / self._stand_in_key(champion), train)[0]

    def _stand_in_key(self, champion: Bundle) -> str:
        calibration = self._calibration_of(champion)
        keys = [
            [row.key for row in rows]
            for rows in (self._training_rows(champion), calibration.training if calibration else ())
        ]
        return content_hash(code_hash(), "stand-in", champion.sha256, keys)

    def _training_rows(self, champion: Bundle) -> list[Row]:
        """The champion's training rows, without the held-out ones."""
        known = dataset_hashes(champion)
        return [
            row
            for split in self._own_splits(champion)
            for row in split.training
            if row.origin in known
        ]

    def _own_splits(self, champion: Bundle) -> list[RowSplit]:
        family, _, provenance = slot_of(champion)
        return [
            split
            for split in self._splits
            if (split.family, split.provenance) == (family, provenance)
        ]

    def _calibration_of(self, champion: Bundle) -> RowSplit | None:
        return next(
            (calibration_split(split, self._splits) for split in self._own_splits(champion)), None
        )


def _labelled_rows(split: RowSplit | None) -> LabelledJobs | None:
    return labelled_jobs([row.measurement for row in split.training], split.name) if split else None
