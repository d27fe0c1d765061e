"""Sides shared by several comparisons, and their loads: fio and `rtrs-client bench`."""

import os
import resource
import time

from processes import (BenchError, Daemon, Process, busy_seconds, cpu_seconds, free_port,
                       parse_json, peak_bytes, wait_connect, wait_for)

# Name of every export.
EXPORT = "bench"


class Side:
    """A server and the URI that fio opens (`uri`). Its first process is the server itself."""

    name = ""
    # Whether some threads of fio do work of this side.
    load_has_threads = False

    def __init__(self, args, target=None):
        self.args, self.target = args, target
        self.port = free_port()
        self.uri = f"nbd://127.0.0.1:{self.port}/{EXPORT}"
        self.processes = []
        self.peak = 0

    def start(self):
        """Starts the processes and waits until they accept connections."""

    def launch(self, *argv, address=None, **options):
        process = Process(self.name, argv, **options)
        self.processes.append(process)
        if address:
            wait_connect(process, address)
        return process

    def scratch(self, name):
        return os.path.join(self.args.scratch, f"{self.name}-{self.port}-{name}")

    def fio_engine(self):
        return ["--ioengine=nbd", f"--uri={self.uri}"]

    def pids(self):
        for process in self.processes:
            process.check_alive()
        return [process.pid for process in self.processes]

    def note_memory(self):
        self.peak = max(self.peak, peak_bytes(self.pids()))

    def stop(self):
        while self.processes:
            self.processes.pop().stop()


class Nbdkit(Side):
    """nbdkit with its file plugin over TCP."""

    name = "nbdkit"

    def start(self):
        self.launch("nbdkit", "-f", "-i", "127.0.0.1", "-p", self.port, "file", self.target,
                    address=self.port)


class QemuNbd(Side):
    """qemu-nbd over TCP."""

    name = "qemu-nbd"

    def start(self):
        self.launch("qemu-nbd", "-f", "raw", "-t", "--shared=0", "--aio=io_uring", "-b",
                    "127.0.0.1", "-p", self.port, "-x", EXPORT, self.target, address=self.port)


class NbdServer(Side):
    """nbd-server over TCP. With -d it would exit after one connection, so it is a daemon."""

    name = "nbd-server"

    def start(self):
        config, pid_file = self.scratch("conf"), self.scratch("pid")
        with open(config, "w") as out:
            out.write(f"[generic]\n\tlistenaddr = 127.0.0.1\n\tport = {self.port}\n"
                      f"[{EXPORT}]\n\texportname = {self.target}\n")
        start = Process(self.name, ["nbd-server", "-C", config, "-p", pid_file])

        def pid():
            try:
                with open(pid_file) as file:
                    return int(file.read())
            except (OSError, ValueError):
                return None
        daemon = Daemon(self.name, wait_for("leaves its pid", pid))
        self.processes.append(daemon)
        wait_connect(daemon, self.port)
        start.stop()


class Ours(Side):
    """rtrs-server over TCP and, with `attach`, rtrs-client between it and fio: one hop more than
    the other servers have. `bench_flags` are for `rtrs-client bench`. The session has `paths`
    paths, each to a loopback address of its own."""

    name = "rtrs"
    attach = True
    paths = 1
    server_flags = ()
    bench_flags = ()

    def start(self):
        portals = [f"tcp://127.0.0.{number + 1}:{self.port}" for number in range(self.paths)]
        self.portal, self.path_flags = portals[0], [f"--path={portal}" for portal in portals]
        self.launch(f"{self.args.bin_dir}/rtrs-server", "--export", f"{EXPORT}={self.target}",
                    *(f"--listen={portal}" for portal in portals),
                    "--run-dir", self.scratch("run"), "--state-dir", self.scratch("state"),
                    *self.server_flags, address=self.port)
        if self.attach:
            self.start_client(*self.path_flags, *self.bench_flags)

    def start_client(self, *flags):
        """Attaches the export, so that fio can open it through a Unix socket."""
        sock = self.scratch("sock")
        self.uri = f"nbd+unix:///{EXPORT}?socket={sock}"
        self.launch(f"{self.args.bin_dir}/rtrs-client", "attach", EXPORT, "--socket", sock,
                    "--run-dir", self.scratch("client"), "--foreground", *flags, address=sock)


