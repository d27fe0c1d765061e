"""What many sessions cost the server and each client, and how that grows.

Server and clients run on this machine, over TCP loopback; each session opens an export of its own,
a sparse file in memory. Two kinds of clients answer two questions:

- `rtrs-client attach` processes: how long an attach takes, what an idle client costs, and the same
  for many volumes in ten sessions.
- `rtrs-crowd`: many sessions in one process, each the same engine with a thread and an io_uring of
  its own, but without front end and control socket. It provides the other sessions of a server, so
  that a thousand of them do not need a thousand processes, and is the load.

CPU time is that of a process's threads (schedstat, nanoseconds); memory is PSS (smaps_rollup). The
kernel's memory for sockets is not counted.
"""

import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

import plot
from processes import (Daemon, Process, command, free_port, parse_json, say, status_number,
                       wait_connect, wait_for)
from tables import Comparison, asked_cells, is_selected, table

COMMAND_SECONDS_MAX = 60
ORDER_SECONDS_MAX = 300
EXPORT_BYTES = 16 << 20
# Sessions that share all volumes, and the maximum number of volumes of each.
VOLUME_SESSIONS, VOLUMES_EACH_MAX = 10, 128
# Number of first and last attaches of volumes whose medians are compared.
VOLUME_ATTACHES = 9
# Number of reads in flight of a busy session.
DEPTH = 32


class Row(NamedTuple):
    """A figure that is not compared with another side."""

    id: str
    title: str
    unit: str
    asked: float | None = None
    lower_is_better: bool = True


ROWS = [
    Row("attach-growth", "attach of the last session / of the first", "x", 1.5),
    Row("server-idle", "CPU of the server, all sessions idle", "core", 0.2),
    Row("server-memory", "memory of the server per session", "KiB", 300),
    Row("client-idle", "CPU of an idle client", "%", 0.05),
    Row("volume-growth", "attach of the last volume / of the first", "x", 1.5),
    Row("volumes-idle", "CPU of all idle volumes in ten sessions, server included", "%", 1),
    Row("first-io", "first read after idle time / a later one", "x"),
    Row("failover", "longest read after idle time, one of two paths silent", "s", 0.5),
    Row("restart", "kill -9 and restart of the server: until all sessions are up", "s", 5),
    Row("one-among", "IOPS of one busy session among idle ones / alone", "x", 0.95, False),
    Row("many-busy", "IOPS of many busy sessions / of one", "x", 0.9, False),
    Row("fairness", "slowest / fastest of many busy sessions", "x", 0.7, False),
]
# Columns of the table of growth: key of a point, title, text.
GROWTH = [("sessions", "sessions", "{}"), ("attach_ms", "attach, ms", "{:.1f}"),
          ("server_cores", "server, cores", "{:.4f}"), ("server_sleeps", "sleeps/s", "{:.0f}"),
          ("server_threads", "threads", "{}"), ("session_kib", "KiB/session", "{:.0f}")]


def tasks(pid):
    return os.listdir(f"/proc/{pid}/task")


def used(pid):
    """Returns the CPU seconds and the sleeps of all threads of a process so far."""
    nanoseconds = sleeps = 0
    for task in tasks(pid):
        try:
            with open(f"/proc/{pid}/task/{task}/schedstat") as stat:
                nanoseconds += int(stat.read().split()[0])
        except OSError:
            continue
        sleeps += status_number(f"{pid}/task/{task}", "voluntary_ctxt_switches")
    return nanoseconds / 1e9, sleeps


def idle(args, *pids):
    """Waits until processes are idle. Returns their CPU in cores and their sleeps per second."""
    say(f"waiting for {args.settle} s to be idle, then measuring for {args.window} s")
    time.sleep(args.settle)
    before, start = [used(pid) for pid in pids], time.monotonic()
    time.sleep(args.window)
    took = time.monotonic() - start
    return [[(b - a) / took for a, b in zip(old, used(pid))] for old, pid in zip(before, pids)]


def pss_kib(pid):
    return status_number(pid, "Pss", "smaps_rollup")


