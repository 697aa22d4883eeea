"""Writes gpumemnet's estimate of a task's GPU memory into its CARMA description, a ``.rad`` file.

CARMA (itu-rad/CARMA) reads a task's estimate from line 11, counted from 0, in MiB as plain text;
its policy then adds 2,048 MiB by itself.  Everything else in the file stays as it is, byte for
byte, and the file is replaced in one step: whoever reads it meanwhile sees the old or the new one.
"""

from __future__ import annotations

import argparse
import os
import stat
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpumemnet import Client, GpumemnetError, Prediction, Predictor, TrainingJob, job_from_json
from gpumemnet.errors import ServiceError, UnsupportedJobError
from gpumemnet.units import ceil_mib

ESTIMATE_LINE: Final = 11
"""Counted from 0; what the lines before it mean is CARMA's business."""
LARGEST_DESCRIPTION_BYTES: Final = 1024 * 1024


UNKNOWN_MIB: Final = 40_000
"""What CARMA's own descriptions hold for tasks of unknown memory."""
UNSUPPORTED_JOB: Final = "urn:gpumemnet:problem:unsupported-job"
"""The service's problem type for a job that no model is loaded for."""


class DescriptionError(Exception):
    """A file that is no task description of CARMA."""


class _UnknownAmountError(Exception):
    """The job is valid, and no safe amount is known for it."""


def with_estimate(content: bytes, estimate_mib: int) -> bytes:
    """The content of a ``.rad`` file with its estimate replaced.

    Raises:
        DescriptionError: when the file ends before that line, or the line holds something else than
            a number.
    """
    lines = content.split(b"\n")
    if len(lines) <= ESTIMATE_LINE:
        raise DescriptionError(
            f"has {len(lines)} lines, and the estimate belongs into line {ESTIMATE_LINE}, counted from 0"
        )
    old = lines[ESTIMATE_LINE]
    ending = b"\r" if old.endswith(b"\r") else b""
    try:
        float(old)
    except ValueError:
        if old.strip():
            raise DescriptionError(
                f"holds {old[:40]!r} in line {ESTIMATE_LINE}, where a number of MiB is expected"
            ) from None
    lines[ESTIMATE_LINE] = b"%d%s" % (estimate_mib, ending)
    return b"\n".join(lines)


def replace_file(path: Path, content: bytes) -> None:
    """Write ``content`` over ``path`` in one step, with the permissions that it had; through a link
    to what it points at."""
    target = path.resolve()
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(stat.S_IMODE(target.stat().st_mode))
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def ask(job: TrainingJob, url: str | None, gpu: str | None) -> Prediction:
    """The estimate of a service at ``url``, or of the shipped models in this process.

    Raises:
        _UnknownAmountError: when no model is loaded for such jobs.
        GpumemnetError: when the job or the GPU is invalid, or the service does not answer.
    """
    try:
        if url is None:
            return Predictor.default().predict(job, gpu=gpu)
        with Client(url) as client:
            return client.predict(job, gpu=gpu)
    except UnsupportedJobError as error:
        raise _UnknownAmountError(str(error)) from None
    except ServiceError as error:
        if error.problem.get("type") == UNSUPPORTED_JOB:
            raise _UnknownAmountError(str(error)) from None
        raise


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 also where the file is left as it was, because CARMA goes on with
    what it holds."""
    parser = argparse.ArgumentParser(
        description="Write the GPU memory that a task is expected to take into its .rad file."
    )
    parser.add_argument("description", type=Path, metavar="TASK.rad", help="the task's description")
    parser.add_argument(
        "job", type=Path, metavar="JOB.json", help="its job, as 'gpumemnet extract' writes it"
    )
    parser.add_argument(
        "--gpu",
        help="GPU of the machine, by its name in the catalogue; that of the model unless given",
    )
    parser.add_argument(
        "--url",
        help="ask this service rather than the shipped models in this process; it answers for its own GPU",
    )
    parser.add_argument(
        "--limit",
        action="store_true",
        help="write the safe amount, for a policy that adds no margin of its own",
    )
    parser.add_argument(
        "--unknown-mib",
        type=int,
        metavar="MIB",
        default=UNKNOWN_MIB,
        help="write this where no safe amount is known; %(default)s unless given",
    )
    chosen = parser.parse_args(arguments)
    try:
        content = chosen.description.read_bytes()
        if len(content) > LARGEST_DESCRIPTION_BYTES:
            raise DescriptionError("is too large for a task description")
        with_estimate(content, 0)  # a wrong file is told before anything is asked
        job_text = chosen.job.read_text()
    except (OSError, UnicodeDecodeError, DescriptionError) as error:
        reason = (
            f"{chosen.description} {error}" if isinstance(error, DescriptionError) else str(error)
        )
        parser.exit(2, f"write_estimate: {reason}\n")
    try:
        estimate = ask(job_from_json(job_text), chosen.url, chosen.gpu)
        amount_mib = ceil_mib(_amount_bytes(estimate, chosen.limit))
    except _UnknownAmountError as error:
        amount_mib = chosen.unknown_mib
        message = f"write_estimate: {chosen.description} gets {amount_mib} MiB: {error}"
        print(message, file=sys.stderr)  # noqa: T201
    except GpumemnetError as error:
        print(f"write_estimate: {chosen.description} is left as it is: {error}", file=sys.stderr)  # noqa: T201
        return 0
    replace_file(chosen.description, with_estimate(content, amount_mib))
    print(f"{chosen.description}: {amount_mib} MiB")  # noqa: T201
    return 0


def _amount_bytes(estimate: Prediction, wants_limit: bool) -> int:
    if estimate.safe_bytes is None:
        raise _UnknownAmountError(f"no safe amount is known: {'; '.join(estimate.reasons)}")
    return estimate.safe_bytes if wants_limit else estimate.expected_bytes


if __name__ == "__main__":
    sys.exit(main())
