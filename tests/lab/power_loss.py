#!/usr/bin/env python3
"""Power loss and write errors of a disk, for the lab: loads that record what is durable, and checks
on what a disk contains.

The disk is logged by dm-log-writes, whose log has each write at the point where it became durable:
at the next flush, or at its completion if it had FUA. A load puts a mark into the log each time the
system has reported that something is durable. A check rebuilds the disk as a power loss at some
point of the log would leave it, and compares it with the last mark before that point.

The data of a load depends only on the round, so a check needs no other record.

  power_loss.py load-raw DEVICE LOGGED ROUNDS     writes blocks of DEVICE
  power_loss.py load-files FOLDER LOGGED ROUNDS   writes files
  power_loss.py check-raw LOG SIZE POINTS IMAGE
  power_loss.py check-files LOG SIZE POINTS IMAGE MOUNTPOINT
  power_loss.py replay LOG SIZE MARK IMAGE        builds the disk as it was at a mark
  power_loss.py write-gen DEVICE FIRST COUNT GEN  writes a generation of blocks; prints the failures
  power_loss.py read-gen DEVICE FIRST COUNT       prints the generation of each block, - for none
  power_loss.py flush DEVICE                      exits with the error number, or 0

LOGGED is the name of the device-mapper device. The log's format is that of the kernel
(drivers/md/dm-log-writes.c): a sector with the head, then for each entry a sector with its head
and the sectors that were written. A check exits with 1 if durable data is missing.
"""

import concurrent.futures
import hashlib
import mmap
import os
import random
import struct
import subprocess
import sys

MAGIC = 0x6A736677736872
FLUSH, FUA, DISCARD, MARK = 1, 2, 4, 8
BLOCK = 4096
# Blocks of the raw load, blocks written in each of its rounds, and blocks of the file `direct`.
RAW_BLOCKS, RAW_WRITES = 512, 24
DIRECT_BLOCKS = 32


# --- what is written ---


