"""Builds a named model for a trace, as its own libraries build it: on meta, with adapters of
``peft`` and quantised layers of ``bitsandbytes``, and the loss as Hugging Face's Trainer takes it.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpumemnet.errors import ExtractError, InvalidRequestError, first_line
from gpumemnet.named.exact import needs_bitsandbytes
from gpumemnet.named.methods import ALL_LINEAR, EIGHT_BIT, Method
from gpumemnet.physics.element_types import HALF_BYTES

_LOG: Final = logging.getLogger("gpumemnet.named.exact")
_ENCODERS: Final = (
    *("bert", "roberta", "xlm-roberta", "distilbert", "electra", "albert", "deberta-v2"),
    *("mpnet", "modernbert"),
)
_PAIRS: Final = ("t5", "mt5", "bart")
_IMAGES: Final = ("vit", "dinov2")
_CLASSES: Final = {
    **dict.fromkeys(_ENCODERS, "AutoModelForSequenceClassification"),
    **dict.fromkeys(_PAIRS, "AutoModelForSeq2SeqLM"),
    **dict.fromkeys(_IMAGES, "AutoModelForImageClassification"),
}
_OTHER_KEYS: Final[Mapping[str, Mapping[str, str]]] = {
    "t5": {"intermediate_size": "d_ff", "head_dim": "d_kv"},
    "mt5": {"intermediate_size": "d_ff", "head_dim": "d_kv"},
    "distilbert": {"intermediate_size": "hidden_dim"},
    "gpt2": {"intermediate_size": "n_inner"},
}
"""What a configuration's class calls a key of the catalogue."""
_LARGEST_DIFFERENCE: Final = 0.01
"""From the catalogue's total of parameters."""
_SLOW_PACKAGES: Final = ("torchvision", "torchaudio", "scipy", "sklearn", "pandas")
"""What ``transformers`` and ``peft`` import if it is there, for nothing that is needed here."""
_IMAGE_SIDE: Final = 224
_WEIGHT_BLOCK: Final = 64


@dataclass
class RealModel:
    """What is traced.

    Attributes:
        module: returns ``{"loss": …}``, so that its output is dropped before the backward pass, as
            in Trainer.
        inputs: what it is called with.
        parameters: elements of the model without adapters.
        heads: paths of the layer that gives the logits and of what contains the loss.
        optimizer: makes the optimizer; ``None`` for PyTorch's of that name.
        notes: what was assumed.
    """

    module: nn.Module
    inputs: dict[str, Tensor]
    parameters: int
    heads: tuple[str, ...] = ()
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def trained_parameters(self) -> int:
        """Elements that receive gradients."""
        return sum(each.numel() for each in self.module.parameters() if each.requires_grad)

    @property
    def blocks(self) -> str | None:
        """Path of the only list of modules outside of others."""
        lists = [
            path
            for path, each in self.module.named_modules()
            if isinstance(each, nn.ModuleList) and not any(p.isdecimal() for p in path.split("."))
        ]
        return lists[0] if len(lists) == 1 else None

    @contextmanager
    def patches(self) -> Iterator[None]:
        """Context in which layers of 4 bits allocate on meta what they do on CUDA."""
        if not any(hasattr(each, "quant_state") for each in self.module.modules()):
            yield
            return
        import bitsandbytes
        from bitsandbytes.autograd._functions import MatMul4Bit

        product, forward = bitsandbytes.matmul_4bit, MatMul4Bit.forward

        def matmul_4bit(rows: Tensor, weight: Tensor, *, bias: Any, quant_state: Any) -> Tensor:
            result: Tensor = MatMul4Bit.apply(rows, weight, None, bias, quant_state)
            return result

        bitsandbytes.matmul_4bit, MatMul4Bit.forward = matmul_4bit, staticmethod(_dequantised)
        try:
            yield
        finally:
            bitsandbytes.matmul_4bit, MatMul4Bit.forward = product, staticmethod(forward)


