"""Extracts networks that are no language models from the libraries that build them, for
``python -m research catalogue``.

The model runs on meta tensors at three sizes.  What each operator gives is a polynomial of the size;
the operators of one block, or of what lies between two blocks, are a section.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from gpumemnet.extract.checkpointing import blocks
from gpumemnet.extract.executed_layers import _Recorder
from gpumemnet.extract.module_calls import tensors_in, with_meta_tensors
from gpumemnet.extract.placement import MissingValues, placement
from gpumemnet.named.operators import BLOCK_INPUT, HEAD, IN_PLACE, OUTER_INPUT
from gpumemnet.named.real_model import model_inputs
from gpumemnet.physics.saved_tensors import kept_in_place
from gpumemnet.torch_private.names import declare_torchvision_operators, storage_id
from research.named_catalogue import CHECKED, config_of_row

SCALES: Final = (1, 4, 9)
"""Areas at which a network is extracted, relative to its usual one."""
BATCH: Final = 2
_NAMES: Final = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
"""Library → the networks of it that are extracted; and the depths of the sizes of SegFormer."""
IMAGE_SIZE: Final = 224
_BLOCKS: Final = frozenset(
    {
        *("BasicTransformerBlock", "ResnetBlock2D", "JointTransformerBlock"),
        *("FluxTransformerBlock", "FluxSingleTransformerBlock"),
        *("Flux2TransformerBlock", "Flux2SingleTransformerBlock"),
    }
)
"""Classes that ``diffusers`` recomputes, each by itself."""


@dataclass(frozen=True, slots=True)
class Source:
    """A network of a library.

    Attributes:
        name: in the catalogue.
        build: builds the model.
        inputs: of the model, on meta, at a length of a side or a sequence.
        size: usual length of a side in pixels, or of a sequence in tokens.
        unit: ``pixels`` or ``tokens``; ``fixed`` for a network that is known at this size only.
        checked: what its total of parameters was compared with.
        config: its configuration, as far as the catalogue keeps it.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Any]]
    size: int
    unit: str = "fixed"
    checked: str = "published"
    config: Mapping[str, Any] = field(default_factory=lambda: {"model_type": "layers"})


@dataclass
class _Seen:
    """One operator as it ran, with the operators whose outputs it read."""

    kind: str
    path: str
    block: int
    inputs: tuple[int, ...]
    values: dict[str, int] = field(default_factory=dict)


