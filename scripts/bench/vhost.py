"""A virtual machine's disk over vhost-user-blk, compared with the way of a VM user today:
qemu-storage-daemon, which is an NBD client of nbdkit over TCP loopback. The guest is a driver in a
process (vhost-load). The daemon's CPU time per request is compared with that of our NBD socket."""

import os
import tempfile

from peers import add_size, make_file
from processes import command, parse_json
from servers import EXPORT, Fio, Nbdkit, Ours, run_load
from tables import BANDWIDTH, IOPS, LATENCY, Comparison, Figure, Row, judge, measure, selected

BUILD_SECONDS_MAX = 600
HERE = os.path.dirname(os.path.abspath(__file__))
BYTES = {"4k": 4 << 10, "128k": 128 << 10}


class QemuStorage(Nbdkit):
    """nbdkit over TCP, and qemu-storage-daemon as its client."""

    name = "qemu-storage-daemon"

    def start(self):
        super().start()
        self.socket = self.scratch("sock")
        self.launch(
            "qemu-storage-daemon", "--blockdev",
            f"driver=nbd,node-name=disk,server.type=inet,server.host=127.0.0.1,"
            f"server.port={self.port}", "--export",
            f"type=vhost-user-blk,id=disk,node-name=disk,writable=on,addr.type=unix,"
            f"addr.path={self.socket}", address=self.socket)


class OursVhost(Ours):
    """rtrs-server over TCP, and rtrs-client with a vhost-user socket."""

    name = "rtrs-vhost"

    def start_client(self, *flags):
        self.socket = self.scratch("sock")
        self.launch(f"{self.args.bin_dir}/rtrs-client", "attach", EXPORT, "--vhost-user",
                    self.socket, "--run-dir", self.scratch("client"), "--foreground", *flags,
                    address=self.socket)


class Load:
    """A load of vhost-load, or the same load of fio on the NBD socket."""

    def __init__(self, rw, block, depth):
        self.rw, self.block, self.depth = rw, block, depth

    def __call__(self, side, args):
        if not hasattr(side, "socket"):
            found = Fio(self.rw, self.block, self.depth)(side, args)
        else:
            argv = [args.vhost_load, side.socket, self.rw, BYTES[self.block], self.depth,
                    args.runtime]
            output, cpu, server, load, foreign = run_load(
                side, "vhost-load", argv, args.runtime * 3 + 30)
            found = parse_json("vhost-load", output)
            ios = max(1, found["ios"])
            found |= {"mb_per_s": found["iops"] * BYTES[self.block] / 1e6, "foreign": foreign,
                      "cpu_us": cpu * 1e6 / ios, "server_cpu_us": server * 1e6 / ios,
                      "load_cpu_us": load * 1e6 / ios}
        return found | {"daemon_cpu_us": found["cpu_us"] - found["server_cpu_us"]}


def row(rw, block, depth, asked, figure=IOPS):
    return Row(f"{rw}-{block}-q{depth}", f"{block} {rw} QD{depth}", Load(rw, block, depth),
               ("qemu-storage-daemon", "rtrs-vhost"), figure, asked)


TABLES = {"one ring": [
    row("randread", "4k", 32, 2.0),
    row("randwrite", "4k", 32, 2.0),
    row("randread", "4k", 1, 0.7, LATENCY),
    row("read", "128k", 16, 1.3, BANDWIDTH),
    row("write", "128k", 16, 1.0, BANDWIDTH),
    Row("cpu", "CPU of rtrs-client per 4k randread QD32, compared with its NBD socket",
        Load("randread", "4k", 32), ("rtrs", "rtrs-vhost"),
        Figure("daemon_cpu_us", "{daemon_cpu_us:.2f} us", True), 0.6),
]}


def run(args):
    rows = selected(args, TABLES)
    target = f"{args.scratch}/vhost-load"
    command("cargo", "build", "--release", "--locked", "--manifest-path",
            f"{HERE}/vhost-load/Cargo.toml", "--target-dir", target,
            seconds_max=BUILD_SECONDS_MAX)
    args.vhost_load = f"{target}/release/vhost-load"
    with tempfile.TemporaryDirectory(prefix="rtrs-bench-", dir=args.scratch) as directory:
        kinds = [kind for kind in (QemuStorage, Ours, OursVhost)
                 if any(kind.name in row.sides for row in rows)]
        paths = {kind.name: f"{directory}/{kind.name}.img" for kind in kinds}
        for path in paths.values():
            make_file(path, args.size)
        sides = {kind.name: kind(args, paths[kind.name]) for kind in kinds}
        return {"tables": {"": judge(rows, measure(args, rows, sides), sides)}}


COMPARISON = Comparison(
    "a disk over vhost-user-blk with qemu-storage-daemon and nbdkit", TABLES, run,
    tools={"fio": "fio", "nbdkit": "nbdkit", "qemu-storage-daemon": "qemu-system-common"},
    add_options=lambda parser: add_size(parser, 512 << 20, "the exports"))
