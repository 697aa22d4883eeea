"""``gpumemnet calibrate``: calibrates bundles to a site's GPU from its probes or observations,
without retraining."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from gpumemnet.cli.options import AsJson, input_file
from gpumemnet.cli.output import check_writable, print_facts, print_table, write_text
from gpumemnet.errors import InvalidRequestError
from gpumemnet.predict.bundle import (
    Bundle,
    check_replaceable,
    load_bundles,
    save_bundle,
    shipped_bundles,
)
from gpumemnet.predict.coverage import rows_needed
from gpumemnet.site.observations import read_site_rows
from gpumemnet.site.releases import Registry
from gpumemnet.units import MIB

if TYPE_CHECKING:
    from gpumemnet.site.calibration import Calibration, CoverageFigures, Figures, ModelCalibration

_SHOWN_COVERAGES: Final = (0.9, 0.95, 0.99)


def calibrate(
    rows: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Datasets or exported observations (.parquet), observations a line (.jsonl); - is standard input.",
        ),
    ],
    bundle: Annotated[
        list[Path] | None,
        typer.Option(
            "--bundle",
            metavar="FOLDER",
            help="Bundle folder, or folder of such, instead of the shipped ones.",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="GPU", help="The GPU to calibrate for, where the files hold rows of several."
        ),
    ] = None,
    label_source: Annotated[
        str | None,
        typer.Option(
            "--label-source",
            metavar="TEXT",
            help="The way of reading memory, where the files hold rows of several.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write the calibrated bundles into this folder, each in a folder of its name.",
        ),
    ] = None,
    registry: Annotated[
        Path | None,
        typer.Option(
            envvar="GPUMEMNET_REGISTRY",
            metavar="FOLDER",
            help="Write them into this registry, as --release.",
        ),
    ] = None,
    release: Annotated[
        str | None,
        typer.Option(
            metavar="RELEASE", help="Name of the new release; it predicts once it is promoted."
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Write the GPU's profile with the site's context."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Calibrate bundles to a site's own jobs. Shows their errors there before and after; writes
    with --out or --release."""
    from gpumemnet.site.calibration import calibrate as calibrate_bundles  # loads onnxruntime
    from gpumemnet.site.calibration_cards import (
        calibrated_cards,
        calibration_document,
        profile_document,
    )

    store = _store(registry, release, bundle)
    base = store.aliases().champion if store else None
    bundles = _bundles(store, base, bundle)
    folders = {one.sha256: out / one.card.name for one in bundles} if out is not None else {}
    for folder in folders.values():
        check_replaceable(folder)
    if profile is not None:
        check_writable(profile, "profile")
    made = calibrate_bundles(
        read_site_rows([input_file(path) for path in rows]),
        bundles,
        gpu=gpu,
        label_source=label_source,
    )
    document = calibration_document(made)
    written: list[str] = []
    for source, card in calibrated_cards(made):
        if folders:
            written.append(_saved(folders[source.sha256], source.model, card).source)
    if store is not None and release is not None and base is not None:
        _release(store, release, base, made, document)
        written.append(
            f"release {release} in {store.folder}; it predicts after: gpumemnet releases promote {release}"
        )
    if profile is not None:
        write_text(profile, json.dumps(profile_document(made), indent=2) + "\n", "profile")
        written.append(str(profile))
    if as_json:
        typer.echo(json.dumps({**document, "written": written}, indent=2))
        return
    _show(made, written)


def _store(
    registry: Path | None, release: str | None, bundle: Sequence[Path] | None
) -> Registry | None:
    if release is None:
        return None
    if registry is None:
        raise InvalidRequestError("is missing: --release names a release of a registry", "registry")
    if bundle:
        raise InvalidRequestError(
            "cannot stand beside --release, which calibrates the registry's champion", "bundle"
        )
    return Registry(registry)


def _bundles(
    store: Registry | None, base: str | None, folders: Sequence[Path] | None
) -> Sequence[Bundle]:
    if store is not None and base is not None:
        return store.load(base)
    return (
        [bundle for folder in folders for bundle in load_bundles(folder)]
        if folders
        else shipped_bundles()
    )


def _saved(folder: Path, model: bytes, card: dict[str, Any]) -> Bundle:
    try:
        return save_bundle(folder, model, card)
    except OSError as error:
        raise InvalidRequestError(f"{folder} cannot be written: {error.strerror}", "out") from None


