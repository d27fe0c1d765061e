#!/usr/bin/env python3
"""Exports of other servers' storage (rbd:, nbd:) beside the usual programs.

Started by scripts/bench-cluster.sh, which runs a Ceph cluster; measures with what bench.py has. In
each round the sides of a row run in turn, every second round in reverse. A Ceph image has one
writer, so a side is started before and ended after each of its runs, with the same image for all. A
ratio is taken within each round; the table shows the median with the lowest and the highest. CPU is
that of the serving processes, then of the load (fio or rtrs-client bench, with librbd where it is
in there), then of the OSD, per IO. `others` is what none of these used.

qemu-nbd asks librbd before each read which parts of it are stored, if the image has the feature
fast-diff, which images have by default. So it is compared on an image without it too.
"""

import argparse
import atexit
import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

import bench

# Images, and the features to make them with.
IMAGE, PLAIN = "bench", "plain"
FEATURES = {IMAGE: [], PLAIN: ["--image-feature", "layering", "--image-feature", "exclusive-lock"]}
# Kind of row.
BRIDGE_RBD, BRIDGE_PLAIN, SESSION_RBD, BRIDGE_NBD = ("bridge-rbd", "bridge-plain", "session-rbd",
                                                     "bridge-nbd")
# id, title, kind, rw, the ratio asked for.
ROWS = [
    ("bridge-rbd-randread", "bridge on rbd: / qemu-nbd, 4k randread QD32", BRIDGE_RBD, "randread",
     1.3),
    ("bridge-rbd-randwrite", "the same, 4k randwrite QD32", BRIDGE_RBD, "randwrite", 1.3),
    ("bridge-plain-randread", "the same without fast-diff, 4k randread QD32", BRIDGE_PLAIN,
     "randread", None),
    ("session-rbd-randread", "session on rbd: / fio's engine rbd, 4k randread QD32", SESSION_RBD,
     "randread", 0.8),
    ("bridge-nbd-randread", "bridge on nbd: to nbdkit / nbdkit, 4k randread QD32", BRIDGE_NBD,
     "randread", 0.6),
    ("bridge-nbd-randwrite", "the same, 4k randwrite QD32", BRIDGE_NBD, "randwrite", 0.6),
]
DEPTH = 32


class QemuNbd(bench.Side):
    """qemu-nbd on the image, over a unix socket, without its own cache."""

    name = "qemu-nbd"

    def start(self):
        sock = os.path.join(self.scratch, "qemu.sock")
        self.uri = f"nbd+unix:///bench?socket={sock}"
        process = self.launch("qemu-nbd", "-f", "raw", "-t", "--shared=0", "--cache=none", "-x",
                              "bench", "-k", sock, self.path)
        bench.wait_connect(process, sock)


class FioRbd(bench.Side):
    """No server: librbd in fio."""

    name = "fio-rbd"

    def start(self):
        pass

    def fio_engine(self):
        return ["--ioengine=rbd", "--pool=rbd", f"--rbdname={IMAGE}", "--clientname=admin"]


class Nbdkit(bench.Side):
    """nbdkit with its plugin memory, over a unix socket."""

    name = "nbdkit"

    def start(self):
        self.sock = os.path.join(self.scratch, "nbdkit.sock")
        self.uri = f"nbd+unix:///?socket={self.sock}"
        process = self.launch("nbdkit", "-f", "-U", self.sock, "memory", self.path)
        bench.wait_connect(process, self.sock)


class Ours(bench.Ours):
    """rtrs-server and rtrs-client, apart from other daemons of this host."""

    def start(self):
        self.server_args = ["--run-dir", self.scratch, "--state-dir", self.scratch]
        super().start()


class OursSession(Ours):
    name = "rtrs-session"
    attach = False


class OursNbd(Ours):
    """Ours with a nbdkit of its own behind it."""

    name = "rtrs-nbdkit"

    def start(self):
        self.behind = Nbdkit(self.path, self.scratch, self.bin_dir)
        self.behind.start()
        self.path = f"nbd+unix:///?socket={self.behind.sock},id=bench"
        super().start()
        self.processes += self.behind.processes


# Of a kind of row: ours first.
SIDES = {BRIDGE_RBD: (Ours, QemuNbd), BRIDGE_PLAIN: (Ours, QemuNbd),
         SESSION_RBD: (OursSession, FioRbd), BRIDGE_NBD: (OursNbd, Nbdkit)}


def make_images(size):
    """Makes the images and writes all of them, so that every read finds an object."""
    with tempfile.NamedTemporaryFile() as data:
        bench.make_file(data.name, size)
        for image, features in FEATURES.items():
            done = subprocess.run(
                ["rbd", "import", "--no-progress", *features, data.name, f"rbd/{image}"],
                capture_output=True, text=True, timeout=120, check=False)
            if done.returncode != 0:
                raise bench.BenchError(f"cannot make the image {image}: {done.stderr[-500:]}")


def cluster_pids(cluster):
    pids = []
    for file in glob.glob(f"{cluster}/run/*.pid"):
        with open(file) as text:
            pids.append(int(text.read()))
    return pids