class Server:
    """rtrs-server with one export for each possible session."""

    def __init__(self, args, name):
        self.args, self.name, self.port = args, name, free_port()
        self.portal = f"tcp://127.0.0.1:{self.port}"
        directory = f"{args.scratch}/{name}"
        os.mkdir(directory)
        exports = [{"name": f"v{number}", "target": f"{directory}/{number}.img"}
                   for number in range(args.sessions + 8)]
        for export in exports:
            with open(export["target"], "wb") as out:
                out.truncate(EXPORT_BYTES)
        self.config = f"{directory}/server.yaml"
        with open(self.config, "w") as out:
            json.dump({"export": exports, "listen": [f"tcp://0.0.0.0:{self.port}"],
                       "insecure-open": True, "sessions-max": args.sessions + 100,
                       "run-dir": directory, "state-dir": f"{directory}/state", "log": "warn"}, out)
        self.start()

    def start(self):
        argv = [f"{self.args.bin_dir}/rtrs-server", "--config", self.config]
        self.process = Process(self.name, argv)
        wait_connect(self.process, self.port)

    @property
    def pid(self):
        self.process.check_alive()
        return self.process.pid


class Crowd(Process):
    """Many sessions in one process that executes commands."""

    def __init__(self, args, server):
        argv = [f"{args.bin_dir}/rtrs-crowd", "--path", f"127.0.0.1:{server.port}", *args.crowd]
        super().__init__(f"crowd-{server.name}", argv, stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE, bufsize=0)
        self.rest = b""
        self.sessions = 0

    def order(self, *words):
        text = " ".join(map(str, words))
        self.child.stdin.write(f"{text}\n".encode())
        deadline = time.monotonic() + ORDER_SECONDS_MAX
        while b"\n" not in self.rest:
            left = max(0, deadline - time.monotonic())
            if not select.select([self.child.stdout], [], [], left)[0]:
                raise self.failed(f"did not answer {text!r} within {ORDER_SECONDS_MAX} s")
            got = os.read(self.child.stdout.fileno(), 1 << 20)
            if not got:
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

    def load(self, sessions, seconds):
        """Returns the IOPS of each of the first sessions when they are busy."""
        answers = self.order("load", sessions, DEPTH, seconds)
        return [1e6 * one["reads"] / one["us"] for one in answers]


class Attached(Daemon):
    """An rtrs-client attach process."""

    def __init__(self, args, server, number, paths=None):
        self.args, self.volume = args, f"v{number}"
        start = time.monotonic()
        flags = [f"--path={path}" for path in paths or [server.portal]]
        answer = self.attach(self.volume, "-o", "json", *flags, *args.client)
        self.seconds = time.monotonic() - start
        super().__init__(f"client-{self.volume}", json.loads(answer)["pid"])

    def client(self, *argv):
        return command(f"{self.args.bin_dir}/rtrs-client", *argv, "--run-dir", self.args.scratch,
                       seconds_max=COMMAND_SECONDS_MAX)

    def sock(self, name):
        return f"{self.args.scratch}/{name}.sock"

    def attach(self, name, *flags):
        return self.client("attach", name, "--socket", self.sock(name), *flags)

    def add(self, number):
        """Attaches one more volume to this session. Returns the time in seconds."""
        start = time.monotonic()
        self.attach(f"v{number}", "--session", self.volume)
        return time.monotonic() - start

    def paths_up(self):
        paths = json.loads(self.client("status", self.volume, "-o", "json"))["paths"]
        return sum(path["state"] == "connected" for path in paths)

    def longest_read(self):
        """Reads blocks, enough that each path is used. Returns the longest time in seconds."""
        output = command("fio", "--name=bench", "--ioengine=nbd", "--rw=read", "--bs=4k",
                         f"--uri=nbd+unix:///{self.volume}?socket={self.sock(self.volume)}",
                         "--size=32k", "--thread=1", "--output-format=json")
        return parse_json("fio", output)["jobs"][0]["read"]["lat_ns"]["max"] / 1e9

    def detach(self):
        self.client("detach", self.volume, "--force")
        self.stop()


