"""Exports backed by other servers' storage (rbd:, nbd:) beside the usual programs, on an in-memory
Ceph cluster run by scripts/ceph.sh.

A Ceph image has one writer, so a side runs during its own measurements only. qemu-nbd asks librbd
before each read which parts of an image with the feature fast-diff are stored; images have it by
default. So an image without the feature is compared too.
"""

import glob
import os
import time

from peers import add_size, make_file
from processes import command, cpu_seconds, free_port
from servers import EXPORT, Fio, Ours, OursSession, Session, Side
from tables import COSTS, DEFAULTS, Comparison, Row, judge, measure, selected

# Features of the images.
IMAGES = {"bench": (), "plain": ("--image-feature", "layering", "--image-feature",
                                 "exclusive-lock")}


class OverUnix(Side):
    """A server on a unix socket."""

    def start(self):
        sock = self.scratch("sock")
        if os.path.exists(sock):
            os.unlink(sock)
        self.uri = f"nbd+unix:///{self.export}?socket={sock}"
        self.launch(*self.argv(sock), self.target, address=sock)


class QemuNbd(OverUnix):
    """qemu-nbd on an image, without its own cache."""

    name, export = "qemu-nbd", EXPORT

    def argv(self, sock):
        return ("qemu-nbd", "-f", "raw", "-t", "--shared=0", "--cache=none", "-x", EXPORT, "-k",
                sock)


class Nbdkit(OverUnix):
    """nbdkit with its plugin memory."""

    name, export = "nbdkit", ""

    def argv(self, sock):
        return ("nbdkit", "-f", "-U", sock, "memory")


class FioRbd(Side):
    """No server: librbd in fio."""

    name = "fio-rbd"

    def fio_engine(self):
        return ["--ioengine=rbd", "--pool=rbd", "--rbdname=bench", "--clientname=admin"]


class OursNbd(Ours):
    """rtrs on its own nbdkit."""

    name = "rtrs-nbdkit"

    def __init__(self, args, size):
        super().__init__(args)
        self.behind = Nbdkit(args, size)

    def start(self):
        self.behind.start()
        self.target = f"{self.behind.uri},id=bench"
        super().start()

    def pids(self):
        return super().pids() + self.behind.pids()

    def stop(self):
        super().stop()
        self.behind.stop()


class WithOsd:
    """A load with the CPU time of the cluster."""

    def __init__(self, load):
        self.load = load

    def __call__(self, side, args):
        before, start = cpu_seconds(args.cluster), time.monotonic()
        sample = self.load(side, args)
        osd = cpu_seconds(args.cluster) - before
        share = osd / ((time.monotonic() - start) * os.cpu_count())
        return sample | {"foreign": max(0.0, sample["foreign"] - share),
                         "osd_us": osd * 1e6 / max(1.0, sample["iops"] * args.runtime)}


READ, WRITE = (WithOsd(Fio(rw, "4k", 32)) for rw in ("randread", "randwrite"))


def session(side, args):
    """Reads through a session without NBD, or with the engine rbd of fio."""
    load = Session("randread", "4k", 32) if side.name == OursSession.name else READ.load
    return WithOsd(load)(side, args)


RBD, PLAIN, NBD = ("qemu-nbd", "rtrs"), ("qemu-nbd-plain", "rtrs-plain"), ("nbdkit", "rtrs-nbdkit")
TABLES = {"row": [
    Row("bridge-rbd-randread", "bridge on rbd: / qemu-nbd, 4k randread QD32", READ, RBD, asked=1.3),
    Row("bridge-rbd-randwrite", "the same, 4k randwrite QD32", WRITE, RBD, asked=1.3),
    Row("bridge-plain-randread", "the same without fast-diff, 4k randread QD32", READ, PLAIN),
    Row("session-rbd-randread", "session on rbd: / fio's engine rbd, 4k randread QD32", session,
        ("fio-rbd", "rtrs-session"), asked=0.8),
    Row("bridge-nbd-randread", "bridge on nbd: to nbdkit / nbdkit, 4k randread QD32", READ, NBD,
        asked=0.6),
    Row("bridge-nbd-randwrite", "the same, 4k randwrite QD32", WRITE, NBD, asked=0.6),
]}


def run(args):
    rows = selected(args, TABLES)
    directory = f"{args.scratch}/ceph"
    try:
        command("scripts/ceph.sh", "start", directory, free_port(), seconds_max=300)
        with open(f"{directory}/ceph.conf", "a") as conf:
            # Applies to all sides, because our server never has a cache.
            conf.write("[client]\nrbd cache = false\n")
        os.environ["CEPH_CONF"] = f"{directory}/ceph.conf"
        args.cluster = []
        for path in glob.glob(f"{directory}/run/*.pid"):
            with open(path) as file:
                args.cluster.append(int(file.read()))
        # All of each image is written, so that every read finds an object.
        make_file(f"{args.scratch}/data", args.size)
        for image, features in IMAGES.items():
            command("rbd", "import", "--no-progress", *features, f"{args.scratch}/data",
                    f"rbd/{image}")
        sides = {f"{kind.name}{word}": kind(args, f"rbd:rbd/{image}")
                 for word, image in (("", "bench"), ("-plain", "plain"))
                 for kind in (QemuNbd, Ours, OursSession)}
        sides |= {kind.name: kind(args, args.size) for kind in (FioRbd, Nbdkit, OursNbd)}
        samples = measure(args, rows, sides, each_run=True)
    finally:
        command("scripts/ceph.sh", "stop", directory)
    return {"tables": {"": judge(rows, samples, sides)}}


COMPARISON = Comparison(
    "exports rbd: and nbd: with qemu-nbd, fio and nbdkit, on a Ceph cluster", TABLES, run,
    add_options=lambda parser: add_size(parser, 256 << 20, "image and disk in memory"),
    defaults=DEFAULTS | {"runtime": 4},
    costs=(*COSTS, ("CPU of OSD, us/IO", "{osd_us:.1f}")),
    tools={"fio": "fio", "nbdkit": "nbdkit", "qemu-nbd": "qemu-utils", "rbd": "ceph-common",
           "ceph-osd": "ceph-osd"})
