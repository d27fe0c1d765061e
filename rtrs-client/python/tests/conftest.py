"""An rtrs-server for the tests.

RTRS_BIN_DIR is the directory of the programs (target/debug); RTRS_LIBRARY is the library, by
default librtrs_capi.so in that directory.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = Path(os.environ.get("RTRS_BIN_DIR") or ROOT / "target/debug")
os.environ.setdefault("RTRS_LIBRARY", str(PROGRAMS / "librtrs_capi.so"))
# For the programs that tests start.
os.environ.setdefault("PYTHONPATH", str(ROOT / "rtrs-client/python"))

# Longest wait for an event that must occur, in seconds.
LONG = 120
MIB = 1 << 20


def wait_for(what, check):
    """Polls until the check returns something; fails after a long time."""
    end = time.monotonic() + LONG
    while True:
        found = check()
        if found:
            return found
        assert time.monotonic() < end, f"no {what} within {LONG} s"
        time.sleep(0.01)


class Server:
    """An rtrs-server with exports in memory."""

    def __init__(self, scratch, exports):
        self._log = scratch / "server.log"
        words = [PROGRAMS / "rtrs-server", "--listen", "tcp://127.0.0.1:0"]
        words += ["--run-dir", scratch / "run", "--state-dir", scratch / "state"]
        words += [word for export in exports for word in ("--export", export)]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=log)
        self.portal = wait_for("address of the server", self._find_portal)

    def _find_portal(self):
        log = self._log.read_text()
        assert self._process.poll() is None, log
        lines = log.split("\n")[:-1]
        found = [line.split()[2] for line in lines if line.startswith("listening on ")]
        return found[0] if found else None

    def uri(self, export="vol0"):
        return f"{self.portal}/{export}"

    def stop(self):
        """Makes the server hold all requests."""
        self._process.send_signal(signal.SIGSTOP)
        wait_for("stop of the server", self._is_stopped)

    def _is_stopped(self):
        tasks = Path(f"/proc/{self._process.pid}/task").glob("*/status")
        states = [task.read_text() for task in tasks]
        # Workers of io_uring may be in a system call that cannot be stopped.
        return all("State:\tT" in text or text.startswith("Name:\tiou-") for text in states)

    def resume(self):
        self._process.send_signal(signal.SIGCONT)

    def kill(self):
        self._process.kill()
        self._process.wait(LONG)


@pytest.fixture
def start_server(tmp_path):
    """Returns a function that starts a server with exports."""
    servers = []

    def start(*exports):
        scratch = tmp_path / f"server{len(servers)}"
        scratch.mkdir()
        servers.append(Server(scratch, exports))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def server(start_server):
    return start_server("vol0=mem:64M")


def pattern(length, seed=0):
    """Returns bytes that differ from those of other seeds."""
    block = bytes((at + seed) % 251 for at in range(251))
    return (block * (length // 251 + 1))[:length]


def descriptors():
    """Returns the number of open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))