def measure(kind, row, args):
    """One run of one side."""
    _, _, which, rw, _ = row
    scratch = tempfile.mkdtemp(prefix="run-", dir=args.scratch)
    image = PLAIN if which == BRIDGE_PLAIN else IMAGE
    target = str(args.size) if which == BRIDGE_NBD else f"rbd:rbd/{image}"
    side = kind(target, scratch, args.bin_dir)
    bench.wait_quiet(args.wait_quiet)
    try:
        side.start()
        before, begin = bench.cpu_seconds(args.cluster_pids), time.monotonic()
        if kind is OursSession:
            sample = bench.measure_session(side, rw, 1, DEPTH, args, scratch)
        else:
            sample = bench.measure_fio(side, rw, "4k", DEPTH, args, scratch)
        osd = bench.cpu_seconds(args.cluster_pids) - before
        share = osd / ((time.monotonic() - begin) * os.cpu_count())
        sample["foreign"] = max(0.0, sample["foreign"] - share)
        sample["osd_us_per_io"] = osd * 1e6 / max(1.0, sample["iops"] * args.runtime)
    finally:
        side.stop()
    return sample


def cell(samples):
    middle = bench.median_of(samples)
    middle["osd"] = bench.statistics.median(s["osd_us_per_io"] for s in samples)
    low, high = (pick(s["iops"] for s in samples) for pick in (min, max))
    return middle, f"{middle['iops']:.0f} ({low:.0f}-{high:.0f})"


def cpu_text(middle):
    return (f"{middle['cpu_us_per_io']:.0f} + {middle['load_cpu_us_per_io']:.0f} + "
            f"{middle['osd']:.0f}")


def table(rows, results):
    """The results as text."""
    out = ["| row | ours, IOPS | other, IOPS | ratio | asked | met | CPU of ours, us/IO "
           "| CPU of other, us/IO | others |", "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        ours, other = results[row[0]]
        verdict = bench.compare({"rounds": ours}, {"rounds": other}, lambda s: s["iops"], row[4],
                                False)
        verdict["asked"] = row[4]
        (mine, mine_text), (its, its_text) = cell(ours), cell(other)
        others = max(s["foreign"] for s in ours + other)
        out.append(f"| {row[1]} | {mine_text} | {its_text} | {bench.ratio_text(verdict, '>=')} "
                   f"{cpu_text(mine)} | {cpu_text(its)} | {others * 100:.0f} % |")
    return "\n".join(out)


def parse_args():
    parser = argparse.ArgumentParser(prog="bench-cluster.sh",
                                     description=__doc__.splitlines()[0])
    parser.add_argument("--cluster", help=argparse.SUPPRESS)
    parser.add_argument("--runtime", type=int, default=4, help="seconds per run (4)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, medians are shown (5)")
    parser.add_argument("--size", type=bench.parse_size, default=256 << 20,
                        help="size of image and disk in memory (256M)")
    parser.add_argument("--only", action="append", metavar="ROW",
                        help="only rows whose id contains ROW; may be given again")
    parser.add_argument("--wait-quiet", type=int, default=0, metavar="SEC",
                        help="before each run wait up to SEC for a machine below 10 %% busy (0)")
    parser.add_argument("--bin-dir", default="target/release", help="where our binaries are")
    parser.add_argument("--json", metavar="FILE", help="write all samples there")
    parser.add_argument("--list", action="store_true", help="print the row ids and stop")
    args = parser.parse_args()
    if args.list:
        print("\n".join(row[0] for row in ROWS))
        sys.exit(0)
    if args.runtime < 1 or args.rounds < 1 or args.size < 1 << 20:
        parser.error("--runtime and --rounds need at least 1, --size at least 1M")
    return args


def main():
    args = parse_args()
    bench.end_on_signals()
    missing = [tool for tool in ("fio", "nbdkit", "qemu-nbd", "rbd") if not shutil.which(tool)]
    missing += [f"{args.bin_dir}/{name}" for name in ("rtrs-server", "rtrs-client")
                if not os.access(f"{args.bin_dir}/{name}", os.X_OK)]
    if missing:
        raise bench.BenchError(f"missing: {', '.join(missing)}")
    rows = [row for row in ROWS if bench.wanted(args, row[0])]
    if not rows:
        raise bench.BenchError("--only names no row; see --list")
    args.scratch = tempfile.mkdtemp(prefix="rtrs-bench-")
    atexit.register(lambda: shutil.rmtree(args.scratch, ignore_errors=True))
    atexit.register(bench.stop_all)
    args.cluster_pids = cluster_pids(args.cluster)
    load_before = os.getloadavg()[0]
    make_images(args.size)
    results = {row[0]: ([], []) for row in rows}
    for round_index in range(args.rounds):
        for row in rows:
            for place in (0, 1)[::-1 if round_index % 2 else 1]:
                kind = SIDES[row[2]][place]
                sample = measure(kind, row, args)
                bench.report(round_index, args, row[0], kind.name, sample)
                results[row[0]][place].append(sample)
    if args.json:
        with open(args.json, "w") as out:
            json.dump(results, out, indent=1)
    print(f"{bench.version_of('ceph', '--version')}; {bench.version_of('qemu-nbd', '--version')}; "
          f"{bench.version_of('nbdkit', '--version')}; {bench.version_of('fio', '--version')}; "
          f"{args.rounds} rounds of {args.runtime} s, medians (range); load {load_before:.1f} "
          f"before, {os.getloadavg()[0]:.1f} after.\n")
    print(table(rows, results))


if __name__ == "__main__":
    try:
        main()
    except bench.BenchError as error:
        print(f"bench-cluster: error: {error}", file=sys.stderr)
        sys.exit(1)
