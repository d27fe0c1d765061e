#!/usr/bin/env python3
"""The bench table: this project beside nbdkit, qemu-nbd and nbd-server on one machine.

Every side serves the same file over TCP loopback and is driven by the same fio jobs. Runs are
interleaved (round by round, job by job, side by side), so that a slow minute of the machine hits
all of them; a cell is the median of its rounds. A ratio is taken within each round, and the table
shows the median of these with the lowest and the highest: over five rounds that range holds the
true median with a confidence of 94 %. CPU time is what the serving processes used, children
included (utime + stime of /proc/PID/stat), over the IOs fio completed; memory is the sum of their
VmHWM. `foreign` is CPU that neither fio nor the side under test used: numbers taken
beside a busy machine say so themselves.

Started by scripts/bench.sh. Only the standard library is used. Exit codes: 0 good, 1 failed,
2 usage.
"""

import argparse
import atexit
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
START_SECONDS_MAX = 20
STOP_SECONDS_MAX = 5
FILE_BYTES_DEFAULT = 1 << 30

# id, fio arguments, what is compared, which direction is good, the ratio asked for.
FIO_ROWS = [
    ("randread-4k-q32", "4k randread QD32", "randread", "4k", 32, "iops", 1.2),
    ("randwrite-4k-q32", "4k randwrite QD32", "randwrite", "4k", 32, "iops", 1.1),
    ("randread-4k-q1", "4k randread QD1 latency", "randread", "4k", 1, "lat", 1.3),
    ("read-128k-q16", "128k read QD16", "read", "128k", 16, "iops", 0.85),
    ("write-128k-q16", "128k write QD16", "write", "128k", 16, "iops", 0.85),
]
# id, title, rw, the two sides compared (A over B), the ratio asked for or None, jobs, depth each.
SESSION_ROWS = [
    ("session-randread", "session 4k randread, 2 jobs of QD16, no NBD", "randread",
     ("on", "peers"), 4.5, 2, 16),
    ("session-one-job", "the same, 1 job of QD32", "randread", ("on", "peers"), 3.5, 1, 32),
    ("invalidate-randread", "always_invalidate on/off, randread", "randread", ("on", "off"),
     0.95, 1, 32),
    ("invalidate-randwrite", "always_invalidate on/off, randwrite", "randwrite", ("on", "off"),
     0.95, 1, 32),
    ("crc-randread", "CRC32C on/off, randread", "randread", ("on", "crc-off"), None, 1, 32),
    ("crc-randwrite", "CRC32C on/off, randwrite", "randwrite", ("on", "crc-off"), None, 1, 32),
]
# id, title, the row of FIO_ROWS it is taken from, the ratio to nbdkit's asked for. Only rtrs-server
# counts here: nbdkit has no client of its own.
CPU_ROWS = [
    ("cpu-read-4k", "CPU of rtrs-server per 4k read", "randread-4k-q32", 0.45),
    ("cpu-read-128k", "CPU of rtrs-server per 128k read", "read-128k-q16", 1.0),
    ("cpu-write-128k", "CPU of rtrs-server per 128k write", "write-128k-q16", 1.0),
]


class BenchError(Exception):
    """Something outside this script failed; its text is for a person."""


