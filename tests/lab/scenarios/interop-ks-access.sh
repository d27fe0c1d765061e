#!/usr/bin/env bash
# lab: the kernel's client on our server: access rights, names, 45 idle seconds
# topology: one
# paths: 1
# limit: 150
# groups: interop issue ours

# shellcheck source=tests/lab/interop.sh
. tests/lab/interop.sh

# Prints the result of an open in a separate session.
try() { # session export mode
    ks_answer "sessname=$1" "$(ks_paths 1)" "device_path=$2" "access_mode=$3"
}

scenario() {
    local devices=/sys/devices/virtual/rnbd-client/ctl/devices
    local idle_since idle seconds=45 long reader writer name
    [ -z "$LAB_LONG" ] || seconds=600
    truncate -s 8M "$LAB_WORK/vol.img" "$LAB_WORK/ro.img" "$LAB_WORK/deep.img"
    long=$(printf 'x%.0s' {1..240})
    start_server --export "vol=$LAB_WORK/vol.img" --export "ro=$LAB_WORK/ro.img,ro" \
        --export "deep/er/vol=$LAB_WORK/deep.img" --export "$long=mem:8M" --export idle=mem:8M \
        --export "listed=mem:8M,access=kernel@10.0.0.0/16:ro" \
        --export "others=mem:8M,access=kernel@192.0.2.0/24:rw" \
        --access anyone:rw --listen rdma://10.0.0.2
    assert_true "a session for idling maps" ks_map idle idle 1
    idle=$KS_DEV idle_since=$SECONDS

    assert_true "a writer maps" ks_map writer vol 1 access_mode=rw
    writer=$KS_DEV
    expect_eq "a second writer" "$(try two vol rw)" EPERM
    assert_true "a reader maps alongside it" ks_map reader vol 1 access_mode=ro
    reader=$KS_DEV
    expect_eq "the reader's device is read-only" "$(cat "/sys/block/$reader/ro")" 1
    assert_true "the writer writes" dd if=/dev/urandom of="/dev/$writer" bs=4k count=4 oflag=direct
    expect_true "the reader reads it" cmp -n 16384 "/dev/$writer" "/dev/$reader"
    blockdev --setrw "/dev/$reader"
    expect_false "our server refuses a reader's write" dd if=/dev/zero of="/dev/$reader" bs=4k \
        count=1 oflag=direct
    expect_false "our server refuses a reader's discard" blkdiscard -f -o 0 -l 4096 "/dev/$reader"
    expect_false "nothing was written" cmp -n 4096 "/dev/$writer" /dev/zero
    expect_eq "a migration alongside the writer" "$(try moving vol migration)" mapped
    expect_eq "a second migration" "$(try three vol migration)" EPERM
    for name in moving reader writer; do
        expect_true "the $name unmaps" kernel_unmap "$(basename "$(readlink "$devices/vol@$name")")"
    done
    expect_eq "a writer after both have unmapped" "$(try two vol rw)" mapped
    expect_eq "a writer of a read-only export" "$(try readonly ro rw)" EACCES
    expect_eq "a reader of a read-only export" "$(try readonly ro ro)" mapped
    cell kernel-client "access ro, rw, migration: granted and refused as the kernel does; ro kept"

    expect_eq "a list that allows kernels to read: rw" "$(try listed listed rw)" EACCES
    expect_eq "a list that allows kernels to read: ro" "$(try listed listed ro)" mapped
    expect_eq "a list of other addresses" "$(try others others ro)" EACCES
    expect_true "the log gives the reason" ks_log_says "without a name may not open 'others' ro"
    assert_true "the list changes" rtrs-server export set others access=kernel@10.0.0.0/16:rw
    expect_eq "the client is now admitted" "$(try others others rw)" mapped
    for name in listed others; do
        expect_true "$name unmaps" kernel_unmap "$(basename "$(readlink "$devices/$name@$name")")"
    done
    cell kernel-client "access lists: kernel@NETWORK grants ro and rw, and refuses others (EACCES)"

    expect_eq "an unknown name" "$(try none nobody rw)" ENOENT
    expect_eq "a name with slashes" "$(try deep deep/er/vol rw)" mapped
    expect_eq "the device name shows the slashes" "$(ls "$devices" | grep deep)" \
        'deep!er!vol@deep'
    expect_eq "a name with leading slashes" "$(try slashes //ro ro)" mapped
    expect_eq "a name of 240 bytes" "$(try long "$long" rw)" mapped
    expect_eq "a name with .." "$(try dots ../vol rw)" EINVAL
    for name in /sys/block/rnbd*; do
        name=${name##*/}
        [ "$name" = "$idle" ] || assert_true "$name unmaps" kernel_unmap "$name"
    done
    cell kernel-client "names: with slashes, long, unknown (ENOENT), with .. (EINVAL)"

    while [ $((SECONDS - idle_since)) -lt $seconds ]; do sleep 1; done
    expect_eq "after $seconds idle seconds the path is up" "$(ks_states idle)" "1 connected"
    expect_eq "the path stayed connected" "$(cat "$KS_CLIENT"/idle/paths/*/stats/reconnects)" "0 0"
    expect_num "heartbeats went both ways" \
        "$(cat "$KS_CLIENT"/idle/paths/*/cur_latency | tr -dc 0-9)" -gt 0
    expect_false "our server saw no silence" ks_log_says 'does not answer heartbeats'
    assert_true "IO still works" dd if=/dev/urandom of="/dev/$idle" bs=4k count=4 oflag=direct
    assert_true "the client unmaps" kernel_unmap "$idle"
    cell kernel-client "heartbeats of both ends, $seconds idle seconds"
    assert_true "the server exits cleanly" stop_server
    expect_quiet_server
}
