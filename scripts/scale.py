#!/usr/bin/env python3
"""The table of scale: what many sessions cost the server and each client, and how that grows.

Server and clients run on this machine, over TCP loopback; each session opens an export of its own,
a sparse file in memory. Two kinds of clients stand for two questions:

- `rtrs-client attach` processes: how long an attach takes, what an idle client costs, and the same
  for many volumes in ten sessions.
- `rtrs-crowd`: many sessions in one process, each the same engine with a thread and an io_uring of
  its own, but without front end and control socket. It makes the other sessions of a server, so
  that a thousand of them do not need a thousand processes, and it is the load.

CPU is what the threads of a process ran (schedstat, nanoseconds); memory is PSS (smaps_rollup). The
kernel's memory for sockets is not counted. Started by scripts/scale.sh. Only the standard library
is used. Exit codes: 0 good, 1 failed, 2 usage.
"""

import argparse
import atexit
import json
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True

import bench
import scale_failover
import scale_plot

TICK = 0.02
START_MAX = 60
ORDER_MAX = 300
EXPORT_BYTES = 16 << 20
# Processes that share all volumes.
VOLUME_SESSIONS = 10
# Number of first and last attaches of volumes whose medians are compared.
VOLUME_ATTACHES = 9
# Number of reads in flight of a busy session.
DEPTH = 32

# id, title, sign, what is asked, unit.
ROWS = [
    ("attach-growth", "attach of the last session / of the first", "<=", 1.5, "x"),
    ("server-idle", "CPU of the server, all sessions idle", "<=", 0.2, "core"),
    ("server-memory", "memory of the server per session", "<=", 300, "KiB"),
    ("client-idle", "CPU of an idle client", "<=", 0.05, "%"),
    ("volume-growth", "attach of the last volume / of the first", "<=", 1.5, "x"),
    ("volumes-idle", "CPU of all idle volumes in ten sessions, server included", "<=", 1, "%"),
    ("first-io", "first read after idle time / a later one", None, None, "x"),
    ("failover", "longest read after idle time, one of two paths silent", "<=", 0.5, "s"),
    ("restart", "kill -9 and restart of the server: until all sessions are up", "<=", 5, "s"),
    ("one-among", "IOPS of one busy session among idle ones / alone", ">=", 0.95, "x"),
    ("many-busy", "IOPS of many busy sessions / of one", ">=", 0.9, "x"),
    ("fairness", "slowest / fastest of many busy sessions", ">=", 0.7, "x"),
]


def say(text):
    """Prints a progress line on stderr; stdout has only the result."""
    print(f"scale: {text}", file=sys.stderr, flush=True)


# ---- processes -------------------------------------------------------------------------------

def cpu_seconds(pid):
    """Returns the CPU time of all threads of a process so far."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{task}/schedstat") as stat:
                total += int(stat.read().split()[0])
        except OSError:
            continue
    return total / 1e9


def sleeps(pid):
    """Returns how often the threads of a process went to sleep so far."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{task}/status") as status:
                for line in status:
                    if line.startswith("voluntary_ctxt_switches:"):
                        total += int(line.split()[1])
        except OSError:
            continue
    return total


def pss_kib(pid):
    with open(f"/proc/{pid}/smaps_rollup") as rollup:
        for line in rollup:
            if line.startswith("Pss:"):
                return int(line.split()[1])
    raise bench.BenchError(f"no Pss of process {pid}")


def threads(pid):
    return len(os.listdir(f"/proc/{pid}/task"))