def say(text):
    """A progress line on stderr; the result alone goes to stdout."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


# ---- processes -------------------------------------------------------------------------------

STARTED = []


class Process:
    """A process this script started, in a process group of its own so that its forks end too."""

    def __init__(self, name, argv, env=None):
        self.name = name
        self.argv = [str(a) for a in argv]
        self.log = tempfile.NamedTemporaryFile(prefix=f"bench-{name}-", suffix=".log", delete=False)
        try:
            self.child = subprocess.Popen(self.argv, stdin=subprocess.DEVNULL, stdout=self.log,
                                          stderr=subprocess.STDOUT, start_new_session=True,
                                          env=env)
        except OSError as error:
            raise BenchError(f"cannot start {self.argv[0]}: {error}") from error
        self.pid = self.child.pid
        STARTED.append(self)

    def output(self):
        with open(self.log.name, errors="replace") as log:
            return log.read()

    def failed(self, what):
        tail = "\n".join(self.output().splitlines()[-10:])
        return BenchError(f"{self.name} {what}: {' '.join(self.argv)}\n{tail}")

    def check_alive(self):
        if self.child.poll() is not None:
            raise self.failed(f"ended with {self.child.returncode}")

    def stop(self):
        """SIGTERM, a bounded wait, then SIGKILL; always to our own group only."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.child.poll() is None:
                try:
                    os.killpg(self.child.pid, number)
                except ProcessLookupError:
                    pass
                try:
                    self.child.wait(STOP_SECONDS_MAX)
                except subprocess.TimeoutExpired:
                    continue
            break
        try:
            os.killpg(self.child.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        self.log.close()
        if os.path.exists(self.log.name):
            os.unlink(self.log.name)
        if self in STARTED:
            STARTED.remove(self)


class Daemon(Process):
    """A program that goes to the background by itself and leaves its pid in a file."""

    def __init__(self, name, argv, pid_file):
        super().__init__(name, argv)
        deadline = time.monotonic() + START_SECONDS_MAX
        while True:
            try:
                with open(pid_file) as file:
                    self.pid = int(file.read())
                break
            except (OSError, ValueError):
                self.pid = None
            if time.monotonic() > deadline or self.child.poll() not in (None, 0):
                raise self.failed("left no pid file")
            time.sleep(0.05)
        # The pid alone could be another's later; with its start time it is ours.
        self.started_at = stat_fields(self.pid)[19]

    def is_alive(self):
        try:
            fields = stat_fields(self.pid)
        except OSError:
            return False
        return fields[19] == self.started_at and fields[0] != "Z"

    def check_alive(self):
        if not self.is_alive():
            raise self.failed("ended early")

    def stop(self):
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + STOP_SECONDS_MAX
            if self.pid is not None and self.is_alive():
                os.kill(self.pid, number)
            while self.pid is not None and self.is_alive() and time.monotonic() < deadline:
                time.sleep(0.05)
        super().stop()


def stop_all():
    for process in list(reversed(STARTED)):
        process.stop()


def end_on_signals():
    """Has the usual signals end this script as an exit does, so that what it started ends too."""
    def end(number, _frame):
        raise SystemExit(128 + number)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)


