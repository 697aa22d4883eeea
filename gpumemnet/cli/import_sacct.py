"""``gpumemnet import-sacct``: converts Slurm's accounting of finished jobs to observations."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from gpumemnet.cli.arguments import STANDARD_INPUT, AsJson, input_file
from gpumemnet.cli.output import check_writable, write_atomically
from gpumemnet.errors import InvalidRequestError, MissingExtraError, ServiceError
from gpumemnet.site.observations import Observation, observation_to_dict
from gpumemnet.site.sacct import (
    MIN_SECONDS,
    SACCT_FIELDS,
    Skipped,
    observation_lines,
    read_known_jobs,
    read_sacct,
)

KEY_VARIABLE: Final = "GPUMEMNET_API_KEY"
_PER_REQUEST: Final = 200
_TRIES: Final = 5
_TIMEOUT_SECONDS: Final = 30.0


def import_sacct(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help=f"Output of sacct --json or sacct -P -o {SACCT_FIELDS}; - for standard input.",
        ),
    ],
    jobs: Annotated[
        Path | None,
        typer.Option(
            help="JSON Lines with job_id and prediction_id, or job_id, job and gpu, for jobs whose comment says nothing."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the observations to this file, one JSON object a line."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help=f"Send them to this service; a key is taken from {KEY_VARIABLE}."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="File for what was left out and why, one JSON object a line; FILE.skipped.jsonl unless given."
        ),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[TYPE=]NAME",
            help="GPU that the jobs ran on, or the name of Slurm's type: a100='NVIDIA A100-SXM4-80GB'.",
        ),
    ] = None,
    min_seconds: Annotated[
        int, typer.Option(min=0, help="Leave out jobs that ran for less.")
    ] = MIN_SECONDS,
    as_json: AsJson = False,
) -> None:
    """Read what finished Slurm jobs used."""
    if (out is None) == (url is None):
        raise InvalidRequestError("give either --out or --url", "out")
    name = "sacct" if str(file) == STANDARD_INPUT else file.name
    skipped_file = report or file.with_name(f"{name}.skipped.jsonl")
    check_writable(skipped_file, "report")
    if out is not None:
        check_writable(out)
    skipped: list[Skipped] = []
    found = _observations(
        read_sacct(
            input_file(file),
            None if jobs is None else read_known_jobs(jobs),
            _gpus(gpu or []),
            min_seconds,
        ),
        skipped,
    )
    try:
        if url is not None:
            counts = _send(found, url.rstrip("/"), skipped)
            message = f"{counts['stored']} observations stored, {counts['there_before']} were there before"
        else:
            assert out is not None
            lines = list(observation_lines(found))
            write_atomically(out, "".join(lines))
            counts = {"written": len(lines)}
            message = f"{len(lines)} observations in {out}"
    finally:
        write_atomically(
            skipped_file, "".join(json.dumps(asdict(one)) + "\n" for one in skipped), "report"
        )
    if as_json:
        typer.echo(json.dumps({**counts, "left_out": len(skipped), "report": str(skipped_file)}))
    else:
        typer.echo(f"{message}; {len(skipped)} left out, see {skipped_file}")


def _observations(
    found: Iterator[Observation | Skipped], skipped: list[Skipped]
) -> Iterator[Observation]:
    for one in found:
        if isinstance(one, Skipped):
            skipped.append(one)
        else:
            yield one


def _gpus(texts: Sequence[str]) -> dict[str, str]:
    gpus: dict[str, str] = {}
    for text in texts:
        kind, _, name = text.rpartition("=")
        if not name.strip() or kind in gpus:
            raise InvalidRequestError(
                f"must name a GPU, once for each type, not '{text[:60]}'", "gpu"
            )
        gpus[kind] = name.strip()
    return gpus


def _send(observations: Iterator[Observation], url: str, skipped: list[Skipped]) -> dict[str, int]:
    try:
        import httpx
    except ImportError:
        raise MissingExtraError("httpx", "client", "sending observations") from None
    key = os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    counts = {"stored": 0, "there_before": 0}
    with httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT_SECONDS) as client:
        while batch := list(islice(observations, _PER_REQUEST)):
            body = {"observations": [observation_to_dict(one) for one in batch]}
            try:
                results = _post(client, body, url)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise ServiceError(
                    f"the service at {url} cannot be reached: {str(error) or type(error).__name__}"
                ) from None
            for one, result in zip(batch, results, strict=True):
                if "observation" in result:
                    counts["stored" if result["observation"]["created"] else "there_before"] += 1
                else:
                    skipped.append(
                        Skipped(
                            one.idempotency_key or "",
                            None,
                            f"the service: {result['problem']['detail']}",
                        )
                    )
    return counts


def _post(client: Any, body: dict[str, Any], url: str) -> list[dict[str, Any]]:
    """Sends one request, again while the service is busy: observations have idempotency keys, so
    each is stored once."""
    for attempt in range(_TRIES):
        response = client.post("/v1/observations", json=body)
        busy = response.status_code in (429, 503)
        if not busy or attempt == _TRIES - 1:
            break
        waiting = response.headers.get("Retry-After", "")
        time.sleep(min(int(waiting) if waiting.isdigit() else 1, 60))
    try:
        document = response.json()
        if response.status_code == 200:
            results: list[dict[str, Any]] = document["results"]
            if len(results) == len(body["observations"]):
                return results
        reason = document["detail"]
    except (ValueError, KeyError, TypeError):
        raise ServiceError(
            f"{url} answered with status {response.status_code} and no document of this service: is the URL right?"
        ) from None
    raise ServiceError(f"the service at {url} refused: {reason}", response.status_code, document)
