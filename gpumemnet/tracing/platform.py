"""The GPU that a job will run on, and the switches that decide which kernels run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpumemnet.cudnn.session import CudnnSession, open_session
from gpumemnet.gpu.catalogue import DeviceProfile
from gpumemnet.tracing.options import TraceOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """The GPU and the process-wide switches that decide which kernels run.

    Attributes:
        device: profile of the GPU.
        attention_kernel: the scaled-dot-product kernel to use; ``None`` for the kernel that PyTorch
            would choose.
        cudnn_benchmark: whether cuDNN tries every convolution algorithm
            (``torch.backends.cudnn.benchmark``).
        tf32: whether fp32 convolutions may run on TF32 tensor cores
            (``torch.backends.cudnn.allow_tf32``, on by default).
        tries_transforms: whether that search includes FFT and Winograd transforms, as versions of
            cuDNN before 9.8 did.
        cudnn: the cuDNN that lists its plans for convolutions; ``None`` to compute workspaces by
            rules.
    """

    device: DeviceProfile
    attention_kernel: str | None = None
    cudnn_benchmark: bool = False
    tf32: bool = True
    tries_transforms: bool = False
    cudnn: CudnnSession | None = None

    @classmethod
    def of(cls, device: DeviceProfile, options: TraceOptions) -> Platform:
        """The platform of a job with ``options`` on ``device``."""
        return cls(
            device=device,
            attention_kernel=options.attention_kernel,
            cudnn_benchmark=options.cudnn_benchmark,
            tf32=options.tf32,
        )

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Major and minor."""
        return self.device.compute_capability


def with_cudnn(platform: Platform, cudnn: str) -> tuple[Platform, tuple[str, ...]]:
    """Return the platform with the cuDNN that is to be asked, and notes on why an installed one is
    not.

    Args:
        platform: the GPU and its switches.
        cudnn: ``off``, ``auto`` or the path of a cuDNN library.

    Raises:
        InvalidRequestError: ``cudnn`` is a path, and the cuDNN there cannot answer.
    """
    session, reason = open_session(cudnn)
    if session is not None and not session.supports(platform.device):
        reason, session = f"cuDNN {session.version} does not know {platform.device.name}", None
    notes = (f"convolution workspaces come from rules: {reason}",) if reason else ()
    return replace(platform, cudnn=session), notes
