"""What holds a job: against one question for each target, and the catalogue of MIG profiles and
reserves."""

import json
from importlib import resources
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumemnet.errors import InvalidRequestError
from gpumemnet.gpu import (
    GENERIC_RESERVED_MIB,
    MIG_RESERVED_MIB,
    NO,
    UNKNOWN,
    UNSURE,
    YES,
    available_mib,
    device_profile,
    device_profiles,
    mig_profile,
    mig_profiles,
    reserve,
)
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.distribution import BinScheme
from gpumemnet.predict.gpu_fit import Fit, Target, catalogue_targets, fits, target
from gpumemnet.predict.predictor import Predictor
from gpumemnet.units import MIB, ceil_mib
from tests.jobs import jobs, small_job


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor.default()


def asked_alone(predictor: Predictor, job: TrainingJob, wanted: Target) -> Fit:
    """The verdict on one target from a question about that target alone."""
    bins = BinScheme(max(wanted.available_mib, 1) * MIB, 2)
    estimate = predictor.predict(job, gpu=wanted.gpu, bins=bins)
    request_mib = ceil_mib(estimate.expected_bytes)
    limit_mib = None if estimate.safe_bytes is None else ceil_mib(estimate.safe_bytes)
    if limit_mib is None:
        verdict = UNKNOWN
    elif limit_mib <= wanted.available_mib:
        verdict = YES
    else:
        verdict = NO if request_mib > wanted.available_mib else UNSURE
    return Fit(
        gpu=wanted.gpu,
        mig=wanted.mig,
        device=wanted.device,
        available_mib=wanted.available_mib,
        request_mib=request_mib,
        limit_mib=limit_mib,
        verdict=verdict,
        probability=float(estimate.probabilities[0]),
    )


def assert_same(found: Fit, expected: Fit) -> None:
    for name in Fit.__slots__:
        if name != "probability":
            assert getattr(found, name) == getattr(expected, name), name
    assert found.probability == pytest.approx(expected.probability, abs=1e-9)


def test_the_catalogue_is_answered_as_every_target_alone(predictor: Predictor) -> None:
    job = small_job(family="cnn")
    found = fits(predictor, job)
    assert len(found) == len(catalogue_targets()) > len(device_profiles())
    for fit, wanted in zip(found, catalogue_targets(), strict=True):
        assert_same(fit, asked_alone(predictor, job, wanted))


@settings(max_examples=25)
@given(job=jobs(), amounts=st.lists(st.integers(1, 200_000), min_size=1, max_size=6))
def test_any_job_and_any_free_memory(
    predictor: Predictor, job: TrainingJob, amounts: list[int]
) -> None:
    names = ("A100", "H200", "RTX 5090", "T4")
    wanted = [
        target(names[i % 4], free_mib=amount, device=str(i)) for i, amount in enumerate(amounts)
    ]
    for fit, one in zip(fits(predictor, job, wanted), wanted, strict=True):
        assert_same(fit, asked_alone(predictor, job, one))


def test_more_free_memory_is_never_less_likely_to_hold(predictor: Predictor) -> None:
    job = small_job(batch_size=4096)
    request, limit = (
        getattr(fits(predictor, job, [target("A100")])[0], name)
        for name in ("request_mib", "limit_mib")
    )
    amounts = [0, request - 1, request, limit - 1, limit, limit + 1, 2**20]
    found = fits(
        predictor, job, [target("A100", free_mib=amount, device="x") for amount in amounts]
    )
    assert [fit.verdict for fit in found] == [NO, NO, UNSURE, UNSURE, YES, YES, YES]
    probabilities = [fit.probability for fit in found]
    assert probabilities == sorted(probabilities)
    assert probabilities[0] < 1e-6
    assert probabilities[-1] == pytest.approx(1.0)


def test_where_nothing_is_known_there_is_a_request_and_no_verdict(predictor: Predictor) -> None:
    found = fits(predictor, small_job(gradient_accumulation=64), [target("H200")])[0]
    assert (found.verdict, found.limit_mib) == (UNKNOWN, None)
    assert found.request_mib > 0


def test_more_targets_than_a_bin_scheme_holds(predictor: Predictor) -> None:
    wanted = [target("A100", free_mib=amount, device="x") for amount in range(5000)]
    found = fits(predictor, small_job(), wanted)
    assert [fit.available_mib for fit in found] == list(range(5000))
    for row in (0, 4094, 4095, 4096, 4999):
        if row:
            assert_same(found[row], asked_alone(predictor, small_job(), wanted[row]))


def test_a_target_is_named_as_a_person_would() -> None:
    whole, part = target("a100"), target("A100/3g.20gb")
    assert (whole.gpu, whole.mig, whole.device) == ("NVIDIA A100-SXM4-40GB", None, None)
    assert part == target("A100/3G.20GB") == target("NVIDIA A100-SXM4-40GB/3g.20gb")
    assert part.available_mib == 19968 - MIG_RESERVED_MIB
    device = target("A100/1g.5gb", free_mib=4000, device="MIG-1")
    assert (device.mig, device.available_mib, device.device) == ("1g.5gb", 4000, "MIG-1")


@pytest.mark.parametrize(
    ("arguments", "field", "words"),
    [
        ({"name": "Z80"}, "gpu", "no profile of 'Z80': known are NVIDIA's GPUs"),
        ({"name": "A100/9g.99gb"}, "gpu", "known are 1g.5gb, 1g.10gb"),
        ({"name": "T4/1g.5gb"}, "gpu", "known are none"),
    ],
)
def test_a_target_that_is_none(arguments: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as raised:
        target(**arguments)
    assert raised.value.field == field


def test_every_mig_profile_is_smaller_than_its_gpu_and_has_a_source() -> None:
    document = json.loads(resources.files("gpumemnet").joinpath("gpu/mig.json").read_text("utf-8"))
    known = {profile.name for profile in device_profiles()}
    assert {gpu for entry in document["partitions"] for gpu in entry["gpus"]} <= known
    assert {entry["gpu"] for entry in document["reserves"]} <= known
    for profile in device_profiles():
        whole = available_mib(profile)
        assert 0 < whole < profile.capacity_bytes // MIB
        assert reserve(profile.name)[1]
        for mig in mig_profiles(profile.name):
            assert mig.source
            assert mig.memory_mib * MIB <= profile.capacity_bytes
            assert 0 < available_mib(profile, mig) <= whole
            # A profile's name says gigabytes, rounded up.
            assert mig.memory_mib / 1024 <= int(mig.name.partition(".")[2].removesuffix("gb"))


def test_a_reserve_is_read_or_assumed() -> None:
    assert reserve("NVIDIA H100 80GB HBM3")[0] == 551
    reserved_mib, source = reserve(device_profile("L4").name)
    assert reserved_mib == GENERIC_RESERVED_MIB
    assert "assumed" in source
    assert max(reserve(profile.name)[0] for profile in device_profiles()) == GENERIC_RESERVED_MIB
    assert mig_profile("NVIDIA H200", "7g.141gb").memory_mib == 143360
