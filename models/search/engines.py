"""Trains folds in this process one after another, or in parallel on a Ray cluster, one task per
core.

A task is one fold of one trial and returns its loss.  Only this process writes to the storage, so
any storage works.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from gpumemnet.batch.ray_loading import connect, load_ray, package_folders
from gpumemnet.errors import DatasetError

from ..training.plans import Plan
from .objective import SearchTask, fold_loss

ENGINES: Final = ("local", "ray")


class Engine(Protocol):
    """Trains folds.

    Attributes:
        width: number of folds trained at a time.
    """

    width: int

    def submit(self, trial: int, plan: Plan, fold: int) -> None:
        """Submit one fold of a trial for training."""

    def next(self) -> tuple[int, float]:
        """Wait for a fold; return its trial and its loss.

        Raises:
            DatasetError: when a fold could not be trained.
        """

    def close(self) -> None:
        """Cancel unfinished folds."""


def open_engine(name: str, task: SearchTask, workers: int | None) -> Engine:
    """Return the engine called ``name``, one of :data:`ENGINES`.

    Raises:
        MissingExtraError: when Ray is not installed.
        DatasetError: when the Ray cluster cannot be reached.
    """
    return RayEngine(task, workers) if name == "ray" else LocalEngine(task)


class LocalEngine:
    """Trains folds in this process, one at a time."""

    width = 1

    def __init__(self, task: SearchTask) -> None:
        self._task = task
        self._waiting: list[tuple[int, Plan, int]] = []

    def submit(self, trial: int, plan: Plan, fold: int) -> None:
        """Add the fold to the queue."""
        self._waiting.append((trial, plan, fold))

    def next(self) -> tuple[int, float]:
        """Train the first fold in the queue; return its trial and its loss."""
        trial, plan, fold = self._waiting.pop(0)
        try:
            return trial, fold_loss(self._task, plan, fold)
        except ValueError as error:
            raise DatasetError(f"{self._task.source}: {error}") from None

    def close(self) -> None:
        """Do nothing; no fold is running."""


class RayEngine:
    """Trains folds on a Ray cluster: that of ``RAY_ADDRESS``, one running on this machine, or a new
    one here."""

    def __init__(self, task: SearchTask, workers: int | None) -> None:
        self._ray = load_ray()
        self._is_ours = not self._ray.is_initialized()
        if self._is_ours:
            connect(self._ray, {"py_modules": package_folders(__name__)}, DatasetError)
        self.width = workers or max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        self._task = self._ray.put(task)
        self._remote_loss = self._ray.remote(num_cpus=1, max_retries=3)(_loss_or_error)
        self._running: dict[Any, int] = {}

    def submit(self, trial: int, plan: Plan, fold: int) -> None:
        """Start a Ray task for the fold."""
        self._running[self._remote_loss.remote(self._task, plan, fold)] = trial

    def next(self) -> tuple[int, float]:
        """Wait for a Ray task; return its trial and its loss."""
        [finished], _ = self._ray.wait(list(self._running), num_returns=1)
        trial = self._running.pop(finished)
        try:
            result = self._ray.get(finished)
        except self._ray.exceptions.RayError as error:
            raise DatasetError(
                f"the Ray cluster lost a fold ({type(error).__name__}): run it again, it goes on"
            ) from None
        if isinstance(result, str):
            raise DatasetError(result)
        return trial, result

    def close(self) -> None:
        """Cancel the running tasks."""
        for reference in self._running:
            self._ray.cancel(reference, force=True)
        if self._is_ours:
            self._ray.shutdown()


def _loss_or_error(task: SearchTask, plan: Plan, fold: int) -> float | str:
    try:
        return fold_loss(task, plan, fold)
    except ValueError as error:
        return f"{task.source}: {error}"
