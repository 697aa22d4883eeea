"""What ``accelerate launch`` starts: its own code reads its options, its configuration file and the
default file, and sets the environment of the script.

Source: ``accelerate/commands/launch.py`` and ``accelerate/utils/launch.py`` of the version that is
installed, which the script needs anyway.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn
from unittest.mock import patch

from gpumemnet.errors import InvalidRequestError
from gpumemnet.sandbox.process import ask

_FIELD: Final = "source"
_SECONDS: Final = 120.0
_REFUSED: Final = {
    "tpu_launcher": "TPUs are not simulated",
    "tpu_pod_launcher": "TPUs are not simulated",
    "sagemaker_launcher": "a job of SageMaker starts elsewhere: give the line that it runs there",
}
"""Function of accelerate that starts a script → why it is refused."""
_MACHINE: Final = frozenset({"CUDA_VISIBLE_DEVICES", "PYTHONPATH"})
"""Variables that say where a script runs, and not how."""


def read_accelerate(
    words: Sequence[str], variables: dict[str, str], gpus: int | None
) -> dict[str, Any]:
    """Read a line in a child process, which imports accelerate.

    Args:
        words: what follows ``accelerate launch``.
        variables: environment variables that the line sets.
        gpus: number of GPUs of the machine; ``None`` if unknown.

    Returns:
        the fields of a :class:`~gpumemnet.launchers.launch_line.Launch`, as JSON.

    Raises:
        InvalidRequestError: accelerate is not installed, rejects the line or its file, or starts
            what is not simulated.
    """
    launch: dict[str, Any] = ask(
        _read_in_child,
        "accelerate launch",
        {"words": list(words), "gpus": gpus},
        purpose="reading the line as accelerate does",
        variables=variables,
        deadline_seconds=_SECONDS,
    )
    return launch


def _read_in_child(request: dict[str, Any]) -> dict[str, Any]:
    try:
        from accelerate.commands import launch
    except ImportError as error:
        raise InvalidRequestError(
            f"accelerate launch: {error}; install accelerate where gpumemnet is installed", _FIELD
        ) from None
    parser = launch.launch_command_parser()

    def refuse(reason: object) -> NoReturn:
        raise InvalidRequestError(f"accelerate launch: {reason}", _FIELD)

    parser.error = refuse
    args = parser.parse_args(request["words"])
    known = frozenset(vars(args))
    started: list[tuple[dict[str, str], bool]] = []

    def start_several(args: argparse.Namespace) -> None:
        if args.use_megatron_lm:
            refuse("Megatron brings kernels of its own, which cannot be traced")
        started.append((launch.prepare_multi_gpu_env(args), True))

    def refuse_launcher(reason: str, *args: object) -> NoReturn:
        refuse(reason)

    replacements = {
        "simple_launcher": lambda args: started.append(
            (launch.prepare_simple_launcher_cmd_env(args)[1], False)
        ),
        "multi_gpu_launcher": start_several,
        "deepspeed_launcher": lambda args: started.append(
            (launch.prepare_deepspeed_cmd_env(args)[1], True)
        ),
        **{name: partial(refuse_launcher, reason) for name, reason in _REFUSED.items()},
    }
    gpus: int | None = request["gpus"]
    file = args.config_file or launch.default_config_file
    several = args.multi_gpu or args.use_fsdp or args.use_deepspeed
    others = (args.cpu, args.tpu, args.use_megatron_lm, Path(file).is_file())
    if not several and not any(others):  # as it does itself where it finds so many GPUs
        args.multi_gpu = (args.num_processes or gpus or 1) > 1

    def visible_gpus() -> int:
        if several and gpus is None and args.num_processes is None:
            refuse(
                "depends on the machine: give --num_processes, or say with --ranks how many GPUs"
            )
        return gpus or args.num_processes or 1

    with ExitStack() as stack:
        for name, replacement in replacements.items():
            stack.enter_context(patch.object(launch, name, replacement))
        stack.enter_context(patch("accelerate.utils.launch.is_port_in_use", lambda port: False))
        stack.enter_context(patch("torch.cuda.device_count", visible_gpus))
        try:
            launch.launch_command(args)
        except InvalidRequestError:
            raise
        except (ValueError, KeyError, TypeError, OSError, AttributeError, RuntimeError) as error:
            refuse(f"{type(error).__name__}: {error}")
    environment, is_distributed = started[0]
    notes = _file_notes(Path(file), known) if Path(file).is_file() else []
    if args.config_file is None and Path(file).is_file():
        notes.insert(0, f"accelerate read {file}, its default file on this machine")
    hosts = args.num_machines or 1
    changed = {
        name: value
        for name, value in environment.items()
        if name not in _MACHINE and os.environ.get(name) != value
    }
    if is_distributed:
        changed["LOCAL_WORLD_SIZE"] = str(max(args.num_processes // hosts, 1))
    return {
        "script": args.training_script,
        "is_module": bool(args.module),
        "arguments": args.training_script_args,
        "ranks": args.num_processes if is_distributed else None,
        "variables": changed,
        "notes": notes,
    }


def _file_notes(file: Path, known: frozenset[str]) -> list[str]:
    """Sentences on keys of a configuration file that accelerate does not read: it is silent about
    those within a section."""
    import yaml

    document = yaml.safe_load(file.read_text()) or {}
    unread = [
        f"{section}.{key}"
        for section, keys in document.items()
        if isinstance(keys, dict)
        for key in keys
        if not ({key, f"{section.removesuffix('_config')}_{key}"} & known)
    ]
    return [f"{file.name}: accelerate does not read {', '.join(unread)}"] if unread else []
