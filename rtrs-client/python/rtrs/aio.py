"""Volumes for asyncio: many requests in flight from one thread."""

from __future__ import annotations

import asyncio
import errno
import functools
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from . import _requests
from ._handle import Handle, Setting, closed
from ._library import Error, check_time, ffi
from ._requests import Queue, Request
from ._types import Event, Extent
from ._volume import EXTENTS_MAX, GRACE, BaseVolume

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Seconds for which a thread waits for an event. A canceled wait ends within this time.
_SLICE = 1.0
# Longest wait for the completions of a closed volume, in seconds.
_DRAIN_MAX = 10.0

_T = TypeVar("_T")


class _Ring:
    """Queue of a volume in an event loop."""

    def __init__(self, handle: Handle, queue: Queue, loop: asyncio.AbstractEventLoop):
        self._handle = handle
        self.queue = queue
        self._loop = loop
        # A duplicate, since the loop may still be watching it after the library has closed its own.
        self._fd: int | None = os.dup(queue.fd())
        self._is_watched = False
        # Call that uses the queue in a thread. Meanwhile the loop does not touch the queue.
        self.busy: asyncio.Future[list[Extent]] | None = None
        self.idle = asyncio.Event()

    async def turn(self) -> None:
        """Waits until the loop may use the queue."""
        while self.busy is not None:
            await asyncio.wait([self.busy])

    def submit(self, request: Request) -> None:
        """Submits a request, and watches for its completion."""
        with self._handle:
            self.queue.submit(request)
        self.idle.clear()
        self._watch()

    def _watch(self) -> None:
        if not self._is_watched and self._fd is not None:
            self._loop.add_reader(self._fd, self._take)
            self._is_watched = True

    def _ignore(self) -> None:
        if self._is_watched and self._fd is not None:
            self._is_watched = False
            if not self._loop.is_closed():
                self._loop.remove_reader(self._fd)

    def _take(self) -> None:
        """Takes completions."""
        try:
            done = self._poll()
        except Error as error:
            self.fail(error)
            return
        if self.queue.is_idle():
            self.idle.set()
            if not done:
                # The descriptor of an ended session is always readable.
                self._ignore()

    def _poll(self) -> list[Request]:
        if not self._handle.begin_poll():
            return []
        try:
            return self.queue.poll(0, 0)
        finally:
            self._handle.end_call()

    def fail(self, error: Error) -> None:
        """Ends all waits with an error. The memory of the requests stays with the queue."""
        self._ignore()
        self.idle.set()
        for request in self.queue.inflight():
            request.end(error)

    def run(self, call: Callable[[], list[Extent]]) -> asyncio.Future[list[Extent]]:
        """Runs a blocking call on the queue in a thread."""
        self._ignore()
        self.busy = self._loop.run_in_executor(None, call)
        self.busy.add_done_callback(self._resume)
        return self.busy

    def _resume(self, ended: asyncio.Future[list[Extent]]) -> None:
        self.busy = None
        self._watch()
        if not ended.cancelled():
            # The caller may have been canceled. This marks the error as retrieved.
            ended.exception()

    def is_open(self) -> bool:
        """Whether the descriptor is open."""
        return self._fd is not None

    def stop(self) -> None:
        """Closes the descriptor."""
        self._ignore()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _finish(
    free: asyncio.Queue[_Ring], ring: _Ring, ended: asyncio.Future[Error | None], request: Request
) -> None:
    """Passes the result of a request on to its coroutine, unless that was canceled."""
    free.put_nowait(ring)
    if not ended.done():
        ended.set_result(request.error)


