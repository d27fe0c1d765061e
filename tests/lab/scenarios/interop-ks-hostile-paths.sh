#!/usr/bin/env bash
# lab: a hostile kernel-like client over RDMA: handshakes, keys, paths that come and go
# topology: one
# paths: 1
# limit: 200
# groups: interop issue ours
# test-binaries: rtrs-tests/protocol

# shellcheck source=tests/lab/interop.sh
. tests/lab/interop.sh

scenario() {
    ks_hostile handshake:: keys:: start::paths_come start::connections_beyond
    cell kernel-client "hostile peer over RDMA: handshakes, keys, paths that come and go"
}
