"""GPUMemNet's own two networks (arXiv 2602.17817): its features, its networks and how it trains them."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpumemnet.errors import InvalidJobError
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.layers import GROUP_NAMES, LAYER_GROUPS
from gpumemnet.job.training_job import ACTIVATION_FUNCTIONS, TrainingJob
from gpumemnet.physics.layer_records import LAYER_KINDS
from gpumemnet.predict.distribution import BinScheme
from models.evaluation import Answers
from models.training.data import LabelledJobs, fold_numbers

COUNTED_KINDS: Final[dict[str, tuple[str, ...]]] = {
    "linear": LAYER_GROUPS["linear"],
    "batch_norm": tuple(kind for kind in LAYER_GROUPS["norm"] if kind.startswith("batch_norm")),
    "dropout": LAYER_GROUPS["dropout"],
    "conv": LAYER_GROUPS["conv"],
    "layer_norm": ("layer_norm",),
}
"""Counted type of layer → the layer kinds that it includes."""
FAMILY_COUNTS: Final[dict[str, tuple[str, ...]]] = {
    "mlp": ("linear", "batch_norm", "dropout"),
    "cnn": ("linear", "batch_norm", "dropout", "conv"),
    "transformer": ("linear", "batch_norm", "dropout", "layer_norm"),
}
"""Family → the types of layers that are counted."""
FAMILIES_WITH_BATCH_ACTIVATIONS: Final = ("cnn", "transformer")
ACTIVATION_ORDER: Final = tuple(sorted(ACTIVATION_FUNCTIONS))
"""Activation functions in the order of their encoding: position ``i`` of ``n`` becomes ``(sin,
cos)(i·π/n)``.

The paper's list is also alphabetical, but has 10 or 11 functions.  This one has every function that
a job can name.
"""
SEQUENCE_WIDTH: Final = 3
"""Columns of one layer: position of its group in :data:`gpumemnet.job.layers.GROUP_NAMES`, log
activations, log parameters."""


def paper_features(jobs: Sequence[TrainingJob]) -> NDArray[np.float64]:
    """Return the feature vectors of ``B`` jobs of one family, shape ``[B, F]``.

    Columns: log(1 + …) of the layer counts of :data:`FAMILY_COUNTS`, batch size, parameters,
    activations per sample and, for CNNs
    and transformers, activations of the batch; then sine and cosine of the activation function.
    ``F`` is 8, 10 and 10.

    Raises:
        InvalidJobError: when a job has totals only.
        ValueError: when the jobs are of several families.
    """
    _require_layers(jobs)
    families = {job.family for job in jobs}
    if len(families) > 1:
        raise ValueError(
            f"jobs of {', '.join(sorted(families))} have different features: give one family at a time"
        )
    amounts = np.log1p(np.array([_amounts(job) for job in jobs], dtype=np.float64))
    places = np.array(
        [ACTIVATION_ORDER.index(job.activation_function or "identity") for job in jobs]
    )
    angles = places * (np.pi / len(ACTIVATION_ORDER))
    return np.column_stack((amounts, np.sin(angles), np.cos(angles)))


def paper_sequences(jobs: Sequence[TrainingJob]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the layer sequences of ``B`` jobs, padded with zeros to the longest, ``L`` layers.

    The paper's codes of layer types differ between families and combine most types.  Here the code
    is the layer's group.

    Returns:
        The sequences, shape ``[B, L, 3]`` (:data:`SEQUENCE_WIDTH`), and the mask of real layers,
        shape ``[B, L]``.

    Raises:
        InvalidJobError: when a job has totals only.
    """
    _require_layers(jobs)
    table = JobTable.from_jobs(jobs)
    counts, groups = (
        table.layer_counts,
        np.array([kind.group for kind in LAYER_KINDS])[table.known_kinds],
    )
    mask = np.arange(counts.max(initial=0)) < counts[:, None]
    sequences = np.zeros((*mask.shape, SEQUENCE_WIDTH))
    sequences[mask] = np.column_stack(
        (groups, np.log1p(table.layer_activations), np.log1p(table.layer_parameters))
    )
    return sequences, mask


def _require_layers(jobs: Sequence[TrainingJob]) -> None:
    if not all(job.has_layers for job in jobs):
        raise InvalidJobError(
            "is empty: the paper's estimators need the layer list, not totals alone", "layers"
        )


