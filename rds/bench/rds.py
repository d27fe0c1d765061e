"""RDS over loopback next to plain TCP: round trips of 64 bytes with a blocking ping-pong,
messages of 8 KiB at depth 64 with a stream, and third-party programs, over librds_preload.so and
`rds node`: flow.c, and qperf's rds_lat and rds_bw with its tcp_lat and tcp_bw."""

import os
import re
import time

from processes import BenchError, Process, command, free_port, parse_json, wait_for
from servers import Side
from tables import DEFAULTS, Comparison, Figure, Row, judge, measure, selected

CLIENT, SERVER = "127.0.0.1", "127.0.0.2"
# Flags of nodes whose sockets have large buffers.
LARGE = ("--sndbuf", "1M", "--rcvbuf", "1M")
US = {"ns": 0.001, "us": 1, "ms": 1000, "sec": 1000000}
BYTES = {"bytes": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9}
HERE = os.path.dirname(os.path.abspath(__file__))


class Nodes(Side):
    """One side of a load between two addresses. The programs of both ends keep running."""

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
    """Measures with qperf. Its server briefly stops listening after each test."""
    for attempts_left in reversed(range(50)):
        try:
            output = command("qperf", "-lp", args.qperf_port, "-t", args.runtime, "-uu", SERVER,
                             *side.flags, seconds_max=args.runtime + 30, env=args.preload)
            break
        except BenchError:
            if attempts_left == 0:
                raise
            time.sleep(0.1)
    if found := re.search(r"latency\s*=\s*([\d.]+) (\w+)", output):
        return {"mean_us": float(found[1]) * US[found[2]]}
    if found := re.search(r"\b(?:recv_)?bw\s*=\s*([\d.]+) (\w+)/sec", output):
        return {"mb_per_s": float(found[1]) * BYTES[found[2]] / 1e6}
    raise BenchError(f"qperf printed no figure:\n{output[-1000:]}")


class Flow:
    """A load of flow.c. The two ends run on different CPUs, the same two for both protocols."""

    def __init__(self, measures, meanwhile, key, length):
        self.words, self.key, self.length = (measures, meanwhile), key, length

    def __call__(self, side, args):
        protocol, own, peer = side.flags
        env = args.preload if protocol == "rds" else None

        def start(word, cpu):
            is_server = word in ("receive", "pong")
            ends = (peer, own) if is_server else (own, peer)
            process = Process(f"flow {word}", [
                f"{args.scratch}/flow", protocol, word, *ends, args.flow_port, self.length,
                args.runtime, cpu], env=env)
            if is_server:
                wait_for("is ready", lambda: "ready" in process.output(), process)
            return process

        # The end that receives or answers starts first.
        words = sorted(self.words, key=lambda word: word in ("send", "ping"))
        ends = {word: start(word, cpu) for cpu, word in enumerate(words)}
        measures, meanwhile = self.words
        output = ends[measures].wait(args.runtime + 30)
        ends[meanwhile].stop()
        args.flow_port += 2
        return {self.key: float(output.split()[-1])}


MEAN = Figure("mean_us", "{mean_us:.1f} us", True)
P50 = Figure("p50_us", "{p50_us:.1f} us", True)
RATE = Figure("per_second", "{per_second:.0f}")
BANDWIDTH = Figure("mb_per_s", "{mb_per_s:.0f} MB/s")
STREAM = Stress("-q", "8192", "-d", "64")
FLOW_STREAM = Flow("receive", "send", "per_second", 8192)
TABLES = {"row": [
    Row("round-trip", "round trip of 64 B, depth 1, mean", Stress("-q", "64", "-a", "64"),
        ("tcp", "rds"), MEAN, 2.0),
    Row("round-trip-p50", "the same, p50", None, ("tcp", "rds"), P50, 2.0, "round-trip"),
    Row("stream", "8 KiB, depth 64, messages per second", STREAM, ("tcp", "rds"), RATE, 0.7),
    Row("stream-unchecked", "the same, bytes not checked", STREAM, ("rds-unchecked",), RATE, 0.7,
        best_of="stream"),
    Row("library-one", "8 KiB stream of a program over the library, one node",
        FLOW_STREAM, ("flow-tcp", "flow-one"), RATE, 0.9),
    Row("library-two", "the same, two nodes",
        FLOW_STREAM, ("flow-tcp", "flow-two"), RATE, 0.7),
    Row("library-two-large", "the same, two nodes with sndbuf and rcvbuf 1M",
        FLOW_STREAM, ("flow-tcp", "flow-large"), RATE),
    Row("library-round-trip", "64 B ping-pong of a program over the library, one node",
        Flow("ping", "pong", "mean_us", 64), ("flow-tcp", "flow-one"), MEAN, 1.7),
    Row("qperf", "qperf rds_lat over the library, tcp_lat", qperf, ("tcp_lat", "rds_lat"), MEAN),
    Row("qperf-bandwidth", "qperf rds_bw of 8 KiB over the library, tcp_bw", qperf,
        ("tcp_bw", "rds_bw"), BANDWIDTH, 0.5),
    Row("qperf-bandwidth-large", "the same, nodes with sndbuf and rcvbuf 1M", qperf,
        ("tcp_bw", "rds_bw-large"), BANDWIDTH),
    Row("qperf-bandwidth-1m", "the same, rds_bw of 1 MiB", qperf,
        ("tcp_bw", "rds_bw-1m"), BANDWIDTH),
]}


