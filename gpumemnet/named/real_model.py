"""Builds a named model for a trace, as its own library builds it: on meta, with adapters of ``peft``
or ``litgpt``, quantised layers of ``bitsandbytes``, and the loss as its trainer takes it.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from gpumemnet.errors import ExtractError, first_line
from gpumemnet.named.blocks import tables
from gpumemnet.named.catalogue import NamedModel
from gpumemnet.named.exact import library_of, needs_bitsandbytes
from gpumemnet.named.methods import ALL_LINEAR, Method
from gpumemnet.named.operators import Config
from gpumemnet.named.real_losses import (
    HEAD_CHUNK,
    TrainedModel,
    chunked_loss,
    class_loss,
    diffusion_loss,
    fused_loss,
    own_loss,
)
from gpumemnet.named.real_quantised import optimizer_of, quantise
from gpumemnet.physics.element_types import HALF_BYTES
from gpumemnet.torch_private.names import declare_torchvision_operators

_LOG: Final = logging.getLogger("gpumemnet.named.exact")
_NO_WINDOW: Final = 2**30
_OUTER_KEYS: Final = ("model_type", "architectures", "vision_config")
"""Keys of a model with a tower that are not its language model's."""
_LARGEST_DIFFERENCE: Final = 0.01
"""From the catalogue's total of parameters."""
_SLOW_PACKAGES: Final = ("torchvision", "torchaudio", "scipy", "sklearn", "pandas")
"""What ``transformers`` and ``peft`` import if it is there, for nothing that is needed here."""
_TYPES: Final = dict.fromkeys(("input_ids", "labels"), torch.long) | dict.fromkeys(
    ("img_ids", "txt_ids"), torch.float32
)
"""Inputs that have a type of their own."""
_FAULTS: Final = (ImportError, AttributeError, KeyError, TypeError, ValueError, RuntimeError)


@dataclass
class RealModel:
    """What is traced.

    Attributes:
        module: returns what the trainer keeps until the step ends, the loss among it.
        inputs: what it is called with.
        parameters: elements of the model without adapters; ``trained_parameters`` are those that
            receive gradients, adapters among them.
        heads: paths of the layer that gives the logits and of what contains the loss.
        optimizer: makes the optimizer; ``None`` for PyTorch's of that name.
        notes: what was assumed.
    """

    module: nn.Module
    inputs: dict[str, Tensor]
    parameters: int
    heads: tuple[str, ...] = ("",)
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        trained = (each for each in self.module.parameters() if each.requires_grad)
        self.trained_parameters = sum(each.numel() for each in trained)


def built(model: NamedModel, method: Method) -> RealModel:
    """Build the model, with its method applied.

    Args:
        model: the model; its total of parameters, if it is known, is compared with.
        method: how it is trained.

    Raises:
        ExtractError: the libraries cannot build it, or build another one.
    """
    warnings.simplefilter("ignore")
    library = library_of(model, method)
    if library == "transformers":
        hidden = () if needs_bitsandbytes(method) else ("bitsandbytes",)
        modules: dict[str, Any] = dict.fromkeys((*_SLOW_PACKAGES, *hidden))
        sys.modules.update(modules)  # not to be found
    else:
        declare_torchvision_operators()
    _LOG.info("building the model")
    try:
        real = _BUILDERS.get(library, _of_images)(model, method)
    except _FAULTS as error:
        raise ExtractError(f"its library cannot build it: {first_line(error)}") from error
    parameters = model.config.get("built_by_transformers_5.23", model.parameters)
    if parameters and abs(real.parameters / parameters - 1.0) > _LARGEST_DIFFERENCE:
        raise ExtractError(
            f"the installed library builds {real.parameters / 1e6:,.0f} million parameters from the "
            f"catalogue's sizes, not {parameters / 1e6:,.0f}: give its whole config.json"
        )
    real.optimizer = optimizer_of(method)
    return real


def _dtype(method: Method) -> torch.dtype:
    if method.base_bytes > HALF_BYTES:
        return torch.float32
    return torch.float16 if method.precision == "amp_fp16" else torch.bfloat16


def _count(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())


