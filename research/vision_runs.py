"""Detection and segmentation as open-mmlab trained it, traced from its configurations.

The readings are ``torch.cuda.max_memory_allocated`` of one of several GPUs, from 2020 to 2023, with
PyTorch 1.3 to 1.9 mostly.  The models are those of today's mmdetection and mmsegmentation, whose
configurations describe the same networks; what PyTorch did otherwise at that time is put back here.

The operators that mmcv compiles only fill tensors that its Python code has made, so that a trace
needs none of them.
"""

from __future__ import annotations

import importlib
import math
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

import gpumemnet
from gpumemnet.allocator.settings import AllocatorSettings
from gpumemnet.cudnn.execution_plans import ConvolutionQuestion, ExecutionPlan, ExecutionPlans
from gpumemnet.extract.module_calls import as_model_inputs
from gpumemnet.gpu import device_profile
from gpumemnet.torch_private.names import declare_torchvision_operators
from gpumemnet.tracing.api import TraceOptions
from gpumemnet.tracing.operators.rules import Platform, ceil_div, round_up
from gpumemnet.tracing.timeline import replayed
from gpumemnet.tracing.training_loop import record

TABLES: Final = ("openmmlab", "detectron2")
GPU: Final = "V100-32GB"
_FIRST_WITHOUT_INPUTS: Final = "202206"
"""Months of weights from this one on are taken to be trained with PyTorch 1.11 or later."""
_FIRST_GROUP_NORM: Final = "202005"
"""Months of weights from this one on are taken to be trained with PyTorch 1.5 or later; names of
weights have had dates since."""
_MOST_OBJECTS: Final = 93
"""The most that an image of COCO shows; some batch of each run has it."""
_USUAL_OBJECTS: Final = 7
"""In the mean over COCO's images."""
_SHAPE: Final = (800, 1333)
"""The largest image of detectron2's configurations."""
_DETECTRON2_DATE: Final = "201910"
_PADDING: Final = 32
"""Sides of padded images are multiples of it."""
_TILE, _TRANSFORM = 4, 36
"""Side of a tile of F(4x4, 3x3), and the elements of its transform."""
_CPU_SECONDS: Final = 20.0
"""For one row: code that loops until values change would not end."""
_CROP: Final = re.compile(r"crop \((\d+), ?(\d+)\)")
_SCALE: Final = re.compile(r"\((\d+), ?(\d+)\)")
_DEPTH: Final = re.compile(r"[_-][rx](\d{2,3})(?=[_-])")
_OPTIMIZER_SETTINGS: Final = ("lr", "momentum", "weight_decay", "betas", "eps", "nesterov")
_TRANSFORMERS: Final = re.compile("beit|dpt|former|mae|segnext|swin|twins|vit")


class VisionRun(NamedTuple):
    """What a trace says of one row.

    Attributes:
        kind: kind of model, such as ``segmentation, convolutional``.
        allocated_bytes: the most that the allocator hands out on one GPU.
    """

    kind: str
    allocated_bytes: int


def vision_run(row: Mapping[str, str]) -> VisionRun | str:
    """What a trace says of ``row``, or why it was not traced."""
    library = row["row_id"].partition(":")[0]
    if library not in _JOBS:
        return f"{library} needs compiled sparse convolutions"
    declare_torchvision_operators()
    sys.modules.setdefault("mmcv._ext", _CompiledOperators("mmcv._ext"))
    try:
        with _time_limit():
            job = _JOBS[library](row)
            return VisionRun(job.kind, _traced(row, job))
    except ModuleNotFoundError as error:
        return f"{(error.name or '').partition('.')[0]} is not installed"
    except Exception as error:
        return str(error).partition("\n")[0]


@contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"it takes more than {_CPU_SECONDS:.0f} seconds")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, _CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