def _amounts(job: TrainingJob) -> list[int]:
    kinds = Counter(layer.kind for layer in job.layers)
    counts = [
        sum(kinds[kind] for kind in COUNTED_KINDS[sort]) for sort in FAMILY_COUNTS[job.family]
    ]
    assert job.total_parameters is not None
    assert job.total_activations is not None
    amounts = [*counts, job.batch_size, job.total_parameters, job.total_activations]
    if job.family in FAMILIES_WITH_BATCH_ACTIVATIONS:
        amounts.append(job.total_activations * job.batch_size)
    return amounts


# Shapes: B jobs, F features, L layers, D inputs, E ensemble members, H hidden width, C classes, W
# width of an encoder.

MEMBERS: Final = 13
HIDDEN_WIDTHS: Final = (8, 4)
ENCODER_WIDTHS: Final = (4, 6)
ENCODER_LAYERS: Final = 2
FEED_FORWARD_WIDTH: Final = 64
"""Width of the feed-forward network, not given in the paper.

With it the network for MLPs has 6,600 parameters; the paper's networks have 7,600 to 13,600.
"""


class Standardise(nn.Module):
    """Standardises columns with the mean and deviation of the training rows; constant columns
    become 0."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, training_NF: Tensor) -> None:
        super().__init__()
        deviation = training_NF.std(0)
        self.register_buffer("mean", training_NF.mean(0))
        self.register_buffer("deviation", torch.where(deviation > 1e-6, deviation, 1.0))

    def forward(self, values: Tensor) -> Tensor:
        """Return the standardised values, any shape ``[..., F]``."""
        return (values - self.mean) / self.deviation


class TinyMLPs(nn.Module):
    """All members of the ensemble, with a leading member axis in each weight; returns the mean of
    their logits."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        widths = (inputs, *HIDDEN_WIDTHS, classes)
        pairs = list(pairwise(widths))
        # The initialisation of nn.Linear, applied to each member's slice of the weight.
        self.weights = nn.ParameterList(_uniform((MEMBERS, ins, outs), ins) for ins, outs in pairs)
        self.biases = nn.ParameterList(_uniform((MEMBERS, outs), ins) for ins, outs in pairs)
        self.norms = nn.ModuleList(nn.BatchNorm1d(MEMBERS * width) for width in HIDDEN_WIDTHS)

    def forward(self, inputs_BD: Tensor) -> Tensor:
        """Logits, shape ``[B, C]``."""
        values_BED = inputs_BD[:, None].expand(-1, MEMBERS, -1)
        for weight, bias, norm in zip(self.weights, self.biases, self.norms, strict=False):
            values_BEH = torch.einsum("bed,edh->beh", values_BED, weight) + bias
            values_BED = norm(values_BEH.flatten(1)).relu().unflatten(1, (MEMBERS, -1))
        logits_BEC = torch.einsum("bed,edc->bec", values_BED, self.weights[-1]) + self.biases[-1]
        logits_BC: Tensor = logits_BEC.mean(1)
        return logits_BC


def _uniform(shape: tuple[int, ...], inputs: int) -> nn.Parameter:
    return nn.Parameter(
        torch.empty(shape).uniform_(-1.0 / math.sqrt(inputs), 1.0 / math.sqrt(inputs))
    )


class PaperMLP(nn.Module):
    """The MLP-based estimator: standardised features, then the ensemble."""

    def __init__(self, features_NF: Tensor, classes: int) -> None:
        """Create the network for ``classes`` classes; ``features_NF`` are the training rows for
        standardisation."""
        super().__init__()
        self.standardise = Standardise(features_NF)
        self.members = TinyMLPs(features_NF.shape[1], classes)

    def forward(self, features_BF: Tensor) -> Tensor:
        """Logits, shape ``[B, C]``."""
        logits: Tensor = self.members(self.standardise(features_BF))
        return logits


