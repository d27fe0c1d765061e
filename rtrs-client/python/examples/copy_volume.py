#!/usr/bin/env python3
"""Copies a volume to one of the same or a larger size, and verifies the copy."""

import asyncio
import sys

import rtrs.aio

PIECE, IN_FLIGHT = 1 << 20, 16


async def each_piece(what, size, call):
    """Calls a coroutine for each piece, with several in flight, and shows a progress bar."""

    async def work():
        for at in pieces:
            await call(at, min(PIECE, size - at))
            print(f"\r{what} [{'#' * (30 * at // size):30}]", end="", file=sys.stderr)

    pieces = iter(range(0, size, PIECE))
    await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))
    print(f"\r{what} [{'#' * 30}]", file=sys.stderr)


async def main(source_uri, target_uri):
    async with (
        await rtrs.aio.Volume.open(source_uri, access="ro") as source,
        await rtrs.aio.Volume.open(target_uri, access="rw") as target,
    ):

        async def copy(at, length):
            await target.pwrite(await source.pread(at, length), at)

        async def verify(at, length):
            if await source.pread(at, length) != await target.pread(at, length):
                sys.exit(f"the copy differs between {at} and {at + length}")

        await each_piece("copy  ", source.size, copy)
        await target.flush()
        await each_piece("verify", source.size, verify)
        print(f"copied {source.size} bytes")


if len(sys.argv) != 3:
    sys.exit("usage: copy_volume.py SOURCE-URI TARGET-URI")
asyncio.run(main(*sys.argv[1:]))
