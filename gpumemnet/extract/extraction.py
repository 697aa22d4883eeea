"""Turns a model object and its inputs into a training job: one layer per executed call, totals
equal to the model's own.

Output elements are per sample, so a job scales to other batch sizes.  Every parameter is counted
once, as PyTorch counts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from gpumemnet.errors import ExtractError
from gpumemnet.extract.attention import KernelChoice
from gpumemnet.extract.derive import (
    activation_function_of,
    attention_kernel_of,
    family_of,
    sequence_length_of,
)
from gpumemnet.extract.inputs import ModelInputs, as_model_inputs
from gpumemnet.extract.options import DEFAULT_OPTIONS, ExtractOptions, check_batch_size
from gpumemnet.extract.result import Extraction
from gpumemnet.extract.walk import ForwardError, Walk, walk
from gpumemnet.gpu.catalogue import device_profile
from gpumemnet.job.layers import Layer
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.sandbox.user_code import fault_sentence

if TYPE_CHECKING:
    from torch import nn

    from gpumemnet.extract.placement import MissingValues
    from gpumemnet.gpu.catalogue import DeviceProfile

UNUSED: Final = "(unused)"
"""Name of the last layer, which holds the parameters that no other layer uses."""

_SHOWN_NAMES: Final = 5


def extract_job(
    model: nn.Module,
    inputs: object,
    options: ExtractOptions = DEFAULT_OPTIONS,
    *,
    batch_size: int | None = None,
) -> Extraction:
    """Extract the training job of ``model``.

    The model runs once on meta tensors and is left as it was.

    Args:
        model: the model, on any device, meta included; its weights are neither read nor copied.
        inputs: a tensor, a tuple or list of arguments, or a dict of keyword arguments, each
            ``[batch, …]``; only shapes and dtypes matter.
        options: how the model is trained, and facts that override those of the model.
        batch_size: samples per batch of the job; the batch size of ``inputs`` by default, see
            :func:`inputs_from_example`.

    Raises:
        ExtractError: the model cannot run on these inputs, or needs the values of its activations
            to run.
        InvalidJobError: the batch size is out of range.
    """
    check_batch_size(batch_size)
    return extract_from(model, as_model_inputs(inputs, batch_size), options)


def extract_from(
    model: nn.Module,
    inputs: ModelInputs,
    options: ExtractOptions,
    missing_values: MissingValues | None = None,
    device: DeviceProfile | None = None,
) -> Extraction:
    """Extract the training job of ``model`` for inputs that are meta tensors already.

    Args:
        model, options: as in :func:`extract_job`.
        inputs: what the model is called with.
        missing_values: as in :func:`~gpumemnet.extract.placement.placement`.
        device: the GPU that decides which attention kernel runs; by default the one that
            ``options`` name.

    Raises:
        ExtractError: the model cannot run on these inputs, or needs the values of its activations
            to run.
        UnsupportedTorchError: the installed PyTorch lacks what an extraction needs.
    """
    from gpumemnet.torch_private.names import check_torch

    torch_notes = check_torch()
    device = device or device_profile(options.gpu)
    attention = KernelChoice(
        stated=options.attention_kernel,
        precision=options.precision,
        compute_capability=device.compute_capability,
    )
    try:
        seen = walk(model, inputs.args, inputs.kwargs, attention, missing_values)
    except ForwardError as error:
        within = f" (in module '{error.path}')" if error.path else ""
        shapes = inputs.shapes_of_fault(error.fault)
        raise ExtractError(
            f"the model does not run: {fault_sentence(error.fault)}{within}{shapes}"
        ) from error
    batch = inputs.batch_size
    parameters = dict(model.named_parameters())
    layers = [
        Layer(call.kind, (2 * call.elements + batch) // (2 * batch), call.parameters)
        for call in seen.calls
    ]
    names = [call.path for call in seen.calls]
    if seen.unused:
        layers.append(Layer("other", 0, sum(parameters[name].numel() for name in seen.unused)))
        names.append(UNUSED)
    if not layers:
        raise ExtractError("the model executes no known layer: its output is a view of its input")
    derived: dict[str, Any] = {
        "family": family_of(seen.calls),
        "activation_function": activation_function_of(seen.calls),
        "sequence_length": sequence_length_of(seen.calls, inputs.tensors),
    }
    stated = options.job_fields()
    if options.attention_kernel is None:
        stated["attention_kernel"] = attention_kernel_of(seen)
    job = TrainingJob(
        **{**derived, **stated},
        batch_size=batch,
        input_elements=inputs.elements_per_sample,
        layers=tuple(layers),
        trainable_parameters=sum(p.numel() for p in parameters.values() if p.requires_grad),
    )
    notes = [*torch_notes, *_notes(seen, inputs, job)]
    if seen.attention_kernel is not None and options.attention_kernel is None:
        notes.append(
            f"attention_kernel: PyTorch would choose {job.attention_kernel} on {device.name} in {job.precision}."
        )
    return Extraction(job, tuple(names), tuple(notes))


def _notes(seen: Walk, inputs: ModelInputs, job: TrainingJob) -> list[str]:
    notes = [inputs.note] if inputs.note else []
    if len(inputs.tensors) > 1:
        notes.append(f"The input elements are those of all {len(inputs.tensors)} inputs together.")
    if seen.indirect:
        names = _listed(seen.indirect)
        notes.append(
            f"No layer uses these parameters directly; each is counted with the first layer of its module: {names}."
        )
    if seen.unused:
        notes.append(
            f"The forward pass does not use these parameters; they are one last layer: {_listed(seen.unused)}."
        )
    if seen.unseen:
        notes.append(
            f"These modules cannot be looked into; each is one layer of kind other: {_listed(seen.unseen)}."
        )
    if seen.losses:
        notes.append(
            f"The model computes {seen.losses} loss value(s) itself; a loss is not a layer and is left out."
        )
    if seen.checkpointed and job.checkpointing == "none":
        notes.append(
            "checkpointing: the model calls torch.utils.checkpoint, but the job says none; set every_block."
        )
    if overwriting := sum(call.in_place for call in seen.calls):
        notes.append(
            f"{overwriting} layer(s) overwrite their input; their outputs are counted like all others."
        )
    if uneven := sum(call.elements % inputs.batch_size != 0 for call in seen.calls):
        notes.append(
            f"{uneven} layer(s) have outputs that do not divide by the batch size {inputs.batch_size}; "
            "their elements per sample are rounded."
        )
    return notes


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
