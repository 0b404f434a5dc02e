"""Replaces attributes of modules, classes and instances, and puts back what was there."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

_ABSENT = object()


class Replacements:
    """A stack of replaced attributes. `undo` (or leaving the `with` block) restores them, last first."""

    def __init__(self) -> None:
        self._stack: list[tuple[Any, str, Any]] = []

    def __len__(self) -> int:
        return len(self._stack)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Sets `owner.name`. What is restored is the owner's own attribute: one that it only inherits is deleted again.

        Raises:
            AttributeError: the owner has no such attribute. A misspelt name must not become a new one.
        """
        if not hasattr(owner, name):
            raise AttributeError(f"{owner!r} has no attribute {name!r} to replace")
        self._stack.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Restores everything; harmless when nothing is replaced."""
        while self._stack:
            owner, name, old = self._stack.pop()
            if old is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, old)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.undo()
