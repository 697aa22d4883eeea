"""Networks that no library ships ready-made: recurrent models of text, and a recommender with
embedding tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn

_CELLS: Final[Mapping[str, type[nn.LSTM | nn.GRU]]] = {"lstm": nn.LSTM, "gru": nn.GRU}


class TextClassifier(nn.Module):
    """An embedding, recurrent layers, and a linear layer on the last state.

    Args:
        cell: ``lstm`` or ``gru``.
        vocabulary: number of tokens.
        embedding, width: features of a token, and of a direction's state.
        depth: recurrent layers.
        bidirectional: whether the sequence is read backwards too.
        dropout: share of the states between layers that is dropped.
        classes: outputs.
    """

    def __init__(
        self,
        cell: str,
        vocabulary: int,
        embedding: int,
        width: int,
        depth: int,
        bidirectional: bool,
        dropout: float,
        classes: int,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.recurrent = _recurrent(cell, embedding, width, depth, bidirectional, dropout)
        self.head = nn.Linear(width * (1 + bidirectional), classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[batch, classes]`` for tokens ``[batch, length]``."""
        states, _ = self.recurrent(self.embedding(tokens))
        logits: Tensor = self.head(states[:, -1])
        return logits


class LanguageModel(nn.Module):
    """An embedding, recurrent layers, and a linear layer on every state that predicts the next
    token.

    Args:
        cell, vocabulary, embedding, width, depth, dropout: as in :class:`TextClassifier`.
    """

    def __init__(
        self, cell: str, vocabulary: int, embedding: int, width: int, depth: int, dropout: float
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.recurrent = _recurrent(cell, embedding, width, depth, False, dropout)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[batch, length, vocabulary]`` for tokens ``[batch, length]``."""
        states, _ = self.recurrent(self.dropout(self.embedding(tokens)))
        logits: Tensor = self.head(self.dropout(states))
        return logits


class Recommender(nn.Module):
    """Embedding tables and a multilayer perceptron, their pairwise products, and another perceptron
    (DLRM, arXiv 1906.00091).

    Args:
        dense: numbers of a sample.
        tables: embedding tables, with one entry of each per sample.
        rows: rows of a table.
        width: features of a row.
        bottom, top: widths of the layers before and after the products, without their last.
    """

    def __init__(
        self, dense: int, tables: int, rows: int, width: int, bottom: list[int], top: list[int]
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = _perceptron([dense, *bottom, width])
        pairs = (tables + 1) * tables // 2
        self.top = _perceptron([width + pairs, *top, 1])

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Logits ``[batch, 1]`` for numbers ``[batch, dense]`` and rows ``[batch, tables]``."""
        first = self.bottom(dense)
        vectors = torch.stack(
            [first, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], dim=1
        )
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        rows, columns = torch.tril_indices(vectors.shape[1], vectors.shape[1], offset=-1)
        logits: Tensor = self.top(torch.cat([first, products[:, rows, columns]], dim=1))
        return logits


OWN_NETWORKS: Final[Mapping[str, Callable[..., nn.Module]]] = {
    "text_classifier": TextClassifier,
    "language_model": LanguageModel,
    "recommender": Recommender,
}
"""Name in an architecture's document → the class; the document's settings are its arguments."""


def own_inputs(
    model: str, settings: Mapping[str, Any], length: int, batch_size: int
) -> tuple[Tensor, ...]:
    """Inputs of the network ``model`` with ``settings``, on meta tensors.

    Args:
        model: a name of :data:`OWN_NETWORKS`.
        settings: its arguments.
        length: tokens of a sample, for models of text.
        batch_size: samples.
    """
    if model == "recommender":
        dense = torch.empty(batch_size, settings["dense"], device="meta")
        return dense, torch.empty(batch_size, settings["tables"], dtype=torch.long, device="meta")
    return (torch.empty(batch_size, length, dtype=torch.long, device="meta"),)


def _recurrent(
    cell: str, inputs: int, width: int, depth: int, bidirectional: bool, dropout: float
) -> nn.LSTM | nn.GRU:
    between = dropout if depth > 1 else 0.0
    return _CELLS[cell](
        inputs,
        width,
        num_layers=depth,
        batch_first=True,
        bidirectional=bidirectional,
        dropout=between,
    )


def _perceptron(widths: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
