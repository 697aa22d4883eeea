"""``gpumemnet drift``: tests whether recent jobs call for retraining; prints a table or JSON and
sets the exit code."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from gpumemnet.cli.options import AsJson, ContextMib, input_file
from gpumemnet.cli.output import print_facts
from gpumemnet.errors import DatasetError, InvalidRequestError
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.site.observations import read_site_rows
from gpumemnet.units import MIB

if TYPE_CHECKING:
    from gpumemnet.site.drift import DriftReport, Finding
    from gpumemnet.site.training_reference import TrainingReference

DRIFT_EXIT_CODE: Final = 10
_SHOWN: Final = 8


def drift(
    rows: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Exported observations or a dataset (.parquet), observations or jobs a line (.jsonl); - is standard input.",
        ),
    ],
    reference: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Dataset of training jobs to compare features with, where the model's card holds no picture of them.",
        ),
    ] = None,
    bundle: Annotated[
        list[Path] | None,
        typer.Option(
            "--bundle", metavar="FOLDER", help="Bundle folder instead of the shipped ones."
        ),
    ] = None,
    registry: Annotated[
        Path | None,
        typer.Option(
            envvar="GPUMEMNET_REGISTRY",
            metavar="FOLDER",
            help="Predict with the champion of this registry.",
        ),
    ] = None,
    context_mib: ContextMib = None,
    alpha: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", help="Probability of a false alarm in one run; 0.01 by default."
        ),
    ] = None,
    on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="error|coverage|support|features",
            help="What starts a retraining, once for each; all unless given, features only where nobody knows what jobs took.",
        ),
    ] = None,
    as_json: AsJson = False,
    metrics: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.prom",
            help="Also for Prometheus: a file for node_exporter's textfile collector.",
        ),
    ] = None,
) -> None:
    """Test whether recent jobs call for retraining. Exit code 10 when they do, 0 when not, 2 when
    it cannot be said."""
    from gpumemnet.predict.predictor import Predictor
    from gpumemnet.site.drift import ALPHA, find_drift, write_drift_metrics  # loads onnxruntime
    from gpumemnet.site.releases import Registry

    if metrics is not None and metrics.suffix != ".prom":
        raise InvalidRequestError(
            f"{metrics} must end in .prom: the textfile collector reads no other files", "metrics"
        )
    context_bytes = None if context_mib is None else context_mib * MIB
    if bundle:
        predictor = Predictor.load(*bundle, context_bytes=context_bytes)
    elif registry is not None:
        store = Registry(registry)
        predictor = Predictor(store.load(store.aliases().champion), context_bytes=context_bytes)
    else:
        predictor = Predictor.default(context_bytes=context_bytes)
    found = read_site_rows([input_file(path) for path in rows])
    if not found.rows:
        left_out = "".join(f"; {count} rows: {reason}" for reason, count in found.left_out.items())
        raise DatasetError(f"{', '.join(found.files)} holds no jobs{left_out}")
    report = find_drift(
        found.rows,
        predictor,
        _references(reference or ()),
        alpha=ALPHA if alpha is None else alpha,
        kinds=on or None,
    )
    if metrics is not None:
        write_drift_metrics(metrics, report)
    if as_json:
        typer.echo(json.dumps(_document(report, found.files, found.left_out), indent=2))
    else:
        _show(report, found.left_out)
    if report.is_drift:
        raise typer.Exit(DRIFT_EXIT_CODE)


def _references(paths: Sequence[Path]) -> dict[str, TrainingReference]:
    from gpumemnet.site.training_reference import training_reference

    jobs: dict[str, list[TrainingJob]] = defaultdict(list)
    for row in read_site_rows(paths).rows:
        jobs[row.job.family].append(row.job)
    return {family: training_reference(of) for family, of in jobs.items()}


def _document(report: DriftReport, files: Any, left_out: Any) -> dict[str, Any]:
    return {
        "drift": report.is_drift,
        "rule": report.rule,
        "alpha": report.alpha,
        "tests": len(report.findings),
        "causes": [asdict(finding) for finding in report.causes],
        "findings": [asdict(finding) for finding in report.findings],
        "notes": list(report.notes),
        "left_out": left_out,
        "files": files,
    }


def _show(report: DriftReport, left_out: Any) -> None:
    console = Console()
    groups: dict[tuple[str, str | None], list[Finding]] = defaultdict(list)
    for finding in report.findings:
        groups[finding.family, finding.gpu].append(finding)
    for (family, gpu), findings in groups.items():
        facts = [
            (
                "drift" if one.is_drift else "no drift",
                f"{one.kind}: {one.sentence} (p {one.corrected:.2g})",
            )
            for one in findings[:_SHOWN]
        ]
        facts += [
            (
                "",
                f"and {len(findings) - _SHOWN} more tests, {sum(one.is_drift for one in findings[_SHOWN:])} of drift",
            )
        ][: len(findings) > _SHOWN]
        print_facts(console, f"{family} jobs" + (f" on {gpu}" if gpu else ""), facts)
    for note in (
        *report.notes,
        *(f"{count} rows left out: {reason}" for reason, count in left_out.items()),
    ):
        typer.echo(note)
    typer.echo(report.rule)
    if report.is_drift:
        typer.echo(f"Drift: a retraining is due (exit code {DRIFT_EXIT_CODE}).")
    else:
        typer.echo("No retraining is due." if report.findings else "Nothing could be tested.")
