"""Options that every command has that runs the code of a model: the model, how it is trained, and
on which GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from gpumemnet.cli.output import check_writable
from gpumemnet.cli.training_options import training_option
from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import describe
from gpumemnet.tracing.options import LOSSES, ZERO_GRAD

if TYPE_CHECKING:
    from gpumemnet.gpu.catalogue import DeviceProfile
    from gpumemnet.sandbox.process import Progress

TRAINING: Final = "How it is trained"
MACHINE: Final = "Where it is trained"
of_model: Final = partial(typer.Option, rich_help_panel="The model")
of_training: Final = partial(typer.Option, rich_help_panel=TRAINING)
of_machine: Final = partial(typer.Option, rich_help_panel=MACHINE)
of_answer: Final = partial(typer.Option, rich_help_panel="What else to answer")
_PLOTS: Final = (".png", ".html")

BatchSize = Annotated[
    int | None, of_model(help="Samples per step; needed unless the factory gives inputs.")
]
Inputs = Annotated[
    list[str] | None,
    of_model(
        "--input",
        metavar="SHAPE",
        help="3x224x224, 1024:int64, mask=128:bool …; once for each input of the model.",
    ),
]
FactoryArguments = Annotated[
    list[str] | None,
    of_model(
        "--arg", metavar="NAME=VALUE", help="Keyword argument of the factory; JSON, or else text."
    ),
]
BestEffort = Annotated[
    bool,
    of_model(
        "--best-effort",
        help="Continue with a guess, and a note, where the values of tensors are needed.",
    ),
]

Optimizer = Annotated[str, training_option("optimizer", TRAINING)]
Precision = Annotated[str, training_option("precision", TRAINING)]
Loss = Annotated[str, of_training(metavar="|".join(LOSSES), help="Unless the factory returns one.")]
OptimizerImplementation = Annotated[str, training_option("optimizer_implementation", TRAINING)]
GradientAccumulation = Annotated[int, training_option("gradient_accumulation", TRAINING)]
ZeroGrad = Annotated[
    str, of_training(metavar="|".join(ZERO_GRAD), help="Where the loop drops its gradients.")
]
AttentionKernel = Annotated[
    str | None,
    training_option("attention_kernel", TRAINING, "Instead of the one that PyTorch picks."),
]
ChannelsLast = Annotated[bool, training_option("channels_last", TRAINING)]
CudnnBenchmark = Annotated[bool, training_option("cudnn_benchmark", TRAINING)]

Gpu = Annotated[
    str,
    of_machine(
        envvar="GPUMEMNET_GPU",
        metavar="NAME|FILE.json",
        help="A GPU of the catalogue, or a profile of your own.",
    ),
]
ContextMib = Annotated[
    int | None,
    of_machine(
        envvar="GPUMEMNET_CONTEXT_MIB",
        metavar="MIB",
        help="The CUDA context where you know yours.",
        min=1,
    ),
]
AllocatorConf = Annotated[
    str,
    of_machine(
        metavar="TEXT",
        help="The job's PYTORCH_CUDA_ALLOC_CONF, such as expandable_segments:True; the value in this shell is ignored.",
    ),
]
Cudnn = Annotated[
    str,
    of_machine(
        metavar="auto|off|PATH",
        help="Take workspaces of convolutions from cuDNN, which needs no GPU: the installed one, none, or the one there.",
    ),
]

Deadline = Annotated[float, typer.Option(metavar="SECONDS", help="Give up after this long.")]
ShowOutput = Annotated[
    bool, typer.Option("--show-output", help="Show what the file prints, on standard error.")
]


def device_of(gpu: str, context_mib: int | None) -> DeviceProfile:
    """Returns the profile of a GPU with the context that the user knows, if any."""
    from gpumemnet.gpu.catalogue import asked_profile

    return asked_profile(gpu, context_mib, "--context-mib")


def check_plot(path: Path | None) -> None:
    """Checks that a picture can be written, before it is computed.

    Raises:
        InvalidRequestError: the file has another suffix, or cannot be written.
    """
    if path is None:
        return
    if path.suffix not in _PLOTS:
        raise InvalidRequestError(
            f"must end in {' or '.join(_PLOTS)}, not {describe(path.name)}", "plot"
        )
    check_writable(path, "plot")


@contextmanager
def shown_progress(source: str, is_shown: bool) -> Iterator[Progress | None]:
    """Shows the current step on standard error while it runs, if standard error is a terminal."""
    console = Console(stderr=True)
    if not (is_shown and console.is_terminal):
        yield None
        return
    with console.status(f"{source}: starting") as status:
        yield lambda step: status.update(f"{source}: {step}")
