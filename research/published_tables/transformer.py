"""GPUMemNet's published transformers: the network of a row, rebuilt from the row's file name, and
the row as a measurement.

The rows are ``Datasets/Transformers/transformer_data.csv`` of github.com/itu-rad/GPUMemNet (arXiv
2602.17817; also stored as ``Analysis/00-Cleaned-NoteBooks/001-visualizations/Transformers.csv``),
its datasets being CC BY 4.0.  What ran is ``NeuroNetGen_scripts/Transformer/transformer.py`` there,
in its default form ``standard``; what moves memory in it:

* fp32, no autocast; ``torch.optim.Adam`` (lr 0.001) with PyTorch's default implementation;
  cross-entropy over the classes.
* ``nn.TransformerEncoderLayer`` with ``batch_first``, ReLU and post-norm; no mask, so
  ``need_weights`` is off and the fused attention kernels are open.  The name of the error that
  marked the OOM rows exists since torch 2.5, and in fp32 such a torch takes the memory-efficient
  kernel on an A100.
* The embedding's gradient is dense, so Adam's step touches the whole vocabulary.
* Before the optimizer exists the network runs twice in training mode on one full random batch, for
  a check and for a printed summary.  Both graphs are freed, their memory stays in the allocator's
  cache; that batch of int64 tokens stays alive to the end.
* ``zero_grad`` (to ``None``) stands at the beginning of a step, so gradients live through ``step``
  and the loading of the next batch; logits and loss of a step live until the next forward pass is
  done.
* Samples are drawn on the host by two workers, pinned, and moved batch by batch; none is resident
  on the GPU.
* The last batch of an epoch is smaller unless the batch size divides the samples
  (:attr:`PublishedTransformer.last_batch_size`); epochs follow each other until 60 s are over, and
  nothing says how many steps that made.
* ``nvidia-smi`` was read once a second, for the whole GPU, one job at a time; the label is the
  largest reading.

``Accumulated Params`` is the embedding and all linear layers but the fused projection of queries,
keys and values; ``Total Parameters`` is what its summary saw run: the embedding, feed-forward,
norms and head.  Neither holds the fused projection or the positions, and the latter lacks the
attention's output projection too.  It is 0 where the summary's forward pass failed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from dataset_builder.families import TensorSpec
from gpumemnet.errors import DatasetError
from gpumemnet.job.layers import Layer, describe
from gpumemnet.job.measurement import Measurement
from gpumemnet.job.training_job import TrainingJob
from research.published_tables.rows import (
    PUBLISHED_OPTIONS,
    Row,
    count_in,
    published_measurement,
    text_in,
)

if TYPE_CHECKING:
    from torch import Tensor, nn


class EncoderClassifier(nn.Module):
    """Token embedding and learned positions, post-norm encoder layers with ReLU, the mean over the
    positions, a linear head.

    Attributes:
        embedding: tokens to vectors; its gradient is dense.
        positional_encoding: one vector for each position, zero at first, trained.
        encoder: the layers, none of them masked, so their attention weights are never asked for.
        head: vectors to classes.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        width: int,
        depth: int,
        heads: int,
        feed_forward_width: int,
        dropout: float,
        length: int,
        classes: int,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positional_encoding = nn.Parameter(torch.zeros(1, length, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, feed_forward_width, dropout, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(
            layer, depth, enable_nested_tensor=False
        )  # nested tensors are for inference
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``[batch, length]`` to logits ``[batch, classes]``."""
        positions: Tensor = self.encoder(self.embedding(tokens) + self.positional_encoding)
        logits: Tensor = self.head(positions.mean(dim=1))
        return logits


COLUMNS: Final = (
    *("Filename", "Batch Size", "Seq Length", "Embedding Size", "Num Layers", "Num Heads"),
    *("Accumulated Params", "Total Parameters", "Max GPU Memory (MiB)", "Status"),
)
"""The columns that are read; the published table has more."""

STATUS_OF: Final[Mapping[str, str]] = {"SUCCESSFUL": "ok", "OOM_CRASH": "oom"}
ATTENTION_KERNEL: Final = "memory_efficient"

_COUNT_FIELDS: Final = (
    *("num_classes", "embedding_size", "num_layers", "num_heads", "ff_hidden_size"),
    *("seq_length", "input_size", "num_samples", "batch_size"),
)
_FILENAME: Final = re.compile(
    r"num_classes:(?P<num_classes>\d{1,9})_embedding_size:(?P<embedding_size>\d{1,9})_num_layers:(?P<num_layers>\d{1,4})"
    r"_num_heads:(?P<num_heads>\d{1,4})_ff_hidden_size:(?P<ff_hidden_size>\d{1,9})_dropout_rate:(?P<dropout_rate>\d\.\d{1,24})"
    r"_seq_length:(?P<seq_length>\d{1,9})_input_size:(?P<input_size>\d{1,9})_num_samples:(?P<num_samples>\d{1,9})"
    r"_batch_size:(?P<batch_size>\d{1,9})\.out"
)
_NAMED_TWICE: Final[Mapping[str, str]] = {
    "Batch Size": "batch_size",
    "Seq Length": "seq_length",
    "Embedding Size": "embedding_size",
    "Num Layers": "num_layers",
    "Num Heads": "num_heads",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTransformer:
    """The fields of a published file name, under their published names.

    Attributes:
        num_classes: of the head.
        embedding_size: elements of one position between the layers.
        num_layers: encoder layers.
        num_heads: attention heads; they divide the embedding size.
        ff_hidden_size: elements of one position inside the feed-forward part.
        dropout_rate: of every dropout, the attention weights' included.
        seq_length: tokens per sample.
        input_size: the vocabulary.
        num_samples: samples per epoch.
        batch_size: samples per step.

    Raises:
        DatasetError: on a value that no such network can have.
    """

    num_classes: int
    embedding_size: int
    num_layers: int
    num_heads: int
    ff_hidden_size: int
    dropout_rate: float
    seq_length: int
    input_size: int
    num_samples: int
    batch_size: int

    def __post_init__(self) -> None:
        for name in _COUNT_FIELDS:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise DatasetError(
                    f"a published transformer's {name} must be a positive whole number, not {describe(value)}"
                )
        if type(self.dropout_rate) is not float or not 0.0 <= self.dropout_rate < 1.0:
            raise DatasetError(
                f"a published transformer's dropout_rate must be a number in [0, 1), not {describe(self.dropout_rate)}"
            )
        if self.embedding_size % self.num_heads:
            raise DatasetError(
                f"{self.num_heads} heads do not divide an embedding size of {self.embedding_size}"
            )

    @property
    def forward_passes_first(self) -> int:
        """Forward passes before the optimizer exists: a check, and a printed summary."""
        return 2

    @property
    def last_batch_size(self) -> int:
        """Samples in the last batch of an epoch, which the data loader did not drop."""
        return self.num_samples % self.batch_size or self.batch_size

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; :func:`parse` is the inverse."""
        return dataclasses.asdict(self)


def parse(document: Mapping[str, Any]) -> PublishedTransformer:
    """The architecture from :meth:`PublishedTransformer.to_dict`.

    Raises:
        DatasetError: on unknown, missing or impossible values.
    """
    try:
        return PublishedTransformer(**document)
    except TypeError as error:
        raise DatasetError(
            f"the architecture is not that of a published transformer: {error}"
        ) from None


def parse_filename(filename: str) -> PublishedTransformer:
    """The architecture that a published file name spells out.

    Raises:
        DatasetError: when the name has another form, or no such network can exist.
    """
    named = _FILENAME.fullmatch(filename)
    if named is None:
        raise DatasetError(f"Filename does not have the published form: {describe(filename)}")
    return PublishedTransformer(
        dropout_rate=float(named["dropout_rate"]),
        **{name: int(named[name]) for name in _COUNT_FIELDS},
    )


class Network(NamedTuple):
    """The facts of a network that a job states."""

    layers: tuple[Layer, ...]
    input_elements: int
    activation_function: str
    sequence_length: int
    attention_kernel: str


def describe_network(architecture: PublishedTransformer) -> Network:
    """Layers in execution order, as :func:`build` makes them; the positions are averaged by a layer
    of kind ``other``."""
    a = architecture
    wide, inner = a.seq_length * a.embedding_size, a.seq_length * a.ff_hidden_size
    square = a.embedding_size * a.embedding_size
    norm = Layer("layer_norm", wide, 2 * a.embedding_size)
    layer = (
        Layer("linear", 3 * wide, 3 * (square + a.embedding_size)),
        Layer("attention", wide),
        Layer("linear", wide, square + a.embedding_size),
        Layer("dropout", wide),
        Layer("add", wide),
        norm,
        Layer("linear", inner, (a.embedding_size + 1) * a.ff_hidden_size),
        Layer("relu", inner),
        Layer("dropout", inner),
        Layer("linear", wide, (a.ff_hidden_size + 1) * a.embedding_size),
        Layer("dropout", wide),
        Layer("add", wide),
        norm,
    )
    return Network(
        layers=(
            Layer("embedding", wide, a.input_size * a.embedding_size),
            Layer("positional_embedding", wide, wide),
            *layer * a.num_layers,
            Layer("other", a.embedding_size),
            Layer("linear", a.num_classes, (a.embedding_size + 1) * a.num_classes),
        ),
        input_elements=a.seq_length,
        activation_function="relu",
        sequence_length=a.seq_length,
        attention_kernel=ATTENTION_KERNEL,
    )


def build(architecture: PublishedTransformer) -> nn.Module:
    """The network on torch's current default device: tokens ``[batch, seq_length]`` to logits
    ``[batch, num_classes]``."""

    a = architecture
    return EncoderClassifier(
        vocabulary=a.input_size,
        width=a.embedding_size,
        depth=a.num_layers,
        heads=a.num_heads,
        feed_forward_width=a.ff_hidden_size,
        dropout=a.dropout_rate,
        length=a.seq_length,
        classes=a.num_classes,
    )


def tensors(architecture: PublishedTransformer) -> tuple[tuple[TensorSpec, ...], TensorSpec]:
    """The tokens of one sample, and its class."""
    return (TensorSpec((architecture.seq_length,), architecture.input_size),), TensorSpec(
        (), architecture.num_classes
    )


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of the logits ``[batch, num_classes]``."""
    from torch.nn import functional

    return functional.cross_entropy(outputs, targets)


def published_parameters(architecture: PublishedTransformer) -> tuple[int, int]:
    """``Accumulated Params`` and ``Total Parameters`` as the published table counts them."""
    a = architecture
    common = a.input_size * a.embedding_size + (a.embedding_size + 1) * a.num_classes
    feed_forward = 2 * a.embedding_size * a.ff_hidden_size + a.ff_hidden_size + a.embedding_size
    projection = (a.embedding_size + 1) * a.embedding_size
    return (
        common + a.num_layers * (feed_forward + projection),
        common + a.num_layers * (feed_forward + 4 * a.embedding_size),
    )


def measurement_of_row(row: Row) -> Measurement:
    """One row of the published table, a mapping from :data:`COLUMNS` to text.

    An OOM row keeps the largest reading, and its reason tells whether the summary's forward pass
    fitted.

    Raises:
        DatasetError: when a column is missing, or contradicts the file name.
    """
    architecture = parse_filename(text_in(row, "Filename"))
    for column, name in _NAMED_TWICE.items():
        if count_in(row, column) != getattr(architecture, name):
            raise DatasetError(
                f"{column} is {row[column]}, but Filename says {getattr(architecture, name)}"
            )
    accumulated, total = published_parameters(architecture)
    summarised = count_in(row, "Total Parameters")
    for column, found, expected in (
        ("Accumulated Params", count_in(row, "Accumulated Params"), accumulated),
        ("Total Parameters", summarised, total),
    ):
        if found != expected and (found or column == "Accumulated Params"):
            raise DatasetError(
                f"{column} is {found}, but the network that Filename describes has {expected}"
            )
    status, reason = _ending(text_in(row, "Status"), bool(summarised))
    network = describe_network(architecture)
    job = TrainingJob(
        family="transformer",
        batch_size=architecture.batch_size,
        input_elements=network.input_elements,
        layers=network.layers,
        activation_function=network.activation_function,
        sequence_length=network.sequence_length,
        **{**PUBLISHED_OPTIONS.job_fields(), "attention_kernel": network.attention_kernel},
    )
    return published_measurement(job, architecture, row, status, reason)


def _ending(published: str, summarised: bool) -> tuple[str, str | None]:
    """Status and reason of a row that ended as ``published``, with or without the summary's
    total."""
    if published not in STATUS_OF:
        raise DatasetError(
            f"Status must be one of {', '.join(STATUS_OF)}, not {describe(published)}"
        )
    status = STATUS_OF[published]
    if status == "oom":
        return (
            status,
            "out of memory in training"
            if summarised
            else "out of memory in a forward pass, before training",
        )
    if not summarised:  # its summary failed, and only one kind of failure was looked for
        return "error", "no parameters were summed up: the network did not run"
    return status, None