class Server:
    """rtrs-server with one export for each possible session."""

    def __init__(self, args, scratch, name):
        self.args, self.scratch, self.name = args, scratch, name
        self.port = bench.free_port()
        self.portal = f"tcp://127.0.0.1:{self.port}"
        self.run_dir = os.path.join(scratch, name)
        os.mkdir(self.run_dir)
        exports = []
        for number in range(args.sessions + 8):
            path = os.path.join(self.run_dir, f"{number}.img")
            with open(path, "wb") as out:
                out.truncate(EXPORT_BYTES)
            exports.append({"name": f"v{number}", "target": path})
        self.config = os.path.join(self.run_dir, "server.yaml")
        with open(self.config, "w") as out:
            json.dump({"export": exports, "listen": [f"tcp://0.0.0.0:{self.port}"],
                       "insecure-open": True, "sessions-max": args.sessions + 100,
                       "run-dir": self.run_dir, "state-dir": os.path.join(self.run_dir, "state"),
                       "log": "warn"}, out)
        self.process = None

    def start(self):
        argv = [f"{self.args.bin_dir}/rtrs-server", "--config", self.config]
        self.process = bench.Process(self.name, argv)
        bench.wait_connect(self.process, ("127.0.0.1", self.port))

    @property
    def pid(self):
        self.process.check_alive()
        return self.process.pid

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.child.wait(bench.STOP_SECONDS_MAX)
        self.process.stop()


class Crowd(bench.Process):
    """Many sessions in one process that executes orders."""

    def __init__(self, args, server):
        argv = [f"{args.bin_dir}/rtrs-crowd", "--path", f"127.0.0.1:{server.port}", *args.crowd]
        self.name, self.argv = f"crowd-{server.name}", [str(a) for a in argv]
        self.log = tempfile.NamedTemporaryFile(prefix="scale-crowd-", suffix=".log", delete=False)
        self.child = subprocess.Popen(self.argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                      stderr=self.log, start_new_session=True, bufsize=0)
        self.pid = self.child.pid
        self.rest = b""
        self.sessions = 0
        bench.STARTED.append(self)

    def order(self, *words, seconds_max=ORDER_MAX):
        text = " ".join(str(word) for word in words)
        self.child.stdin.write(f"{text}\n".encode())
        deadline = time.monotonic() + seconds_max
        while b"\n" not in self.rest:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self.failed(f"did not answer {text!r} within {seconds_max} s")
            ready, _, _ = select.select([self.child.stdout], [], [], left)
            got = os.read(self.child.stdout.fileno(), 1 << 20) if ready else b""
            if ready and not got:
                raise self.failed(f"ended at {text!r}")
            self.rest += got
        line, self.rest = self.rest.split(b"\n", 1)
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise self.failed(f"at {text!r}: {answer['error']}")
        return answer

    def grow(self, to):
        """Attaches sessions one after the other, up to a total count."""
        if to > self.sessions:
            self.order("attach", to - self.sessions)
            self.sessions = to


class Attached:
    """An rtrs-client attach process."""

    def __init__(self, args, server, number, scratch, paths=None):
        self.args, self.name = args, f"v{number}"
        self.run_dir = scratch
        self.sock = os.path.join(scratch, f"{self.name}.sock")
        self.argv = [f"{args.bin_dir}/rtrs-client", "attach", self.name, "--socket", self.sock,
                     "--run-dir", scratch, "-o", "json", *args.client]
        for path in paths or [server.portal]:
            self.argv += ["--path", path]
        start = time.monotonic()
        done = subprocess.run(self.argv, capture_output=True, text=True, timeout=START_MAX,
                              check=False)
        self.seconds = time.monotonic() - start
        if done.returncode != 0:
            raise bench.BenchError(f"attach failed: {' '.join(self.argv)}\n{done.stderr[-1500:]}")
        self.pid = json.loads(done.stdout)["pid"]
        self.started_at = bench.stat_fields(self.pid)[19]
        ATTACHED.append(self)

    def add(self, number):
        """Attaches one more volume to this session. Returns the time in seconds."""
        name = f"v{number}"
        argv = [self.argv[0], "attach", name, "--session", self.name, "--run-dir", self.run_dir,
                "--socket", os.path.join(self.run_dir, f"{name}.sock")]
        start = time.monotonic()
        done = subprocess.run(argv, capture_output=True, text=True, timeout=START_MAX, check=False)
        if done.returncode != 0:
            raise bench.BenchError(f"attach failed: {' '.join(argv)}\n{done.stderr[-1500:]}")
        return time.monotonic() - start

    def detach(self):
        ATTACHED.remove(self)
        done = subprocess.run([self.argv[0], "detach", self.name, "--force", "--run-dir",
                               self.run_dir],
                              capture_output=True, text=True, timeout=START_MAX, check=False)
        if done.returncode != 0:
            self.kill()
            raise bench.BenchError(f"detach of {self.name} failed: {done.stderr[-1500:]}")

    def paths_up(self):
        done = subprocess.run([self.argv[0], "status", self.name, "--run-dir", self.run_dir, "-o",
                               "json"], capture_output=True, text=True, timeout=START_MAX,
                              check=False)
        paths = json.loads(done.stdout)["paths"] if done.stdout else []
        return sum(path["state"] == "connected" for path in paths)

    def kill(self):
        try:
            if bench.stat_fields(self.pid)[19] == self.started_at:
                os.kill(self.pid, signal.SIGKILL)
        except (OSError, IndexError):
            pass


