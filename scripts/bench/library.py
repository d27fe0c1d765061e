"""fio with librtrs compared to fio with nbdkit, over TCP loopback: the same jobs on a file in
memory and on an export without data. The session runs on threads of fio: rtrs has as many hops as
nbdkit."""

import os
import tempfile

from peers import add_size, make_file
from processes import command
from servers import EXPORT, Fio, Nbdkit, Ours
from tables import BANDWIDTH, IOPS, LATENCY, Comparison, Row, judge, measure, selected

BUILD_SECONDS_MAX = 1800
# Taken from the programs' directory if it is there, otherwise built.
LIBRARY = "librtrs_capi.so"


class NbdkitNull(Nbdkit):
    """nbdkit with its null plugin."""

    def start(self):
        self.launch("nbdkit", "-f", "-i", "127.0.0.1", "-p", self.port, "null", self.target,
                    address=self.port)


class Library(Ours):
    """rtrs-server, and a session within fio."""

    attach = False
    load_has_threads = True

    def __init__(self, args, target, engine):
        super().__init__(args, target)
        self.engine = engine

    def fio_engine(self):
        return [f"--ioengine=external:{self.engine}", f"--uri={self.portal}/{EXPORT}"]


def row(target, title, rw, block, depth, asked, figure=IOPS):
    return Row(f"{target}-{rw}-{block}-q{depth}", f"{title}, {block} {rw} QD{depth}",
               Fio(rw, block, depth), (f"nbdkit-{target}", f"library-{target}"), figure, asked)


FILE, NULL = ("file", "file in memory"), ("null", "no data")
TABLES = {"fio": [
    row(*FILE, "randread", "4k", 32, 1.9),
    row(*FILE, "randwrite", "4k", 32, 1.6),
    row(*FILE, "randread", "4k", 1, 0.6, LATENCY),
    row(*FILE, "read", "128k", 16, 1.3, BANDWIDTH),
    row(*FILE, "write", "128k", 16, 0.65, BANDWIDTH),
    row(*NULL, "randread", "4k", 32, 3.0),
    row(*NULL, "randwrite", "4k", 32, 3.0),
]}


def build_engine(args):
    """Installs the library in the scratch directory and builds the engine for it."""
    prefix, engine = f"{args.scratch}/library", f"{args.scratch}/rtrs.so"
    is_built = os.path.exists(f"{args.bin_dir}/{LIBRARY}")
    command("scripts/install-lib.sh", "--prefix", prefix,
            *(["--from", args.bin_dir] if is_built else []), seconds_max=BUILD_SECONDS_MAX)
    command("rtrs-client/fio/build.sh", "--output", engine, seconds_max=BUILD_SECONDS_MAX,
            env=os.environ | {"PKG_CONFIG_PATH": f"{prefix}/lib/pkgconfig"})
    return engine


def run(args):
    rows, engine = selected(args, TABLES), build_engine(args)
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="rtrs-bench-", dir=memory) as directory:
        path = f"{directory}/file.img"
        make_file(path, args.size)
        sides = {"nbdkit-file": Nbdkit(args, path),
                 "library-file": Library(args, f"{path},no-lock", engine),
                 "nbdkit-null": NbdkitNull(args, args.size),
                 "library-null": Library(args, f"null:{args.size}", engine)}
        sides = {name: side for name, side in sides.items()
                 if any(name in row.sides for row in rows)}
        for name, side in sides.items():
            side.name = name
        return {"tables": {"": judge(rows, measure(args, rows, sides), sides)}}


COMPARISON = Comparison(
    "fio with librtrs and fio with nbdkit", TABLES, run, programs=("rtrs-server",),
    build=("--bin=rtrs-server",), tools={"fio": "fio", "nbdkit": "nbdkit", "cc": "gcc",
                                         "pkg-config": "pkg-config"},
    add_options=lambda parser: add_size(parser, 1 << 30, "the exports"))
