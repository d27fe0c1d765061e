#!/usr/bin/env bash
# lab: /dev/nbdX in normal use: attributes, file systems, partitions, refusals
# topology: one
# paths: 1
# limit: 240
# groups: device

PORTAL=tcp://127.0.0.1:1234

attach() { # argument...
    timeout 60 rtrs-client attach "$@" --path "$PORTAL"
}

shown() { # attribute
    cat "/sys/block/nbd0/$1"
}

what_it_shows() {
    local pid status
    assert_eq "attach names the device" "$(attach a --device /dev/nbd0)" "a attached: /dev/nbd0"
    pid=$(shown pid)
    expect_eq "the device has the size of the export" "$(shown size)" $((512 * 2048))
    expect_eq "the device node exists" "$(stat -c %t:%T /dev/nbd0)" 2b:0
    expect_eq "the logical block size" "$(shown queue/logical_block_size)" 512
    expect_eq "a flush is sent" "$(shown queue/write_cache)" "write back"
    expect_eq "FUA is sent" "$(shown queue/fua)" 1
    expect_eq "the device is writable" "$(shown ro)" 0
    expect_num "the device accepts discards" "$(shown queue/discard_max_bytes)" -gt 0
    expect_eq "a queue per shard" "$(find /sys/block/nbd0/mq -mindepth 1 -maxdepth 1 | wc -l)" \
        "$(rtrs-client -o json status a | jq .shards)"
    expect_match "the device names its backend" "$(shown backend)" '^rtrs:[^/]+/a$'
    expect_eq "nbd-client -c agrees" "$(nbd-client -c /dev/nbd0)" "$pid"
    status=$(rtrs-client -o json list | jq -c '.[0] | [.name, .device, .uri, .pid]')
    expect_eq "list agrees" "$status" "[\"a\",\"/dev/nbd0\",null,$pid]"
    expect_match "list shows the device" "$(rtrs-client list)" 'a +open .* '"$pid"' +/dev/nbd0'
    expect_eq "the OOM killer leaves the process alone" "$(cat "/proc/$pid/oom_score_adj")" -1000
    expect_num "the memory is locked" "$(awk '/^VmLck/ { print $2 }' "/proc/$pid/status")" -gt 9999
    expect_num "unused memory is not populated" \
        "$(awk '/^VmRSS/ { print $2 }' "/proc/$pid/status")" -lt 120000
    expect_eq "no warning is logged" "$(grep -c WARN /run/rtrs/a.log)" 0
    # Reads and writes of all sizes, many in flight.
    assert_true "fio reads back what it wrote" fio_run verify 100 --filename=/dev/nbd0 \
        --direct=1 --rw=randrw --bsrange=512-1M --iodepth=64 --ioengine=libaio --size=256M \
        --io_size=48M --verify=crc32c --numjobs=1
    expect_num "no request failed" \
        "$(rtrs-client -o json stats a | jq '[.ops[].errors] | add')" -eq 0
    expect_true "discards work" blkdiscard -o 1M -l 64M /dev/nbd0
    expect_true "discarded blocks read as zeroes" \
        cmp -n $((32 << 20)) --ignore-initial=$((2 << 20)):0 /dev/nbd0 /dev/zero
}

file_system() { # kind mkfs_argument...
    local kind=$1 dir=$LAB_WORK/mnt sum
    shift
    mkdir -p "$dir"
    assert_true "mkfs.$kind" "mkfs.$kind" -q "$@" /dev/nbd0
    assert_true "mount $kind" mount "/dev/nbd0" "$dir"
    assert_true "copying onto it" cp -r /usr/share/perl5 /usr/share/bash-completion "$dir"
    sum=$(cd "$dir" && find . -type f -print0 | sort -z | xargs -0 sha1sum | sha1sum)
    refused=$(timeout 30 rtrs-client detach a 2>&1)
    expect_eq "a mounted device is not detached" "$?" 1
    expect_match "the refusal gives the reason" "$refused" \
        "is /dev/nbd0, which is mounted on $dir; end"
    assert_true "umount $kind" umount "$dir"
    case $kind in
        ext4) expect_true "fsck finds nothing" fsck.ext4 -fn /dev/nbd0 ;;
        xfs) expect_true "xfs_repair finds nothing" xfs_repair -n /dev/nbd0 ;;
    esac
    assert_true "detach" timeout 30 rtrs-client detach a
    expect_false "the device is free" test -e /sys/block/nbd0/pid
    assert_true "attach again" attach a --device /dev/nbd0
    assert_true "mount again" mount /dev/nbd0 "$dir"
    expect_eq "the files are unchanged" \
        "$(cd "$dir" && find . -type f -print0 | sort -z | xargs -0 sha1sum | sha1sum)" "$sum"
    assert_true "umount again" umount "$dir"
}

