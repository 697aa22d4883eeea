"""Which code is the user's own."""

from __future__ import annotations

from pathlib import Path

from gpumemnet.sandbox.user_code import is_user_code


def test_packages_that_are_installed_to_a_folder_are_not_the_users(tmp_path: Path) -> None:
    (tmp_path / "lib" / "thing-1.0.dist-info").mkdir(parents=True)
    assert not is_user_code(str(tmp_path / "lib" / "thing" / "train.py"))
    assert is_user_code(str(tmp_path / "train.py"))
