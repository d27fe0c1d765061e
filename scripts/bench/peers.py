"""rtrs beside nbdkit, qemu-nbd and nbd-server: the same file, the same fio jobs, TCP loopback.
Sessions without NBD use a separate server and file."""

import argparse
import os
import re
import tempfile

from processes import BenchError, say
from servers import Fio, Nbdkit, NbdServer, Ours, OursSession, QemuNbd, Session
from tables import BANDWIDTH, CPU, LATENCY, Comparison, Row, judge, measure, selected


class OursInvalidateOff(OursSession):
    name = "rtrs-no-invalidate"
    server_flags = ("--always-invalidate", "off")


class OursCrcOff(OursSession):
    name = "rtrs-no-crc"
    server_flags = bench_flags = ("--crc", "off")


PEERS = (Nbdkit, QemuNbd, NbdServer)
SESSIONS = (OursSession, OursInvalidateOff, OursCrcOff)
FOUR = tuple(kind.name for kind in (*PEERS, Ours))
BEST_READ = "randread-4k-q32"


def session(row_id, title, rw, **more):
    other = {"asked": 0.95} | more
    jobs, depth = other.pop("load", (1, 32))
    return Row(row_id, title, Session(rw, "4k", depth, jobs), **other)


def cpu(row_id, what, samples_of, asked):
    return Row(row_id, f"CPU of rtrs-server per {what}", None, ("nbdkit", "rtrs"), CPU, asked,
               samples_of)


INVALIDATE, CRC = (("rtrs-no-invalidate", "rtrs-session"), ("rtrs-no-crc", "rtrs-session"))
TABLES = {
    "job": [
        Row(BEST_READ, "4k randread QD32", Fio("randread", "4k", 32), FOUR, asked=1.2),
        Row("randwrite-4k-q32", "4k randwrite QD32", Fio("randwrite", "4k", 32), FOUR, asked=1.1),
        Row("randread-4k-q1", "4k randread QD1 latency", Fio("randread", "4k", 1), FOUR, LATENCY,
            1.3),
        Row("read-128k-q16", "128k read QD16", Fio("read", "128k", 16), FOUR, BANDWIDTH, 0.85),
        Row("write-128k-q16", "128k write QD16", Fio("write", "128k", 16), FOUR, BANDWIDTH, 0.85),
    ],
    "rtrs-client bench": [
        session("session-randread", "session 4k randread, 2 jobs of QD16, no NBD", "randread",
                load=(2, 16), sides=("rtrs-session",), best_of=BEST_READ, asked=4.5),
        session("session-one-job", "the same, 1 job of QD32", "randread", sides=("rtrs-session",),
                best_of=BEST_READ, asked=3.5),
        *(session(f"{word}-{rw}", f"{title} on/off, {rw}", rw, sides=sides, asked=asked)
          for word, title, sides, asked in (
              ("invalidate", "always_invalidate", INVALIDATE, 0.95), ("crc", "CRC32C", CRC, None))
          for rw in ("randread", "randwrite")),
    ],
    "CPU per request of the server alone": [
        cpu("cpu-read-4k", "4k read", BEST_READ, 0.45),
        cpu("cpu-read-128k", "128k read", "read-128k-q16", 1.0),
        cpu("cpu-write-128k", "128k write", "write-128k-q16", 1.0),
    ],
}


def make_file(path, size):
    """Makes a file without holes, so that every side reads stored data."""
    block = os.urandom(1 << 20)
    try:
        with open(path, "wb") as out:
            for at in range(0, size, len(block)):
                out.write(block[:size - at])
            os.fsync(out.fileno())
    except OSError as error:
        raise BenchError(f"cannot create the {size}-byte file {path}: {error}") from error


def parse_size(text):
    found = re.fullmatch(r"(\d+)([kmg]?)", text.lower())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size (1073741824, 512M, 1G)")
    return int(found[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[found[2]]


def add_size(parser, default, what):
    parser.add_argument("--size", type=parse_size, default=default,
                        help=f"size of {what} ({default >> 20}M)")


def list_of(pattern, example):
    def parse(text):
        if not re.fullmatch(f"{pattern}(,{pattern})*", text):
            raise argparse.ArgumentTypeError(f"{text!r}: use for example {example}")
        return text.replace(",", " ")
    return parse


def add_options(parser):
    add_size(parser, 1 << 30, "the file")
    parser.add_argument("--peers-only", action="store_true", help="leave out our own side")
    parser.add_argument("--disk", nargs="?", const="target", metavar="DIR",
                        help="a second table on a file in DIR (target/)")
    parser.add_argument("--rtt", metavar="MS,...", type=list_of(r"\d+(\.\d+)?ms", "0.2ms,20ms"),
                        help="compare block devices over links with these round trip times, e.g. "
                        "0.2ms,2ms,20ms, in a guest of the lab")
    parser.add_argument("--loss", metavar="SHARE,...", type=list_of(r"\d+(\.\d+)?%?", "0,0.01%"),
                        help="the same with these packet losses, e.g. 0,0.01%%")


def check_options(args, parser):
    """Runs the lab instead if links are described, because only the lab has netem."""
    if not args.rtt and not args.loss:
        return
    settings = {"rtt": "RTRS_LAB_WAN_RTT", "loss": "RTRS_LAB_WAN_LOSS",
                "rounds": "RTRS_LAB_BENCH_PASSES", "runtime": "RTRS_LAB_BENCH_SECONDS"}
    for key, value in vars(args).items():
        if key in settings and value:
            os.environ[settings[key]] = str(value)
        elif key not in ("comparison", *settings) and value != parser.get_default(key):
            parser.error(f"--{key.replace('_', '-')} cannot be used with --rtt or --loss")
    os.execvp("sh", ["sh", "-c", "scripts/lab.sh setup && exec scripts/lab.sh run wan"])


def measure_place(args, place, rows):
    """Measures the rows on a file in a directory."""
    sides = {}
    for kind in (*PEERS, Ours, *SESSIONS):
        is_used = any(row.load and kind.name in row.sides for row in rows)
        if is_used and not (args.peers_only and issubclass(kind, Ours)):
            path = os.path.join(place, f"{kind.name if kind in SESSIONS else 'shared'}.img")
            if not os.path.exists(path):
                make_file(path, args.size)
            # Other servers have the file open too, and qemu-nbd locks it.
            sides[kind.name] = kind(args, f"{path},no-lock" if kind is Ours else path)
    return judge(rows, measure(args, rows, sides), sides)


def run(args):
    rows = selected(args, TABLES)
    if args.peers_only:
        rows = [row for row in rows if row in TABLES["job"]]
        if not rows:
            raise BenchError("nothing to run: these rows need our own side, see --peers-only")
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    places = {"file in memory (/dev/shm)": (memory, rows)}
    if args.disk:
        os.makedirs(args.disk, exist_ok=True)
        places["file on disk"] = (os.path.abspath(args.disk),
                                  [row for row in rows if "rtrs-session" not in row.sides])
    tables = {}
    for name, (place, some) in places.items():
        with tempfile.TemporaryDirectory(prefix="rtrs-bench-", dir=place) as directory:
            say(f"{name}: {directory}, {args.size >> 20} MiB")
            tables[name] = measure_place(args, directory, some)
    return {"tables": tables}


COMPARISON = Comparison(
    "rtrs with nbdkit, qemu-nbd and nbd-server", TABLES, run, add_options=add_options,
    check_options=check_options, tools={"fio": "fio", "nbdkit": "nbdkit", "qemu-nbd": "qemu-utils",
                                        "nbd-server": "nbd-server"})