class Scale:
    """The measurements: `found` holds each row's result with its explanation, `raw` the rest."""

    def __init__(self, args):
        self.args, self.found, self.raw = args, {}, {}
        self.server = Server(args, "server")
        self.crowd = Crowd(args, self.server)

    def note(self, row, value, how):
        self.found[row] = {"value": value, "how": how}
        say(f"{row}: {number(value)}; {how}")

    def measure_growth(self):
        """Measures attach time, idle cost and memory with a growing number of other sessions."""
        args, points, base = self.args, [], pss_kib(self.server.pid)
        for count in args.counts:
            # The last one attaches beside the others.
            self.crowd.grow(count - 1)
            attach = []
            for _ in range(args.rounds):
                client = Attached(args, self.server, args.sessions + 1)
                attach.append(client.seconds * 1000)
                client.detach()
            self.crowd.grow(count)
            (server, sleeps), (crowd, _) = idle(args, self.server.pid, self.crowd.pid)
            memory = pss_kib(self.server.pid)
            point = {"sessions": count, "attach_ms": statistics.median(attach),
                     "attach_ms_each": attach, "server_cores": server, "server_sleeps": sleeps,
                     "crowd_cores": crowd, "server_threads": len(tasks(self.server.pid)),
                     "server_kib": memory, "session_kib": (memory - base) / count}
            say(", ".join(f"{title} {text.format(point[key])}" for key, title, text in GROWTH))
            points.append(point)
        first, last = points[0], points[-1]
        self.raw["growth"] = {"points": points, "empty_kib": base}
        self.note("attach-growth", last["attach_ms"] / first["attach_ms"],
                  f"{first['attach_ms']:.1f} ms, {last['attach_ms']:.1f} ms beside "
                  f"{last['sessions'] - 1}")
        self.note("server-idle", last["server_cores"],
                  f"{last['sessions']} sessions, {last['server_sleeps']:.0f} sleeps/s")
        self.note("server-memory", last["session_kib"], f"{last['sessions']} sessions")

    def measure_first(self):
        """Measures the first read of each session after idle time, and a later one."""
        self.crowd.grow(self.args.sessions)
        if "growth" not in self.raw:
            time.sleep(self.args.settle)
        first, later = (self.crowd.order("first", min(100, self.crowd.sessions))["us"]
                        for _ in range(2))
        self.raw["first"] = {"first_us": first, "later_us": later}
        first_us, later_us = statistics.median(first), statistics.median(later)
        self.note("first-io", first_us / later_us,
                  f"{first_us:.0f} us (at most {max(first)}), later {later_us:.0f} us")

    def measure_busy(self):
        """Measures one busy session, alone and among idle ones, and many busy sessions."""
        args = self.args
        self.crowd.grow(args.sessions)
        other = Server(args, "alone")
        alone = Crowd(args, other)
        alone.grow(1)
        runs = {"alone": [], "among": [], "many": [], "fairness": []}
        many = min(100, self.crowd.sessions)
        for _ in range(args.rounds):
            runs["alone"] += alone.load(1, args.runtime)
            runs["among"] += self.crowd.load(1, args.runtime)
            each = self.crowd.load(many, args.runtime)
            runs["many"].append(sum(each))
            runs["fairness"].append(min(each) / max(each))
            say(", ".join(f"{key} {values[-1]:.4g}" for key, values in runs.items()))
        alone.stop()
        other.process.stop()
        self.raw["busy"] = runs

        def over_alone(key):
            return statistics.median(a / b for a, b in zip(runs[key], runs["alone"]))
        self.note("one-among", over_alone("among"), f"{self.crowd.sessions} sessions, alone "
                  f"{statistics.median(runs['alone']):.0f} IOPS")
        self.note("many-busy", over_alone("many"), f"{many} sessions, each at QD{DEPTH}")
        self.note("fairness", statistics.median(runs["fairness"]), f"{many} sessions")

    def measure_failover(self):
        """Measures the longest read after one of two paths fell silent during idle time."""
        args, port = self.args, free_port()
        proxy = Process("proxy", [sys.executable, f"{os.path.dirname(__file__)}/proxy.py", port,
                                  self.server.port])
        wait_connect(proxy, port)
        client = Attached(args, self.server, args.sessions + 2, [
            f"tcp://127.0.0.1@127.0.0.1:{port}",
            f"tcp://127.0.0.2@127.0.0.2:{self.server.port}"])
        longest = []
        for _ in range(args.failovers):
            wait_for("both paths are up", lambda: client.paths_up() == 2, client,
                     COMMAND_SECONDS_MAX)
            client.longest_read()
            say(f"failover: a path falls silent after {args.idle} s")
            time.sleep(args.idle)
            proxy.send(signal.SIGSTOP)
            longest.append(client.longest_read())
            proxy.send(signal.SIGCONT)
        client.detach()
        proxy.stop()
        self.raw["failover"] = {"longest_s": longest, "idle_s": args.idle}
        self.note("failover", statistics.median(longest), f"at most {max(longest):.3f} s, "
                  f"{len(longest)} times after {args.idle} s idle")

    def measure_restart(self):
        """Measures the time from a kill of the server until all sessions are up again."""
        self.crowd.grow(self.args.sessions)
        runs = []
        for _ in range(self.args.restarts):
            start = time.monotonic()
            self.server.process.stop(signal.SIGKILL)
            self.crowd.order("wait-down", 30)
            self.server.start()
            listening = time.monotonic() - start
            answer = self.crowd.order("wait-up", 120)
            runs.append({"listening_s": listening, "all_up_s": time.monotonic() - start})
            if answer["up"] != answer["sessions"]:
                raise self.crowd.failed(f"only {answer['up']} of {answer['sessions']} are up again")
        self.raw["restart"] = runs
        self.note("restart", statistics.median(run["all_up_s"] for run in runs),
                  f"{self.crowd.sessions} sessions")

    def end_crowd(self):
        """Ends the sessions of the crowd, which frees their exports."""
        if self.crowd.is_alive():
            self.crowd.stop()
            time.sleep(1)

    def measure_clients(self):
        """Measures the cost of idle rtrs-client processes."""
        self.end_crowd()
        args = self.args
        first = args.sessions + 8 - args.clients
        clients = [Attached(args, self.server, first + n) for n in range(args.clients)]
        each = idle(args, *(client.pid for client in clients))
        percent = [cpu * 100 for cpu, _ in each]
        sleeps = statistics.mean(count for _, count in each)
        pss = statistics.mean(pss_kib(client.pid) for client in clients)
        self.raw["clients"] = {"percent": percent, "sleeps": sleeps, "pss_kib": pss}
        self.note("client-idle", statistics.mean(percent), f"{len(clients)} processes, "
                  f"{sleeps:.2f} sleeps/s, {pss:.0f} KiB and {len(tasks(clients[0].pid))} threads "
                  "each")
        for client in clients:
            client.detach()

    def measure_volumes(self):
        """Measures the attach times and the idle cost of many volumes in ten sessions."""
        self.end_crowd()
        args = self.args
        if args.volumes <= VOLUME_SESSIONS:
            say(f"volumes: left out, needs more than {VOLUME_SESSIONS}")
            return
        sessions = [Attached(args, self.server, number) for number in range(VOLUME_SESSIONS)]
        each = [sessions[number % VOLUME_SESSIONS].add(number) * 1000
                for number in range(VOLUME_SESSIONS, args.volumes)]
        first, last = (statistics.median(some)
                       for some in (each[:VOLUME_ATTACHES], each[-VOLUME_ATTACHES:]))
        cost = idle(args, self.server.pid, *(session.pid for session in sessions))
        server, *clients = (cpu * 100 for cpu, _ in cost)
        sleeps = sum(count for _, count in cost)
        self.raw["volumes"] = {
            "volumes": args.volumes, "attach_ms_each": each, "server_percent": server,
            "clients_percent": sum(clients), "sleeps": sleeps,
            "client_pss_kib": statistics.mean(pss_kib(session.pid) for session in sessions),
            "client_threads": len(tasks(sessions[0].pid))}
        self.note("volume-growth", last / first, f"{first:.1f} ms, {last:.1f} ms of {args.volumes}")
        self.note("volumes-idle", server + sum(clients), f"{args.volumes} volumes: server "
                  f"{server:.3f} %, clients {sum(clients):.3f} %, {sleeps:.0f} sleeps/s")
        for session in sessions:
            session.stop(signal.SIGKILL)


