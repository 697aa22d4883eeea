"""``gpumemnet calibrate`` and ``gpumemnet drift``: what a site's own jobs say about the bundles that
predict them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from gpumemnet.cli.options import AsJson, Bundles, ContextMib, RegistryFolder, input_file
from gpumemnet.cli.output import (
    print_facts,
    print_json,
    print_table,
)
from gpumemnet.errors import DatasetError, InvalidRequestError, check_installed
from gpumemnet.job.layers import listed
from gpumemnet.predict.bundle import (
    Bundle,
    check_replaceable,
    load_bundles,
    save_bundle,
)
from gpumemnet.predict.conformal import rows_needed
from gpumemnet.site.observations import read_site_rows
from gpumemnet.site.releases import Registry
from gpumemnet.units import MIB

if TYPE_CHECKING:
    from gpumemnet.site.calibration import Calibration, Figures, ModelCalibration
    from gpumemnet.site.drift import DriftReport, Finding

DRIFT_EXIT_CODE: Final = 10
_SHOWN_COVERAGES: Final = (0.9, 0.95, 0.99)

Rows = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE",
        help="Datasets or exported observations (.parquet), observations a line (.jsonl); - is standard input.",
    ),
]


def _chosen_bundles(folders: Sequence[Path] | None, registry: Path | None) -> Sequence[Bundle]:
    """Returns the bundles in ``folders``, else the registry's champion, else the shipped ones."""
    if folders or registry is None:
        return load_bundles(*folders or ())
    store = Registry(registry)
    return store.load(store.aliases().champion)


