"""Putting something in the place of an attribute, for a while."""

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
