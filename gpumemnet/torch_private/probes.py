"""Runs the probes of all declared names and says what the installed PyTorch lacks.

A tested version whose probes pass is traced without a word.  Any other version is traced with a
note, unless a name fails
that the trace needs: that is an error which names it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Final

import torch

from gpumemnet.errors import UnsupportedTorchError
from gpumemnet.torch_private.dynamo import without_dynamo
from gpumemnet.torch_private.names import (
    MODEL,
    TESTED_RELEASES,
    USES,
    TorchName,
    declared_names,
    torch_release,
    unsupported,
)

_SUBJECTS: Final = (
    *(
        "tensors",
        "operators",
        "autograd",
        "modules",
        "optimizers",
        "mixed_precision",
        "attention",
        "dynamo",
    ),
    *("distributed", "script"),
)
"""Modules that declare names."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A name that is missing or misbehaves.

    Attributes:
        name: as it is written in Python.
        purpose: what it is used for.
        use: when it is needed, one of :data:`~gpumemnet.torch_private.names.USES`.
        reason: ``is missing``, or what its probe found.
    """

    name: str
    purpose: str
    use: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} {self.reason} (needed to {self.purpose})"


def private_names(uses: Collection[str] = USES) -> tuple[TorchName, ...]:
    """The declared names that are needed for ``uses``.

    Args:
        uses: some of :data:`~gpumemnet.torch_private.names.USES`.
    """
    for subject in _SUBJECTS:
        import_module(f"{__package__}.{subject}")
    return tuple(name for name in declared_names() if name.use in uses)


def probe_torch(uses: Collection[str] = USES) -> list[Finding]:
    """Probe the installed PyTorch.

    Args:
        uses: what it is needed for, some of :data:`~gpumemnet.torch_private.names.USES`.

    Returns:
        one finding for each name that is missing or misbehaves; an empty list where all is well.
    """
    with without_dynamo():
        faults = [(name, _fault(name)) for name in private_names(uses)]
    return [
        Finding(name.shown, name.purpose, name.use, reason) for name, reason in faults if reason
    ]


def check_torch(*uses: str) -> tuple[str, ...]:
    """Check that the installed PyTorch has what ``uses`` need; the probes run once in a process.

    Args:
        uses: some of :data:`~gpumemnet.torch_private.names.USES`; ``model`` is always among them.

    Returns:
        a note for a PyTorch version that was not tested; nothing for a tested one.

    Raises:
        UnsupportedTorchError: names what is missing or misbehaves, and what to do.
    """
    all_uses = tuple(sorted({MODEL, *uses}))
    count, findings = _probed(all_uses)
    if findings:
        raise unsupported(map(str, findings))
    if ".".join(map(str, torch_release())) in TESTED_RELEASES:
        return ()
    tested = " and ".join(TESTED_RELEASES)
    return (
        f"Traced with PyTorch {torch.__version__}, which this version of gpumemnet was not tested with (tested: {tested}); "
        f"all {count} probes passed.",
    )


@cache
def _probed(uses: tuple[str, ...]) -> tuple[int, tuple[Finding, ...]]:
    return len(private_names(uses)), tuple(probe_torch(uses))


def forget_probes() -> None:
    """Let the next :func:`check_torch` run the probes again."""
    _probed.cache_clear()


def _fault(name: TorchName) -> str:
    """What is wrong with ``name``, empty if nothing is."""
    try:
        if name.is_created:
            name.owner()
        else:
            name.value()
    except UnsupportedTorchError:
        return "is missing"
    if name.probe is None:
        return ""
    try:
        name.probe()
    except Exception as error:  # whatever a changed PyTorch raises is the finding
        return (
            f"misbehaves: {type(error).__name__}: {error}"
            if str(error)
            else f"misbehaves: {type(error).__name__}"
        )
    return ""
