#!/usr/bin/env bash
# lab: the kernel's client on our server: every kind of IO over one and two paths, fresh keys
# topology: one
# paths: 2
# limit: 150
# groups: smoke interop issue ours

# shellcheck source=tests/lab/interop.sh
. tests/lab/interop.sh

scenario() {
    ks_matrix on
}
