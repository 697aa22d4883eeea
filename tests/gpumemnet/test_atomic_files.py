"""What is written for a user."""

from __future__ import annotations

import os
from pathlib import Path

from gpumemnet.atomic_files import write_output


def test_an_output_takes_no_place_of_a_pipe_or_a_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_output(tmp_path / "pipe", b"an answer")
    assert os.read(reader, 99) == b"an answer"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()
