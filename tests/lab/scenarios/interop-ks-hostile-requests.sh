#!/usr/bin/env bash
# lab: a hostile kernel-like client over RDMA: malformed requests, invalid proofs
# topology: one
# paths: 1
# limit: 150
# groups: interop issue ours
# test-binaries: rtrs-tests/protocol

# shellcheck source=tests/lab/interop.sh
. tests/lab/interop.sh

scenario() {
    ks_hostile request:: proofs::
    cell kernel-client "hostile peer over RDMA: malformed requests, invalid proofs"
}