def _dequantised(
    ctx: Any, rows: Tensor, weight: Tensor, out: None, bias: Tensor | None, state: Any
) -> Tensor:
    """The forward pass of ``MatMul4Bit`` for more than a few rows: its kernel dequantises the weight
    inside (``bitsandbytes/backends/cuda/ops.py``, ``_dequant_linear_fallback``)."""
    from bitsandbytes.functional import dequantize_4bit

    ctx.is_empty, ctx.state = False, state
    ctx.dtype_bias = None if bias is None else bias.dtype
    ctx.tensors = (None, weight)
    return F.linear(rows, dequantize_4bit(weight, state).to(rows.dtype), bias)


class _Loss(nn.Module):
    """A model with its loss."""

    def __init__(self, model: nn.Module, method: Method) -> None:
        super().__init__()
        self.model: Any = model
        self._method = method

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        return {"loss": self.model(**inputs).loss}


class _RawLoss(_Loss):
    """The loss of logits in their own type."""

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        labels = inputs.pop("labels")
        output = self.model(**inputs)
        logits = output if isinstance(output, Tensor) else output.logits
        return {"loss": F.cross_entropy(logits.flatten(0, -2), labels.flatten())}


class _FusedLoss(_Loss):
    """The loss of a language model without its logits."""

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        labels = inputs.pop("labels")
        model = self.model.get_base_model() if self._method.has_adapters else self.model
        hidden = model.base_model(**inputs)[0]
        weight = model.get_output_embeddings().weight
        apply: Any = _LinearCrossEntropy.apply
        return {"loss": apply(hidden.flatten(0, 1), weight, labels.flatten())}


class _LinearCrossEntropy(torch.autograd.Function):
    """Allocates as Liger's ``LigerFusedLinearCrossEntropyFunction`` does: in chunks of rows, with
    the gradients in the forward pass
    (``liger_kernel/ops/fused_linear_cross_entropy.py``, version 0.7)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        if torch.is_autocast_enabled("cuda"):
            rows = rows.to(torch.get_autocast_dtype("cuda"))
            weight_used = weight.to(rows.dtype)
        else:
            weight_used = weight
        count, width = rows.shape
        share = -(-count // -(-weight.shape[0] // width))
        size = 1 << (share - 1).bit_length()
        of_rows = torch.zeros_like(rows)
        of_weight = torch.zeros_like(weight_used) if weight.requires_grad else None
        loss = torch.zeros(count, dtype=torch.float32, device=rows.device)
        for start in range(0, count, size):
            chunk = rows[start : start + size]
            logits = chunk @ weight_used.t()
            of_rows[start : start + size] = logits @ weight_used
            if of_weight is not None:
                of_weight += torch.mm(logits.t(), chunk).float()
        ctx.save_for_backward(of_rows, of_weight)
        return loss.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, which are there."""
        of_rows, of_weight = ctx.saved_tensors
        return of_rows, of_weight, None