partitions() {
    local holder
    assert_true "a partition table" parted -s /dev/nbd0 mklabel gpt mkpart one 1MiB 65MiB \
        mkpart two 65MiB 100%
    assert_true "detach" timeout 30 rtrs-client detach a
    assert_within 10 "the partitions are gone" eval "! test -e /sys/block/nbd0/nbd0p1"
    assert_true "attach again" attach a --device /dev/nbd0
    # The partitions must be there immediately.
    expect_eq "lsblk shows the partitions" "$(lsblk -nro NAME,SIZE,TYPE /dev/nbd0 | xargs)" \
        "nbd0 512M disk nbd0p1 64M part nbd0p2 446M part"
    expect_true "a partition can be used" mkfs.ext4 -q /dev/nbd0p1
    sleep 60 </dev/nbd0p2 &
    holder=$!
    expect_match "an open device is not detached" "$(timeout 30 rtrs-client detach a 2>&1)" \
        "which is open in process $holder \(sleep\)"
    kill $holder
}

refusals() {
    local first name ro='ro attached: /dev/nbd1 (read-only)'
    expect_match "a device in use is refused" "$(attach ro --device /dev/nbd0 2>&1)" \
        '/dev/nbd0 is in use: connected to "rtrs:.*/a" by process [0-9]+ \(rtrs-client\)'
    assert_eq "auto takes the next device" "$(attach ro --device auto)" "$ro"
    expect_eq "a read-only export is a read-only device" "$(cat /sys/block/nbd1/ro)" 1
    expect_false "the device cannot be written" dd if=/dev/zero of=/dev/nbd1 bs=4k count=1 \
        oflag=direct
    expect_true "the device can be read" dd if=/dev/nbd1 of=/dev/null bs=4k count=1 iflag=direct
    assert_eq "auto takes the next device" "$(attach b4k --device auto)" "b4k attached: /dev/nbd2"
    expect_eq "blocks of 4096" "$(cat /sys/block/nbd2/queue/logical_block_size)" 4096
    expect_eq "three sessions" "$(rtrs-client -o json list | jq length)" 3
    first=$(attach mem --device nbd9)
    expect_eq "a missing device is created" "$first" "mem attached: /dev/nbd9"
    assert_true "detach" timeout 30 rtrs-client detach ro
    assert_eq "auto takes the freed device" "$(attach ro --device auto)" "$ro"
    for name in a ro b4k mem; do
        assert_true "detach $name" timeout 30 rtrs-client detach $name
    done
    expect_eq "no session is left" "$(rtrs-client -o json list | jq length)" 0
    expect_match "an impossible device number" "$(attach a --device nbd999999 2>&1)" 'nbds_max'
    expect_match "an invalid device name" "$(attach a --device /dev/sda 2>&1)" \
        'is not an NBD device; use auto or a whole device such as /dev/nbd0'
    expect_match "no privilege" \
        "$(setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin -- rtrs-client attach a \
            --device auto --path $PORTAL 2>&1)" 'run as root or with CAP_SYS_ADMIN'
    assert_true "the module unloads" timeout 60 rmmod nbd
    expect_match "no module" "$(attach a --device auto 2>&1)" 'load it with "modprobe nbd"'
}

scenario() {
    cd "$LAB_WORK" || exit 1
    modprobe nbd nbds_max=4
    truncate -s 512M a.img
    truncate -s 64M ro.img b4k.img
    rtrs-server --export a=a.img --export ro=ro.img,ro --listen "$PORTAL" \
        --export b4k=b4k.img,block-size=4096 --export mem=mem:64M >server.out 2>server.log &
    assert_within 10 "the server listens" grep -q listening server.out
    what_it_shows
    file_system ext4 -F
    file_system xfs -f
    partitions
    refusals
    kill %1
}
