"""Runs a search: Optuna proposes trials, which are trained fold by fold, and pruned if others did
better on the same folds.

The storage holds every trial, so a search that was killed can be resumed.  The values of a trial
depend on the seed, its number and the earlier trials.  So a trial that is run again after a kill
gets the same values.  On Ray, the values also depend on the order in which trials end.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from gpumemnet.atomic_files import locked
from gpumemnet.errors import (
    DatasetError,
    GpumemnetError,
    InvalidRequestError,
    MissingExtraError,
    first_line,
)

from ..retrain.holdout import HELD_OUT_RULE
from ..retrain.steps import TRAINING_CODE, code_hash, code_version
from ..training.plans import Plan, mlp_plan, transformer_plan
from .engines import Engine
from .objective import OBJECTIVE, SearchTask
from .space import SPACES, NumberRange, suggested, values_of

Progress = Callable[[str, float], None]
UNPRUNED_TRIALS: Final = 4
"""Number of trials that are trained on all folds before pruning starts."""
RANDOM_TRIALS: Final = 8
"""Number of random trials before Optuna's sampler uses its model."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search.

    Attributes:
        plan: the best plan; its seed is the search's.
        trials: state → number of trials.
        best, default: mean loss of the best and of the default plan, on the folds that selected the
            best plan.
        study: name of the search in its storage.
    """

    plan: Plan
    trials: dict[str, int]
    best: float
    default: float | None
    study: str


@dataclass(slots=True)
class _Running:
    trial: Any
    plan: Plan
    losses: list[float] = field(default_factory=list)


def search(
    task: SearchTask,
    trials: int,
    storage: str,
    engine: Callable[[], Engine],
    epochs: int | None = None,
    progress: Progress = lambda what, share: None,
) -> SearchResult:
    """Start or resume the search in ``storage`` until it has ``trials`` finished trials.

    Args:
        task: the rows and folds on which plans are compared.
        trials: number of finished trials, including those of earlier runs.
        storage: SQLAlchemy URL.
        engine: creates the engine that trains folds.
        epochs: epochs of every plan; part of the search by default.
        progress: called with a description of the current step and the finished share.

    Raises:
        MissingExtraError: when Optuna is not installed.
        InvalidRequestError: when the storage cannot be used, or another search is using it.
        DatasetError: when a fold cannot be trained, or no trial finished.
    """
    name = study_name(task, epochs)
    default = default_plan(task, epochs)
    with _locked_storage(storage), _quiet_optuna(storage) as optuna:
        study = optuna.create_study(
            study_name=name,
            storage=storage,
            load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(UNPRUNED_TRIALS),
        )
        states = optuna.trial.TrialState
        for interrupted in study.get_trials(
            states=(states.RUNNING,)
        ):  # trials of a run that was killed
            study.tell(interrupted.number, state=states.FAIL)
        if not any(
            "default" in trial.user_attrs for trial in study.trials if trial.state != states.FAIL
        ):
            study.enqueue_trial(
                values_of(default, task.encoder, epochs), user_attrs={"default": True}
            )
        if len(_finished(study, states)) < trials:
            with _closing(engine()) as trainer:
                _run_trials(study, optuna, task, default, trials, trainer, epochs, progress)
        return _search_result(study, states, task, default, name)


def search_report(task: SearchTask, result: SearchResult, epochs: int | None) -> dict[str, Any]:
    """Return the report on the search for the plan's file."""
    return {
        "objective": OBJECTIVE,
        "on_the_folds_that_chose_it": {"plan": result.best, "without_a_search": result.default},
        "trials": result.trials,
        "study": result.study,
        "dataset": task.source,
        "dataset_sha256": task.sha256,
        "rows": len(task.data),
        "architectures": len(set(task.data.groups.tolist())),
        "left_out": HELD_OUT_RULE,
        "folds": task.fold_count,
        "seed": task.seed,
        "epochs": "searched for" if epochs is None else epochs,
        "code": code_version(),
    }


def study_name(task: SearchTask, epochs: int | None) -> str:
    """Return the name of a search, which identifies rows, folds, seed, values and training code.

    Trials that differ in any of these are not comparable.
    """
    space = {
        name: asdict(values) if isinstance(values, NumberRange) else values
        for name, values in SPACES[task.encoder].items()
    }
    parts = [
        task.sha256,
        task.fold_count,
        task.seed,
        epochs,
        space,
        OBJECTIVE,
        HELD_OUT_RULE,
        code_hash(TRAINING_CODE),
    ]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return f"{task.data.family}-{task.encoder}-{digest[:12]}"


