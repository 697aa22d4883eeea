"""Learns which tensors cuDNN copies for a convolution, from its own answers for the convolutions of
real networks.

    python benchmarks/convolution_workspaces.py shapes shapes.json
    python benchmarks/convolution_workspaces.py ask shapes.json rows-9.28.jsonl --cudnn PATH
    python benchmarks/convolution_workspaces.py fit rows-*.jsonl [--write]

``shapes`` runs networks of torchvision and timm on meta tensors and collects their convolutions.
``ask`` asks one cuDNN for the first plan of each, at random batch sizes, on five GPUs; it may be
stopped at any time, because the order is random.  ``fit`` learns one tree for each GPU, operation,
type and layout, prints its error against cuDNN on architectures that it was not trained on, and
with ``--write`` stores trees of all rows in ``gpumemnet/tracing/operators/copied_tensors.json``.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpumemnet.cudnn.execution_plans import BACKWARD_DATA, OPERATIONS, ConvolutionQuestion
from gpumemnet.cudnn.session import CudnnSession, find_library
from gpumemnet.gpu import device_profile
from gpumemnet.tracing.operators.library_workspaces import (
    IMAGE,
    RESULT,
    Convolution,
    features,
    tree_name,
)
from gpumemnet.units import MIB

TREES = Path(__file__).parents[1] / "gpumemnet/tracing/operators/copied_tensors.json"
GPUS = {"7.5": "T4", "8.0": "A100", "8.6": "RTX3090", "8.9": "RTX4090", "9.0": "H100"}
BATCHES = (8, 16, 32, 32, 64, 100, 128, 128, 200, 256, 400)
LEAVES = 24
SMALLEST_LEAF = 8
TORCHVISION = (
    "alexnet vgg11 vgg16 vgg19_bn resnet18 resnet50 resnet101 resnext50_32x4d resnext101_32x8d wide_resnet50_2 "
    "densenet121 densenet161 squeezenet1_0 squeezenet1_1 googlenet inception_v3 mobilenet_v2 mobilenet_v3_small "
    "mobilenet_v3_large mnasnet0_5 mnasnet1_0 shufflenet_v2_x1_0 shufflenet_v2_x2_0 efficientnet_b0 efficientnet_b3 "
    "efficientnet_v2_s regnet_x_400mf regnet_y_400mf regnet_y_8gf regnet_x_3_2gf convnext_tiny convnext_base swin_t "
    "vit_b_16 maxvit_t "
)
TIMM = (
    "vgg16 resnet34 resnet50d resnet152 resnetv2_50 resnext50_32x4d seresnet50 xception41 xception65 inception_v4 "
    "inception_resnet_v2 efficientnet_b4 tf_efficientnet_b6 tf_efficientnetv2_m mixnet_s mnasnet_100 "
    "mobilenetv3_small_100 mobilenetv2_140 ghostnet_100 hrnet_w18 dla34 dla60x dpn68 dpn92 res2net50_26w_4s res2next50 "
    "selecsls42b skresnet34 hardcorenas_a nf_resnet50 dm_nfnet_f0 regnetz_c16 regnety_032 regnetx_080 repvgg_b0 "
    "cspresnet50 cspdarknet53 darknet53 ese_vovnet39b vovnet39a convnext_atto convnextv2_tiny convmixer_768_32 "
    "coatnet_0_224 levit_256 mobilevit_s poolformer_s12 pvt_v2_b1 edgenext_small efficientformer_l1 fbnetc_100 gernet_m "
    "rexnet_100 tinynet_a lcnet_100 semnasnet_100 spnasnet_100 eca_nfnet_l0 halonet26t botnet26t_256 lambda_resnet26t "
    "sebotnet33ts_256 resnest50d tresnet_m volo_d1_224 xcit_nano_12_p16_224 beit_base_patch16_224 deit_tiny_patch16_224 "
    "swinv2_tiny_window8_256 focalnet_tiny_srf hgnet_small fastvit_t8 inception_next_tiny repghostnet_100 visformer_small "
    "twins_svt_small cait_xxs24_224 densenet169 pnasnet5large nasnetalarge mobileone_s1 starnet_s1 repvit_m1 "
    "efficientvit_b1 tiny_vit_5m_224 "
)


def shapes(out: Path) -> None:
    """Write the convolutions of each network, by its name."""
    import timm
    import torchvision

    found: dict[str, list[Any]] = {}
    for name in TORCHVISION.split():
        for size in (299,) if name == "inception_v3" else (224, 86):
            with torch.device("meta"):
                model = getattr(torchvision.models, name)(weights=None)
            found[f"torchvision/{name}@{size}"] = _convolutions(model, size)
    for name in TIMM.split():
        with torch.device("meta"):
            model = timm.create_model(name)
        size = model.default_cfg.get("input_size", (3, 224, 224))[-1]
        found[f"timm/{name}@{size}"] = _convolutions(model, size)
    out.write_text(json.dumps(found), "utf-8")


def _convolutions(model: nn.Module, size: int) -> list[Any]:
    """Return ``[[channels, height, width], outputs, filter, stride, padding, dilation, groups,
    result]`` of each convolution."""
    found: list[Any] = []

    def note(module: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
        assert isinstance(module, nn.Conv2d)
        if isinstance(module.padding, tuple):
            sizes = (module.kernel_size, module.stride, module.padding, module.dilation)
            lists = [list(each) for each in sizes]
            found.append(
                [
                    list(arguments[0].shape[1:]),
                    module.out_channels,
                    *lists,
                    module.groups,
                    list(result.shape[2:]),
                ]
            )

    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(note)
    try:
        with torch.no_grad():
            model.eval()(torch.empty(1, 3, size, size, device="meta"))
    except (
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:  # some networks want other inputs: what they did so far counts
        print(f"{type(model).__name__} at {size}: {error}")
    return found


def ask(shapes_file: Path, out: Path, cudnn: str) -> None:
    """Write one row for each answer: GPU, type, layout, operation, batch, the convolution,
    workspace bytes, networks."""
    library = find_library(cudnn)
    if library is None:
        raise SystemExit("error: cudnn: there is none; give --cudnn PATH")
    session = CudnnSession(library)
    networks: dict[str, list[str]] = defaultdict(list)
    for name, convolutions in json.loads(shapes_file.read_text("utf-8")).items():
        for convolution in convolutions:
            networks[json.dumps(convolution)].append(name)
    keys = sorted(networks)
    random.Random(8).shuffle(keys)
    with out.open("w", encoding="utf-8") as file:
        for index, key in enumerate(keys):
            for row in _answers(session, key, with_others=index % 2 == 0):
                file.write(json.dumps([*row, networks[key]]) + "\n")


def _answers(session: CudnnSession, key: str, with_others: bool) -> Iterator[list[Any]]:
    image, outputs, taps, stride, padding, dilation, groups, result = json.loads(key)
    rng = random.Random(key)
    kinds = (
        [("float32", False)],
        [("float32", True), ("float16", False), ("float16", True)] if with_others else [],
    )
    for each in kinds:
        batch = rng.choice(BATCHES)
        for dtype, channels_last in each:
            if groups == image[0] > 1 and not channels_last:  # PyTorch's own kernels
                continue
            for operation in OPERATIONS:
                if operation == BACKWARD_DATA and image[0] == 3:
                    continue
                question = ConvolutionQuestion(
                    operation=operation,
                    image=(batch, *image),
                    weight=(outputs, image[0] // groups, *taps),
                    result=(batch, outputs, *result),
                    channels_last=channels_last,
                    dtype=dtype,
                    padding=tuple(padding),
                    stride=tuple(stride),
                    dilation=tuple(dilation),
                )
                for capability, gpu in GPUS.items():
                    plans = session.plans(device_profile(gpu), question)
                    usable = plans.for_pytorch(dtype, tf32=True) if plans else ()
                    if usable:
                        place = [image, outputs, taps, stride, padding, dilation, groups, result]
                        yield [
                            capability,
                            dtype,
                            channels_last,
                            operation,
                            batch,
                            *place,
                            usable[0].workspace_bytes,
                        ]


class Row:
    """One answer of cuDNN, with the features of its convolution and what it copies."""

    def __init__(self, line: str) -> None:
        self.capability, dtype, channels_last, self.operation, batch, image, outputs, *rest = (
            json.loads(line)
        )
        taps, stride, padding, dilation, groups, result, self.bytes, self.networks = rest
        self.convolution = Convolution(
            batch=batch,
            channels=image[0],
            outputs=outputs,
            image=tuple(image[1:]),
            result=tuple(result),
            filter=tuple(taps),
            stride=tuple(stride),
            padding=tuple(padding),
            dilation=tuple(dilation),
            groups=groups,
            dtype=getattr(torch, dtype),
            channels_last=channels_last,
        )
        self.tree = tree_name(
            self.capability, self.operation, self.convolution.dtype.itemsize, channels_last
        )
        self.features = features(self.convolution)
        first, second, self.weight_bytes = self.convolution.tensor_bytes
        self.copies_bytes = {0: 0, IMAGE: first, RESULT: second, IMAGE | RESULT: first + second}
        fitting = [copies for copies, size in self.copies_bytes.items() if size <= self.bytes]
        self.copies = max(fitting, key=lambda copies: self.copies_bytes[copies])
        self.weights = min(64.0, (self.bytes - self.copies_bytes[self.copies]) / self.weight_bytes)

    @property
    def is_held_out(self) -> bool:
        """Whether all architectures that have this convolution are held out: one family in five, by
        its letters."""
        families = {re.split(r"[^a-z]", name.split("/")[1])[0] for name in self.networks}
        return all(zlib.crc32(family.encode()) % 5 == 0 for family in families)


def fit(files: Sequence[Path], write: bool) -> None:
    """Print the errors of trees on held-out architectures, and store trees of all rows."""
    rows: dict[str, list[Row]] = defaultdict(list)
    count = 0
    for file in files:
        for line in file.read_text("utf-8").splitlines():
            row = Row(line)
            rows[row.tree].append(row)
            count += 1
    print(
        "| GPU, operation, type, layout | rows | held out | same within 1 MiB or 5 % | error in the median | mean | bytes |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name in sorted(rows):
        held_out = [row for row in rows[name] if row.is_held_out]
        tree = learned([row for row in rows[name] if not row.is_held_out])
        found = [(answer_of(tree, row), row.bytes) for row in held_out]
        errors = [abs(answer - truth) for answer, truth in found]
        same = sum(
            error <= max(MIB, 0.05 * truth) for error, (_, truth) in zip(errors, found, strict=True)
        )
        total = sum(truth for _, truth in found)
        difference = (sum(answer for answer, _ in found) - total) / max(1, total)
        print(
            f"| {name} | {len(rows[name])} | {len(held_out)} | {same / len(found):.0%} "
            f"| {statistics.median(errors) / MIB:.1f} MiB | {statistics.mean(errors) / MIB:.1f} MiB | {difference:+.1%} |"
        )
    if write:
        document = {
            "made_by": "benchmarks/convolution_workspaces.py, from answers of cuDNN 9.8.0 and 9.28.0",
            "rows": count,
            "features": json.loads(TREES.read_text("utf-8"))["features"],
            "capabilities": sorted(GPUS),
            "trees": {name: learned(rows[name]) for name in sorted(rows)},
        }
        TREES.write_text(json.dumps(document, separators=(",", ":")) + "\n", "utf-8")


def learned(rows: Sequence[Row]) -> dict[str, Any]:
    """Return a decision tree as nested objects; its leaves say what is copied, and how often the
    weight."""
    from sklearn.tree import DecisionTreeClassifier

    learner = DecisionTreeClassifier(
        max_leaf_nodes=LEAVES, min_samples_leaf=SMALLEST_LEAF, random_state=0
    )
    inputs = [row.features for row in rows]
    largest = [row.copies_bytes[IMAGE | RESULT] for row in rows]
    learner.fit(inputs, [row.copies for row in rows], [(1 + size / MIB) ** 0.5 for size in largest])
    at_leaf: dict[int, list[Row]] = defaultdict(list)
    for leaf, row in zip(learner.apply(inputs), rows, strict=True):
        at_leaf[leaf].append(row)
    return _node(learner, 0, at_leaf)


def _node(learner: Any, index: int, at_leaf: Mapping[int, Sequence[Row]]) -> dict[str, Any]:
    tree = learner.tree_
    if tree.children_left[index] < 0:
        copies = int(learner.classes_[tree.value[index][0].argmax()])
        weights = statistics.median(row.weights for row in at_leaf[index] if row.copies == copies)
        return {"copies": copies, "weights": round(weights, 3)}
    return {
        "feature": int(tree.feature[index]),
        "limit": float(f"{tree.threshold[index]:.6g}"),
        "below": _node(learner, tree.children_left[index], at_leaf),
        "above": _node(learner, tree.children_right[index], at_leaf),
    }


def answer_of(tree: Mapping[str, Any], row: Row) -> int:
    """Return the workspace bytes by ``tree``."""
    node: Any = tree
    while "feature" in node:
        node = node["below" if row.features[node["feature"]] <= node["limit"] else "above"]
    return round(row.copies_bytes[node["copies"]] + node["weights"] * row.weight_bytes)


def main(arguments: Iterable[str] | None = None) -> None:
    """Run one of the three commands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("shapes")
    command.add_argument("out", type=Path)
    command.set_defaults(run=lambda given: shapes(given.out))
    command = commands.add_parser("ask")
    command.add_argument("shapes", type=Path)
    command.add_argument("out", type=Path)
    command.add_argument("--cudnn", default="auto")
    command.set_defaults(run=lambda given: ask(given.shapes, given.out, given.cudnn))
    command = commands.add_parser("fit")
    command.add_argument("rows", type=Path, nargs="+")
    command.add_argument("--write", action="store_true")
    command.set_defaults(run=lambda given: fit(given.rows, given.write))
    given = parser.parse_args(None if arguments is None else list(arguments))
    given.run(given)


if __name__ == "__main__":
    main()
