"""Objects that are told apart by what they are, not by what they equal."""

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def unique(objects: Iterable[T]) -> list[T]:
    """Each of `objects` once, in order.

    Variables and tensors compare by their values, if at all.
    """
    return list({id(each): each for each in objects}.values())
