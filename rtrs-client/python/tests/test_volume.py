"""Volumes with blocking calls."""

import array
import errno
import gc
import itertools
import multiprocessing
import os
import pickle
import signal
import threading

import pytest
import rtrs
from conftest import LONG, MIB, descriptors, pattern, wait_for


@pytest.fixture
def volume(server):
    with rtrs.Volume.open(server.uri()) as volume:
        yield volume


def test_geometry_is_that_of_the_export(volume):
    assert volume.size == 64 * MIB and volume.block_size == 512
    geometry = volume.geometry
    assert not volume.read_only and not geometry.read_only
    assert geometry.size == volume.size and geometry.io_max >= MIB
    assert geometry.has_discard and geometry.has_write_zeroes and geometry.has_extents
    assert "/" in volume.identity
    assert rtrs.library_version().count(".") == 2


def as_array(data):
    return array.array("B", data)


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, as_array])
def test_buffers_of_each_kind_are_written(volume, make):
    data = pattern(8192, seed=3)
    volume.pwrite(make(data), 4096)
    volume.flush()
    assert volume.pread(4096, 8192) == data


def test_long_transfers_are_split(volume):
    data = pattern(9 * MIB + 512, seed=5)
    volume.pwrite(data, 512, fua=True)
    assert volume.pread(512, len(data)) == data
    whole = bytearray(b"\xee" * (len(data) + 16))
    volume.pread_into(memoryview(whole)[8:-8], 512)
    assert whole == b"\xee" * 8 + data + b"\xee" * 8


def test_ranges_are_zeroed_and_discarded(volume):
    volume.pwrite(pattern(8192), 0)
    volume.write_zeroes(0, 4096, fua=True, unmap=False)
    assert volume.pread(0, 4096) == bytes(4096)
    assert volume.pread(4096, 4096) == pattern(8192)[4096:]
    volume.write_zeroes(0, volume.size)
    assert volume.pread(0, 8192) == bytes(8192)
    volume.discard(0, volume.size, fua=True)


def test_extents_cover_the_range(volume):
    volume.discard(0, volume.size)
    volume.pwrite(pattern(MIB), 8 * MIB)
    extents = list(volume.extents())
    assert extents[0].offset == 0
    for before, after in itertools.pairwise(extents):
        assert before.offset + before.length == after.offset
    assert extents[-1].offset + extents[-1].length == volume.size
    data = [extent for extent in extents if not extent.hole]
    assert any(one.offset <= 8 * MIB < one.offset + one.length for one in data)
    part = list(volume.extents(8 * MIB, MIB))
    assert sum(extent.length for extent in part) == MIB and not part[0].hole


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda volume: volume.pread(100, 512), "offset 100 is not a multiple of 512"),
        (lambda volume: volume.pread(-512, 512), "offset -512"),
        (lambda volume: volume.pread(0, 0), "length 0"),
        (lambda volume: volume.pwrite(b"x", 0), "length 1 is not a multiple of 512"),
        (lambda volume: volume.pread(1 << 64, 512), "exceeds 64 bits"),
        (lambda volume: volume.pread(64 * MIB, 512), "cannot read 512 bytes at 67108864"),
        (lambda volume: volume.discard(0, 700), "length 700"),
        (lambda volume: list(volume.extents(100)), "offset 100"),
    ],
)
def test_impossible_ranges_are_refused(volume, call, text):
    with pytest.raises(rtrs.Error, match=text) as caught:
        call(volume)
    assert caught.value.errno == errno.EINVAL
    volume.flush()


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda volume: volume.pread(0, -512), ValueError),
        (lambda volume: volume.pread("a", 512), TypeError),
        (lambda volume: volume.pread(0, 512.0), TypeError),
        (lambda volume: volume.pwrite("text", 0), TypeError),
        (lambda volume: volume.pwrite(None, 0), TypeError),
        (lambda volume: volume.pread_into(bytes(512), 0), BufferError),
        (lambda volume: volume.pwrite(memoryview(bytes(1024))[::2], 0), BufferError),
    ],
)
def test_wrong_arguments_are_refused(volume, call, kind):
    with pytest.raises(kind):
        call(volume)
    volume.flush()


def test_a_write_past_the_end_changes_nothing(volume):
    with pytest.raises(rtrs.Error):
        volume.pwrite(pattern(1024), 64 * MIB - 512)
    assert volume.pread(64 * MIB - 512, 512) == bytes(512)


