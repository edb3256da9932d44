"""Replacing parts of other people's modules and classes, undone cleanly."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, TracebackType


class Binding:
    """What was replaced; `undo()` or leaving a `with` block restores it.

    Args:
        ended: called once when everything is restored.
    """

    def __init__(self, ended: Callable[[], None] = lambda: None) -> None:
        self._originals: list[tuple[type | ModuleType, str, object]] = []
        self._ended = ended

    def replace(self, owner: type | ModuleType, name: str, new: object) -> None:
        """Put `new` in the place of the owner's own attribute `name`."""
        self._originals.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, new)

    def undo(self) -> None:
        """Restore what was there before; calling it again does nothing."""
        if not self._originals:
            return
        while self._originals:
            owner, name, original = self._originals.pop()
            setattr(owner, name, original)
        self._ended()

    def __enter__(self) -> Binding:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()