def stat_fields(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()


def descendants(roots):
    """The roots and every live process below them."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parents.setdefault(int(stat_fields(entry)[1]), []).append(int(entry))
            except (OSError, IndexError):
                continue
    found, todo = [], list(roots)
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo.extend(parents.get(pid, []))
    return found


def cpu_seconds(roots):
    """utime + stime of the trees; of ended and reaped children through cutime + cstime."""
    ticks = 0
    for pid in descendants(roots):
        try:
            fields = stat_fields(pid)
        except OSError:
            continue
        ticks += sum(int(fields[i]) for i in (11, 12, 13, 14))
    return ticks / TICKS_PER_SECOND


def peak_bytes(roots):
    """The sum of VmHWM over the trees."""
    total = 0
    for pid in descendants(roots):
        try:
            with open(f"/proc/{pid}/status") as status:
                for line in status:
                    if line.startswith("VmHWM:"):
                        total += int(line.split()[1]) * 1024
        except OSError:
            continue
    return total


def machine_busy_seconds():
    """CPU time all of the machine has spent not idle, steal included."""
    with open("/proc/stat") as stat:
        fields = [int(f) for f in stat.readline().split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / TICKS_PER_SECOND


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def wait_connect(process, address):
    """Waits until the TCP (host, port) or unix path accepts a connection."""
    deadline = time.monotonic() + START_SECONDS_MAX
    family = socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX
    while True:
        process.check_alive()
        with socket.socket(family) as sock:
            sock.settimeout(2)
            try:
                sock.connect(address)
                return
            except OSError:
                pass
        if time.monotonic() > deadline:
            raise process.failed(f"did not accept at {address} in {START_SECONDS_MAX} s")
        time.sleep(0.05)


# ---- sides -----------------------------------------------------------------------------------

class Side:
    """One server under test: what fio opens, and which processes do the work."""

    name = ""

    def __init__(self, path, scratch, bin_dir):
        self.path, self.scratch, self.bin_dir = path, scratch, bin_dir
        self.port = free_port()
        self.uri = f"nbd://127.0.0.1:{self.port}/bench"
        self.processes = []
        self.peak = 0

    def fio_engine(self):
        return ["--ioengine=nbd", f"--uri={self.uri}"]

    def launch(self, *argv):
        process = Process(self.name, argv)
        self.processes.append(process)
        return process

    def pids(self):
        for process in self.processes:
            process.check_alive()
        return [process.pid for process in self.processes]

    def stop(self):
        for process in reversed(self.processes):
            process.stop()


class Nbdkit(Side):
    name = "nbdkit"

    def start(self):
        process = self.launch("nbdkit", "-f", "-i", "127.0.0.1", "-p", self.port, "file", self.path)
        wait_connect(process, ("127.0.0.1", self.port))


class QemuNbd(Side):
    name = "qemu-nbd"

    def start(self):
        process = self.launch("qemu-nbd", "-f", "raw", "-t", "--shared=0", "--aio=io_uring", "-b",
                              "127.0.0.1", "-p", self.port, "-x", "bench", self.path)
        wait_connect(process, ("127.0.0.1", self.port))


class NbdServer(Side):
    name = "nbd-server"

    def start(self):
        config = os.path.join(self.scratch, f"nbd-server-{self.port}.conf")
        with open(config, "w") as out:
            out.write(f"[generic]\n\tlistenaddr = 127.0.0.1\n\tport = {self.port}\n"
                      f"[bench]\n\texportname = {self.path}\n")
        # With -d it serves one connection and exits, so it runs as a daemon.
        pid_file = os.path.join(self.scratch, f"nbd-server-{self.port}.pid")
        process = Daemon(self.name, ["nbd-server", "-C", config, "-p", pid_file], pid_file)
        self.processes.append(process)
        wait_connect(process, ("127.0.0.1", self.port))


class Ours(Side):
    """rtrs-server, and rtrs-client between it and fio: one hop more than the peers have."""

    name = "rtrs"
    attach = True
    server_args = []
    bench_args = []

    def start(self):
        portal = f"tcp://127.0.0.1:{self.port}"
        self.portal = portal
        server = self.launch(f"{self.bin_dir}/rtrs-server", "--export", f"bench={self.path}",
                             "--listen", portal, *self.server_args)
        wait_connect(server, ("127.0.0.1", self.port))
        if self.attach:
            sock = os.path.join(self.scratch, "bench.sock")
            client = self.launch(f"{self.bin_dir}/rtrs-client", "attach", "bench", "--path", portal,
                                 "--socket", sock, "--run-dir", self.scratch, "--foreground")
            wait_connect(client, sock)
            self.uri = f"nbd+unix:///bench?socket={sock}"


class OursInvalidateOff(Ours):
    name = "rtrs-no-invalidate"
    attach = False
    server_args = ["--always-invalidate", "off"]


class OursCrcOff(Ours):
    name = "rtrs-no-crc"
    attach = False
    server_args = ["--crc", "off"]
    bench_args = ["--crc", "off"]


class OursSession(Ours):
    name = "rtrs-session"
    attach = False


PEERS = [Nbdkit, QemuNbd, NbdServer]


# ---- one measurement -------------------------------------------------------------------------

def run_bounded(side, name, argv, seconds_max, scratch):
    """Runs argv to its end, watching the side's memory. Returns its stdout and the CPU seconds of
    the side, of its server alone and of argv, and the share of the machine that others used."""
    before_busy, before_side = machine_busy_seconds(), cpu_seconds(side.pids())
    before_server = cpu_seconds(side.pids()[:1])
    start = time.monotonic()
    out_path = os.path.join(scratch, "run.out")
    with open(out_path, "wb") as out, open(out_path + ".err", "wb") as err:
        child = subprocess.Popen([str(a) for a in argv], stdin=subprocess.DEVNULL, stdout=out,
                                 stderr=err, start_new_session=True)
    RUNNING.append(child)
    try:
        while True:
            pid, status, usage = os.wait4(child.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() - start > seconds_max:
                raise BenchError(f"{name} did not end within {seconds_max} s")
            side.peak = max(side.peak, peak_bytes(side.pids()))
            time.sleep(0.2)
    finally:
        RUNNING.remove(child)
        if child.returncode is None:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    child.returncode = os.waitstatus_to_exitcode(status)
    elapsed = time.monotonic() - start
    time.sleep(0.05)
    side_cpu = cpu_seconds(side.pids()) - before_side
    server_cpu = cpu_seconds(side.pids()[:1]) - before_server
    foreign = machine_busy_seconds() - before_busy - side_cpu - usage.ru_utime - usage.ru_stime
    with open(out_path, errors="replace") as out, open(out_path + ".err", errors="replace") as err:
        stdout, stderr = out.read(), err.read()
    if child.returncode != 0:
        raise BenchError(f"{name} ended with {child.returncode}: {' '.join(map(str, argv))}\n"
                         f"{stderr[-1500:]}{stdout[-1500:]}")
    foreign_share = max(0.0, foreign / (elapsed * os.cpu_count()))
    return stdout, side_cpu, server_cpu, usage.ru_utime + usage.ru_stime, foreign_share


RUNNING = []


def parse_json(name, text):
    """The JSON object in text; fio may print notes before it."""
    try:
        return json.loads(text[text.index("{"):])
    except ValueError as error:
        raise BenchError(f"{name} printed no JSON ({error}):\n{text[-1000:]}") from error


def measure_fio(side, rw, bs, depth, args, scratch):
    argv = ["fio", "--name=bench", *side.fio_engine(), f"--rw={rw}", f"--bs={bs}",
            f"--iodepth={depth}", "--time_based=1", f"--runtime={args.runtime}",
            f"--size={args.size}", "--randrepeat=0", "--norandommap=1", "--thread=1",
            "--percentile_list=50:99", "--output-format=json"]
    stdout, side_cpu, server_cpu, own, foreign = run_bounded(side, "fio", argv,
                                                             args.runtime * 3 + 30, scratch)
    job = parse_json("fio", stdout)["jobs"][0]
    if job["error"]:
        raise BenchError(f"fio on {side.name}: error {job['error']}")
    way = job["write" if "write" in rw else "read"]
    ios = way["total_ios"]
    if ios == 0:
        raise BenchError(f"fio on {side.name} completed no IO")
    fio_seconds = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    if not side.processes:
        # The work is done on threads of fio.
        fio_seconds = own
    percentiles = way["clat_ns"].get("percentile", {})
    return {
        "iops": way["iops"],
        "bw_bytes": way["bw_bytes"],
        "lat_us": {"mean": way["lat_ns"]["mean"] / 1000,
                   "p50": percentiles.get("50.000000", 0) / 1000,
                   "p99": percentiles.get("99.000000", 0) / 1000},
        "cpu_us_per_io": side_cpu * 1e6 / ios,
        "server_cpu_us_per_io": server_cpu * 1e6 / ios,
        "load_cpu_us_per_io": fio_seconds * 1e6 / ios,
        "foreign": foreign,
    }


def measure_session(side, rw, jobs, depth, args, scratch):
    argv = [f"{args.bin_dir}/rtrs-client", "bench", "bench", "--path", side.portal, "--rw", rw,
            "--bs", "4k", "--numjobs", jobs, "--iodepth", depth, "--runtime", f"{args.runtime}s",
            "--yes", *side.bench_args, "-o", "json"]
    stdout, side_cpu, server_cpu, own, foreign = run_bounded(side, "rtrs-client bench", argv,
                                                             args.runtime * 3 + 30, scratch)
    result = parse_json("rtrs-client bench", stdout)
    try:
        iops, lat = float(result["iops"]), result["lat_us"]
        lat = {key: float(lat[key]) for key in ("mean", "p50", "p99")}
        bandwidth = float(result["bw_bytes"])
    except (KeyError, TypeError, ValueError) as error:
        raise BenchError(f"rtrs-client bench: {error!r} in {stdout[-500:]}") from error
    ios = max(1.0, iops * args.runtime)
    return {"iops": iops, "bw_bytes": bandwidth, "lat_us": lat,
            "cpu_us_per_io": (side_cpu + own) * 1e6 / ios,
            "server_cpu_us_per_io": server_cpu * 1e6 / ios, "load_cpu_us_per_io": 0.0,
            "foreign": foreign}


def median_of(samples):
    """The median of each number over the rounds, and the spread of IOPS in percent."""
    def pick(get):
        return statistics.median(get(s) for s in samples)
    iops = [s["iops"] for s in samples]
    middle = statistics.median(iops)
    return {
        "iops": middle,
        "bw_bytes": pick(lambda s: s["bw_bytes"]),
        "lat_us": {k: pick(lambda s, k=k: s["lat_us"][k]) for k in ("mean", "p50", "p99")},
        "cpu_us_per_io": pick(lambda s: s["cpu_us_per_io"]),
        "server_cpu_us_per_io": pick(lambda s: s["server_cpu_us_per_io"]),
        "load_cpu_us_per_io": pick(lambda s: s["load_cpu_us_per_io"]),
        "foreign": max(s["foreign"] for s in samples),
        "spread_percent": 100 * (max(iops) - min(iops)) / middle if middle else 0.0,
        "rounds": samples,
    }


def wait_quiet(seconds_max):
    """Waits until the rest of the machine is below 10 % busy for a second, at most so long."""
    deadline = time.monotonic() + seconds_max
    while time.monotonic() < deadline:
        before = machine_busy_seconds()
        time.sleep(1)
        if machine_busy_seconds() - before < 0.1 * os.cpu_count():
            return


# ---- a table ---------------------------------------------------------------------------------

def make_file(path, size):
    """A file of `size` bytes without holes, so that every side reads stored data."""
    block = os.urandom(1 << 20)
    try:
        with open(path, "wb") as out:
            left = size
            while left > 0:
                left -= out.write(block[:left])
            os.fsync(out.fileno())
    except OSError as error:
        raise BenchError(f"cannot make the {size} byte file {path}: {error}") from error


def wanted(args, row_id):
    return not args.only or any(only in row_id for only in args.only)


def run_table(args, path, scratch, session_rows):
    """Measures every row on the file; returns {row id: {side name: median}} and peaks."""
    kinds = list(PEERS)
    if not args.peers_only:
        kinds.append(Ours)
    fio_rows = [row for row in FIO_ROWS if wanted(args, row[0])]
    session_rows = [row for row in session_rows if wanted(args, row[0])]
    if any(row[3][1] == "peers" for row in session_rows) and FIO_ROWS[0] not in fio_rows:
        fio_rows.insert(0, FIO_ROWS[0])
    sides = [kind(path, scratch, args.bin_dir) for kind in kinds] if fio_rows else []
    session_sides = {}
    if session_rows:
        kinds = {"on": OursSession, "off": OursInvalidateOff, "crc-off": OursCrcOff}
        for key, kind in kinds.items():
            if any(key in row[3] for row in session_rows):
                # A server locks what it exports, so each gets a file of its own.
                own = f"{path}-{key}"
                make_file(own, args.size)
                session_sides[key] = kind(own, scratch, args.bin_dir)
    every_side = sides + list(session_sides.values())
    if not every_side:
        raise BenchError("nothing to run: these rows need our own side, see --peers-only")
    samples = {}
    try:
        for side in every_side:
            side.start()
        for round_index in range(args.rounds):
            # Every second round goes through the sides backwards, so that none is always first.
            step = -1 if round_index % 2 else 1
            for row in fio_rows:
                for side in sides[::step]:
                    wait_quiet(args.wait_quiet)
                    sample = measure_fio(side, row[2], row[3], row[4], args, scratch)
                    report(round_index, args, row[0], side.name, sample)
                    samples.setdefault(row[0], {}).setdefault(side.name, []).append(sample)
            for row in session_rows:
                for key in [k for k in row[3] if k in session_sides][::step]:
                    side = session_sides[key]
                    wait_quiet(args.wait_quiet)
                    sample = measure_session(side, row[2], row[5], row[6], args, scratch)
                    report(round_index, args, row[0], side.name, sample)
                    samples.setdefault(row[0], {}).setdefault(side.name, []).append(sample)
        for side in every_side:
            side.peak = max(side.peak, peak_bytes(side.pids()))
    finally:
        for side in every_side:
            side.stop()
    rows = {row: {name: median_of(s) for name, s in cells.items()}
            for row, cells in samples.items()}
    return {"rows": rows, "peak_bytes": {side.name: side.peak for side in every_side}}


def report(round_index, args, row, name, sample):
    say(f"round {round_index + 1}/{args.rounds} {row:20} {name:18} {sample['iops']:>9.0f} IOPS "
        f"mean {sample['lat_us']['mean']:>7.1f} us, server cpu {sample['cpu_us_per_io']:>6.1f} "
        f"us/IO, foreign {sample['foreign'] * 100:.0f} %")


def compare(ours, other, value, asked, is_cost):
    """The ratio of ours to the other's within each round: median, lowest, highest, met."""
    ratios = [value(a) / value(b) for a, b in zip(ours["rounds"], other["rounds"]) if value(b)]
    if not ratios:
        return {}
    middle = statistics.median(ratios)
    met = asked is None or (middle <= asked if is_cost else middle >= asked)
    return {"ratio": middle, "lowest": min(ratios), "highest": max(ratios), "met": met}


def judge(table):
    """Adds to every row the best peer, the ratio to it, and whether what was asked is met."""
    peers = [kind.name for kind in PEERS]
    verdicts = {}

    def iops(sample):
        return sample["iops"]

    def latency(sample):
        return sample["lat_us"]["mean"]

    for row_id, title, _, _, _, what, asked in FIO_ROWS:
        cells = table["rows"].get(row_id)
        if not cells:
            continue
        present = [p for p in peers if p in cells]
        is_cost = what == "lat"
        value = latency if is_cost else iops
        best = (min if is_cost else max)(present, key=lambda p, v=value, c=cells: v(c[p]))
        verdict = {"title": title, "best": best, "asked": asked, "what": what}
        if Ours.name in cells:
            verdict |= compare(cells[Ours.name], cells[best], value, asked, is_cost)
        verdicts[row_id] = verdict
    for row_id, title, _, (_, other), asked, _, _ in SESSION_ROWS:
        cells = table["rows"].get(row_id)
        if not cells or OursSession.name not in cells:
            continue
        if other in ("off", "crc-off"):
            best = (OursInvalidateOff if other == "off" else OursCrcOff).name
            base = cells[best]
        else:
            best = verdicts[FIO_ROWS[0][0]]["best"]
            base = table["rows"][FIO_ROWS[0][0]][best]
        verdicts[row_id] = {"title": title, "best": best, "asked": asked, "what": "iops",
                            **compare(cells[OursSession.name], base, iops, asked, False)}
    table["verdicts"] = verdicts
    table["cpu"] = {}
    for row_id, title, source, asked in CPU_ROWS:
        cells = table["rows"].get(source, {})
        if Ours.name in cells and Nbdkit.name in cells:
            table["cpu"][row_id] = {
                "title": title, "asked": asked,
                "ours": cells[Ours.name]["server_cpu_us_per_io"],
                "nbdkit": cells[Nbdkit.name]["server_cpu_us_per_io"],
                **compare(cells[Ours.name], cells[Nbdkit.name],
                          lambda sample: sample["server_cpu_us_per_io"], asked, True),
            }


def ratio_text(verdict, sign):
    """The last three cells of a row: ratio, asked, met."""
    ratio = "-"
    if "ratio" in verdict:
        ratio = f"{verdict['ratio']:.2f} ({verdict['lowest']:.2f}-{verdict['highest']:.2f})"
    if verdict["asked"] is None:
        return f"{ratio} | - | - |"
    met = {True: "yes", False: "NO", None: "-"}[verdict.get("met")]
    return f"{ratio} | {sign} {verdict['asked']} | {met} |"


def cell_text(what, cell):
    if cell is None:
        return "-"
    lat = cell["lat_us"]
    if what == "lat":
        return f"{lat['mean']:.1f} us (p50 {lat['p50']:.1f}, p99 {lat['p99']:.1f})"
    if cell["bw_bytes"] / max(cell["iops"], 1) > 65536:
        return f"{cell['bw_bytes'] / 1e6:.0f} MB/s"
    return f"{cell['iops']:.0f} ({lat['mean']:.0f} us)"


def markdown(name, table):
    """The three tables as text: results, CPU, memory."""
    fio_sides = [kind.name for kind in PEERS] + [Ours.name]
    out = [f"### {name}", "",
           "| job | " + " | ".join(fio_sides) + " | best peer | ratio | asked | met |",
           "|---|" + "---|" * (len(fio_sides) + 4)]
    session = []
    for row_id, verdict in table["verdicts"].items():
        cells = table["rows"][row_id]
        sign = "<=" if verdict["what"] == "lat" else ">="
        end = ratio_text(verdict, sign)
        if OursSession.name in cells:
            ours = cell_text("iops", cells[OursSession.name])
            other = cells.get(verdict["best"]) or table["rows"][FIO_ROWS[0][0]][verdict["best"]]
            session.append(f"| {verdict['title']} | {ours} | {verdict['best']}: "
                           f"{cell_text('iops', other)} | {end}")
        else:
            texts = [cell_text(verdict["what"], cells.get(side)) for side in fio_sides]
            out.append(f"| {verdict['title']} | {' | '.join(texts)} | {verdict['best']} | {end}")
    if session:
        out += ["", "| rtrs-client bench | ours | against | ratio | asked | met |",
                "|---|---|---|---|---|---|", *session]
    if table["cpu"]:
        out += ["", "| CPU per request of the server alone | rtrs-server | nbdkit | ratio | asked "
                "| met |", "|---|---|---|---|---|---|"]
        for row in table["cpu"].values():
            out.append(f"| {row['title']} | {row['ours']:.2f} us | {row['nbdkit']:.2f} us | "
                       f"{ratio_text(row, '<=')}")
    out += ["", "CPU microseconds per IO of the serving processes (ours: client and server), "
            "then of fio; spread of IOPS over the rounds; CPU others used at most:", "",
            "| job | side | server us/IO | fio us/IO | spread | foreign |",
            "|---|---|---|---|---|---|"]
    for row_id, verdict in table["verdicts"].items():
        for side, cell in table["rows"][row_id].items():
            out.append(f"| {verdict['title']} | {side} | {cell['cpu_us_per_io']:.1f} | "
                       f"{cell['load_cpu_us_per_io']:.1f} | {cell['spread_percent']:.0f} % | "
                       f"{cell['foreign'] * 100:.0f} % |")
    out += ["", "| side | peak memory (sum of VmHWM), MiB |", "|---|---|"]
    for side, peak in table["peak_bytes"].items():
        out.append(f"| {side} | {peak / (1 << 20):.1f} |")
    return "\n".join(out) + "\n"


def version_of(*argv):
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "missing"
    text = (done.stdout or done.stderr).strip()
    return text.splitlines()[0] if text else "unknown"


def machine(args):
    model = "unknown CPU"
    with open("/proc/cpuinfo") as info:
        for line in info:
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "cpu": model, "cores": os.cpu_count(), "kernel": platform.release(),
        "load_before": os.getloadavg()[0], "runtime_seconds": args.runtime, "rounds": args.rounds,
        "file_bytes": args.size,
        "versions": {"fio": version_of("fio", "--version"),
                     "nbdkit": version_of("nbdkit", "--version"),
                     "qemu-nbd": version_of("qemu-nbd", "--version"),
                     "nbd-server": version_of("nbd-server", "-V")},
    }


