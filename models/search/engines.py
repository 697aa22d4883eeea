"""Trains folds in this process one after another, or in parallel on a Ray cluster, one task per core.

A task is one fold of one trial and returns its loss.  Only this process writes to the storage, so any storage works.
"""

from __future__ import annotations

import logging
from typing import Any, Final, Protocol

from gpumemnet.batch.ray_loading import load_ray, package_folders
from gpumemnet.errors import DatasetError, first_line

from ..training.plans import Plan
from .judging import Question, fold_loss

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


def engine(name: str, asked: Question, workers: int | None) -> Engine:
    """Return the engine called ``name``, one of :data:`ENGINES`.

    Raises:
        MissingExtraError: when Ray is not installed.
        DatasetError: when the Ray cluster cannot be reached.
    """
    return RayEngine(asked, workers) if name == "ray" else LocalEngine(asked)


class LocalEngine:
    """Trains folds in this process, one at a time."""

    width = 1

    def __init__(self, asked: Question) -> None:
        self._asked = asked
        self._waiting: list[tuple[int, Plan, int]] = []

    def submit(self, trial: int, plan: Plan, fold: int) -> None:
        """Add the fold to the queue."""
        self._waiting.append((trial, plan, fold))

    def next(self) -> tuple[int, float]:
        """Train the first fold in the queue; return its trial and its loss."""
        trial, plan, fold = self._waiting.pop(0)
        try:
            return trial, fold_loss(self._asked, plan, fold)
        except ValueError as error:
            raise DatasetError(f"{self._asked.source}: {error}") from None

    def close(self) -> None:
        """Do nothing; no fold is running."""


class RayEngine:
    """Trains folds on a Ray cluster: that of ``RAY_ADDRESS``, one running on this machine, or a new one here."""

    def __init__(self, asked: Question, workers: int | None) -> None:
        self._ray = load_ray()
        self._is_ours = not self._ray.is_initialized()
        if self._is_ours:
            _connect(self._ray)
        self.width = workers or max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        self._asked = self._ray.put(asked)
        self._task = self._ray.remote(num_cpus=1, max_retries=3)(_loss_or_reason)
        self._running: dict[Any, int] = {}

    def submit(self, trial: int, plan: Plan, fold: int) -> None:
        """Start a Ray task for the fold."""
        self._running[self._task.remote(self._asked, plan, fold)] = trial

    def next(self) -> tuple[int, float]:
        """Wait for a Ray task; return its trial and its loss."""
        [done], _ = self._ray.wait(list(self._running), num_returns=1)
        trial = self._running.pop(done)
        try:
            answer = self._ray.get(done)
        except self._ray.exceptions.RayError as error:
            raise DatasetError(f"the Ray cluster lost a fold ({type(error).__name__}): run it again, it goes on") from None
        if isinstance(answer, str):
            raise DatasetError(answer)
        return trial, answer

    def close(self) -> None:
        """Cancel the running tasks."""
        for task in self._running:
            self._ray.cancel(task, force=True)
        if self._is_ours:
            self._ray.shutdown()


def _loss_or_reason(asked: Question, plan: Plan, fold: int) -> float | str:
    try:
        return fold_loss(asked, plan, fold)
    except ValueError as error:
        return f"{asked.source}: {error}"


def _connect(ray: Any) -> None:
    try:
        ray.init(runtime_env={"py_modules": package_folders(__name__)}, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise DatasetError(f"the Ray cluster cannot be reached ({first_line(error)}): RAY_ADDRESS names it") from None
