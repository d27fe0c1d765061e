"""Compares the speed of rtrs and RDS with that of other programs, or of other settings, on this
machine. scripts/bench.sh NAME --help lists the options of a comparison; default: peers.

Only the standard library is used. Exit codes: 0 good, 1 failed, 2 usage.
"""

import argparse
import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(HERE, "../../rds/bench"))

import builds
import cluster
import library
import paths
import peers
import rds
import scale
import sparse
import tables
import tls
import vhost
from processes import BenchError, end_on_signals, say, stop_all

COMPARISONS = {"peers": peers.COMPARISON, "paths": paths.COMPARISON, "tls": tls.COMPARISON,
               "library": library.COMPARISON, "vhost": vhost.COMPARISON,
               "sparse": sparse.COMPARISON, "cluster": cluster.COMPARISON, "rds": rds.COMPARISON,
               "scale": scale.COMPARISON, "builds": builds.COMPARISON}
# Common options with a number: metavar and help.
NUMBERS = {"runtime": ("SEC", "seconds of each load"),
           "rounds": ("N", "rounds; medians are shown"),
           "wait_quiet": ("SEC", "wait up to SEC before each run for a machine under 10 %% busy")}


def parse_args(argv):
    parser = argparse.ArgumentParser(prog="bench.sh", description=__doc__.partition("\n\n")[0])
    commands = parser.add_subparsers(dest="comparison")
    subparsers = {}
    for name, comparison in COMPARISONS.items():
        command = commands.add_parser(name, help=comparison.about,
                                      description=f"Compares {comparison.about}.")
        for key, default in comparison.defaults.items():
            metavar, text = NUMBERS[key]
            command.add_argument(f"--{key.replace('_', '-')}", type=int, metavar=metavar,
                                 help=f"{text} ({default})")
        command.add_argument("--only", action="append", metavar="ROW",
                             help="only rows whose id contains ROW; repeatable")
        command.add_argument("--bin-dir", metavar="DIR", default=os.environ.get("RTRS_BIN_DIR"),
                             help="directory with our programs (RTRS_BIN_DIR, or a new build)")
        command.add_argument("-o", "--output", choices=["md", "json"], default="md")
        command.add_argument("--list", action="store_true", help="print the row ids and exit")
        comparison.add_options(command)
        subparsers[name] = command
    if not argv or argv[0] not in (*COMPARISONS, "-h", "--help"):
        argv = ["peers", *argv]
    args = parser.parse_args(argv)
    comparison, command = COMPARISONS[args.comparison], subparsers[args.comparison]
    ids = [row.id for row in comparison.rows()]
    if args.list:
        print("\n".join(ids))
        sys.exit(0)
    for only in args.only or []:
        if not any(only in row_id for row_id in ids):
            command.error(f"--only {only}: no such row; there are {', '.join(ids)}")
    comparison.check_options(args, command)
    for key, default in comparison.defaults.items():
        if getattr(args, key) is None:
            setattr(args, key, default)
        if getattr(args, key) < (key != "wait_quiet"):
            command.error(f"--{key} needs at least 1")
    return args, comparison


def find_programs(args, comparison):
    """Builds our programs unless a directory contains them, and checks for all others."""
    if not args.bin_dir:
        say("building the release binaries")
        done = subprocess.run(["cargo", "build", "--release", "--locked", *comparison.build],
                              check=False, stdout=sys.stderr)
        if done.returncode != 0:
            raise BenchError("the build failed")
        args.bin_dir = f"{os.environ.get('CARGO_TARGET_DIR', 'target')}/release"
    args.bin_dir = os.path.abspath(args.bin_dir)
    missing = [f"{args.bin_dir}/{name}" for name in comparison.programs
               if not os.path.exists(f"{args.bin_dir}/{name}")]
    missing += [f"{tool} (apt-get install {package})"
                for tool, package in comparison.tools.items() if not shutil.which(tool)]
    if missing:
        raise BenchError(f"missing: {', '.join(missing)}")


def main():
    args, comparison = parse_args(sys.argv[1:])
    end_on_signals()
    find_programs(args, comparison)
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    args.scratch = tempfile.mkdtemp(prefix="rtrs-bench-", dir=memory)
    atexit.register(shutil.rmtree, args.scratch, ignore_errors=True)
    atexit.register(stop_all)
    info = tables.machine(args, comparison.tools)
    result = {"machine": info, **comparison.run(args)}
    info["load_after"] = os.getloadavg()[0]
    if args.output == "json":
        print(json.dumps(result, indent=1))
    else:
        print(tables.machine_text(info))
        print((comparison.text or tables.markdown)(comparison, result))


if __name__ == "__main__":
    try:
        main()
    except BenchError as error:
        sys.exit(f"bench: error: {error}")