ATTACHED = []


def end_attached():
    while ATTACHED:
        ATTACHED.pop().kill()


# ---- measurements ----------------------------------------------------------------------------

def wanted(args, row):
    return not args.only or any(only in row for only in args.only)


def idle(pids, seconds):
    """Returns the CPU in cores and the sleeps per second of idle processes."""
    before = [(cpu_seconds(pid), sleeps(pid)) for pid in pids]
    start = time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - start
    after = [(cpu_seconds(pid), sleeps(pid)) for pid in pids]
    return [((b[0] - a[0]) / took, (b[1] - a[1]) / took) for a, b in zip(before, after)]


def measure_growth(args, server, crowd, scratch):
    """Measures attach time, idle cost and memory with this many other sessions."""
    points = []
    base = pss_kib(server.pid)
    for count in args.counts:
        # The last one attaches beside the others.
        crowd.grow(count - 1)
        attach = []
        for _ in range(args.rounds):
            client = Attached(args, server, args.sessions + 1, scratch)
            attach.append(client.seconds)
            client.detach()
        crowd.grow(count)
        say(f"{count} sessions: attach {statistics.median(attach) * 1000:.1f} ms; waiting for them "
            f"to be idle, {args.settle} s")
        time.sleep(args.settle)
        (server_cpu, server_sleeps), (crowd_cpu, _) = idle([server.pid, crowd.pid], args.window)
        memory = pss_kib(server.pid)
        point = {
            "sessions": count, "attach_ms": statistics.median(attach) * 1000,
            "attach_ms_each": [a * 1000 for a in attach], "server_cores": server_cpu,
            "server_sleeps": server_sleeps, "crowd_cores": crowd_cpu,
            "server_threads": threads(server.pid), "server_kib": memory,
            "session_kib": (memory - base) / count,
        }
        say(f"{count} sessions: server {server_cpu:.4f} cores, {server_sleeps:.0f} sleeps/s, "
            f"{point['session_kib']:.0f} KiB each; crowd {crowd_cpu:.4f} cores")
        points.append(point)
    return {"points": points, "empty_kib": base}


def measure_first(args, crowd):
    """Measures the first read of each session after idle time, and a later one."""
    count = min(100, crowd.sessions)
    first = crowd.order("first", count)["us"]
    later = crowd.order("first", count)["us"]
    return {"sessions": count, "first_us": statistics.median(first), "first_max_us": max(first),
            "later_us": statistics.median(later), "later_max_us": max(later)}


