"""Requests, and the queues that carry them."""

from __future__ import annotations

import errno
import operator
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._library import Error, check, ffi, lib, make_error, millis
from ._types import Extent

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Maximum number of completions or extents that one call returns.
_ROOM = 128
_OFFSETS = 1 << 64

_new_memory = ffi.new_allocator(should_clear_after_alloc=False)


class Request:
    """Request of the library. Keeps its memory alive until it completes."""

    __slots__ = ("_arguments", "_memory", "_submit", "_what", "completed", "error")

    def __init__(self, what: str, submit: Any, arguments: tuple[Any, ...], memory: Any = None):
        self._what = what
        self._submit = submit
        self._arguments = arguments
        self._memory = memory
        # Called with the request when it ends.
        self.completed: Callable[[Request], None] | None = None
        # Error of a request that has failed.
        self.error: Error | None = None

    def __str__(self) -> str:
        return self._what

    def submit(self, queue: Any, token: int) -> int:
        """Submits the request to a queue of the library. Returns the result of that call."""
        result: int = self._submit(queue, *self._arguments, ffi.cast("void *", token))
        return result

    def complete(self, result: int) -> None:
        """Ends the use of the memory, and stores the error of a negative result."""
        self._memory = None
        self._arguments = ()
        error = None
        if result < 0:
            error = make_error(-result, f"cannot {self}: {os.strerror(-result)}")
        self.end(error)

    def end(self, error: Error | None) -> None:
        """Reports the end of the request, unless already reported."""
        completed, self.completed = self.completed, None
        self.error = error
        if completed is not None:
            completed(self)


class Queue:
    """Queue of the library. One thread at a time uses it."""

    def __init__(self, pointer: Any):
        self._pointer = pointer
        self.depth = check(lib.rtrs_queue_depth(pointer))
        self.io_max = check(lib.rtrs_queue_io_max(pointer))
        self._completions = ffi.new("struct rtrs_completion[]", _ROOM)
        # Requests in flight by their tokens.
        self._inflight: dict[int, Request] = {}
        self._next_token = 1

    def fd(self) -> int:
        """Returns the descriptor that is readable while completions wait."""
        return check(lib.rtrs_queue_fd(self._pointer))

    def set_wait_max(self, seconds: float) -> None:
        """Sets the time limit of the library's blocking calls."""
        check(lib.rtrs_queue_set_wait_max(self._pointer, millis(seconds)))

    def inflight(self) -> list[Request]:
        """Returns the requests without a completion."""
        return list(self._inflight.values())

    def is_idle(self) -> bool:
        """Whether no request is in flight."""
        return not self._inflight

    def has_room(self) -> bool:
        """Whether another request can be submitted."""
        return len(self._inflight) < self.depth

    def submit(self, request: Request) -> None:
        """Submits a request, which is in flight until a poll returns it."""
        token = self._next_token
        self._next_token += 1
        # A signal handler may raise an exception once the library has the request. The request then
        # stays listed, which keeps its memory.
        self._inflight[token] = request
        result = request.submit(self._pointer, token)
        if result < 0:
            del self._inflight[token]
            check(result)

    def poll(self, wanted: int, timeout: float) -> list[Request]:
        """Returns completed requests. Waits until at least `wanted` have completed."""
        completions = self._completions
        count = check(lib.rtrs_poll(self._pointer, wanted, _ROOM, millis(timeout), completions))
        done = []
        for at in range(count):
            token = int(ffi.cast("uintptr_t", completions[at].user_data))
            request = self._inflight.pop(token)
            request.complete(completions[at].result)
            done.append(request)
        return done

    def clear(self) -> None:
        """Drops the requests in flight, whose memory the library no longer uses."""
        self._inflight.clear()

    def extents(self, offset: int, length: int) -> list[Extent]:
        """Returns extents of a range in order from its start, at least the first."""
        found = ffi.new("struct rtrs_extent[]", _ROOM)
        count = check(lib.rtrs_extents(self._pointer, offset, length, found, _ROOM))
        extents = []
        for at in range(count):
            extents.append(Extent(offset, found[at].bytes, bool(found[at].hole)))
            offset += found[at].bytes
        return extents