def _release(
    store: Registry, release: str, parent: str, made: Calibration, document: dict[str, Any]
) -> None:
    from gpumemnet.site.calibration_cards import calibrated_cards

    hashes = []
    with tempfile.TemporaryDirectory(prefix="gpumemnet-calibrate-") as folder:
        for number, (source, card) in enumerate(calibrated_cards(made)):
            hashes.append(
                store.add_bundle(
                    _saved(Path(folder) / str(number), source.model, card).source
                ).sha256
            )
    lineage = {
        "calibration": {
            name: document[name]
            for name in ("gpu", "label_source", "jobs", "files", "first", "last")
        }
    }
    note = f"{parent} calibrated to {made.gpu} on {made.jobs} jobs"
    store.create_release(release, hashes, parent=parent, lineage=lineage, note=note)


def _show(made: Calibration, written: Sequence[str]) -> None:
    console = Console()
    typer.echo(
        "Judged by cross-validation: on jobs whose architecture the calibration had not seen."
    )
    context = made.context
    facts = [
        ("jobs", f"{made.jobs} different ones, read by {made.label_source}" + _dates(made)),
        *(("left out", f"{count}: {reason}") for reason, count in made.left_out.items()),
        (
            "context",
            f"{context.value / MIB:,.0f} MiB ({context.low / MIB:,.0f} to {context.high / MIB:,.0f} with confidence "
            f"{context.confidence:.2g}), {'read by probes' if made.is_context_read else 'from what jobs took'}",
        ),
        ("workspaces", "as in the catalogue: what a job took does not tell them from the context"),
    ]
    print_facts(console, f"Calibration to {made.gpu}", facts)
    judged = [
        model for model in made.models if model.before is not None and model.after is not None
    ]
    for model in judged:
        jobs = (
            f"{model.fit_jobs} + {model.calibration_jobs} jobs"
            if model.is_own
            else "the context alone"
        )
        title = f"{model.bundle.card.name}: {model.site.shift_bytes / MIB:+,.0f} MiB, from {jobs}"
        print_table(
            console, title, (f"{model.family} jobs", "before", "after"), _figures_rows(model)
        )
    if any(model.is_own and None in model.site.multiples for model in judged):
        needed = ", ".join(
            f"{rows_needed(coverage)} for {coverage:.0%}" for coverage in _SHOWN_COVERAGES
        )
        typer.echo(
            f"* too few of the jobs for the bounds, the second number above: {needed} are needed.  Here the shipped"
        )
        typer.echo(
            "  bound stays, or the largest error of these jobs where that is larger, and nothing is guaranteed."
        )
    others = [model.bundle.card.name for model in made.models if not model.is_own]
    if others:
        typer.echo(
            f"With the context alone, for want of jobs of their own: {', '.join(dict.fromkeys(others))}."
        )
    for model in judged:
        if (
            model.before
            and model.after
            and model.after.median_error_mib > model.before.median_error_mib
        ):
            typer.echo(
                f"{model.bundle.card.name}: the error did not fall; these jobs give no reason to use its calibration."
            )
    for line in written or ("nothing written: give --out, or --registry and --release",):
        typer.echo(line)


def _dates(made: Calibration) -> str:
    return f", {made.first[:10]} to {made.last[:10]}" if made.first and made.last else ""


def _figures_rows(model: ModelCalibration) -> list[tuple[str, ...]]:
    before, after = model.before, model.after
    assert before is not None
    assert after is not None

    def row(name: str, text_of: Callable[[Figures], str]) -> tuple[str, ...]:
        return name, text_of(before), text_of(after)

    rows = [
        row("judged", lambda one: f"{one.jobs}"),
        row(
            "median error",
            lambda one: f"{one.median_error_mib:,.1f} MiB, {one.median_error_percent:.2f} %",
        ),
        row("took more than expected", lambda one: f"{one.under_predicted:.0%}"),
    ]
    for coverage, multiple in zip(before.coverages, model.site.multiples, strict=True):
        if coverage in _SHOWN_COVERAGES:
            carried = "" if multiple is not None else " *" if model.is_own else " (shipped)"
            rows.append(
                row(
                    f"within the {coverage:.0%} bound{carried}",
                    lambda one, at=coverage: _bound(one.coverages[at]),  # type: ignore[misc]
                )
            )
    return rows


def _bound(figures: CoverageFigures) -> str:
    over = "" if figures.over_allocation is None else f", {figures.over_allocation:+.1%} memory"
    return f"{figures.covered} of {figures.judged}{over}"
