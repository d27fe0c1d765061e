"""Declarations of comparisons, interleaved rounds, medians, ratios, and tables.

Rounds are interleaved: in each round every row, in each row every side, so that a slow minute of
the machine affects all sides. Every second round goes through the sides backwards. A ratio is taken
within a round; a table shows the median ratio with the lowest and the highest. Over five rounds
this range contains the true median with a confidence of 94 %.
"""

import os
import platform
import statistics
import subprocess
from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple

from processes import say, wait_quiet


class Figure(NamedTuple):
    """A number in a sample, and its text in a cell."""

    key: str
    text: str
    lower_is_better: bool = False


IOPS = Figure("iops", "{iops:.0f} ({lat_us:.0f} us)")
BANDWIDTH = Figure("iops", "{mb_per_s:.0f} MB/s")
LATENCY = Figure("lat_us", "{lat_us:.1f} us (p50 {p50_us:.1f}, p99 {p99_us:.1f})", True)
CPU = Figure("server_cpu_us", "{server_cpu_us:.2f} us", True)


class Row(NamedTuple):
    """A line of a table. `load` measures a side and returns a sample: a dictionary of numbers."""

    id: str
    title: str
    load: Callable | None
    # The last side is ours; it is compared with the best of the others.
    sides: tuple
    figure: Figure = IOPS
    asked: float | None = None
    # Row whose samples this one shows, or with whose best side this row is compared.
    samples_of: str | None = None
    best_of: str | None = None


# Defaults of the common options that are numbers.
DEFAULTS = {"runtime": 5, "rounds": 5, "wait_quiet": 0}
# Columns of the table of costs: title and text.
COSTS = (("CPU of servers, us/IO", "{cpu_us:.1f}"), ("CPU of load, us/IO", "{load_cpu_us:.1f}"),
         ("CPU of others", "{foreign:.0%}"))


class Comparison(NamedTuple):
    """A command of the driver."""

    about: str
    # Rows by the title of their table.
    tables: dict
    # Measures, and returns what -o json prints.
    run: Callable
    # Our programs, what cargo builds for them, and the Debian packages of other programs.
    programs: tuple = ("rtrs-server", "rtrs-client")
    build: tuple = ("--bin=rtrs-server", "--bin=rtrs-client")
    tools: dict = MappingProxyType({})
    # Common options of this command.
    defaults: dict = MappingProxyType(DEFAULTS)
    add_options: Callable = lambda parser: None
    check_options: Callable = lambda args, parser: None
    # Prints the result; by default `markdown`.
    text: Callable | None = None
    costs: tuple = COSTS

    def rows(self):
        return [row for rows in self.tables.values() for row in rows]


def is_selected(args, row_id):
    return not args.only or any(only in row_id for only in args.only)


def selected(args, tables):
    """Returns the rows that --only selects, and those that they need."""
    rows = [row for rows in tables.values() for row in rows]
    ids = {row.id for row in rows if is_selected(args, row.id)}
    needed = {row_id for row in rows if row.id in ids for row_id in (row.samples_of, row.best_of)}
    return [row for row in rows if row.id in ids | needed]


def measure(args, rows, sides, each_run=False):
    """Returns the samples {row: {side: [one for each round]}}. The sides, {name: Side}, run
    throughout, or each only during its own measurements."""
    found = {}
    try:
        for side in [] if each_run else sides.values():
            side.start()
        for number in range(args.rounds):
            for row in filter(lambda row: row.load, rows):
                for name in [n for n in row.sides if n in sides][::-1 if number % 2 else 1]:
                    wait_quiet(args.wait_quiet)
                    if each_run:
                        sides[name].start()
                    sample = row.load(sides[name], args)
                    sides[name].note_memory()
                    if each_run:
                        sides[name].stop()
                    found.setdefault(row.id, {}).setdefault(name, []).append(sample)
                    text = ", ".join(f"{key} {value:.4g}" for key, value in sample.items())
                    say(f"round {number + 1}/{args.rounds} {row.id} {name}: {text}")
    finally:
        for side in sides.values():
            side.stop()
    return found


def ratio(ours, others):
    """Returns the ratio of two lists of figures by round, or nothing; a missing figure is None."""
    found = [a / b for a, b in zip(ours, others) if a is not None and b]
    if not found:
        return {}
    return {"ratio": statistics.median(found), "lowest": min(found), "highest": max(found),
            "rounds": len(found)}


def median_of(samples):
    """Returns the median of each number over the rounds; of CPU that others used, the maximum."""
    return {key: (max if key == "foreign" else statistics.median)(s[key] for s in samples)
            for key in samples[0]}


