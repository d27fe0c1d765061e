#!/usr/bin/env bash
# lab: the kernel's client on our server: attributes of four disks in a session, ext4, sessions
# topology: one
# paths: 2
# limit: 150
# groups: interop issue ours

# shellcheck source=tests/lab/interop.sh
. tests/lab/interop.sh

# Compares the attributes of the client's device with those of the disk. discard is "yes" if
# discards are supported.
compare() { # name device size logical physical write_cache fua discard
    local name=$1 dev=$2 size=$3 logical=$4
    expect_eq "$name: size" "$(blockdev --getsize64 "/dev/$dev")" "$size"
    expect_eq "$name: logical block" "$(sysfs_queue "$dev" logical_block_size)" "$logical"
    expect_eq "$name: physical block" "$(sysfs_queue "$dev" physical_block_size)" "$5"
    expect_eq "$name: write cache" "$(sysfs_queue "$dev" write_cache)" "$6"
    expect_eq "$name: FUA" "$(sysfs_queue "$dev" fua)" "$7"
    # A chunk of 256 KiB, less the 4096 bytes of the header.
    expect_eq "$name: largest request" "$(sysfs_queue "$dev" max_hw_sectors_kb)" 252
    if [ "$8" = yes ]; then
        expect_num "$name: discards" "$(sysfs_queue "$dev" discard_max_bytes)" -gt 0
        expect_num "$name: discard granularity" "$(sysfs_queue "$dev" discard_granularity)" \
            -ge "$logical"
    else
        expect_eq "$name: no discards" "$(sysfs_queue "$dev" discard_max_bytes)" 0
    fi
}

ext4_on() { # device
    local dir=$LAB_WORK/mnt
    mkdir -p "$dir"
    assert_true "mkfs.ext4" mkfs.ext4 -q -F "$1"
    assert_true "mount" mount "$1" "$dir"
    cp -r tests/lab "$dir/" && head -c 4M /dev/urandom >"$dir/noise"
    sha256sum "$dir/noise" "$dir"/lab/*.sh >"$LAB_WORK/sums"
    assert_true "fsync" sync -f "$dir/noise"
    assert_true "fstrim" fstrim "$dir"
    assert_true "umount" umount "$dir"
    assert_true "e2fsck finds nothing" e2fsck -fn "$1"
    assert_true "mount again" mount "$1" "$dir"
    assert_true "every file is unchanged" sha256sum -c --quiet "$LAB_WORK/sums"
    assert_true "umount again" umount "$dir"
}

scenario() {
    local brd scsi dev devs=() name
    brd=$(brd_disk 16) || exit 1
    truncate -s 32M "$LAB_WORK/file.img"
    truncate -s 24M "$LAB_WORK/file4k.img"
    modprobe scsi_debug sector_size=4096 dev_size_mb=16 lbpu=1 lbpws=1 delay=0
    wait_until 20 "the scsi_debug disk" eval 'ls /sys/bus/pseudo/drivers/scsi_debug/*/*/*/*/block'
    scsi=$(basename /sys/bus/pseudo/drivers/scsi_debug/*/*/*/*/block/*)
    wait_until 20 "/dev/$scsi" test -b "/dev/$scsi"
    start_server --export "brd=$brd" --export "scsi=/dev/$scsi" \
        --export "file=$LAB_WORK/file.img" --export "4k=$LAB_WORK/file4k.img,block-size=4096" \
        --listen rdma://10.0.0.2 --listen rdma://10.0.1.2
    for name in brd scsi file 4k; do
        assert_true "$name: the client maps" ks_map disks "$name" \
            "$([ ${#devs[@]} -gt 0 ] || echo 2)"
        devs+=("$KS_DEV")
    done
    # A disk without a cache is durable without FUA.
    compare brd "${devs[0]}" $((16 << 20)) 512 "$(sysfs_queue "$brd" physical_block_size)" \
        "$(sysfs_queue "$brd" write_cache)" 1 no
    compare scsi "${devs[1]}" $((16 << 20)) 4096 "$(sysfs_queue "$scsi" physical_block_size)" \
        "$(sysfs_queue "$scsi" write_cache)" 1 yes
    compare file "${devs[2]}" $((32 << 20)) 512 4096 "write back" 1 yes
    compare 4k "${devs[3]}" $((24 << 20)) 4096 4096 "write back" 1 yes
    cell kernel-client "size, block sizes, write cache, FUA, discard limits in /sys/block"
    for dev in "${devs[@]}"; do
        fio_run "$dev" 60 --filename="/dev/$dev" --direct=1 --rw=randrw --bsrange=4k-64k \
            --iodepth=4 --ioengine=libaio --size=8M --verify=crc32c --verify_fatal=1 &
        pids+=($!)
    done
    for dev in "${devs[@]}"; do
        wait "${pids[0]}"
        expect_eq "$dev reads back what it wrote, all four concurrently" $? 0
        pids=("${pids[@]:1}")
    done
    cell kernel-client "four devices in a session, IO on all at once"
    ext4_on "/dev/${devs[2]}"
    cell kernel-client "ext4: files, fsync, fstrim, clean fsck"
    for dev in "${devs[@]:0:3}"; do assert_true "$dev unmaps" kernel_unmap "$dev"; done
    # The session continues for the fourth device; other sessions start as well.
    for name in brd file; do
        assert_true "$name: a session of its own" ks_map "own-$name" "$name" 2
        assert_true "$name: fio reads back what it wrote" ks_verify "own-$name" 60 "$KS_DEV" \
            --size=8M
        devs+=("$KS_DEV")
    done
    assert_true "4k: fio still reads back what it wrote" fio_run 4k 60 \
        --filename="/dev/${devs[3]}" --direct=1 --rw=randwrite --bs=4k --ioengine=libaio \
        --iodepth=4 --size=2M --verify=crc32c
    for dev in "${devs[@]:3}"; do assert_true "$dev unmaps" kernel_unmap "$dev"; done
    cell kernel-client "map, unmap, map again; three sessions at once"
    assert_true "the server exits cleanly" stop_server
    expect_eq "no request failed" "$(ks_reported errors)" 0
    expect_quiet_server
}
