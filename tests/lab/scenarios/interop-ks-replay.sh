#!/usr/bin/env bash
# lab: a write held by the disk, its path cut: our server lets the copy wait, the kernel's does not
# topology: one
# paths: 2
# limit: 150
# groups: interop issue ours

# shellcheck source=tests/lab/interop.sh
. tests/lab/interop.sh
# shellcheck source=tests/lab/topology.sh
. tests/lab/topology.sh

# A disk that holds the first write that starts with HOLD until the file `release` exists, and
# records the order in which its writes took effect.
held_disk() { # number
    local dir=$LAB_WORK/held$1
    mkdir -p "$dir" && truncate -s 1M "$dir/disk"
    # shellcheck disable=SC2016
    nbdkit -U "$dir/socket" -P "$dir/pid" eval thread_model='echo parallel' \
        get_size='stat -c %s '"$dir"'/disk' can_write='exit 0' \
        pread='dd if='"$dir"'/disk iflag=skip_bytes,count_bytes skip=$4 count=$3 status=none' \
        pwrite='dir='"$dir"'; data=$(mktemp '"$dir"'/w.XXXXXX); cat >$data
            word=$(head -c 4 $data)
            if [ "$word" = HOLD ] && mkdir $dir/holding 2>/dev/null; then
                word=original
                while [ ! -e $dir/release ]; do sleep 0.1; done
            fi
            dd if=$data of='"$dir"'/disk oflag=seek_bytes seek=$4 conv=notrunc status=none
            echo "$word" >>$dir/order; rm $data' || return 1
    wait_until 20 "$dir/socket" test -S "$dir/socket"
    nbd-client -unix "$dir/socket" "/dev/nbd$1" -b 512 >/dev/null || return 1
    # nbd-client holds a lock on its device.
    DM_DISABLE_UDEV=1 dmsetup create "lab-held$1" --table "0 2048 linear /dev/nbd$1 0" 2>&1 &&
        wait_until 10 "/dev/dm-$1" test -b "/dev/dm-$1"
}

word_of() { # device
    dd if="/dev/$1" bs=4096 count=1 iflag=direct status=none | head -c 4
}

put() { # device word
    printf '%-4096s' "$2" | dd of="/dev/$1" bs=4096 count=1 oflag=direct iflag=fullblock status=none
}

order() { # number
    tr '\n' ' ' <"$LAB_WORK/held$1/order"
}

scenario() {
    local ours kernels put_ours put_kernels disk
    modprobe -a dm-mod nbd
    assert_true "a disk that holds a write, for our server" held_disk 0
    assert_true "another for the kernel's server" held_disk 1
    start_server --export vol=/dev/dm-0 --listen rdma://10.0.0.2 --listen rdma://10.0.1.2
    assert_true "ours maps over two paths" ks_map ours vol 2
    ours=$KS_DEV
    assert_true "the kernel's server loads" kernel_server 4321
    assert_true "the kernel's maps over two paths" ks_map kernels /dev/dm-1 2 dest_port=4321
    kernels=$KS_DEV
    put "$ours" HOLD &
    put_ours=$!
    put "$kernels" HOLD &
    put_kernels=$!
    assert_within 20 "both disks hold the write" test -d "$LAB_WORK/held0/holding" \
        -a -d "$LAB_WORK/held1/holding"
    assert_eq "the write to our server went over path 0" \
        "$(ks_stat ours 0 5) $(ks_stat ours 1 5)" "1 0"
    assert_true "path 0 is cut" eval 'topology_cut va0 && topology_cut vb0'
    assert_within 60 "ours: the client sends it again over path 1" eval \
        '[ "$(ks_stat ours 1 6)" -gt 0 ]'
    assert_within 60 "kernel's: the client sends it again over path 1" eval \
        '[ "$(ks_stat kernels 1 6)" -gt 0 ]'

    # The kernel's server runs the copy while the original is still running.
    assert_within 20 "kernel's: the copy is done while the original is held" eval \
        "! kill -0 $put_kernels"
    assert_true "kernel's: a newer write is done" put "$kernels" NEWS
    assert_eq "kernel's: it reads back" "$(word_of "$kernels")" NEWS data
    : >"$LAB_WORK/held1/release"
    assert_within 20 "kernel's: the original ends" grep -q original "$LAB_WORK/held1/order"
    note "the kernel's server: the disk took $(order 1)and reads $(word_of "$kernels")"
    expect_eq "kernel's: the held write came last and undid the newer one" \
        "$(word_of "$kernels")" HOLD

    # Our server had as much time.
    assert_true "ours: the copy waits" kill -0 "$put_ours"
    expect_false "ours: the disk has taken no write yet" test -s "$LAB_WORK/held0/order"
    : >"$LAB_WORK/held0/release"
    assert_within 20 "ours: the copy is done after the original" eval "! kill -0 $put_ours"
    wait "$put_ours"
    expect_eq "ours: the write succeeded" $? 0
    assert_true "ours: a newer write is done" put "$ours" NEWS
    expect_eq "ours: the disk executed the writes in order" "$(order 0)" "original HOLD NEWS "
    expect_eq "ours: the newest data remain" "$(word_of "$ours")" NEWS data

    assert_true "the cable is repaired" eval 'topology_mend va0 && topology_mend vb0'
    assert_true "ours unmaps" kernel_unmap "$ours"
    assert_true "the kernel's unmaps" kernel_unmap "$kernels"
    assert_true "our server exits cleanly" stop_server
    expect_eq "our server recognized the copy" "$(ks_reported replays)" 1
    expect_quiet_server
    cell kernel-client "write held by the disk, path lost: the copy waits, the newest data remain"
    export DM_DISABLE_UDEV=1
    for disk in 0 1; do
        assert_within 20 "disk $disk is removed" dmsetup remove "lab-held$disk"
        nbd-client -d "/dev/nbd$disk" >/dev/null
        assert_within 20 "disk $disk is disconnected" test ! -e "/sys/block/nbd$disk/pid"
        kill "$(<"$LAB_WORK/held$disk/pid")"
        assert_within 20 "disk $disk ends" eval "! kill -0 $(<"$LAB_WORK/held$disk/pid")"
    done
}
