"""The two closed formulas that GPUMemNet compares itself with; they live in the vocabulary, where packing needs them too."""

from __future__ import annotations

from gpumemnet.physics.published_formulas import FP32_BYTES, horus, naive

__all__ = ["FP32_BYTES", "horus", "naive"]
