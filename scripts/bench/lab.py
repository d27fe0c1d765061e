"""Makes the tables of the lab's scenarios `bench` and `wan`, with ratios only, and a JSON file with
all figures; for `rds-bench` it prints a ratio and the medians of two files. Ratios are taken within
a pass; a cell has the median with the lowest and the highest.

    lab.py bench RESULTS SKIPPED JSON    lines `pass row peer iops`; `peer why-it-was-skipped`
    lab.py wan RESULTS FAILOVERS JSON    lines `pass rtt loss row peer iops p99`; `rtt ms`
    lab.py ratio OURS OTHER              a figure of each pass, in order

Fields are separated by tabs; p99 is in microseconds, `ms` the longest time without IO.
"""

import json
import statistics
import sys

from tables import asked_cells, range_text, ratio, table

# Ours, the peer, the title, and the required ratios: for all rows with a depth, and at QD1.
COLUMNS = [
    ("ours-rdma", "rnbd", "rdma/rnbd", 0.85, 0.25),
    ("ours-rdma", "nvme-rdma", "rdma/nvme-rdma", None, None),
    ("ours-tcp", "nvme-tcp", "tcp/nvme-tcp", None, None),
    ("ours-tcp", "nbd-server", "tcp/nbd-server", 1.2, None),
    ("ours-tcp", "nbdkit", "tcp/nbdkit", 0.8, None),
    ("ours-plain", "nbdkit", "no CRC/nbdkit", 0.8, None),
    ("ours-rdma", "ours-off", "inval. on/off", 0.9, None),
]
ROWS = {"r4q1": "4k randread QD1", "r4q32": "4k randread QD32", "w4q32": "4k randwrite QD32",
        "r64s": "64k read QD16", "w64s": "64k write QD16"}
WAN_ROWS = {"4k": "4k randread QD32", "128k": "128k read QD16"}


def read(path):
    with open(path, encoding="utf-8") as file:
        return [line.rstrip("\n").split("\t") for line in file if line.strip()]


class Figures:
    """Numbers by key and pass."""

    def __init__(self, path, keys):
        self.lines = read(path)
        if not self.lines:
            sys.exit("no measurement was completed")
        self.passes = max(int(line[0]) for line in self.lines)
        self.found = {(*line[1:keys + 1], int(line[0])): [float(word) for word in line[keys + 1:]]
                      for line in self.lines}

    def ratio(self, row, ours, peer, column=0):
        """Returns the ratio of two sides over the passes that have both."""
        return ratio(*([self.found.get((*row, side, number), [None] * 2)[column]
                        for number in range(1, self.passes + 1)] for side in (ours, peer)))


def bench(results, skipped):
    figures, why = Figures(results, 2), dict(read(skipped))
    ratios, lines, short = [], [], []
    for row, row_title in ROWS.items():
        if not any(key[0] == row for key in figures.found):
            continue
        line = [row_title]
        for ours, peer, title, *both in COLUMNS:
            asked = both[row == "r4q1"]
            found = figures.ratio((row,), ours, peer)
            text = range_text(found)
            if found:
                ratios.append({"row": row_title, "ours": ours, "peer": peer, "asked": asked,
                               **found})
                text += "" if found["rounds"] == figures.passes else "*"
                if asked is not None and found["ratio"] < asked:
                    short.append(f"{title}, {row_title}: {found['ratio']:.2f} of {asked:.2f}")
            elif ours in why or peer in why:
                text = "skipped"
            line.append(text)
        lines.append(line)
    lines.append(["asked for", *("-" if asked is None else f">= {asked:.2f}"
                                 for *_, asked, _ in COLUMNS)])
    print("Ratios of IO rates; above 1 ours is faster. Median of "
          f"{figures.passes} passes (lowest-highest); *: of fewer passes.")
    print("\n".join(table(["", *(title for _, _, title, _, _ in COLUMNS)], lines)
                    + [f"skipped: {peer}: {reason}" for peer, reason in why.items()]
                    + [f"below target: {text}" for text in short]))
    return {"ratios": ratios, "skipped": why, "figures": figures.lines}


def wan(results, failovers):
    figures = Figures(results, 4)
    ratios, lines = [], []
    for rtt, loss in dict.fromkeys(key[:2] for key in figures.found):
        asked = 1.5 if float(rtt.removesuffix("ms")) >= 20 else 0.9
        for row, title in WAN_ROWS.items():
            found = {f"{name}{word}": figures.ratio((rtt, loss, row), ours, "nbdkit", column)
                     for word, ours in (("", "ours"), ("_plain", "plain"))
                     for column, name in enumerate(("iops", "p99"))}
            if found["iops"]:
                met = asked_cells(asked, found["iops"]["ratio"], False)
                lines.append([f"{rtt}, {loss}", title, *map(range_text, found.values()), *met])
                ratios.append({"rtt": rtt, "loss": loss, "row": title, "asked": asked, **found})
    print("Ours over nbdkit with nbd-client, medians (lowest-highest) of the passes.")
    print("\n".join(table(["round trip, loss", "job", "IOPS", "p99", "IOPS without CRC", "p99",
                           "IOPS asked", "met"], lines)))
    lines = [[rtt, f"{longest} ms", *asked_cells(300 + 2 * float(rtt.removesuffix("ms")),
                                                 float(longest), True, " ms")]
             for rtt, longest in read(failovers)]
    print("\n".join(table(["failover at a round trip of", "longest IO, median of the rounds",
                           "asked", "met"], lines)))
    return {"table": ratios, "failovers": read(failovers), "figures": figures.lines}


def main():
    scenario, *paths = sys.argv[1:]
    if scenario == "ratio":
        ours, other = ([float(word) for word, in read(path)] for path in paths)
        print(f"{range_text(ratio(ours, other))}, medians {statistics.median(ours):.1f} / "
              f"{statistics.median(other):.1f}")
        return
    result = {"bench": bench, "wan": wan}[scenario](*paths[:2])
    with open(paths[2], "w", encoding="utf-8") as out:
        json.dump(result, out, indent=1)


if __name__ == "__main__":
    main()
