#!/usr/bin/env python3
"""Cuts the data of reads out of a capture of RoCE v2: what a server writes to a client keeps its
headers and 64 bytes, enough for the answers to control messages. Used by interop-capture.

    cut_pcap.py FROM TO
"""
import struct
import sys

UDP = 14 + 20
BTH = UDP + 8
KEPT = BTH + 12 + 16 + 64

with open(sys.argv[1], "rb") as file:
    data = file.read()
out, at, client = [data[:24]], 24, None
while at + 16 <= len(data):
    seconds, micros, kept, whole = struct.unpack_from("<IIII", data, at)
    frame = data[at + 16 : at + 16 + kept]
    at += 16 + kept
    source = frame[26:30]
    client = client or source
    # RDMA writes without immediate: first, middle, last, only.
    if source != client and len(frame) > BTH and frame[BTH] in (0x06, 0x07, 0x08, 0x0A):
        frame = frame[:KEPT]
    out.append(struct.pack("<IIII", seconds, micros, len(frame), whole) + frame)
with open(sys.argv[2], "wb") as file:
    file.write(b"".join(out))
