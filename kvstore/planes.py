"""Where the planes of a pool lie in its file, and copying blocks from planes to planes. No torch.

Large planes begin with a huge page each, small ones follow each other; a header comes before the first.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.layout import KVLayout
from runtime import huge_pages

Planes = npt.NDArray[np.uint8]

HEADER_BYTES = 4096
"""Before the planes, at least: one page, so that they stay aligned."""
MIN_HUGE_PAGES = 4
"""Planes of so many are laid out in huge pages."""


def view_planes(mapping: mmap.mmap | memoryview, layout: KVLayout, ceiling: int) -> Planes:
    """The planes in a mapping of a pool's file: uint8 [num_planes, ceiling, plane_block_bytes]."""
    pitch = plane_pitch(layout, ceiling)
    flat = np.frombuffer(mapping, np.uint8, layout.num_planes * pitch, planes_start(layout, ceiling))
    planes = flat.reshape(layout.num_planes, pitch)[:, : ceiling * layout.plane_block_bytes]
    return planes.reshape(layout.num_planes, ceiling, layout.plane_block_bytes)  # a view: planes stay where they are


def has_huge_pages(layout: KVLayout, ceiling: int) -> bool:
    """Whether planes are large enough for what is left over of their last huge page not to matter."""
    return ceiling * layout.plane_block_bytes >= MIN_HUGE_PAGES * huge_pages.HUGE_PAGE_BYTES


def plane_pitch(layout: KVLayout, ceiling: int) -> int:
    """Bytes from one plane to the next."""
    size, page = ceiling * layout.plane_block_bytes, huge_pages.HUGE_PAGE_BYTES
    return -(-size // page) * page if has_huge_pages(layout, ceiling) else size


def planes_start(layout: KVLayout, ceiling: int) -> int:
    """Offset of the first plane in a pool's file."""
    return huge_pages.HUGE_PAGE_BYTES if has_huge_pages(layout, ceiling) else HEADER_BYTES


def file_bytes(layout: KVLayout, ceiling: int) -> int:
    """Size of a pool's file."""
    return planes_start(layout, ceiling) + layout.num_planes * plane_pitch(layout, ceiling)


def plane_ranges(layout: KVLayout, ceiling: int, first: int, end: int) -> list[tuple[int, int]]:
    """Offset and length in the file of blocks `first` to `end - 1`, one range a plane."""
    size, start, pitch = layout.plane_block_bytes, planes_start(layout, ceiling), plane_pitch(layout, ceiling)
    return [(start + plane * pitch + first * size, (end - first) * size) for plane in range(layout.num_planes)]


def copy_blocks(source: Planes, source_ids: Sequence[int], destination: Planes, destination_ids: Sequence[int]) -> None:
    """Copies blocks over all planes; both arrays are [num_planes, blocks, plane_block_bytes], ids already checked.

    Neighbours that stay neighbours go in one copy, without the interpreter lock.
    """
    for first, to, length in neighbours(source_ids, destination_ids):
        destination[:, to : to + length] = source[:, first : first + length]


def neighbours(source_ids: Sequence[int], destination_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Pairs of ids in as few runs as there are: where one begins on either side, and how long it is."""
    start = 0
    for end in range(1, len(source_ids) + 1):
        if (
            end < len(source_ids)
            and source_ids[end] == source_ids[end - 1] + 1
            and destination_ids[end] == destination_ids[end - 1] + 1
        ):
            continue
        yield source_ids[start], destination_ids[start], end - start
        start = end
