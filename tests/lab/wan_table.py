"""Makes the table of the lab's scenario `wan`, and a JSON file with every figure.

Reads lines `pass rtt loss row peer iops p99` and `rtt failover`, with tabs between; p99 in
microseconds, the median time without IO in milliseconds. A ratio is taken within one pass; the
table shows the median of the passes, and the lowest and the highest.

Usage: wan_table.py RESULTS FAILOVERS JSON
"""

import json
import statistics
import sys

# Ours with CRC32C and without.
OURS, PLAIN, PEER = "ours", "plain", "nbdkit"
TITLES = {"4k": "4k randread QD32", "128k": "128k read QD16"}


def read(path):
    with open(path, encoding="utf-8") as file:
        return [line.rstrip("\n").split("\t") for line in file if line.strip()]


def ratios(figures, link, row, ours, column):
    """Ours over the peer's in each pass that has both: (median, lowest, highest), or None."""
    found = []
    for number in sorted({key[0] for key in figures}):
        above = figures.get((number, *link, row, ours))
        peer = figures.get((number, *link, row, PEER))
        if above and peer and peer[column]:
            found.append(above[column] / peer[column])
    return (statistics.median(found), min(found), max(found)) if found else None


def main():
    results, failovers, out = sys.argv[1:]
    figures = {(int(p), rtt, loss, row, peer): (float(iops), float(p99))
               for p, rtt, loss, row, peer, iops, p99 in read(results)}
    if not figures:
        sys.exit("no measurement came to its end")
    links = list(dict.fromkeys(key[1:3] for key in figures))
    print("Ours over nbdkit with nbd-client, medians (lowest-highest) of the passes.")
    print("| round trip, loss | job | IOPS | p99 | IOPS without CRC | p99 | IOPS asked | met |")
    print("|---|---|---|---|---|---|---|---|")
    table = []
    for link in links:
        asked = 1.5 if float(link[0].removesuffix("ms")) >= 20 else 0.9
        for row, title in TITLES.items():
            found = [ratios(figures, link, row, ours, column)
                     for ours in (OURS, PLAIN) for column in (0, 1)]
            if found[0] is None:
                continue
            cells = " | ".join("-" if r is None else f"{r[0]:.2f} ({r[1]:.2f}-{r[2]:.2f})"
                               for r in found)
            met = "yes" if found[0][0] >= asked else "NO"
            print(f"| {link[0]}, {link[1]} | {title} | {cells} | >= {asked} | {met} |")
            table.append({"rtt": link[0], "loss": link[1], "row": title, "asked": asked,
                          "iops": found[0], "p99": found[1],
                          "iops_plain": found[2], "p99_plain": found[3]})
    print("| failover at a round trip of | longest IO, median of the rounds | asked | met |")
    print("|---|---|---|---|")
    for rtt, milliseconds in read(failovers):
        limit = 300 + 2 * float(rtt.removesuffix("ms"))
        met = "yes" if float(milliseconds) <= limit else "NO"
        print(f"| {rtt} | {milliseconds} ms | <= {limit:g} ms | {met} |")
    with open(out, "w", encoding="utf-8") as file:
        json.dump({"table": table, "failovers": read(failovers),
                   "figures": [[*key, *value] for key, value in figures.items()]}, file, indent=1)


main()
