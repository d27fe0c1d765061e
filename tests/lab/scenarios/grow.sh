#!/usr/bin/env bash
# lab: a mounted ext4 on /dev/nbd0 grows with its file on the server, under load; lsblk, resize2fs
# topology: one
# paths: 2
# limit: 200
# groups: device issue ours

MNT=$LAB_WORK/mnt
SESSION=(vol --path tcp://10.0.0.1@10.0.0.2 --path tcp://10.0.1.1@10.0.1.2 --device /dev/nbd0
    --takeover)

device_size() {
    lsblk -bdno SIZE /dev/nbd0
}

has_size() { # bytes
    [ "$(device_size)" = "$1" ]
}

nothing_in_flight() {
    local reads writes
    read -r reads writes </sys/block/nbd0/inflight
    [ $((reads + writes)) = 0 ]
}

# Writes and reads back a file until the stop file exists.
write_and_read() {
    local round=0
    while [ -e "$LAB_WORK/go" ]; do
        round=$((round + 1))
        dd if=/dev/urandom of="$MNT/load" bs=64k count=64 conv=fsync status=none &&
            sha256sum "$MNT/load" >"$LAB_WORK/load.sum" &&
            echo 1 >/proc/sys/vm/drop_caches &&
            sha256sum --check --quiet "$LAB_WORK/load.sum" || return 1
        echo "$round" >"$LAB_WORK/rounds"
    done
}

load_continues() {
    local from
    from=$(cat "$LAB_WORK/rounds")
    wait_until 30 "the load continues" eval '[ "$(cat "$LAB_WORK/rounds")" -gt '"$((from + 1))"' ]'
}

scenario() {
    local pid before
    modprobe nbd nbds_max=2 max_part=8
    mkdir -p "$MNT"
    truncate -s 256M "$LAB_WORK/vol.img"
    start_server --export "vol=$LAB_WORK/vol.img" --export beside=mem:64M \
        --listen tcp://10.0.0.2:1234 --listen tcp://10.0.1.2:1234
    assert_true "the volume attaches" attach "${SESSION[@]}"
    # The file system must not write in the background: whatever is in flight when the process is
    # killed waits for device-timeout.
    assert_true "mkfs.ext4" mkfs.ext4 -qF -E lazy_itable_init=0,lazy_journal_init=0 /dev/nbd0
    assert_true "the file system mounts" mount -o noinit_itable /dev/nbd0 "$MNT"
    assert_true "files are copied" cp -r /usr/share/perl5 "$MNT"
    (cd "$MNT" && find perl5 -type f -print0 | sort -z | xargs -0 sha256sum) >"$LAB_WORK/sums"
    touch "$LAB_WORK/go"
    echo 0 >"$LAB_WORK/rounds"
    write_and_read &
    pid=$!
    assert_true "the load runs" load_continues

    # The client notices the new size without a command.
    before=$(stat -fc %b "$MNT")
    truncate -s 512M "$LAB_WORK/vol.img"
    assert_within 10 "lsblk shows the new size" has_size $((512 << 20))
    # The kernel function that logs the size also sends the event for udev.
    assert_true "the kernel logs the new size" eval \
        "dmesg | grep -q 'nbd0: detected capacity change'"
    expect_eq "status shows the new size" "$(client_json status vol .size)" $((512 << 20))
    expect_eq "nothing was reconnected" \
        "$(client_json status vol '[.paths[].reconnects] | add')" 0
    assert_true "resize2fs, mounted" timeout 60 resize2fs /dev/nbd0
    expect_num "the file system is larger" "$(stat -fc %b "$MNT")" -gt $((before * 3 / 2))
    assert_true "the load continues" load_continues

    # A command makes the new size known immediately.
    assert_true "export resize" rtrs-server export resize vol --size 768M
    assert_within 2 "lsblk shows the new size at once" has_size $((768 << 20))
    assert_true "resize2fs again" timeout 60 resize2fs /dev/nbd0
    assert_true "a file fills the new space" dd if=/dev/zero of="$MNT/big" bs=1M count=500 \
        conv=fsync status=none
    expect_match "a smaller size is refused" "$(rtrs-server export resize vol --size 64M 2>&1)" \
        'data beyond 67108864 bytes would be lost; it is open'
    expect_true "the size is unchanged" has_size $((768 << 20))
    assert_true "the load continues" load_continues

    rm "$LAB_WORK/go"
    assert_true "the load got no error" wait $pid

    # The process that takes over the device detects a new size.
    assert_true "all data is written" timeout 60 sync -f "$MNT"
    assert_within 10 "nothing is in flight" nothing_in_flight
    kill -KILL "$(client_pid vol)"
    truncate -s 1G "$LAB_WORK/vol.img"
    assert_true "the device is taken over" attach "${SESSION[@]}"
    assert_within 10 "lsblk shows the new size after the takeover" has_size $((1 << 30))
    assert_true "resize2fs once more" timeout 60 resize2fs /dev/nbd0
    assert_true "the files are unchanged" env -C "$MNT" sha256sum --check --strict --quiet \
        "$LAB_WORK/sums"
    assert_true "the file system unmounts" timeout 60 umount "$MNT"
    assert_true "e2fsck finds it clean" timeout 60 e2fsck -fn /dev/nbd0
    expect_eq "no IO failed" "$(client_json stats vol '[.ops[].errors] | add')" 0
    assert_true "the volume detaches" detach vol
    assert_true "the server exits cleanly" stop_server
}
