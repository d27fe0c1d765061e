"""Volumes for asyncio."""

import asyncio
import errno
import functools
import gc
import weakref

import pytest
import rtrs
import rtrs.aio
from conftest import LONG, MIB, descriptors, pattern, wait_for


def run(test):
    """Turns a coroutine into a test with a time limit."""

    @functools.wraps(test)
    def body(**fixtures):
        async def bounded():
            async with asyncio.timeout(LONG):
                await test(**fixtures)

        asyncio.run(bounded())

    return body


def inflight(volume):
    """Returns the number of requests in flight."""
    return sum(len(queue.inflight()) for queue in volume._handle.queues)


async def wait_until(what, check):
    """Polls until a check returns true; fails after a long time."""
    end = asyncio.get_running_loop().time() + LONG
    while not check():
        assert asyncio.get_running_loop().time() < end, f"no {what} within {LONG} s"
        await asyncio.sleep(0.01)


@run
async def test_operations(server):
    async with await rtrs.aio.Volume.open(server.uri()) as volume:
        assert volume.size == 64 * MIB and not volume.read_only
        data = pattern(3 * MIB)
        await volume.pwrite(data, 512, fua=True)
        await volume.pwrite(bytearray(data), 8 * MIB)
        await volume.flush()
        assert await volume.pread(512, len(data)) == data
        buffer = bytearray(len(data))
        await volume.pread_into(buffer, 8 * MIB)
        assert buffer == data
        await volume.write_zeroes(0, 4096)
        assert await volume.pread(0, 4096) == bytes(4096)
        await volume.discard(0, volume.size)
    assert volume.closed


@pytest.mark.parametrize("settings", [{}, {"queue_depth": 2}, {"queues": 2, "queue_depth": 4}])
def test_many_requests_are_in_flight(server, settings):
    @run
    async def body():
        async with await rtrs.aio.Volume.open(server.uri(), **settings) as volume:
            data = [pattern(4096, seed) for seed in range(300)]
            await asyncio.gather(*(volume.pwrite(one, at * 4096) for at, one in enumerate(data)))
            read = await asyncio.gather(*(volume.pread(at * 4096, 4096) for at in range(300)))
            assert read == data

    body()


@run
async def test_a_buffer_may_change_after_the_submission(server):
    async with await rtrs.aio.Volume.open(server.uri()) as volume:
        # More than the sockets hold.
        data = pattern(32 * MIB)
        server.stop()
        buffer = bytearray(data)
        write = asyncio.create_task(volume.pwrite(buffer, 0))
        await wait_until("requests", lambda: inflight(volume) == 32)
        buffer[:] = bytes(len(data))
        server.resume()
        await write
        assert await volume.pread(0, len(data)) == data


@run
async def test_errors(server):
    async with await rtrs.aio.Volume.open(server.uri()) as volume:
        with pytest.raises(rtrs.Error, match="offset 100"):
            await volume.pread(100, 512)
        with pytest.raises(rtrs.Error, match="cannot read 512 bytes at 67108864"):
            await volume.pread(64 * MIB, 512)
        with pytest.raises(rtrs.Error, match="cannot write"):
            await volume.pwrite(bytes(4 * MIB), 63 * MIB)
        with pytest.raises(BufferError):
            await volume.pread_into(bytes(512), 0)
        await volume.flush()
    for call in (lambda: volume.pread(0, 512), lambda: volume.next_event(0), volume.flush):
        with pytest.raises(ValueError, match="the volume is closed"):
            await call()
    assert await volume.close() == 0
    with pytest.raises(rtrs.Error, match="ENOENT"):
        await rtrs.aio.Volume.open(server.uri("none"))


@run
async def test_a_canceled_read_keeps_its_buffer(server):
    async with await rtrs.aio.Volume.open(server.uri()) as volume:
        await volume.pwrite(pattern(512), 0)
        server.stop()
        buffer = bytearray(512)
        read = asyncio.create_task(volume.pread_into(buffer, 0))
        await wait_until("request", lambda: inflight(volume) == 1)
        read.cancel()
        with pytest.raises(asyncio.CancelledError):
            await read
        del read
        gc.collect()
        assert inflight(volume) == 1
        with pytest.raises(BufferError):
            buffer.append(0)
        server.resume()
        await wait_until("completion", lambda: inflight(volume) == 0)
        assert buffer == pattern(512)
        buffer.append(0)


@run
async def test_canceled_requests_make_room(server):
    async with await rtrs.aio.Volume.open(server.uri(), queue_depth=2) as volume:
        server.stop()
        reads = [asyncio.create_task(volume.pread(0, 512)) for _ in range(6)]
        await wait_until("requests", lambda: inflight(volume) == 2)
        for read in reads:
            read.cancel()
        done = await asyncio.gather(*reads, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in done)
        server.resume()
        assert await volume.pread(0, 512) == bytes(512)


