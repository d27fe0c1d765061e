"""RDS over the loopback beside plain TCP: round trips of 64 bytes with a blocking ping-pong,
messages of 8 KiB at depth 64 with a stream, and qperf's rds_lat over librds_preload.so and
`rds node` with its tcp_lat."""

import os
import re
import time

from processes import BenchError, Process, command, free_port, parse_json, wait_for
from servers import Side
from tables import DEFAULTS, Comparison, Figure, Row, judge, measure, selected

CLIENT, SERVER = "127.0.0.1", "127.0.0.2"
US = {"ns": 0.001, "us": 1, "ms": 1000, "sec": 1000000}


class Nodes(Side):
    """A side of a load between two addresses. The programs of both ends run all the time."""

    def __init__(self, args, name, *flags):
        super().__init__(args)
        self.name, self.flags = name, flags


class Stress:
    """A load of `rds stress`."""

    def __init__(self, *flags):
        self.flags = flags

    def __call__(self, side, args):
        found = parse_json("rds stress", command(
            f"{args.bin_dir}/rds", "stress", SERVER, "-t", f"{args.runtime}s", "-o", "json",
            *side.flags, *self.flags))
        trip = found["round_trip_us"] or {}
        return {"per_second": found["requests_per_second"],
                **{f"{key}_us": trip[key] for key in ("mean", "p50") if key in trip}}


def qperf(side, args):
    """Measures a latency with qperf. Its server does not listen for a moment after each test."""
    for attempts_left in reversed(range(50)):
        try:
            output = command("qperf", "-lp", args.qperf_port, "-t", args.runtime, "-uu", SERVER,
                             *side.flags, seconds_max=args.runtime + 30, env=args.preload)
            found = re.search(r"latency\s*=\s*([\d.]+) (\w+)", output)
            return {"mean_us": float(found[1]) * US[found[2]]}
        except BenchError:
            if attempts_left == 0:
                raise
            time.sleep(0.1)


MEAN = Figure("mean_us", "{mean_us:.1f} us", True)
P50 = Figure("p50_us", "{p50_us:.1f} us", True)
RATE = Figure("per_second", "{per_second:.0f}")
STREAM = Stress("-q", "8192", "-d", "64")
TABLES = {"row": [
    Row("round-trip", "round trip of 64 B, depth 1, mean", Stress("-q", "64", "-a", "64"),
        ("tcp", "rds"), MEAN, 2.0),
    Row("round-trip-p50", "the same, p50", None, ("tcp", "rds"), P50, 2.0, "round-trip"),
    Row("stream", "8 KiB, depth 64, messages a second", STREAM, ("tcp", "rds"), RATE, 0.7),
    Row("stream-unchecked", "the same, bytes not checked", STREAM, ("rds-unchecked",), RATE, 0.7,
        best_of="stream"),
    Row("qperf", "qperf rds_lat over the library, tcp_lat", qperf, ("tcp_lat", "rds_lat"), MEAN),
]}


def node(args, name, *argv, ready, **options):
    """Starts a program of an end and waits for a line of its output."""
    process = Process(name, argv, **options)
    wait_for(f"prints {ready!r}", lambda: ready in process.output(), process)
    return process


def run(args):
    rows = selected(args, TABLES)
    rds = f"{args.bin_dir}/rds"
    port, stress_port, args.qperf_port = free_port(), 18000, free_port()
    ports = ("--listen-port", port, "--peer-port", port)
    args.preload = os.environ | {"RDS_DIR": args.scratch,
                                 "LD_PRELOAD": f"{args.bin_dir}/librds_preload.so"}
    ours = ("-p", stress_port, "-I", CLIENT, *ports)
    sides = {name: Nodes(args, name, *flags) for name, flags in (
        ("tcp", ("-p", stress_port, "--tcp")), ("rds", ours),
        ("rds-unchecked", (*ours, "--verify", "off")),
        ("tcp_lat", ("tcp_lat",)), ("rds_lat", ("rds_lat",)))}
    samples = {}
    loads = [row for row in rows if row.load and row.load is not qperf]
    if loads:
        server = node(args, "rds-stress", rds, "stress", "--listen", "-I", SERVER, "-p",
                      stress_port, *ports, ready="listening")
        samples |= measure(args, loads, sides)
        server.stop()
    if any(row.load is qperf for row in rows):
        nodes = node(args, "rds-node", rds, "node", "--address", CLIENT, "--address", SERVER,
                     "--socket-dir", args.scratch, *ports, ready=f"node {SERVER} is ready")
        peer = Process("qperf", ["qperf", "-lp", args.qperf_port], env=args.preload)
        samples |= measure(args, [row for row in rows if row.load is qperf], sides)
        peer.stop()
        nodes.stop()
    return {"tables": {"": judge(rows, samples, sides)}}


COMPARISON = Comparison(
    "RDS over the loopback with plain TCP", TABLES, run, programs=("rds", "librds_preload.so"),
    build=("-p=rds", "-p=rds-preload"),
    defaults=DEFAULTS | {"runtime": 3}, tools={"qperf": "qperf"})
