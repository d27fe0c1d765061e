"""Comparison of this build of rtrs with a second one, for example of an earlier commit: the same
loads on sessions and through the NBD bridge, on an export in memory and on one without data."""

import os
import types

from processes import BenchError
from servers import Fio, Ours, OursSession, Session
from tables import BANDWIDTH, IOPS, LATENCY, Comparison, Row, judge, measure, selected

SIZE = 256 << 20
TARGETS = {"mem": f"mem:{SIZE}", "null": f"null:{SIZE}"}
# Ratio above which two builds count as equally fast; the rest is the noise of a median.
EQUAL = 0.97
# Sides with a session alone, and with the bridge.
KINDS = {"session": OursSession, "bridge": Ours}


def sides_of(target, kind):
    """Returns the names of the other build's side and of this build's side."""
    return tuple(f"{build}-{target}-{kind}" for build in ("other", "this"))


def session(target, rw, block, depth, figure):
    return Row(f"session-{target}-{rw}-{block}", f"session, {target}:, {block} {rw} QD{depth}",
               Session(rw, block, depth), sides_of(target, "session"), figure, EQUAL)


def bridge(rw, block, depth, figure):
    asked = 1 / EQUAL if figure.lower_is_better else EQUAL
    return Row(f"bridge-{rw}-{block}-q{depth}", f"bridge, mem:, {block} {rw} QD{depth}",
               Fio(rw, block, depth), sides_of("mem", "bridge"), figure, asked)


LOADS = (("randread", "4k", 32, IOPS), ("randwrite", "4k", 32, IOPS),
         ("read", "128k", 16, BANDWIDTH), ("write", "128k", 16, BANDWIDTH))
TABLES = {
    "rtrs-client bench": [session(target, *load) for target in TARGETS for load in LOADS],
    "fio": [*(bridge(*load) for load in LOADS), bridge("randread", "4k", 1, LATENCY)],
}


def add_options(parser):
    parser.add_argument("--other", metavar="DIR", required=True,
                        help="directory of the other build's programs")


def run(args):
    args.size = SIZE
    rows = selected(args, TABLES)
    other = types.SimpleNamespace(**vars(args) | {"bin_dir": os.path.abspath(args.other)})
    for name in COMPARISON.programs:
        if not os.path.exists(f"{other.bin_dir}/{name}"):
            raise BenchError(f"missing: {other.bin_dir}/{name}")
    sides = {}
    for target, kind in (("mem", "session"), ("null", "session"), ("mem", "bridge")):
        for name, options in zip(sides_of(target, kind), (other, args)):
            if any(name in row.sides for row in rows):
                sides[name] = KINDS[kind](options, TARGETS[target])
                sides[name].name = name
    return {"tables": {"": judge(rows, measure(args, rows, sides), sides)}}


COMPARISON = Comparison("another build of rtrs with this one", TABLES, run,
                        add_options=add_options, tools={"fio": "fio"})
