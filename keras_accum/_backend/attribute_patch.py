"""Putting something in the place of an attribute, for a while."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


class AttributePatch:
    """An attribute of an object, replaced until `undo`.

    Args:
        owner: the object.
        name: of the attribute. A method of its class is shadowed by a value on the
            object itself.
        value: what it is to be.
    """

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self._owner, self._name = owner, name
        self._own = name in vars(owner)
        self._before = getattr(owner, name)
        setattr(owner, name, value)

    def undo(self) -> None:
        """Have the attribute as it was."""
        if self._own:
            setattr(self._owner, self._name, self._before)
        else:
            delattr(self._owner, self._name)


class Installation:
    """Attributes replaced while at least one holder needs them.

    Args:
        patches: replaces them.
    """

    def __init__(self, patches: Callable[[], list[AttributePatch]]) -> None:
        self._make = patches
        self._patches: list[AttributePatch] = []
        self._holders = 0
        self._lock = threading.RLock()

    def hold(self) -> None:
        """Need them."""
        with self._lock:
            if not self._holders:
                self._patches = self._make()
            self._holders += 1

    def release(self) -> None:
        """Need them no longer."""
        with self._lock:
            self._holders -= 1
            while not self._holders and self._patches:
                self._patches.pop().undo()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A context that needs them."""
        self.hold()
        try:
            yield
        finally:
            self.release()
