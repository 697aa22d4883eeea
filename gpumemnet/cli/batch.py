"""``gpumemnet predict JOBS… --out FILE``: answers for whole files of jobs, streamed into a file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from gpumemnet.errors import InvalidRequestError
from gpumemnet.predict.distribution import BinScheme


def predict_into_file(
    jobs: Sequence[str],
    out: str,
    *,
    bundles: Sequence[Path],
    bins: BinScheme | None,
    coverage: float,
    gpu: str | None,
    encoder: str | None,
    id_column: str | None,
    context_bytes: int | None,
    engine: str,
    workers: int | None,
) -> None:
    """Predicts the jobs, writes the answers to ``out``, and prints a summary on standard error."""
    from gpumemnet.batch.options import BatchOptions
    from gpumemnet.batch.run import predict_files

    options = BatchOptions(
        bundles=tuple(str(folder.resolve()) for folder in bundles),
        bins=bins,
        coverage=coverage,
        gpu=gpu,
        encoder=encoder,
        id_column=id_column,
        context_bytes=context_bytes,
    )
    outcome = predict_files(jobs, out, options, engine=engine, workers=workers)
    tally = outcome.tally
    lines = [
        f"{tally.answered:,} jobs answered in {outcome.seconds:.1f} s, {outcome.rate:,.0f} rows a second: {out}"
    ]
    if tally.outside:
        lines.append(
            f"{tally.outside:,} of them lie outside what the models were trained on, and have no limit"
        )
    if outcome.rejected:
        lines.append(f"{tally.rejected:,} rows were rejected: {outcome.rejected} says why")
    sys.stderr.write("\n".join(lines) + "\n")


def only_file(jobs: Sequence[str]) -> Path:
    """Returns the only input file of a command without ``--out``.

    Raises:
        InvalidRequestError: when there are several files.
    """
    if len(jobs) > 1:
        raise InvalidRequestError("several files need --out FILE for the answers", "jobs")
    return Path(jobs[0])