def built(
    name: str, config: Mapping[str, Any], parameters: int | None, method: Method
) -> RealModel:
    """Build the model, with its method applied.

    Args:
        name: of the model.
        config: its ``config.json``.
        parameters: total of the catalogue, to compare with; ``None`` if it is not known.
        method: how it is trained.

    Raises:
        ExtractError: the libraries cannot build it, or build another one.
    """
    warnings.simplefilter("ignore")
    is_image = config.get("model_type") == "layers"
    hidden = _SLOW_PACKAGES if needs_bitsandbytes(method) else (*_SLOW_PACKAGES, "bitsandbytes")
    if is_image:
        declare_torchvision_operators()
    else:
        modules: dict[str, Any] = dict.fromkeys(hidden)
        sys.modules.update(modules)  # not to be found
    _LOG.info("building the model")
    try:
        make = partial(_image_network, name) if is_image else partial(_of_transformers, config)
        real = make(method)
    except (ImportError, AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ExtractError(f"its library cannot build it: {first_line(error)}") from error
    check_total(real.parameters, parameters)
    real.optimizer = _optimizer(method)
    return real


@cache
def declare_torchvision_operators() -> object:
    """Declare the operators that ``import torchvision`` expects, once in a process.

    Its builds for CUDA do not load theirs beside a CPU build of PyTorch.

    Returns:
        what keeps them declared.
    """
    if torch.version.cuda is not None:
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        with suppress(RuntimeError):  # somebody else has declared it
            library.define(f"{operator}(Tensor a, Tensor b, float c) -> Tensor")  # type: ignore[no-untyped-call]
    return library


def check_total(found: int, expected: int | None) -> None:
    """Check the total of parameters against the catalogue's.

    Raises:
        ExtractError: it is another model.
    """
    if expected and abs(found / expected - 1.0) > _LARGEST_DIFFERENCE:
        raise ExtractError(
            f"the installed library builds {found / 1e6:,.0f} million parameters from the "
            f"catalogue's sizes, not {expected / 1e6:,.0f}: give its whole config.json"
        )


def _dtype(method: Method) -> torch.dtype:
    if method.base_bytes > HALF_BYTES:
        return torch.float32
    return torch.float16 if method.precision == "amp_fp16" else torch.bfloat16


def _image_network(name: str, method: Method) -> RealModel:
    library, _, network = name.partition("/")
    with torch.device("meta"):
        if library == "timm":
            from timm import create_model

            model = create_model(network, pretrained=False)
        else:
            from torchvision.models import get_model

            model = get_model(network, weights=None)
        model.to(_dtype(method))
        images = torch.empty(method.batch_size, 3, _IMAGE_SIDE, _IMAGE_SIDE)
        labels = torch.zeros(method.batch_size, dtype=torch.long)
    total = sum(each.numel() for each in model.parameters())
    inputs = {"images": images, "labels": labels}
    return RealModel(_Classes(model), inputs, total, ("",))


class _Classes(nn.Module):
    """A classifier of images with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        return {"loss": F.cross_entropy(self.model(images), labels)}


def _of_transformers(config: Mapping[str, Any], method: Method) -> RealModel:
    import transformers

    stated = dict(config)
    kind = str(stated.pop("model_type"))
    part = stated.get("text_config")
    if isinstance(part, Mapping) and kind not in _CLASSES:
        stated, kind = dict(part), str(part.get("model_type"))
    for key, other in _OTHER_KEYS.get(kind, {}).items():
        if key in stated:
            stated[other] = stated.pop(key)
    for key in ("quantization_config", "auto_map"):
        stated.pop(key, None)
    if method.attention == "flash" or "sliding_window" not in stated:
        stated["sliding_window"] = None  # a kernel of flash attention takes windows without a mask
    made = transformers.AutoConfig.for_model(kind, **stated)
    made.use_cache = False
    automatic = getattr(transformers, _CLASSES.get(kind, "AutoModelForCausalLM"))
    with torch.device("meta"):
        model = automatic.from_config(made, dtype=_dtype(method), trust_remote_code=False)
    total = sum(each.numel() for each in model.parameters())
    output = model.get_output_embeddings() if kind not in _IMAGES else None
    head = next((path for path, each in model.named_modules() if each is output), "")
    model, notes = _with_method(model, head, method)
    inputs = _inputs(kind, made, method)
    loss = _Loss
    if head and kind not in _PAIRS:
        loss = (
            _FusedLoss if method.kernels != "none" else _Loss if method.raises_logits else _RawLoss
        )
    if method.kernels != "none" and loss is not _FusedLoss:
        raise InvalidRequestError("no fused kernels are known for this model", "kernels")
    if method.kernels == "liger":
        notes.append("of Liger's kernels the loss is traced; norms and gates run unfused")
    outer = ("", "model", *(("model.base_model", "model.base_model.model") * method.has_adapters))
    heads = (*outer, f"{outer[-1]}.{head}")
    return RealModel(loss(model, method), inputs, total, heads, notes=notes)


def _inputs(kind: str, config: Any, method: Method) -> dict[str, Tensor]:
    batch = method.batch_size
    if kind in _IMAGES:
        side = config.image_size
        pixels = torch.empty(batch, config.num_channels, side, side, device="meta")
        return {"pixel_values": pixels, "labels": _whole(batch)}
    tokens = _whole(batch, method.sequence_length)
    labels = _whole(batch) if kind in _ENCODERS else _whole(batch, method.sequence_length)
    return {"input_ids": tokens, "labels": labels}


def _whole(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.long, device="meta")


def _with_method(model: Any, head: str, method: Method) -> tuple[Any, list[str]]:
    """Apply the method as Trainer's users do."""
    notes: list[str] = []
    if method.is_quantised:
        _quantise(model, head, method)
        if method.raises_frozen:
            from peft import prepare_model_for_kbit_training

            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if method.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if method.has_adapters:
        from peft import LoraConfig, get_peft_model

        everything = method.lora_target == ALL_LINEAR
        settings = LoraConfig(
            r=method.lora_rank,
            lora_alpha=method.lora_rank,
            lora_dropout=method.lora_dropout,
            target_modules=ALL_LINEAR if everything else method.lora_target.split(","),
            use_dora=method.method == "dora",
            task_type="CAUSAL_LM",
        )
        with torch.device("meta"):
            model = get_peft_model(
                model, settings, autocast_adapter_dtype=method.adapter_bytes > HALF_BYTES
            )
    if method.optimizer.startswith("paged_"):
        notes.append("a paged optimizer's step is traced without its state")
    return model, notes


def _quantise(model: Any, head: str, method: Method) -> None:
    """Replace linear layers by those of ``bitsandbytes``, with packed weights on meta."""
    import bitsandbytes
    from transformers import BitsAndBytesConfig
    from transformers.integrations import replace_with_bnb_linear

    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=method.quantisation != "nf4",
        bnb_4bit_compute_dtype=_dtype(method),
    )
    replace_with_bnb_linear(model, [head] if head else None, settings)
    model.is_loaded_in_4bit = True
    for layer in model.modules():
        if isinstance(layer, bitsandbytes.nn.Linear4bit):
            _pack(layer, settings.bnb_4bit_use_double_quant, _dtype(method))