def test_settings_are_passed_on(server):
    path = server.portal.replace("://", "://127.0.0.2@")
    settings = {"access": "ro", "queues": 2, "queue_depth": 4, "path": [path], "crc": True}
    with rtrs.Volume.open(server.uri(), **settings, identity=None) as volume:
        assert volume.read_only
        assert [queue.depth for queue in volume._handle.queues] == [4, 4]
        assert volume.pread(0, 512) == bytes(512)
        with pytest.raises(rtrs.Error) as caught:
            volume.pwrite(bytes(512), 0)
        assert caught.value.errno in (errno.EROFS, errno.EPERM, errno.EACCES)


@pytest.mark.parametrize(
    ("settings", "kind", "text"),
    [
        ({"polcy": "x"}, rtrs.Error, "did you mean policy"),
        ({"queue_depth": 0}, rtrs.Error, "queue-depth"),
        ({"queue_depth": 1.5}, TypeError, "queue_depth=1.5"),
        ({"path": [7.5]}, TypeError, "path=7.5"),
        ({"session_name": "a\0b"}, ValueError, "session_name"),
    ],
)
def test_wrong_settings_are_refused(server, settings, kind, text):
    with pytest.raises(kind, match=text):
        rtrs.Volume.open(server.uri(), **settings)


def test_a_missing_export_is_an_error(server):
    with pytest.raises(rtrs.Error, match="ENOENT") as caught:
        rtrs.Volume.open(server.uri("none"))
    assert caught.value.errno == errno.ENOTCONN
    with pytest.raises(rtrs.Error, match="cannot use the URI"):
        rtrs.Volume.open("vol0")


def test_a_closed_volume_is_refused(server):
    volume = rtrs.Volume.open(server.uri())
    assert volume.close() == 0 and volume.close() == 0
    calls = [
        lambda: volume.pread(0, 512),
        lambda: volume.pwrite(bytes(512), 0),
        volume.flush,
        volume.next_event,
        lambda: volume.size,
        lambda: volume.identity,
        lambda: volume.stats,
        lambda: list(volume.extents(0, 512)),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="the volume is closed"):
            call()
    assert volume.closed


def test_statistics_count_requests(volume):
    before = volume.stats
    volume.pwrite(bytes(8192), 0)
    volume.flush()
    assert volume.pread(0, 4096) == bytes(4096)
    after = volume.stats
    assert after.write.bytes - before.write.bytes == 8192
    assert after.read.count - before.read.count == 1
    assert after.flush.count - before.flush.count == 1
    assert (after.paths, after.paths_connected, after.failovers) == (1, 1, 0)


