"""Models that call operators of somebody else's, as a library of CUDA kernels brings them; none
runs on meta tensors."""

import torch
from torch import nn

library = torch.library.Library("trace_example", "DEF")
library.define("scale(Tensor x, float factor) -> Tensor")
library.define("rotate_(Tensor(a!) x) -> ()")
library.define("split(Tensor x) -> (Tensor, Tensor)")


@torch.library.custom_op("trace_example::squash", mutates_args=(), device_types="cuda")
def squash(x: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("the kernel needs a GPU")


@torch.library.custom_op("trace_example::keep", mutates_args=(), device_types="cuda")
def keep(x: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("the kernel needs a GPU")


@keep.register_fake
def _(x):
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())  # as torchvision describes nms


class Kernel(torch.autograd.Function):
    """How libraries make their kernels differentiable."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.ops.trace_example.scale(x, 2.0)

    @staticmethod
    def backward(ctx, grad):
        return torch.ops.trace_example.scale(grad, 2.0)


class Calls(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(256, 256), how

    def forward(self, x):
        x = self.layer(x)
        return getattr(self, self.how)(x)

    def scale(self, x):
        return Kernel.apply(x)

    def rotate(self, x):
        x = x * 2
        with torch.no_grad():
            torch.ops.trace_example.rotate_(x)
        return x

    def split(self, x):
        first, second = torch.ops.trace_example.split(x)
        return first + second

    def keep(self, x):
        return x + keep(x.detach())

    def squash(self, x):
        return x + squash(x.detach())


def calls(how):
    return Calls(how), torch.zeros(64, 256)


def extension():
    """A compiled extension that was never built here."""
    import trace_example_cuda

    return trace_example_cuda.Model()
