"""Forwards connections from one port of 127.0.0.1 to another: proxy.py PORT TARGET.

A path through it falls silent while it is stopped (SIGSTOP): nothing gets through, and the kernel
keeps the connections open.
"""

import asyncio
import sys


async def forward(reader, writer):
    try:
        while data := await reader.read(1 << 18):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    writer.close()


async def connect(reader, writer):
    far_reader, far_writer = await asyncio.open_connection("127.0.0.1", sys.argv[2])
    await asyncio.gather(forward(reader, far_writer), forward(far_reader, writer))


async def main():
    server = await asyncio.start_server(connect, "127.0.0.1", sys.argv[1])
    await server.serve_forever()


asyncio.run(main())
