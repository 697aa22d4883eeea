"""Ranks that differ: stages of a pipeline (``torch.distributed.pipelining``), each traced by itself.

A rank that sends tensors to another one is a stage, and all ranks of that group are traced.  What a
stage receives follows from what the stage before it sends.  Traces write that into a folder that
they share: the shapes of its outputs, for each stage, and the ranks of the group.  With several
stages on a rank, one may not be there yet, and the last one before it counts: hidden states have one
shape everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpumemnet.errors import ExtractError
from gpumemnet.launchers.programs import write_own

_GROUP: Final = "group.json"
_MOST_RANKS: Final = 8
"""Ranks of a pipeline that are traced, its ends and some between them."""
_PIPELINING: Final = "torch.distributed.pipelining"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPeak:
    """The memory of one of several ranks that differ.

    Attributes:
        rank: its number.
        expected_bytes, safe_bytes: as in :class:`~gpumemnet.tracing.result.TraceAnswer`.
        phase: when its peak is.
    """

    rank: int
    expected_bytes: int
    safe_bytes: int
    phase: str


def peaks_by_rank(answers: Mapping[int, Any]) -> tuple[RankPeak, ...]:
    """The memory of ranks, from the answers for them, the largest first."""
    peaks = (
        RankPeak(
            rank=rank,
            expected_bytes=each.expected_bytes,
            safe_bytes=each.safe_bytes,
            phase=each.peak.phase,
        )
        for rank, each in answers.items()
    )
    return tuple(sorted(peaks, key=lambda each: -each.expected_bytes))


class StageFolder:
    """What traces of the ranks of a pipeline tell each other.

    Args:
        folder: exists as long as the ranks are traced.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def sends(self, ranks: Sequence[int]) -> None:
        """A rank of a group sends tensors to another."""
        if len(ranks) > 1:
            write_own(self._folder / _GROUP, sorted(ranks))

    def others(self) -> list[int]:
        """Ranks to trace beside the first; none without a pipeline."""
        file = self._folder / _GROUP
        ranks = json.loads(file.read_text()) if file.exists() else []
        last, most = len(ranks) - 1, min(len(ranks), _MOST_RANKS)
        chosen = {ranks[round(number * last / (most - 1))] for number in range(most)}
        return sorted(chosen - {0})

    def preparations(self) -> Mapping[str, Callable[[Any], None]]:
        """What prepares the modules of PyTorch's pipelines as they are imported, by name."""
        return {f"{_PIPELINING}.stage": self._stages, f"{_PIPELINING}.schedules": _schedules}

    def _stages(self, module: Any) -> None:
        from torch.distributed.pipelining import _utils

        def send(stage: Any, meta: Any, to_stage: int) -> None:
            if to_stage > stage.stage_index:
                found = [_document(each) for each in meta.forward_metas]
                write_own(self._folder / f"{stage.stage_index}.json", found)
                stage.sent_forward = meta.forward_metas

        def receive(stage: Any, from_stage: int) -> Any:
            if from_stage > stage.stage_index:  # gradients of what this stage gives
                gradients = (_meta(_document(each), False) for each in stage.sent_forward)
                return _utils._StageBackwardMeta(backward_metas=tuple(gradients))
            files = (self._folder / f"{number}.json" for number in range(from_stage, -1, -1))
            known = next((file for file in files if file.exists()), None)
            if known is None:
                raise ExtractError(
                    f"stage {from_stage} of the pipeline is on a rank that was not traced before"
                )
            metas = (_meta(each, True) for each in json.loads(known.read_text()))
            return _utils._StageForwardMeta(forward_metas=tuple(metas))

        def _meta(document: dict[str, Any], is_trained: bool) -> Any:
            import torch

            return _utils._TensorMeta(
                shape=torch.Size(document["shape"]),
                stride=tuple(document["stride"]),
                dtype=getattr(torch, document["dtype"]),
                requires_grad=is_trained and document["requires_grad"],
            )

        module.PipelineStage._send_meta, module.PipelineStage._recv_meta = send, receive


def _document(meta: Any) -> dict[str, Any]:
    if hasattr(meta, "placements"):
        raise ExtractError("DTensors between the stages of a pipeline are not traced")
    return {
        "shape": list(meta.shape),
        "stride": list(meta.stride),
        "dtype": str(meta.dtype).removeprefix("torch."),
        "requires_grad": meta.requires_grad,
    }


def _schedules(module: Any) -> None:
    # Those of several kinds are coalesced, which a simulated group does not do.
    module._batch_p2p = lambda operations, desc=None: [
        each.op(each.tensor, each.peer, each.group, each.tag) for each in operations
    ]
