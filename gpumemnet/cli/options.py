"""The options that several commands share, and how their values are read."""

from __future__ import annotations

import atexit
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from gpumemnet.errors import InvalidRequestError
from gpumemnet.gpu import MAX_CONTEXT_MIB
from gpumemnet.job.layers import describe
from gpumemnet.job.training_job import TRAINING_OPTIONS
from gpumemnet.named.methods import METHODS
from gpumemnet.predict.bundle_card import ENCODERS
from gpumemnet.units import GIB, MIB

STANDARD_INPUT: Final = "-"
_UNITS: Final = {"gib": GIB, "mib": MIB}
_LARGEST_AMOUNT: Final = 2**20
_OF_THEIR_OWN: Final = ("optimizer", "precision", "ranks")
_SETTINGS: Final = tuple(name for name in TRAINING_OPTIONS if name not in _OF_THEIR_OWN)
"""Training options that ``--set`` takes; the others have options of their own."""

AsJson = Annotated[bool, typer.Option("--json", help="For programs: print one JSON document.")]
Gpu = Annotated[
    str | None,
    typer.Option(
        envvar="GPUMEMNET_GPU",
        metavar="GPU",
        help="GPU to predict for; that of the most trusted labels by default.",
    ),
]
ContextMib = Annotated[
    int | None,
    typer.Option(
        envvar="GPUMEMNET_CONTEXT_MIB",
        metavar="MIB",
        min=1,
        max=MAX_CONTEXT_MIB,
        help="Size of the CUDA context, where you know yours; the catalogue's by default.",
    ),
]