class _CompiledOperators(ModuleType):
    """Stands for ``mmcv._ext``: all operators but one return nothing and fill what they are given."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _all_boxes if name == "nms" else lambda *_, **__: None


def _all_boxes(boxes: Tensor, *_: object, **__: object) -> Tensor:
    return torch.arange(len(boxes), device=boxes.device)


class _RoiAlign(torch.autograd.Function):
    """Takes what torchvision's operator takes, which is not needed either."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, regions: Tensor, size: tuple[int, int], *_: object
    ) -> Tensor:
        ctx.shape = features.shape
        return features.new_empty(len(regions), features.shape[1], *size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.new_zeros(ctx.shape), *[None] * 5


@contextmanager
def _pytorch_of(date: str) -> Iterator[None]:
    """PyTorch as it was when weights of this date were trained, where it took more.

    Before 1.11, softmax and its logarithm kept their input for the backward pass beside their
    result, and binary cross-entropy took five temporaries of the size of its input; today it takes
    two (``derivatives.yaml`` and ``Loss.cpp`` of 1.9).  Before 1.5, group norm was a batch norm, and
    its scale kept the normalised input too (``Normalization.cpp`` of 1.4).
    """
    with ExitStack() as stack:
        if date < _FIRST_GROUP_NORM:
            stack.enter_context(patch.object(functional, "group_norm", _group_norm))
        if date >= _FIRST_WITHOUT_INPUTS:
            yield
            return
        for owner in (functional, torch, Tensor):
            for name in ("softmax", "log_softmax"):
                kept = partial(_keeping_input, getattr(owner, name))
                method = partialmethod(kept) if owner is Tensor else kept
                stack.enter_context(patch.object(owner, name, method))
        replaced = {
            "cross_entropy": _cross_entropy,
            "binary_cross_entropy_with_logits": partial(
                _with_temporaries, functional.binary_cross_entropy_with_logits
            ),
        }
        for name, function in replaced.items():
            stack.enter_context(patch.object(functional, name, function))
        yield


def _keeping_input(
    function: Callable[..., Tensor], given: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    result = function(given, *args, **kwargs)
    held = [given]
    if result.grad_fn is not None:
        result.grad_fn.register_hook(lambda *_: held.clear())
    return result


def _group_norm(
    given: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> Tensor:
    flat = given.reshape(1, len(given) * groups, -1)
    result = functional.batch_norm(flat, None, None, training=True, eps=eps).view(given.shape)
    shape = (-1, *[1] * (given.dim() - 2))
    return torch.addcmul(bias.view(shape), result, weight.view(shape))


def _with_temporaries(
    function: Callable[..., Tensor], given: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    further = [torch.empty_like(given, requires_grad=False) for _ in range(3)]
    result = function(given, *args, **kwargs)
    further.clear()
    return result


def _cross_entropy(
    given: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    **_: object,
) -> Tensor:
    """As its two parts, for targets that are numbers of classes."""
    logarithms = functional.log_softmax(given, 1)
    return functional.nll_loss(
        logarithms, target, weight, ignore_index=ignore_index, reduction=reduction
    )


class _Training(nn.Module):
    """A model that returns the sum of its losses.

    Args:
        model: the model.
        losses: calls it with the images and their annotations.
        date: year and month of its weights.
    """

    def __init__(self, model: nn.Module, losses: Callable[..., Any], date: str) -> None:
        super().__init__()
        self.model = model
        self._losses = losses
        self._date = date

    def forward(self, *batch: Tensor) -> Tensor:
        with _pytorch_of(self._date), _as_on_gpu():
            losses = self._losses(*batch)
            terms = [
                term.mean()
                for name, each in losses.items()
                if "loss" in name
                for term in (each if isinstance(each, list | tuple) else [each])
            ]
            total: Tensor = sum(terms[1:], terms[0])
            return total


@contextmanager
def _as_on_gpu() -> Iterator[None]:
    """Lets mmdetection take the operators that it has for a GPU."""
    with (
        patch("torch.cuda.is_available", lambda: True),
        patch.object(Tensor, "is_cuda", True),
    ):
        yield


class _Job(NamedTuple):
    """What is traced: a kind of model, how it trains, its batch and its optimizer's settings."""

    kind: str
    model: nn.Module
    inputs: tuple[Tensor, ...]
    optimizer: Mapping[str, Any]


def _segmentation(row: Mapping[str, str]) -> _Job:
    from mmengine.structures import PixelData
    from mmseg.structures import SegDataSample

    def losses(images: Tensor, truth: Tensor) -> Any:
        shape = tuple(images.shape[2:])
        samples = [
            SegDataSample(
                metainfo={"img_shape": shape, "pad_shape": shape, "ori_shape": shape},
                gt_sem_seg=PixelData(data=each),
            )
            for each in truth
        ]
        return model.loss(images, samples)

    configuration, model = _built("mmseg", row["config"])
    settings = configuration.optim_wrapper.optimizer
    found = _CROP.search(row["input_shape"])
    if found is None:
        raise ValueError("its crop is not stated")
    batch, size = int(row["batch_per_gpu"]), [int(each) for each in found.groups()]
    kind = "transformer" if _TRANSFORMERS.search(row["config"]) else "convolutional"
    training = _Training(model, losses, row["weights_date"])
    truth = torch.empty(batch, 1, *size, dtype=torch.long, device="meta")
    return _Job(f"segmentation, {kind}", training, (_images(batch, size), truth), settings)


def _detection(row: Mapping[str, str]) -> _Job:
    import numpy as np
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks
    from mmengine.structures import InstanceData, PixelData

    sizes = [(int(one), int(other)) for one, other in _SCALE.findall(row["input_shape"])]
    if not sizes:
        raise ValueError("the size of its images is not stated")
    shape = tuple(sorted(max(sizes, key=math.prod)))
    is_padded = "'keep_ratio':True" in row["input_shape"].replace('"', "'")
    size = [round_up(side, _PADDING) for side in shape] if is_padded else list(shape)
    configuration, model = _built("mmdet", row["config"])
    batch = int(row["batch_per_gpu"])
    has_masks = bool(configuration.model.get("data_preprocessor", {}).get("pad_mask"))
    has_segments = bool(configuration.model.get("data_preprocessor", {}).get("pad_seg"))
    counts = [_MOST_OBJECTS, *[_USUAL_OBJECTS] * (batch - 1)]

    def losses(images: Tensor, *annotations: Tensor) -> Any:
        made = []
        for index in range(batch):
            boxes, labels = annotations[index], annotations[batch + index]
            given = InstanceData(bboxes=boxes, labels=labels)
            if has_masks:
                masks = np.zeros((len(boxes), *size), dtype=np.uint8)
                given.masks = BitmapMasks(masks, *size)
            sample = DetDataSample(
                metainfo={
                    "img_shape": shape,
                    "ori_shape": shape,
                    "pad_shape": tuple(size),
                    "batch_input_shape": tuple(size),
                    "scale_factor": (1.0, 1.0),
                    "img_id": index,
                },
                gt_instances=given,
                ignored_instances=InstanceData(bboxes=boxes[:0], labels=labels[:0]),
            )
            if has_segments:
                sample.gt_sem_seg = PixelData(sem_seg=annotations[-1][index])
            made.append(sample)
        return model.loss(images, made)

    inputs = (
        _images(batch, size),
        *(torch.empty(count, 4, device="meta") for count in counts),
        *(torch.empty(count, dtype=torch.long, device="meta") for count in counts),
        *([torch.empty(batch, 1, *size, dtype=torch.long, device="meta")] if has_segments else []),
    )
    stages = "two stages" if "roi_head" in configuration.model else "one stage"
    kind = "masks" if has_masks else stages
    training = _Training(model, losses, row["weights_date"])
    settings = configuration.optim_wrapper.optimizer
    return _Job(f"detection, {kind}", training, inputs, settings)


def _detectron2(row: Mapping[str, str]) -> _Job:
    import numpy as np
    from detectron2 import __file__ as package
    from detectron2 import config
    from detectron2.modeling import build_model
    from detectron2.structures import Boxes, Instances, Keypoints, PolygonMasks
    from detectron2.utils.events import EventStorage

    settings = config.get_cfg()
    settings.merge_from_file(str(Path(package).parents[1] / row["config"]))
    settings.MODEL.DEVICE = "cpu"
    with gpumemnet.large_tensors_on_meta():
        model = build_model(settings)
    batch, size = int(row["batch_per_gpu"]), _SHAPE
    counts = [_MOST_OBJECTS, *[_USUAL_OBJECTS] * (batch - 1)]

    def losses(images: Tensor, segments: Tensor, *tensors: Tensor) -> Any:
        given = []
        for index, count in enumerate(counts):
            boxes, classes, points = tensors[index::batch]
            objects = Instances(size, gt_boxes=Boxes(boxes), gt_classes=classes)
            if settings.MODEL.MASK_ON:
                objects.gt_masks = PolygonMasks([[np.array([0.0, 0, 1, 0, 1, 1])]] * count)
            if settings.MODEL.KEYPOINT_ON:
                objects.gt_keypoints = Keypoints(points)
            each = {"image": images[index], "sem_seg": segments[index], "instances": objects}
            given.append(each)
        with (
            EventStorage(),
            patch("detectron2.layers.roi_align.roi_align", _RoiAlign.apply),
            patch("torchvision.ops.boxes.batched_nms", _all_boxes),
            patch(
                "detectron2.modeling.roi_heads.roi_heads.select_foreground_proposals",
                lambda proposals, _: ([each[: len(each) // 4] for each in proposals], []),
            ),
        ):
            return model(given)

    inputs = (
        torch.empty(batch, 3, *size, dtype=torch.uint8, device="meta"),
        torch.empty(batch, *size, dtype=torch.long, device="meta"),
        *(torch.empty(count, 4, device="meta") for count in counts),
        *(torch.empty(count, dtype=torch.long, device="meta") for count in counts),
        *(torch.empty(count, 17, 3, device="meta") for count in counts),
    )
    kind = "one stage" if settings.MODEL.META_ARCHITECTURE == "RetinaNet" else "two stages"
    training = _Training(model, losses, _DETECTRON2_DATE)
    optimizer = {"type": "SGD", "lr": 0.02, "momentum": 0.9, "weight_decay": 1e-4}
    return _Job(f"detectron2, {kind}", training, inputs, optimizer)


_JOBS: Final[Mapping[str, Callable[[Mapping[str, str]], _Job]]] = {
    "mmseg": _segmentation,
    "mmdet": _detection,
    "d2": _detectron2,
}


def _images(batch: int, size: Iterable[int]) -> Tensor:
    return torch.empty(batch, 3, *size, device="meta")


def _built(library: str, name: str) -> tuple[Any, Any]:
    """The configuration of this name, and its model, with no weights downloaded."""
    module = importlib.import_module(library)
    importlib.import_module(f"{library}.models")
    registry = importlib.import_module(f"{library}.registry").MODELS
    from mmengine.config import Config

    path = Path(module.__path__[0]) / ".mim" / "configs" / name
    if not path.exists():
        raise ValueError("its configuration is not in the wheel")
    configuration = Config.fromfile(path)
    named, depth = _DEPTH.search(name), configuration.model.get("backbone", {}).get("depth")
    if named and depth and int(named[1]) != depth:
        raise ValueError(f"its name says {named[1]} layers, its configuration {depth}")
    _forget_weights(configuration.model)
    model = {key: value for key, value in configuration.model.items() if key != "data_preprocessor"}
    with gpumemnet.large_tensors_on_meta(), registry.switch_scope_and_registry(library):
        return configuration, registry.build(model)


def _forget_weights(settings: Any) -> None:
    if isinstance(settings, dict):
        if "pretrained" in settings:
            settings["pretrained"] = None
        if isinstance(settings.get("init_cfg"), dict):
            settings["init_cfg"] = None
        for each in settings.values():
            _forget_weights(each)
    elif isinstance(settings, list | tuple):
        for each in settings:
            _forget_weights(each)


def _optimizer(settings: Mapping[str, Any]) -> Callable[..., torch.optim.Optimizer]:
    """The optimizer of a configuration; as before PyTorch 2.0 it works through the parameters one
    by one, and sets gradients to zero without freeing them."""
    kind = getattr(torch.optim, settings["type"])
    arguments = {name: value for name, value in settings.items() if name in _OPTIMIZER_SETTINGS}

    def zero_grad(self: Any, set_to_none: bool = False) -> None:
        kind.zero_grad(self, set_to_none=False)

    kept = type(kind.__name__, (kind,), {"zero_grad": zero_grad})
    return lambda parameters: kept(parameters, foreach=False, **arguments)


class _OlderCudnn:
    """cuDNN 7: filters of 3 x 3 run by the Winograd transform with separate passes, F(4x4, 3x3),
    whose tiles of image, result and filter lie in the workspace; readings show no other."""

    version: Final = "7"

    def plans(self, _device: object, question: ConvolutionQuestion) -> ExecutionPlans:
        """The one plan that a search would choose."""
        batch, channels, *_ = question.image
        outputs, *sides = question.result[1:]
        is_unit = {*question.stride, *question.dilation} == {1}
        has_transform = is_unit and question.weight[2:] == (3, 3) and channels == question.weight[1]
        tiles = batch * math.prod(ceil_div(side, _TILE) for side in sides)
        elements = tiles * (channels + outputs) + channels * outputs
        size = 4 * _TRANSFORM * elements if has_transform and question.dtype == "float32" else 0
        return ExecutionPlans((ExecutionPlan(0, size, ()),), ())


def _traced(row: Mapping[str, str], job: _Job) -> int:
    """The most that the allocator hands out."""
    ranks = int(row["gpus"])
    options = TraceOptions(
        own_optimizer=_optimizer(job.optimizer),
        loss=lambda output, *_: output,
        zero_grad="before_backward",
        parallel="ddp" if ranks > 1 else "none",
        ranks=ranks,
        precision="amp_fp16" if row["precision"].startswith("amp") else "fp32",
    )
    cudnn: Any = _OlderCudnn()
    platform = replace(Platform.of(device_profile(GPU), options), cudnn=cudnn)
    inputs = as_model_inputs(job.inputs, int(row["batch_per_gpu"]))
    timeline = record(job.model, inputs, options, platform).timeline
    return replayed(timeline, AllocatorSettings()).allocated_bytes