class PaperTransformer(nn.Module):
    """The transformer-based estimator: the ensemble over the features and two mean-pooled encoders
    of the layers.

    There is no positional encoding, so the encoders treat the sequence as a set.
    """

    def __init__(
        self, features_NF: Tensor, sequences_NL3: Tensor, mask_NL: Tensor, classes: int
    ) -> None:
        """Create the network for ``classes`` classes; the first three arguments are the training
        rows for standardisation."""
        super().__init__()
        self.standardise = Standardise(features_NF)
        self.standardise_layers = Standardise(sequences_NL3[mask_NL][:, 1:])
        self.projections = nn.ModuleList(
            nn.Linear(len(GROUP_NAMES) + 2, width) for width in ENCODER_WIDTHS
        )
        self.encoders = nn.ModuleList(_encoder(width) for width in ENCODER_WIDTHS)
        self.members = TinyMLPs(features_NF.shape[1] + sum(ENCODER_WIDTHS), classes)

    def forward(self, features_BF: Tensor, sequences_BL3: Tensor, mask_BL: Tensor) -> Tensor:
        """Return the logits, shape ``[B, C]``; ``mask_BL`` is true for real layers, of which every
        job has at least one."""
        groups_BLG = nn.functional.one_hot(sequences_BL3[..., 0].long(), len(GROUP_NAMES)).to(
            sequences_BL3
        )
        layers_BLD = torch.cat(
            (groups_BLG, self.standardise_layers(sequences_BL3[..., 1:])), dim=-1
        )
        pooled = []
        for projection, encoder in zip(self.projections, self.encoders, strict=True):
            encoded_BLW = encoder(projection(layers_BLD), src_key_padding_mask=~mask_BL)
            encoded_BLW = encoded_BLW.masked_fill(~mask_BL[..., None], 0.0)
            pooled.append(encoded_BLW.sum(1) / mask_BL.sum(1, keepdim=True))
        logits: Tensor = self.members(torch.cat((self.standardise(features_BF), *pooled), dim=1))
        return logits


def _encoder(width: int) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        width, nhead=1, dim_feedforward=FEED_FORWARD_WIDTH, dropout=0.0, batch_first=True
    )
    return nn.TransformerEncoder(layer, ENCODER_LAYERS, enable_nested_tensor=False)


Inputs = tuple[Tensor, ...]
"""Inputs of a network for ``B`` jobs; each tensor's first axis is ``B``."""
Predict = Callable[[LabelledJobs], Answers]

EPOCHS: Final = 150
"""Most epochs; the paper allows 600.

On 2,000 MLPs early stopping ends near 200.  On a few hundred jobs an epoch has only three steps, so
allow 600 there.
"""
PATIENCE: Final = 30
LEARNING_RATE: Final = 1e-3
BATCH_ROWS: Final = 64
PIECES: Final = 20
HELD_OUT_PIECES: Final = 3
"""Held-out pieces of 20: 15 % of the architectures decide when to stop."""
INFERENCE_ROWS: Final = 256
"""Rows per inference batch; attention over 500 layers takes a megabyte per job and encoder."""


def fit_paper_mlp(
    training: LabelledJobs, schemes: tuple[BinScheme, ...], seed: int, epochs: int = EPOCHS
) -> Predict:
    """Train the MLP-based estimator for each scheme; return a function that predicts other jobs of
    the family.

    Raises:
        InvalidJobError: when a job has totals only.
        ValueError: when there are fewer than 20 architectures, or several families.
    """
    return _fit_schemes(PaperMLP, _mlp_inputs, training, schemes, seed, epochs)


def fit_paper_transformer(
    training: LabelledJobs, schemes: tuple[BinScheme, ...], seed: int, epochs: int = EPOCHS
) -> Predict:
    """Train the transformer-based estimator for each scheme; otherwise like
    :func:`fit_paper_mlp`."""
    return _fit_schemes(PaperTransformer, _transformer_inputs, training, schemes, seed, epochs)


def _mlp_inputs(data: LabelledJobs) -> Inputs:
    return (torch.from_numpy(paper_features(data.jobs)).float(),)


def _transformer_inputs(data: LabelledJobs) -> Inputs:
    sequences, mask = paper_sequences(data.jobs)
    return *_mlp_inputs(data), torch.from_numpy(sequences).float(), torch.from_numpy(mask)


