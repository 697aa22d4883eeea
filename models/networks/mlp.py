"""The MLP-based classifier in training: an ensemble of small MLPs that predict a distribution over
memory.

The encoder is GPUMemNet's (arXiv 2602.17817, section 5.1: an ensemble of tiny MLPs over the feature
vector).  The head is a mixture of logistics over log-bytes relative to the calibrated closed form.
So it supports bins of any width and respects their order.  The modules take raw feature columns, so
the exported graph includes every transform (:mod:`models.networks.inference`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpumemnet.allocator.settings import LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES
from gpumemnet.job.layers import GROUP_NAMES
from gpumemnet.physics.closed_form import SIZE_CLASSES
from gpumemnet.predict.features import FEATURE_NAMES
from gpumemnet.units import MIB

from .physics_line import MODEL_STATE_COLUMNS, PhysicsLine

# Shapes: B jobs, F feature columns, D inputs, E ensemble members, H hidden width, K mixture
# components; M modes (2, or 2 for each
# family of a common model), G groups of jobs (2 M).

SMALLEST_SCALE: Final = 0.03
"""Floor of a component's scale, in units of the closed form's typical error."""
BACKGROUND_WEIGHT: Final = 0.005
BACKGROUND_SCALE: Final = 8.0
"""Scale of a wide component with small weight that absorbs faulty labels, in units of the closed
form's typical error."""
MEAN_DEVIATION: Final = 2.0 * math.log(2.0)
"""Mean absolute deviation of a logistic of scale 1."""
LANES: Final = 16
"""Rows of logarithms are padded to a multiple of this, so that vector code computes all of them.

onnxruntime computes logarithms and sines in vectors, of four numbers in current builds.  It
computes the remaining numbers one by one, and these differ in the last bits.  There are four sines,
so they need no padding.
"""
CLIP: Final = 6.0
CONSTANT: Final = 1e-5
"""The transform drops inputs that vary less than this over the training jobs."""
_LAYERS, _TOTALS, _BOTH = (1.0, 0.0), (0.0, 1.0), (1.0, 1.0)
"""Masks over :data:`MODES`: the modes in which an input is active."""
LAYER_BYTES: Final = (
    *(f"{part}_{size}_bytes" for part in ("peak", "weights", "kept") for size in SIZE_CLASSES),
    *(f"kept_by_{group}_bytes" for group in GROUP_NAMES),
    *("resident_bytes", "loss_bytes", "backward_bytes", "step_bytes", "unfragmented_bytes"),
    *("attention_matrix_bytes", "logits_bytes"),
    *("largest_convolution_bytes", "largest_weight_bytes", "largest_activation_bytes"),
)
OPTIONS: Final = tuple(name for name in FEATURE_NAMES if name.startswith("is_"))
"""Flags of the job; the transform drops a flag that is equal for all training jobs."""
_MIB: Final = 1.0 / MIB
_TURN_SMALL: Final = 2.0 * math.pi / SMALL_SEGMENT_BYTES
_TURN_MEDIUM: Final = 2.0 * math.pi / LARGE_SEGMENT_BYTES

Amount = Mapping[str, float]
"""A weighted sum of feature columns; the key ``""`` is a constant."""

