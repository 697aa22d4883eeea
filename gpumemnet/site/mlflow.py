"""Releases of a registry in MLflow: a release is a version of one registered model, and aliases say
which is champion.

::

    release/release.json            name, bundles, lineage: what the registry's own file says
    release/bundles/<sha256>/       model.onnx, card.json, SHA256SUMS

The registry in the folder is the truth, and :func:`push` lets MLflow follow it.  Nothing reads
MLflow.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from gpumemnet.errors import (
    BundleError,
    GpumemnetError,
    InvalidRequestError,
    MissingExtraError,
    RegistryError,
    TrackingError,
    first_line,
)
from gpumemnet.predict.bundle import BUNDLE_FILES, Bundle, load_bundle
from gpumemnet.site.releases import (
    Registry,
    Release,
    release_digest,
)

CHAMPION: Final = "champion"
CHALLENGER: Final = "challenger"
RELEASE_FOLDER: Final = "release"
RELEASE_FILE: Final = "release.json"
RELEASE_TAG: Final = "gpumemnet.release"
DIGEST_TAG: Final = "gpumemnet.digest"
_FORMAT: Final = 1


def push(
    registry: Registry, store: MlflowStore, runs: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Let the aliases champion and challenger in ``store`` be what they are in ``registry``.

    A release that is no version yet becomes one, with all of its bundles, before an alias points to
    it.

    Args:
        registry: the truth.
        store: what follows it.
        runs: release → the run that made it; others get a run of their own.

    Returns:
        alias → the version that it points to, of the aliases that were moved.

    Raises:
        RegistryError: when the registry is damaged.
        TrackingError: when MLflow cannot be reached or refuses.
    """
    if not registry.folder.is_dir():
        raise RegistryError(
            f"there is no registry {registry.folder}: MLflow follows one that is there"
        )
    aliases = registry.aliases()
    pointing = _aliases(store)
    moved: dict[str, str] = {}
    for alias, name in ((CHAMPION, aliases.champion), (CHALLENGER, aliases.challenger)):
        if name is not None:
            version = _version_of(store, registry, name, (runs or {}).get(name))
            if pointing.get(alias) != version:
                with store.calls(f"does not let {alias} be version {version}"):
                    store.client.set_registered_model_alias(store.model, alias, version)
                moved[alias] = version
        elif alias in pointing:
            with store.calls(f"does not take {alias} away"):
                store.client.delete_registered_model_alias(store.model, alias)
            moved[alias] = "none"
    return moved


# what stands in MLflow


def _aliases(store: MlflowStore) -> dict[str, str]:
    """Alias → version of the registered model, which is made where there is none."""
    with store.calls(f"does not give the model {store.model}"):
        found = store.client.search_registered_models(f"name = '{store.model}'", max_results=1)
        if not found:
            store.client.create_registered_model(
                store.model,
                description="Releases of gpumemnet's bundles: one version for each release of the registry.",
            )
            return {}
        return {
            alias: str(version)
            for alias, version in store.client.get_registered_model(store.model).aliases.items()
        }


def _version_of(store: MlflowStore, registry: Registry, name: str, run: str | None) -> str:
    """The version that holds the release ``name``, made where there is none."""
    release, bundles = registry.release(name), registry.load(name)
    digest = release_digest(bundles)
    with store.calls("does not list the versions"):
        token = None
        while True:
            page = store.client.search_model_versions(f"name = '{store.model}'", page_token=token)
            for version in page:
                if (version.tags.get(RELEASE_TAG), version.tags.get(DIGEST_TAG)) == (name, digest):
                    return str(version.version)
            token = page.token
            if not token:
                break
    tags = {RELEASE_TAG: name, DIGEST_TAG: digest}
    if run is None:
        run, _ = store.run({**tags, "gpumemnet.kind": "release"}, f"release {name}")
    with tempfile.TemporaryDirectory(prefix="gpumemnet-") as scratch:
        store.log_folder(
            run, _laid_out(Path(scratch) / RELEASE_FOLDER, release, bundles), RELEASE_FOLDER
        )
    store.finish(run)
    with store.calls(f"does not take {name} as a version"):
        source = f"{store.client.get_run(run).info.artifact_uri}/{RELEASE_FOLDER}"
        models = {f"gpumemnet.model.{bundle.card.name}": bundle.sha256 for bundle in bundles}
        made = store.client.create_model_version(
            store.model,
            source=source,
            run_id=run,
            tags={**tags, **models},
            description=release.note or f"the release {name}",
        )
        return str(made.version)


def _laid_out(folder: Path, release: Release, bundles: Sequence[Bundle]) -> Path:
    for bundle in bundles:
        target = folder / "bundles" / bundle.sha256
        target.mkdir(parents=True)
        for name in BUNDLE_FILES:
            shutil.copyfile(Path(bundle.source) / name, target / name)
        if load_bundle(target).sha256 != bundle.sha256:
            raise BundleError(f"{bundle.source}: was altered while it was copied")
    document = {"format": _FORMAT, **asdict(release), "digest": release_digest(bundles)}
    (folder / RELEASE_FILE).write_text(
        json.dumps(document, indent=2, ensure_ascii=False) + "\n", "utf-8"
    )
    return folder


DEFAULT_MODEL: Final = "gpumemnet"
"""Name of the registered model, and of the experiment that its runs stand in."""

_CREDENTIALS: Final = re.compile(r"://[^/\s]*@")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
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


def shown(text: str) -> str:
    """The address, or a sentence with one, without the user's name and password."""
    return _CREDENTIALS.sub("://", text)


class MlflowStore:
    """The store at ``uri``: its client, its experiment, and its files.

    Args:
        uri: as :func:`check_store` takes it.
        model: name of the registered model and of the experiment.

    Raises:
        TrackingError: when it cannot be opened.
    """

    def __init__(self, uri: str, model: str = DEFAULT_MODEL) -> None:
        check_store(uri)
        self.uri = uri
        self.model = check_name(model, "tracking_model")
        self._file = Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:") else None
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
                    f"the MLflow store {self.shown} {what}: {shown(first_line(error, 300))}"
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

    def _artifacts(self) -> str | None:
        if self._file is None:
            return None  # the server knows where
        return (self._file.absolute().parent / f"{self._file.stem}-artifacts").as_uri()
