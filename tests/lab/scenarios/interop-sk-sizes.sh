#!/usr/bin/env bash
# lab: our client against a kernel server with other queue depths and chunk sizes, 8 KiB to 1 MiB
# topology: one
# paths: 1
# limit: 150
# groups: interop issue ours

. tests/lab/interop_sk.sh

try() { # depth chunk io_most mode
    local disk=/dev/ram0 requests ios size
    assert_true "$1 x $2: the modules load" kernel_server 1234 "sess_queue_depth=$1" \
        "max_chunk_size=$2" "always_invalidate=$4"
    assert_true "$1 x $2: the volume attaches" sk_attach "$disk" 1 --device /dev/nbd0
    expect_true "$1 x $2: fio reads back what it wrote" sk_verify "s$1" /dev/nbd0 4 \
        --bsrange=512-1m --size=48M
    expect_eq "$1 x $2: errors" "$(sk_errors "$disk")" 0
    # Maximum size of a request, from the number of requests that the server counts for a write of
    # 1 MiB, which the kernel divides into equal parts.
    requests=$(sk_server_stats "$disk" 0 | cut -d' ' -f3)
    ios=$(client_json stats "$disk" .ops.write.count)
    assert_true "$1 x $2: a write of 1 MiB" dd if=/dev/zero of=/dev/nbd0 bs=1M count=1 oflag=direct
    ios=$(($(client_json stats "$disk" .ops.write.count) - ios))
    expect_num "$1 x $2: parts of it" "$ios" -gt 0
    size=$(((1 << 20) / (ios > 0 ? ios : 1)))
    expect_eq "$1 x $2: goes in requests of $3 bytes at most" \
        "$(($(sk_server_stats "$disk" 0 | cut -d' ' -f3) - requests))" \
        $((ios * ((size + $3 - 1) / $3)))
    sk_expect_quiet "$disk" "$1 x $2: our log has no warnings"
    assert_true "$1 x $2: the volume detaches" detach "$disk"
    assert_true "$1 x $2: the modules unload" kernel_server_gone
}

scenario() {
    brd_disk 64 >/dev/null || exit 1
    modprobe nbd nbds_max=2
    try 64 8192 4096 N
    cell kernel-server "chunks of 8 KiB, queue depth 64"
    try 500 65536 61440 N
    cell kernel-server "queue depth 500, not a power of two"
    try 32 1048576 1044480 N
    cell kernel-server "chunks of 1 MiB, queue depth 32"
    sk_expect_kernel_quiet
}