class Volume(BaseVolume):
    """Open volume whose calls are coroutines, for the event loop in which it was opened.

    Offsets and lengths are multiples of the block size. Calls run concurrently, with at most as
    many requests as the queues take (settings queues and queue_depth); further calls wait. A
    canceled call may still take effect: its buffer stays in use until the server answers, or the
    volume is closed.
    """

    def __init__(self, handle: Handle, loop: asyncio.AbstractEventLoop):
        super().__init__(handle)
        self._loop = loop
        self._rings = [_Ring(handle, queue, loop) for queue in handle.queues]
        # A ring for each request that can be submitted, alternating between the rings.
        self._free: asyncio.Queue[_Ring] = asyncio.Queue()
        for at in range(max(ring.queue.depth for ring in self._rings)):
            for ring in self._rings:
                if at < ring.queue.depth:
                    self._free.put_nowait(ring)
        self._events: deque[Event] = deque()
        self._watching: asyncio.Future[Event | None] | None = None
        self._closing: asyncio.Task[int] | None = None

    @classmethod
    async def open(cls, uri: str, /, **settings: Setting) -> Self:
        """Opens the volume of a URI, with settings of a session and queues, queue_depth, io_max and
        retry_for.
        """
        loop = asyncio.get_running_loop()
        return cls(await loop.run_in_executor(None, Handle, uri, settings), loop)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self, grace: float = GRACE) -> int:
        """Ends the session and frees the volume. Requests in flight have the grace time, in
        seconds, to finish, and then fail; they may still take effect. Returns the number of these
        requests. Does not flush. Takes at most 60 seconds longer than the grace time.
        """
        check_time(grace)
        if self._handle.begin_close():
            self._closing = self._loop.create_task(self._close(grace))
        if self._closing is None:
            return 0
        return await asyncio.shield(self._closing)

    async def _close(self, grace: float) -> int:
        try:
            return await self._loop.run_in_executor(None, self._handle.end_session, grace)
        finally:
            for ring in self._rings:
                await self._drain(ring)
                ring.stop()
            await self._loop.run_in_executor(None, self._handle.free)

    async def _drain(self, ring: _Ring) -> None:
        """Waits for the completions of a ring after the end of the session."""
        await ring.turn()
        if not ring.queue.is_idle():
            try:
                await asyncio.wait_for(ring.idle.wait(), _DRAIN_MAX)
            except TimeoutError:
                ring.fail(Error(errno.ECONNABORTED, "the volume was closed"))

    def _abandon(self) -> None:
        self._handle.abandon()
        for ring in filter(_Ring.is_open, self._rings):
            try:
                self._loop.call_soon_threadsafe(ring.stop)
            except RuntimeError:
                # The loop is closed, and watches nothing.
                ring.stop()

    async def pread(self, offset: int, length: int) -> bytes:
        """Returns bytes of the volume."""
        memory = _requests.new_memory(length)
        await self._run(self._handle.limits.read(memory, offset))
        return bytes(ffi.buffer(memory))

    async def pread_into(self, buffer: Buffer, offset: int) -> None:
        """Fills a writable buffer from the volume."""
        await self._run(self._handle.limits.read(_requests.writable(buffer), offset))

    async def pwrite(self, data: Buffer, offset: int, *, fua: bool = False) -> None:
        """Writes all bytes of a buffer. They are durable after a flush, or immediately with fua.
        A bytes object is sent in place; other buffers are copied first.
        """
        await self._run(self._handle.limits.write(data, offset, fua))

    async def flush(self) -> None:
        """Makes all previously completed writes durable."""
        await self._run(_requests.flush())

    async def discard(self, offset: int, length: int, *, fua: bool = False) -> None:
        """Discards the content of a range, which may read as anything afterwards."""
        await self._run(self._handle.limits.discard(offset, length, fua))

    async def write_zeroes(
        self, offset: int, length: int, *, fua: bool = False, unmap: bool = True
    ) -> None:
        """Makes a range read as zeroes. Without unmap, its space stays allocated."""
        flags = _requests.zeroes_flags(fua, unmap)
        await self._run(self._handle.limits.write_zeroes(offset, length, flags))

    async def extents(self, offset: int = 0, length: int | None = None) -> AsyncIterator[Extent]:
        """Yields the extents of a range, or of the rest of the volume. The queue that finds
        them runs no other requests meanwhile.
        """
        end = self._end(offset, length)
        while offset < end:
            found = await self._extents(offset, min(end - offset, EXTENTS_MAX))
            for extent in found:
                yield extent
            offset = found[-1].offset + found[-1].length

    async def _extents(self, offset: int, length: int) -> list[Extent]:
        part = self._handle.limits.check(offset, length)
        ring = await self._take_ring()
        try:

            def call() -> list[Extent]:
                with self._handle:
                    return ring.queue.extents(*part)

            running = ring.run(call)
            await asyncio.wait([running])
            return running.result()
        finally:
            self._free.put_nowait(ring)

    async def next_event(self, timeout: float) -> Event | None:
        """Returns the next change of the volume, or None if there is none within this time or the
        session has ended. The last 256 changes are kept.
        """
        if self.closed:
            raise closed()
        check_time(timeout)
        end = self._loop.time() + timeout
        left = timeout
        while not self._events:
            if self._watching is None:
                call = functools.partial(self._handle.next_event, min(left, _SLICE))
                self._watching = self._loop.run_in_executor(None, call)
                self._watching.add_done_callback(self._note_event)
            watching = self._watching
            await asyncio.wait([watching])
            left = end - self._loop.time()
            if self.closed or (left <= 0 and not self._events):
                return None
            if watching.exception() is not None:
                return watching.result()
        return self._events.popleft()

    def _note_event(self, ended: asyncio.Future[Event | None]) -> None:
        """Keeps an event, even if its waiter has been canceled."""
        self._watching = None
        if not ended.cancelled() and ended.exception() is None:
            found = ended.result()
            if found is not None:
                self._events.append(found)

    async def _take_ring(self) -> _Ring:
        """Waits until a request can be submitted to a ring."""
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("the volume belongs to another event loop")
        ring = await self._free.get()
        try:
            await ring.turn()
        except asyncio.CancelledError:
            self._free.put_nowait(ring)
            raise
        return ring

    async def _start(self, request: Request) -> asyncio.Future[Error | None]:
        """Submits a request. The result of the future is its error."""
        ring = await self._take_ring()
        ended: asyncio.Future[Error | None] = self._loop.create_future()
        request.completed = functools.partial(_finish, self._free, ring, ended)
        try:
            ring.submit(request)
        except BaseException:
            self._free.put_nowait(ring)
            raise
        return ended

    async def _run(self, requests: Iterable[Request]) -> None:
        """Runs requests concurrently to completion. Raises the first error."""
        started: list[asyncio.Future[Error | None]] = []
        error: OSError | ValueError | None = None
        for request in requests:
            try:
                started.append(await self._start(request))
            except (OSError, ValueError) as refused:
                error = refused
                break
            if started[0].done() and started[0].result() is not None:
                break
        if len(started) > 1:
            await asyncio.wait(started)
        for ended in reversed(started):
            error = await ended or error
        try:
            if error is not None:
                raise error
        finally:
            # The traceback references this frame, which would keep the volume and the buffer alive.
            del error