def _pack(layer: Any, is_nested: bool, dtype: torch.dtype) -> None:
    """Give a layer the tensors that ``bitsandbytes`` quantises its weight to
    (``bitsandbytes/functional.py``, ``quantize_4bit``)."""
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Params4bit

    def empty(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(count, dtype=dtype, device="meta")

    shape = layer.weight.shape
    blocks = -(-shape.numel() // _WEIGHT_BLOCK)
    layer.register_buffer("absmax", empty(blocks, torch.uint8 if is_nested else torch.float32))
    layer.register_buffer("code", empty(16))
    state = QuantState(
        layer.absmax, shape, layer.code, _WEIGHT_BLOCK, quant_type="nf4", dtype=dtype
    )
    if is_nested:
        layer.register_buffer("nested_absmax", empty(-(-blocks // 256)))
        layer.register_buffer("offset", empty(1)[0])
        state.offset = layer.offset
        state.state2 = QuantState(
            layer.nested_absmax, code=empty(256), blocksize=256, dtype=torch.float32
        )
        state.nested = True
    packed = empty(-(-shape.numel() // 2), torch.uint8).unsqueeze(1)
    layer.weight = Params4bit(packed, False, state, quant_type="nf4", bnb_quantized=True)
    layer.quant_state = state
    layer.register_forward_pre_hook(_use_buffers)


def _use_buffers(layer: Any, inputs: object) -> None:
    """Let the quantisation's state be the layer's buffers, which the trace replaces by its own."""
    state = layer.quant_state
    state.absmax = layer.absmax
    if state.nested:
        state.offset, state.state2.absmax = layer.offset, layer.nested_absmax


def _optimizer(method: Method) -> Callable[..., torch.optim.Optimizer] | None:
    if method.optimizer.startswith("paged_"):
        return lambda trained: torch.optim.SGD(trained, 1e-3, foreach=False)  # allocates nothing
    if method.optimizer not in EIGHT_BIT:
        return None
    from bitsandbytes.optim import AdamW8bit

    class Adam(AdamW8bit):  # type: ignore[misc]
        """Its state; its kernel allocates nothing."""

        def update_step(self, *arguments: object) -> None:
            """Do nothing."""

    return Adam
