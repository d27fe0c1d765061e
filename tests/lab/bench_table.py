"""Makes the table of the lab's scenario `bench`, ratios only, and a JSON file with every figure.

Reads lines `pass row peer iops` and `peer why-it-was-skipped`, both with tabs between. A ratio is
taken within one pass, where both sides ran within a minute of each other; the table shows the
median of the passes and the lowest and the highest. What was skipped is said below the table.

Usage: bench_table.py RESULTS SKIPPED JSON
"""

import json
import statistics
import sys

# Ours, the peer, the column's title, and what is asked for: the ratio on every row with a depth.
COLUMNS = [
    ("ours-rdma", "rnbd", "rdma/rnbd", 0.85),
    ("ours-rdma", "nvme-rdma", "rdma/nvme-rdma", None),
    ("ours-tcp", "nvme-tcp", "tcp/nvme-tcp", None),
    ("ours-tcp", "nbd-server", "tcp/nbd-server", 1.2),
    ("ours-tcp", "nbdkit", "tcp/nbdkit", 0.8),
    ("ours-plain", "nbdkit", "no CRC/nbdkit", 0.8),
    ("ours-rdma", "ours-off", "inval. on/off", 0.9),
]
# At QD1, by the column's title.
ASKED_QD1 = {"rdma/rnbd": 0.25}
ROWS = {
    "r4q1": "4k randread QD1",
    "r4q32": "4k randread QD32",
    "w4q32": "4k randwrite QD32",
    "r64s": "64k read QD16",
    "w64s": "64k write QD16",
}
WIDTH = 18


def read(path):
    with open(path, encoding="utf-8") as file:
        return [line.rstrip("\n").split("\t") for line in file if line.strip()]


def cell(rates, row, ours, peer):
    """The ratios of a row over the passes that have both sides: median, lowest, highest."""
    ratios = []
    for pass_number in sorted({key[0] for key in rates}):
        above = rates.get((pass_number, row, ours))
        below = rates.get((pass_number, row, peer))
        if above is not None and below:
            ratios.append(above / below)
    if not ratios:
        return None
    return {
        "median": round(statistics.median(ratios), 3),
        "lowest": round(min(ratios), 3),
        "highest": round(max(ratios), 3),
        "passes": len(ratios),
    }


def main():
    results, skipped, out = sys.argv[1:]
    rates = {(int(p), row, peer): float(iops) for p, row, peer, iops in read(results)}
    why = dict(read(skipped))
    rows = [row for row in ROWS if any(key[1] == row for key in rates)]
    if not rows:
        sys.exit("no measurement came to its end")
    table, short = [], []
    for row in rows:
        for ours, peer, title, asked in COLUMNS:
            if row == "r4q1":
                asked = ASKED_QD1.get(title)
            found = cell(rates, row, ours, peer)
            if found is None:
                continue
            table.append({"row": ROWS[row], "ours": ours, "peer": peer, "asked": asked, **found})
            if asked is not None and found["median"] < asked:
                short.append(f"{title}, {ROWS[row]}: {found['median']:.2f} of {asked:.2f}")
    passes = max(key[0] for key in rates)
    print("Ratios of IO rates; above 1 ours is faster.", end=" ")
    print(f"Median of {passes} passes (lowest-highest).")
    print(" " * WIDTH + "".join(title.rjust(WIDTH) for _, _, title, _ in COLUMNS))
    for row in rows:
        line = ROWS[row].ljust(WIDTH)
        for ours, peer, _, _ in COLUMNS:
            found = cell(rates, row, ours, peer)
            text = "skipped" if ours in why or peer in why else "-"
            if found:
                text = f"{found['median']:.2f} ({found['lowest']:.2f}-{found['highest']:.2f})"
                text += "" if found["passes"] == passes else "*"
            line += text.rjust(WIDTH)
        print(line)
    asked = ["-" if asked is None else f">= {asked:.2f}" for *_, asked in COLUMNS]
    print("asked for".ljust(WIDTH) + "".join(text.rjust(WIDTH) for text in asked))
    for peer, reason in why.items():
        print(f"skipped: {peer}: {reason}")
    if any(entry["passes"] != passes for entry in table):
        print("*: of fewer passes")
    for text in short:
        print(f"short of what is asked for: {text}")
    figures = [
        {"pass": key[0], "row": ROWS[key[1]], "peer": key[2], "iops": round(value, 1)}
        for key, value in rates.items()
    ]
    with open(out, "w", encoding="utf-8") as file:
        json.dump({"ratios": table, "skipped": why, "figures": figures}, file, indent=1)


main()
