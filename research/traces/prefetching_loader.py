"""A data loader that copies the next batch to the GPU while the model trains on the current one, as
timm's does.

``PrefetchLoader`` in ``timm/data/loader.py``, the default of timm's training script, copies images
as bytes and converts them on a CUDA stream of its own.  The caching allocator keeps blocks apart by
stream, so three batches stay reserved there: the current one, the next one, and the one before,
which the training loop refers to until it has its next batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from gpumemnet.allocator import EMPTY_CACHE
from gpumemnet.tracing.timeline import Phase, Storage, Timeline

_STREAM: Final = 1
"""The loader's stream; 0 is the default one."""
_FLOAT_BYTES: Final = 4
_INPUT: Final = "input"


def with_prefetching(timeline: Timeline) -> Timeline:
    """Return ``timeline`` with each batch loaded by a loader that prefetches.

    Args:
        timeline: a run that copies one batch to the GPU in each step: images in fp32 and their
            labels.
    """
    old, loader = timeline, _Loader(_batch_of(timeline))
    names: dict[int, int] = {}
    phases, step_starts = list(old.phases), list(old.step_starts)
    new_phases, new_starts = [], []
    for index in range(len(old.events) + 1):
        while phases and phases[0].start == index:
            new_phases.append(Phase(phases[0].name, phases[0].step, len(loader.events)))
            phases.pop(0)
        while step_starts and step_starts[0] == index:
            new_starts.append(len(loader.events))
            step_starts.pop(0)
            if step_starts:  # the last entry is the end of the last step
                loader.next_batch()
        if index == len(old.events):
            break
        event = old.events[index]
        if event == EMPTY_CACHE:
            loader.events.append(event)
        elif old.storages[max(event, ~event)].memory_class != _INPUT:
            if event >= 0:
                names[event] = loader.allocate(old.storages[event])
            else:
                loader.events.append(~names[~event])
    storages, events = tuple(loader.storages), tuple(loader.events)
    return replace(
        old,
        storages=storages,
        events=events,
        phases=tuple(new_phases),
        step_starts=tuple(new_starts),
    )


def _batch_of(timeline: Timeline) -> list[Storage]:
    """The storages of one batch, on the loader's stream."""
    first_step = timeline.events[timeline.step_starts[0] : timeline.step_starts[1]]
    arrived = [timeline.storages[event] for event in first_step if event >= 0]
    return [
        replace(storage, stream=_STREAM) for storage in arrived if storage.memory_class == _INPUT
    ]


class _Loader:
    """Storages and events of a run whose batches are prefetched.

    Args:
        batch: storages of one batch, the largest of which holds the images.
    """

    def __init__(self, batch: list[Storage]) -> None:
        self.storages: list[Storage] = []
        self.events: list[int] = []
        self._batch = batch
        images = max(storage.size_bytes for storage in batch)
        self._image_bytes = replace(
            batch[0], size_bytes=images // _FLOAT_BYTES, bound_bytes=images // _FLOAT_BYTES
        )
        self._held: list[list[int]] = []

    def allocate(self, storage: Storage) -> int:
        """Allocate ``storage`` and return its number."""
        self.events.append(len(self.storages))
        self.storages.append(storage)
        return self.events[-1]

    def next_batch(self) -> None:
        """Load the next batch, and before the first step the first one too; then release the batch
        of the step before."""
        is_first = not self._held
        for _ in range(2 if is_first else 1):
            image_bytes = self.allocate(self._image_bytes)
            self._held.append([self.allocate(storage) for storage in self._batch])
            self.events.append(~image_bytes)
        if not is_first:
            self.events += [~number for number in self._held.pop(0)]
