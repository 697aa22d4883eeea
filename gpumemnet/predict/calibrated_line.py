"""The closed form on real networks: a line over its bytes, and groups of jobs whose errors have one
cause.

A closed form needs no training, so it is calibrated on networks that people train: published
readings, and traces of real architectures (``docs/evaluation/real_networks.md``).  The line adds
what a layer list does not say.  Libraries compute the loss of a language model in fp32 and hold its
logits meanwhile, and attention in single steps keeps copies of its matrices.  Each group has its
own bound, so that a rare cause of large errors does not widen every bound.  This is Mondrian
conformal prediction (Vovk et al., Algorithmic Learning in a Random World, section 4.5).

Request and limit grow with the batch.  The terms do, once :func:`growing_features` has smoothed the
one that need not.  No job changes its group with the batch size, and inside a group request and
limit are increasing functions of the line.

The moment of most memory differs from the steady state where ``cudnn.benchmark`` searches.  In the
first step cuDNN tries every algorithm of every convolution, each with its workspace, and PyTorch
gives the workspaces back.  The widest search is that of the convolution with the largest input and
output.  Little else than the weights is on the GPU beside it: such a convolution is one of the first,
so few tensors are kept yet, and in the backward pass most have been freed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from gpumemnet.job.job_table import Array, Indices, JobTable
from gpumemnet.predict.features import FEATURE_NAMES, feature_matrix
from gpumemnet.units import MIB

TERMS: Final = (
    "constant",
    "segment_bytes",
    "unfragmented_bytes",
    "logits_bytes",
    "logits_bytes, autocast",
    "logits_bytes, half",
    "attention_matrix_bytes",
    "kept_by_norm_bytes, cnn",
)
"""What the line multiplies.

In order: 1; the closed form with and without fragmentation; the logits, once more under autocast,
and once more for weights in
half precision; attention matrices; and what the norms of CNNs keep unless it is recomputed.

The last has a slope below zero.  Where norms keep much, little of the peak is workspaces and
temporary tensors of convolutions, of which the closed form knows least.  It is at most what the
peak exceeds the optimizer's step by, so that it grows only where the closed form does.
"""
GROUPS: Final = (
    "checkpointed",
    "partly_trained",
    "normalised_cnn",
    "cnn",
    "half_language_model",
    "language_model",
    "transformer",
    "mlp",
)
"""The first that fits is a job's group.

Attributes:
    checkpointed: blocks are recomputed; a layer list does not say how much of them at a time.
    partly_trained: frozen parameters, or Adafactor, which holds a convolution's update in several
        forms.
    normalised_cnn: norms keep at least :data:`NORMS_SHARE` of all outputs, so that workspaces of
        convolutions, which no layer list shows, are a small part of the peak.
    half_language_model: a language model with weights in half precision; only some convert their
        logits to fp32.
    language_model: logits of at least :data:`LOGITS_SHARE` of all outputs, in a network that is no
        CNN.
"""
LOGITS_SHARE: Final = 0.02
NORMS_SHARE: Final = 0.04
TYPICAL_SLACK_BYTES: Final = 256 * MIB
"""Errors are relative to the line and this: those of small jobs are a few segments, whatever their
size."""
_ALL_TRAINED: Final = 0.99
_BATCH, _SEGMENT = (FEATURE_NAMES.index(name) for name in ("batch_size", "segment_bytes"))
_LOGITS, _HALF, _OUTPUTS = (
    FEATURE_NAMES.index(name) for name in ("logits_bytes", "is_half", "activation_bytes")
)
_UNFRAGMENTED, _STEP = (FEATURE_NAMES.index(name) for name in ("unfragmented_bytes", "step_bytes"))
_FACTORS: Final = np.array(
    [
        [FEATURE_NAMES.index(name) for name in names]
        for names in (
            ("has_layers", "has_layers"),
            ("segment_bytes", "has_layers"),
            ("unfragmented_bytes", "has_layers"),
            ("logits_bytes", "has_layers"),
            ("logits_bytes", "is_autocast"),
            ("logits_bytes", "is_half"),
            ("attention_matrix_bytes", "has_layers"),
            ("kept_by_norm_bytes", "is_cnn"),
        )
    ]
).T
"""For each term the two features that it is the product of; ``has_layers`` is 1."""
_OF_NORMS: Final = TERMS.index("kept_by_norm_bytes, cnn")
_CHECKPOINTED, _TRAINED, _FACTORED = (
    FEATURE_NAMES.index(name) for name in ("is_checkpointed", "trainable_share", "is_factored")
)
_KEPT_BY_CONVOLUTIONS, _KEPT_BY_NORMS = (
    FEATURE_NAMES.index(f"kept_by_{group}_bytes") for group in ("conv", "norm")
)
_IS_CNN, _IS_TRANSFORMER, _BENCHMARK = (
    FEATURE_NAMES.index(f"is_{name}") for name in ("cnn", "transformer", "cudnn_benchmark")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCalibration:
    """The line's error in one group, in logarithms of memory above the context over the line, see
    :func:`log_errors`.

    Attributes:
        log_shifts: the centre, without and with ``cudnn.benchmark``, whose searches leave free
            segments behind.
        log_scale: scale of a logistic around the centre.
        log_bounds: upper bound for each coverage of the card, from the centre.
    """

    log_shifts: tuple[float, float]
    log_scale: float
    log_bounds: tuple[float, ...]


def growing_features(table: JobTable, features: Array, blas_workspace_bytes: int) -> Array:
    """Returns the features for the line: those given, with ``segment_bytes`` smoothed over the
    batch size.

    When tensors pass into another size class of the allocator and share its segments, the closed
    form falls at once; real memory rises about as often as it falls there.  So it is taken at
    powers of two alone, at each the larger of the closed forms of this batch size and of half of
    it, and interpolated between them.

    Args:
        table: the ``B`` jobs, with layers.
        features: their feature vectors, shape ``[B, F]``.
        blas_workspace_bytes: cuBLAS workspace per handle of the GPU that the features are for.
    """
    sizes, own = features[:, _BATCH], features[:, _SEGMENT]
    lower = np.ldexp(1.0, np.frexp(sizes)[1] - 1)
    halved, between = (lower > 1.0).nonzero()[0], (sizes > lower).nonzero()[0]
    rows = np.concatenate((halved, between, between))
    asked = np.concatenate((lower[halved] / 2.0, lower[between], lower[between] * 2.0))
    found = feature_matrix(
        table.take(rows).with_numbers("batch_size", asked), blas_workspace_bytes
    )[:, _SEGMENT]
    at_half, at_lower, at_upper = np.split(found, [len(halved), len(halved) + len(between)])
    start = own.copy()
    start[between] = at_lower
    start[halved] = np.maximum(start[halved], at_half)
    share = (sizes - lower)[between] / lower[between]
    smoothed = features.copy()
    smoothed[:, _SEGMENT] = start
    smoothed[between, _SEGMENT] += share * np.maximum(at_upper - start[between], 0.0)
    return smoothed


def line_terms(features: Array) -> Array:
    """Returns the :data:`TERMS` of jobs with layers, in bytes, shape ``[B, 8]``, from
    :func:`growing_features`."""
    terms: Array = features[:, _FACTORS[0]] * features[:, _FACTORS[1]]
    beyond_step = (features[:, _UNFRAGMENTED] - features[:, _STEP]) * (
        features[:, _CHECKPOINTED] == 0
    )
    terms[:, _OF_NORMS] = np.minimum(terms[:, _OF_NORMS], beyond_step)
    return terms


def line_bytes(features: Array, slopes: Array) -> Array:
    """Returns the line, shape ``[B]``; it is never below zero."""
    amounts: Array = np.maximum(line_terms(features) @ slopes, 0.0)
    return amounts


def log_errors(above_context_bytes: Array, line_bytes: Array) -> Array:
    """Returns the line's errors, shape ``[B]``."""
    errors: Array = np.log(
        (above_context_bytes + TYPICAL_SLACK_BYTES) / (line_bytes + TYPICAL_SLACK_BYTES)
    )
    return errors