def judge(rows, samples, sides):
    """Returns the table {row: verdict with cells} of the samples, and peaks of memory."""
    result = {}
    for row in rows:
        found = samples.get(row.samples_of or row.id, {})
        peers = [name for name in row.sides[:-1] if name in found]
        base = found
        if row.best_of:
            peers, base = [result[row.best_of]["best"]], samples[row.best_of]
        figures = {name: [sample[row.figure.key] for sample in each]
                   for name, each in (base | found).items()}
        best = (min if row.figure.lower_is_better else max)(
            peers, key=lambda name: statistics.median(figures[name]), default=None)
        ours, cells = row.sides[-1], {name: median_of(base[name]) for name in peers}
        cells |= {name: median_of(each) for name, each in found.items() if name in row.sides}
        for name, cell in cells.items():
            middle = statistics.median(figures[name])
            spread = max(figures[name]) - min(figures[name])
            cell["spread"] = spread / middle if middle else 0.0
        result[row.id] = {"title": row.title, "best": best, "asked": row.asked, "cells": cells,
                          **ratio(figures.get(ours, []), figures.get(best, []))}
    peaks = {name: side.peak for name, side in sides.items() if side.peak}
    return {"rows": result, "peak_bytes": peaks, "samples": samples}


def table(head, rows):
    """Returns the lines of a Markdown table."""
    first, *rest = ("| " + " | ".join(map(str, row)) + " |" for row in [list(head), *rows])
    return [first, "|" + "---|" * len(head), *rest, ""]


def range_text(verdict):
    if "ratio" not in verdict:
        return "-"
    return f"{verdict['ratio']:.2f} ({verdict['lowest']:.2f}-{verdict['highest']:.2f})"


def asked_cells(asked, found, lower_is_better, unit=""):
    """Returns the cells `asked` and `met`."""
    if asked is None or found is None:
        return ["-", "-"]
    sign, is_met = ("<=", found <= asked) if lower_is_better else (">=", found >= asked)
    return [f"{sign} {asked:g}{unit}", "yes" if is_met else "NO"]


def results(title, rows, found):
    """Returns the table of results: a column for each side, or for ours and the best other one."""
    names = list(dict.fromkeys(name for row in rows for name in row.sides))
    wide = len(names) > 2 and all(len(row.sides) == len(names) for row in rows)
    lines = []
    for row in rows:
        verdict = found[row.id]
        texts = {name: row.figure.text.format(**cell) for name, cell in verdict["cells"].items()}
        best = verdict["best"]
        cells = [texts.get(name, "-") for name in names] + [best] if wide else [
            texts.get(row.sides[-1], "-"), f"{best}: {texts[best]}" if best else "-"]
        asked = asked_cells(row.asked, verdict.get("ratio"), row.figure.lower_is_better)
        lines.append([row.title, *cells, range_text(verdict), *asked])
    head = [*names, "best peer"] if wide else ["ours", "against"]
    return table([title, *head, "ratio", "asked", "met"], lines)


def markdown(comparison, result):
    """Returns all tables of a result as text."""
    out = []
    for place, one in result["tables"].items():
        out += [f"### {place}", ""] if place else []
        for title, rows in comparison.tables.items():
            measured = [row for row in rows if row.id in one["rows"]]
            if measured:
                out += results(title, measured, one["rows"])
        costs = []
        for row in comparison.rows():
            cells = {} if row.samples_of else one["rows"].get(row.id, {}).get("cells", {})
            for name in filter(cells.get, row.sides):
                try:
                    texts = [text.format(**cells[name]) for _, text in comparison.costs]
                except KeyError:
                    continue
                costs.append([row.title, name, *texts, f"{cells[name]['spread']:.0%}"])
        if costs:
            out += table(["row", "side", *(title for title, _ in comparison.costs), "spread"],
                         costs)
        if one["peak_bytes"]:
            out += table(["side", "peak memory (sum of VmHWM), MiB"],
                         [[side, f"{peak / (1 << 20):.1f}"]
                          for side, peak in one["peak_bytes"].items()])
        out += one.get("notes", [])
    return "\n".join(out)


def version_of(argv):
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "missing"
    return ((done.stdout or done.stderr).strip() or "unknown").splitlines()[0]


def machine(args, tools):
    """Returns the description of this machine and run."""
    with open("/proc/cpuinfo") as info:
        models = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    versions = {tool: version_of([tool, "-V" if tool == "nbd-server" else "--version"])
                for tool in tools}
    return {"cpu": models[0] if models else "unknown CPU", "cores": os.cpu_count(),
            "kernel": platform.release(), "load_before": os.getloadavg()[0], "versions": versions,
            "options": {key: value for key, value in vars(args).items()
                        if isinstance(value, int) and not isinstance(value, bool)}}


def machine_text(info):
    options = ", ".join(f"{key} {value}" for key, value in info["options"].items())
    versions = "".join(f", {tool}: {version}" for tool, version in info["versions"].items())
    return (f"{info['cores']} x {info['cpu']}, Linux {info['kernel']}{versions}; {options}; load "
            f"{info['load_before']:.1f} before, {info['load_after']:.1f} after.\n")
