"""Decides which GPU an answer is for, and which CUDA context it contains: once for all models,
before one of them answers.

The context depends on the GPU, its driver and the software, not on the model that answers.  It is,
the first that is known: what the site has calibrated, what the site has set, what the labels
measured on this GPU contain, and what the catalogue says.
Published labels do not count: their readers may have had another driver.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from gpumemnet.errors import InvalidRequestError
from gpumemnet.gpu import (
    MAX_CONTEXT_MIB,
    ContextEstimate,
    available_mib,
    context,
    device_profile,
    grown_context,
)
from gpumemnet.job.layers import describe
from gpumemnet.predict.bundle import Bundle
from gpumemnet.units import MIB

REQUEST: Final = "request"
SETTING: Final = "setting"
DEFAULT: Final = "default"
GPU_SOURCES: Final = (REQUEST, SETTING, DEFAULT)
"""Why an answer is for its GPU: it was asked for, it is the setting, or it is the GPU of the most
trusted labels."""
OF_THE_SITE: Final = ("observed", "measured")
"""Provenances of labels whose context was read on the GPU by whoever uses it."""


@dataclass(frozen=True, slots=True, eq=False)
class PredictionGpu:
    """The GPU that an answer is for.

    Attributes:
        gpu: product name.
        gpu_source: one of :data:`GPU_SOURCES`.
        capacity_bytes, blas_workspace_bytes: see :class:`~gpumemnet.gpu.DeviceProfile`.
        available_bytes: the capacity without what the driver keeps, as far as that is known.
        context: the CUDA context in the answer, with its source.
        is_calibrated: whether the site has calibrated the models on this GPU, which then differ
            from one another there.
    """

    gpu: str
    gpu_source: str
    capacity_bytes: int
    available_bytes: int
    blas_workspace_bytes: int
    context: ContextEstimate
    is_calibrated: bool = False


class GpuResolver:
    """Finds the GPU of every answer of a predictor.

    Args:
        bundles: the predictor's bundles, in order.
        gpu: the GPU where none is asked for; by default that of the first bundle's labels.
        context_bytes: the site's CUDA context, on any GPU that the site has not calibrated; by
            default nothing is stated.

    Raises:
        InvalidRequestError: when the GPU is unknown or the context impossible.
    """

    def __init__(
        self, bundles: Iterable[Bundle], gpu: str | None = None, context_bytes: int | None = None
    ) -> None:
        if context_bytes is not None and (
            type(context_bytes) is not int or not 0 < context_bytes <= MAX_CONTEXT_MIB * MIB
        ):
            stated = (
                context_bytes / MIB if isinstance(context_bytes, int | float) else context_bytes
            )
            raise InvalidRequestError(
                f"must be a number of MiB between 1 and {MAX_CONTEXT_MIB}, not {describe(stated)}",
                "context_mib",
            )
        self._cards = [bundle.card for bundle in bundles]
        self._context_bytes = context_bytes
        self._known: dict[tuple[str, str], PredictionGpu] = {}
        self._default = (
            self._find(gpu, SETTING) if gpu is not None else self._find(self._cards[0].gpu, DEFAULT)
        )

    def resolve(self, gpu: str | None) -> PredictionGpu:
        """Returns the GPU called ``gpu``; by default that of the settings.

        Raises:
            InvalidRequestError: when the catalogue does not know it.
        """
        return self._default if gpu is None else self._find(gpu, REQUEST)

    def _find(self, gpu: str, source: str) -> PredictionGpu:
        """The same object for the same GPU, so that what is computed for it can be kept."""
        name = device_profile(gpu).name
        if (name, source) not in self._known:
            self._known[name, source] = self._prediction_gpu(name, source)
        return self._known[name, source]

    def _prediction_gpu(self, gpu: str, source: str) -> PredictionGpu:
        device = device_profile(gpu)
        estimate = context(device)
        measured = {card.contexts[gpu]: card.name for card in self._cards if gpu in card.contexts}
        sites = [
            card.site_calibration
            for card in self._cards
            if card.site_calibration is not None and card.site_calibration.gpu == gpu
        ]
        if found := [one.context_bytes for one in sites if one.context_bytes is not None]:
            estimate = grown_context(max(found), "calibrated at this site (gpumemnet calibrate)")
        elif self._context_bytes is not None:
            estimate = grown_context(self._context_bytes, "set by the site (GPUMEMNET_CONTEXT_MIB)")
        elif measured:
            largest = max(measured)  # a context grows with the kernels in use
            estimate = grown_context(
                largest, f"measured: contained in the labels of {measured[largest]}"
            )
        return PredictionGpu(
            gpu,
            source,
            device.capacity_bytes,
            available_mib(device) * MIB,
            device.blas_workspace_bytes,
            estimate,
            bool(sites),
        )
