"""The MLP-based classifier as it is trained: an ensemble of small MLPs whose head is a distribution over memory.

The encoder is GPUMemNet's (arXiv 2602.17817, section 5.1: an ensemble of tiny MLPs over the feature vector).  The head is a
mixture of logistics over log-bytes relative to the calibrated closed form: it answers bins of any width and respects their order.
Everything from the raw feature columns on is inside the modules, hence inside the exported graph (:mod:`models.networks.served`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpumemnet.allocator.sizes import LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES
from gpumemnet.features.vector import FEATURE_NAMES
from gpumemnet.job.layers import GROUP_NAMES
from gpumemnet.physics.closed_form import SIZE_CLASSES
from gpumemnet.units import MIB

from .physics_line import MODEL_STATE_COLUMNS, PhysicsLine

# Shapes: B jobs, F feature columns, D inputs, E ensemble members, H hidden width, K mixture components; M modes (2, or 2 for each
# family of a common model), G groups of jobs (2 M).

SMALLEST_SCALE: Final = 0.03
"""Floor of a component's scale, in units of the closed form's typical error."""
BACKGROUND_WEIGHT: Final = 0.005
BACKGROUND_SCALE: Final = 8.0
"""A thin, wide component that takes faulty labels, so that no other has to."""
MEAN_DEVIATION: Final = 2.0 * math.log(2.0)
"""Mean absolute deviation of a logistic of scale 1."""
LANES: Final = 16
"""Logarithms and sines are taken of some numbers at a time, of four in onnxruntime as it is built today, and of the rest one by
one, with other last bits.  There is to be no rest in any row: logarithms are filled up to so many, and the sines are four."""
CLIP: Final = 6.0
CONSTANT: Final = 1e-5
"""An input that varies less than this over the training jobs is left out."""
_LAYERS, _TOTALS, _BOTH = (1.0, 0.0), (0.0, 1.0), (1.0, 1.0)
"""In which of :data:`MODES` an input is on."""
LAYER_BYTES: Final = (
    *(f"{part}_{size}_bytes" for part in ("peak", "weights", "kept") for size in SIZE_CLASSES),
    *(f"kept_by_{group}_bytes" for group in GROUP_NAMES),
    *("resident_bytes", "loss_bytes", "backward_bytes", "step_bytes", "unfragmented_bytes"),
    *("attention_matrix_bytes", "logits_bytes"),
    *("largest_convolution_bytes", "largest_weight_bytes", "largest_activation_bytes"),
)
OPTIONS: Final = tuple(name for name in FEATURE_NAMES if name.startswith("is_"))
"""Flags of the job; a flag that is the same for all training jobs is left out by the transform."""
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
"""Amounts that totals give; each enters as its logarithm and relative to the calibrated line."""
FINE_AMOUNTS: Final[tuple[Amount, ...]] = (
    {"weight_bytes": 16 * _MIB},
    {"activation_bytes": 16 * _MIB},
    {"input_bytes": 16 * _MIB},
    {"weight_bytes": 128 * _MIB},
    {"activation_bytes": 128 * _MIB},
    {"batch_size": 1.0},
)
"""The same in finer units, as logarithms only: they tell small jobs apart."""
LAYER_AMOUNTS: Final[tuple[Amount, ...]] = tuple({name: _MIB} for name in LAYER_BYTES)
"""Amounts that need the layers; logarithm and relative to the calibrated line."""
COUNTS: Final[tuple[Amount, ...]] = tuple(
    {name: 1.0} for name in (*(f"{group}_count" for group in GROUP_NAMES), "layer_count", "block_count")
)
"""Numbers of layers; logarithms only."""
SHARED_COUNTS: Final[tuple[Amount, ...]] = ({"sequence_length": 1.0}, {"gradient_accumulation": 1.0})
"""The same, known without layers."""
ANGLES: Final[tuple[Amount, ...]] = (
    {"small_slack_bytes": _TURN_SMALL},
    {"medium_slack_bytes": _TURN_MEDIUM},
    {"small_slack_bytes": _TURN_SMALL, "": math.pi / 2.0},
    {"medium_slack_bytes": _TURN_MEDIUM, "": math.pi / 2.0},
)
"""Where in its last segment the closed form ends, as angles whose sine is taken: memory grows by whole segments."""
PLAIN_AMOUNTS: Final[tuple[Amount, ...]] = (
    {"small_slack_bytes": _MIB},
    {"medium_slack_bytes": _MIB},
    {"spare_medium_segments": 1.0},
    {"reused_segments": 1.0},
)
MODES: Final[tuple[Amount, ...]] = ({"has_layers": 1.0}, {"has_layers": -1.0, "": 1.0})
"""1 and 0 for a job with layers, 0 and 1 for one with totals only."""
BENCHMARK: Final = "is_cudnn_benchmark"


def group_names(families: Sequence[str] = ()) -> tuple[str, ...]:
    """Kinds of jobs whose bounds are calibrated apart; those of a common model for each of its ``families``.

    This is Mondrian conformal prediction (Vovk et al., Algorithmic Learning in a Random World, section 4.5).  Where cuDNN tries
    all algorithms the workspace of one convolution can exceed all else; and the bounds of a common model hold in every family.
    """
    modes = tuple(mode_name(mode, family) for family in families or ("",) for mode in ("layers", "totals"))
    return (*modes, *(f"{mode}, cudnn_benchmark" for mode in modes))


def mode_name(mode: str, family: str = "") -> str:
    """``layers`` or ``totals``, with the family where a model has several."""
    return f"{family}, {mode}" if family else mode


def _affine(amounts: Sequence[Amount]) -> tuple[Tensor, Tensor]:
    """Matrix ``[F, len(amounts)]`` and offset ``[len(amounts)]`` that give the amounts from the features."""
    matrix, offset = torch.zeros(len(FEATURE_NAMES), len(amounts)), torch.zeros(len(amounts))
    for column, amount in enumerate(amounts):
        for name, factor in amount.items():
            if name:
                matrix[FEATURE_NAMES.index(name), column] = factor
            else:
                offset[column] = factor
    return matrix, offset


def _group_amounts(families: Sequence[str]) -> list[Amount]:
    """Amounts that are 1 for jobs of one of the :func:`group_names`, and 0 or less for others: all its flags are up."""
    amounts: list[Amount] = []
    for benchmark in (-1.0, 1.0):
        for family in families or ("",):
            for has_layers in (1.0, -1.0):
                amount = {"has_layers": has_layers, BENCHMARK: benchmark}
                if family:
                    amount[f"is_{family}"] = 1.0
                wanted = [factor for factor in amount.values() if factor > 0]
                amounts.append({**amount, "": 1.0 - len(wanted)})
    return amounts


def _scaled(amount: Amount, factor: float) -> Amount:
    return {name: factor * value for name, value in amount.items()}


def _line_amount(line: PhysicsLine) -> Amount:
    slopes = {name: slope for slope, columns in zip(line.slopes, line.terms, strict=True) for name in columns}
    return {**slopes, "": line.intercept_mib * MIB}


class FeatureTransform(nn.Module):
    """From raw feature columns to the network's inputs and to the reference, the calibrated closed form.

    Jobs with layers and jobs with totals only share the network.  The totals come twice, once for each kind of job, so that what
    is learnt of the one does not blur the other; a mask turns off what does not apply.  A common model has a line for each of its
    families, as what the closed form leaves out is another share of each.
    """

    matrix: Tensor
    offset: Tensor
    floors: Tensor
    errors: Tensor
    mean: Tensor
    deviation: Tensor
    mask: Tensor
    flags: Tensor

    def __init__(self, lines: Sequence[PhysicsLine], errors: Sequence[float], families: Sequence[str] = ()) -> None:
        """Lines of jobs with layers and of jobs with totals only, and the typical size of their error in log-bytes, the unit of
        the network's output; two of each, and of a common model two for each of ``families``.
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
            [*((amount, _LAYERS) for amount in PLAIN_AMOUNTS), *(({name: 1.0}, _BOTH) for name in (*OPTIONS, "has_layers"))],
        )
        logarithms, *others = ([amount for amount, _ in block] for block in inputs)
        padding = [ONE] * (-(len(logarithms) + len(lines)) % LANES)
        blocks = [[*logarithms, *map(_line_amount, lines), *padding], *others, list(MODES), _group_amounts(families)]
        self.blocks = [len(block) for block in blocks]
        self.positive = [len(logarithms), len(lines), len(padding)]
        matrix, offset = _affine([amount for block in blocks for amount in block])
        mask = torch.tensor([modes for block in inputs for _, modes in block]).T.contiguous()
        self.width = mask.shape[1]
        self.register_buffer("matrix", matrix)
        self.register_buffer("offset", offset)
        floors = [0.0] * len(logarithms) + [line.floor_mib * MIB for line in lines] + [0.0] * len(padding)
        self.register_buffer("floors", torch.tensor(floors))
        self.register_buffer("errors", torch.tensor(errors).unsqueeze(1).repeat(2, 1))
        self.register_buffer("mean", torch.zeros(self.width))
        self.register_buffer("deviation", torch.ones(self.width))
        self.register_buffer("mask", mask)
        if families:
            self.register_buffer("flags", _affine([{f"is_{family}": 1.0} for family in families])[0])

    def fit(self, features_BF: Tensor) -> None:
        """Take mean and deviation from the features of jobs with layers, shape ``[B, F]``; the last input, the mode, stays."""
        raw_BD, _, _, _ = self._raw(features_BF)
        self.mean[:-1] = raw_BD.mean(0)[:-1]
        deviation = raw_BD.std(0)[:-1]
        self.deviation[:-1] = torch.where(deviation > CONSTANT, deviation, torch.inf)

    def forward(self, features_BF: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inputs ``[B, D]``; reference and unit of the output in log-bytes ``[B, 1]``; :func:`group_names` ``[B, G]``."""
        raw_BD, log_lines_B2, modes_B2, groups_BG = self._raw(features_BF)
        inputs_BD = ((raw_BD - self.mean) / self.deviation).clamp(-CLIP, CLIP) * (modes_B2 @ self.mask)
        return inputs_BD, (log_lines_B2 * modes_B2).sum(1, keepdim=True), groups_BG @ self.errors, groups_BG

    def _raw(self, features_BF: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inputs before standardisation; both lines in log-bytes, those of the job's family; the modes; the groups."""
        blocks = torch.split(torch.addmm(self.offset, features_BF, self.matrix), self.blocks, dim=1)
        positive, totals, layers, angles, plain, modes_B2, groups_BG = blocks
        positive = torch.maximum(positive, self.floors)
        _, lines_BM, _ = torch.split(positive, self.positive, dim=1)
        logarithms, log_lines_BM, _ = torch.split(positive.log(), self.positive, dim=1)
        layers_line_B1, totals_line_B1 = torch.split(self._of_family(lines_BM, features_BF), 1, dim=1)
        relative = (totals / totals_line_B1, layers / layers_line_B1)
        raw_BD = torch.cat((logarithms, *relative, angles.sin(), plain), dim=1)
        return raw_BD, self._of_family(log_lines_BM, features_BF), modes_B2, groups_BG.relu()

    def _of_family(self, lines_BM: Tensor, features_BF: Tensor) -> Tensor:
        """The two of each job's own family, shape ``[B, 2]``."""
        if not self.families:
            return lines_BM
        flags_BM1 = (features_BF @ self.flags).unsqueeze(2)
        return (lines_BM.reshape(-1, len(self.families), 2) * flags_BM1).sum(1)


Mixture = tuple[Tensor, Tensor, Tensor]
"""Weights, locations and scales of each member's components, ``[B, E, K]`` each, in units of the closed form's error."""


class MemberMLPs(nn.Module):
    """``E`` MLPs of two hidden layers side by side, as batched matrix products."""

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
            self.biases[2][:, :, components : 2 * components] = torch.linspace(-0.8, 0.8, components)
            self.biases[2][:, :, 2 * components :] = -0.7

    def forward(self, inputs_EBD: Tensor) -> Mixture:
        """Each member's mixture."""
        hidden_EBH = nn.functional.silu(inputs_EBD @ self.weights[0] + self.biases[0])
        hidden_EBH = nn.functional.silu(hidden_EBH @ self.weights[1] + self.biases[1])
        outputs_BEK = (hidden_EBH @ self.weights[2] + self.biases[2]).transpose(0, 1)
        logits_BEK, locations_BEK, scales_BEK = torch.split(outputs_BEK, self.components, dim=-1)
        return logits_BEK.softmax(-1), locations_BEK, scales_BEK.exp() + SMALLEST_SCALE


def centre_and_spread(weights: Tensor, locations: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Centre of a mixture, and the distance of its components' mass from there; ``[..., K]`` to ``[..., 1]`` each.

    The centre is the mean of the locations weighted by each component's height, ``weight / scale``: close to the mode, without
    a search.  The spread grows with the weights' sum.
    """
    heights = weights / scales
    centre = (heights * locations).sum(-1, keepdim=True) / heights.sum(-1, keepdim=True)
    distances = (locations - centre).abs() + MEAN_DEVIATION * scales
    return centre, (weights * distances).sum(-1, keepdim=True)


def mixture_cdf(mixture: Mixture, positions: Tensor) -> Tensor:
    """CDF of each member's mixture with its background, at positions of shape ``[B, E]`` in units of the error."""
    weights, locations, scales = mixture
    cumulative = (weights * torch.sigmoid((positions[..., None] - locations) / scales)).sum(-1)
    return (1.0 - BACKGROUND_WEIGHT) * cumulative + BACKGROUND_WEIGHT * torch.sigmoid(positions / BACKGROUND_SCALE)


def float_tensor(values: NDArray[np.float64]) -> Tensor:
    """Features as the graph takes them: single precision."""
    return torch.from_numpy(values.astype(np.float32))
