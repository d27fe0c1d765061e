"""Copies of a sparse export of 1 TiB with 1 GiB of data in 1024 places, from rtrs-server over
rtrs-client and from nbdkit, and its map. Runs in its own network namespace, so it needs root: the
bytes that crossed the loopback interface are counted."""

import ctypes
import os
import time

from processes import BenchError, command
from servers import Nbdkit, Ours
from tables import Comparison, Figure, Row, judge, measure, selected

CLONE_NEWNET = 0x40000000
SIZE, PLACES, DATA = 1 << 40, 1024, 1 << 20
SECONDS_MAX = 600


def bytes_moved():
    """Returns the bytes on the loopback interface so far, with headers."""
    with open("/proc/net/dev") as devices:
        return sum(int(line.split()[9]) for line in devices if line.strip().startswith("lo:"))


def data_of(path):
    """Yields the data of each place, with as many zeroes behind it."""
    with open(path, "rb") as file:
        for place in range(PLACES):
            yield os.pread(file.fileno(), 2 * DATA, place * (SIZE // PLACES))


class Job:
    """A command on the export of a side."""

    def __init__(self, *argv, to_file=False):
        self.argv, self.to_file = argv, to_file
        self.outputs = {}

    def __call__(self, side, args):
        copy = side.scratch("copy")
        argv = [{"URI": side.uri, "FILE": copy}.get(word, word) for word in self.argv]
        if self.to_file:
            with open(copy, "wb") as out:
                out.truncate(SIZE)
        before, start = bytes_moved(), time.monotonic()
        self.outputs[side.name] = command(*argv, seconds_max=SECONDS_MAX)
        sample = {"seconds": time.monotonic() - start, "moved": (bytes_moved() - before) / 1e6}
        if self.to_file:
            if any(a != b for a, b in zip(data_of(side.target), data_of(copy))):
                raise BenchError(f"{side.name}: the copy differs")
            os.unlink(copy)
        return sample


SECONDS = Figure("seconds", "{seconds:.2f} s", True)
SIDES = ("nbdkit", "rtrs")
MAP = Job("nbdinfo", "--map", "URI")
TABLES = {"job": [
    Row("to-nowhere", "nbdcopy to `null:`", Job("nbdcopy", "URI", "null:"), SIDES, SECONDS),
    Row("to-file", "nbdcopy to a sparse file",
        Job("nbdcopy", "--destination-is-zero", "URI", "FILE", to_file=True), SIDES, SECONDS),
    Row("map", "nbdinfo --map", MAP, SIDES, SECONDS),
]}


def run(args):
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        raise BenchError(f"cannot create a network namespace: {os.strerror(ctypes.get_errno())}; "
                         "run as root")
    command("ip", "link", "set", "lo", "up")
    path = f"{args.scratch}/vol.img"
    with open(path, "wb") as out:
        out.truncate(SIZE)
        for place in range(PLACES):
            os.pwrite(out.fileno(), os.urandom(DATA), place * (SIZE // PLACES))
    rows = selected(args, TABLES)
    sides = {kind.name: kind(args, path) for kind in (Nbdkit, Ours)}
    result = judge(rows, measure(args, rows, sides), sides)
    if MAP.outputs:
        maps = [MAP.outputs[name] for name in SIDES]
        if maps[0] != maps[1]:
            raise BenchError("the maps differ")
        result["notes"] = [f"Both maps are the same: {len(maps[0].splitlines())} extents."]
    return {"tables": {"": result}}


COMPARISON = Comparison(
    "copies of a sparse TiB with those from nbdkit; needs root", TABLES, run,
    defaults={"rounds": 5, "wait_quiet": 0}, costs=(("MB moved", "{moved:.1f}"),),
    tools={"nbdcopy": "libnbd-bin", "nbdinfo": "libnbd-bin", "nbdkit": "nbdkit"})
