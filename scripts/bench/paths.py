"""Several equal paths beside a single one: an export in memory, a session alone and the NBD bridge.
Each path leads to a loopback address of its own."""

from servers import Fio, Ours, OursSession, Session
from tables import Comparison, Row, judge, measure, selected

SIZE = 256 << 20
COUNTS = {"one": 1, "two": 2, "four": 4}
# Ratio to a single path.
ASKED = {"two": 0.97, "four": 0.93}
KINDS = {"session": (OursSession, Session), "bridge": (Ours, Fio)}
POLICIES = {"": (), "-round-robin": ("--policy=round-robin",)}


def rows(kind, rw):
    load = KINDS[kind][1](rw, "4k", 32)
    for count, asked in ASKED.items():
        yield Row(f"{kind}-{rw}-{count}", f"{count} paths, 4k {rw} QD32", load,
                  (f"{kind}-one", f"{kind}-{count}"), asked=asked)
    yield Row(f"{kind}-{rw}-two-round-robin", f"two paths, round-robin, 4k {rw} QD32", load,
              (f"{kind}-one", f"{kind}-two-round-robin"))


TABLES = {kind: [row for rw in ("randread", "randwrite") for row in rows(kind, rw)]
          for kind in KINDS}


def make_side(args, kind, count, policy):
    side = KINDS[kind][0](args, f"mem:{SIZE}")
    side.name = f"{kind}-{count}{policy}"
    side.paths, side.bench_flags = COUNTS[count], POLICIES[policy]
    return side


def run(args):
    args.size = SIZE
    chosen = selected(args, TABLES)
    used = {name for row in chosen for name in row.sides}
    sides = [make_side(args, kind, count, policy)
             for kind in KINDS for count in COUNTS for policy in POLICIES]
    sides = {side.name: side for side in sides if side.name in used}
    return {"tables": {"": judge(chosen, measure(args, chosen, sides), sides)}}


COMPARISON = Comparison("several equal paths with one", TABLES, run, tools={"fio": "fio"})
