"""Turns a model object, or a file that builds one, into a training job: one layer per executed call,
totals equal to the model's own.

Output elements are per sample, so a job scales to other batch sizes.  Every parameter is counted
once, as PyTorch counts it.  This module loads no torch; the first extraction does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from gpumemnet.atomic_files import Document
from gpumemnet.errors import ExtractError, check_installed
from gpumemnet.extract.factory import build, source_code
from gpumemnet.gpu import device_profile
from gpumemnet.job.json_codec import job_from_dict, job_to_dict
from gpumemnet.job.layers import GROUP_OF_KIND, LAYER_GROUPS, Layer, listed
from gpumemnet.job.training_job import (
    ACTIVATION_FUNCTIONS,
    TrainingJob,
    TrainingOptions,
)
from gpumemnet.physics.attention_kernels import MATH, AttentionCall
from gpumemnet.sandbox.process import ask
from gpumemnet.sandbox.user_code import fault_sentence

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gpumemnet.extract.executed_layers import Call, Walk
    from gpumemnet.extract.module_calls import ModelInputs
    from gpumemnet.extract.placement import MissingValues
    from gpumemnet.gpu import DeviceProfile

DEFAULT_GPU: Final = "A100"


@dataclass(frozen=True, kw_only=True)
class ExtractOptions(TrainingOptions):
    """The training options, and the GPU of the training.

    Attributes:
        gpu: name or alias of a GPU in the catalogue; it decides which attention kernel PyTorch
            chooses.

    Raises:
        InvalidJobError: names the field and its values.
        InvalidRequestError: the catalogue has no such GPU.
    """

    gpu: str = DEFAULT_GPU

    def __post_init__(self) -> None:
        TrainingOptions.__post_init__(self)
        device_profile(self.gpu)


DEFAULT_OPTIONS: Final = ExtractOptions()


@dataclass(frozen=True)
class Extraction:
    """A training job read from a model.

    Attributes:
        job: the job; its layers stand in execution order.
        layer_names: for each layer of the job, the dotted path of the module that executed it;
            empty for the model itself.
        notes: one sentence for each thing that could not be seen, or that was settled by a rule.
    """

    job: TrainingJob
    layer_names: tuple[str, ...]
    notes: tuple[str, ...] = ()


def extraction_to_dict(extraction: Extraction) -> Document:
    """The JSON object ``{"job", "layer_names", "notes"}``."""
    return asdict(extraction) | {"job": job_to_dict(extraction.job)}


UNUSED: Final = "(unused)"
"""Name of the last layer, which holds the parameters that no other layer uses."""


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
        options: how the model is trained.
        batch_size: samples per batch of the job; the batch size of ``inputs`` by default, see
            :func:`inputs_from_example`.

    Raises:
        ExtractError: the model cannot run on these inputs, or needs the values of its activations
            to run.
        InvalidJobError: the batch size is out of range.
    """
    check_installed("torch", "extract", "extracting a job from a model")
    from gpumemnet.extract.module_calls import as_model_inputs

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
    from gpumemnet.extract.attention import unstated_kernel
    from gpumemnet.extract.executed_layers import ForwardError, walk
    from gpumemnet.torch_private.names import check_torch

    torch_notes = check_torch()
    device = device or device_profile(options.gpu)

    def kernel(call: AttentionCall) -> str:
        return options.attention_kernel or unstated_kernel(
            options.precision, device.compute_capability, call
        )

    try:
        seen = walk(model, inputs.args, inputs.kwargs, kernel, missing_values)
    except ForwardError as error:
        within = f" (in module '{error.path}')" if error.path else ""
        shapes = inputs.shapes_of_fault(error.fault)
        raise ExtractError(
            f"the model does not run: {fault_sentence(error.fault)}{within}{shapes}"
        ) from error
    batch = inputs.batch_size
    parameters = dict(model.named_parameters())
    layers = [
        Layer(
            call.kind,
            (2 * call.elements + batch) // (2 * batch),
            call.parameters,
            call.trains,
            # A model that checkpoints itself chooses its own blocks.
            None if seen.checkpointed else call.block,
        )
        for call in seen.calls
    ]
    names = [call.path for call in seen.calls]
    if seen.unused:
        unused = [parameters[name] for name in seen.unused]
        size = sum(each.numel() for each in unused)
        trains = any(each.requires_grad for each in unused)
        layers.append(Layer("other", 0, size, trains, layers[-1].block if layers else None))
        names.append(UNUSED)
    if not layers:
        raise ExtractError("the model executes no known layer: its output is a view of its input")
    stated = options.job_fields()
    if options.attention_kernel is None:
        # A model that computes its scores itself runs the math kernel.
        has_scores = attention_length(seen.calls) is not None
        stated["attention_kernel"] = seen.attention_kernel or (MATH if has_scores else None)
    job = TrainingJob(
        **stated,
        family=family_of(seen.calls),
        activation_function=activation_function_of(seen.calls),
        sequence_length=sequence_length_of(seen.calls, inputs.tensors),
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
        names = listed(seen.indirect)
        notes.append(
            f"No layer uses these parameters directly; each is counted with the first layer of its module: {names}."
        )
    if seen.unused:
        notes.append(
            f"The forward pass does not use these parameters; they are one last layer: {listed(seen.unused)}."
        )
    if seen.unseen:
        notes.append(
            f"These modules cannot be looked into; each is one layer of kind other: {listed(seen.unseen)}."
        )
    if seen.losses:
        notes.append(
            f"The model computes {seen.losses} loss value(s) itself; a loss is not a layer and is left out."
        )
    if seen.checkpointed and job.checkpointing == "none":
        notes.append(
            "checkpointing: the model calls torch.utils.checkpoint, but the job says none; set every_block."
        )
    return notes


_NON_LINEARITIES: Final = frozenset(LAYER_GROUPS["activation"]) - {
    "softmax",
    "log_softmax",
    "identity",
    "activation",
}
_GATED: Final = {"silu": "swiglu", "gelu": "geglu"}
_LOOK_AHEAD: Final = 3
"""Number of layers to look ahead for the values of a softmax, or the other half of a gate."""


def family_of(calls: Sequence[Call]) -> str:
    """Return ``transformer`` for a model with attention, else ``cnn`` for one with convolutions,
    else ``mlp``."""
    if attention_length(calls) is not None:
        return "transformer"
    return "cnn" if any(GROUP_OF_KIND.get(call.kind) == "conv" for call in calls) else "mlp"


def attention_length(calls: Sequence[Call]) -> int | None:
    """Return the longest query sequence of attention: a fused kernel, or a softmax whose output
    multiplies values."""
    lengths = []
    for index, call in enumerate(calls):
        following = calls[index + 1 : index + 1 + _LOOK_AHEAD]
        if GROUP_OF_KIND.get(call.kind) == "attention" and call.sequence_length:
            lengths.append(call.sequence_length)
        elif (
            call.kind == "softmax"
            and len(call.shape) >= 3
            and any(later.kind == "matmul" for later in following)
        ):
            lengths.append(call.shape[-2])
    return max(lengths, default=None)


def sequence_length_of(calls: Sequence[Call], inputs: Sequence[Tensor]) -> int | None:
    """Return tokens per sample: of a token input ``[batch, tokens]``, else of the longest attention
    or recurrent layer."""
    for tensor in inputs:
        if tensor.ndim == 2 and not tensor.is_floating_point() and tensor.shape[1] > 1:
            return tensor.shape[1]
    return attention_length(calls) or max(
        (c.sequence_length for c in calls if c.sequence_length), default=None
    )


def activation_function_of(calls: Sequence[Call]) -> str | None:
    """Return the most frequent non-linearity; ``other`` for one that a job cannot name."""
    counts: Counter[str] = Counter()
    for index, call in enumerate(calls):
        if call.kind not in _NON_LINEARITIES:
            continue
        if call.part_of is not None:
            counts[call.part_of] += 1
            continue
        following = calls[index + 1 : index + 1 + _LOOK_AHEAD]
        gates = any(
            c.kind == "multiply" and c.joins_activations and c.shape == call.shape
            for c in following
        )
        counts[_GATED[call.kind] if gates and call.kind in _GATED else call.kind] += 1
    if not counts:
        return None
    name = counts.most_common(1)[0][0]
    return name if name in ACTIVATION_FUNCTIONS else "other"


DEADLINE_SECONDS: Final = 120.0


def extract_file(
    factory: Document,
    options: ExtractOptions = DEFAULT_OPTIONS,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> Extraction:
    """Extract the training job of the model that a file builds.

    Args:
        factory: from :func:`~gpumemnet.extract.factory.factory_request`.
        options: how the model is trained.
        deadline_seconds: time for everything, including the import of torch.

    Raises:
        ExtractError: says what is wrong with the file, its factory or its model, and where.
        MissingExtraError: torch is not installed.
    """
    answer = ask(
        _extract,
        factory["source"],
        {**factory, "options": asdict(options)},
        purpose="extracting a job from a model",
        deadline_seconds=deadline_seconds,
    )
    names, notes = tuple(answer["layer_names"]), tuple(answer["notes"])
    return Extraction(job_from_dict(answer["job"]), names, notes)


def _extract(request: Document) -> Document:
    built, inputs = build(request, source_code(request))
    return extraction_to_dict(
        extract_from(built.model, inputs, ExtractOptions(**request["options"]))
    )
