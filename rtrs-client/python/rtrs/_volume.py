"""Volumes with blocking calls."""

from __future__ import annotations

import errno
import queue
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self

from . import _requests
from ._handle import Handle, Setting, closed
from ._library import Error, TimedOut, check_time, ffi
from ._requests import Queue, Request
from ._types import Event, Extent, Geometry, Stats

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Seconds for which a call stays within the library, where no Python signal handler runs.
_SLICE = 0.2
# Longest range of one request for extents.
EXTENTS_MAX = 1 << 30
# Seconds allowed for requests in flight to finish when a volume is closed.
GRACE = 10.0


class BaseVolume:
    """Properties and lifetime of a volume."""

    def __init__(self, handle: Handle):
        self._handle = handle

    def __del__(self) -> None:
        # Without a handle, the volume was not opened.
        if hasattr(self, "_handle") and self._handle.is_mine():
            self._abandon()

    def _abandon(self) -> None:
        """Ends the session of a volume that was not closed."""
        self._handle.abandon()

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__qualname__} {self._handle.uri}>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        name = type(self).__qualname__
        raise TypeError(f"cannot pickle an open {name}: open it in the process that uses it")

    @property
    def geometry(self) -> Geometry:
        """Current size, limits and capabilities."""
        return self._handle.geometry()

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.geometry.size

    @property
    def block_size(self) -> int:
        """Logical block size: offsets and lengths are multiples of it."""
        return self.geometry.block_size

    @property
    def read_only(self) -> bool:
        """Whether writes are refused."""
        return self.geometry.read_only

    @property
    def identity(self) -> str | None:
        """Identity of server and export, in the form of the setting identity."""
        return self._handle.identity()

    @property
    def stats(self) -> Stats:
        """Counters since the volume was opened. Waits up to two seconds for its IO threads."""
        return self._handle.stats()

    @property
    def closed(self) -> bool:
        """Whether the volume is closed."""
        return self._handle.is_closed

    def _end(self, offset: int, length: int | None) -> int:
        """Returns the end of a range; without a length, that of the volume."""
        if length is None:
            return self.size
        return sum(self._handle.limits.check(offset, length))


class Volume(BaseVolume):
    """Open volume with blocking calls.

    Offsets and lengths are multiples of the block size. Several threads can use a volume. Each of
    their calls takes a queue; threads beyond the number of queues (setting queues) wait.
    """

    def __init__(self, handle: Handle, wait_max: float):
        super().__init__(handle)
        self._wait_max = wait_max
        self._queues: queue.SimpleQueue[Queue] = queue.SimpleQueue()
        for one in handle.queues:
            one.set_wait_max(wait_max)
            self._queues.put(one)

    @classmethod
    def open(cls, uri: str, /, *, wait_max: float = 300.0, **settings: Setting) -> Self:
        """Opens the volume of a URI, with settings of a session and queues, queue_depth, io_max and
        retry_for. A call whose requests are not answered within wait_max seconds fails with
        TimedOut; they may still take effect.
        """
        return cls(Handle(uri, settings), wait_max)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self, grace: float = GRACE) -> int:
        """Ends the session and frees the volume. Calls of other threads have the grace time, in
        seconds, to finish, and then fail; their requests may still take effect. Returns the number
        of these requests. Does not flush. Takes at most 60 seconds longer than the grace time.
        """
        return self._handle.close(grace)

    def pread(self, offset: int, length: int) -> bytes:
        """Returns bytes of the volume."""
        memory = _requests.new_memory(length)
        self._run(self._handle.limits.read(memory, offset))
        return bytes(ffi.buffer(memory))

    def pread_into(self, buffer: Buffer, offset: int) -> None:
        """Fills a writable buffer from the volume. After TimedOut the buffer may still be written
        to, and a bytearray cannot be resized, until the server answers or the volume is closed.
        """
        self._run(self._handle.limits.read(_requests.writable(buffer), offset))

    def pwrite(self, data: Buffer, offset: int, *, fua: bool = False) -> None:
        """Writes all bytes of a buffer. They are durable after a flush, or immediately with fua."""
        self._run(self._handle.limits.write(data, offset, fua))

    def flush(self) -> None:
        """Makes all previously completed writes durable."""
        self._run(_requests.flush())

    def discard(self, offset: int, length: int, *, fua: bool = False) -> None:
        """Discards the content of a range, which may read as anything afterwards."""
        self._run(self._handle.limits.discard(offset, length, fua))

    def write_zeroes(
        self, offset: int, length: int, *, fua: bool = False, unmap: bool = True
    ) -> None:
        """Makes a range read as zeroes. Without unmap, its space stays allocated."""
        flags = _requests.zeroes_flags(fua, unmap)
        self._run(self._handle.limits.write_zeroes(offset, length, flags))

    def extents(self, offset: int = 0, length: int | None = None) -> Iterator[Extent]:
        """Yields the extents of a range, or of the volume from the offset on."""
        end = self._end(offset, length)
        while offset < end:
            part = self._handle.limits.check(offset, min(end - offset, EXTENTS_MAX))
            with self._handle, self._queue() as one:
                found = one.extents(*part)
            yield from found
            offset = found[-1].offset + found[-1].length

    def next_event(self, timeout: float = 0.0) -> Event | None:
        """Returns the next change of the volume, or None if there is none within this time or the
        session has ended. The last 256 changes are kept.
        """
        check_time(timeout)
        end = time.monotonic() + timeout
        while True:
            left = end - time.monotonic()
            found = self._handle.next_event(max(min(left, _SLICE), 0.0))
            if found is not None or left <= _SLICE:
                return found

    @contextmanager
    def _queue(self) -> Iterator[Queue]:
        """Takes a queue for a call."""
        try:
            one = self._queues.get(timeout=self._wait_max)
        except queue.Empty:
            text = f"other threads have used all queues for {self._wait_max} s"
            raise TimedOut(errno.ETIMEDOUT, text) from None
        try:
            yield one
        finally:
            self._queues.put(one)

    def _run(self, requests: Iterable[Request]) -> None:
        """Runs requests to completion. Raises the first error."""
        with self._handle, self._queue() as one:
            error = _run_on(one, iter(requests), self._wait_max)
        try:
            if error is not None and error.errno == errno.ESHUTDOWN and self.closed:
                raise closed() from error
            if error is not None:
                raise error
        finally:
            # The traceback references this frame, which would keep the volume and the buffer alive.
            del error


def _run_on(one: Queue, requests: Iterator[Request], wait_max: float) -> Error | None:
    """Runs requests on a queue. Returns the first error once none of them is in flight."""
    waiting: set[Request] = set()
    error: Error | None = None
    following = next(requests, None)
    answered = time.monotonic()
    while following is not None or waiting:
        while following is not None and one.has_room():
            try:
                one.submit(following)
            except Error as refused:
                error, following = error or refused, None
                break
            waiting.add(following)
            following = next(requests, None)
        # Requests of earlier calls that timed out may complete here, too.
        done = waiting.intersection(one.poll(1, _SLICE))
        waiting -= done
        for request in done:
            if request.error is not None:
                error, following = error or request.error, None
        now = time.monotonic()
        if done:
            answered = now
        elif now - answered > wait_max:
            text = f"cannot {next(iter(waiting), following)}: no answer within {wait_max} s"
            return TimedOut(errno.ETIMEDOUT, text)
    return error
