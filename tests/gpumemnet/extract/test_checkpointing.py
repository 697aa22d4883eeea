"""Which modules of a network are its blocks."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from gpumemnet.extract.checkpointing import blocks

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(self.norm(x))


class Stage(nn.Module):
    """A change of the resolution and a stack of blocks, as in timm (``Sequential``) and
    transformers (``ModuleList``)."""

    def __init__(self, stack: type[nn.ModuleList | nn.Sequential], depth: int) -> None:
        super().__init__()
        parts = [Block() for _ in range(depth)]
        self.downsample = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(parts) if stack is nn.ModuleList else nn.Sequential(*parts)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class WithExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2)
        self.experts = nn.ModuleList(Expert() for _ in range(4))


class WithBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
            )
            for _ in range(3)
        )


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down, self.up = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 1),
            nn.Linear(1, WIDTH),
        )


class WithAdapters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2)
        self.adapters = nn.ModuleList(Adapter() for _ in range(2))


class Convolution(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())


class OfConvolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Convolution(), Convolution())


@pytest.mark.parametrize("stack", [nn.Sequential, nn.ModuleList])
def test_blocks_inside_stages(stack: type[nn.ModuleList | nn.Sequential]) -> None:
    """A whole stage is no block: timm, transformers and diffusers recompute the blocks in it."""
    stages = [Stage(stack, depth) for depth in (1, 3, 2)]
    expected = [block for stage in stages for block in stage.blocks.children()]
    assert (
        blocks(
            nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.ModuleDict({"stages": nn.Sequential(*stages)})
            )
        )
        == expected
    )


def test_stages_that_are_sequential() -> None:
    """As in torchvision's Swin and ConvNeXt: the stem and the changes of resolution stand between
    the stages."""
    stages = [nn.Sequential(*(Block() for _ in range(depth))) for depth in (2, 3)]
    between = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    features = nn.Sequential(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)), stages[0], between, stages[1]
    )
    assert blocks(nn.ModuleDict({"features": features})) == [*stages[0], *stages[1]]


@pytest.mark.parametrize("kind", [Block, WithExperts, WithAdapters, WithBranches, OfConvolutions])
def test_parts_of_a_block_are_no_blocks(kind: type[nn.Module]) -> None:
    stack = nn.ModuleList(kind() for _ in range(3))
    assert blocks(nn.ModuleDict({"layers": stack})) == list(stack)
