"""Logs a finished retraining to an MLflow store: a run with figures and files, a version of the
registered model for each release that has an alias, and the aliases.

``python integrations/mlflow/log_retraining.py REPORT --uri URI [--registry FOLDER]``.  The registry
in the folder is the truth, and the verdict is final before this is called: nothing here promotes
anything, and nothing reads MLflow.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from gpumemnet import GpumemnetError
from gpumemnet.errors import first_line
from gpumemnet.site.releases import Registry, release_digest

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


def log_retraining(report: Path, uri: str, registry: Registry | None) -> str:
    """Log a retraining's run, and let the aliases be what they are in the registry.

    Args:
        report: the report that ``gpumemnet retrain`` names.
        uri: address of the store: an SQLite file or a server.
        registry: the registry; ``None`` after a dry run.

    Returns:
        A sentence.
    """
    from mlflow import MlflowClient

    document = json.loads(report.read_text("utf-8"))
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    experiment = _experiment(client, uri)
    run = _run(client, experiment, RUN_TAG, document["run"], report.parent.name)
    _log(client, run, report, document)
    if registry is not None:
        _set_champion(client, experiment, registry, document, run)
    return f"run {run} in {_shown(uri)}"


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


def _log(client: Any, run: str, report: Path, document: dict[str, Any]) -> None:
    from mlflow.entities import Metric, Param

    params = {name: document[name] for name in ("release", "seed", "epochs", "encoders")}
    params |= {"code": document["code"]["sha256"]}
    for file in document["files"]:
        used = f"{file['used']} of {file['rows']} rows used"
        params[f"file/{file['name']}"] = f"sha256 {file['sha256']}, {used}"
    is_better = "better" if document["promote"] else "not taken"
    params["verdict"] = f"{is_better}: {'; '.join(document['reasons'])}"
    metrics = dict(_numbers(document["parts"], ""))
    client.log_batch(
        run,
        metrics=[Metric(*one, 0, 0) for one in [*metrics.items()][:_MOST_METRICS]],
        params=[Param(_name(name), str(text)[:_MOST_TEXT]) for name, text in params.items()],
    )
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


def _set_champion(
    client: Any, experiment: str, registry: Registry, document: dict[str, Any], run: str
) -> None:
    """Let the alias champion point at the version that holds the registry's champion.

    Args:
        client: of MLflow.
        experiment: its id.
        registry: the truth.
        document: the report.
        run: that of the report; releases that it has not made get a run of their own.
    """
    if not client.search_registered_models(f"name = '{MODEL}'", max_results=1):
        client.create_registered_model(MODEL, description="Releases of gpumemnet's bundles")
    name = registry.aliases().champion
    bundles = registry.load(name)
    digest = release_digest(bundles)
    is_it = f"name = '{MODEL}' and tags.`{DIGEST_TAG}` = '{digest}'"
    found = client.search_model_versions(f"{is_it} and tags.`{RELEASE_TAG}` = '{name}'")
    if not found:
        is_made = name == document["release"]
        own = run if is_made else _run(client, experiment, RELEASE_TAG, name, f"release {name}")
        client.log_dict(own, asdict(registry.release(name)), "release/release.json")
        for bundle in bundles:
            client.log_artifacts(own, bundle.source, f"release/bundles/{bundle.sha256}")
        source = f"{client.get_run(own).info.artifact_uri}/release"
        tags = {RELEASE_TAG: name, DIGEST_TAG: digest}
        found = [client.create_model_version(MODEL, source, own, tags=tags)]
        client.set_terminated(own, "FINISHED")
    client.set_registered_model_alias(MODEL, "champion", found[0].version)


def _name(path: str) -> str:
    """A name that MLflow takes, of letters, digits and a few signs."""
    return re.sub(r"[^\w.\- :/]", "_", path)[:250]


def _shown(text: str) -> str:
    """An address, or a sentence with one, without the user's name and password."""
    return _CREDENTIALS.sub("://", text)


def main() -> int:
    """Log the report of the command line; the exit code is 2 where that cannot be done."""
    parser = argparse.ArgumentParser(description="Logs a retraining to MLflow.")
    parser.add_argument("report", type=Path, help="the report that gpumemnet retrain names")
    parser.add_argument("--uri", required=True, help="sqlite:///mlflow.db, or https://…")
    parser.add_argument("--registry", type=Path, help="folder of the registry; none for a dry run")
    given = parser.parse_args()
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in ("mlflow", "alembic"):  # they tell of each table that they make
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # MLflow's own use of what other packages deprecate
    registry = None if given.registry is None else Registry(given.registry)
    try:
        sys.stdout.write(log_retraining(given.report, given.uri, registry) + "\n")
    except (GpumemnetError, OSError, ValueError, LookupError) as error:
        sys.stderr.write(f"error: {given.report}: {_shown(first_line(error, 300))}\n")
        return 2
    except Exception as error:  # of MLflow, its database or its connections
        reason = _shown(first_line(error, 300))
        sys.stderr.write(f"error: the MLflow store {_shown(given.uri)}: {reason}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
