"""What Ctrl-C and SIGTERM do to the caller of a run. Only its main thread hears of them.

While a run lives, a SIGTERM that nobody else handles ends the caller like ``sys.exit(143)``: everything gets closed.
Work that must not be torn in the middle holds both back until it is done.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import NoReturn, Self

_BOTH = (signal.SIGINT, signal.SIGTERM)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class Held:
    """Holds both signals back while it is entered; then they are delivered.

    Args:
        raises: False: one that would only raise `KeyboardInterrupt` or `SystemExit` is forgotten.

    Attributes:
        came: The signals that were held back, in order.
    """

    def __init__(self, *, raises: bool = True) -> None:
        self._raises = raises
        self._before: dict[int, object] = {}
        self.came: list[int] = []

    def __enter__(self) -> Self:
        """Begins."""
        if _is_main_thread():
            for number in _BOTH:
                self._before[number] = handler = signal.getsignal(number)
                if handler not in (None, signal.SIG_IGN):  # None: somebody's who is not written in Python
                    signal.signal(number, lambda got, _: self.came.append(got))
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        """Ends, and delivers."""
        for number, handler in self._before.items():
            if handler not in (None, signal.SIG_IGN):
                signal.signal(number, handler)  # type: ignore[arg-type]
        for number in self.came[:1]:
            if self._raises or self._before[number] not in (signal.default_int_handler, _exit):
                os.kill(os.getpid(), number)


class Termination:
    """Turns SIGTERM into `SystemExit` while one of these is in force, unless the program has its own idea of it."""

    _in_force = 0

    def __init__(self) -> None:
        self._is_mine = _is_main_thread() and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _exit)
        if self._is_mine:
            Termination._in_force += 1
            signal.signal(signal.SIGTERM, _exit)

    def end(self) -> None:
        """Takes it back; the second time it does nothing."""
        if not self._is_mine:
            return
        self._is_mine = False
        Termination._in_force -= 1
        if not Termination._in_force and _is_main_thread() and signal.getsignal(signal.SIGTERM) is _exit:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
