"""Runs a retraining from end to end: collect, train, judge, report, release.  The result of each
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

from .collect import collect
from .gate import RULE
from .judging import dataset_hashes, newest_training_observation
from .release import Outcome, Request, RetrainingError, put_into_service, write_report
from .steps import JUDGING_CODE, cached_document, code_hash, code_version, content_hash
from .track_runs import TrackRunner
from .tracks import Track, find_tracks, too_few

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
                code_hash(JUDGING_CODE),
                asdict(RULE),
            )
        )
        # the champion's training data comes first: of contradicting files the later one is refused
        known = {origin for bundle in bundles for origin in dataset_hashes(bundle)}
        datasets = sorted(request.datasets, key=lambda path: hashes[path] not in known)
        folder = request.work / "runs" / key[:12]
        document, is_cached = cached_document(
            folder / "report.json",
            lambda: _judged_tracks(request, datasets, set(hashes.values()), bundles, key, progress),
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


def _judged_tracks(
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
    tracks, left_out = find_tracks(collected.rows, newest_training_observation(bundles))
    runner = TrackRunner(request, collected, tracks, bundles, report_step)
    tasks = [(track, encoder) for track in tracks for encoder in request.encoders]
    missing = _missing_observations(
        request, tracks, bundles, [file.sha256 for file in collected.files]
    )
    entries = []
    for done, (track, encoder) in enumerate(tasks):
        share = done / len(tasks)
        entries.append(runner.run(track, encoder, NOTHING_NEW if missing else None))
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
        "tracks": entries,
        "promoted": [track["bundle"] for track in entries if track["promote"]],
    }


def _missing_observations(
    request: Request, tracks: Sequence[Track], champion: Sequence[Bundle], files: Sequence[str]
) -> list[str]:
    """Why nothing can be learned from the observations, when the champion knows all other files;
    empty when there is something.

    Without this, a site's first few observations would cost minutes of training on data that the
    champion was trained on.
    """
    known = {origin for bundle in champion for origin in dataset_hashes(bundle)}
    observed = [track for track in tracks if track.provenance == OBSERVED]
    obstacles = {track.name: too_few(track) for track in observed}
    if not request.observations or None in obstacles.values():
        return []
    own = {
        row.origin
        for track in observed
        for row in (*track.training, *track.held_out, *track.newest)
    }
    if any(sha256 not in known | own for sha256 in files):
        return []
    return [f"{name}: {obstacle}" for name, obstacle in obstacles.items()]


def _promoted_bundles_exist(work: Path, document: dict[str, Any]) -> bool:
    """Whether the bundles that a report would promote still exist."""
    try:
        return all(
            load_bundle(work / track["folder"]).sha256 == track["bundle"]
            for track in document["tracks"]
            if track["promote"]
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