def node(args, name, *argv, ready, **options):
    """Starts the program of one end and waits for a line of its output."""
    process = Process(name, argv, **options)
    wait_for(f"prints {ready!r}", lambda: ready in process.output(), process)
    return process


def run(args):
    rows = selected(args, TABLES)
    rds = f"{args.bin_dir}/rds"
    port, stress_port, args.qperf_port, args.flow_port = free_port(), 18000, free_port(), 19000
    ports = ("--listen-port", port, "--peer-port", port)
    args.preload = os.environ | {"RDS_DIR": args.scratch,
                                 "LD_PRELOAD": f"{args.bin_dir}/librds_preload.so"}
    ours = ("-p", stress_port, "-I", CLIENT, *ports)
    sides = {name: Nodes(args, name, *flags) for name, flags in (
        ("tcp", ("-p", stress_port, "--tcp")), ("rds", ours),
        ("rds-unchecked", (*ours, "--verify", "off")),
        ("tcp_lat", ("tcp_lat",)), ("rds_lat", ("rds_lat",)),
        ("tcp_bw", ("-m", "8K", "tcp_bw")), ("rds_bw", ("-m", "8K", "rds_bw")),
        ("flow-tcp", ("tcp", CLIENT, SERVER)), ("flow-one", ("rds", SERVER, SERVER)),
        ("flow-two", ("rds", CLIENT, SERVER)), ("flow-large", ("rds", CLIENT, SERVER)),
        ("rds_bw-large", ("-m", "8K", "rds_bw")), ("rds_bw-1m", ("-m", "1M", "rds_bw")))}
    samples = {}
    loads = [row for row in rows if isinstance(row.load, Stress)]
    if loads:
        server = node(args, "rds-stress", rds, "stress", "--listen", "-I", SERVER, "-p",
                      stress_port, *ports, ready="listening")
        samples |= measure(args, loads, sides)
        server.stop()
    library_loads = [row for row in rows if row.load and row not in loads]
    is_large = [row.sides[-1].endswith(("-large", "-1m")) for row in library_loads]
    for flags in ((), LARGE):
        some = [row for row, large in zip(library_loads, is_large) if large == bool(flags)]
        if not some:
            continue
        command("cc", "-O2", "-o", f"{args.scratch}/flow", f"{HERE}/flow.c")
        nodes = node(args, "rds-node", rds, "node", "--address", CLIENT, "--address", SERVER,
                     *flags, "--socket-dir", args.scratch, *ports, ready=f"node {SERVER} is ready")
        peer = Process("qperf", ["qperf", "-lp", args.qperf_port], env=args.preload)
        samples |= measure(args, some, sides)
        peer.stop()
        nodes.stop()
    return {"tables": {"": judge(rows, samples, sides)}}


COMPARISON = Comparison(
    "RDS over loopback with plain TCP", TABLES, run, programs=("rds", "librds_preload.so"),
    build=("-p=rds", "-p=rds-preload"),
    defaults=DEFAULTS | {"runtime": 3}, tools={"qperf": "qperf", "cc": "gcc"})
