"""Ctrl-C and SIGTERM, held back while weights are being changed or processes stand apart."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from isojax import distributed


class Interrupts:
    """Turns SIGINT and SIGTERM into KeyboardInterrupt, at once or at the end of a `held` block.

    With several processes a signal to any of them is raised in all, at the same call of `point`:
    only there can they stop without leaving each other behind.

    A second signal that finds the first one waiting is raised at once: someone is in a hurry.
    Outside the main thread Python delivers no signals, and entering does nothing.
    """

    def __init__(self) -> None:
        self._held = False
        self._pending = False
        self._apart = distributed.count() > 1
        self._previous: dict[int, signal._HANDLER] = {}
        self._watch = contextlib.ExitStack()

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._on_signal)
            self._watch.enter_context(self._announcing())
        return self

    def __exit__(self, *exception: object) -> None:
        self._watch.close()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._pending or not (self._held or self._apart):
            raise KeyboardInterrupt
        self._pending = True
        distributed.ask_to_stop()

    def point(self) -> None:
        """A place where several processes can stop; all of them pass the same ones."""
        if distributed.stop_here():
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def _announcing(self) -> Iterator[None]:
        """Say at once that a signal came: a handler in Python waits until a computation returns."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        thread = threading.Thread(target=self._announce, args=(reader,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            os.close(writer)
            thread.join()
            os.close(reader)

    def _announce(self, reader: int) -> None:
        said = False
        while number := os.read(reader, 1):
            if number[0] not in self._previous:
                continue
            name = signal.Signals(number[0]).name
            if said:
                text = f"{name} again: stopping now\n"
            elif self._held or self._apart:
                text = f"{name}: stopping after this step; a second signal cuts it short\n"
            else:
                text = f"{name}: stopping\n"
            said = True
            os.write(2, text.encode())

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Signals inside the block raise only when it has ended."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._pending and not self._apart:
            self._pending = False
            raise KeyboardInterrupt