def block_of(number, generation):
    """Returns a block's contents, in which a sector of a different write can be detected."""
    sector = b"block %8d generation %8d " % (number, generation)
    return (sector * (512 // len(sector) + 1))[:512] * (BLOCK // 512)


def generation_of(number, data):
    """Returns the generation of a block; 0 if it was never written, None if it is torn."""
    if not any(data):
        return 0
    try:
        generation = int(data[26:34])
    except ValueError:
        return None
    return generation if data == block_of(number, generation) else None


def raw_round(at):
    """Returns the blocks that a round of the raw load writes."""
    return random.Random(at).sample(range(RAW_BLOCKS), RAW_WRITES)


def file_of(at):
    """Returns the contents of a round's file."""
    size = random.Random(at).choice([1, 700, 4096, 20_000, 130_000, 300_000])
    return hashlib.shake_128(b"file %d" % at).digest(size)


def direct_block(at):
    """Returns the block that a round writes with O_DSYNC."""
    return at * 7 % DIRECT_BLOCKS


# --- loads ---


def mark(logged, text):
    """Puts a mark into the log, after everything that is durable."""
    subprocess.run(["dmsetup", "message", logged, "0", "mark", text], check=True)


def buffer_of(data):
    """Returns a copy of the data that can be written with O_DIRECT."""
    buffer = mmap.mmap(-1, len(data))
    buffer.write(data)
    return buffer


def load_raw(device, logged, rounds):
    """In each round, writes the same blocks from several threads, flushes and puts a mark."""
    fd = os.open(device, os.O_RDWR | os.O_DIRECT)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for at in range(1, rounds + 1):
            writes = [
                pool.submit(os.pwrite, fd, buffer_of(block_of(number, at)), number * BLOCK)
                for number in raw_round(at)
            ]
            for write in writes:
                if write.result() != BLOCK:
                    sys.exit("a write was short")
            os.fsync(fd)
            mark(logged, f"round-{at}")
    os.close(fd)


def sync_folder(folder):
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def write_synced(path, data):
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def load_files(folder, logged, rounds):
    """In each round, durably writes a file, replaces one and writes a block; then puts a mark."""
    direct = os.path.join(folder, "direct")
    write_synced(direct, b"".join(block_of(n, 0) for n in range(DIRECT_BLOCKS)))
    sync_folder(folder)
    subprocess.run(["sync", "-f", folder], check=True)
    fd = os.open(direct, os.O_RDWR | os.O_DIRECT | os.O_DSYNC)
    mark(logged, "round-0")
    for at in range(1, rounds + 1):
        # This file is never synced; it fills the other pages in the journal.
        with open(os.path.join(folder, "noise"), "ab") as noise:
            noise.write(os.urandom(50_000))
        write_synced(os.path.join(folder, f"file{at}"), file_of(at))
        write_synced(os.path.join(folder, "next"), file_of(at))
        os.rename(os.path.join(folder, "next"), os.path.join(folder, "current"))
        sync_folder(folder)
        number = direct_block(at)
        if os.pwrite(fd, buffer_of(block_of(number, at)), number * BLOCK) != BLOCK:
            sys.exit("a write was short")
        mark(logged, f"round-{at}")
    os.close(fd)


# --- the log ---


class Log:
    """The entries of a log: (flags, sector, sectors, position of the data, mark)."""

    def __init__(self, path):
        self.file = open(path, "rb")
        head = self.file.read(512)
        magic, version, count, self.sector = struct.unpack("<QQQI", head[:28])
        if (magic, version) != (MAGIC, 1):
            sys.exit(f"{path} has no log: magic {magic:x}, version {version}")
        self.entries = []
        at = self.sector
        for _ in range(count):
            self.file.seek(at)
            head = self.file.read(self.sector)
            sector, sectors, flags, length = struct.unpack("<QQQQ", head[:32])
            text = head[32 : 32 + length].decode() if flags & MARK else ""
            at += self.sector
            self.entries.append((flags, sector, sectors, at, text))
            if not flags & DISCARD:
                at += sectors * self.sector
        if not self.entries or self.entries[-1][4] != "dm-log-writes-end":
            sys.exit("the log has no end entry: it was truncated, or its device was too small")

    def apply(self, index, image):
        """Applies an entry to the disk."""
        flags, sector, sectors, at, _ = self.entries[index]
        if flags & MARK or sectors == 0:
            return
        offset, length = sector * self.sector, sectors * self.sector
        if flags & DISCARD:
            punch = ["fallocate", "-p", "-o", str(offset), "-l", str(length), image.name]
            subprocess.run(punch, check=True)
            return
        self.file.seek(at)
        image.seek(offset)
        image.write(self.file.read(length))
        image.flush()

    def rounds(self):
        """Returns, for each entry, the last round durable before it; None before the first mark."""
        last, found = None, []
        for *_, text in self.entries:
            if text.startswith("round-"):
                last = int(text.split("-")[1])
            found.append(last)
        return found


def evenly(points, most):
    """Returns at most `most` of the points, evenly distributed, including the last."""
    if len(points) <= most:
        return points
    return [points[(len(points) - 1) * at // (most - 1)] for at in range(most)]


def points_of(log, most):
    """Returns entries to stop at: replies to users, and points where data became durable."""
    rounds = log.rounds()
    behind = [index for index, at in enumerate(rounds) if at is not None]
    marks = [index for index in behind if log.entries[index][4].startswith("round-")]
    flushes = [index for index in behind if log.entries[index][0] & (FLUSH | FUA)]
    return sorted(evenly(marks, most // 2) + evenly(flushes, most - most // 2))


def check(log, size, most, image_path, judge):
    """Builds and judges the disk at each point. Prints the faults."""
    points, rounds, wrong = points_of(log, most), log.rounds(), 0
    flushes = sum(1 for flags, *_ in log.entries if flags & FLUSH)
    fuas = sum(1 for flags, *_ in log.entries if flags & FUA)
    if not points:
        sys.exit("the log has neither a mark nor a flush")
    with open(image_path, "w+b") as image:
        image.truncate(size)
        done = 0
        for point in points:
            while done <= point:
                log.apply(done, image)
                done += 1
            for text in judge(image, rounds[point]):
                print(f"power lost at entry {point}, after round {rounds[point]}: {text}")
                wrong += 1
    print(f"{len(points)} points of {len(log.entries)} entries, {flushes} flushes, {fuas} FUA,")
    print(f"the last after round {rounds[points[-1]]}: {wrong} faults")
    return wrong == 0


def judge_raw(image, durable):
    """Checks that each block is whole, and at least as new as its last write before the mark."""
    wanted = {}
    for at in range(1, durable + 1):
        for number in raw_round(at):
            wanted[number] = at
    newer = set(raw_round(durable + 1))
    for number in range(RAW_BLOCKS):
        image.seek(number * BLOCK)
        found, oldest = generation_of(number, image.read(BLOCK)), wanted.get(number, 0)
        if found == oldest or (found == durable + 1 and number in newer):
            continue
        yield f"block {number} has generation {found}, but {oldest} was durable"


def judge_files(folder, durable):
    """Checks that the files of all durable rounds exist and are intact."""

    def read(name):
        try:
            with open(os.path.join(folder, name), "rb") as file:
                return file.read()
        except OSError as error:
            return error

    for at in range(1, durable + 1):
        found = read(f"file{at}")
        if found != file_of(at):
            yield f"file{at}: {found if isinstance(found, OSError) else 'wrong contents'}"
    if durable > 0 and read("current") not in (file_of(durable), file_of(durable + 1)):
        yield "the replaced file has neither its old nor its new contents"
    data = read("direct")
    if isinstance(data, OSError):
        yield f"direct: {data}"
        return
    wanted = dict.fromkeys(range(DIRECT_BLOCKS), 0)
    for at in range(1, durable + 1):
        wanted[direct_block(at)] = at
    for number, oldest in wanted.items():
        block = data[number * BLOCK : (number + 1) * BLOCK]
        newer = durable + 1 if direct_block(durable + 1) == number else oldest
        if block not in (block_of(number, oldest), block_of(number, newer)):
            yield f"block {number} of the O_DSYNC file does not have generation {oldest}"


def mount_and_judge(image, durable, mountpoint):
    """Judges a copy, because mounting replays the journal and so writes to it."""
    copy = image.name + ".copy"
    subprocess.run(["cp", "--sparse=always", image.name, copy], check=True)
    mounted = subprocess.run(
        ["mount", "-o", "loop", copy, mountpoint], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        yield f"it does not mount: {mounted.stderr.strip()}"
        return
    yield from judge_files(mountpoint, durable)
    subprocess.run(["umount", mountpoint], check=True)
    fsck = subprocess.run(["e2fsck", "-fn", copy], capture_output=True, text=True, check=False)
    if fsck.returncode != 0:
        yield f"e2fsck: {fsck.stdout.strip()}"


def replay(log, size, text, image_path):
    """Builds the disk as it was at a mark."""
    with open(image_path, "w+b") as image:
        image.truncate(size)
        for index, (*_, mark_text) in enumerate(log.entries):
            log.apply(index, image)
            if mark_text == text:
                return True
    print(f"the log has no mark '{text}'")
    return False


# --- write errors ---


def write_generation(device, first, count, generation):
    """Writes blocks one by one. Prints the number of failed writes."""
    fd, failed = os.open(device, os.O_RDWR | os.O_DIRECT), 0
    for number in range(first, first + count):
        try:
            os.pwrite(fd, buffer_of(block_of(number, generation)), number * BLOCK)
        except OSError:
            failed += 1
    os.close(fd)
    print(failed)


def read_generations(device, first, count):
    fd, buffer, found = os.open(device, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, BLOCK), []
    for number in range(first, first + count):
        os.preadv(fd, [buffer], number * BLOCK)
        generation = generation_of(number, buffer[:])
        found.append("-" if generation is None else str(generation))
    os.close(fd)
    print(*found)


def flush(device):
    """Flushes the device. Returns the error number, or 0."""
    fd = os.open(device, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        return error.errno
    finally:
        os.close(fd)
    return 0


def main(command, *words):
    if command in ("load-raw", "load-files"):
        load = load_raw if command == "load-raw" else load_files
        load(words[0], words[1], int(words[2]))
        return 0
    if command == "write-gen":
        write_generation(words[0], *map(int, words[1:]))
        return 0
    if command == "read-gen":
        read_generations(words[0], *map(int, words[1:]))
        return 0
    if command == "flush":
        return flush(words[0])
    log, size = Log(words[0]), int(words[1])
    if command == "check-raw":
        good = check(log, size, int(words[2]), words[3], judge_raw)
    elif command == "check-files":
        judge = lambda image, durable: mount_and_judge(image, durable, words[4])
        good = check(log, size, int(words[2]), words[3], judge)
    elif command == "replay":
        good = replay(log, size, words[2], words[3])
    else:
        sys.exit(__doc__)
    return 0 if good else 1


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
