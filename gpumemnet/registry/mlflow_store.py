"""Opens a store of MLflow: runs with parameters, figures and files, and a registry of models with
aliases.

Only plain files are kept there; nothing is pickled, and none of MLflow's model flavours is used.
MLflow's package is loaded when a store is opened, by the commands that name one, and by nothing
that answers predictions.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from gpumemnet.errors import (
    GpumemnetError,
    InvalidRequestError,
    MissingExtraError,
    TrackingError,
    first_line,
)

DEFAULT_MODEL: Final = "gpumemnet"
"""Name of the registered model, and of the experiment that its runs stand in."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ALIAS: Final = re.compile(r"[A-Za-z_-][A-Za-z0-9_-]{0,99}")
_ENVIRONMENT: Final = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}
"""Unless the user has set them: MLflow tells its makers nothing, prints nothing, and waits seconds
for a server that is down."""


def check_store(uri: str, field: str = "tracking_uri") -> None:
    """Refuse, before any work is done, an address that cannot be one, or an installation without
    MLflow.

    Raises:
        InvalidRequestError: when ``uri`` is neither an SQLite file nor a server.
        MissingExtraError: when MLflow is not installed.
    """
    scheme, separator, rest = uri.partition("://")
    is_file = scheme == "sqlite" and rest.startswith("/") and len(rest) > 1
    if not separator or not (is_file or (scheme in ("http", "https") and rest)):
        raise InvalidRequestError(
            f"must be an SQLite file (sqlite:///mlflow.db) or an MLflow server (https://…), not '{shown(uri)}'",
            field,
        )
    if find_spec("mlflow") is None:
        raise MissingExtraError("mlflow-skinny", "mlflow", "MLflow")


def check_name(name: str, field: str) -> str:
    """The name of a registered model, which goes into MLflow's filters as it is.

    Raises:
        InvalidRequestError: when it is none.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(
            "use up to 100 letters, digits, dots, dashes and underscores", field
        )
    return name


def check_alias(alias: str, field: str) -> str:
    """The name of an alias.

    Raises:
        InvalidRequestError: when it is none.
    """
    if not _ALIAS.fullmatch(alias) or alias == "latest":
        raise InvalidRequestError(
            "use up to 100 letters, digits, dashes and underscores, and not 'latest'", field
        )
    return alias


def shown(uri: str) -> str:
    """The address without the user's name and password."""
    try:
        parts = urlsplit(uri)
        if "@" not in parts.netloc:
            return uri
        return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    except ValueError:
        return "an address that cannot be read"


class MlflowStore:
    """The store at ``uri``: its client, its experiment, and its files.

    Args:
        uri: as :func:`check_store` takes it.
        model: name of the registered model and of the experiment.
        must_exist: whether an SQLite file that is not there is an error; else it is made.

    Raises:
        TrackingError: when it cannot be opened.
    """

    def __init__(self, uri: str, model: str = DEFAULT_MODEL, *, must_exist: bool = False) -> None:
        check_store(uri)
        self.uri = uri
        self.model = check_name(model, "tracking_model")
        self._file = Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:") else None
        if must_exist and self._file is not None and not self._file.is_file():
            raise TrackingError(
                f"there is no MLflow store {self._file}: the command that fills it is  gpumemnet registry push"
            )
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        with self.calls("cannot be opened"):
            from mlflow import MlflowClient

            logging.getLogger("mlflow").setLevel(
                logging.ERROR
            )  # it tells of each table that it makes
            logging.getLogger("alembic").setLevel(logging.ERROR)
            self.client: Any = MlflowClient(tracking_uri=uri, registry_uri=uri)

    @property
    def shown(self) -> str:
        """Its address, as it may be shown."""
        return shown(self.uri)

    @contextmanager
    def calls(self, what: str) -> Iterator[None]:
        """Calls of MLflow: whatever goes wrong in there is one sentence, ``what`` with MLflow's
        reason.

        Raises:
            TrackingError: in place of MLflow's errors, and of those of its database and its
                connections.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MLflow's own use of what other packages deprecate
            try:
                yield
            except GpumemnetError:
                raise
            except Exception as error:
                raise TrackingError(
                    f"the MLflow store {self.shown} {what}: {_reason(error)}"
                ) from None

    def experiment(self) -> str:
        """The id of the experiment, made where there is none; files of an SQLite store lie in a
        folder beside it."""
        with self.calls(f"does not give the experiment {self.model}"):
            found = self.client.get_experiment_by_name(self.model)
            if found is None:
                return str(
                    self.client.create_experiment(self.model, artifact_location=self._artifacts())
                )
            if found.lifecycle_stage != "active":
                raise TrackingError(
                    f"the experiment {self.model} of {self.shown} was deleted: restore it, or give another model"
                )
            return str(found.experiment_id)

    def run(self, tags: dict[str, str], name: str) -> tuple[str, bool]:
        """The run with all of ``tags``, made where there is none; and whether it was finished
        before."""
        experiment = self.experiment()
        with self.calls("does not give a run"):
            words = " and ".join(f"tags.`{tag}` = '{value}'" for tag, value in tags.items())
            found = self.client.search_runs([experiment], words, max_results=100)
            finished = [run for run in found if run.info.status == "FINISHED"]
            if found:
                return str((finished or found)[0].info.run_id), bool(finished)
            return str(
                self.client.create_run(experiment, run_name=name, tags=tags).info.run_id
            ), False

    def finish(self, run: str) -> None:
        """Mark ``run`` as finished."""
        with self.calls("does not end a run"):
            self.client.set_terminated(run, "FINISHED")

    def log_folder(self, run: str, folder: Path, artifact_path: str) -> None:
        """Copy ``folder`` to ``artifact_path`` among the files of ``run``."""
        with self.calls(f"does not take {folder.name}"):
            self.client.log_artifacts(run, str(folder), artifact_path)

    def log_file(self, run: str, file: Path, artifact_path: str | None = None) -> None:
        """Copy ``file`` into ``artifact_path`` among the files of ``run``."""
        with self.calls(f"does not take {file.name}"):
            self.client.log_artifact(run, str(file), artifact_path)

    def fetch(self, source: str, name: str) -> bytes:
        """The file ``name`` beneath ``source``, an address as MLflow gives it."""
        from mlflow.artifacts import download_artifacts

        with (
            tempfile.TemporaryDirectory(prefix="gpumemnet-") as folder,
            self.calls(f"does not give {name}"),
        ):
            uri = f"{source.rstrip('/')}/{name}"
            return Path(
                download_artifacts(artifact_uri=uri, dst_path=folder, tracking_uri=self.uri)
            ).read_bytes()

    def _artifacts(self) -> str | None:
        if self._file is None:
            return None  # the server knows where
        return (self._file.absolute().parent / f"{self._file.stem}-artifacts").as_uri()


def _reason(error: Exception) -> str:
    """The first line of a foreign error, without credentials."""
    return re.sub(r"//[^/@\s]+@", "//", first_line(error, 300))