class _GraphRecorder(_Recorder):
    """Also notes which operator reads the output of which."""

    def __init__(self, model: nn.Module) -> None:
        self.names: dict[int, str] = {}
        self._is_in_place = False
        super().__init__(model, {}, lambda call: "flash")
        self._blocks = set(_recomputed(model))
        self.seen: list[_Seen] = []
        self._made: dict[int, tuple[int, ...]] = {}
        self._alive: list[object] = []
        self._reads: tuple[int, ...] = ()
        self._shapes: list[tuple[int, ...]] = []

    def _enter(self, module: nn.Module) -> None:
        super()._enter(module)
        if self._block_depth:
            self.names.setdefault(self._block_count, type(module).__name__)

    def _read(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        found = [made for each in tensors for made in self._made.get(storage_id(each), ())]
        return tuple(dict.fromkeys(found))

    def _gives(self, outputs: Sequence[Tensor], made: tuple[int, ...]) -> None:
        self._alive.extend(outputs)
        for tensor in outputs:
            self._made[storage_id(tensor)] = made

    def saw_function(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: object,
    ) -> None:
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(output)
        if self._opaque or not outputs:
            super().saw_function(func, args, kwargs, output)
            return
        self._note(
            inputs, outputs, lambda: _Recorder.saw_function(self, func, args, kwargs, output)
        )

    def _record_module(
        self, module: nn.Module, arguments: tuple[object, object], output: object
    ) -> None:
        outputs = tensors_in(output)
        made = [self._made.get(storage_id(each)) for each in outputs]
        before = len(self.seen)
        self._reads = self._read(tensors_in(arguments))
        self._shapes = [tuple(each.shape) for each in tensors_in(arguments)]
        super()._record_module(module, arguments, output)
        for tensor, old in zip(outputs, made, strict=True):
            if len(self.seen) > before:
                self._gives([tensor], (len(self.seen) - 1,))
            elif old is None:
                self._gives([tensor], self._reads)

    def _note(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], record: Callable[[], None]
    ) -> None:
        before = len(self.seen)
        self._reads = self._read(inputs)
        self._shapes = [tuple(each.shape) for each in inputs]
        known = {storage_id(each) for each in inputs}
        record()
        if len(self.seen) > before:
            self._gives(outputs, (len(self.seen) - 1,))
        else:  # a view, a copy, or a result of parameters only
            fresh = [each for each in outputs if storage_id(each) not in known]
            self._gives(fresh, self._reads)

    def _record(self, kind: str, module: nn.Module, outputs: Sequence[Tensor], *rest: Any) -> None:
        inputs = {storage_id(each) for each in rest[1]}
        is_alias = any(storage_id(each) in inputs for each in outputs)
        self._is_in_place = is_alias and kept_in_place(kind) == "relu"
        super()._record(kind, module, outputs, *rest)
        self._is_in_place = False

    def _append(self, call: Any, used: frozenset[int], module: nn.Module) -> None:
        super()._append(call, used, module)
        call = self._calls[-1]  # with its module and parameters
        number = len(self.seen)
        reads = self._reads
        if self.seen and number and self.seen[-1].path == call.path and not reads:
            reads = (number - 1,)
        kind = {"cross_attention": "attention"}.get(call.kind, call.kind)
        kind = IN_PLACE if self._is_in_place else kind
        values = {"elements": call.elements // BATCH, "parameters": call.parameters}
        if kind == "linear" and self._shapes:
            width = self._shapes[0][-1]
            rows = torch.Size(self._shapes[0]).numel() // width // BATCH
            values |= {"rows": max(rows, 1), "width": width}
        elif kind == "attention":
            values |= {"width": self._shapes[0][-1], "heads": self._shapes[0][-3]}
        block = self._block_count if self._block_depth else 0
        self.seen.append(_Seen(kind, call.path, block, reads, values))
        before = [(each.kind, each.path) for each in self.seen[-2:-1]]
        if kind == "multiply" and before == [("rms_norm", call.path)]:
            del self.seen[-1]  # one norm of elementary operations
            self.seen[-1].values["parameters"] += call.parameters


class _NoOverflow(MissingValues):
    """Answers where a model asks whether its activations are infinite: they are not."""

    def value(self, function: str, tensor: Tensor) -> Any:
        return False


def _recomputed(model: nn.Module) -> list[nn.Module]:
    """The modules that the model's library recomputes, each by itself."""
    names = {"GradientCheckpointingLayer", *_BLOCKS}
    found = [
        each for each in model.modules() if names & {kind.__name__ for kind in type(each).__mro__}
    ]
    return found or blocks(model)


def _run(source: Source, scale: int) -> tuple[_GraphRecorder, int]:
    side = scale if source.unit == "tokens" else round(scale**0.5)
    with placement():
        model = source.build()
    model.to("meta")
    model.train()
    with torch.enable_grad(), placement(_NoOverflow()), with_meta_tensors(model):
        recorder = _GraphRecorder(model)
        recorder.run((), source.inputs(source.size * side))
    return recorder, sum(each.numel() for each in model.parameters())


def extracted(source: Source) -> dict[str, Any]:
    """The entry of a network in the catalogue.

    A number that depends on the size is a list: coefficients of the powers of the area, or of the
    length of the sequence, relative to the usual one.
    """
    recorder, total = _run(source, SCALES[0])
    graphs = [recorder.seen]
    if source.unit != "fixed":
        graphs += [_run(source, scale)[0].seen for scale in SCALES[1:]]
    merged = [
        replace(
            first[0],
            values={
                name: _polynomial([each.values[name] for each in first]) for name in first[0].values
            },
        )
        for first in zip(*graphs, strict=True)
    ]
    network = {
        "unit": source.unit,
        "size": source.size,
        "sections": list(_sections(merged, recorder.names)),
    }
    return {
        "parameters": total,
        "checked": source.checked,
        "config": source.config,
        "network": network,
    }


def _polynomial(values: list[int]) -> Any:
    if len(set(values)) == 1:
        return values[0]
    (x0, x1, x2), (y0, y1, y2) = SCALES, map(Fraction, values)
    slope = (y1 - y0) / (x1 - x0)
    square = ((y2 - y0) / (x2 - x0) - slope) / (x2 - x1)
    line = slope - square * (x1 + x0)
    found = [y0 - line * x0 - square * x0 * x0, line, square]
    return [round(each) for each in (found if square else found[:2])]


def _sections(seen: list[_Seen], names: Mapping[int, str]) -> Iterator[list[Any]]:
    """Runs of operators of one block, equal ones together."""
    numbered = list(enumerate(seen))
    runs = [list(run) for _, run in groupby(numbered, key=lambda pair: pair[1].block)]
    sections: list[list[Any]] = []
    for at, run in enumerate(runs):
        first, before = run[0][0], runs[at - 1][0][0] if at else 0
        read: dict[int, Any] = {}
        operators = []
        for _, each in run:
            for source in each.inputs:
                if before <= source < first:
                    read[source] = seen[source].values["elements"]
            inputs = [
                source - first
                if source >= first
                else BLOCK_INPUT
                if source >= before
                else OUTER_INPUT
                for source in each.inputs
            ]
            inputs = list(dict.fromkeys(inputs)) or [OUTER_INPUT if at else BLOCK_INPUT]
            sizes = [each.values.get(name, 0) for name in ("elements", "parameters", "rows")]
            sizes += [each.values.get(name, 0) for name in ("width", "heads")]
            while not sizes[-1]:
                sizes.pop()
            name = _name(each.path) if each.values["parameters"] else ""
            operators.append([each.kind, name, inputs, *sizes])
        block = run[0][1].block
        title = names[block] if block else HEAD if at == len(runs) - 1 else "Layers"
        sections.append([title, 1, bool(block), _sum(list(read.values())), operators])
    for _, equal in groupby(sections, key=json.dumps):
        same = list(equal)
        yield [same[0][0], len(same), *same[0][2:]]


def _sum(values: list[Any]) -> Any:
    lists = [each if isinstance(each, list) else [each] for each in values]
    total = [sum(each[at] for each in lists if at < len(each)) for at in range(3)]
    while len(total) > 1 and not total[-1]:
        total.pop()
    return total if len(total) > 1 else total[0]


def _name(path: str) -> str:
    """The last part of a module's path, with the number behind it."""
    parts = path.split(".")
    last = parts[-2:] if parts[-1].isdecimal() and len(parts) > 1 else parts[-1:]
    return ".".join(last)


def sources(table: Path) -> Iterator[Source]:
    """All networks that are extracted: of ``diffusers`` from the table of configurations."""
    declare_torchvision_operators()
    with table.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if "diffusers" in row["other"]]
    yield from (_diffusion(row) for row in rows if row["architecture"].endswith("Model"))
    yield from _of_transformers()
    import timm
    import torchvision

    for library, create in (
        ("timm", timm.create_model),
        ("torchvision", torchvision.models.get_model),
    ):
        for name in _NAMES[library]:
            yield Source(
                f"{library}/{name}",
                partial(create, name),
                lambda size: {"x": _meta(3, size, size)},
                IMAGE_SIZE,
            )