def model_inputs(
    kind: str,
    config: Config,
    batch: int,
    side: int = 0,
    dtype: torch.dtype = torch.float32,
    **sizes: int,
) -> dict[str, Any]:
    """What a model of this kind is called with.

    ``architectures.json`` states the shapes in numbers, sizes and keys of the configuration.  An
    input is left out where such a key has no value; one with a question mark is a condition alone.

    Args:
        kind: a task, a library, or the class of a diffusion pipeline's network.
        config: of the model.
        batch: samples.
        side: pixels of a side of the image of which a diffusion pipeline has the latents.
        dtype: of latents and embeddings.
        **sizes: further ones, such as ``tokens``.
    """
    latent = {"latent_side": side // 8, "latent_patches": (side // 16) ** 2}
    known: dict[Any, Any] = {**config, "batch": batch, **latent, **sizes}
    found: dict[str, Any] = {}
    for path, stated in tables()["inputs"][kind].items():
        if all(known.get(each.rstrip("?")) for each in stated if isinstance(each, str)):
            shape = [known.get(each, each) for each in stated if not str(each).endswith("?")]
            group, _, name = path.rpartition(".")
            own = found.setdefault(group, {}) if group else found
            own[name] = torch.empty(shape, dtype=_TYPES.get(name, dtype), device="meta")
    return found


# ---- one builder for each library


def _of_images(named: NamedModel, method: Method) -> RealModel:
    library, _, network = named.name.partition("/")
    with torch.device("meta"):
        if library == "timm":
            from timm import create_model

            model = create_model(network, pretrained=False)
        else:
            from torchvision.models import get_model

            model = get_model(network, weights=None)
        model.to(_dtype(method))
    inputs = model_inputs(library, {}, method.batch_size)
    return RealModel(TrainedModel(model, class_loss), inputs, _count(model))


def _of_diffusers(named: NamedModel, method: Method) -> RealModel:
    import diffusers

    names = tables()["class_keys"]["diffusers"]
    stated = {names.get(key, key): value for key, value in named.config.items()}
    kind: Any = getattr(diffusers, stated["architectures"][0])
    dtype, side = _dtype(method), method.resolution or 0
    with torch.device("meta"):
        model = kind.from_config(stated).to(dtype)
    inputs = model_inputs(kind.__name__, stated, method.batch_size, side, dtype)
    total = _count(model)
    if method.checkpointing:
        model.enable_gradient_checkpointing()
    model = _with_adapters(_quantised(model, None, method), method)
    return RealModel(TrainedModel(model, diffusion_loss, return_dict=False), inputs, total)


def _of_litgpt(named: NamedModel, method: Method) -> RealModel:
    from litgpt.lora import GPT, Config, mark_only_lora_as_trainable

    settings: dict[str, Any] = {}
    targets = tables()["litgpt_targets"]
    if method.has_adapters:
        chosen = {targets.get(each, "") for each in method.lora_target.split(",")}
        if method.lora_target == ALL_LINEAR:
            chosen = {*targets.values()} - {"lora_head"}
        settings = {key: key in chosen for key in targets.values()}
        settings["lora_r"], settings["lora_dropout"] = method.lora_rank, method.lora_dropout
    name, layers = named.name.partition("/")[2], named.config["num_hidden_layers"]
    made = Config.from_name(name, n_layer=layers, **settings)
    dtype = _dtype(method)
    with torch.device("meta"):
        model = GPT(made)
        model.max_seq_length = method.sequence_length
    total = sum(each.numel() for key, each in model.named_parameters() if "lora_" not in key)
    if method.has_adapters:
        mark_only_lora_as_trainable(model)
    model.to(dtype)
    if method.is_quantised:
        quantise(model, method, None)
    if method.casts_frozen:
        from bitsandbytes.nn import StableEmbedding

        model.cos, model.sin = model.cos.float(), model.sin.float()  # Fabric converts no buffers
        shape = model.transformer.wte.weight.shape
        with torch.device("meta"):
            model.transformer.wte = StableEmbedding(*shape).to(dtype)
    inputs = model_inputs("CAUSAL_LM", {}, method.batch_size, tokens=method.sequence_length)
    chunks = {"lm_head_chunk_size": HEAD_CHUNK} if method.has_adapters else {}
    trained = TrainedModel(model, chunked_loss, **chunks)
    return RealModel(trained, inputs, total, ("", "model", "model.lm_head"))


def _of_transformers(named: NamedModel, method: Method) -> RealModel:
    import transformers

    transformers.PreTrainedModel.warn_if_padding_and_no_attention_mask = (  # reads the tokens
        lambda *arguments: None
    )
    kind, stated = str(named.config["model_type"]), _whole_configuration(named.config)
    task = _task(kind)
    made = _configuration(transformers.AutoConfig, kind, stated, method)
    automatic = getattr(transformers, f"AutoModelFor{tables()['tasks'][task]}")
    with torch.device("meta"):
        model = automatic.from_config(made, dtype=_dtype(method), trust_remote_code=False)
    task = "CAUSAL_LM" if task == "IMAGE_TEXT_TO_TEXT" else task  # samples of text
    total = _count(model)
    notes: list[str] = []
    output = model.get_output_embeddings() if "LM" in task or "SEQ" in task else None
    head = next((path for path, each in model.named_modules() if each is output), "")
    model = _with_method(model, output, method, notes)
    loss = _loss(model, task, method)
    if method.kernels == "liger":
        notes.append("of Liger's kernels the loss is traced; norms and gates run unfused")
    outer = ("", "model", *(("model.base_model", "model.base_model.model") * method.has_adapters))
    heads = (*outer, f"{outer[-1]}.{head}")
    inputs = model_inputs(task, _sizes(task, made, method), method.batch_size)
    return RealModel(loss, inputs, total, heads, notes=notes)


_BUILDERS: Final = {
    "diffusers": _of_diffusers,
    "litgpt": _of_litgpt,
    "transformers": _of_transformers,
}


# ---- models of transformers


def _whole_configuration(config: Config) -> Config:
    """The configuration with that of the language model, if it is stated flat, apart."""
    kind = str(config["model_type"])
    if "vision_config" not in config and kind not in ("clip", "siglip"):
        return config
    return {"text_config": {k: v for k, v in config.items() if k not in _OUTER_KEYS}, **config}


def _task(kind: str) -> str:
    from transformers.models.auto import modeling_auto

    for task in tables()["tasks"]:
        if kind in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES"):
            return str(task)
    raise ValueError(f"transformers has no class that trains a {kind!r}")


def _configuration(automatic: Any, kind: str, stated: Config, method: Method) -> Any:
    names = {"model_type": "", "quantization_config": "", "auto_map": ""}
    names |= tables()["class_keys"].get(kind, {})
    stated = {names.get(key, key): value for key, value in stated.items()}
    stated.pop("", None)
    for each in (stated, stated.get("text_config")):
        if each and (method.attention == "flash" or "sliding_window" not in each):
            each["sliding_window"] = _NO_WINDOW  # flash attention takes windows without a mask
    made = automatic.for_model(kind, **stated)
    made.use_cache = False
    if made.is_encoder_decoder and getattr(made, "decoder_start_token_id", None) is None:
        made.decoder_start_token_id = made.pad_token_id = 0
    return made


def _loss(model: nn.Module, task: str, method: Method) -> TrainedModel:
    if task == "ZERO_SHOT_IMAGE_CLASSIFICATION":
        return TrainedModel(model, own_loss, return_loss=True)
    if task == "MASKED_LM":
        return TrainedModel(model, class_loss)
    if task == "CAUSAL_LM":
        unfused = own_loss if method.raises_logits else class_loss
        return TrainedModel(model, unfused if method.kernels == "none" else fused_loss)
    if method.kernels != "none":
        raise ValueError("no fused kernels are known for this model")
    return TrainedModel(model, own_loss)


def _sizes(task: str, config: Any, method: Method) -> dict[str, Any]:
    """Sizes of the inputs of a model, the keys of its parts among them."""
    stated = config.to_dict()
    stated = {**stated.get("text_config", {}), **stated, **stated.get("vision_config", {})}
    longest = {
        "SPEECH_SEQ_2_SEQ": stated.get("max_target_positions"),
        "ZERO_SHOT_IMAGE_CLASSIFICATION": stated.get("max_position_embeddings"),
    }
    tokens = min(method.sequence_length, longest.get(task) or method.sequence_length)
    frames = 2 * (stated.get("max_source_positions") or 0)
    return stated | {"tokens": tokens, "frames": frames}


def _with_method(model: Any, head: Any, method: Method, notes: list[str]) -> Any:
    """Apply the method as Trainer's users do."""
    model = _quantised(model, head, method)
    if method.checkpointing and not model.supports_gradient_checkpointing:
        notes.append(f"{type(model).__name__} cannot recompute blocks: traced without")
    elif method.checkpointing:
        is_reentrant = method.is_reentrant and method.gpus > 1
        model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
        if is_reentrant and method.has_adapters:
            model.enable_input_require_grads()
    if method.optimizer.startswith("paged_"):
        notes.append("a paged optimizer's step is traced without its state")
    return _with_adapters(model, method)


def _quantised(model: Any, head: Any, method: Method) -> Any:
    """Give the base 4 bits, if the method does."""
    if not method.is_quantised:
        return model
    quantise(model, method, head)
    model.is_loaded_in_4bit = True
    if method.casts_frozen:
        from peft import prepare_model_for_kbit_training

        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return model


def _with_adapters(model: Any, method: Method) -> Any:
    """Add the adapters of ``peft``."""
    if not method.has_adapters:
        return model
    from peft import PeftConfig, get_peft_model

    settings = json.loads(method.adapter or "{}") or {
        "r": method.lora_rank,
        "lora_alpha": method.lora_rank,
        "lora_dropout": method.lora_dropout,
        "target_modules": method.lora_target.split(","),
        "use_dora": method.method == "dora",
    }
    if settings.get("target_modules") == [ALL_LINEAR]:
        settings["target_modules"] = ALL_LINEAR
        settings["exclude_modules"] = ["router"]  # Llama 4's gives a pair, which peft cannot wrap
    with torch.device("meta"):
        return get_peft_model(
            model,
            PeftConfig.from_peft_type(**{"peft_type": "LORA", **settings}),
            autocast_adapter_dtype=method.adapter_bytes > HALF_BYTES,
        )
