"""Logs a finished retraining to an MLflow store: a run with figures and files, a version of the
registered model for each release that has an alias, and the aliases.

The registry in the folder is the truth, and the verdict is final before this is called: nothing
here promotes anything, and nothing reads MLflow.
"""

from __future__ import annotations

import logging
import math
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from gpumemnet.errors import (
    GpumemnetError,
    InvalidRequestError,
    MissingExtraError,
    TrackingError,
    first_line,
)
from gpumemnet.site.releases import Registry, release_digest

from .release import PROMOTED, Outcome, Request

MODEL: Final = "gpumemnet"
"""Name of the registered model, and of the experiment that its runs stand in."""
RUN_TAG: Final = "gpumemnet.run"
"""Names a run by the hash of its inputs: the same retraining again is the same run."""
RELEASE_TAG: Final = "gpumemnet.release"
DIGEST_TAG: Final = "gpumemnet.digest"
_MOST_METRICS: Final = 1000
"""As many as MLflow takes in one call."""
_MOST_TEXT: Final = 5000
_CREDENTIALS: Final = re.compile(r"://[^/\s]*@")
_ENVIRONMENT: Final = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}
"""Unless the user has set them: MLflow tells its makers nothing, prints nothing, and waits seconds
for a server that is down."""


def check_store(uri: str, field: str) -> None:
    """Refuse, before any work is done, an address that cannot be one, or an installation without
    MLflow.

    Raises:
        InvalidRequestError: when ``uri`` is neither an SQLite file nor a server.
        MissingExtraError: when MLflow is not installed.
    """
    if not re.match(r"sqlite:///.|https?://.", uri):
        raise InvalidRequestError(
            f"must be an SQLite file (sqlite:///mlflow.db) or an MLflow server (https://…), not '{_shown(uri)}'",
            field,
        )
    if find_spec("mlflow") is None:
        raise MissingExtraError("mlflow-skinny", "mlflow", "MLflow")


def log_retraining(request: Request, outcome: Outcome, uri: str) -> str:
    """Log the retraining's run, and let the aliases be what they are in the registry, unless it is
    a dry run.

    Args:
        request: the retraining's request.
        outcome: its result.
        uri: address of the store, as :func:`check_store` takes it.

    Returns:
        A sentence.

    Raises:
        TrackingError: when MLflow cannot be reached or refuses.
        RegistryError: when the registry is damaged.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in ("mlflow", "alembic"):  # they tell of each table that they make
        logging.getLogger(name).setLevel(logging.ERROR)
    with _store_errors(uri):
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        experiment = _experiment(client, uri)
        run = _run(client, experiment, RUN_TAG, outcome.document["run"], outcome.report.parent.name)
        _log(client, run, request, outcome)
        if request.registry is not None and not request.is_dry_run:
            runs = {outcome.release: run} if outcome.exit_code == PROMOTED else {}
            _set_aliases(client, experiment, Registry(request.registry), runs)
        return f"run {run} in {_shown(uri)}"


@contextmanager
def _store_errors(uri: str) -> Iterator[None]:
    """Whatever goes wrong in MLflow, its database or its connections is one sentence."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow's own use of what other packages deprecate
        try:
            yield
        except GpumemnetError:
            raise
        except Exception as error:
            raise TrackingError(
                f"the MLflow store {_shown(uri)}: {_shown(first_line(error, 300))}"
            ) from None


def _experiment(client: Any, uri: str) -> str:
    """The id of the experiment, made where there is none; files of an SQLite store lie in a folder
    beside it."""
    found = client.get_experiment_by_name(MODEL)
    if found is not None:
        return str(found.experiment_id)
    folder = None  # a server knows where
    if uri.startswith("sqlite:"):
        file = Path(uri.removeprefix("sqlite:///")).absolute()
        folder = (file.parent / f"{file.stem}-artifacts").as_uri()
    return str(client.create_experiment(MODEL, artifact_location=folder))


