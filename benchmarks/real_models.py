"""Compares traces of real vision models with published readings on an A100, and with FakeTensor,
Horus and GPUMemNet.

    python benchmarks/real_models.py

Needs torchvision and timm in addition to torch; nothing is trained.  What is compared with a
reading is the trace's steady state with the CUDA context.  The readings, their sources, and the
construction and trace of each model are in ``research/published_tables/real_models.py``.
"""

from __future__ import annotations

import statistics
import sys
import time

from rich.console import Console
from rich.table import Table

from gpumemnet.errors import DatasetError
from gpumemnet.units import MIB
from research.published_tables.real_models import REAL_MODELS, build, traced_memory
from research.published_tables.rows import PUBLISHED_GPU


def main() -> None:
    table = Table(title=f"MiB on an {PUBLISHED_GPU}, fp32", title_justify="left")
    for heading in (
        "model",
        "batch",
        "measured",
        "traced",
        "error",
        "safe",
        "FakeTensor",
        "Horus",
        "GPUMemNet up to",
        "seconds",
    ):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    errors: dict[str, list[float]] = {"trace": [], "FakeTensor": [], "Horus": []}
    above, over, startups = 0, [], 0
    for model in REAL_MODELS:
        network = build(model)
        for reading in model.readings:
            start = time.perf_counter()
            memory = traced_memory(model, network, reading.batch_size)
            expected, safe = memory.expected_bytes / MIB, memory.safe_bytes / MIB
            seconds = time.perf_counter() - start
            for name, value in (
                ("trace", expected),
                ("FakeTensor", reading.fake_tensor),
                ("Horus", reading.horus),
            ):
                if value is not None:
                    errors[name].append(value / reading.measured - 1)
            startups += memory.startup_peak_bytes > memory.expected_bytes
            above += reading.measured > safe
            over.append(safe / reading.measured - 1)
            others = (reading.fake_tensor, reading.horus, reading.gpumemnet)
            table.add_row(
                *(model.name, str(reading.batch_size), f"{reading.measured:,}", f"{expected:,.0f}"),
                *(f"{expected / reading.measured - 1:+.1%}", f"{safe:,.0f}"),
                *("-" if value is None else f"{value:,.0f}" for value in others),
                f"{seconds:.1f}",
            )
    console = Console(width=130)
    console.print(table)
    for name, values in errors.items():
        absolute = [abs(value) for value in values]
        within = sum(value <= 0.05 for value in absolute)
        console.print(
            f"{name}: median error {statistics.median(absolute):.1%}, {within} of {len(values)} within 5 %"
        )
    console.print(f"start-up peak: above the steady state in {startups} of {len(over)}")
    console.print(
        f"safe: {above} of {len(over)} readings above, median over-allocation {statistics.median(over):.1%}"
    )


if __name__ == "__main__":
    try:
        main()
    except DatasetError as error:
        sys.exit(f"error: {error}")