def parse_size(text):
    units = {"k": 10, "m": 20, "g": 30}
    try:
        if text[-1:].lower() in units:
            return int(text[:-1]) << units[text[-1].lower()]
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size (1073741824, 512M, 1G)") from None


def parse_args():
    parser = argparse.ArgumentParser(prog="bench.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--runtime", type=int, default=5, help="seconds per run (5)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, medians are shown (5)")
    parser.add_argument("--size", type=parse_size, default=FILE_BYTES_DEFAULT,
                        help="file size (1G)")
    parser.add_argument("--only", action="append", metavar="ROW",
                        help="only rows whose id contains ROW; may be given again")
    parser.add_argument("--peers-only", action="store_true", help="leave out our own side")
    parser.add_argument("--disk", nargs="?", const="", metavar="DIR",
                        help="a second table on a file in DIR (the repository's target/)")
    parser.add_argument("--wait-quiet", type=int, default=0, metavar="SEC",
                        help="before each run wait up to SEC for a machine below 10 %% busy (0)")
    parser.add_argument("--bin-dir", default="target/release", help="where our binaries are")
    parser.add_argument("--rtt", metavar="MS,...",
                        help="compare block devices over links with these round trip times, e.g. "
                        "0.2ms,2ms,20ms, in a guest of the lab")
    parser.add_argument("--loss", metavar="SHARE,...",
                        help="and with these losses of packets, e.g. 0,0.01%%")
    parser.add_argument("-o", "--output", choices=["md", "json"], default="md")
    parser.add_argument("--list", action="store_true", help="print the row ids and stop")
    args = parser.parse_args()
    ids = [row[0] for row in FIO_ROWS] + [row[0] for row in SESSION_ROWS]
    if args.list:
        print("\n".join(ids))
        sys.exit(0)
    if args.runtime < 1 or args.rounds < 1 or args.size < 1 << 20:
        parser.error("--runtime and --rounds need at least 1, --size at least 1M")
    for only in args.only or []:
        if not any(only in row_id for row_id in ids):
            parser.error(f"--only {only}: no such row; there are {', '.join(ids)}")
    return args


