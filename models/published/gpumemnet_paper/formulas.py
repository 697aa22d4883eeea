"""The two closed formulas that GPUMemNet's paper compares; they are in ``gpumemnet`` because packing uses them too."""

from __future__ import annotations

from gpumemnet.physics.published_formulas import FP32_BYTES, horus, naive

__all__ = ["FP32_BYTES", "horus", "naive"]
