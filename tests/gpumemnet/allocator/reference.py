"""The caching allocator once more: slow, straightforward, scanning lists; what the fast simulator
must agree with.

Written from the rules, not from the simulator: a segment is a list of ``[size, state, requested,
born]``, addresses are sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from gpumemnet.allocator import AllocatorSettings

MIB: Final = 2**20
USED, FREE, UNMAPPED = "used", "free", "unmapped"


@dataclass(eq=False)
class Piece:
    size: int
    state: str
    requested: int = 0
    born: int = 0


@dataclass(eq=False)
class Range:
    """What the driver gave: a segment, or the address range of an expandable one."""

    address: int
    stream: int
    small: bool
    pieces: list[Piece] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)

    def address_of(self, piece: Piece) -> int:
        address = self.address
        for one in self.pieces:
            if one is piece:
                return address
            address += one.size
        raise AssertionError("foreign piece")

    def tidy(self) -> None:
        """Join equal neighbours that are not in use."""
        joined: list[Piece] = []
        for piece in self.pieces:
            if joined and piece.state == joined[-1].state != USED:
                joined[-1].size += piece.size
                joined[-1].born = max(
                    joined[-1].born, piece.born
                )  # the one just freed is the younger
            else:
                joined.append(piece)
        self.pieces = joined


class ReferenceOutOfMemory(Exception):
    pass


class ReferenceAllocator:
    def __init__(
        self, settings: AllocatorSettings, capacity: int | None = None, device: int | None = None
    ) -> None:
        self.settings = settings
        self.capacity = capacity
        device = capacity if device is None else device
        self.allowed: int | None = None
        if settings.per_process_memory_fraction < 1:
            assert device is not None
            self.allowed = int(settings.per_process_memory_fraction * device)
        self.range_size = 4 * 1024 * 1024 * MIB if device is None else device + device // 8
        self.ranges: list[Range] = []
        self.searches = 0

    # What is held.

    def total(self, *states: str) -> int:
        return sum(
            piece.size for one in self.ranges for piece in one.pieces if piece.state in states
        )

    @property
    def allocated(self) -> int:
        return self.total(USED)

    @property
    def reserved(self) -> int:
        return self.total(USED, FREE)

    @property
    def requested(self) -> int:
        return sum(
            piece.requested for one in self.ranges for piece in one.pieces if piece.state == USED
        )

    # Requests.

    def rounded(self, size: int) -> int:
        if size < 512:
            return 512
        interval = 0
        while interval < 15 and size >= 2 * MIB * 2**interval:
            interval += 1
        divisions = self.settings.roundup_power2_divisions[interval]
        if divisions > 1 and size > 512 * divisions:
            power = 1
            while power * 2 <= size:
                power *= 2
            while power < size and (size - power) % (power // divisions):
                size += 1 if (size % 512) else 512
            return size
        while size % 512:
            size += 1
        return size

    def malloc(self, requested: int, stream: int = 0) -> tuple[Range, Piece]:
        size = self.rounded(requested)
        small = size <= MIB
        if not small:
            self.searches += 1
        found = self.find(size, stream, small)
        if found is None:
            found = self.grow(size, stream, small)
        where, piece = found
        rest = piece.size - size
        if small or self.settings.expandable_segments:
            splits = rest >= 512
        else:
            splits = rest > MIB and (
                self.settings.max_split_bytes is None or size < self.settings.max_split_bytes
            )
        if splits:
            where.pieces.insert(
                where.pieces.index(piece) + 1, Piece(rest, FREE, born=self.searches)
            )
            piece.size = size
        piece.state, piece.requested = USED, requested
        return where, piece

    def free(self, where: Range, piece: Piece) -> None:
        piece.state, piece.requested, piece.born = FREE, 0, self.searches
        where.tidy()

    def candidates(self, stream: int, small: bool) -> list[tuple[int, int, Range, Piece]]:
        found = [
            (piece.size, one.address_of(piece), one, piece)
            for one in self.ranges
            if one.stream == stream and one.small == small
            for piece in one.pieces
            if piece.state == FREE
        ]
        return sorted(found, key=lambda entry: entry[:2])

    def find(self, size: int, stream: int, small: bool) -> tuple[Range, Piece] | None:
        fitting = [entry for entry in self.candidates(stream, small) if entry[0] >= size]
        if not fitting:
            return None
        chosen = fitting[0]
        if self.settings.expandable_segments:

            def could_grow_to(entry: tuple[int, int, Range, Piece]) -> int:
                _, _, where, piece = entry
                after = where.pieces[where.pieces.index(piece) + 1 :]
                return piece.size + (after[0].size if after and after[0].state == UNMAPPED else 0)

            for entry in fitting[1:]:
                if could_grow_to(entry) >= could_grow_to(chosen):
                    break
                chosen = entry
        limit = self.settings.max_split_bytes
        if limit is not None:
            slack = self.settings.max_non_split_rounding_bytes or self.settings.large_segment_bytes
            if size < limit and chosen[0] >= limit:
                return None
            if size >= limit and chosen[0] >= size + slack:
                return None
        return chosen[2], chosen[3]

    # New memory.

    def segment_size(self, size: int) -> int:
        if size <= MIB:
            return 2 * MIB
        if size < 10 * MIB:
            return self.settings.large_segment_bytes
        while size % (2 * MIB):
            size += 512
        return size

    def grow(self, size: int, stream: int, small: bool) -> tuple[Range, Piece]:
        self.collect_garbage()
        needed = self.segment_size(size)
        found = self.from_driver(size, needed, stream, small)
        if found is None and self.settings.throw_on_cudamalloc_oom and self.beyond_allowed(needed):
            raise ReferenceOutOfMemory
        if found is None and self.release_oversize(size, stream, small):
            found = self.from_driver(size, needed, stream, small)
        if found is None:
            self.empty_cache()
            found = self.from_driver(size, needed, stream, small)
        if found is None:
            raise ReferenceOutOfMemory
        return found

    def beyond_allowed(self, needed: int) -> bool:
        return self.allowed is not None and self.reserved + needed > self.allowed

    def from_driver(
        self, size: int, needed: int, stream: int, small: bool
    ) -> tuple[Range, Piece] | None:
        if self.beyond_allowed(needed):
            return None
        if self.settings.expandable_segments:
            return self.map_pages(size, stream, small)
        if self.capacity is not None and self.reserved + needed > self.capacity:
            return None
        segment = Range(self.lowest_address(needed), stream, small, [Piece(needed, USED)])
        self.ranges.append(segment)
        return segment, segment.pieces[0]

    def lowest_address(self, size: int) -> int:
        address = 2 * MIB
        for taken in sorted(self.ranges, key=lambda one: one.address):
            if taken.address - address >= size:
                return address
            address = -(-(taken.address + taken.size) // (2 * MIB)) * 2 * MIB
        return address

    def page(self, small: bool) -> int:
        return 2 * MIB if small else self.settings.large_segment_bytes

    def map_pages(self, size: int, stream: int, small: bool) -> tuple[Range, Piece] | None:
        page = self.page(small)
        place = None
        for one in sorted(self.ranges, key=lambda one: one.address):
            if one.stream == stream and one.small == small and place is None:
                for index, piece in enumerate(one.pieces):
                    if piece.state == UNMAPPED and place is None:
                        first = (
                            index - 1 if index and one.pieces[index - 1].state == FREE else index
                        )
                        last = first
                        while last < len(one.pieces) and one.pieces[last].state != USED:
                            last += 1
                        if sum(piece.size for piece in one.pieces[first:last]) >= size:
                            place = one, first
        if place is None:
            whole = -(-self.range_size // page) * page
            if size > whole:
                return None
            place = Range(self.lowest_address(whole), stream, small, [Piece(whole, UNMAPPED)]), 0
            self.ranges.append(place[0])
        where, first = place
        begin = sum(piece.size for piece in where.pieces[:first])
        at = first
        while True:  # lay pages from the place on until the free run is long enough
            run = where.pieces[at]
            if run.state == FREE and run.size >= size:
                run.state = USED
                return where, run
            unmapped = at if run.state == UNMAPPED else at + 1
            hole = where.pieces[unmapped]
            have = run.size if run.state == FREE else 0
            pages = -(-min(hole.size, size - have) // page) * page
            if self.capacity is not None and self.reserved + pages > self.capacity:
                return None
            pieces = [Piece(pages, FREE), Piece(hole.size - pages, UNMAPPED)]
            where.pieces[unmapped : unmapped + 1] = [piece for piece in pieces if piece.size]
            where.tidy()
            position = 0
            for at, piece in enumerate(where.pieces):  # noqa: B007 - the piece that now holds the place
                if position <= begin < position + piece.size:
                    break
                position += piece.size

    # Less memory.

    def empty_cache(self) -> None:
        for one in list(self.ranges):
            if self.settings.expandable_segments:
                self.unmap_pages(one)
            elif len(one.pieces) == 1 and one.pieces[0].state == FREE:
                self.ranges.remove(one)

    def unmap_pages(self, one: Range) -> None:
        page = self.page(one.small)
        pieces: list[Piece] = []
        begin = unmapped = 0
        for piece in one.pieces:
            end = begin + piece.size
            inner_begin, inner_end = -(-begin // page) * page, end // page * page
            if piece.state == FREE and inner_begin < inner_end:
                parts = [
                    (inner_begin - begin, FREE),
                    (inner_end - inner_begin, UNMAPPED),
                    (end - inner_end, FREE),
                ]
                pieces += [Piece(size, state) for size, state in parts if size]
                unmapped += inner_end - inner_begin
            else:
                pieces.append(piece)
            begin = end
        one.pieces = pieces
        one.tidy()
        if unmapped and len(one.pieces) == 1 and one.pieces[0].state == UNMAPPED:
            self.ranges.remove(one)

    def release_oversize(self, size: int, stream: int, small: bool) -> bool:
        limit = self.settings.max_split_bytes
        if limit is None or self.settings.expandable_segments:
            return False
        wanted = max(size, limit)
        candidates = self.candidates(stream, small)
        for found, _, where, _ in candidates:
            if found >= wanted:
                self.ranges.remove(where)
                return True
        released = 0
        for found, _, where, _ in reversed(candidates):
            if released >= wanted or found < limit:
                break
            released += found
            self.ranges.remove(where)
        return released >= wanted

    def collect_garbage(self) -> None:
        threshold = self.settings.garbage_collection_threshold
        if not threshold or self.allowed is None or self.settings.expandable_segments:
            return
        target = self.reserved - int(threshold * self.allowed)
        reclaimed = 0
        while reclaimed < target:
            whole = [
                one
                for one in self.ranges
                if not one.small and len(one.pieces) == 1 and one.pieces[0].state == FREE
            ]
            if not whole:
                return
            ages = [self.searches - one.pieces[0].born for one in whole]
            mean = sum(ages) / len(ages)
            for one, age in zip(whole, ages, strict=True):
                if age >= mean:
                    reclaimed += one.size
                    self.ranges.remove(one)
