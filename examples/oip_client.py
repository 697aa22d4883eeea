"""Asks the service through the Open Inference Protocol, with KServe's client or with Triton's.

    pip install kserve                # or: pip install 'tritonclient[http]'
    python -m service &
    python examples/oip_client.py examples/mlp_job.json

Prints for every job what it requests, what it stays below, and why there is no such limit where
there is none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

MODEL = "gpumemnet"
OUTPUTS = ("expected_bytes", "safe_bytes", "reasons", "gpu", "model")
MIB = 2**20


def main() -> None:
    """Ask for the jobs in the files named on the command line."""
    parser = argparse.ArgumentParser(
        description="Ask gpumemnet through the Open Inference Protocol."
    )
    parser.add_argument("files", nargs="+", type=Path, help="JSON documents of jobs, one a file")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the service (%(default)s)")
    parser.add_argument(
        "--client",
        choices=sorted(CLIENTS),
        default="kserve",
        help="whose client asks (%(default)s)",
    )
    parser.add_argument("--key", help="API key, where the service wants one")
    parser.add_argument(
        "--coverage",
        type=float,
        default=0.99,
        help="share of jobs that stay below the limit (%(default)s)",
    )
    arguments = parser.parse_args()
    jobs = np.array([path.read_bytes() for path in arguments.files], dtype=object)
    headers = {"Authorization": f"Bearer {arguments.key}"} if arguments.key else {}
    columns = CLIENTS[arguments.client](
        arguments.url, headers, jobs, {"coverage": arguments.coverage}
    )
    for path, *row in zip(arguments.files, *(columns[name] for name in OUTPUTS), strict=True):
        expected_bytes, safe_bytes, reasons, gpu, model = map(_plain, row)
        document = {
            "file": str(path),
            "request_mib": -(-expected_bytes // MIB),
            "limit_mib": None if safe_bytes < 0 else -(-safe_bytes // MIB),
            "reasons": reasons.splitlines(),
            "gpu": gpu,
            "model": model,
        }
        sys.stdout.write(json.dumps(document) + "\n")


def ask_with_kserve(
    url: str, headers: Mapping[str, str], jobs: Any, parameters: Mapping[str, Any]
) -> dict[str, Sequence[Any]]:
    """The outputs by name; the jobs travel as JSON."""
    from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig
    from kserve.protocol.infer_type import RequestedOutput

    async def ask() -> Any:
        tensor = InferInput("job", list(jobs.shape), "BYTES")
        tensor.set_data_from_numpy(jobs, binary_data=False)
        outputs = [RequestedOutput(name) for name in OUTPUTS]
        async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
            if not await client.is_model_ready(url, MODEL, headers=headers):
                raise SystemExit(f"{url} is not ready")
            request = InferRequest(
                MODEL, [tensor], request_outputs=outputs, parameters=dict(parameters)
            )
            return await client.infer(url, request, headers=dict(headers), model_name=MODEL)

    return {output.name: output.as_numpy() for output in asyncio.run(ask()).outputs}


def ask_with_triton(
    url: str, headers: Mapping[str, str], jobs: Any, parameters: Mapping[str, Any]
) -> dict[str, Sequence[Any]]:
    """The outputs by name; jobs and outputs travel as raw bytes."""
    from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

    with InferenceServerClient(url.removeprefix("http://")) as client:
        if not client.is_model_ready(MODEL, headers=dict(headers)):
            raise SystemExit(f"{url} is not ready")
        tensor = InferInput("job", list(jobs.shape), "BYTES")
        tensor.set_data_from_numpy(jobs, binary_data=True)
        outputs = [InferRequestedOutput(name, binary_data=True) for name in OUTPUTS]
        answer = client.infer(
            MODEL, [tensor], outputs=outputs, headers=dict(headers), parameters=dict(parameters)
        )
        return {name: answer.as_numpy(name) for name in OUTPUTS}


CLIENTS = {"kserve": ask_with_kserve, "triton": ask_with_triton}


def _plain(value: Any) -> Any:
    """A number or a text as Python has it."""
    if isinstance(value, bytes):
        return value.decode()
    return value.item() if isinstance(value, np.generic) else value


if __name__ == "__main__":
    main()
