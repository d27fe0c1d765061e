"""Open volumes of the library, from their opening until they are freed."""

from __future__ import annotations

import atexit
import enum
import errno
import os
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

from ._library import Error, check, check_time, decode, ffi, lib, make_error, millis
from ._requests import Limits, Queue
from ._types import Event, Geometry, Stats, event, geometry, stats

Value = str | int | bool | os.PathLike[str]
# Value of a volume's setting: a sequence for a setting that may be repeated, None for the default.
Setting = Value | Sequence[Value] | None

_IDENTITY_MAX = 1024
# Maximum time until calls return after their session has ended, in seconds.
_CALLS_END_MAX = 30.0


class _State(enum.Enum):
    OPEN = enum.auto()
    CLOSING = enum.auto()
    FREED = enum.auto()


# All volumes, and the volumes that the library could not free.
_handles: weakref.WeakSet[Handle] = weakref.WeakSet()
_unfreed: list[Handle] = []


def closed() -> ValueError:
    """Returns the exception for the use of a closed volume."""
    return ValueError("the volume is closed")


def _encode(name: str, value: Value) -> bytes:
    """Returns the text of a setting for the library."""
    if isinstance(value, bool):
        return b"true" if value else b"false"
    if isinstance(value, int):
        return str(value).encode()
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name}={value!r}: use a string, a number or a list of strings")
    text = os.fspath(value)
    if "\0" in text:
        raise ValueError(f"{name}={text!r}: a NUL character is not allowed")
    return text.encode()


def _values(setting: Setting) -> Sequence[Value]:
    """Returns the values of a setting, each of which is set in turn."""
    if setting is None:
        return []
    if isinstance(setting, (str, int, os.PathLike)) or not isinstance(setting, Sequence):
        return [setting]
    return setting


def _open(uri: str, settings: dict[str, Setting]) -> Any:
    """Returns the pointer of a new volume."""
    options = ffi.new("rtrs_options **")
    volume = ffi.new("rtrs_volume **")
    check(lib.rtrs_options_from_uri(_encode("uri", uri), options))
    try:
        for key, setting in settings.items():
            name = key.replace("_", "-")
            for value in _values(setting):
                check(lib.rtrs_options_set(options[0], name.encode(), _encode(key, value)))
        check(lib.rtrs_open(options[0], volume))
    finally:
        lib.rtrs_options_free(options[0])
    return volume[0]