def measure_clients(args, server, scratch):
    """Measures the cost of idle rtrs-client processes."""
    first = args.sessions + 8 - args.clients
    clients = [Attached(args, server, first + n, scratch) for n in range(args.clients)]
    say(f"{len(clients)} clients; waiting for them to be idle, {args.settle} s")
    time.sleep(args.settle)
    each = idle([client.pid for client in clients], args.window)
    found = {
        "clients": len(clients),
        "percent": statistics.mean(cpu for cpu, _ in each) * 100,
        "percent_max": max(cpu for cpu, _ in each) * 100,
        "sleeps": statistics.mean(count for _, count in each),
        "pss_kib": statistics.mean(pss_kib(client.pid) for client in clients),
        "threads": threads(clients[0].pid),
    }
    say(f"a client: {found['percent']:.4f} % of a core, {found['sleeps']:.2f} sleeps/s, "
        f"{found['pss_kib']:.0f} KiB, {found['threads']} threads")
    for client in clients:
        client.detach()
    return found


def measure_volumes(args, server, scratch):
    """Measures the attach times and the idle cost of many volumes in ten sessions."""
    if args.volumes <= VOLUME_SESSIONS:
        say(f"volumes: left out, needs more than {VOLUME_SESSIONS}")
        return None
    sessions = [Attached(args, server, number, scratch) for number in range(VOLUME_SESSIONS)]
    each = [sessions[number % VOLUME_SESSIONS].add(number)
            for number in range(VOLUME_SESSIONS, args.volumes)]
    first, last = each[:VOLUME_ATTACHES], each[-VOLUME_ATTACHES:]
    say(f"{args.volumes} volumes: attach {statistics.median(first) * 1000:.1f} ms, the last "
        f"{statistics.median(last) * 1000:.1f} ms; waiting for them to be idle, {args.settle} s")
    time.sleep(args.settle)
    cost = idle([server.pid] + [session.pid for session in sessions], args.window)
    found = {
        "volumes": args.volumes, "sessions": VOLUME_SESSIONS,
        "first_ms": statistics.median(first) * 1000, "last_ms": statistics.median(last) * 1000,
        "attach_ms_each": [one * 1000 for one in each],
        "server_percent": cost[0][0] * 100,
        "clients_percent": sum(cpu for cpu, _ in cost[1:]) * 100,
        "sleeps": sum(count for _, count in cost),
        "client_pss_kib": statistics.mean(pss_kib(session.pid) for session in sessions),
        "client_threads": threads(sessions[0].pid),
    }
    say(f"volumes: server {found['server_percent']:.3f} %, clients "
        f"{found['clients_percent']:.3f} % of a core")
    end_attached()
    return found


def measure_failover(args, server, scratch):
    """Measures the longest read after one of two paths fell silent during idle time."""
    proxy = scale_failover.Proxy(("127.0.0.1", server.port))
    client = Attached(args, server, args.sessions + 2, scratch, [
        f"tcp://127.0.0.1@127.0.0.1:{proxy.port}", f"tcp://127.0.0.2@127.0.0.2:{server.port}"])

    def wait_back():
        deadline = time.monotonic() + START_MAX
        while client.paths_up() < 2:
            if time.monotonic() > deadline:
                raise bench.BenchError("the silent path does not reconnect")
            time.sleep(0.1)

    wait_back()
    say(f"failover: {args.failovers} times, each after {args.idle} s")
    try:
        longest = scale_failover.longest_reads(client.sock, client.name, proxy, args.failovers,
                                               args.idle, wait_back)
    except OSError as error:
        raise bench.BenchError(f"failover: {error}") from error
    client.detach()
    proxy.stop()
    say("failover: longest reads " + ", ".join(f"{one * 1000:.0f} ms" for one in longest))
    return {"longest_s": longest, "idle_s": args.idle}


