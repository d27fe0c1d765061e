#!/usr/bin/env bash
# lab: our client against a kernel server, always_invalidate=Y, 1 and 2 paths, three devices at once
# topology: one
# paths: 2
# limit: 150
# groups: interop issue ours

. tests/lab/interop_sk_matrix.sh

scenario() {
    sk_matrix Y
}
