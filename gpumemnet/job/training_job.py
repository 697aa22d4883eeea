"""The training job as a scheduler knows it before it runs: the model's layers and every option that
affects memory.

A job is plain data.  It comes from a scheduler's request, from :mod:`gpumemnet.extract` or from the
dataset builder, and it is the only input of an estimator.  GPUMemNet (arXiv 2602.17817) fixes the
optimizer (Adam) and the precision (fp32).  Here they are fields, because they alone change a job's
memory by a factor of four.

Every training option is declared once, in :class:`TrainingOptions`: its name, values, default and
description.  The trace, the command line, the service's schema and the recipes of the dataset
builder use these declarations.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, cast

from gpumemnet.errors import InvalidJobError
from gpumemnet.job.layers import MAX_ELEMENTS, MAX_LAYERS, Layer, check_count, describe

OPTIMIZERS: Final = ("sgd", "sgd_momentum", "adam", "adamw", "rmsprop", "adagrad", "adafactor")
OPTIMIZER_IMPLEMENTATIONS: Final = ("default", "foreach", "fused", "for_loop")
PRECISIONS: Final = ("fp32", "tf32", "amp_fp16", "amp_bf16", "bf16")
CHECKPOINTING: Final = ("none", "every_block")
ATTENTION_KERNELS: Final = ("math", "flash", "memory_efficient", "cudnn")
MAX_GRADIENT_ACCUMULATION: Final = 2**31 - 1
MAX_RANKS: Final = 2**16


@dataclass(frozen=True, slots=True)
class Option:
    """The declaration of one training option.

    Attributes:
        name: name of the field.
        default: value when a job does not state the option.
        description: a phrase in lower case without a full stop.
        choices: the allowed strings; empty for switches and counts.
        minimum, maximum: limits of a count; both 0 for strings and switches.
    """

    name: str
    default: str | int | bool | None
    description: str
    choices: tuple[str, ...] = ()
    minimum: int = 0
    maximum: int = 0

    @property
    def is_switch(self) -> bool:
        """Whether the value is true or false."""
        return isinstance(self.default, bool)

    @property
    def is_count(self) -> bool:
        """Whether the value is a whole number."""
        return self.maximum > 0

    def checked(self, value: object) -> object:
        """Returns ``value`` if it is allowed; counts are converted to ``int``.

        Raises:
            InvalidJobError: names the option and its allowed values.
        """
        if value is None is self.default:
            return None
        if self.is_count:
            return check_count(value, self.name, self.minimum, self.maximum)
        if self.is_switch and not isinstance(value, bool):
            raise InvalidJobError(f"must be true or false, not {describe(value)}", self.name)
        if self.choices and value not in self.choices:
            raise InvalidJobError(
                f"must be one of {', '.join(self.choices)}, not {describe(value)}", self.name
            )
        return value


def _option(default: str | int | bool | None, description: str, **values: Any) -> Any:
    return field(default=default, metadata={"description": description, **values})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """The options with which a model is trained; :data:`TRAINING_OPTIONS` lists values and
    descriptions.

    Raises:
        InvalidJobError: names the option and its allowed values.
    """

    optimizer: str = _option("adamw", "the optimizer", choices=OPTIMIZERS)
    precision: str = _option(
        "fp32",
        "number formats: fp32, with convolutions in TF32 as by PyTorch's default; tf32, with matrix products in TF32 too; "
        "amp_fp16 and amp_bf16, autocast over fp32 weights; bf16, all tensors in bfloat16",
        choices=PRECISIONS,
    )
    attention_kernel: str | None = _option(
        None,
        "kernel of scaled-dot-product attention, where the model has attention and it is known",
        choices=ATTENTION_KERNELS,
    )
    optimizer_implementation: str = _option(
        "default",
        "PyTorch's foreach, fused or for-loop implementation; default is PyTorch's choice",
        choices=OPTIMIZER_IMPLEMENTATIONS,
    )
    checkpointing: str = _option(
        "none",
        "activation checkpointing: every_block recomputes each block in the backward pass",
        choices=CHECKPOINTING,
    )
    channels_last: bool = _option(False, "whether model and images use the NHWC memory format")
    gradient_accumulation: int = _option(
        1,
        "forward-backward passes per optimizer step",
        minimum=1,
        maximum=MAX_GRADIENT_ACCUMULATION,
    )
    cudnn_benchmark: bool = _option(False, "whether torch.backends.cudnn.benchmark is on")
    ranks: int = _option(
        1,
        "processes that train replicas with DistributedDataParallel, one on each GPU, this one included",
        minimum=1,
        maximum=MAX_RANKS,
    )

    def __post_init__(self) -> None:
        for option in TRAINING_OPTIONS.values():
            object.__setattr__(self, option.name, option.checked(getattr(self, option.name)))

    def job_fields(self) -> dict[str, Any]:
        """The options as fields of a :class:`~gpumemnet.job.training_job.TrainingJob`, without
        fields added by a subclass."""
        return {name: getattr(self, name) for name in TRAINING_OPTIONS}


TRAINING_OPTIONS: Final = {
    each.name: Option(each.name, cast(Any, each.default), **each.metadata)
    for each in fields(TrainingOptions)
}
"""Name → declaration, in the order of the fields."""
OPTION_SWITCHES: Final = tuple(
    name for name, option in TRAINING_OPTIONS.items() if option.is_switch
)
"""Names of the options that are true or false."""


SCHEMA_VERSION: Final = 1
"""Version of the job's JSON form.  It increases when a field changes its meaning, not for new
optional fields."""

MAX_BATCH_SIZE: Final = 2**31 - 1

FAMILIES: Final = ("mlp", "cnn", "transformer")
ACTIVATION_FUNCTIONS: Final = (
    *(
        "identity",
        "relu",
        "leaky_relu",
        "prelu",
        "elu",
        "selu",
        "gelu",
        "silu",
        "mish",
        "softplus",
        "tanh",
    ),
    *("sigmoid", "relu6", "hardswish", "swiglu", "geglu", "other"),
)

OUTPUTS_FREED: Final = ("before_backward", "after_step", "by_next_step")
MAX_BATCHES_ON_GPU: Final = 2**10

_DECLARATIONS: Final = {
    "family": Option("family", "", "the family of the network", FAMILIES),
    "activation_function": Option("activation_function", None, "", ACTIVATION_FUNCTIONS),
    "outputs_freed": Option("outputs_freed", None, "", OUTPUTS_FREED),
} | TRAINING_OPTIONS
FIELD_CHOICES: Final = {
    name: _DECLARATIONS[name].choices
    for name in (
        *("family", "optimizer", "precision", "activation_function", "attention_kernel"),
        *("optimizer_implementation", "checkpointing", "outputs_freed"),
    )
}
"""Field → its allowed strings."""

_DEFAULTS: Final = TrainingOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """One training process on one GPU.

    Attributes:
        family: ``mlp``, ``cnn`` or ``transformer``.
        batch_size: samples per forward pass on this GPU (the microbatch when gradients are
            accumulated).
        input_elements: elements of the input per sample (3·224·224 for an image; the sequence
            length for tokens).
        layers: the leaf layers in execution order; empty when only totals are known.
        total_activations: output elements per sample, summed over the layers; derived when layers
            are given.
        total_parameters: parameter elements, summed over the layers; derived when layers are given.
        trainable_parameters: parameter elements that receive gradients; by default all parameters
            of layers that do not say that they are frozen.
        activation_function: the network's main activation function, if it has one.
        sequence_length: tokens per sample, for models of sequences.
        traced_peak_bytes: reserved bytes at the peak from :mod:`gpumemnet.trace`, without CUDA
            context and NCCL buffers, if the job was traced; for several ranks, the peak of one
            rank.
        batches_on_gpu: batches of input that are on the GPU during a step, the one that is trained
            on included; more than one where a loader fetches ahead.
        outputs_freed: when a step's outputs and loss are freed: ``before_backward`` where the loop
            hands on the loss alone, ``after_step`` where it runs in a function that returns, or
            ``by_next_step`` where their names live until the next step replaces them.

    The other fields are those of :class:`~gpumemnet.job.training_job.TrainingOptions`.  NCCL's
    memory for several ranks is an assumption; no model was trained on it.

    Raises:
        InvalidJobError: names the field and its allowed values.
    """

    family: str
    batch_size: int
    input_elements: int
    optimizer: str
    precision: str
    layers: tuple[Layer, ...] = ()
    total_activations: int | None = None
    total_parameters: int | None = None
    trainable_parameters: int | None = None
    activation_function: str | None = None
    sequence_length: int | None = None
    attention_kernel: str | None = _DEFAULTS.attention_kernel
    optimizer_implementation: str = _DEFAULTS.optimizer_implementation
    checkpointing: str = _DEFAULTS.checkpointing
    channels_last: bool = _DEFAULTS.channels_last
    gradient_accumulation: int = _DEFAULTS.gradient_accumulation
    cudnn_benchmark: bool = _DEFAULTS.cudnn_benchmark
    ranks: int = _DEFAULTS.ranks
    traced_peak_bytes: int | None = None
    batches_on_gpu: int | None = None
    outputs_freed: str | None = None
    schema_version: int = field(default=SCHEMA_VERSION)

    def __post_init__(self) -> None:
        check_schema_version(self.schema_version)
        options = _OPTIONS_OF(self)
        try:
            check_options(*options)
        except TypeError:  # an unhashable value gets its error message without the cache
            check_options.__wrapped__(*options)
        if not isinstance(self.layers, tuple) or set(map(type, self.layers)) - {Layer}:
            raise InvalidJobError("must be a tuple of Layer", "layers")
        if len(self.layers) > MAX_LAYERS:
            raise InvalidJobError(
                f"must hold at most {MAX_LAYERS} layers, not {len(self.layers)}", "layers"
            )
        for name, minimum, maximum in FIELD_RANGES:
            value = getattr(self, name)
            if value is not None or name not in NULLABLE_FIELDS:
                object.__setattr__(self, name, check_count(value, name, minimum, maximum))
        self._settle_totals()

    def _settle_totals(self) -> None:
        """Checks the totals and derives those that are not stated;
        :meth:`gpumemnet.job.job_table.JobTable.settle_numbers` has the same rules for tables."""
        for name, field_of_layer in TOTAL_FIELDS.items():
            stated = getattr(self, name)
            total = sum(map(attrgetter(field_of_layer), self.layers))
            if stated is None and not self.layers:
                raise InvalidJobError(
                    "is missing: give the layers, or total_activations and total_parameters", name
                )
            if stated is None:
                object.__setattr__(self, name, check_count(total, name))
            elif self.layers and stated != total:
                raise InvalidJobError(
                    f"is {stated}, but the layers add up to {total}: leave it out or correct it",
                    name,
                )
        largest = cast(int, self.total_parameters)
        largest -= sum(layer.parameters for layer in self.layers if layer.trains is False)
        if self.trainable_parameters is None:
            object.__setattr__(self, "trainable_parameters", largest)
        elif self.trainable_parameters > largest:
            raise InvalidJobError(
                f"is {self.trainable_parameters}, more than the {largest} parameters"
                + (" of layers that train" if largest < cast(int, self.total_parameters) else ""),
                "trainable_parameters",
            )

    @property
    def has_layers(self) -> bool:
        """Whether the layer list is known, not only its totals."""
        return bool(self.layers)

    @property
    def options(self) -> TrainingOptions:
        """The training options of the job."""
        return TrainingOptions(**{name: getattr(self, name) for name in TRAINING_OPTIONS})

    @property
    def is_replica(self) -> bool:
        """Whether the job is one of several processes that train replicas; see
        :mod:`gpumemnet.physics.replicas`."""
        return self.ranks > 1


FIELD_DEFAULTS: Final[dict[str, Any]] = {
    each.name: None if each.default is MISSING else each.default for each in fields(TrainingJob)
}
"""Field → its value when a job does not state it; for required fields ``None``, which every check
refuses."""
JOB_FIELDS: Final = tuple(FIELD_DEFAULTS)
REQUIRED_FIELDS: Final = tuple(each.name for each in fields(TrainingJob) if each.default is MISSING)
NULLABLE_FIELDS: Final = frozenset(
    each.name for each in fields(TrainingJob) if each.default is None
)
"""Fields that may be left out or ``None``."""
FIELD_RANGES: Final[tuple[tuple[str, int, int], ...]] = (
    ("batch_size", 1, MAX_BATCH_SIZE),
    ("input_elements", 1, MAX_ELEMENTS),
    ("total_activations", 0, MAX_ELEMENTS),
    ("total_parameters", 0, MAX_ELEMENTS),
    ("trainable_parameters", 0, MAX_ELEMENTS),
    ("sequence_length", 1, MAX_ELEMENTS),
    ("gradient_accumulation", 1, MAX_GRADIENT_ACCUMULATION),
    ("ranks", 1, MAX_RANKS),
    ("traced_peak_bytes", 1, MAX_ELEMENTS),
    ("batches_on_gpu", 1, MAX_BATCHES_ON_GPU),
)
"""Name, smallest and largest value of each count field."""

OPTION_FIELDS: Final = (*FIELD_CHOICES, *OPTION_SWITCHES)
"""Fields of a set of options, in this order."""
NUMBER_FIELDS: Final = tuple(name for name, _, _ in FIELD_RANGES)
TOTAL_FIELDS: Final = {"total_activations": "activations", "total_parameters": "parameters"}
"""Field → the layers' field that adds up to it."""
UNSTATED_AS_ZERO: Final = frozenset({"sequence_length", "traced_peak_bytes", "batches_on_gpu"})
"""Count fields that may stay unstated and are never 0; the job table stores them as 0 when
unstated."""
_KNOWN_OPTION_SETS: Final = 4096

_OPTIONS_OF: Final = attrgetter(*OPTION_FIELDS)


@lru_cache(maxsize=_KNOWN_OPTION_SETS, typed=True)
def check_options(*options: object) -> None:
    """Checks a set of options, the values of :data:`OPTION_FIELDS`.

    Raises:
        InvalidJobError: names the field and its allowed values.
        TypeError: when a value is not hashable, and so not known yet.
    """
    for name, value in zip(OPTION_FIELDS, options, strict=True):
        _DECLARATIONS[name].checked(value)


def check_schema_version(version: object) -> None:
    """Checks the schema version of a job.

    Raises:
        InvalidJobError: when ``version`` is not :data:`SCHEMA_VERSION`.
    """
    if type(version) is not int or version < 1:
        raise InvalidJobError(
            f"must be {SCHEMA_VERSION}, not {describe(version)}", "schema_version"
        )
    if version != SCHEMA_VERSION:
        raise InvalidJobError(
            f"is {version}, and this version of gpumemnet reads {SCHEMA_VERSION}: upgrade gpumemnet or write the older form",
            "schema_version",
        )