class OursSession(Ours):
    """rtrs-server alone: the load opens the session."""

    name = "rtrs-session"
    attach = False


def run_load(side, name, argv, seconds_max):
    """Runs a load to completion. Returns its output, the CPU seconds of all processes of the side,
    of its server and of the load, and the share of the machine that others used."""
    def usage():
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return (cpu_seconds(side.pids()), cpu_seconds(side.pids()[:1]),
                children.ru_utime + children.ru_stime, busy_seconds())
    before, start = usage(), time.monotonic()
    output = Process(name, argv).wait(seconds_max, side.note_memory)
    elapsed = time.monotonic() - start
    time.sleep(0.05)
    total, server, load, busy = (a - b for a, b in zip(usage(), before))
    foreign = max(0.0, (busy - total - load) / (elapsed * os.cpu_count()))
    return output, total, server, load, foreign


class Fio:
    """A load of fio."""

    def __init__(self, rw, block, depth):
        self.rw, self.block, self.depth = rw, block, depth

    def __call__(self, side, args):
        argv = ["fio", "--name=bench", *side.fio_engine(), f"--rw={self.rw}", f"--bs={self.block}",
                f"--iodepth={self.depth}", "--time_based=1", f"--runtime={args.runtime}",
                f"--size={args.size}", "--randrepeat=0", "--norandommap=1", "--thread=1",
                "--percentile_list=50:99", "--output-format=json"]
        output, cpu, server, load, foreign = run_load(side, "fio", argv, args.runtime * 3 + 30)
        job = parse_json("fio", output)["jobs"][0]
        way = job["write" if "write" in self.rw else "read"]
        ios = way["total_ios"]
        if job["error"] or ios == 0:
            raise BenchError(f"fio on {side.name}: error {job['error']}, {ios} IOs")
        if side.processes and not side.load_has_threads:
            # Excludes the startup of fio. With load_has_threads, fio has threads that it does not
            # count.
            load = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
        percentiles = way["clat_ns"].get("percentile", {})
        return {"iops": way["iops"], "mb_per_s": way["bw_bytes"] / 1e6,
                "lat_us": way["lat_ns"]["mean"] / 1000,
                "p50_us": percentiles.get("50.000000", 0) / 1000,
                "p99_us": percentiles.get("99.000000", 0) / 1000,
                "cpu_us": cpu * 1e6 / ios, "server_cpu_us": server * 1e6 / ios,
                "load_cpu_us": load * 1e6 / ios, "foreign": foreign}


class Session:
    """A load of `rtrs-client bench`: a session without NBD."""

    def __init__(self, rw, block, depth, jobs=1):
        self.rw, self.block, self.depth, self.jobs = rw, block, depth, jobs

    def argv(self, side, seconds):
        return [f"{side.args.bin_dir}/rtrs-client", "bench", EXPORT, *side.path_flags, "--rw",
                self.rw, "--bs", self.block, "--numjobs", self.jobs, "--iodepth", self.depth,
                "--runtime", f"{seconds}s", "--run-dir", side.scratch("bench"), "--yes", "-o",
                "json", *side.bench_flags]

    def __call__(self, side, args):
        name = "rtrs-client bench"
        output, cpu, server, load, foreign = run_load(
            side, name, self.argv(side, args.runtime), args.runtime * 3 + 30)
        try:
            result = parse_json(name, output)
            iops, lat = float(result["iops"]), result["lat_us"]
            ios = max(1.0, iops * args.runtime)
            # The client of a session is one of our processes.
            return {"iops": iops, "mb_per_s": float(result["bw_bytes"]) / 1e6,
                    "lat_us": float(lat["mean"]), "p50_us": float(lat["p50"]),
                    "p99_us": float(lat["p99"]), "cpu_us": (cpu + load) * 1e6 / ios,
                    "server_cpu_us": server * 1e6 / ios, "load_cpu_us": 0.0, "foreign": foreign}
        except (KeyError, TypeError, ValueError) as error:
            raise BenchError(f"{name}: {error!r} in {output[-500:]}") from error