def _fit_schemes(
    build: Callable[..., nn.Module],
    read: Callable[[LabelledJobs], Inputs],
    training: LabelledJobs,
    schemes: tuple[BinScheme, ...],
    seed: int,
    epochs: int,
) -> Predict:
    inputs = read(training)
    held_out = fold_numbers(training.groups, PIECES, seed) < HELD_OUT_PIECES
    networks = {
        scheme.name: _fit(build, inputs, _classes(training, scheme), held_out, seed, epochs)
        for scheme in schemes
    }
    finest = min(schemes, key=lambda scheme: scheme.width_bytes)
    open_from = _first_open_class(training, finest)

    def predict(jobs: LabelledJobs) -> Answers:
        inputs = read(jobs)
        bins = {
            name: _logits(network, inputs).argmax(1).numpy() for name, network in networks.items()
        }
        return _answers(bins, finest, open_from)

    return predict


def _classes(data: LabelledJobs, scheme: BinScheme) -> NDArray[np.int64]:
    """Return the class of each job, shape ``[B]``; for a job that ran out of memory, that of the
    card's capacity.

    The paper labels such jobs 42,000 or 45,000 MiB, with the same effect: they are in the top
    class.
    """
    return scheme.index(np.where(np.isnan(data.label_bytes), data.lower_bytes, data.label_bytes))


def _first_open_class(data: LabelledJobs, scheme: BinScheme) -> int:
    """Return the first class without a valid upper edge: the scheme's open bin, or a top class with
    out-of-memory jobs."""
    classes = _classes(data, scheme)
    top = int(classes.max())
    return top if np.isnan(data.label_bytes[classes == top]).any() else scheme.count - 1


def _answers(bins: dict[str, NDArray[np.int64]], finest: BinScheme, open_from: int) -> Answers:
    """Convert predicted bins to expected and safe bytes.

    Expected bytes are the middle of the finest scheme's predicted bin, or the lower edge of an open
    bin.  Safe bytes are its upper edge, which CARMA (arXiv 2508.19073) uses as the job's demand;
    they are NaN for an open bin.
    """
    lower = bins[finest.name] * float(finest.width_bytes)
    is_open = bins[finest.name] >= open_from
    return Answers(
        expected_bytes=np.where(is_open, lower, lower + finest.width_bytes / 2),
        safe_bytes=np.where(is_open, np.nan, lower + finest.width_bytes),
        bins=bins,
    )


def _fit(
    build: Callable[..., nn.Module],
    inputs: Inputs,
    classes: NDArray[np.int64],
    held_out: NDArray[np.bool_],
    seed: int,
    epochs: int,
) -> nn.Module:
    """Train a network for classes 0 to the highest in ``classes``, shape ``[B]``; keep its best
    epoch on ``held_out``."""
    classes_B = torch.from_numpy(classes)
    learned, stopping = (
        torch.from_numpy(np.flatnonzero(~held_out)),
        torch.from_numpy(np.flatnonzero(held_out)),
    )
    learned_inputs, stopping_inputs = (
        tuple(part[rows] for part in inputs) for rows in (learned, stopping)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = build(*learned_inputs, classes=int(classes.max()) + 1)
        optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
        best_loss, best_epoch, best_state = float("inf"), 0, copy.deepcopy(network.state_dict())
        for epoch in range(epochs):
            network.train()
            # Batches of nearly equal size, because batch norm cannot train on a last batch of one
            # row.
            for rows in learned[torch.randperm(len(learned))].tensor_split(
                max(len(learned) // BATCH_ROWS, 1)
            ):
                loss = nn.functional.cross_entropy(
                    network(*(part[rows] for part in inputs)), classes_B[rows]
                )
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            stopping_loss = float(
                nn.functional.cross_entropy(_logits(network, stopping_inputs), classes_B[stopping])
            )
            if stopping_loss < best_loss:
                best_loss, best_epoch, best_state = (
                    stopping_loss,
                    epoch,
                    copy.deepcopy(network.state_dict()),
                )
            elif epoch - best_epoch >= PATIENCE:
                break
    network.load_state_dict(best_state)
    return network


def _logits(network: nn.Module, inputs: Inputs) -> Tensor:
    """Return the logits in evaluation mode, shape ``[B, C]``."""
    network.eval()
    with torch.no_grad():
        every_row = torch.arange(len(inputs[0]))
        return torch.cat(
            [
                network(*(part[rows] for part in inputs))
                for rows in torch.split(every_row, INFERENCE_ROWS)
            ]
        )