def measure_restart(args, server, crowd):
    """Measures the time from a kill of the server until all sessions are up again."""
    times = []
    for _ in range(args.restarts):
        start = time.monotonic()
        server.kill()
        crowd.order("wait-down", 30)
        server.start()
        started = time.monotonic() - start
        answer = crowd.order("wait-up", 120)
        took = time.monotonic() - start
        if answer["up"] != answer["sessions"]:
            raise crowd.failed(f"only {answer['up']} of {answer['sessions']} are up again")
        say(f"restart: listening after {started:.2f} s, all {answer['up']} up after {took:.2f} s")
        times.append({"listening_s": started, "all_up_s": took})
    return {"sessions": crowd.sessions, "runs": times,
            "all_up_s": statistics.median(run["all_up_s"] for run in times)}


def iops(answer):
    return [1e6 * one["reads"] / one["us"] for one in answer]


def measure_busy(args, alone, crowd):
    """Measures one busy session, alone and among idle ones, and many busy sessions."""
    runs = {"alone": [], "among": [], "many": [], "fairness": []}
    many = min(100, crowd.sessions)
    for number in range(args.rounds):
        one = iops(alone.order("load", 1, DEPTH, args.runtime))[0]
        among = iops(crowd.order("load", 1, DEPTH, args.runtime))[0]
        each = iops(crowd.order("load", many, DEPTH, args.runtime))
        say(f"round {number + 1}/{args.rounds}: alone {one:.0f} IOPS, among {crowd.sessions} "
            f"{among:.0f}, {many} at work {sum(each):.0f}, {min(each):.0f} to {max(each):.0f} each")
        for key, value in (("alone", one), ("among", among), ("many", sum(each)),
                           ("fairness", min(each) / max(each))):
            runs[key].append(value)
    ratio = [among / one for one, among in zip(runs["alone"], runs["among"])]
    total = [many / one for one, many in zip(runs["alone"], runs["many"])]
    return {"sessions": crowd.sessions, "many": many, "runs": runs,
            "among_over_alone": statistics.median(ratio),
            "many_over_one": statistics.median(total),
            "fairness": statistics.median(runs["fairness"])}


def run(args, scratch):
    result = {}
    server = Server(args, scratch, "server")
    server.start()
    crowd = Crowd(args, server)
    growth = any(wanted(args, row) for row in ("attach-growth", "server-idle", "server-memory"))
    if growth:
        result["growth"] = measure_growth(args, server, crowd, scratch)
    if any(wanted(args, row) for row in ("first-io", "restart", "one-among", "many-busy",
                                         "fairness")):
        crowd.grow(args.sessions)
        if wanted(args, "first-io"):
            if not growth:
                time.sleep(args.settle)
            result["first"] = measure_first(args, crowd)
    if any(wanted(args, row) for row in ("one-among", "many-busy", "fairness")):
        other = Server(args, scratch, "alone")
        other.start()
        alone = Crowd(args, other)
        alone.grow(1)
        result["busy"] = measure_busy(args, alone, crowd)
        alone.stop()
        other.process.stop()
    if wanted(args, "failover"):
        result["failover"] = measure_failover(args, server, scratch)
    if wanted(args, "restart"):
        result["restart"] = measure_restart(args, server, crowd)
    crowd.stop()
    if wanted(args, "client-idle"):
        # The sessions of the crowd end, which frees their exports.
        time.sleep(1)
        result["clients"] = measure_clients(args, server, scratch)
    if wanted(args, "volume-growth") or wanted(args, "volumes-idle"):
        time.sleep(1)
        result["volumes"] = measure_volumes(args, server, scratch)
    server.process.stop()
    return result


# ---- the table -------------------------------------------------------------------------------