@dataclass(frozen=True)
class Limits:
    """Limits of the requests of a volume, in bytes."""

    block: int
    io_max: int
    discard_max: int
    zeroes_max: int

    def check(self, offset: int, length: int) -> tuple[int, int]:
        """Returns offset and length as numbers, or raises an error if the range is invalid."""
        offset, length = operator.index(offset), operator.index(length)
        for name, value in (("offset", offset), ("length", length)):
            if value < 0 or value % self.block:
                text = f"{name} {value} is not a multiple of {self.block} bytes"
                raise Error(errno.EINVAL, text)
        if length == 0:
            raise Error(errno.EINVAL, "length 0 is invalid")
        if offset + length > _OFFSETS:
            raise Error(errno.EINVAL, f"a range of {length} bytes at {offset} exceeds 64 bits")
        return offset, length

    def parts(self, offset: int, length: int, longest: int) -> Iterator[tuple[int, int]]:
        """Splits a range into the offsets and lengths of requests."""
        longest = max(longest - longest % self.block, self.block)
        for at in range(offset, offset + length, longest):
            yield at, min(longest, offset + length - at)

    def read(self, memory: Any, offset: int) -> Iterator[Request]:
        """Returns the requests that fill memory from an offset."""
        offset, length = self.check(offset, len(memory))
        for at, part in self.parts(offset, length, self.io_max):
            arguments = (memory + (at - offset), part, at, 0)
            yield Request(f"read {part} bytes at {at}", lib.rtrs_submit_read, arguments, memory)

    def write(self, data: Buffer, offset: int, fua: bool) -> Iterator[Request]:
        """Returns the requests that write the bytes of a buffer to an offset."""
        memory = ffi.from_buffer("char[]", data)
        offset, length = self.check(offset, len(memory))
        # A change to the bytes before the completion would close the path.
        flags = _fua(fua) | (0 if _is_constant(data) else lib.RTRS_COPY)
        for at, part in self.parts(offset, length, self.io_max):
            arguments = (memory + (at - offset), part, at, flags)
            yield Request(f"write {part} bytes at {at}", lib.rtrs_submit_write, arguments, memory)

    def discard(self, offset: int, length: int, fua: bool) -> Iterator[Request]:
        """Returns the requests that discard a range."""
        offset, length = self.check(offset, length)
        for at, part in self.parts(offset, length, self.discard_max):
            arguments = (at, part, _fua(fua))
            yield Request(f"discard {part} bytes at {at}", lib.rtrs_submit_discard, arguments)

    def write_zeroes(self, offset: int, length: int, flags: int) -> Iterator[Request]:
        """Returns the requests that make a range read as zeroes."""
        offset, length = self.check(offset, length)
        for at, part in self.parts(offset, length, self.zeroes_max):
            arguments = (at, part, flags)
            what = f"write {part} zeroes at {at}"
            yield Request(what, lib.rtrs_submit_write_zeroes, arguments)


def flush() -> Iterator[Request]:
    """Returns the request that makes completed writes durable."""
    yield Request("flush", lib.rtrs_submit_flush, (0,))


def zeroes_flags(fua: bool, unmap: bool) -> int:
    """Returns the flags of a write-zeroes request."""
    return _fua(fua) | (0 if unmap else lib.RTRS_NO_UNMAP)


def new_memory(length: int) -> Any:
    """Returns memory for a read. Its content is undefined until the read completes."""
    length = operator.index(length)
    if length < 0:
        raise ValueError(f"length {length} is negative")
    return _new_memory("char[]", length)


def writable(buffer: Buffer) -> Any:
    """Returns the memory of a buffer, which cannot be resized while it is in use."""
    return ffi.from_buffer("char[]", buffer, require_writable=True)


def _fua(fua: bool) -> int:
    return int(lib.RTRS_FUA) if fua else 0


def _is_constant(data: object) -> bool:
    """Whether the bytes of a buffer cannot change."""
    return isinstance(data.obj if isinstance(data, memoryview) else data, bytes)
