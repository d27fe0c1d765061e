#!/usr/bin/env bash
# lab: a brd, a loop device and its file, a scsi_debug with 4096-byte sectors, as clients see them
# topology: one
# paths: 1
# limit: 200
# groups: issue ours

# Prints yes if the attribute is above 0.
some() { # device attribute
    if [ "$(sysfs_queue "$1" "$2")" -gt 0 ]; then echo yes; else echo no; fi
}

# Attaches an export and compares the attributes of the client's device with those of the export.
compare() { # name target size logical_block write_cache discard
    local name=$1 target=$2 size=$3 logical=$4 cache=$5 discard=$6 device direct=
    assert_true "$name: the volume attaches" attach "$name" --path rdma://10.0.0.1@10.0.0.2 \
        --device auto
    device=$(client_json status "$name" .device)
    assert_match "$name: the volume has a device" "$device" '^/dev/nbd[0-9]+$'
    expect_eq "$name: size" "$(blockdev --getsize64 "$device")" "$size"
    expect_eq "$name: logical block size" "$(sysfs_queue "$device" logical_block_size)" "$logical"
    expect_num "$name: physical block size" "$(sysfs_queue "$device" physical_block_size)" \
        -ge "$logical"
    expect_eq "$name: write cache" "$(sysfs_queue "$device" write_cache)" "$cache"
    # The kernel uses FUA only if there is a cache to bypass.
    expect_eq "$name: FUA" "$(sysfs_queue "$device" fua)" \
        "$([ "$cache" = "write back" ] && echo 1 || echo 0)"
    expect_eq "$name: discard" "$(some "$device" discard_max_bytes)" "$discard"
    if [ "$discard" = yes ]; then
        expect_num "$name: discard granularity" "$(sysfs_queue "$device" discard_granularity)" \
            -ge "$logical"
    fi
    # Reads the disk itself, past all caches: data written with O_DSYNC is there immediately. The
    # file is in memory here, which has no direct IO.
    [ -f "$target" ] || direct=iflag=direct
    assert_true "$name: a write with FUA" dd if="$LAB_WORK/noise" of="$device" bs=64k count=16 \
        seek=3 oflag=direct,dsync
    assert_true "$name: the data is on the disk" cmp -n 1M "$LAB_WORK/noise" \
        <(dd if="$target" bs=64k count=16 skip=3 $direct status=none)
    if [ "$discard" = yes ]; then
        assert_true "$name: a discard" blkdiscard -o 196608 -l 1048576 "$device"
        expect_true "$name: discarded blocks read as zeroes" cmp -n 1M /dev/zero \
            <(dd if="$device" bs=64k count=16 skip=3 iflag=direct status=none)
    fi
    expect_true "$name: the last block can be read" dd if="$device" of=/dev/null bs="$logical" \
        skip=$((size / logical - 1)) count=1 iflag=direct
    assert_true "$name: the volume detaches" detach "$name"
}

# Exports the file under a loop device, which is then detached. The device is the export `loop`.
below_loop() { # device
    local below=below=$LAB_WORK/loop.img
    expect_match "the file of a loop device is not exported" \
        "$(rtrs-server export add "$below" 2>&1)" "is in use by the loop device $1"
    assert_true "it is exported with ro" rtrs-server export add "$below,ro"
    assert_true "that export is removed" rtrs-server export remove below
    assert_true "the export of the device is removed" rtrs-server export remove loop
    losetup -d "$1"
    wait_until 20 "$1 to be detached" eval "! losetup '$1' 2>/dev/null"
    expect_true "the file is exported once the device is gone" rtrs-server export add "$below"
}

scenario() {
    local brd loop scsi file=$LAB_WORK/file.img device
    modprobe nbd nbds_max=2
    head -c 1M /dev/urandom >"$LAB_WORK/noise"
    brd=$(brd_disk 32) || exit 1
    modprobe loop
    truncate -s 48M "$LAB_WORK/loop.img"
    truncate -s 40M "$file"
    loop=$(losetup --find --show "$LAB_WORK/loop.img") || exit 1
    modprobe scsi_debug sector_size=4096 dev_size_mb=64 lbpu=1 lbpws=1 delay=0
    wait_until 20 "the scsi_debug disk" eval 'ls /sys/bus/pseudo/drivers/scsi_debug/*/*/*/*/block'
    scsi=/dev/$(basename /sys/bus/pseudo/drivers/scsi_debug/*/*/*/*/block/*)
    wait_until 20 "$scsi" test -b "$scsi"
    assert_eq "the scsi_debug has sectors of 4096 bytes" "$(blockdev --getss "$scsi")" 4096
    start_server --listen rdma://10.0.0.2 --export "brd=$brd" --export "loop=$loop" \
        --export "scsi=$scsi" --export "file=$file"
    for device in brd:$brd loop:$loop scsi:$scsi; do
        compare "${device%%:*}" "${device#*:}" "$(blockdev --getsize64 "${device#*:}")" \
            "$(blockdev --getss "${device#*:}")" "$(sysfs_queue "${device#*:}" write_cache)" \
            "$(some "${device#*:}" discard_max_bytes)"
    done
    compare file "$file" $((40 << 20)) 512 "write back" yes
    below_loop "$loop"
    assert_true "the server exits cleanly" stop_server
}