class Handle:
    """Open volume of the library. As a context manager, it stays open during a call on it."""

    def __init__(self, uri: str, settings: dict[str, Setting]):
        self._changed = threading.Condition()
        self._calls = 0
        self._state = _State.FREED
        self._process = os.getpid()
        self.uri = uri
        self.queues: list[Queue] = []
        self._pointer = _open(uri, settings)
        self._state = _State.OPEN
        _handles.add(self)
        self.queues = [self._queue(at) for at in range(check(lib.rtrs_queue_count(self._pointer)))]
        found = self.geometry()
        io_max = min(found.io_max, *(queue.io_max for queue in self.queues))
        self.limits = Limits(found.block_size, io_max, found.discard_max, found.zeroes_max)

    def __del__(self) -> None:
        self.abandon()

    def _queue(self, index: int) -> Queue:
        pointer = ffi.new("rtrs_queue **")
        check(lib.rtrs_get_queue(self._pointer, index, pointer))
        return Queue(pointer[0])

    # ---- Calls ----

    def check_process(self) -> None:
        """Fails in a child of the process that opened the volume."""
        if not self.is_mine():
            # Locks may be held forever here. The library refuses a call without taking any.
            check(lib.rtrs_queue_count(self._pointer))

    def __enter__(self) -> Handle:
        self.check_process()
        with self._changed:
            if self._state is not _State.OPEN:
                raise closed()
            self._calls += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.end_call()

    def end_call(self) -> None:
        """Ends a call that has begun."""
        with self._changed:
            self._calls -= 1
            if self._calls == 0:
                self._changed.notify_all()

    def begin_poll(self) -> bool:
        """Begins a call that takes completions. Returns false once the volume is being freed."""
        self.check_process()
        with self._changed:
            if self._state is _State.FREED:
                return False
            self._calls += 1
        return True

    def is_mine(self) -> bool:
        """Whether this process has opened the volume."""
        return self._process == os.getpid()

    @property
    def is_closed(self) -> bool:
        """Whether the volume has been closed, or is being closed."""
        return self._state is not _State.OPEN

    def geometry(self) -> Geometry:
        """Returns the current size, limits and capabilities."""
        with self:
            found = ffi.new("struct rtrs_geometry *")
            check(lib.rtrs_get_geometry(self._pointer, found, ffi.sizeof(found[0])))
            return geometry(found)

    def identity(self) -> str | None:
        """Returns the identity of the server and the export, or None if the server reports none."""
        with self:
            text = ffi.new("char[]", _IDENTITY_MAX)
            check(lib.rtrs_get_identity(self._pointer, text, _IDENTITY_MAX))
            return decode(text) or None

    def stats(self) -> Stats:
        """Returns the counters."""
        with self:
            found = ffi.new("struct rtrs_stats *")
            check(lib.rtrs_get_stats(self._pointer, found, ffi.sizeof(found[0])))
            return stats(found)

    def next_event(self, timeout: float) -> Event | None:
        """Returns the next event, or None if none occurs within the timeout."""
        end = time.monotonic() + timeout
        found = ffi.new("struct rtrs_event *")
        while True:
            left = max(end - time.monotonic(), 0.0)
            with self:
                size = ffi.sizeof(found[0])
                count = check(lib.rtrs_next_event(self._pointer, millis(left), found, size))
            known = event(found) if count else None
            if known is not None or count == 0:
                return known

    # ---- End ----

    def begin_close(self) -> bool:
        """Refuses new calls. Returns false if the volume is closed, or another call is closing it.
        Otherwise, the caller has to end the session and free the volume.
        """
        self.check_process()
        with self._changed:
            if self._state is not _State.OPEN:
                return False
            self._state = _State.CLOSING
        return True

    def end_session(self, grace: float) -> int:
        """Ends the session. Returns the number of requests that did not finish in time."""
        return check(lib.rtrs_close(self._pointer, millis(grace)))

    def close(self, grace: float) -> int:
        """Ends the session and frees the volume. Returns the number of requests that did not finish
        in time, or 0 if the volume is closed.
        """
        check_time(grace)
        if not self.begin_close():
            return 0
        try:
            return self.end_session(grace)
        finally:
            self.free()

    def free(self) -> None:
        """Frees a volume whose session has ended, after the last call on it. If the library still
        uses memory of requests, that memory stays, and the next volume that is freed tries again.
        """
        with self._changed:
            self._state = _State.FREED
            if not self._changed.wait_for(lambda: self._calls == 0, _CALLS_END_MAX):
                _unfreed.append(self)
                text = f"cannot free the volume: {self._calls} calls on it do not return"
                raise make_error(errno.EBUSY, text)
        _retry_unfreed()
        try:
            check(lib.rtrs_free(self._pointer))
        except Error:
            _unfreed.append(self)
            raise
        self._release_memory()

    def _release_memory(self) -> None:
        """Ends the use of the memory of requests that have not completed."""
        for queue in self.queues:
            queue.clear()

    def abandon(self) -> None:
        """Closes a volume that was not closed and has no more users."""
        if not self.is_closed and self.is_mine():
            text = f"the volume {self.uri} was not closed"
            warnings.warn(text, ResourceWarning, source=self, stacklevel=2)
            self.close_at_once()

    def close_at_once(self) -> None:
        """Ends the session immediately and frees the volume. A failure only causes a warning."""
        try:
            self.close(0)
        except OSError as error:
            warnings.warn(f"closing a volume: {error}", ResourceWarning, stacklevel=2)


def _retry_unfreed() -> None:
    """Tries again to free the volumes that could not be freed."""
    for handle in list(_unfreed):
        # While the library fails, the volume stays listed, which keeps the memory of its requests.
        if handle._calls == 0 and lib.rtrs_free(handle._pointer) == 0:
            _unfreed.remove(handle)
            handle._release_memory()


@atexit.register
def _close_all() -> None:
    for handle in list(_handles):
        if handle.is_mine():
            handle.close_at_once()
