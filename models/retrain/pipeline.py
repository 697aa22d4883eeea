"""The retraining from end to end: collect, train, judge, report, release; every step's result is kept and found again.

A killed run leaves whole results or none, and the next one goes on from there.  The registry is written to at the very end: first
the bundles, then the release, then the alias, each of them whole or not at all.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from gpumemnet.bundle import Bundle, shipped_bundles
from gpumemnet.durable import locked
from gpumemnet.errors import BundleError, DatasetError
from gpumemnet.measurement import OBSERVED
from gpumemnet.registry import SHIPPED, Registry
from models.data import LabelledJobs, labelled_jobs
from models.retrain.collect import Collected, collect
from models.retrain.gate import Rule
from models.retrain.judging import judge_candidate, may_have_seen, parts_of, slot_of
from models.retrain.release import put_into_service
from models.retrain.report import write_report
from models.retrain.request import Outcome, Request, RetrainingError
from models.retrain.steps import (
    JUDGING_CODE,
    TRAINING_CODE,
    cached_bundle,
    cached_document,
    code_hash,
    code_version,
    content_hash,
)
from models.retrain.tracks import Track, calibration_track, find_tracks, training_data

Progress = Callable[[str, float], None]
RULE: Final = Rule()


def retrain(request: Request, progress: Progress = lambda what, share: None) -> Outcome:
    """Retrain as ``request`` says.

    Raises:
        DatasetError: when a file is missing, damaged or of another schema, or all of them hold nothing to learn from.
        RegistryError: when the registry is damaged or cannot be written to.
        RetrainingError: when another retraining works in the same folder, or the release could not be made.
        OSError: when the work folder cannot be written to.
    """
    request.work.mkdir(parents=True, exist_ok=True)
    with _alone(request.work):
        champion, bundles = _champion(request)
        files = [(path.name, _sha256(path)) for path in (*request.datasets, *request.observations)]
        chosen = (request.encoders, request.seed, request.epochs)
        code = (code_hash(TRAINING_CODE), code_hash(JUDGING_CODE))
        key = content_hash(files, len(request.datasets), [bundle.sha256 for bundle in bundles], chosen, code, asdict(RULE))
        folder = request.work / "runs" / key[:12]
        document, was_there = cached_document(
            folder / "report.json", lambda: _judged_tracks(request, champion, bundles, key, progress)
        )
        if was_there:
            progress("nothing has changed since this report was made", 1.0)
        report = write_report(folder / "report.md", document)
        try:
            return put_into_service(request, document, report, champion)
        except BundleError as error:  # the registry could be read before
            raise RetrainingError(str(error)) from None


def _judged_tracks(request: Request, champion: str, bundles: Sequence[Bundle], key: str, progress: Progress) -> dict[str, Any]:
    progress("reading", 0.0)
    collected = collect(request.datasets, request.observations)
    tracks, left_out = find_tracks(collected.rows, _learnt_until(bundles))
    work = _Work(request, collected, tracks, {slot_of(bundle): bundle for bundle in bundles})
    tasks = [(track, encoder) for track in tracks for encoder in request.encoders]
    found = []
    for done, (track, encoder) in enumerate(tasks):
        found.append(work.track(track, encoder, lambda what, done=done: progress(what, done / len(tasks))))  # type: ignore[misc]
    return {
        "run": key,
        "release": f"retrain-{key[:12]}",
        "champion": champion,
        "champion_bundles": [bundle.sha256 for bundle in bundles],
        "seed": request.seed,
        "epochs": request.epochs,
        "encoders": list(request.encoders),
        "code": code_version(),
        "rule": asdict(RULE),
        "files": [asdict(file) for file in collected.files],
        "refused": [asdict(refusal) for refusal in collected.refusals],
        "left_out": left_out,
        "tracks": found,
        "promoted": [track["bundle"] for track in found if track["promote"]],
    }


class _Work:
    """The tracks of one run, and the champion's bundles, in whose place better ones come as they are found."""

    def __init__(
        self, request: Request, collected: Collected, tracks: Sequence[Track], current: dict[tuple[str, str, str], Bundle]
    ) -> None:
        self.request = request
        self.folder = request.work
        self.tracks = tracks
        self.current = current
        self.file_names = {file.sha256: file.name for file in collected.files}
        self.by_origin: dict[tuple[str, str], Track] = {}
        for row in collected.rows:
            family = row.measurement.job.family
            for track in tracks:
                if track.family == family and track.provenance == row.measurement.provenance:
                    self.by_origin.setdefault((row.origin, family), track)

    def track(self, track: Track, encoder: str, progress: Callable[[str], None]) -> dict[str, Any]:
        """Train and judge the candidate of one track; what the report says of it."""
        about: dict[str, Any] = {
            "track": track.name,
            "family": track.family,
            "encoder": encoder,
            "provenance": track.provenance,
            "gpu": track.gpu,
            "label_source": track.label_source,
            "rows": {name: len(getattr(track, name)) for name in ("training", "held_out", "newest", "borrowed")},
            "promote": False,
            "bundle": None,
            "verdict": None,
        }
        champion = [bundle for slot, bundle in self.current.items() if slot[:2] == (track.family, encoder)]
        in_place = self.current.get((track.family, encoder, track.provenance))
        unseen = self._not_at_hand(in_place) if track.provenance != OBSERVED else None
        if unseen or not champion:
            return {**about, "reasons": [unseen or "the champion has no such model: put a first one into the registry by hand"]}
        try:
            candidate = self._candidate(track, encoder, progress)
        except ValueError as error:
            return {**about, "reasons": [str(error)]}
        about |= {"bundle": candidate.sha256, "model": {"name": candidate.card.name, "version": candidate.card.version}}
        about |= {
            "folder": str(Path(candidate.source).relative_to(self.folder)),
            "retraining": candidate.card.document["retraining"],
        }
        if in_place is not None and in_place.sha256 == candidate.sha256:
            return {**about, "reasons": ["the champion is this very model: nothing has changed"]}
        try:
            verdict = self._verdict(track, candidate, champion, progress)
        except ValueError as error:
            return {**about, "reasons": [str(error)]}
        if verdict["promote"]:
            self.current[slot_of(candidate)] = candidate
        return {**about, "promote": verdict["promote"], "reasons": verdict["reasons"], "verdict": verdict}

    def _not_at_hand(self, champion: Bundle | None) -> str | None:
        """Why a candidate cannot take the place of this champion, or be compared with it on the champion's own ground."""
        if champion is None:
            return None
        if champion.card.site_calibration is not None:
            return (
                f"the champion's model {champion.card.name} is calibrated to a site, which a new one would not be: retrain from "
                "the site's observations, or calibrate a new model and put it into the registry by hand"
            )
        retraining = champion.card.document.get("retraining")
        origins = retraining.get("origins", []) if isinstance(retraining, dict) else [_data_hash(champion)]
        missing = [origin for origin in origins if origin not in self.file_names]
        if not missing:
            return None
        return (
            f"the champion's model {champion.card.name} learnt from a dataset that is not among the files (sha256 "
            f"{missing[0][:12]}…): without it nobody can say what a new model has forgotten; give it with --dataset"
        )

    def _candidate(self, track: Track, encoder: str, progress: Callable[[str], None]) -> Bundle:
        calibration = calibration_track(track, self.tracks)
        rows = [[row.key for row in part] for part in (track.training, track.borrowed)]
        key = content_hash(
            *(code_hash(TRAINING_CODE), track.name, track.label_source, encoder, self.request.seed, self.request.epochs, rows),
            calibration and [row.key for row in calibration.training],
        )
        what = f"{track.name}, {encoder}"

        def train(folder: Path) -> Bundle:
            data = training_data(track)
            progress(f"training {what}")
            from models.retrain.training import train_candidate  # loads torch

            return train_candidate(
                folder,
                track,
                data,
                _readings(calibration),
                encoder=encoder,
                seed=self.request.seed,
                epochs=self.request.epochs,
                version=key[:12],
            )

        bundle, was_there = cached_bundle(self.folder / "candidates" / key, train)
        if was_there:
            progress(f"trained before: {what}")
        return bundle

    def _verdict(
        self, track: Track, candidate: Bundle, champion: Sequence[Bundle], progress: Callable[[str], None]
    ) -> dict[str, Any]:
        shifts = candidate.card.document["retraining"]["moved_bytes"]
        parts = parts_of(track, self.tracks, shifts, self.file_names, RULE)
        key = content_hash(
            *(code_hash(JUDGING_CODE), code_hash(TRAINING_CODE), candidate.sha256, sorted(bundle.sha256 for bundle in champion)),
            [[part.name, part.gpu, [[row.key, row.measurement.label_bytes] for row in part.rows]] for part in parts],
            asdict(RULE),
        )

        def make() -> dict[str, Any]:
            progress(f"judging {track.name}, {candidate.card.encoder}")
            stand_in = lambda bundle: self._stand_in(bundle, progress)  # noqa: E731
            return judge_candidate(candidate, champion, parts, self._learnt, stand_in, RULE).document()

        return cached_document(self.folder / "verdicts" / f"{key}.json", make)[0]

    def _learnt(self, champion: Bundle) -> frozenset[str]:
        """The held-out architectures that a bundle of the champion has learnt from all the same."""
        if not may_have_seen(champion):
            return frozenset()
        origin = _data_hash(champion)
        if origin not in self.file_names and self._is_of_its_kind(champion):
            raise ValueError(
                f"the champion's model {champion.card.name} learnt from a dataset that is not among the files (sha256 "
                f"{origin[:12]}…), and may know the held-out architectures by heart: give it with --dataset"
            )
        held_out = (row for track in self.tracks if track.family == champion.card.family for row in track.held_out)
        return frozenset(row.measurement.architecture_key for row in held_out if row.origin == origin)

    def _is_of_its_kind(self, champion: Bundle) -> bool:
        """Whether a track holds rows of the kind that the bundle learnt from; of no other kind can it know any."""
        family, _, provenance = slot_of(champion)
        return any((track.family, track.provenance) == (family, provenance) for track in self.tracks)

    def _stand_in(self, champion: Bundle, progress: Callable[[str], None]) -> Bundle:
        """The champion's plan, trained again without the held-out architectures."""
        origin = _data_hash(champion)
        track = self.by_origin.get((origin, champion.card.family))
        rows = [row for row in track.training if row.origin == origin] if track else []
        if track is None or not rows:
            raise ValueError(f"too few rows of {self.file_names.get(origin, origin)} to train a stand-in of {champion.card.name}")
        calibration = calibration_track(track, self.tracks)
        key = content_hash(code_hash(TRAINING_CODE), "stand-in", champion.sha256, [row.key for row in rows])

        def train(folder: Path) -> Bundle:
            progress(f"training a stand-in of {champion.card.name}")
            from models.retrain.training import train_stand_in

            return train_stand_in(folder, champion, [row.measurement for row in rows], _readings(calibration))

        return cached_bundle(self.folder / "stand-ins" / key, train)[0]