def _run(client: Any, experiment: str, tag: str, value: str, name: str) -> str:
    """The run with this tag, made where there is none."""
    found = client.search_runs([experiment], f"tags.`{tag}` = '{value}'", max_results=1)
    run = found[0] if found else client.create_run(experiment, run_name=name, tags={tag: value})
    return str(run.info.run_id)


def _log(client: Any, run: str, request: Request, outcome: Outcome) -> None:
    from mlflow.entities import Metric, Param, RunTag

    document = outcome.document
    params = {name: document[name] for name in ("champion", "seed", "epochs", "encoders")}
    params |= {"code": document["code"]["sha256"]}
    for file in document["files"]:
        used = f"{file['used']} of {file['rows']} rows used"
        params[f"file/{file['name']}"] = f"sha256 {file['sha256']}, {used}"
    is_better = "better" if document["promote"] else "not taken"
    params["verdict"] = f"{is_better}: {'; '.join(document['reasons'])}"
    tags = {
        "gpumemnet.exit_code": outcome.exit_code,
        "gpumemnet.dry_run": str(request.is_dry_run).lower(),
        "mlflow.note.content": outcome.sentence,
    }
    if outcome.exit_code == PROMOTED and outcome.release and not request.is_dry_run:
        tags[RELEASE_TAG] = outcome.release
    metrics = dict(_numbers(document["parts"], ""))
    client.log_batch(
        run,
        metrics=[Metric(*one, 0, 0) for one in [*metrics.items()][:_MOST_METRICS]],
        params=[Param(_name(name), str(text)[:_MOST_TEXT]) for name, text in params.items()],
        tags=[RunTag(name, str(text)[:_MOST_TEXT]) for name, text in tags.items()],
    )
    for report in (outcome.report, outcome.report.with_suffix(".json")):
        client.log_artifact(run, str(report))
    client.set_terminated(run, "FINISHED")


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    """Every finite number of a JSON value under its path; parts of a list go by their names."""
    if isinstance(value, list):
        value = {str(one["name"]): one for one in value if isinstance(one, dict) and "name" in one}
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _numbers(one, f"{path}/{name}")
    elif isinstance(value, int | float) and math.isfinite(value):
        yield _name(path[1:]), float(value)


def _set_aliases(client: Any, experiment: str, registry: Registry, runs: dict[Any, str]) -> None:
    """Let champion and challenger point at the versions that hold the registry's.

    Args:
        client: of MLflow.
        experiment: its id.
        registry: the truth.
        runs: release → the run that made it; others get a run of their own.
    """
    if not client.search_registered_models(f"name = '{MODEL}'", max_results=1):
        client.create_registered_model(MODEL, description="Releases of gpumemnet's bundles")
    aliases = registry.aliases()
    for alias, name in (("champion", aliases.champion), ("challenger", aliases.challenger)):
        if name is None:
            client.delete_registered_model_alias(MODEL, alias)
            continue
        bundles = registry.load(name)
        digest = release_digest(bundles)
        is_it = f"name = '{MODEL}' and tags.`{DIGEST_TAG}` = '{digest}'"
        found = client.search_model_versions(f"{is_it} and tags.`{RELEASE_TAG}` = '{name}'")
        if not found:
            run = runs.get(name) or _run(client, experiment, RELEASE_TAG, name, f"release {name}")
            client.log_dict(run, asdict(registry.release(name)), "release/release.json")
            for bundle in bundles:
                client.log_artifacts(run, bundle.source, f"release/bundles/{bundle.sha256}")
            source = f"{client.get_run(run).info.artifact_uri}/release"
            tags = {RELEASE_TAG: name, DIGEST_TAG: digest}
            found = [client.create_model_version(MODEL, source, run, tags=tags)]
            client.set_terminated(run, "FINISHED")
        client.set_registered_model_alias(MODEL, alias, found[0].version)


def _name(path: str) -> str:
    """A name that MLflow takes, of letters, digits and a few signs."""
    return re.sub(r"[^\w.\- :/]", "_", path)[:250]


def _shown(text: str) -> str:
    """An address, or a sentence with one, without the user's name and password."""
    return _CREDENTIALS.sub("://", text)
