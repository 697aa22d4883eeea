"""The pictures of a trace: files are opened, and the page is looked at in a real browser where
there is one."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from gpumemnet.errors import InvalidRequestError
from gpumemnet.tracing import ExtraResults, TraceAnswer, trace
from gpumemnet.tracing.report.answer import Curve
from gpumemnet.tracing.report.picture import MAX_MOMENTS, picture_of
from gpumemnet.tracing.report.plot import plot
from gpumemnet.units import ceil_mib

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def answer() -> TraceAnswer:
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 30 * 30, 10),
    )
    extras = ExtraResults(curve=True, batches=(1, 2, 64))
    return trace(model, torch.empty(32, 3, 32, 32, device="meta"), optimizer="adam", extras=extras)


class Reader(HTMLParser):
    """Collects the text of a page and checks that its elements close."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.scripts += tag == "script"

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(page: Path) -> Reader:
    reader = Reader()
    reader.feed(page.read_text("utf-8"))
    reader.close()
    return reader


def test_the_bands_at_the_peak_are_the_answers_parts(answer: TraceAnswer) -> None:
    shown = picture_of(answer)
    assert shown.is_run_peak
    at_peak = {band.part: band.moments_bytes[shown.peak] for band in shown.bands}
    assert at_peak == {name: size for name, size in answer.parts.items() if name in at_peak}
    assert sum(at_peak.values()) == sum(answer.parts.values()) - answer.parts["fragmentation"]
    assert max(shown.reserved_bytes) == answer.expected_bytes
    assert [phase.name for phase in shown.phases][-3:] == ["forward", "backward", "optimizer"]
    assert all(unused >= 0 for unused in shown.unused_bytes)


def test_a_png_is_a_picture(answer: TraceAnswer, tmp_path: Path) -> None:
    plot(answer, tmp_path / "memory.png")
    head = (tmp_path / "memory.png").read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", head[16:])
    assert width > 1000
    assert height > 500
    assert list(tmp_path.iterdir()) == [tmp_path / "memory.png"]


def test_an_svg_names_the_bands(answer: TraceAnswer, tmp_path: Path) -> None:
    plot(answer, tmp_path / "memory.svg")
    assert ElementTree.parse(tmp_path / "memory.svg").getroot().tag.endswith("svg")


def test_the_page_says_it_in_words(answer: TraceAnswer, tmp_path: Path) -> None:
    plot(answer, tmp_path / "memory.html")
    text = " ".join(read(tmp_path / "memory.html").text)
    assert f"{ceil_mib(answer.expected_bytes):,} MiB expected" in text
    assert "saved activations" in text
    assert answer.peak.operator in text
    assert "Other batch sizes" in text
    assert "http" not in (tmp_path / "memory.html").read_text("utf-8")


def test_names_cannot_break_out(answer: TraceAnswer, tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script>\"'"
    peak = replace(answer.peak, module=hostile, modules=((hostile, 5), *answer.peak.modules))
    plot(replace(answer, model=hostile, notes=(hostile,), peak=peak), tmp_path / "memory.html")
    assert read(tmp_path / "memory.html").scripts == 2


def test_long_steps_stay_small(answer: TraceAnswer, tmp_path: Path) -> None:
    assert answer.curve is not None
    times = 50_000 // len(answer.curve.reserved_bytes) + 1
    long = Curve(
        classes=answer.curve.classes,
        bytes_by_class=tuple(row * times for row in answer.curve.bytes_by_class),
        reserved_bytes=answer.curve.reserved_bytes * times,
        phases=answer.curve.phases,
    )
    lengthened = replace(answer, curve=long)
    plot(lengthened, tmp_path / "memory.html")
    assert (tmp_path / "memory.html").stat().st_size < 1_000_000
    shown = picture_of(lengthened)
    assert len(shown.events) <= MAX_MOMENTS
    assert (
        shown.edges_bytes[-1][shown.peak]
        == sum(answer.parts.values()) - answer.parts["fragmentation"]
    )


def test_other_files_and_answers_without_a_curve(answer: TraceAnswer, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="plot: must end in"):
        plot(answer, tmp_path / "memory.gif")
    with pytest.raises(InvalidRequestError, match="no curve"):
        plot(replace(answer, curve=None), tmp_path / "memory.html")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_fills_the_read_out(answer: TraceAnswer, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    plot(answer, tmp_path / "memory.html")
    page = (tmp_path / "memory.html").read_text("utf-8")
    moved = "plot.dispatchEvent(new KeyboardEvent('keydown', {key: 'End'}));"
    (tmp_path / "moved.html").write_text(
        page.replace("show(at);\n</script>", f"show(at);\n{moved}\n</script>")
    )
    read_outs = []
    for name in ("memory", "moved"):
        command = [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
        ]
        command += [
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            (tmp_path / f"{name}.html").as_uri(),
        ]
        dom = subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=True
        ).stdout
        where = re.search(r'<span id="where"[^>]*>([^<]*)</span>', dom)
        assert where, dom[:500]
        cells = dict(re.findall(r'<td data-row="" data-name="([^"]*)">([^<]*)</td>', dom))
        read_outs.append(
            (where[1], {part: int(mib.replace(",", "")) for part, mib in cells.items()})
        )
    (at_peak, peak_mib), (at_end, end_mib) = read_outs
    assert at_peak.startswith(answer.peak.phase)
    assert at_peak.endswith("the peak")
    assert peak_mib["in nvidia-smi"] == ceil_mib(answer.expected_bytes)
    assert sum(peak_mib.values()) == 2 * peak_mib["in nvidia-smi"]
    assert at_end.startswith("optimizer")
    assert end_mib != peak_mib
