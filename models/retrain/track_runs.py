"""Trains and judges the candidate of one track after another; a better candidate replaces the
champion.

Candidates, stand-ins and verdicts are stored under the hash of everything they depend on, so each
is made once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpumemnet.predict.bundle import Bundle

from ..training.data import LabelledJobs, labelled_jobs
from .collect import Collected, Row
from .gate import RULE
from .judging import (
    dataset_hashes,
    judge_candidate,
    known_held_out_architectures,
    missing_comparison_data,
    parts_of,
    slot_of,
    without_answer,
)
from .release import Request
from .steps import (
    JUDGING_CODE,
    TRAINING_CODE,
    cached_bundle,
    cached_document,
    code_hash,
    content_hash,
)
from .tracks import Track, calibration_track, too_few, training_data


class TrackRunner:
    """The tracks of one run, and the current bundles: the champion's, or those that have replaced
    them in this run."""

    def __init__(
        self,
        request: Request,
        collected: Collected,
        tracks: Sequence[Track],
        champion: Sequence[Bundle],
        say: Callable[[str], None],
    ) -> None:
        self._request = request
        self._folder = request.work
        self._tracks = tracks
        self._current = {slot_of(bundle): bundle for bundle in champion}
        self._file_names = {file.sha256: file.name for file in collected.files}
        self._say = say

    def run(self, track: Track, encoder: str, nothing_new: str | None = None) -> dict[str, Any]:
        """Train and judge the candidate of one track; returns its entry in the report.

        Args:
            track, encoder: of the candidate.
            nothing_new: why no track needs training in this run.
        """
        entry: dict[str, Any] = {
            "track": track.name,
            "family": track.family,
            "encoder": encoder,
            "provenance": track.provenance,
            "gpu": track.gpu,
            "label_source": track.label_source,
            "rows": {
                name: len(getattr(track, name))
                for name in ("training", "held_out", "newest", "borrowed")
            },
            "promote": False,
            "bundle": None,
            "verdict": None,
        }
        champion = [
            bundle for slot, bundle in self._current.items() if slot[:2] == (track.family, encoder)
        ]
        obstacle = too_few(track) or nothing_new
        if obstacle is None and not champion:
            obstacle = "the champion has no model for this track: put a first one into the registry by hand"
        obstacle = obstacle or missing_comparison_data(
            track, champion, self._tracks, self._file_names, RULE.fewest_guard_rows
        )
        if obstacle:
            return {**entry, "reasons": [obstacle]}
        try:
            candidate = self._candidate(track, encoder)
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
            verdict = self._verdict(track, candidate, champion)
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

    def _candidate(self, track: Track, encoder: str) -> Bundle:
        calibration = calibration_track(track, self._tracks)
        key = content_hash(
            *(
                code_hash(TRAINING_CODE),
                track.name,
                track.label_source,
                encoder,
                self._request.seed,
                self._request.epochs,
            ),
            *([row.key for row in part] for part in (track.training, track.borrowed)),
            *(
                track.origins,
                calibration and [row.key for row in calibration.training],
            ),
        )
        description = f"{track.name}, {encoder}"

        def train(folder: Path) -> Bundle:
            data = training_data(track)
            self._say(f"training {description}")
            from .training import train_candidate  # loads torch

            return train_candidate(
                folder,
                track,
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
        self, track: Track, candidate: Bundle, champion: Sequence[Bundle]
    ) -> dict[str, Any]:
        parts = parts_of(
            track,
            self._tracks,
            candidate.card.document["retraining"]["moved_bytes"],
            self._file_names,
            RULE,
        )
        known = {
            bundle.sha256: known_held_out_architectures(bundle, self._tracks) for bundle in champion
        }
        key = content_hash(
            *(code_hash(JUDGING_CODE), candidate.sha256, asdict(RULE)),
            sorted([sha256, sorted(keys)] for sha256, keys in known.items()),
            [self._stand_in_key(bundle) for bundle in champion if known[bundle.sha256]],
            [
                [part.name, part.gpu, [[row.key, row.measurement.label_bytes] for row in part.rows]]
                for part in parts
            ],
        )

        def make() -> dict[str, Any]:
            self._say(f"judging {track.name}, {candidate.card.encoder}")
            if count := without_answer(candidate, track):
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
        return content_hash(code_hash(TRAINING_CODE), "stand-in", champion.sha256, keys)

    def _training_rows(self, champion: Bundle) -> list[Row]:
        """The champion's training rows, without the held-out ones."""
        known = dataset_hashes(champion)
        return [
            row
            for track in self._own_tracks(champion)
            for row in track.training
            if row.origin in known
        ]

    def _own_tracks(self, champion: Bundle) -> list[Track]:
        family, _, provenance = slot_of(champion)
        return [
            track
            for track in self._tracks
            if (track.family, track.provenance) == (family, provenance)
        ]

    def _calibration_of(self, champion: Bundle) -> Track | None:
        return next(
            (calibration_track(track, self._tracks) for track in self._own_tracks(champion)), None
        )


def _labelled_rows(track: Track | None) -> LabelledJobs | None:
    return (
        labelled_jobs([row.measurement for row in track.training], track.name, "")
        if track
        else None
    )