Bundles = Annotated[
    list[Path] | None,
    typer.Option(
        "--bundle",
        metavar="FOLDER",
        help="Bundle folder, or folder of such, instead of the shipped ones; may be repeated.",
    ),
]
REGISTRY: Final = typer.Option(
    "--registry",
    envvar="GPUMEMNET_REGISTRY",
    metavar="FOLDER",
    help="The registry's folder; its champion predicts.",
    show_default=False,
)
RegistryFolder = Annotated[Path | None, REGISTRY]
Coverage = Annotated[
    float, typer.Option(metavar="SHARE", help="Share of jobs that the safe bytes cover.")
]
Encoder = Annotated[
    str | None, typer.Option(metavar="|".join(ENCODERS), help="Which classifier predicts.")
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of all that is drawn.")]

# ---- commands that run the code of a model
model_option: Final = partial(typer.Option, rich_help_panel="The model")
training_option: Final = partial(typer.Option, rich_help_panel="How it is trained")
machine_option: Final = partial(typer.Option, rich_help_panel="Where it is trained")
result_option: Final = partial(typer.Option, rich_help_panel="Results")

BatchSize = Annotated[
    int | None,
    model_option(metavar="N", help="Samples per step; required unless the factory gives inputs."),
]
Inputs = Annotated[
    list[str] | None,
    model_option(
        "--input",
        metavar="SHAPE",
        help="3x224x224, 1024:int64, mask=128:bool …; once for each input of the model.",
    ),
]
FactoryArguments = Annotated[
    list[str] | None,
    model_option(
        "--arg", metavar="NAME=VALUE", help="Keyword argument of the factory; JSON, or else text."
    ),
]
Optimizer = Annotated[
    str,
    training_option(metavar="|".join(TRAINING_OPTIONS["optimizer"].choices), help="The optimizer."),
]
Precision = Annotated[
    str,
    training_option(
        metavar="|".join(TRAINING_OPTIONS["precision"].choices),
        help="Number formats; amp_… is autocast over fp32 weights.",
    ),
]
Settings = Annotated[
    list[str] | None,
    training_option(
        "--set",
        metavar="NAME=VALUE",
        help=f"Another training option: {', '.join(_SETTINGS)}; the reference lists their values.",
    ),
]
TraceGpu = Annotated[
    str,
    machine_option(
        envvar="GPUMEMNET_GPU",
        metavar="NAME|FILE.json",
        help="A GPU of the catalogue, or a profile of your own.",
    ),
]
TraceContextMib = Annotated[
    int | None,
    machine_option(
        envvar="GPUMEMNET_CONTEXT_MIB",
        metavar="MIB",
        min=1,
        help="Size of the CUDA context, where you know yours.",
    ),
]
AllocatorConf = Annotated[
    str,
    machine_option(
        metavar="TEXT",
        help="The job's PYTORCH_CUDA_ALLOC_CONF, such as expandable_segments:True; the value in this shell is ignored.",
    ),
]
Cudnn = Annotated[
    str,
    machine_option(
        metavar="auto|off|PATH",
        help="Take the workspaces of convolutions from cuDNN, which needs no GPU: the installed one, none, or the one there.",
    ),
]
Factory = Annotated[
    str,
    typer.Argument(
        metavar="FILE.py:FACTORY",
        help="A function that returns a torch.nn.Module, (model, inputs) or (model, inputs, loss).",
    ),
]
Deadline = Annotated[float, typer.Option(metavar="SECONDS", help="Give up after this long.")]
TrainingMethod = Annotated[
    str | None,
    training_option(
        "--method",
        metavar="|".join(METHODS),
        help="What is trained, or an adapter_config.json of peft; full by default.",
    ),
]
SequenceLength = Annotated[
    int | None,
    training_option(metavar="TOKENS", help="Tokens of a sample; 2048 by default."),
]
ShowOutput = Annotated[
    bool, typer.Option("--show-output", help="Show what the file prints, on standard error.")
]


def input_file(path: Path) -> Path:
    """Returns ``path``; for ``-``, a temporary file with the content of standard input, one JSON
    document or one per line."""
    if str(path) != STANDARD_INPUT:
        return path
    content = sys.stdin.buffer.read()
    folder = tempfile.mkdtemp(prefix="gpumemnet-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    ending = "jsonl" if _is_json_lines(content) else "json"
    copy = Path(folder) / f"standard_input.{ending}"
    copy.write_bytes(content)
    return copy


def _is_json_lines(content: bytes) -> bool:
    """Whether the first line is a complete JSON document and other lines follow."""
    first, _, rest = content.strip().partition(b"\n")
    try:
        json.loads(first)
    except ValueError:
        return False
    return bool(rest)


def named_values(texts: Sequence[str] | None, field: str) -> dict[str, Any]:
    """Parses ``name=value`` strings; a value that is not JSON stays a string.

    Raises:
        InvalidRequestError: when a string has another form or a name appears twice.
    """
    values: dict[str, Any] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise InvalidRequestError(f"must look like depth=12, not {describe(text)}", field)
        if name in values:
            raise InvalidRequestError(f"'{name}' is given twice", field)
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values


def training_settings(texts: Sequence[str] | None, others: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the training options that ``--set`` gives.

    Args:
        texts: ``name=value`` strings.
        others: names that are allowed beside those of the training options.

    Raises:
        InvalidRequestError: when there is no such option.
    """
    values, known = named_values(texts, "set"), (*_SETTINGS, *others)
    for name in values:
        if name not in known:
            raise InvalidRequestError(f"knows {', '.join(known)}, not '{name}'", "set")
    return values


def parse_memory(text: str, field: str) -> int:
    """Parses an amount of memory such as ``20GiB`` or ``20480 MiB``; returns bytes.

    Raises:
        InvalidRequestError: when it has another form, or is not above zero.
    """
    number, unit = text.strip()[:-3].strip(), text.strip()[-3:].lower()
    try:
        amount = float(number)
    except ValueError:
        amount = 0.0
    if unit not in _UNITS or not 0 < amount < _LARGEST_AMOUNT:
        raise InvalidRequestError(
            f"must be an amount of memory such as 20GiB or 20480MiB, not {describe(text)}", field
        )
    return int(amount * _UNITS[unit])