def _champion(request: Request) -> tuple[str, tuple[Bundle, ...]]:
    if request.registry is None:
        return SHIPPED, shipped_bundles()
    registry = Registry(request.registry)
    name = registry.aliases().champion
    return name, registry.load(name)


def _readings(track: Track | None) -> LabelledJobs | None:
    return labelled_jobs([row.measurement for row in track.training], track.name, "") if track else None


def _learnt_until(bundles: Sequence[Bundle]) -> dict[str, float]:
    """Family → time of the newest observation that one of the champion's bundles has learnt from."""
    until: dict[str, float] = {}
    for bundle in bundles:
        retraining = bundle.card.document.get("retraining")
        learnt = retraining.get("learnt_until") if isinstance(retraining, dict) and not may_have_seen(bundle) else None
        if isinstance(learnt, int | float):
            until[bundle.card.family] = max(until.get(bundle.card.family, learnt), learnt)
    return until


def _data_hash(bundle: Bundle) -> str:
    return str(bundle.card.document["training_data"].get("sha256"))


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except FileNotFoundError:
        raise DatasetError(f"{path} does not exist") from None
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}") from None


@contextmanager
def _alone(work: Path) -> Iterator[None]:
    """Hold the work folder; what a killed run has left unfinished is swept away."""
    try:
        with locked(work / ".lock", 0.0):
            for name in ("candidates", "stand-ins"):
                for left in (work / name).glob(".*"):
                    shutil.rmtree(left, ignore_errors=True)
            for left in (*work.glob("verdicts/.staging-*"), *work.glob("runs/*/.staging-*")):
                left.unlink(missing_ok=True)
            yield
    except TimeoutError:
        raise RetrainingError(f"another retraining works in {work}: wait for it, or give another --work") from None