def _meta(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(BATCH, *sizes, device="meta", dtype=dtype)


def _diffusion(row: dict[str, str]) -> Source:
    import diffusers

    kind = getattr(diffusers, row["architecture"])
    config = json.loads(row["other"])
    del config["library"]
    for column, name in (
        ("num_hidden_layers", "num_layers"),
        ("num_attention_heads", "num_attention_heads"),
        ("head_dim", "attention_head_dim"),
    ):
        config |= {name: int(row[column])} if row[column] else {}
    return Source(
        row["hub_id"],
        lambda: kind(**config),
        partial(model_inputs, row["architecture"], config, BATCH),
        1024 if config.get("sample_size", 128) >= 128 else 8 * config["sample_size"],
        "pixels",
        CHECKED.get(row["checked"], "unchecked"),
        config_of_row(row),
    )


def _of_transformers() -> Iterator[Source]:
    import transformers

    def images(size: int) -> dict[str, Any]:
        return {"pixel_values": _meta(3, size, size)}

    def segments(size: int) -> dict[str, Any]:
        return images(size) | {"labels": _meta(size, size, dtype=torch.int64)}

    def sounds(tokens: int) -> dict[str, Any]:
        return {"input_values": _meta(tokens * _TOKEN_SAMPLES)}

    swin = transformers.SwinForImageClassification
    for name, width, depth, heads in (
        ("tiny", 96, 6, 3),
        ("small", 96, 18, 3),
        ("base", 128, 18, 4),
        ("large", 192, 18, 6),
    ):
        config = transformers.SwinConfig(
            embed_dim=width,
            depths=[2, 2, depth, 2],
            num_heads=[heads * 2**stage for stage in range(4)],
            num_labels=1000,
        )
        yield Source(
            f"microsoft/swin-{name}-patch4-window7-224",
            partial(swin, config),
            images,
            IMAGE_SIZE,
            checked="recalled",
            config=_stated(config, swin),
        )
    segformer = transformers.SegformerForSemanticSegmentation
    for number, depths in enumerate(_NAMES["segformer_depths"]):
        config = transformers.SegformerConfig(
            depths=depths,
            hidden_sizes=[32, 64, 160, 256] if number == 0 else [64, 128, 320, 512],
            decoder_hidden_size=256 if number < 2 else 768,
            num_labels=150,
        )
        yield Source(
            f"nvidia/segformer-b{number}-finetuned-ade-512-512",
            partial(segformer, config),
            segments,
            512,
            "pixels",
            "recalled",
            _stated(config, segformer),
        )
    detr = transformers.DetrForObjectDetection
    for depth in (50, 101):
        config = transformers.DetrConfig(
            backbone=f"resnet{depth}", use_pretrained_backbone=False, num_labels=91
        )
        yield Source(
            f"facebook/detr-resnet-{depth}",
            partial(detr, config),
            images,
            800,
            "pixels",
            "recalled",
            _stated(config, detr),
        )
    wav2vec2 = transformers.Wav2Vec2ForCTC
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    large |= {"intermediate_size": 4096}
    stable = {"do_stable_layer_norm": True, "feat_extract_norm": "layer", "conv_bias": True}
    for name, changes in (
        ("facebook/wav2vec2-base", {}),
        ("facebook/wav2vec2-large", large),
        ("facebook/wav2vec2-large-xlsr-53", large | stable),
    ):
        config = transformers.Wav2Vec2Config(layerdrop=0.0, mask_time_prob=0.0, **changes)
        yield Source(
            name,
            partial(wav2vec2, config),
            sounds,
            500,
            "tokens",
            "recalled",
            _stated(config, wav2vec2),
        )


def _stated(config: Any, kind: type[nn.Module]) -> dict[str, Any]:
    """What a configuration states beside its defaults."""
    stated = json.loads(config.to_json_string())
    return {"architectures": [kind.__name__], **stated, "model_type": config.model_type}


_TOKEN_SAMPLES: Final = 320
"""Of sound at 16 kHz in a token of wav2vec 2.0: 20 ms."""
