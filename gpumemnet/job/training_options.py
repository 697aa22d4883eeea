"""Declares every training option once: its name, values, default and description.

:class:`~gpumemnet.job.training_job.TrainingJob`, the trace, the command line, the service's schema
and the recipes of the dataset builder all use the declarations in :class:`TrainingOptions`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Final, cast

from gpumemnet.errors import InvalidJobError
from gpumemnet.job.layers import check_count, describe

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

    @property
    def is_nullable(self) -> bool:
        """Whether the value may be ``None``."""
        return self.default is None

    def checked(self, value: object) -> object:
        """Returns ``value`` if it is allowed; counts are converted to ``int``.

        Raises:
            InvalidJobError: names the option and its allowed values.
        """
        if value is None and self.is_nullable:
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


TRAINING_OPTIONS: Final[dict[str, Option]] = {
    each.name: Option(each.name, cast(Any, each.default), **each.metadata)
    for each in fields(TrainingOptions)
}
"""Name → declaration, in the order of the fields."""
OPTION_CHOICES: Final[dict[str, tuple[str, ...]]] = {
    name: option.choices for name, option in TRAINING_OPTIONS.items() if option.choices
}
"""Name → allowed strings, for options that are strings."""
OPTION_RANGES: Final[dict[str, tuple[int, int]]] = {
    name: (option.minimum, option.maximum)
    for name, option in TRAINING_OPTIONS.items()
    if option.is_count
}
"""Name → smallest and largest value, for options that are counts."""
OPTION_SWITCHES: Final = tuple(
    name for name, option in TRAINING_OPTIONS.items() if option.is_switch
)
"""Names of the options that are true or false."""
