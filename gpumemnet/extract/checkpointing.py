"""Which blocks of a model activation checkpointing recomputes.

It recomputes each block of a stack.  A block is a child of a ``ModuleList``
or ``Sequential`` whose children are mostly of one class that holds other modules.  This is what
trainers wrap (Chen et al., arXiv 1604.06174; the block policies of FSDP and DeepSpeed).
Hierarchical networks have a stack of stages, each with a stack of its own.  There the blocks inside
the stages are meant, as timm and diffusers recompute them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import torch.utils.checkpoint
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpumemnet.errors import ExtractError
from gpumemnet.sandbox.user_code import running_frame

_FILE: Final = str(torch.utils.checkpoint.__file__)

_MIN_BLOCKS = 2
_MIN_WEIGHTS = 2
_MIN_STAGE_SHARE = 1 / 3
"""Share of a stage's parameters that lie in its blocks; adapters in a block are far fewer."""


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of the outermost stacks inside ``model``, in order; its own if there is no
    other stack."""
    return _inner(model) or _stack_members(model)


def _inner(model: nn.Module) -> list[nn.Module]:
    return [block for child in model.children() for block in _stack_members(child) or _inner(child)]


def _stack_members(stack: nn.Module) -> list[nn.Module]:
    """Return the blocks of ``stack``, none if it is not a stack of blocks or of stages."""
    members = list(stack.children()) if isinstance(stack, nn.ModuleList | nn.Sequential) else []
    counts = Counter(
        type(member) for member in members if next(member.children(), None) is not None
    )
    if not counts or counts.most_common(1)[0][1] < _MIN_BLOCKS:
        return []
    called = [part for member in members if type(member) in counts for part in _called(member)]
    of_stages = [_stage_blocks(part) for part in called]
    if not any(of_stages):
        return called
    return [
        block
        for part, own in zip(called, of_stages, strict=True)
        for block in own or [part]
        if _is_block(block)
    ]


def _stage_blocks(stage: nn.Module) -> list[nn.Module]:
    """Return the blocks in the stacks of ``stage``, none if it is not a stage.

    The parts of a block are no blocks: a convolution with its norm has a single weight, and experts
    and attention heads have no norms; adapters have few parameters.  Plain ``Sequential`` modules
    in a list are branches, which run side by side.
    """
    stacks = [stage] if isinstance(stage, nn.Sequential) else list(stage.children())
    found = []
    for stack in stacks:
        parts = list(stack.children()) if isinstance(stack, nn.ModuleList | nn.Sequential) else []
        are_branches = (
            isinstance(stack, nn.ModuleList) and type(next(iter(parts), None)) is nn.Sequential
        )
        if len(set(map(type, parts))) == 1 and not are_branches and all(map(_is_block, parts)):
            found += parts
    is_stage = _parameters(*found) >= _MIN_STAGE_SHARE * _parameters(stage)
    return found if is_stage else []


def _parameters(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _is_block(module: nn.Module) -> bool:
    """Whether ``module`` holds at least two weight matrices or filters, and a norm."""
    ranks = [
        [parameter.ndim for parameter in part.parameters(recurse=False)]
        for part in module.modules()
    ]
    weights = sum(max(own, default=0) > 1 for own in ranks)
    return weights >= _MIN_WEIGHTS and any(max(own, default=0) == 1 for own in ranks)


def _called(block: nn.Module) -> list[nn.Module]:
    """Return ``block``, or its children if it is a list or dict, which has no forward pass."""
    if type(block) in (nn.ModuleList, nn.ModuleDict):
        return [called for child in block.children() for called in _called(child)]
    return [block]


def checkpoint_calls() -> bool:
    """Whether the code that asks runs within a checkpoint, which computes a part of a model again."""
    return running_frame(_FILE.__ne__) is not None


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[int]:
    """Context in which every block of ``model`` is recomputed in the backward pass.

    Yields:
        the number of blocks.

    Raises:
        ExtractError: the model has none.
    """
    stack = blocks(model)
    if not stack:
        raise ExtractError(
            "checkpointing: the model has no stack of blocks; call torch.utils.checkpoint in it, or use 'none'"
        )
    own = [vars(block).get("forward") for block in stack]
    for block in stack:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield len(stack)
    finally:
        for block, forward in zip(stack, own, strict=True):
            del block.forward
            if forward is not None:
                block.forward = forward
