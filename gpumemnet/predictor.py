"""Predicts the memory of jobs in process, from bundles.  Loads numpy and onnxruntime, never torch.

A predictor chooses the bundle by the job's family, computes the feature vector, runs the graph, and turns the predicted
distribution into an :class:`~gpumemnet.estimate.Estimate`.  It holds no state that changes and may be shared by threads.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from math import ceil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from gpumemnet.bins import BinScheme, bins_of_width
from gpumemnet.bundle import GRAPH_OUTPUTS, Bundle, load_bundle, shipped_bundles
from gpumemnet.distribution import MemoryDistribution
from gpumemnet.errors import BundleError, InvalidRequestError, UnsupportedJobError
from gpumemnet.estimate import DEFAULT_COVERAGE, Estimate
from gpumemnet.features import FEATURE_NAMES, feature_matrix
from gpumemnet.job import TrainingJob
from gpumemnet.layers import describe
from gpumemnet.support import Support
from gpumemnet.units import GIB


class GraphAnswer(NamedTuple):
    """What a bundle's graph says of ``B`` jobs: distributions; closed form and expected ``[B]``, bounds ``[B, L]``, in bytes."""

    distribution: MemoryDistribution
    reference_bytes: NDArray[np.float64]
    expected_bytes: NDArray[np.float64]
    bounds_bytes: NDArray[np.float64]


class BundleModel:
    """One bundle, ready to run: its graph in onnxruntime and its support as arrays."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.card = bundle.card
        self.default_bins = bins_of_width(GIB, bundle.card.capacity_bytes)
        self.support = Support(bundle.card)
        self._session = _session(bundle)

    def run(self, features: NDArray[np.float64]) -> GraphAnswer:
        """The graph's answer for features of shape ``[B, F]``."""
        weights, locations, scales, amounts = self._session.run(GRAPH_OUTPUTS, {"features": features.astype(np.float32)})
        amounts_bytes = np.exp(amounts, dtype=np.float64)
        return GraphAnswer(
            MemoryDistribution(weights, locations, scales), amounts_bytes[:, 0], amounts_bytes[:, 1], amounts_bytes[:, 2:]
        )

    def level(self, coverage: float) -> int:
        """Position of the smallest calibrated coverage that is at least ``coverage``.

        Raises:
            InvalidRequestError: when the coverage lies outside the calibrated ones.
        """
        coverages = self.card.coverages
        if isinstance(coverage, bool) or not isinstance(coverage, int | float):
            raise InvalidRequestError(f"must be a number, not {describe(coverage)}", "coverage")
        if not coverages[0] <= coverage <= coverages[-1]:
            raise InvalidRequestError(
                f"must be between {coverages[0]:g} and {coverages[-1]:g}, for which {self.card.name} was calibrated, "
                f"not {describe(coverage)}",
                "coverage",
            )
        return bisect.bisect_left(coverages, coverage)

    def estimate(self, jobs: Sequence[TrainingJob], bins: BinScheme | None, coverage: float) -> list[Estimate]:
        """Estimates of jobs that all belong to the bundle's family."""
        bins = bins or self.default_bins
        level = self.level(coverage)
        features = feature_matrix(jobs, self.card.blas_workspace_bytes)
        distribution, reference, expected, bounds = self.run(features)
        reasons, has_unseen_option = self.support.reasons(jobs, features)
        if any(reasons):
            outside = np.array([bool(row) for row in reasons])
            scales = np.where(has_unseen_option, self.card.option_log_scale, self.card.range_log_scale)
            distribution = distribution.replaced(outside, np.log(reference), scales)
            expected = np.where(outside, reference, expected)
        probabilities = distribution.bin_probabilities(bins.log_inner_edges)
        return [
            Estimate(
                expected_bytes=round(row_expected),
                safe_bytes=None if row_reasons else ceil(max(row_safe, row_expected)),
                coverage=coverage,
                bins=bins,
                probabilities=row_probabilities,
                in_support=not row_reasons,
                reasons=row_reasons,
                gpu=self.card.gpu,
                estimator=self.card.name,
                version=self.card.version,
            )
            for row_expected, row_safe, row_probabilities, row_reasons in zip(
                expected.tolist(), bounds[:, level].tolist(), probabilities, reasons, strict=True
            )
        ]


