"""The catalogue of GPUs, what is said of their CUDA context, and profiles that users bring
along."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from gpumemnet.errors import InvalidRequestError
from gpumemnet.gpu import (
    PROFILE_FORMAT,
    PROFILE_VERSION,
    ContextReading,
    DeviceProfile,
    context,
    device_profile,
    device_profiles,
    find_profile,
    load_profile,
)
from gpumemnet.units import GIB, MIB

MEASURED = DeviceProfile(
    name="NVIDIA Example",
    aliases=(),
    capacity_bytes=80 * GIB,
    capacity_source="NVML",
    context_bytes=500 * MIB,
    context_source="probe",
    blas_workspace_bytes=32 * MIB,
    blas_workspace_source="probe",
    compute_capability=(9, 0),
    multiprocessors=132,
)


def written(folder: Path, profile: object, **more: object) -> Path:
    path = folder / "profile.json"
    path.write_text(
        json.dumps(
            {"format": PROFILE_FORMAT, "version": PROFILE_VERSION, "profile": profile, "notes": [1]}
            | more
        )
    )
    return path


def document(**changes: object) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(asdict(MEASURED)))
    return document | changes


# The catalogue.


def test_every_name_and_alias_means_one_gpu() -> None:
    for profile in device_profiles():
        for name in (profile.name, *profile.aliases):
            for written in (
                name.upper(),
                name.lower(),
                name.lower().replace(" ", "_"),
                name.replace(" ", "-"),
            ):
                assert device_profile(written) is profile, written


@pytest.mark.parametrize("name", ["3050", "3080 Ti", "4090", "5090"])
def test_a_laptop_s_gpu_is_another_one(name: str) -> None:
    profile = device_profile(f"NVIDIA GeForce RTX {name} Laptop GPU")
    assert profile is device_profile(f"rtx{name} laptop")
    assert profile.is_laptop
    assert profile.capacity_bytes <= 24 * GIB


@pytest.mark.parametrize(
    ("as_slurm_writes_it", "name"),
    [
        ("nvidia_a100-sxm4-80gb", "NVIDIA A100-SXM4-80GB"),
        ("nvidia_a100_80gb_pcie", "NVIDIA A100 80GB PCIe"),
        ("nvidia_h100_80gb_hbm3", "NVIDIA H100 80GB HBM3"),
        ("tesla_v100-sxm2-32gb", "Tesla V100-SXM2-32GB"),
        ("rtx3090", "NVIDIA GeForce RTX 3090"),
        ("a6000", "NVIDIA RTX A6000"),
        ("rtx_pro_6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
    ],
)
def test_slurm_s_spelling_is_known(as_slurm_writes_it: str, name: str) -> None:
    assert device_profile(as_slurm_writes_it).name == name


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("H10O", "gpu: no profile of 'H10O': did you mean 'H100'?"),
        ("RTX 4095", "gpu: no profile of 'RTX 4095': did you mean"),
        (
            "Voodoo",
            "gpu: no profile of 'Voodoo': known are NVIDIA's GPUs from V100 and T4 to B300 and RTX 50",
        ),
        ("", "gpu: no profile of ''"),
        ("x" * 10_000, "gpu: no profile of 'xxx"),
    ],
)
def test_an_unknown_gpu_is_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        device_profile(name)
    assert str(raised.value).startswith(sentence)
    assert len(str(raised.value)) < 400


def test_workspaces_follow_pytorch_s_rule() -> None:
    for profile in device_profiles():
        modern = profile.compute_capability >= (9, 0)
        assert profile.blas_workspace_bytes == (32 * MIB if modern else 8_519_680), profile.name
        assert 4 * GIB <= profile.capacity_bytes <= 300 * GIB
        assert 10 <= profile.multiprocessors <= 200


def test_no_reading_of_others_is_called_measured() -> None:
    for profile in device_profiles():
        assert (profile.context_bytes is None) == ("not measured" in profile.context_source)
        for reading in profile.context_readings:
            assert 50 * MIB < reading.context_bytes < 2 * GIB
            assert len(reading.source) > 20


# The context.


def test_a_measured_context_comes_first() -> None:
    reading = ContextReading(context_bytes=700 * MIB, is_typical=True, source="somebody")
    estimate = context(replace(MEASURED, context_readings=(reading,)))
    assert estimate.expected_bytes == 500 * MIB < estimate.bound_bytes
    assert estimate.source == "measured: probe"
    assert not estimate.advice


def test_then_what_others_have_read_where_it_is_typical() -> None:
    typical = ContextReading(context_bytes=700 * MIB, is_typical=True, source="somebody")
    odd = ContextReading(context_bytes=1500 * MIB, is_typical=False, source="another, eager")
    estimate = context(replace(MEASURED, context_bytes=None, context_readings=(odd, typical)))
    assert estimate.expected_bytes == 700 * MIB < estimate.bound_bytes < 1500 * MIB
    assert estimate.source == "published for drivers since CUDA 12.2, not measured here: somebody"
    assert "700 MiB, not the 1,024 MiB or more of drivers that load all kernels" in estimate.advice


def test_then_what_gpus_take_in_general() -> None:
    estimate = context(replace(MEASURED, context_bytes=None))
    assert 300 * MIB < estimate.expected_bytes < estimate.bound_bytes == 600 * MIB
    assert estimate.source.startswith("not measured on NVIDIA Example")
    assert "not the 1,024 MiB or more of drivers that load all kernels" in estimate.advice


# Profiles of one's own.


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    assert load_profile(written(tmp_path, document())) == MEASURED
    assert find_profile(str(tmp_path / "profile.json")) == MEASURED
    assert find_profile("a100") == device_profile("A100")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"capacity_bytes": 0}, "profile.capacity_bytes: must be a number above 0, not 0"),
        ({"capacity_bytes": True}, "profile.capacity_bytes: must be a number above 0, not true"),
        ({"context_bytes": "500"}, "profile.context_bytes: must be a number above 0, not '500'"),
        ({"multiprocessors": 13.5}, "profile.multiprocessors: must be a number above 0, not 13.5"),
        ({"fp16_tflops": 3e14}, "profile.fp16_tflops: must be a number above 0, not 3"),
        ({"compute_capability": 9}, "profile: is no device profile: "),
        ({"contxt_bytes": 1}, "profile: is no device profile: 'contxt_bytes' is not a field: "),
        ({"context_readings": [{}]}, "profile: is no device profile: ContextReading"),
    ],
)
def test_a_wrong_field_is_one_sentence(
    tmp_path: Path, changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        load_profile(written(tmp_path, document(**changes)))
    assert str(raised.value).startswith(sentence)
    assert "\n" not in str(raised.value)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    profile = document()
    del profile["blas_workspace_bytes"]
    with pytest.raises(
        InvalidRequestError, match=r"is no device profile: .* 'blas_workspace_bytes'"
    ):
        load_profile(written(tmp_path, profile))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"\xff\x00", "is no JSON file"),
        (b"[" * 100_000, "is no JSON file"),
        (b"[]", "is no device profile: its 'format' must be 'gpumemnet-device-profile'"),
        (
            b'{"format": "gpumemnet-device-profile", "version": 2}',
            "has version 2, and this gpumemnet reads 1",
        ),
        (b" " * (2**20 + 1), "cannot be read: it is larger than 1048576 bytes"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(InvalidRequestError) as raised:
        find_profile(str(path))
    assert str(raised.value) == f"gpu: {path} {sentence}"


def test_a_file_that_is_absent_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"absent\.json cannot be read: No such file or directory"
    ):
        find_profile(str(tmp_path / "absent.json"))
    with pytest.raises(InvalidRequestError, match="cannot be read: Is a directory"):
        load_profile(tmp_path)
