"""One part of a report: jobs with their labels, and what every candidate answered for them when it had not seen them.

Tables and pictures are drawn from sections alone, so that they know nothing of training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gpumemnet.job.training_job import TrainingJob

from ..answers import Answers


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Section:
    """One table of the report.

    Attributes:
        slug: name of its files, such as ``measured-mlp``.
        title: its heading.
        about: what the labels are, on which GPU, how the split was made; one or two sentences.
        is_measured: whether the labels are readings of a GPU; traced labels are none, and their tables say so.
        jobs: the ``B`` jobs.
        features: their feature vectors, shape ``[B, F]``.
        label_bytes: their labels, shape ``[B]``.
        folds: the fold that each was tested in, shape ``[B]``.
        answers: candidate → its answers.
        candidate: the one of ``answers`` that is ours, for pictures of one candidate.
        seconds: candidate → time of all its trainings together.
        others_mib: name of a published estimator → its published values in MiB, NaN where there is none, shape ``[B]`` each.
        names: of the models, for the zoo; empty otherwise.
    """

    slug: str
    title: str
    about: str
    is_measured: bool
    jobs: tuple[TrainingJob, ...]
    features: NDArray[np.float64]
    label_bytes: NDArray[np.float64]
    folds: NDArray[np.int64]
    answers: Mapping[str, Answers]
    candidate: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    others_mib: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    names: tuple[str, ...] = ()
