"""Ctrl-C and SIGTERM, held back while weights are being changed."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupts:
    """Turns SIGINT and SIGTERM into KeyboardInterrupt, at once or at the end of a `held` block.

    A second signal within a held block is raised at once: someone is in a hurry. Outside the main
    thread Python delivers no signals, and entering does nothing.
    """

    def __init__(self) -> None:
        self._held = False
        self._pending = False
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._held or self._pending:
            raise KeyboardInterrupt
        self._pending = True

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Signals inside the block raise only when it has ended."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt
