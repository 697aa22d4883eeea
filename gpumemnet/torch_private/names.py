"""How a private or replaced name of PyTorch is declared, found, replaced for a while, and probed.

A tested version whose probes pass is traced without a word.  Any other version is traced with a
note, unless a name fails that the trace needs: that is an error which names it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, reduce
from importlib import import_module
from typing import Any, Final
from unittest.mock import patch

import torch

from gpumemnet.errors import UnsupportedTorchError

MODEL: Final = "model"
PARALLEL: Final = "parallel"
SCRIPT: Final = "script"
USES: Final = (MODEL, PARALLEL, SCRIPT)
"""What a name is needed for: every extraction and trace; several GPUs; a training script that runs
on a simulated GPU."""

Probe = Callable[[], None]
"""Raises an error that says what misbehaves; returns nothing where all is well."""


@dataclass(frozen=True, slots=True, eq=False)
class TorchName:
    """One name of PyTorch.

    Attributes:
        path: ``module:attribute``, such as ``torch._C:_current_autograd_node``; the module alone
            for a module.
        purpose: what it is used for, as the end of "is needed to …".
        use: when it is needed, one of :data:`USES`.
        probe: checks its behavior; ``None`` where only its existence is checked.
        is_created: whether PyTorch lacks the name by design and looks it up all the same.
    """

    path: str
    purpose: str
    use: str = MODEL
    probe: Probe | None = None
    is_created: bool = False

    @property
    def shown(self) -> str:
        """The name as it is written in Python."""
        return self.path.replace(":", ".")

    def owner(self) -> tuple[Any, str]:
        """The object that has the name, and the last part of the name.

        Raises:
            UnsupportedTorchError: PyTorch does not have the owner.
        """
        module, _, attributes = self.path.partition(":")
        *parents, last = attributes.split(".")
        try:
            return reduce(getattr, parents, import_module(module)), last
        except (ImportError, AttributeError) as error:
            raise missing(self) from error

    def value(self) -> Any:
        """What the name stands for.

        Raises:
            UnsupportedTorchError: PyTorch does not have it.
        """
        if ":" not in self.path:
            return self._module()
        owner, last = self.owner()
        try:
            return getattr(owner, last)
        except AttributeError as error:
            raise missing(self) from error

    def _module(self) -> Any:
        try:
            return import_module(self.path)
        except ImportError as error:
            raise missing(self) from error


_DECLARED: Final[dict[str, TorchName]] = {}


def declare(
    path: str,
    purpose: str,
    *,
    use: str = MODEL,
    probe: Probe | None = None,
    is_created: bool = False,
) -> TorchName:
    """Add a name to the list that is probed; the arguments are those of :class:`TorchName`."""
    name = TorchName(path, purpose, use, probe, is_created)
    _DECLARED[path] = name
    return name


def declared_names() -> tuple[TorchName, ...]:
    """All names, in the order of their declaration."""
    return tuple(_DECLARED.values())


def missing(name: TorchName) -> UnsupportedTorchError:
    """The error for a name that the installed PyTorch does not have."""
    return unsupported([f"{name.shown} is missing (needed to {name.purpose})"])


def unsupported(reasons: Iterable[str]) -> UnsupportedTorchError:
    """The error for an installed PyTorch that lacks what is needed.

    Args:
        reasons: one clause for each missing or misbehaving name.
    """
    return UnsupportedTorchError(
        f"PyTorch {torch.__version__} cannot be traced with this version of gpumemnet: {'; '.join(reasons)}. "
        f"Install a tested PyTorch ({' or '.join(TESTED_RELEASES)}) or a newer gpumemnet"
    )


TESTED_RELEASES: Final = ("2.11", "2.13")
"""Releases of PyTorch that the tests have passed with."""


def torch_release() -> tuple[int, int]:
    """Major and minor version of the installed PyTorch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


@contextmanager
def replaced(replacements: Iterable[tuple[TorchName, object]]) -> Iterator[None]:
    """Context in which names stand for something else.

    Args:
        replacements: each name with what takes its place.

    Raises:
        UnsupportedTorchError: PyTorch does not have one of the names.
    """
    with ExitStack() as stack:
        for name, replacement in replacements:
            if not name.is_created:
                name.value()
            owner, last = name.owner()
            stack.enter_context(patch.object(owner, last, replacement, create=name.is_created))
        yield


def replace_for_good(name: TorchName, replacement: object) -> None:
    """Let ``name`` stand for something else until the process ends; for child processes."""
    owner, last = name.owner()
    setattr(owner, last, replacement)


def has_parameters(path: str, *expected: str) -> Probe:
    """A probe that checks the parameter names of a function.

    Args:
        path: of the function, as in :class:`TorchName`.
        expected: names that the function must accept, in this order at its beginning.
    """

    def probe() -> None:
        found = tuple(inspect.signature(TorchName(path, "be probed").value()).parameters)
        if found[: len(expected)] != expected:
            raise AssertionError(
                f"its parameters are ({', '.join(found)}), not ({', '.join(expected)})"
            )

    return probe


def check(holds: bool, otherwise: str) -> None:
    """Raise an error with the text ``otherwise`` unless ``holds``; for probes."""
    if not holds:
        raise AssertionError(otherwise)


_SUBJECTS: Final = ("operators", "modules", "training", "script")
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
    from gpumemnet.torch_private.training import without_dynamo  # it declares names itself

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