def values(result):
    """Returns the result of each row, and its explanation."""
    found = {}
    if "growth" in result:
        points = result["growth"]["points"]
        first, last = points[0], points[-1]
        found["attach-growth"] = (
            last["attach_ms"] / first["attach_ms"],
            f"{first['attach_ms']:.1f} ms, {last['attach_ms']:.1f} ms beside "
            f"{last['sessions'] - 1}")
        found["server-idle"] = (
            last["server_cores"],
            f"{last['sessions']} sessions, {last['server_sleeps']:.0f} sleeps/s")
        found["server-memory"] = (last["session_kib"], f"{last['sessions']} sessions")
    if "clients" in result:
        one = result["clients"]
        found["client-idle"] = (
            one["percent"], f"{one['clients']} processes, {one['sleeps']:.2f} sleeps/s, "
            f"{one['pss_kib']:.0f} KiB and {one['threads']} threads each")
    if result.get("volumes"):
        one = result["volumes"]
        found["volume-growth"] = (
            one["last_ms"] / one["first_ms"],
            f"{one['first_ms']:.1f} ms, {one['last_ms']:.1f} ms of {one['volumes']}")
        found["volumes-idle"] = (
            one["server_percent"] + one["clients_percent"],
            f"{one['volumes']} volumes: server {one['server_percent']:.3f} %, clients "
            f"{one['clients_percent']:.3f} %, {one['sleeps']:.0f} sleeps/s")
    if "first" in result:
        one = result["first"]
        found["first-io"] = (
            one["first_us"] / one["later_us"],
            f"{one['first_us']:.0f} us (at most {one['first_max_us']}), later "
            f"{one['later_us']:.0f} us")
    if "failover" in result:
        one = result["failover"]
        found["failover"] = (statistics.median(one["longest_s"]),
                             f"at most {max(one['longest_s']):.3f} s, {len(one['longest_s'])} "
                             f"times after {one['idle_s']} s idle")
    if "restart" in result:
        one = result["restart"]
        found["restart"] = (one["all_up_s"], f"{one['sessions']} sessions")
    if "busy" in result:
        one = result["busy"]
        alone = statistics.median(one["runs"]["alone"])
        found["one-among"] = (one["among_over_alone"],
                              f"{one['sessions']} sessions, alone {alone:.0f} IOPS")
        found["many-busy"] = (one["many_over_one"], f"{one['many']} sessions, each at QD{DEPTH}")
        found["fairness"] = (one["fairness"], f"{one['many']} sessions")
    return found


def number(value):
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def markdown(result):
    found = values(result)
    out = ["| row | found | asked | met | how |", "|---|---|---|---|---|"]
    for row, title, sign, asked, unit in ROWS:
        if row not in found:
            continue
        value, how = found[row]
        if sign is None:
            ask, met = "-", "-"
        else:
            good = value <= asked if sign == "<=" else value >= asked
            ask, met = f"{sign} {asked} {unit}", "yes" if good else "NO"
        out.append(f"| {title} | {number(value)} {unit} | {ask} | {met} | {how} |")
    if "growth" in result:
        out += ["", "| sessions | attach, ms | server, cores | sleeps/s | threads | KiB/session |",
                "|---|---|---|---|---|---|"]
        for point in result["growth"]["points"]:
            out.append(
                f"| {point['sessions']} | {point['attach_ms']:.1f} | {point['server_cores']:.4f} | "
                f"{point['server_sleeps']:.0f} | {point['server_threads']} | "
                f"{point['session_kib']:.0f} |")
    return "\n".join(out) + "\n"


