"""Logs a finished retraining to an MLflow store: a run with figures and files, model versions,
aliases.

The registry in the folder is authoritative, and the verdict is final before this is called: nothing
here promotes anything.  What could not be logged waits in the work folder for the next run.  That
run, also moves the aliases.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

from gpumemnet.atomic_files import locked, replace_file
from gpumemnet.errors import TrackingError
from gpumemnet.site.mlflow import MlflowStore, push
from gpumemnet.site.releases import Registry

from .gate import MEASURES
from .release import PROMOTED, Outcome, Request, lineage

KEY_TAG: Final = "gpumemnet.run"
"""Names a run by the hash of its inputs: the same retraining again is the same run."""
_KIND: Final = {"gpumemnet.kind": "retraining"}
_LOCK_SECONDS: Final = 60.0
_MOST_TEXT: Final = 5000
_PER_CALL: Final = {"params": 100, "metrics": 1000, "tags": 100}


def log_run(request: Request, outcome: Outcome, uri: str) -> str:
    """Log the retraining's run, and those that could not be logged before, and let the aliases
    follow the registry.

    Args:
        request: the retraining's request.
        outcome: its result.
        uri: address of the store.

    Returns:
        A sentence.

    Raises:
        TrackingError: when MLflow cannot be reached or refuses, or another run is being logged from
            the same folder.
        RegistryError: when the registry, which the aliases follow, is damaged.
        OSError: when the work folder cannot be written to.
    """
    waiting = request.work / "untracked"
    waiting.mkdir(exist_ok=True)
    replace_file(
        waiting / f"{outcome.document['run'][:12]}.json",
        json.dumps(_outcome_record(request, outcome)).encode(),
    )
    try:
        with locked(request.work / ".tracking.lock", _LOCK_SECONDS):
            store = MlflowStore(uri)
            run, runs, failure = "", {}, None
            for path in sorted(waiting.glob("*.json"), key=lambda path: path.stat().st_mtime):
                try:
                    run, release = _log_waiting(store, request.work, path)
                    if release:
                        runs[release] = run
                except _ReportError as error:
                    failure = error
                path.unlink()  # a deleted report cannot be logged later either
            moves_aliases = (
                request.registry is not None
                and request.registry.is_dir()
                and not request.is_dry_run
            )
            moved = (
                push(Registry(request.registry), store, runs)
                if request.registry is not None and moves_aliases
                else {}
            )
    except TimeoutError:
        raise TrackingError(f"another run is being logged from {request.work}") from None
    if failure is not None:
        raise failure
    alias_texts = "".join(f", {alias} is version {version}" for alias, version in moved.items())
    return f"run {run} in {store.shown}{alias_texts}"


def _outcome_record(request: Request, outcome: Outcome) -> dict[str, Any]:
    """The result of this retraining; its report has everything else."""
    is_made = outcome.exit_code == PROMOTED and not request.is_dry_run
    return {
        "report": str(outcome.report.relative_to(request.work)),
        "champion": outcome.document["champion"],
        "exit_code": outcome.exit_code,
        "sentence": outcome.sentence,
        "release": outcome.release if is_made else None,
        "is_dry_run": request.is_dry_run,
    }


def _log_waiting(store: MlflowStore, work: Path, waiting: Path) -> tuple[str, str | None]:
    """Log the result in the file ``waiting``; return its run, and the release that it made."""
    try:
        record = json.loads(waiting.read_bytes())
        report = work / record["report"]
        document = {
            **json.loads(report.with_suffix(".json").read_bytes()),
            "champion": record["champion"],
        }
        return _log_complete_run(store, work, record, report, document), record["release"]
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _ReportError(
            f"{waiting}: its report is gone, or of another version ({type(error).__name__}: {error})"
        ) from None


class _ReportError(TrackingError):
    """The report of a run cannot be read."""


def _log_complete_run(
    store: MlflowStore, work: Path, record: dict[str, Any], report: Path, document: dict[str, Any]
) -> str:
    """The complete run of a retraining; an unfinished run is continued."""
    run, is_logged = store.run({**_KIND, KEY_TAG: document["run"]}, document["release"])
    if not is_logged:
        _log(store, run, "params", dict(_params(document)))
        _log(store, run, "metrics", dict(_metrics(document)))
        store.log_file(run, report)
        store.log_file(run, report.with_suffix(".json"))
        with tempfile.TemporaryDirectory(prefix="gpumemnet-") as scratch:
            path = Path(scratch) / "lineage.json"
            path.write_text(
                json.dumps(lineage(document), indent=2, ensure_ascii=False) + "\n", "utf-8"
            )
            store.log_file(run, path)
        for entry in document["candidates"]:
            if entry.get("folder") and (work / entry["folder"]).is_dir():
                store.log_folder(run, work / entry["folder"], f"bundles/{entry['model']['name']}")
    tags = {
        "gpumemnet.exit_code": str(record["exit_code"]),
        "gpumemnet.dry_run": str(record["is_dry_run"]).lower(),
        "mlflow.note.content": record["sentence"],
    }
    if record["release"]:  # even if the release was withdrawn and the retraining runs again
        tags["gpumemnet.release"] = record["release"]
    _log(store, run, "tags", tags)
    store.finish(run)
    return run


def _params(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("champion", "seed", "epochs", "encoders"):
        yield name, _text(document[name])
    code = document["code"]
    yield "commit", _text(code["commit"])
    yield "code", _text(code["sha256"])
    for name, value in code["packages"].items():
        yield f"package.{name}", _text(value)
    for name, value in document["rule"].items():
        yield f"rule.{name}", _text(value)
    for file in document["files"]:
        yield (
            _name("file", file["name"]),
            f"sha256 {file['sha256']}, {file['used']} of {file['rows']} rows used",
        )
    for found in document["candidates"]:
        place = (found["name"], found["encoder"])
        yield _name(*place, "gpu"), _text(found["gpu"])
        yield (
            _name(*place, "verdict"),
            _text(
                ("better: " if found["promote"] else "not taken: ") + "; ".join(found["reasons"])
            ),
        )
        if found["bundle"]:
            yield _name(*place, "bundle"), found["bundle"]


def _metrics(document: dict[str, Any]) -> Iterator[tuple[str, float]]:
    yield "promoted", float(len(document["promoted"]))
    yield "refused_rows", float(sum(refused["rows"] for refused in document["refused"]))
    for found in document["candidates"]:
        place = (found["name"], found["encoder"])
        for kind, count in found["rows"].items():
            yield _name(*place, "rows", kind), float(count)
        for part in (found["verdict"] or {}).get("parts", ()):
            for measure in MEASURES:
                compared = part["measures"][measure]
                for who in ("champion", "candidate", "p_not_better"):
                    yield _name(*place, part["name"], measure, who), float(compared[who])


def _log(store: MlflowStore, run: str, kind: str, values: dict[str, Any]) -> None:
    """Log ``params``, ``metrics`` or ``tags``, so many in a call as MLflow takes."""
    with store.calls(f"does not take the {kind} of a run"):
        from mlflow.entities import Metric, Param, RunTag

        make = {
            "params": Param,
            "metrics": lambda name, value: Metric(name, value, 0, 0),
            "tags": RunTag,
        }[kind]
        entities = (make(name, value) for name, value in values.items())
        while some := list(islice(entities, _PER_CALL[kind])):
            store.client.log_batch(run, **{kind: some})


def _name(*parts: str) -> str:
    """A name that MLflow takes, of letters, digits and a few signs."""
    return "/".join(re.sub(r"[^\w.\- :]", "_", part) for part in parts)[:250]


def _text(value: object) -> str:
    return (", ".join(map(str, value)) if isinstance(value, list) else str(value))[:_MOST_TEXT]
