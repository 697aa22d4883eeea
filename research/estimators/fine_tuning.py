"""Rules for the memory of fine-tuning that other tools and texts apply, from the model's
configuration and the method alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpumemnet.named.methods import Method
from gpumemnet.physics.element_types import FULL_BYTES, HALF_BYTES
from research.estimators.formulas import ADAM_BYTES, zero2_bytes
from research.estimators.transformer_formulas import (
    TransformerShape,
    eleuther_activation_bytes,
)

_QUANTISED_BYTES = 0.5


def rules(
    config: Mapping[str, Any], parameters: int, trained_parameters: int, method: Method
) -> dict[str, float]:
    """Bytes by each rule.

    * *accelerate estimate-memory*: the largest of model, gradients, optimizer and step for bfloat16
      (``estimate_training_usage`` in ``accelerate/commands/estimate.py``), 8 bytes for each
      parameter; it knows no adapters.
    * *DeepSpeed ZeRO-2* on one GPU (``estimate_zero2_model_states_mem_needs``).
    * *weights and states*: each weight as it is stored, and 16 bytes for each that is trained, as
      in "Transformer Math 101" and most guides to LoRA.
    * *Transformer Math 101*: these, and its activations: all of them, or two bytes for each element
      between blocks where all blocks are recomputed.

    Args:
        config: the model's configuration.
        parameters: of the whole model, without adapters.
        trained_parameters: that receive gradients.
        method: how it is trained.
    """
    stored = _QUANTISED_BYTES if method.quantisation else HALF_BYTES
    states = parameters * stored + ADAM_BYTES * trained_parameters
    found = {
        "accelerate estimate-memory": 2.0 * FULL_BYTES * parameters,
        "DeepSpeed ZeRO-2": float(zero2_bytes(parameters, 1)),
        "weights and states": states,
    }
    if config.get("vocab_size"):
        found["Transformer Math 101"] = states + _activations(config, method)
    return found


def _activations(config: Mapping[str, Any], method: Method) -> int:
    hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    if method.checkpointing:
        return HALF_BYTES * method.batch_size * method.sequence_length * hidden * layers
    shape = TransformerShape(
        hidden=hidden,
        layers=layers,
        heads=config["num_attention_heads"],
        sequence=method.sequence_length,
        vocabulary=config["vocab_size"],
        embedding_parameters=0,
        other_parameters=0,
        linear_parameters=(),
    )
    return eleuther_activation_bytes(shape, method.batch_size)
