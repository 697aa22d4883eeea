from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gpumemnet.errors import DatasetError, InvalidJobError, InvalidRequestError
from gpumemnet.job.json_codec import job_to_dict
from gpumemnet.job.measurement import (
    DEVICE_SOURCES,
    LABEL_SOURCES,
    SITE_DEVICE_SOURCES,
    Measurement,
)
from gpumemnet.site.observations import (
    MAX_BYTES,
    MIN_BYTES,
    PROCESS_OBSERVATIONS,
    SOURCES,
    Observation,
    content_hash,
    observation_from_dict,
    observation_to_dict,
)
from tests.jobs import small_job

IDENTITY = "01932f6c-5b1e-7c3a-9d2e-3f4a5b6c7d8e"
PREDICTED = {"prediction_id": IDENTITY, "peak_bytes": 1800 * 2**20, "source": "slurm_gpumem"}
BY_JOB: dict[str, Any] = {
    "job": job_to_dict(small_job()),
    "gpu": "a100",
    "peak_bytes": 1800 * 2**20,
    "source": "nvml_process",
}


def test_what_is_read_of_the_process_is_not_read_of_the_device() -> None:
    of_device = {*DEVICE_SOURCES, *SITE_DEVICE_SOURCES}
    assert set(PROCESS_OBSERVATIONS) == set(SOURCES) - of_device


def test_by_prediction() -> None:
    one = observation_from_dict(PREDICTED)
    assert (one.prediction_id, one.peak_bytes, one.oom, one.gpu) == (
        IDENTITY,
        1800 * 2**20,
        False,
        None,
    )


def test_by_job_with_the_gpus_own_name() -> None:
    one = observation_from_dict(BY_JOB)
    assert (one.job, one.gpu) == (small_job(), "NVIDIA A100-SXM4-40GB")


def test_a_gpu_that_nobody_knows_keeps_its_name() -> None:
    assert observation_from_dict({**BY_JOB, "gpu": "MI300X"}).gpu == "MI300X"


def test_a_job_that_ran_out_needs_no_peak() -> None:
    one = observation_from_dict(
        {
            "prediction_id": IDENTITY,
            "oom": True,
            "limit_bytes": 8192 * 2**20,
            "source": "nvml_process",
        }
    )
    assert (one.oom, one.peak_bytes, one.limit_bytes) == (True, None, 8 * 2**30)


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ([], ""),
        ({**PREDICTED, "peak_mib": 1}, "peak_mib"),
        ({**PREDICTED, "peak_bytes": None}, "peak_bytes"),
        ({**PREDICTED, "peak_bytes": True}, "peak_bytes"),
        ({**PREDICTED, "peak_bytes": float("nan")}, "peak_bytes"),
        ({**PREDICTED, "peak_bytes": 10**400}, "peak_bytes"),
        ({**PREDICTED, "peak_bytes": 1800}, "peak_bytes"),
        ({**PREDICTED, "source": None}, "source"),
        ({**PREDICTED, "source": "traced"}, "source"),
        ({**PREDICTED, "source": []}, "source"),
        ({**PREDICTED, "oom": "yes"}, "oom"),
        ({**PREDICTED, "prediction_id": "1"}, "prediction_id"),
        ({**PREDICTED, "prediction_id": None}, "prediction_id"),
        ({**PREDICTED, "observed_at": "2026-01-31T12:00:00"}, "observed_at"),
        ({**PREDICTED, "observed_at": "2999-01-31T12:00:00Z"}, "observed_at"),
        ({**PREDICTED, "observed_at": 5}, "observed_at"),
        ({**PREDICTED, "observed_at": "0001-01-01T00:00:00+14:00"}, "observed_at"),
        ({**PREDICTED, "idempotency_key": ""}, "idempotency_key"),
        ({**PREDICTED, "idempotency_key": "x" * 201}, "idempotency_key"),
        ({**PREDICTED, "idempotency_key": "a\x00b"}, "idempotency_key"),
        ({**PREDICTED, "driver": "\ud800"}, "driver"),
        ({**BY_JOB, "gpu": None}, "gpu"),
        ({**BY_JOB, "gpu": "L4", "peak_bytes": 40_000 * 2**20}, "peak_bytes"),
    ],
)
def test_what_is_wrong_is_said(document: object, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        observation_from_dict(document)
    assert caught.value.field == field


def test_what_is_wrong_with_the_job_is_said() -> None:
    with pytest.raises(InvalidJobError) as caught:
        observation_from_dict({**BY_JOB, "job": {**BY_JOB["job"], "batch_size": 0}})
    assert caught.value.field == "job.batch_size"


@pytest.mark.parametrize(
    "changes",
    [
        {"prediction_id": "01932f6c-5b1e-7c3a-9d2e-3f4a5b6c7d01", "peak_bytes": MIN_BYTES},
        {"job": small_job(), "gpu": "GPU x", "oom": True, "limit_bytes": MAX_BYTES, "torch": "2"},
        {"job": small_job(), "gpu": "GPU x", "peak_bytes": 2**30, "idempotency_key": "k"},
    ],
)
def test_json_and_back(changes: dict[str, Any]) -> None:
    time = datetime(2025, 1, 1, tzinfo=UTC)
    observation = Observation(source="dcgm", observed_at=time, **changes)
    assert observation_from_dict(observation_to_dict(observation)) == observation


def test_the_hash_is_of_the_content() -> None:
    one = observation_from_dict(PREDICTED)
    assert content_hash(one) == content_hash(
        observation_from_dict({**PREDICTED, "idempotency_key": "x"})
    )
    assert content_hash(one) != content_hash(
        observation_from_dict({**PREDICTED, "peak_bytes": 1801 * 2**20})
    )
    zone = datetime.now(UTC) - timedelta(hours=1)
    here, there = zone.isoformat(), zone.astimezone(None).isoformat()
    assert content_hash(observation_from_dict({**PREDICTED, "observed_at": here})) == content_hash(
        observation_from_dict({**PREDICTED, "observed_at": there})
    )


def test_a_field_that_joins_later_leaves_older_hashes_as_they_are() -> None:
    """A report that is sent again after an upgrade is the same report, and no other one under its
    key."""
    document: dict[str, Any] = {
        "job": job_to_dict(small_job()),
        "gpu": "A100",
        "peak_bytes": 3 * 2**30,
        "source": "nvml_process",
    }
    digest = content_hash(observation_from_dict(document))
    assert digest == "55be067a840700a7186a6f6669b5ad3eccc062a6caf6d8d1a144a99098d34549"
    document["job"]["ranks"] = 2
    assert content_hash(observation_from_dict(document)) != digest


def test_every_source_is_a_label_source() -> None:
    assert set(SOURCES) == set(LABEL_SOURCES) - {"traced"}


def measurement(**changes: Any) -> Measurement:
    values = {
        "job": small_job(),
        "status": "ok",
        "label_source": "slurm_gpumem",
        "capacity_bytes": 2**35,
        "provenance": "observed",
        "gpu": "x",
        "recipe": "observations",
        "architecture": "{}",
        "peak_process_bytes": 2**31,
    }
    return Measurement(**{**values, **changes})


def test_a_sites_reading_is_a_label_of_the_process_or_the_device() -> None:
    assert measurement().label_bytes == 2**31
    assert (
        measurement(
            label_source="dcgm", peak_process_bytes=None, peak_device_bytes=2**30
        ).label_bytes
        == 2**30
    )
    with pytest.raises(DatasetError, match="observed"):
        measurement(provenance="measured")
