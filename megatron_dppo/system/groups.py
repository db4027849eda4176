"""Items in groups of a limited size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def consecutive_groups(
    items: Iterable[T], size_of: Callable[[T], int], limit: int
) -> Iterator[list[T]]:
    """Yield ``items``, in their order, in groups of at most ``limit`` in total. A larger item is a group of its own."""
    group: list[T] = []
    group_size = 0
    for item in items:
        size = size_of(item)
        if group and group_size + size > limit:
            yield group
            group = []
            group_size = 0
        group.append(item)
        group_size += size
    if group:
        yield group