def main():
    args = parse_args()
    end_on_signals()
    tools = ("fio", "nbdkit", "qemu-nbd", "nbd-server")
    missing = [tool for tool in tools if not shutil.which(tool)]
    if not args.peers_only:
        missing += [f"{args.bin_dir}/{name}" for name in ("rtrs-server", "rtrs-client")
                    if not os.access(f"{args.bin_dir}/{name}", os.X_OK)]
    if missing:
        raise BenchError(f"missing: {', '.join(missing)} (scripts/bench.sh installs and builds)")
    memory_dir = "/dev/shm" if os.path.isdir("/dev/shm") else None
    scratch = tempfile.mkdtemp(prefix="rtrs-bench-")
    places = [(tempfile.mkdtemp(prefix="rtrs-bench-", dir=memory_dir), "file in memory (/dev/shm)")]
    if args.disk is not None:
        os.makedirs(args.disk or "target", exist_ok=True)
        disk_dir = tempfile.mkdtemp(prefix="rtrs-bench-", dir=args.disk or "target")
        places.append((os.path.abspath(disk_dir), "file on disk"))
    atexit.register(lambda: [shutil.rmtree(d, ignore_errors=True)
                             for d in [scratch] + [p for p, _ in places]])
    atexit.register(stop_all)
    result = {"machine": machine(args), "tables": {}}
    for number, (place, name) in enumerate(places):
        path = os.path.join(place, "bench.img")
        say(f"{name}: {path}, {args.size >> 20} MiB")
        make_file(path, args.size)
        rows = [] if args.peers_only or number > 0 else SESSION_ROWS
        table = run_table(args, path, scratch, rows)
        judge(table)
        result["tables"][name] = table
        os.unlink(path)
    result["machine"]["load_after"] = os.getloadavg()[0]
    if args.output == "json":
        print(json.dumps(result, indent=1))
    else:
        info = result["machine"]
        print(f"{info['cores']} x {info['cpu']}, Linux {info['kernel']}; "
              + ", ".join(f"{k}: {v}" for k, v in info["versions"].items())
              + f"; {args.rounds} rounds of {args.runtime} s, medians; load "
              f"{info['load_before']:.1f} before, {info['load_after']:.1f} after.\n")
        for name, table in result["tables"].items():
            print(markdown(name, table))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        sys.exit(1)
