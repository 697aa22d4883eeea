"""Finding cuDNN, and the stand-in for the CUDA driver that it is linked to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpumemnet.cudnn.driver_stand_in import DRIVER_FUNCTIONS, DRIVER_NAME
from gpumemnet.cudnn.libraries import LIBRARY, find_library
from gpumemnet.cudnn.session import open_session
from gpumemnet.errors import InvalidRequestError


def installed(folder: Path) -> Path:
    library = folder / "nvidia" / "cudnn" / "lib" / LIBRARY
    library.parent.mkdir(parents=True)
    library.touch()
    return library


def test_auto_finds_the_wheel_beside_this_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = installed(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert find_library("auto") == library


def test_a_path_may_be_the_library_or_its_folder_or_site_packages(tmp_path: Path) -> None:
    library = installed(tmp_path)
    assert (
        find_library(str(library))
        == find_library(str(library.parent))
        == find_library(str(tmp_path))
        == library
    )


def test_off_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert find_library("off") is None
    assert open_session("off") == (None, "")


def test_a_path_without_cudnn_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"cudnn: no libcudnn\.so\.9 at"):
        find_library(str(tmp_path))


def test_a_library_that_is_none_is_an_error_only_if_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = installed(tmp_path)
    with pytest.raises(InvalidRequestError, match="cudnn: cuDNN cannot be loaded"):
        open_session(str(library))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    session, reason = open_session("auto")
    assert session is None
    assert "cannot be loaded" in reason


def test_the_stand_in_for_the_driver_is_a_library_whose_functions_return_zero() -> None:
    program = (
        "import ctypes; from gpumemnet.cudnn.driver_stand_in import *; load_driver_stand_in();"
        f"driver = ctypes.CDLL({DRIVER_NAME!r});"
        f"print([driver[name]() for name in {DRIVER_FUNCTIONS!r}], hasattr(driver, 'cuInit'))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout == f"{[0] * len(DRIVER_FUNCTIONS)} False\n"
