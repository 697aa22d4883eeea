"""Every error that a user can cause, in one tree.

::

    GpumemnetError              one clear sentence; exit code 2 on the command line
    ├── InvalidJobError         a job that cannot be read or cannot exist     (HTTP 422)
    ├── InvalidRequestError     a question that cannot be asked (bin width, coverage, GPU …)   (HTTP
    422) ├── UnsupportedJobError     a valid job for which no bundle is loaded     (HTTP 422)
    ├── BundleError             a bundle that is damaged, foreign or from another version
    │   └── RegistryError       a registry of bundles that is damaged, or a change that it refuses
    │       ├── UnknownReleaseError   a release that is not there         (HTTP 404)
    │       └── RegistryBusyError     another process is writing to it    (HTTP 503)
    ├── ExtractError            a model factory that cannot be turned into a job
    │   └── CodeEndedError      code that ended before there was an answer
    ├── UnsupportedTorchError   a PyTorch version that lacks what a trace needs
    ├── PlanError               a plan that would change what a model computes, or that does not
    belong to it │   └── BudgetError         a training step that no plan fits into the budget
    ├── DatasetError            a dataset that is missing, damaged or of another schema
    ├── MeasurementError        a machine on which nothing can be measured
    ├── JobDoesNotFitError      a training run that needs more memory than its GPU has free
    ├── MissingExtraError       an optional package that is not installed
    ├── StaleModulesError       compiled modules of a checkout whose sources have changed
    └── ServiceError            a service that cannot be reached or that answered with a problem
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec


class GpumemnetError(Exception):
    """Base of all errors with a sentence for the user; its text is that sentence."""


class FieldError(GpumemnetError, ValueError):
    """A wrong value at a known place.

    Attributes:
        field: dotted path to the value, such as ``layers[3].parameters``; empty for the whole
            document.
        reason: what is wrong and what to do, without the path.
    """

    def __init__(self, reason: str, field: str = "") -> None:
        self.field = field
        self.reason = reason
        super().__init__(reason, field)

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}" if self.field else self.reason


class InvalidJobError(FieldError):
    """The training job is malformed, or its values cannot belong to a job."""


class InvalidRequestError(FieldError):
    """The question about a job is malformed (bin width, coverage, unknown GPU …)."""


class UnsupportedJobError(FieldError):
    """The job is valid, but no loaded bundle answers for its family."""


class BundleError(GpumemnetError):
    """A bundle on disk is incomplete, altered, of a foreign format or of another version."""


class RegistryError(BundleError):
    """A registry is damaged or cannot be written, or what was asked of it cannot be."""


class UnknownReleaseError(RegistryError):
    """There is no release of the name."""


class RegistryBusyError(RegistryError):
    """Another process holds the registry's lock."""


class ExtractError(GpumemnetError):
    """A model factory raised, returned something else than a model, or cannot run on meta
    tensors."""


class CodeEndedError(ExtractError):
    """A user's code ended before there was an answer; its last line of output often says why."""


class UnsupportedTorchError(GpumemnetError):
    """The installed PyTorch lacks a private name that a trace needs, or the name no longer does
    what it did."""


class PlanError(GpumemnetError):
    """A plan cannot be applied: the model would compute something else, or has no such modules."""


class BudgetError(PlanError):
    """No plan that was found fits the budget.

    Attributes:
        smallest_bytes: memory of the process with the smallest plan that was found.
    """

    def __init__(self, message: str, smallest_bytes: int) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class DatasetError(GpumemnetError):
    """A dataset file is missing, damaged, or does not follow the schema."""


class MeasurementError(GpumemnetError):
    """Nothing can be measured here (no GPU, no NVML), or a reading cannot be trusted."""


class JobDoesNotFitError(GpumemnetError, RuntimeError):
    """A training run needs more memory than its GPU has free; raised before its first step."""


class ServiceError(GpumemnetError):
    """The REST service could not be reached or answered with a problem document.

    Attributes:
        status: HTTP status, or ``None`` when there was no answer.
        problem: the RFC 9457 problem document, or an empty dict.
    """

    def __init__(
        self, message: str, status: int | None = None, problem: dict[str, object] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.problem = problem or {}


class StaleModulesError(GpumemnetError):
    """The compiled modules of a checkout were made from other sources than those that are there
    now."""


class MissingExtraError(GpumemnetError):
    """An optional package is needed for what was asked."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package '{package}': install the extra, in a clone with  pip install -e '.[{extra}]'"
        )


def check_installed(package: str, extra: str, purpose: str) -> None:
    """Check, without importing it, that an optional package is there for ``purpose``.

    Raises:
        MissingExtraError: it is not installed; names the extra that has it.
    """
    if find_spec(package) is None:
        raise MissingExtraError(package, extra, purpose)


def first_line(error: BaseException, max_characters: int = 200) -> str:
    """Return the first line of a foreign error's text, shortened; the name of its class if it has
    no text."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:max_characters]


def did_you_mean(
    name: object,
    known: Iterable[str],
    otherwise: str = "",
    *,
    similarity: float = 0.6,
    key: Callable[[str], str] = str.casefold,
) -> str:
    """Return ``did you mean 'batch_size'?`` for an unknown name.

    Args:
        name: the unknown name.
        known: the known names.
        otherwise: returned when none of them is similar, such as a list of them.
        similarity: how similar a known name must be, from 0 to 1.
        key: what names are compared by; without case by default.
    """
    from difflib import get_close_matches  # needed only after a mistake

    by_key = {key(each): each for each in known}
    close = get_close_matches(key(str(name)[:64]), by_key, n=1, cutoff=similarity)
    return f"did you mean '{by_key[close[0]]}'?" if close else otherwise
