"""The text of PYTORCH_CUDA_ALLOC_CONF: what it means, what is refused, and PyTorch's own opinion of
both."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemnet.allocator import DEFAULT_SETTINGS, AllocatorSettings, parse_settings
from gpumemnet.allocator.settings import settings_text
from gpumemnet.errors import InvalidRequestError
from tests.gpumemnet.allocator.streams import MIB


def test_every_option() -> None:
    text = (
        "expandable_segments:True, max_split_size_mb:128,\tmax_non_split_rounding_mb:64,garbage_collection_threshold:0.8,"
        "large_segment_size_mb:32,per_process_memory_fraction:.5,throw_on_cudamalloc_oom:True,roundup_power2_divisions:8"
    )
    assert parse_settings(text) == AllocatorSettings(
        expandable_segments=True,
        max_split_bytes=128 * MIB,
        max_non_split_rounding_bytes=64 * MIB,
        garbage_collection_threshold=0.8,
        large_segment_bytes=32 * MIB,
        per_process_memory_fraction=0.5,
        throw_on_cudamalloc_oom=True,
        roundup_power2_divisions=(8,) * 16,
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "expandable_segments:True",
        "max_split_size_mb:128,roundup_power2_divisions:[256:1,512:2,>:4]",
        "roundup_power2_divisions:8",
    ],
)
def test_settings_are_written_as_they_are_read(text: str) -> None:
    settings = parse_settings(text)
    assert parse_settings(settings_text(settings)) == settings
    assert settings_text(DEFAULT_SETTINGS) == ""


def test_options_that_change_no_size_are_accepted() -> None:
    text = "backend:native,pinned_use_cuda_host_register:True,pinned_num_register_threads:8,release_lock_on_cudamalloc:True,"
    assert parse_settings(text) == parse_settings("") == DEFAULT_SETTINGS


@pytest.mark.parametrize(
    ("text", "divisions"),
    [
        ("[256:1,512:2,1024:4,>:8]", (1,) * 9 + (2, 4) + (8,) * 5),
        ("[64:8,256:4]", (8,) * 7 + (0, 4) + (0,) * 7),
        ("[>:8]", (0,) + (8,) * 15),
        ("[1:2]", (2,) + (0,) * 15),
        ("[131072:4]", (4,) * 16),
        ("[]", (0,) * 16),
        ("16", (16,) * 16),
    ],
)
def test_divisions_by_size(text: str, divisions: tuple[int, ...]) -> None:
    assert parse_settings(f"roundup_power2_divisions:{text}").roundup_power2_divisions == divisions


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "max_split_size:128",
            "allocator settings: 'max_split_size' is no option of PyTorch's; these are: backend, expandable_",
        ),
        (
            "max_split_size_mb=128",
            "allocator settings: 'max_split_size_mb=128' is not of the form option:value",
        ),
        (
            "max_split_size_mb:128,,backend:native",
            "allocator settings: ',backend:native' is not of the form",
        ),
        ("max_split_size_mb:", "allocator settings: 'max_split_size_mb:' is not of the form"),
        (
            "roundup_power2_divisions:[256:1",
            "allocator settings: 'roundup_power2_divisions:[256:1' is not of the form",
        ),
        (
            "max_split_size_mb:19",
            "max_split_size_mb: must be at least 20, the size of a large segment",
        ),
        ("max_non_split_rounding_mb:1", "max_non_split_rounding_mb: must be at least 20"),
        ("large_segment_size_mb:10", "large_segment_size_mb: must be above 10"),
        ("max_split_size_mb:-1", "max_split_size_mb: must be a whole number, not '-1'"),
        ("expandable_segments:true", "expandable_segments: must be True or False, not 'true'"),
        (
            "garbage_collection_threshold:0",
            "garbage_collection_threshold: must lie above 0 and below 1",
        ),
        (
            "garbage_collection_threshold:1.0",
            "garbage_collection_threshold: must lie above 0 and below 1",
        ),
        (
            "garbage_collection_threshold:nan",
            "garbage_collection_threshold: must be a number, not 'nan'",
        ),
        (
            "per_process_memory_fraction:1.5",
            "per_process_memory_fraction: must lie between 0 and 1",
        ),
        (
            "roundup_power2_divisions:3",
            "roundup_power2_divisions: must be made of powers of two, not '3'",
        ),
        (
            "roundup_power2_divisions:[3:2]",
            "roundup_power2_divisions: must be made of powers of two, not '3'",
        ),
        (
            "roundup_power2_divisions:[2]",
            "roundup_power2_divisions: must be a whole number, not ''",
        ),
        ("backend:cudaMallocAsync", "backend: only PyTorch's native allocator can be simulated"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_settings(text)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_settings_are_checked_however_they_are_made() -> None:
    with pytest.raises(InvalidRequestError, match="roundup_power2_divisions: must be 16 numbers"):
        AllocatorSettings(roundup_power2_divisions=(4,))
    with pytest.raises(InvalidRequestError, match="max_split_size_mb: must be at least 20"):
        AllocatorSettings(max_split_bytes=MIB)


@given(st.text(alphabet=":,[]>0123456789.abTrue_mxsplit ", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    settings, sentence = None, ""
    try:
        settings = parse_settings(text)
    except InvalidRequestError as error:
        sentence = str(error)
    assert (settings is None) == bool(sentence)


class PyTorch:
    """The parser inside of torch's own library, with the table of divisions that it keeps."""

    def __init__(self) -> None:
        import torch

        self._set = torch._C._accelerator_setAllocatorSettings
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
        self._divisions = library[
            "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm"
        ]
        self._divisions.restype, self._divisions.argtypes = ctypes.c_size_t, [ctypes.c_size_t]

    def divisions(self, text: str) -> tuple[int, ...] | None:
        """The table that ``text`` sets, or ``None`` where PyTorch refuses it."""
        try:
            self._set(text)
        except (ValueError, RuntimeError):
            return None
        return tuple(self._divisions(MIB << interval) for interval in range(16))


