"""Activation checkpointing of somebody else's model: each block of a stack is recomputed in the backward pass.

A block is what trainers wrap (Chen et al., arXiv 1604.06174; FSDP's and DeepSpeed's block policies): a child of a ``ModuleList``
or ``Sequential`` whose children are mostly of one class of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from gpumemnet.errors import ExtractError

_MIN_BLOCKS = 2


def blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of the outermost stacks of ``model``, in order; of ``model`` itself, where it is a stack that holds no other."""
    return _inner(model) or _members(model)


def _inner(model: nn.Module) -> list[nn.Module]:
    return [block for child in model.children() for block in _members(child) or _inner(child)]


def _members(stack: nn.Module) -> list[nn.Module]:
    """The blocks of ``stack``, none if it is no stack of blocks."""
    members = list(stack.children()) if isinstance(stack, nn.ModuleList | nn.Sequential) else []
    counts = Counter(type(member) for member in members if next(member.children(), None) is not None)
    if not counts or counts.most_common(1)[0][1] < _MIN_BLOCKS:
        return []
    return [called for member in members if type(member) in counts for called in _called(member)]


def _called(block: nn.Module) -> list[nn.Module]:
    """``block``, or what it holds, where it is a list that nobody calls."""
    if type(block) in (nn.ModuleList, nn.ModuleDict):
        return [called for child in block.children() for called in _called(child)]
    return [block]


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[int]:
    """Context in which every block of ``model`` is recomputed in the backward pass.

    Yields:
        the number of blocks.

    Raises:
        ExtractError: when the model has none.
    """
    stack = blocks(model)
    if not stack:
        raise ExtractError(
            "the model has no stack of blocks to checkpoint: call torch.utils.checkpoint in it, or leave checkpointing 'none'"
        )
    for block in stack:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield len(stack)
    finally:
        for block in stack:
            del block.forward