# In this order: the later ones need the exports of the crowd.
MEASUREMENTS = [
    (("attach-growth", "server-idle", "server-memory"), Scale.measure_growth),
    (("first-io",), Scale.measure_first),
    (("one-among", "many-busy", "fairness"), Scale.measure_busy),
    (("failover",), Scale.measure_failover),
    (("restart",), Scale.measure_restart),
    (("client-idle",), Scale.measure_clients),
    (("volume-growth", "volumes-idle"), Scale.measure_volumes),
]


def run(args):
    before = {}
    if args.before:
        with open(args.before) as file:
            before = json.load(file)
    scale = Scale(args)
    for rows, measure in MEASUREMENTS:
        if any(is_selected(args, row) for row in rows):
            measure(scale)
    result = {"rows": scale.found, **scale.raw}
    if args.svg:
        with open(args.svg, "w") as out:
            out.write(plot.svg(result, before))
    return result


def number(value):
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def text(_comparison, result):
    rows = []
    for row in filter(lambda row: row.id in result["rows"], ROWS):
        value, how = result["rows"][row.id].values()
        asked = asked_cells(row.asked, value, row.lower_is_better, f" {row.unit}")
        rows.append([row.title, f"{number(value)} {row.unit}", *asked, how])
    out = table(["row", "found", "asked", "met", "how"], rows)
    if "growth" in result:
        out += table([title for _, title, _ in GROWTH],
                     [[text.format(point[key]) for key, _, text in GROWTH]
                      for point in result["growth"]["points"]])
    return "\n".join(out)


