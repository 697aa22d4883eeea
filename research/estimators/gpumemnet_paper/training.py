"""Trains GPUMemNet's networks as the paper does: one network per bin scheme, Adam, cross-entropy,
early stopping.

The paper gives learning rate 1e-3, up to 600 epochs and patience 30 (arXiv 2602.17817, section 5).
Two things differ here. Each network is newly initialised.  The rows for early stopping have other
architectures than the training rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpumemnet.predict.distribution import BinScheme
from models.answers import Answers
from models.training.data import LabelledJobs, pieces

from .features import paper_features, paper_sequences
from .networks import PaperMLP, PaperTransformer

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
    held_out = pieces(training.groups, PIECES, seed) < HELD_OUT_PIECES
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
