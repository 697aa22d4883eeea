"""What a fine-tuning method trains, and in which number formats it keeps weights.

* ``full`` trains every parameter.
* ``lora`` trains two low-rank matrices beside each target (arXiv 2106.09685), as ``peft`` builds
  them: adapters in fp32, over a frozen base.
* ``dora`` also trains a magnitude for each output feature (arXiv 2402.09353).
* ``qlora`` is LoRA over a base of 4-bit NormalFloat with double quantisation (arXiv 2305.14314), as
  ``bitsandbytes`` stores it: each linear layer is dequantised while it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import check_count, describe
from gpumemnet.job.training_job import MAX_BATCH_SIZE, MAX_RANKS, OPTIMIZERS
from gpumemnet.named.blocks import tables
from gpumemnet.named.operators import Operator
from gpumemnet.physics.element_types import FULL_BYTES, HALF_BYTES
from gpumemnet.physics.optimizers import optimizer_copies

Fields = dict[str, Any]
"""Fields of a :class:`Method` → their values."""
METHODS: Final = ("full", "lora", "dora", "qlora")
PRECISIONS: Final = ("bf16", "amp_bf16", "amp_fp16", "fp32")
EIGHT_BIT: Final = ("adamw_8bit", "paged_adamw_8bit")
FIT_OPTIMIZERS: Final = (*OPTIMIZERS, *EIGHT_BIT, "paged_adamw")
KERNELS: Final = ("none", "fused_loss", "liger")
PARALLEL: Final = ("ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3")
SHARDED: Final = ("fsdp1", "fsdp2", "zero3")
LIBRARIES: Final = ("peft", "litgpt")
ATTENTION: Final = ("flash", "memory_efficient", "cudnn", "math")
ALL_LINEAR: Final = "all-linear"
DIFFUSERS_TARGETS: Final = "to_q,to_k,to_v,to_out.0"
"""Layers with adapters in the training scripts of ``diffusers``."""
LORA_RANK: Final = 16
SEQUENCE_LENGTH: Final = 2048
MAX_SEQUENCE_LENGTH: Final = 2**24
MAX_RESOLUTION: Final = 2**14
MAX_RANK: Final = 2**14
FUSED_EXPERTS_SINCE: Final = 2026
"""Year from which ``transformers`` (5.0) keeps the experts of a layer in one parameter, and ties the
head of later T5 models."""
REENTRANT_UNTIL: Final = 2026
"""Year from which ``transformers`` (4.53) does not re-enter autograd around a whole block."""
_STATE_BLOCK: Final = 256
_PACKED: Final = {
    "": (1 / 2, 1 / 64, FULL_BYTES / 64 / 256),
    "nf4": (1 / 2, FULL_BYTES / 64),
    "gptq": (1 / 2, HALF_BYTES / 128, 1 / 128 / 2),
}
"""Quantisation → bytes of each tensor for an element of the weight: the weight itself, the scales of
64 or 128 elements, and what scales 256 scales, or the zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How a named model is trained.

    Attributes:
        method: one of :data:`METHODS`.
        lora_rank, lora_target, lora_dropout: of the adapters; targets are ``all-linear`` or names
            such as ``q_proj,v_proj``.
        sequence_length: tokens of one sample, padding included.
        resolution: pixels of a side of an image, of a network of images; its usual one if ``None``.
        batch_size: samples of one forward pass on one GPU.
        gradient_accumulation: forward passes for one step of the optimizer.
        precision: ``bf16`` keeps weights in bfloat16 and runs under autocast, as trainers do;
            ``amp_…`` keeps trained weights in fp32; ``fp32`` has no half type.
        optimizer: one of :data:`FIT_OPTIMIZERS`.
        implementation: PyTorch's implementation of the optimizer; trainers choose the fused one.
        checkpointing: whether each block is recomputed in the backward pass.
        attention: kernel of the attention; PyTorch's choice on this GPU if ``None``.
        kernels: ``fused_loss`` never makes the logits; ``liger`` also fuses norms and gates.
        gpus, parallel: how many GPUs share the training, and how.
        has_autocast: whether the forward pass runs under autocast.
        raises_frozen: whether ``prepare_model_for_kbit_training`` casts to fp32 what is not
            quantised.
        quantisation: ``nf4``, ``gptq``, or none.
        adapter_bytes: of an element of the adapters; ``peft`` keeps them in fp32.
        frozen_bytes: of an element of a frozen base; TRL loads it in fp32 where nothing is said.
        library: whose adapters and loss they are: ``peft``'s beside ``transformers``, or those of
            ``litgpt``, which keep the output of an adapter and give one joined layer of queries,
            keys and values.
        adapter: configuration of ``peft``, in JSON, of an adapter that the fields above do not say.
        raises_logits: whether the loss copies the logits to fp32, as ``transformers`` does.
        year: of the libraries.  Before 2025 ``transformers`` copied the logits without their last
            position, before 2026 (4.53) it checkpointed re-entrantly, around blocks.
    """

    method: str = "full"
    lora_rank: int = LORA_RANK
    lora_target: str = ALL_LINEAR
    lora_dropout: float = 0.0
    sequence_length: int = SEQUENCE_LENGTH
    resolution: int | None = None
    batch_size: int = 1
    gradient_accumulation: int = 1
    precision: str = "bf16"
    optimizer: str = "adamw"
    implementation: str = "fused"
    checkpointing: bool = True
    attention: str | None = None
    kernels: str = "none"
    gpus: int = 1
    parallel: str = "ddp"
    has_autocast: bool = True
    raises_frozen: bool = True
    quantisation: str = ""
    adapter_bytes: int = FULL_BYTES
    frozen_bytes: int = HALF_BYTES
    library: str = LIBRARIES[0]
    adapter: str = ""
    raises_logits: bool = True
    year: int = 2026

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed and not (name == "attention" and value is None):
                raise InvalidRequestError(
                    f"must be one of {', '.join(allowed)}, not {describe(value)}", name
                )
        for name, largest in COUNTS.items():
            if getattr(self, name) is not None or name != "resolution":
                check_count(getattr(self, name), name, 1, largest)

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained over a frozen base."""
        return self.method != "full"

    @property
    def is_half(self) -> bool:
        """Whether the forward pass computes in a half type."""
        return self.precision != "fp32"

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element that a linear layer gives."""
        return HALF_BYTES if self.is_half else FULL_BYTES

    @property
    def base_bytes(self) -> int:
        """Bytes of an element of the model's own weights."""
        if self.precision == "fp32" or (self.precision != "bf16" and not self.has_adapters):
            return FULL_BYTES
        return self.frozen_bytes if self.has_adapters else HALF_BYTES

    @property
    def outer_bytes(self) -> int:
        """Bytes of an element of the weights that are never quantised: embeddings, norms, head."""
        return FULL_BYTES if self.casts_frozen else self.base_bytes

    @property
    def is_sharded(self) -> bool:
        """Whether GPUs share the parameters."""
        return self.gpus > 1 and self.parallel in SHARDED

    @property
    def splits_states(self) -> bool:
        """Whether DeepSpeed splits what the optimizer keeps, and not the weights."""
        return self.parallel in ("zero1", "zero2")

    @property
    def is_reentrant(self) -> bool:
        """Whether ``transformers`` recomputes blocks re-entrantly."""
        return self.year < REENTRANT_UNTIL

    @property
    def casts_frozen(self) -> bool:
        """Whether embeddings, norms and head are in fp32 over a quantised base; shards keep one
        type, so that ``trl`` leaves them as they are there."""
        return self.is_quantised and self.raises_frozen and not self.is_sharded

    @property
    def is_autocast(self) -> bool:
        """Whether autocast chooses the types."""
        return self.has_autocast and self.is_half

    @property
    def is_quantised(self) -> bool:
        """Whether the linear layers of the base have 4 bits."""
        return self.method == "qlora" or bool(self.quantisation)

    def quantises(self, operator: Operator, is_inner: bool) -> bool:
        """Whether the weight of this linear layer has 4 bits.

        ``bitsandbytes`` leaves experts that are one parameter as they are.
        """
        is_module = operator.copies == 1 or self.year < FUSED_EXPERTS_SINCE
        return self.is_quantised and is_inner and is_module

    @property
    def keeps_quantised_inputs(self) -> bool:
        """Whether quantised layers save their input, which they never need, as ``bitsandbytes`` did
        before 0.43 (``MatMul4Bit``); ``litgpt`` pinned 0.42 until 2025."""
        return self.year < (2025 if self.library == "litgpt" else 2024)

    @property
    def shifts_logits(self) -> bool:
        """Whether the loss copies the logits without their last position."""
        return self.year < 2025 and self.library == "peft"

    @property
    def logits_bytes(self) -> int:
        """Bytes of an element of the logits that the loss reads."""
        return FULL_BYTES if self.raises_logits else self.compute_bytes

    @property
    def copies_parts(self) -> bool:
        """Whether adapters of some of queries, keys and values are copied into their joined
        output (``litgpt``'s ``LoRAQKVLinear.zero_pad``)."""
        parts = {"q_proj", "k_proj", "v_proj"} & set(self.lora_target.split(","))
        return self.library == "litgpt" and 0 < len(parts) < len("qkv")

    def is_target(self, operator: Operator, is_inner: bool) -> bool:
        """Whether this linear layer has an adapter."""
        if not self.has_adapters or operator.kind != "linear":
            return False
        if operator.copies > 1 and operator.parameters % self.matrix_elements(operator):
            return False  # ``peft`` has no adapters for experts with a bias
        if self.lora_target == ALL_LINEAR:
            return is_inner
        asked = self.lora_target.split(",")
        parts = tables()["layer_names"].get(operator.name, ())
        return any(part in asked for part in (operator.name, *parts))

    def adapter_elements(self, operator: Operator) -> tuple[int, ...]:
        """Elements of the parameters of a layer's adapter."""
        inputs, outputs = operator.width, operator.elements // operator.rows
        rank = self.lora_rank * operator.copies
        if operator.copies > 1 and operator.name == "gate_up_proj":
            rank *= 2  # ``peft`` joins the adapters of both
        pair = (inputs * rank, outputs * rank)
        return (*pair, outputs) if self.method == "dora" else pair

    def weight_bytes(self, operator: Operator, is_inner: bool) -> tuple[float, ...]:
        """Bytes of the tensors of a layer's own parameters, without an adapter's."""
        if not operator.parameters:
            return ()
        if operator.kind != "linear" or not is_inner:
            return (operator.parameters * self.outer_bytes,)
        bias = operator.parameters - operator.copies * self.matrix_elements(operator)
        matrix = operator.parameters - bias
        tensors = [float(bias * self.outer_bytes)] if bias else []
        if not self.quantises(operator, is_inner):
            return (matrix * self.outer_bytes, *tensors)
        return (*(matrix * share for share in _PACKED[self.quantisation]), *tensors)

    @staticmethod
    def matrix_elements(operator: Operator) -> int:
        """Elements of one weight of a linear layer."""
        return operator.width * (operator.elements // operator.rows)

    def state_bytes(self, elements: float, element_bytes: float) -> float:
        """What the optimizer keeps on the GPU for a parameter; paged state counts as none."""
        if self.optimizer.startswith("paged_"):
            return 0.0
        if self.optimizer in EIGHT_BIT:
            return 2 * (elements + FULL_BYTES * elements / _STATE_BLOCK)
        copies = optimizer_copies(self.optimizer, self.step_implementation)
        return copies.state * elements * element_bytes

    def step_copies(self) -> float:
        """Temporaries of the optimizer's step, in copies of all trained parameters."""
        if self.optimizer not in OPTIMIZERS:
            return 0.0
        return optimizer_copies(self.optimizer, self.step_implementation).temporary

    @property
    def step_implementation(self) -> str:
        """PyTorch's implementation of the optimizer's step, where trainers choose it."""
        return self.implementation if self.optimizer in ("adam", "adamw") else "default"


STATED: Final = (
    "method",
    "sequence_length",
    "resolution",
    "batch_size",
    "gradient_accumulation",
    "parallel",
    "precision",
    "optimizer",
    "checkpointing",
    "lora_rank",
    "lora_target",
    "attention",
    "kernels",
)
"""Fields of a method that a request may state, as the command line has options for them."""
CHOICES: Final = {
    "method": METHODS,
    "precision": PRECISIONS,
    "optimizer": FIT_OPTIMIZERS,
    "attention": ATTENTION,
    "kernels": KERNELS,
    "parallel": PARALLEL,
    "library": LIBRARIES,
}
"""Field of a method → the words that it may be."""
COUNTS: Final = {
    "lora_rank": MAX_RANK,
    "sequence_length": MAX_SEQUENCE_LENGTH,
    "resolution": MAX_RESOLUTION,
    "batch_size": MAX_BATCH_SIZE,
    "gradient_accumulation": 2**31 - 1,
    "gpus": MAX_RANKS,
}
"""Field of a method → its largest number; the smallest is 1."""