def default_plan(task: SearchTask, epochs: int | None) -> Plan:
    """Return the plan that training uses without a search."""
    if task.encoder == "transformer":
        return transformer_plan(task.seed, epochs)
    return mlp_plan(task.data, task.seed, epochs)


def _run_trials(
    study: Any,
    optuna: Any,
    task: SearchTask,
    default: Plan,
    trials: int,
    engine: Engine,
    epochs: int | None,
    progress: Progress,
) -> None:
    states = optuna.trial.TrialState
    running: dict[int, _Running] = {}
    finished = len(_finished(study, states))
    while finished < trials:
        while len(running) < engine.width and finished + len(running) < trials:
            number = finished + len(running)
            study.sampler = optuna.samplers.TPESampler(
                n_startup_trials=RANDOM_TRIALS,
                seed=_seed(task.seed, number),
                constant_liar=engine.width > 1,
            )
            trial = study.ask()
            running[trial.number] = _Running(
                trial, replace(default, **suggested(trial, task.encoder, epochs))
            )
            engine.submit(trial.number, running[trial.number].plan, 0)
        progress(f"trial {finished + 1} of {trials}", finished / trials)
        number, loss = engine.next()
        current = running[number]
        current.losses.append(loss)
        is_finite = math.isfinite(loss)
        if is_finite:
            current.trial.report(loss, len(current.losses) - 1)
        is_last = len(current.losses) == task.fold_count
        if is_finite and not is_last and not current.trial.should_prune():
            engine.submit(number, current.plan, len(current.losses))
            continue
        if not is_finite:
            current.trial.set_user_attr("diverged", True)
            study.tell(current.trial, state=states.FAIL)
        elif is_last:
            study.tell(current.trial, sum(current.losses) / task.fold_count)
        else:
            study.tell(current.trial, state=states.PRUNED)
        del running[number]
        finished += 1
    progress(f"trial {trials} of {trials}", 1.0)


def _finished(study: Any, states: Any) -> list[Any]:
    """Return the trials that finished; killed trials are run again."""
    trials = study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED, states.FAIL))
    return [
        trial for trial in trials if trial.state != states.FAIL or "diverged" in trial.user_attrs
    ]


def _search_result(
    study: Any, states: Any, task: SearchTask, default: Plan, name: str
) -> SearchResult:
    finished = _finished(study, states)
    complete = [trial for trial in finished if trial.state == states.COMPLETE]
    if not complete:
        raise DatasetError(
            f"no trial of {len(finished)} came to its end: look at the dataset, or give other folds"
        )
    best = min(complete, key=lambda trial: (trial.value, trial.number))
    counts = {
        "complete": len(complete),
        "pruned": sum(trial.state == states.PRUNED for trial in finished),
        "diverged": sum(trial.state == states.FAIL for trial in finished),
    }
    defaults = [trial.value for trial in complete if "default" in trial.user_attrs]
    return SearchResult(
        replace(default, **best.params), counts, best.value, defaults[0] if defaults else None, name
    )


def _seed(seed: int, number: int) -> int:
    """Return the sampler's seed for one trial, which does not depend on earlier interruptions."""
    return int.from_bytes(hashlib.sha256(f"search/1 {seed} {number}".encode()).digest()[:4])


@contextmanager
def _closing(engine: Engine) -> Iterator[Engine]:
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def _locked_storage(storage: str) -> Iterator[None]:
    """Lock an SQLite storage; its trials in state ``RUNNING`` must then be from a killed run."""
    file = storage.removeprefix("sqlite:///")
    if file == storage or not file:
        raise InvalidRequestError("must be an SQLite file, as sqlite:///search.db", "storage")
    path = Path(file)
    try:
        with locked(path.with_name(f"{path.name}.lock"), 0.0):
            yield
    except TimeoutError:
        raise InvalidRequestError(
            f"another search is using {path}: wait for it, or give another file", "storage"
        ) from None
    except OSError as error:
        raise InvalidRequestError(
            f"{path} cannot be written: {error.strerror}", "storage"
        ) from None


@contextmanager
def _quiet_optuna(storage: str) -> Iterator[Any]:
    """Import Optuna, silence its messages, and convert errors of its storage to one sentence."""
    try:
        import optuna
        from sqlalchemy.exc import SQLAlchemyError
    except ImportError:
        raise MissingExtraError("optuna", "search", "A search") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna uses deprecated functions of SQLAlchemy
        try:
            yield optuna
        except GpumemnetError:
            raise
        except (SQLAlchemyError, optuna.exceptions.OptunaError, RuntimeError) as error:
            raise InvalidRequestError(
                f"{storage} cannot be used: {first_line(error)}", "storage"
            ) from None
