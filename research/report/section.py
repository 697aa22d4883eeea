"""One part of a report: held-out jobs with their labels, and every candidate's answers for them.

Tables and pictures are made from sections only, so they do not depend on training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gpumemnet.job.training_job import TrainingJob
from models.answers import Answers


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Section:
    """One table of the report.

    Attributes:
        slug: name of the section's files, such as ``measured-mlp``.
        title: heading.
        about: one or two sentences on the labels, the GPU and the split.
        is_measured: whether the labels are readings of a GPU, rather than traces.
        jobs: the ``B`` jobs.
        features: their feature vectors, shape ``[B, F]``.
        label_bytes: their labels, shape ``[B]``.
        folds: the fold in which each job was tested, shape ``[B]``.
        answers: candidate → its answers.
        candidate: the key of ``answers`` for pictures of one candidate.
        seconds: candidate → total training time.
        others_mib: name of a published estimator → its published values in MiB, NaN where there is
            none, shape ``[B]`` each.
        names: names of the models of the zoo; otherwise empty.
    """

    slug: str
    title: str
    about: str
    is_measured: bool
    jobs: Sequence[TrainingJob]
    features: NDArray[np.float64]
    label_bytes: NDArray[np.float64]
    folds: NDArray[np.int64]
    answers: Mapping[str, Answers]
    candidate: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    others_mib: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    names: tuple[str, ...] = ()