ONE: Final[Amount] = {"": 1.0}
TOTAL_AMOUNTS: Final[tuple[Amount, ...]] = (
    {"weight_bytes": _MIB},
    {"activation_bytes": _MIB},
    {"input_bytes": _MIB},
    {"total_activations": 0.004},
    dict.fromkeys((*MODEL_STATE_COLUMNS, "activation_bytes"), _MIB),
)
"""Amounts that totals determine; the inputs are each one's logarithm and its ratio to the
calibrated line."""
FINE_AMOUNTS: Final[tuple[Amount, ...]] = (
    {"weight_bytes": 16 * _MIB},
    {"activation_bytes": 16 * _MIB},
    {"input_bytes": 16 * _MIB},
    {"weight_bytes": 128 * _MIB},
    {"activation_bytes": 128 * _MIB},
    {"batch_size": 1.0},
)
"""Amounts in finer units that distinguish small jobs; the inputs are their logarithms only."""
LAYER_AMOUNTS: Final[tuple[Amount, ...]] = tuple({name: _MIB} for name in LAYER_BYTES)
"""Amounts that need the layers; the inputs are each one's logarithm and its ratio to the calibrated
line."""
COUNTS: Final[tuple[Amount, ...]] = tuple(
    {name: 1.0}
    for name in (*(f"{group}_count" for group in GROUP_NAMES), "layer_count", "block_count")
)
"""Numbers of layers; the inputs are their logarithms only."""
SHARED_COUNTS: Final[tuple[Amount, ...]] = (
    {"sequence_length": 1.0},
    {"gradient_accumulation": 1.0},
)
"""Counts that do not need the layers; the inputs are their logarithms only."""
ANGLES: Final[tuple[Amount, ...]] = (
    {"small_slack_bytes": _TURN_SMALL},
    {"medium_slack_bytes": _TURN_MEDIUM},
    {"small_slack_bytes": _TURN_SMALL, "": math.pi / 2.0},
    {"medium_slack_bytes": _TURN_MEDIUM, "": math.pi / 2.0},
)
"""Position of the closed form's end in its last segment, as angles; the inputs are their sines.

The position matters because memory grows by whole segments.
"""
PLAIN_AMOUNTS: Final[tuple[Amount, ...]] = (
    {"small_slack_bytes": _MIB},
    {"medium_slack_bytes": _MIB},
    {"spare_medium_segments": 1.0},
    {"reused_segments": 1.0},
)
MODES: Final[tuple[Amount, ...]] = ({"has_layers": 1.0}, {"has_layers": -1.0, "": 1.0})
"""Amounts that are 1 and 0 for a job with layers, 0 and 1 for one with totals only."""
BENCHMARK: Final = "is_cudnn_benchmark"