def test_threads_share_a_volume(server):
    with rtrs.Volume.open(server.uri(), queues=2) as volume:
        wrong = []

        def use(seed):
            data = pattern(64 << 10, seed)
            for round in range(20):
                at = (seed * 20 + round) * len(data)
                volume.pwrite(data, at)
                if volume.pread(at, len(data)) != data:
                    wrong.append((seed, round))

        threads = [threading.Thread(target=use, args=(seed,)) for seed in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
            assert not thread.is_alive()
        assert wrong == []


def test_a_close_ends_calls_of_other_threads(server, monkeypatch):
    volume = rtrs.Volume.open(server.uri())
    server.stop()
    errors = []
    submitted = threading.Event()
    queue = volume._handle.queues[0]
    poll = queue.poll

    def poll_noted(*arguments):
        submitted.set()
        return poll(*arguments)

    def write():
        try:
            volume.pwrite(bytes(512), 0)
        except (rtrs.Error, ValueError) as error:
            errors.append(error)

    monkeypatch.setattr(queue, "poll", poll_noted)
    thread = threading.Thread(target=write)
    thread.start()
    assert submitted.wait(LONG)
    assert volume.close(0.05) == 1
    thread.join(LONG)
    assert not thread.is_alive() and len(errors) == 1
    assert errors[0].errno == errno.ECONNABORTED


def test_a_late_answer_releases_the_buffer(server):
    with rtrs.Volume.open(server.uri()) as volume:
        volume.pwrite(pattern(512), 0)
    with rtrs.Volume.open(server.uri(), wait_max=0.3) as volume:
        server.stop()
        buffer = bytearray(512)
        with pytest.raises(rtrs.TimedOut, match="cannot read 512 bytes at 0: no answer"):
            volume.pread_into(buffer, 0)
        with pytest.raises(BufferError):
            buffer.append(0)
        server.resume()

        def flushes():
            try:
                volume.flush()
            except TimeoutError:
                return False
            return volume._handle.queues[0].is_idle()

        wait_for("answer", flushes)
        assert buffer == pattern(512)
        buffer.append(0)


def test_a_close_releases_the_buffer_of_a_late_request(server):
    with rtrs.Volume.open(server.uri(), wait_max=0.3) as volume:
        server.stop()
        buffer = bytearray(512)
        with pytest.raises(TimeoutError):
            volume.pread_into(buffer, 0)
        assert volume.close(0) == 1
        buffer.append(0)


def test_an_interrupt_ends_a_wait(server, monkeypatch):
    with rtrs.Volume.open(server.uri()) as volume:
        server.stop()
        queue = volume._handle.queues[0]
        poll = queue.poll

        def poll_interrupted(*arguments):
            monkeypatch.undo()
            threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
            return poll(*arguments)

        monkeypatch.setattr(queue, "poll", poll_interrupted)
        with pytest.raises(KeyboardInterrupt):
            volume.pread(0, 512)
        server.resume()
        assert volume.pread(0, 512) == bytes(512)


def test_a_lost_server_is_an_event(server):
    with rtrs.Volume.open(server.uri(), no_path="fail") as volume:
        assert volume.next_event() is None
        server.kill()
        event = volume.next_event(LONG)
        while not isinstance(event, rtrs.Paths):
            event = volume.next_event(LONG)
        assert event == rtrs.Paths(connected=0, total=1)
        with pytest.raises(rtrs.Error, match="cannot read 512 bytes at 0"):
            volume.pread(0, 512)


def refused_calls(volume):
    """Returns the number of calls that fail because another process has opened the volume."""
    refused = 0
    for call in (lambda: volume.pread(0, 512), volume.flush, volume.close, lambda: volume.size):
        try:
            call()
        except PermissionError as error:
            refused += error.errno == errno.EPERM and "after the fork" in error.strerror
    return refused


def test_a_child_is_refused(server, volume):
    volume.pwrite(pattern(512, seed=9), 0)
    # The queue is used by a thread that does not exist in the child.
    server.stop()
    read = []
    thread = threading.Thread(target=lambda: read.append(volume.pread(0, 512)))
    thread.start()
    wait_for("use of the queue", volume._queues.empty)
    child = os.fork()
    if child == 0:
        os._exit(refused_calls(volume))
    status = wait_for("end of the child", lambda: os.waitpid(child, os.WNOHANG)[1])
    assert os.waitstatus_to_exitcode(status) == 4
    server.resume()
    thread.join(LONG)
    assert read == [pattern(512, seed=9)]


def test_a_child_that_ends_leaves_the_volume_open(volume):
    child = os.fork()
    if child == 0:
        try:
            volume.__del__()
            gc.collect()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    volume.flush()


def read_block(arguments):
    uri, at = arguments
    with rtrs.Volume.open(uri, access="ro") as volume:
        return volume.pread(at, 512)


def test_spawned_processes_open_volumes(server):
    with rtrs.Volume.open(server.uri()) as volume:
        volume.pwrite(pattern(2048), 0)
        work = [(server.uri(), at) for at in range(0, 2048, 512)]
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            assert b"".join(pool.map_async(read_block, work).get(LONG)) == pattern(2048)


def test_an_open_volume_cannot_be_pickled(volume):
    with pytest.raises(TypeError, match="cannot pickle an open Volume"):
        pickle.dumps(volume)


def test_a_dropped_volume_is_closed(server):
    before = descriptors()
    volume = rtrs.Volume.open(server.uri(), wait_max=0.3)
    server.stop()
    buffer = bytearray(512)
    with pytest.raises(rtrs.TimedOut):
        volume.pread_into(buffer, 0)
    with pytest.warns(ResourceWarning, match="was not closed"):
        del volume
        gc.collect()
    buffer.append(0)
    assert descriptors() == before


def test_opens_leave_no_descriptor(server):
    rtrs.Volume.open(server.uri()).close()
    before = descriptors()
    for _ in range(10):
        with rtrs.Volume.open(server.uri()) as volume:
            volume.flush()
    assert descriptors() == before