def parse_args():
    parser = argparse.ArgumentParser(prog="scale.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=1000, help="most sessions (1000)")
    parser.add_argument("--clients", type=int,
                        help="processes of rtrs-client for the cost of an idle client (100, at "
                        "most as many as sessions)")
    parser.add_argument("--volumes", type=int,
                        help="volumes in ten sessions (as many as sessions, at most 1280)")
    parser.add_argument("--settle", type=int, default=70, metavar="SEC",
                        help="idle time before an idle cost is measured (70)")
    parser.add_argument("--window", type=int, default=30, metavar="SEC",
                        help="how long an idle cost is measured (30)")
    parser.add_argument("--runtime", type=int, default=4, metavar="SEC",
                        help="how long each load runs (4)")
    parser.add_argument("--rounds", type=int, default=5,
                        help="attaches and loads of each kind, medians are shown (5)")
    parser.add_argument("--idle", type=int, default=70, metavar="SEC",
                        help="idle time before a path falls silent (70)")
    parser.add_argument("--failovers", type=int, default=3,
                        help="times that a path falls silent (3)")
    parser.add_argument("--restarts", type=int, default=3, help="kills of the server (3)")
    parser.add_argument("--only", action="append", metavar="ROW",
                        help="only rows whose id contains ROW; may be given again")
    parser.add_argument("--client", action="append", default=[], metavar="FLAG",
                        help="a further flag of rtrs-client attach, as --client=--shards=1")
    parser.add_argument("--crowd", action="append", default=[], metavar="FLAG",
                        help="a further flag of rtrs-crowd")
    parser.add_argument("--bin-dir", default="target/release", help="where our binaries are")
    parser.add_argument("--svg", metavar="FILE", help="write the growth as a plot")
    parser.add_argument("--before", metavar="FILE",
                        help="JSON of an earlier run, plotted beside this one")
    parser.add_argument("-o", "--output", choices=["md", "json"], default="md")
    parser.add_argument("--list", action="store_true", help="print the row ids and stop")
    args = parser.parse_args()
    if args.list:
        print("\n".join(row[0] for row in ROWS))
        sys.exit(0)
    if args.clients is None:
        args.clients = min(100, args.sessions)
    most = 128 * VOLUME_SESSIONS
    if args.volumes is None:
        args.volumes = min(args.sessions, most)
    if args.sessions < 2 or args.clients < 1 or args.rounds < 1 or args.restarts < 1:
        parser.error("--sessions needs at least 2, --clients, --rounds and --restarts at least 1")
    if args.clients > args.sessions:
        parser.error("--clients can be at most --sessions, as each has an export of its own")
    if args.volumes > min(args.sessions, most):
        parser.error(f"--volumes can be at most --sessions, and at most {most}")
    for only in args.only or []:
        if not any(only in row[0] for row in ROWS):
            parser.error(f"--only {only}: no such row; --list shows them")
    args.counts = [count for count in (1, 10, 100) if count < args.sessions] + [args.sessions]
    return args


def main():
    args = parse_args()
    bench.end_on_signals()
    missing = [f"{args.bin_dir}/{name}" for name in ("rtrs-server", "rtrs-client", "rtrs-crowd")
               if not os.access(f"{args.bin_dir}/{name}", os.X_OK)]
    if missing:
        raise bench.BenchError(f"missing: {', '.join(missing)} (scripts/scale.sh builds them)")
    memory_dir = "/dev/shm" if os.path.isdir("/dev/shm") else None
    scratch = tempfile.mkdtemp(prefix="rtrs-scale-", dir=memory_dir)
    atexit.register(lambda: shutil.rmtree(scratch, ignore_errors=True))
    atexit.register(bench.stop_all)
    atexit.register(end_attached)
    before = None
    if args.before:
        with open(args.before) as file:
            before = json.load(file)
    load = os.getloadavg()[0]
    result = run(args, scratch)
    model = "unknown CPU"
    with open("/proc/cpuinfo") as info:
        for line in info:
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    result["machine"] = {"cpu": model, "cores": os.cpu_count(), "kernel": os.uname().release,
                         "load_before": load, "load_after": os.getloadavg()[0]}
    if args.svg:
        with open(args.svg, "w") as out:
            out.write(scale_plot.svg(result, before))
    if args.output == "json":
        print(json.dumps(result, indent=1))
    else:
        machine = result["machine"]
        print(f"{machine['cores']} x {machine['cpu']}, Linux {machine['kernel']}; idle costs over "
              f"{args.window} s; load {machine['load_before']:.1f} before, "
              f"{machine['load_after']:.1f} after.\n")
        print(markdown(result))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except bench.BenchError as error:
        print(f"scale: error: {error}", file=sys.stderr)
        sys.exit(1)
