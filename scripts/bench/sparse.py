"""Copies and maps of sparse exports, from rtrs-server over rtrs-client and from nbdkit: a file of
1 TiB with 1 GiB of data in 1024 places, and one with 10,000 fragments of 4 KiB. Runs in its own
network namespace, so it needs root: the bytes that crossed the loopback interface are counted."""

import ctypes
import os
import time
from typing import NamedTuple

from processes import BenchError, command
from servers import Nbdkit, Ours
from tables import Comparison, Figure, Row, judge, measure, selected

CLONE_NEWNET = 0x40000000
SECONDS_MAX = 600


class Content(NamedTuple):
    """A sparse file: `places` of `data` bytes, evenly spaced."""

    size: int
    places: int
    data: int

    def create(self, path):
        with open(path, "wb") as out:
            out.truncate(self.size)
            for place in range(self.places):
                os.pwrite(out.fileno(), os.urandom(self.data), place * (self.size // self.places))

    def read(self, path):
        """Yields the data of each place, followed by as many zeroes."""
        with open(path, "rb") as file:
            for place in range(self.places):
                at = place * (self.size // self.places)
                yield os.pread(file.fileno(), 2 * self.data, at)


TIB = Content(1 << 40, 1024, 1 << 20)
FRAGMENTS = Content(10_000 << 16, 10_000, 4096)


def bytes_moved():
    """Returns the bytes on the loopback interface so far, with headers."""
    with open("/proc/net/dev") as devices:
        return sum(int(line.split()[9]) for line in devices if line.strip().startswith("lo:"))


class Job:
    """A command on the export of a side, which may copy this content to a file."""

    def __init__(self, *argv, to_file=None):
        self.argv, self.to_file = argv, to_file
        self.outputs = {}

    def __call__(self, side, args):
        copy = side.scratch("copy")
        argv = [{"URI": side.uri, "FILE": copy}.get(word, word) for word in self.argv]
        if self.to_file:
            with open(copy, "wb") as out:
                out.truncate(self.to_file.size)
        before, start = bytes_moved(), time.monotonic()
        self.outputs[side.name] = command(*argv, seconds_max=SECONDS_MAX)
        sample = {"seconds": time.monotonic() - start, "moved": (bytes_moved() - before) / 1e6}
        if self.to_file:
            copied = zip(self.to_file.read(side.target), self.to_file.read(copy))
            if any(a != b for a, b in copied):
                raise BenchError(f"{side.name}: the copy differs")
            os.unlink(copy)
        return sample


SECONDS = Figure("seconds", "{seconds:.2f} s", True)
SIDES = ("nbdkit", "rtrs")
MAP = Job("nbdinfo", "--map", "URI")
QEMU_MAP = Job("qemu-img", "map", "--output=json", "-f", "raw", "URI")
CONVERT = Job("qemu-img", "convert", "-f", "raw", "-O", "raw", "URI", "FILE", to_file=FRAGMENTS)
TABLES = {"sparse TiB": [
    Row("to-nowhere", "nbdcopy to `null:`", Job("nbdcopy", "URI", "null:"), SIDES, SECONDS, 1.4),
    Row("to-file", "nbdcopy to a sparse file",
        Job("nbdcopy", "--destination-is-zero", "URI", "FILE", to_file=TIB), SIDES, SECONDS),
    Row("map", "nbdinfo --map", MAP, SIDES, SECONDS, 1.5),
], "10,000 fragments": [
    Row("fragments-map", "qemu-img map", QEMU_MAP, SIDES, SECONDS, 1.5),
    Row("fragments-convert", "qemu-img convert", CONVERT, SIDES, SECONDS, 1.3),
]}
CONTENTS = {"sparse TiB": TIB, "10,000 fragments": FRAGMENTS}


def run(args):
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        raise BenchError(f"cannot create a network namespace: {os.strerror(ctypes.get_errno())}; "
                         "run as root")
    command("ip", "link", "set", "lo", "up")
    tables = {}
    for title, content in CONTENTS.items():
        rows = selected(args, {title: TABLES[title]})
        if not rows:
            continue
        path = f"{args.scratch}/vol.img"
        content.create(path)
        sides = {kind.name: kind(args, path) for kind in (Nbdkit, Ours)}
        tables[title] = judge(rows, measure(args, rows, sides), sides)
        os.unlink(path)
    for job, place in ((MAP, "sparse TiB"), (QEMU_MAP, "10,000 fragments")):
        if job.outputs:
            maps = [job.outputs[name] for name in SIDES]
            if maps[0] != maps[1]:
                raise BenchError("the maps differ")
            count = len(maps[0].splitlines())
            tables[place]["notes"] = [f"Both maps are the same: {count} extents."]
    return {"tables": tables}


COMPARISON = Comparison(
    "copies and maps of sparse files with those from nbdkit; needs root", TABLES, run,
    defaults={"rounds": 5, "wait_quiet": 0}, costs=(("MB moved", "{moved:.1f}"),),
    tools={"nbdcopy": "libnbd-bin", "nbdinfo": "libnbd-bin", "nbdkit": "nbdkit",
           "qemu-img": "qemu-utils"})
