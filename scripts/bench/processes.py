"""Programs that a comparison starts: bounded waits, CPU time, memory, and termination."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time

START_SECONDS_MAX = 20
STOP_SECONDS_MAX = 5
COMMAND_SECONDS_MAX = 120
OUTPUT_BYTES_MAX = 64 << 20
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

# Running processes, in the order of their start.
STARTED = []


class BenchError(Exception):
    """A failure outside of this driver, with a message for the user."""


def say(text):
    """Prints a progress line on stderr; stdout is reserved for the result."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def wait_for(what, ready, process=None, seconds_max=START_SECONDS_MAX):
    """Waits until `ready` returns a value, and returns that. Fails if the process ends."""
    deadline = time.monotonic() + seconds_max
    while True:
        found = ready()
        if found:
            return found
        if process:
            process.check_alive()
        if time.monotonic() > deadline:
            error = f"{what}: not within {seconds_max} s"
            raise process.failed(error) if process else BenchError(error)
        time.sleep(0.02)


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def wait_connect(process, address):
    """Waits until a TCP port of this machine or a unix path accepts a connection."""
    def connects():
        is_port = isinstance(address, int)
        with socket.socket(socket.AF_INET if is_port else socket.AF_UNIX) as sock:
            sock.settimeout(2)
            return sock.connect_ex(("127.0.0.1", address) if is_port else address) == 0
    wait_for(f"accepts at {address}", connects, process)


def stat_fields(pid):
    """Returns the fields of /proc/PID/stat that follow the name."""
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()


class Daemon:
    """A process that put itself into the background. Its start time distinguishes it from a later
    process with the same pid."""

    def __init__(self, name, pid):
        self.name, self.pid = name, pid
        self.started_at = stat_fields(pid)[19]
        STARTED.append(self)

    def is_alive(self):
        try:
            fields = stat_fields(self.pid)
        except OSError:
            return False
        return fields[19] == self.started_at and fields[0] != "Z"

    def send(self, number):
        if self.is_alive():
            os.kill(self.pid, number)

    def failed(self, what):
        return BenchError(f"{self.name} {what}")

    def check_alive(self):
        if not self.is_alive():
            raise self.failed("ended early")

    def stop(self, *signals):
        """Sends SIGTERM, or the given signals, and then SIGKILL, each with a bounded wait."""
        if self in STARTED:
            STARTED.remove(self)
        for number in (*(signals or (signal.SIGTERM,)), signal.SIGKILL):
            deadline = time.monotonic() + STOP_SECONDS_MAX
            self.send(number)
            while self.is_alive() and time.monotonic() < deadline:
                time.sleep(0.01)
            if not self.is_alive():
                return


class Process(Daemon):
    """A child in its own process group, so that its forks end too."""

    def __init__(self, name, argv, **options):
        self.name, self.argv = name, [str(word) for word in argv]
        self.out, self.log = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        options = {"stdin": subprocess.DEVNULL, "stdout": self.out, "stderr": self.log} | options
        try:
            self.child = subprocess.Popen(self.argv, start_new_session=True, **options)
        except OSError as error:
            raise BenchError(f"cannot start {self.argv[0]}: {error}") from error
        self.pid = self.child.pid
        STARTED.append(self)

    def output(self):
        # The child shares the offset of the file.
        return os.pread(self.out.fileno(), OUTPUT_BYTES_MAX, 0).decode(errors="replace")

    def failed(self, what):
        log = os.pread(self.log.fileno(), OUTPUT_BYTES_MAX, 0).decode(errors="replace")
        tail = "\n".join((self.output() + log).splitlines()[-10:])
        return BenchError(f"{self.name}: {what}: {' '.join(self.argv)}\n{tail[-2000:]}")

    def is_alive(self):
        return self.child.poll() is None

    def send(self, number):
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass

    def check_alive(self):
        if not self.is_alive():
            raise self.failed(f"ended with {self.child.returncode}")

    def stop(self, *signals):
        super().stop(*signals)
        self.send(signal.SIGKILL)

    def wait(self, seconds_max, meanwhile=None):
        """Waits for the end and returns the output; calls `meanwhile` repeatedly."""
        deadline = time.monotonic() + seconds_max
        ends = os.pidfd_open(self.pid)
        try:
            while not select.select([ends], [], [], 0.2)[0]:
                if time.monotonic() > deadline:
                    raise self.failed(f"did not end within {seconds_max} s")
                if meanwhile:
                    meanwhile()
        finally:
            os.close(ends)
            self.stop()
        if self.child.returncode != 0:
            self.check_alive()
        return self.output()


def command(*argv, seconds_max=COMMAND_SECONDS_MAX, **options):
    """Runs a command and returns its output."""
    return Process(os.path.basename(str(argv[0])), argv, **options).wait(seconds_max)


def parse_json(name, text):
    """Returns the first JSON object in a text: fio may print notes before it."""
    try:
        return json.loads(text[text.index("{"):])
    except ValueError as error:
        raise BenchError(f"{name} printed no JSON ({error}):\n{text[-1000:]}") from error


def stop_all():
    for process in list(reversed(STARTED)):
        process.stop()


def end_on_signals():
    """Makes signals end the driver like an exit, so that its child processes end too."""
    def end(number, _frame):
        raise SystemExit(128 + number)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)


def descendants(roots):
    """Returns the roots and all live processes below them."""
    parents = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
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
    """Returns utime + stime of the trees, with those of children that ended and were reaped."""
    ticks = 0
    for pid in descendants(roots):
        try:
            ticks += sum(int(field) for field in stat_fields(pid)[11:15])
        except OSError:
            continue
    return ticks / TICKS_PER_SECOND


def status_number(pid, key, file="status"):
    """Returns a number from a file in /proc/PID, or 0."""
    try:
        with open(f"/proc/{pid}/{file}") as status:
            return sum(int(line.split()[1]) for line in status if line.startswith(f"{key}:"))
    except OSError:
        return 0


def peak_bytes(roots):
    """Returns the sum of VmHWM over the trees."""
    return sum(status_number(pid, "VmHWM") for pid in descendants(roots)) * 1024


def busy_seconds():
    """Returns the CPU time for which the machine has not been idle, steal included."""
    with open("/proc/stat") as stat:
        fields = [int(field) for field in stat.readline().split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / TICKS_PER_SECOND


def wait_quiet(seconds_max):
    """Waits for a limited time until the machine has been under 10 % busy for a second."""
    deadline = time.monotonic() + seconds_max
    while time.monotonic() < deadline:
        before = busy_seconds()
        time.sleep(1)
        if busy_seconds() - before < 0.1 * os.cpu_count():
            return