class Predictor:
    """Answers for the families of its bundles; of two bundles for one family the later counts.

    Raises:
        BundleError: when there is no bundle, or a graph does not run.
    """

    def __init__(self, bundles: Iterable[Bundle]) -> None:
        self._models = {bundle.card.family: BundleModel(bundle) for bundle in bundles}
        if not self._models:
            raise BundleError("no bundle to predict with: give a bundle folder, or install the package with its own")

    @classmethod
    def default(cls) -> Predictor:
        """A predictor with the bundles that ship inside the package."""
        return cls(shipped_bundles())

    @classmethod
    def load(cls, *folders: str | Path) -> Predictor:
        """A predictor with the bundles in ``folders``."""
        return cls(load_bundle(folder) for folder in folders)

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """The bundles in use, one per family."""
        return tuple(model.bundle for model in self._models.values())

    def model_for(self, job: TrainingJob) -> BundleModel:
        """The model that answers for ``job``.

        Raises:
            UnsupportedJobError: when no bundle is loaded for the job's family.
        """
        model = self._models.get(job.family)
        if model is None:
            raise UnsupportedJobError(
                f"no model for {job.family} jobs is loaded: there is one for {', '.join(self._models)}", "family"
            )
        return model

    def predict(self, job: TrainingJob, *, bins: BinScheme | None = None, coverage: float = DEFAULT_COVERAGE) -> Estimate:
        """The estimate of one job.

        Args:
            job: the job.
            bins: bin scheme of the probabilities; 1 GiB up to the capacity of the bundle's GPU unless given.
            coverage: share of jobs that the safe bytes shall cover.

        Raises:
            InvalidRequestError: on a coverage that the bundle is not calibrated for.
            UnsupportedJobError: when no bundle is loaded for the job's family.
        """
        return self.model_for(job).estimate((job,), bins, coverage)[0]

    def estimate(
        self, jobs: Sequence[TrainingJob], *, bins: BinScheme | None = None, coverage: float = DEFAULT_COVERAGE
    ) -> list[Estimate]:
        """Estimates of many jobs, in order, with one run of the graph per family; arguments and errors as :meth:`predict`."""
        rows_of: dict[str, list[int]] = {}
        for row, job in enumerate(jobs):
            self.model_for(job)
            rows_of.setdefault(job.family, []).append(row)
        estimates: dict[int, Estimate] = {}
        for family, rows in rows_of.items():
            answers = self._models[family].estimate([jobs[row] for row in rows], bins, coverage)
            estimates.update(zip(rows, answers, strict=True))
        return [estimates[row] for row in range(len(jobs))]


def _session(bundle: Bundle) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # at these sizes a second thread costs more than it gives
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(bundle.model, options, providers=["CPUExecutionProvider"])
        inputs = {entry.name: entry.shape for entry in session.get_inputs()}
        outputs = {entry.name for entry in session.get_outputs()}
    except Exception as error:  # onnxruntime raises its own, undocumented classes
        raise BundleError(f"{bundle.source}: the graph does not load ({type(error).__name__})") from None
    if set(inputs) != {"features"} or inputs["features"][-1] != len(FEATURE_NAMES) or not outputs >= set(GRAPH_OUTPUTS):
        raise BundleError(f"{bundle.source}: the graph must map features [B, {len(FEATURE_NAMES)}] to {', '.join(GRAPH_OUTPUTS)}")
    try:
        amounts = session.run(["amounts"], {"features": np.ones((1, len(FEATURE_NAMES)), dtype=np.float32)})[0]
    except Exception as error:
        raise BundleError(f"{bundle.source}: the graph does not run ({type(error).__name__})") from None
    if amounts.shape != (1, 2 + len(bundle.card.coverages)):
        raise BundleError(f"{bundle.source}: the graph does not give a bound for each of the card's coverages")
    return session
