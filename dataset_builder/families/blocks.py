"""Building blocks of the networks of every family: checkpointable stacks and residual branches.

Activation checkpointing recomputes a block in the backward pass (Chen et al., arXiv 1604.06174).
It is an option of the run, not a property of the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_MODULES: Final = {name.lower(): module for name, module in vars(nn).items()}
_ONE_OF_EQUAL: Final = ContextVar("one_of_equal_blocks", default=False)


def activation_class(name: str) -> Callable[..., nn.Module]:
    """The module of an activation function: ``leaky_relu`` is ``nn.LeakyReLU``."""
    return _MODULES[name.replace("_", "")]


def repeated(make: Callable[[], nn.Module], count: int) -> list[nn.Module]:
    """``count`` equal blocks, each of which keeps the shape of its input.

    Within :func:`one_of_equal_blocks` it is a single block whose ``repeats`` are the count.
    """
    if not _ONE_OF_EQUAL.get() or not count:
        return [make() for _ in range(count)]
    block = make()
    block.repeats = count  # type: ignore[assignment]
    return [block]


@contextmanager
def one_of_equal_blocks() -> Iterator[None]:
    """Context in which a network is built with one of each run of equal blocks: a network of a
    hundred blocks is then described as fast as one of two."""
    token = _ONE_OF_EQUAL.set(True)
    try:
        yield
    finally:
        _ONE_OF_EQUAL.reset(token)


class Blocks(nn.Sequential):
    """Blocks run one after the other, each recomputed in the backward pass when ``checkpointing``
    is on."""

    checkpointing = False

    def forward(self, features: Tensor, *context: Tensor | None) -> Tensor:
        """``features`` through every block; each is given the same ``context`` too."""
        for block in self:
            if self.checkpointing and self.training:
                features = checkpoint(block, features, *context, use_reentrant=False)
            else:
                features = block(features, *context)
        return features


class Residual(nn.Module):
    """``branch(features)``, and the features themselves or what ``shortcut`` makes of them."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut

    def forward(self, features: Tensor) -> Tensor:
        """The sum of both."""
        branched: Tensor = self.branch(features)
        return branched + (features if self.shortcut is None else self.shortcut(features))


def checkpoint_blocks(network: nn.Module) -> None:
    """Makes every block of ``network`` recompute in the backward pass.

    Raises:
        RuntimeError: when the network has no blocks, such as networks of other libraries;
            ``every_block`` would have no effect.
    """
    stacks = [module for module in network.modules() if isinstance(module, Blocks)]
    if not stacks:
        raise RuntimeError(
            "this network has no blocks to checkpoint: leave checkpointing 'none' in its recipe"
        )
    for stack in stacks:
        stack.checkpointing = True