@run
async def test_a_close_ends_requests_in_flight(server):
    volume = await rtrs.aio.Volume.open(server.uri(), queue_depth=2)
    server.stop()
    reads = [asyncio.create_task(volume.pread(0, 512)) for _ in range(5)]
    await wait_until("requests", lambda: inflight(volume) == 2)
    assert await volume.close(0.05) == 2
    done = await asyncio.gather(*reads, return_exceptions=True)
    aborted = [one for one in done if isinstance(one, rtrs.Error)]
    assert [one.errno for one in aborted] == [errno.ECONNABORTED] * 2
    assert sum(isinstance(one, ValueError) for one in done) == 3


@run
async def test_extents_run_beside_other_requests(server):
    async with await rtrs.aio.Volume.open(server.uri(), queue_depth=8) as volume:
        await volume.discard(0, volume.size)
        await volume.pwrite(pattern(MIB), 8 * MIB)

        async def find():
            return [extent async for extent in volume.extents()]

        async def use(seed):
            for _ in range(20):
                await volume.pwrite(pattern(4096, seed), 8 * MIB + seed * 4096)
                assert await volume.pread(8 * MIB + seed * 4096, 4096) == pattern(4096, seed)

        lists = asyncio.gather(*(find() for _ in range(8)))
        await asyncio.gather(*(use(seed) for seed in range(16)))
        for extents in await lists:
            assert extents[0].offset == 0
            assert sum(extent.length for extent in extents) == volume.size
            assert any(not extent.hole for extent in extents)


@run
async def test_a_late_answer_for_extents_fails_no_request(server):
    async with await rtrs.aio.Volume.open(server.uri()) as volume:
        server.stop()
        reads = [asyncio.create_task(volume.pread(0, 512)) for _ in range(20)]
        await wait_until("requests", lambda: inflight(volume) == 20)
        extents = asyncio.create_task(anext(volume.extents()))
        await wait_until("call of a thread", lambda: volume._rings[0].busy is not None)
        reads.append(asyncio.create_task(volume.pread(0, 512)))
        server.resume()
        assert await asyncio.gather(*reads) == [bytes(512)] * 21
        assert (await extents).offset == 0


@run
async def test_events(server):
    async with await rtrs.aio.Volume.open(server.uri(), no_path="fail") as volume:
        assert await volume.next_event(0) is None
        # An event that arrives after a canceled wait is not lost.
        wait = asyncio.create_task(volume.next_event(LONG))
        await asyncio.sleep(0)
        wait.cancel()
        server.kill()
        event = await volume.next_event(LONG)
        while not isinstance(event, rtrs.Paths):
            event = await volume.next_event(LONG)
        assert event == rtrs.Paths(connected=0, total=1)
        with pytest.raises(rtrs.Error, match="cannot read"):
            await volume.pread(0, 512)
        wait = asyncio.create_task(volume.next_event(LONG))
        await asyncio.sleep(0)
    assert await wait is None


def test_a_volume_belongs_to_its_loop(server):
    with asyncio.Runner() as first, asyncio.Runner() as second:
        volume = first.run(rtrs.aio.Volume.open(server.uri()))

        async def use():
            await volume.flush()

        first.run(use())
        with pytest.raises(RuntimeError, match="another event loop"):
            second.run(use())
        first.run(volume.close())


def test_a_dropped_volume_is_closed(server):
    async def leave():
        volume = await rtrs.aio.Volume.open(server.uri())
        server.stop()
        read = asyncio.create_task(volume.pread_into(buffer, 0))
        await wait_until("request", lambda: inflight(volume) == 1)
        read.cancel()
        with pytest.raises(asyncio.CancelledError):
            await read
        return weakref.ref(volume)

    def is_collected(reference):
        gc.collect()
        return reference() is None

    async def use():
        # A first use creates the descriptors of the loop's threads.
        await asyncio.to_thread(gc.collect)
        before = descriptors()
        with pytest.warns(ResourceWarning, match="was not closed"):
            reference = await leave()
            # The loop keeps the traceback of the cancellation for a moment.
            await wait_until("collection", lambda: is_collected(reference))
        await wait_until("closed descriptors", lambda: descriptors() == before)

    buffer = bytearray(512)
    asyncio.run(use())
    buffer.append(0)


def test_a_volume_may_outlive_its_loop(server):
    async def leave():
        return await rtrs.aio.Volume.open(server.uri(), retry_for="60s")

    before = descriptors()
    volume = asyncio.run(leave())
    with pytest.warns(ResourceWarning, match="was not closed"):
        del volume
        gc.collect()
    wait_for("closed descriptors", lambda: descriptors() == before)
