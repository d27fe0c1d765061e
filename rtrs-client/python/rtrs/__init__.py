"""Volumes of rtrs-server in a Python program, over the C library librtrs.

    with rtrs.Volume.open("tcp://10.0.0.2/vol0") as volume:
        volume.pwrite(b"hello".ljust(4096), 0, fua=True)
        print(volume.size, volume.pread(0, 4096))

The module rtrs.aio provides the same for asyncio, with many requests in flight. The library is
loaded from RTRS_LIBRARY if set, otherwise by its name, librtrs.so.0.
"""

from ._library import Error, PermissionDenied, TimedOut, library_version
from ._types import Event, Extent, Failed, Geometry, OpStats, Paths, ReadOnly, Resized, Stats
from ._volume import Volume

__all__ = [
    "Error",
    "Event",
    "Extent",
    "Failed",
    "Geometry",
    "OpStats",
    "Paths",
    "PermissionDenied",
    "ReadOnly",
    "Resized",
    "Stats",
    "TimedOut",
    "Volume",
    "library_version",
]
