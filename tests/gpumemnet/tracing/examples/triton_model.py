"""A layer whose kernels are written in Triton, forward and backward, as fused optimisations
come."""

import torch
import triton
import triton.language as tl
from torch import nn


@triton.autotune(configs=[triton.Config({"BLOCK": 256}), triton.Config({"BLOCK": 1024})], key=["n"])
@triton.jit
def double_kernel(x_pointer, y_pointer, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(
        y_pointer + offsets, tl.load(x_pointer + offsets, mask=offsets < n) * 2, mask=offsets < n
    )


def doubled(x):
    y = torch.empty_like(x)
    double_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())
    return y


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return doubled(x)

    @staticmethod
    def backward(ctx, grad):
        return doubled(grad.contiguous())


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(256, 256)

    def forward(self, x):
        return Double.apply(self.layer(x))


def build():
    return Layer(), torch.zeros(64, 256)