def group_names(families: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the groups of jobs whose bounds are calibrated separately; a common model has them for
    each of its ``families``.

    This is Mondrian conformal prediction (Vovk et al., Algorithmic Learning in a Random World,
    section 4.5).  Jobs with ``cudnn.benchmark`` form separate groups, because the workspace of one
    convolution can then exceed all other memory. Separate groups by family make the bounds of a
    common model hold in every family.
    """
    modes = tuple(
        mode_name(mode, family) for family in families or ("",) for mode in ("layers", "totals")
    )
    return (*modes, *(f"{mode}, cudnn_benchmark" for mode in modes))


def mode_name(mode: str, family: str = "") -> str:
    """Return ``layers`` or ``totals``, preceded by the family if a model has several."""
    return f"{family}, {mode}" if family else mode


def _affine(amounts: Sequence[Amount]) -> tuple[Tensor, Tensor]:
    """Return matrix ``[F, len(amounts)]`` and offset ``[len(amounts)]`` that map features to the
    amounts."""
    matrix, offset = torch.zeros(len(FEATURE_NAMES), len(amounts)), torch.zeros(len(amounts))
    for column, amount in enumerate(amounts):
        for name, factor in amount.items():
            if name:
                matrix[FEATURE_NAMES.index(name), column] = factor
            else:
                offset[column] = factor
    return matrix, offset


def _group_amounts(families: Sequence[str]) -> list[Amount]:
    """Return one amount per name of :func:`group_names`: 1 for jobs with all flags of the group, 0
    or less for others."""
    amounts: list[Amount] = []
    for benchmark in (-1.0, 1.0):
        for family in families or ("",):
            for has_layers in (1.0, -1.0):
                amount = {"has_layers": has_layers, BENCHMARK: benchmark}
                if family:
                    amount[f"is_{family}"] = 1.0
                positive = [factor for factor in amount.values() if factor > 0]
                amounts.append({**amount, "": 1.0 - len(positive)})
    return amounts


def _scaled(amount: Amount, factor: float) -> Amount:
    return {name: factor * value for name, value in amount.items()}


def _line_amount(line: PhysicsLine) -> Amount:
    slopes = {
        name: slope
        for slope, columns in zip(line.slopes, line.terms, strict=True)
        for name in columns
    }
    return {**slopes, "": line.intercept_mib * MIB}


class FeatureTransform(nn.Module):
    """Converts raw feature columns to the network's inputs and to the reference, the calibrated
    closed form.

    Jobs with layers and jobs with totals only share the network.  The totals enter twice, once for
    each mode, so that the modes have separate weights; a mask sets the inputs of the other mode to
    zero.  A common model has separate lines for each family, because the share of memory that the
    closed form omits depends on the family.
    """

    matrix: Tensor
    offset: Tensor
    floors: Tensor
    errors: Tensor
    mean: Tensor
    deviation: Tensor
    mask: Tensor
    flags: Tensor

    def __init__(
        self, lines: Sequence[PhysicsLine], errors: Sequence[float], families: Sequence[str] = ()
    ) -> None:
        """Create a transform that is not yet fitted.

        Args:
            lines: the line of jobs with layers and that of jobs with totals only; for a common
                model, both for each family.
            errors: typical error of each line in log-bytes, which is the unit of the network's
                output.
            families: families of a common model.
        """
        super().__init__()
        self.families = tuple(families)
        twice = [(amount, modes) for modes in (_LAYERS, _TOTALS) for amount in TOTAL_AMOUNTS]
        finer = [(amount, modes) for modes in (_LAYERS, _TOTALS) for amount in FINE_AMOUNTS]
        layers = [(amount, _LAYERS) for amount in LAYER_AMOUNTS]
        inputs = (
            [
                *(({**amount, **ONE}, modes) for amount, modes in (*twice, *finer, *layers)),
                *(({**amount, **ONE}, _LAYERS) for amount in COUNTS),
                *(({**amount, **ONE}, _BOTH) for amount in SHARED_COUNTS),
            ],
            [(_scaled(amount, MIB), modes) for amount, modes in twice],
            [(_scaled(amount, MIB), modes) for amount, modes in layers],
            [(amount, _LAYERS) for amount in ANGLES],
            [
                *((amount, _LAYERS) for amount in PLAIN_AMOUNTS),
                *(({name: 1.0}, _BOTH) for name in (*OPTIONS, "has_layers")),
            ],
        )
        logarithms, *others = ([amount for amount, _ in block] for block in inputs)
        padding = [ONE] * (-(len(logarithms) + len(lines)) % LANES)
        blocks = [
            [*logarithms, *map(_line_amount, lines), *padding],
            *others,
            list(MODES),
            _group_amounts(families),
        ]
        self.blocks = [len(block) for block in blocks]
        self.positive = [len(logarithms), len(lines), len(padding)]
        matrix, offset = _affine([amount for block in blocks for amount in block])
        mask = torch.tensor([modes for block in inputs for _, modes in block]).T.contiguous()
        self.width = mask.shape[1]
        self.register_buffer("matrix", matrix)
        self.register_buffer("offset", offset)
        floors = (
            [0.0] * len(logarithms)
            + [line.floor_mib * MIB for line in lines]
            + [0.0] * len(padding)
        )
        self.register_buffer("floors", torch.tensor(floors))
        self.register_buffer("errors", torch.tensor(errors).unsqueeze(1).repeat(2, 1))
        self.register_buffer("mean", torch.zeros(self.width))
        self.register_buffer("deviation", torch.ones(self.width))
        self.register_buffer("mask", mask)
        if families:
            self.register_buffer(
                "flags", _affine([{f"is_{family}": 1.0} for family in families])[0]
            )

    def raw_inputs(self, features_BF: Tensor) -> Tensor:
        """Return the inputs before standardisation, ``[B, D]``."""
        raw_BD, _, _, _ = self._raw(features_BF)
        return raw_BD

    def fit(self, raw_BD: Tensor) -> None:
        """Set mean and deviation from :meth:`raw_inputs` of jobs with layers; the last input, the
        mode, is not scaled."""
        self.mean[:-1] = raw_BD.mean(0)[:-1]
        deviation = raw_BD.std(0)[:-1]
        self.deviation[:-1] = torch.where(deviation > CONSTANT, deviation, torch.inf)

    def forward(self, features_BF: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return inputs ``[B, D]``; reference and unit of the output in log-bytes ``[B, 1]``;
        :func:`group_names` ``[B, G]``."""
        raw_BD, log_lines_B2, modes_B2, groups_BG = self._raw(features_BF)
        inputs_BD = ((raw_BD - self.mean) / self.deviation).clamp(-CLIP, CLIP) * (
            modes_B2 @ self.mask
        )
        return (
            inputs_BD,
            (log_lines_B2 * modes_B2).sum(1, keepdim=True),
            groups_BG @ self.errors,
            groups_BG,
        )

    def _raw(self, features_BF: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return inputs before standardisation, both lines of the job's family in log-bytes, the
        modes, and the groups."""
        blocks = torch.split(torch.addmm(self.offset, features_BF, self.matrix), self.blocks, dim=1)
        positive, totals, layers, angles, plain, modes_B2, groups_BG = blocks
        positive = torch.maximum(positive, self.floors)
        _, lines_BM, _ = torch.split(positive, self.positive, dim=1)
        logarithms, log_lines_BM, _ = torch.split(positive.log(), self.positive, dim=1)
        layers_line_B1, totals_line_B1 = torch.split(
            self._of_family(lines_BM, features_BF), 1, dim=1
        )
        relative = (totals / totals_line_B1, layers / layers_line_B1)
        raw_BD = torch.cat((logarithms, *relative, angles.sin(), plain), dim=1)
        return raw_BD, self._of_family(log_lines_BM, features_BF), modes_B2, groups_BG.relu()

    def _of_family(self, lines_BM: Tensor, features_BF: Tensor) -> Tensor:
        """Return the two columns of each job's family, shape ``[B, 2]``."""
        if not self.families:
            return lines_BM
        flags_BM1 = (features_BF @ self.flags).unsqueeze(2)
        return (lines_BM.reshape(-1, len(self.families), 2) * flags_BM1).sum(1)


Mixture = tuple[Tensor, Tensor, Tensor]
"""Weights, locations and scales of each member's components, ``[B, E, K]`` each, in units of the
closed form's error."""


class MemberMLPs(nn.Module):
    """``E`` MLPs with two hidden layers each, computed as batched matrix products."""

    def __init__(self, inputs: int, members: int, hidden: int, components: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.components = components
        widths = (inputs, hidden, hidden, 3 * components)
        gains = (1.4, 1.4, 0.1)
        self.weights = nn.ParameterList(
            torch.randn(members, rows, columns, generator=generator) * (gain / math.sqrt(rows))
            for rows, columns, gain in zip(widths, widths[1:], gains, strict=False)
        )
        self.biases = nn.ParameterList(torch.zeros(members, 1, columns) for columns in widths[1:])
        with torch.no_grad():
            self.biases[2][:, :, components : 2 * components] = torch.linspace(
                -0.8, 0.8, components
            )
            self.biases[2][:, :, 2 * components :] = -0.7

    def forward(self, inputs_EBD: Tensor) -> Mixture:
        """Return each member's mixture."""
        hidden_EBH = nn.functional.silu(inputs_EBD @ self.weights[0] + self.biases[0])
        hidden_EBH = nn.functional.silu(hidden_EBH @ self.weights[1] + self.biases[1])
        outputs_BEK = (hidden_EBH @ self.weights[2] + self.biases[2]).transpose(0, 1)
        logits_BEK, locations_BEK, scales_BEK = torch.split(outputs_BEK, self.components, dim=-1)
        return logits_BEK.softmax(-1), locations_BEK, scales_BEK.exp() + SMALLEST_SCALE


def centre_and_spread(weights: Tensor, locations: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mixture's centre and the mean distance of its mass from the centre; ``[..., K]`` to
    ``[..., 1]`` each.

    The centre is the mean of the locations, weighted by each component's height ``weight / scale``.
    It is close to the mode and needs no search.  The spread is proportional to the sum of the
    weights.
    """
    heights = weights / scales
    centre = (heights * locations).sum(-1, keepdim=True) / heights.sum(-1, keepdim=True)
    distances = (locations - centre).abs() + MEAN_DEVIATION * scales
    return centre, (weights * distances).sum(-1, keepdim=True)


def mixture_cdf(mixture: Mixture, positions: Tensor) -> Tensor:
    """Return the CDF of each member's mixture and background, at positions ``[B, E]`` in units of
    the closed form's error."""
    weights, locations, scales = mixture
    cumulative = (weights * torch.sigmoid((positions[..., None] - locations) / scales)).sum(-1)
    return (1.0 - BACKGROUND_WEIGHT) * cumulative + BACKGROUND_WEIGHT * torch.sigmoid(
        positions / BACKGROUND_SCALE
    )


def float_tensor(values: NDArray[np.float64]) -> Tensor:
    """Convert features to single precision, the type of the graph's inputs."""
    return torch.from_numpy(values.astype(np.float32))