def with_log_errors(line_bytes: Array, errors: Array) -> Array:
    """Returns the memory above the context that has these errors, shape ``[B]``; the inverse of
    :func:`log_errors`."""
    amounts: Array = (line_bytes + TYPICAL_SLACK_BYTES) * np.exp(errors) - TYPICAL_SLACK_BYTES
    return amounts


def group_codes(features: Array) -> Indices:
    """Returns the position of each job's group in :data:`GROUPS`, shape ``[B]``."""
    is_factored = (features[:, _FACTORED] > 0) & (features[:, _KEPT_BY_CONVOLUTIONS] > 0)
    is_language_model = features[:, _LOGITS] >= LOGITS_SHARE * features[:, _OUTPUTS]
    is_cnn = features[:, _IS_CNN] > 0
    conditions = (
        features[:, _CHECKPOINTED] > 0,
        (features[:, _TRAINED] < _ALL_TRAINED) | is_factored,
        is_cnn & (features[:, _KEPT_BY_NORMS] >= NORMS_SHARE * features[:, _OUTPUTS]),
        is_cnn,
        is_language_model & (features[:, _HALF] > 0),
        is_language_model,
        features[:, _IS_TRANSFORMER] > 0,
        np.ones(len(features), dtype=np.bool_),
    )
    codes: Indices = np.stack(conditions).argmax(axis=0)
    return codes


def has_benchmark(features: Array) -> Indices:
    """Returns 1 for jobs with ``cudnn.benchmark`` and 0 for others, shape ``[B]``."""
    codes: Indices = (features[:, _BENCHMARK] > 0).astype(np.int64)
    return codes


SEARCH_COPIES: Final = 3.5
"""What a search holds, in bytes of the input and output of its convolution: both once, their
gradients or copies in another layout, and a workspace of 1.5 times them.  Fitted to traced jobs
with ``cudnn.benchmark`` it is 3.3 to 3.5 in each of five folds over architecture families
(docs/evaluation/real_networks.md)."""
_CONVOLUTION, _WEIGHTS = (
    FEATURE_NAMES.index(name) for name in ("largest_convolution_bytes", "weight_bytes")
)


def startup_peaks(
    expected_bytes: Array, features: Array, context_bytes: int, available_bytes: int
) -> Array:
    """Returns the start-up peak of ``B`` jobs, shape ``[B]``; the steady state where no search
    exceeds it.

    A search takes no more than is free, so it does not exceed the memory of the GPU.

    Args:
        expected_bytes: the steady state, shape ``[B]``.
        features: shape ``[B, F]``.  Jobs without layers do not say how large their convolutions
            are.
        context_bytes: the CUDA context in ``expected_bytes``.
        available_bytes: memory that a job can use on the GPU.
    """
    is_searched = features[:, _BENCHMARK]
    if not is_searched.any():
        return expected_bytes
    searches = is_searched * features[:, _CONVOLUTION]
    peaks = context_bytes + features[:, _WEIGHTS] + SEARCH_COPIES * searches
    highest: Array = np.maximum(
        expected_bytes, np.where(searches > 0, np.minimum(peaks, available_bytes), 0.0)
    )
    return highest