@pytest.fixture(scope="module")
def pytorch() -> Iterator[PyTorch]:
    try:
        parser = PyTorch()
    except (AttributeError, OSError) as error:
        pytest.skip(f"this build of torch does not give its parser away: {error}")
    yield parser
    parser.divisions("")


numbers = st.one_of(st.integers(0, 70), st.sampled_from([2**exponent for exponent in range(18)]))
entries = st.lists(
    st.tuples(st.one_of(st.just(">"), numbers.map(str)), numbers).map(
        lambda pair: f"{pair[0]}:{pair[1]}"
    ),
    max_size=5,
)
options = st.one_of(
    numbers.map("max_split_size_mb:{}".format),
    numbers.map("max_non_split_rounding_mb:{}".format),
    numbers.map("large_segment_size_mb:{}".format),
    numbers.map("roundup_power2_divisions:{}".format),
    entries.map(lambda parts: f"roundup_power2_divisions:[{','.join(parts)}]"),
    st.sampled_from(["0.0", "0.5", "0.999", "1", "1.5"]).map(
        "garbage_collection_threshold:{}".format
    ),
    st.sampled_from(["True", "False", "true", "1"]).map("expandable_segments:{}".format),
)


@given(st.lists(options, max_size=3, unique_by=lambda option: option.partition(":")[0]))
def test_pytorch_reads_the_same(pytorch: PyTorch, options: list[str]) -> None:
    text = ",".join(options)
    if not any(option.startswith("large_segment") for option in options):
        text = ",".join(
            [*options, "large_segment_size_mb:20"]
        )  # PyTorch keeps the one that was set before
    expected = pytorch.divisions(text)
    if expected is None:
        with pytest.raises(InvalidRequestError):
            parse_settings(text)
    else:
        assert parse_settings(text).roundup_power2_divisions == expected