def calibrate(
    rows: Rows,
    bundle: Bundles = None,
    registry: RegistryFolder = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="GPU", help="The GPU to calibrate for; that of most rows by default."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write the calibrated bundles into this folder, each in a folder of its name.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Calibrate bundles to a site's own jobs. Shows their errors there before and after; writes
    with --out."""
    from gpumemnet.site.calibration import calibrate as calibrate_bundles  # loads onnxruntime
    from gpumemnet.site.calibration_cards import (
        calibrated_cards,
        calibration_document,
    )

    bundles = _chosen_bundles(bundle, registry)
    if out is not None:
        for one in bundles:
            check_replaceable(out / one.card.name)
    site_rows = read_site_rows([input_file(path) for path in rows])
    made = calibrate_bundles(site_rows, bundles, gpu=gpu)
    written = []
    if out is not None:
        try:
            for source, card in calibrated_cards(made):
                folder = out / source.card.name
                written.append(save_bundle(folder, source.model, card).source)
        except OSError as error:
            raise InvalidRequestError(f"{out} cannot be written: {error.strerror}", "out") from None
    if as_json:
        print_json({**calibration_document(made), "written": written})
        return
    _show_calibration(made, Console())
    for line in written or ("nothing written: give --out",):
        typer.echo(line)


def _show_calibration(made: Calibration, console: Console) -> None:
    context = made.context
    interval = f"{context.low / MIB:,.0f} to {context.high / MIB:,.0f}"
    source = "read by probes" if made.is_context_read else "from what jobs took"
    dates = f", {made.first[:10]} to {made.last[:10]}" if made.first and made.last else ""
    facts = [
        ("jobs", f"{made.jobs} different ones, read by {made.label_source}{dates}"),
        *(
            ("left out", f"{len(some)}: {reason}: {listed(some)}")
            for reason, some in made.left_out.items()
        ),
        (
            "context",
            f"{context.value / MIB:,.0f} MiB ({interval} with confidence {context.confidence:.2g}), {source}",
        ),
    ]
    typer.echo("Judged by cross-validation, on architectures that the calibration had not seen.")
    print_facts(console, f"Calibration to {made.gpu}", facts)
    notes: dict[str, None] = {}
    for model in made.models:
        name = model.bundle.card.name
        if not model.is_own:
            notes[f"{name}: calibrated by the context alone, for want of jobs of its own."] = None
        if model.before is None or model.after is None:
            continue
        jobs = f"{model.fit_jobs} + {model.calibration_jobs} jobs"
        title = f"{name}: {model.site.shift_bytes / MIB:+,.0f} MiB, from {jobs if model.is_own else 'the context alone'}"
        columns = ("jobs", "before", "after")
        texts = _figure_texts(model.before), _figure_texts(model.after)
        rows = zip(_figure_names(model.before, model), *texts, strict=True)
        print_table(console, title, columns, list(rows))
        if model.is_own and None in model.site.multiples:
            needed = ", ".join(
                f"{rows_needed(share)} for {share:.0%}" for share in _SHOWN_COVERAGES
            )
            notes[
                f"* too few jobs for this bound ({needed}): it is the shipped one, or the largest error, without a guarantee."
            ] = None
        if model.after.median_error_mib > model.before.median_error_mib:
            notes[f"{name}: the error did not fall; do not use its calibration."] = None
    for note in notes:
        typer.echo(note)


def _figure_names(figures: Figures, model: ModelCalibration) -> list[str]:
    names = ["judged", "median error", "took more than expected"]
    for one, multiple in zip(figures.coverages, model.site.multiples, strict=True):
        if one.coverage in _SHOWN_COVERAGES:
            carried = "" if multiple is not None else " *" if model.is_own else " (shipped)"
            names.append(f"within the {one.coverage:.0%} bound{carried}")
    return names


def _figure_texts(figures: Figures) -> list[str]:
    error = f"{figures.median_error_mib:,.1f} MiB, {figures.median_error_percent:.2f} %"
    texts = [f"{figures.jobs}", error, f"{figures.under_predicted:.0%}"]
    for one in figures.coverages:
        if one.coverage in _SHOWN_COVERAGES:
            over = f"{one.over_allocation:+.1%} memory"
            texts.append(f"{one.covered} of {one.judged}, {over}")
    return texts


def drift(
    rows: Rows,
    bundle: Bundles = None,
    registry: RegistryFolder = None,
    context_mib: ContextMib = None,
    as_json: AsJson = False,
) -> None:
    """Test whether recent jobs call for retraining. Exit code 10 when they do, 0 when not, 2 when
    it cannot be said."""
    check_installed("scipy", "drift", "testing for drift")
    from gpumemnet.predict.predictor import Predictor
    from gpumemnet.site.drift import ALPHA, RULE, find_drift  # loads onnxruntime

    predictor = Predictor(
        _chosen_bundles(bundle, registry),
        context_bytes=None if context_mib is None else context_mib * MIB,
    )
    found = read_site_rows([input_file(path) for path in rows])
    left_out = [
        f"{len(some)} rows left out: {reason}: {listed(some)}"
        for reason, some in found.left_out.items()
    ]
    if not len(found):
        raise DatasetError("; ".join([f"{', '.join(found.files)} holds no jobs", *left_out]))
    report = find_drift(found, predictor)
    if as_json:
        document = {
            "drift": bool(report.causes),
            "rule": RULE,
            "alpha": ALPHA,
            "findings": [asdict(finding) for finding in report.findings],
            "notes": list(report.notes),
            "left_out": found.left_out,
            "files": found.files,
        }
        print_json(document)
    else:
        _show_drift(report, [*report.notes, *left_out, RULE])
    if report.causes:
        raise typer.Exit(DRIFT_EXIT_CODE)


def _show_drift(report: DriftReport, notes: Sequence[str]) -> None:
    groups: dict[str, list[Finding]] = defaultdict(list)
    for finding in report.findings:
        on_gpu = f" on {finding.gpu}" if finding.gpu else ""
        groups[f"{finding.family} jobs{on_gpu}"].append(finding)
    for title, findings in groups.items():
        facts = [
            (
                "drift" if one.is_drift else "no drift",
                f"{one.kind}: {one.sentence} (p {one.corrected:.2g})",
            )
            for one in findings
        ]
        print_facts(Console(), title, facts)
    for line in notes:
        typer.echo(line)
    if report.causes:
        typer.echo(f"Drift: a retraining is due (exit code {DRIFT_EXIT_CODE}).")
    else:
        typer.echo("No retraining is due." if report.findings else "Nothing could be tested.")
