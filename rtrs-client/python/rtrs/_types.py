"""Types of the data that the library reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ._library import decode, lib


@dataclass(frozen=True)
class Geometry:
    """Size, limits and capabilities of a volume; sizes and limits are in bytes."""

    size: int
    # Offsets and lengths are multiples of the block size.
    block_size: int
    # Block size that the server prefers.
    physical_block_size: int
    # Maximum length of a read, write, discard and write zeroes request. Longer calls issue several.
    io_max: int
    discard_max: int
    zeroes_max: int
    read_only: bool
    # Whether completed writes need a flush to be durable.
    write_cache: bool
    has_fua: bool
    has_discard: bool
    has_write_zeroes: bool
    has_extents: bool


def geometry(found: Any) -> Geometry:
    """Converts a struct rtrs_geometry."""
    flags = found.flags
    return Geometry(
        size=found.size,
        block_size=found.logical_block,
        physical_block_size=found.physical_block,
        io_max=found.io_max,
        discard_max=found.discard_max,
        zeroes_max=found.zeroes_max,
        read_only=bool(flags & lib.RTRS_READ_ONLY),
        write_cache=bool(flags & lib.RTRS_WRITE_CACHE),
        has_fua=bool(flags & lib.RTRS_HAS_FUA),
        has_discard=bool(flags & lib.RTRS_HAS_DISCARD),
        has_write_zeroes=bool(flags & lib.RTRS_HAS_ZEROES),
        has_extents=bool(flags & lib.RTRS_HAS_EXTENTS),
    )


@dataclass(frozen=True)
class OpStats:
    """Counters of an operation: finished requests, bytes of successful ones, failed requests."""

    count: int
    bytes: int
    errors: int


@dataclass(frozen=True)
class Stats:
    """Counters of a volume since it was opened, over all queues."""

    read: OpStats
    write: OpStats
    flush: OpStats
    discard: OpStats
    write_zeroes: OpStats
    extents: OpStats
    # Requests that have not finished.
    inflight: int
    paths: int
    paths_connected: int
    # Requests that moved to another path or were repeated, because this path failed.
    failovers: int
    # Requests over RDMA whose data was copied.
    bounced: int


def stats(found: Any) -> Stats:
    """Converts a struct rtrs_stats."""

    def op(name: str) -> OpStats:
        one = getattr(found, name)
        return OpStats(one.count, one.bytes, one.errors)

    return Stats(
        read=op("read"),
        write=op("write"),
        flush=op("flush"),
        discard=op("discard"),
        write_zeroes=op("write_zeroes"),
        extents=op("extents"),
        inflight=found.inflight,
        paths=found.paths,
        paths_connected=found.paths_connected,
        failovers=found.failovers,
        bounced=found.bounced,
    )


@dataclass(frozen=True)
class Extent:
    """Range of a volume that is allocated, or a hole that reads as zeroes."""

    offset: int
    length: int
    hole: bool


@dataclass(frozen=True)
class Resized:
    """The volume has a new size."""

    size: int


@dataclass(frozen=True)
class ReadOnly:
    """The volume has become read-only, or writable again."""

    read_only: bool


@dataclass(frozen=True)
class Paths:
    """The number of connected paths has changed."""

    connected: int
    total: int


@dataclass(frozen=True)
class Failed:
    """The volume no longer serves IO."""

    reason: str


Event = Resized | ReadOnly | Paths | Failed


def event(found: Any) -> Event | None:
    """Converts a struct rtrs_event. Returns None for types of later versions of the library."""
    if found.type == lib.RTRS_EVENT_RESIZED:
        return Resized(found.value)
    if found.type == lib.RTRS_EVENT_READ_ONLY:
        return ReadOnly(bool(found.value))
    if found.type == lib.RTRS_EVENT_PATHS:
        return Paths(found.value, found.total)
    if found.type == lib.RTRS_EVENT_FAILED:
        return Failed(decode(found.text))
    return None