# Numbers: default and help.
NUMBERS = {
    "sessions": (1000, "maximum number of sessions"),
    "clients": (None, "processes of rtrs-client for the cost of an idle client (100, at most as "
                "many as sessions)"),
    "volumes": (None, "volumes in ten sessions (as many as sessions, at most 1280)"),
    "settle": (70, "idle seconds before an idle cost is measured"),
    "window": (30, "seconds in which an idle cost is measured"),
    "idle": (70, "idle seconds before a path falls silent"),
    "failovers": (3, "times that a path falls silent"),
    "restarts": (3, "kills of the server"),
}


def add_options(parser):
    for key, (default, text) in NUMBERS.items():
        parser.add_argument(f"--{key}", type=int, default=default, metavar="N",
                            help=text if default is None else f"{text} ({default})")
    parser.add_argument("--client", action="append", default=[], metavar="FLAG",
                        help="a further flag of rtrs-client attach, such as --client=--shards=1")
    parser.add_argument("--crowd", action="append", default=[], metavar="FLAG",
                        help="a further flag of rtrs-crowd")
    parser.add_argument("--svg", metavar="FILE", help="write the growth as a plot")
    parser.add_argument("--before", metavar="FILE",
                        help="JSON of an earlier run, plotted beside this one")


def check_options(args, parser):
    most = min(args.sessions, VOLUME_SESSIONS * VOLUMES_EACH_MAX)
    args.clients = min(100, args.sessions) if args.clients is None else args.clients
    args.volumes = most if args.volumes is None else args.volumes
    if args.sessions < 2 or args.clients < 1 or args.restarts < 1:
        parser.error("--sessions needs at least 2, --clients and --restarts at least 1")
    if args.clients > args.sessions:
        parser.error("--clients can be at most --sessions, as each has an export of its own")
    if args.volumes > most:
        parser.error("--volumes can be at most --sessions, and at most "
                     f"{VOLUME_SESSIONS * VOLUMES_EACH_MAX}")
    args.counts = [count for count in (1, 10, 100) if count < args.sessions] + [args.sessions]


COMPARISON = Comparison(
    "the cost of many sessions with the cost of few", {"row": ROWS}, run,
    programs=("rtrs-server", "rtrs-client", "rtrs-crowd"),
    build=("--bin=rtrs-server", "--bin=rtrs-client", "--bin=rtrs-crowd"),
    tools={"fio": "fio"}, defaults={"runtime": 4, "rounds": 5}, add_options=add_options,
    check_options=check_options, text=text)
