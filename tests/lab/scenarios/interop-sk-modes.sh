#!/usr/bin/env bash
# lab: access modes and names: our client against a kernel server: granted, or refused with a reason
# topology: one
# paths: 1
# limit: 150
# groups: interop issue ours

. tests/lab/interop_sk.sh

# Attaches a session without a device, which is fast. The first argument is its name.
open_as() { # session mode device
    timeout 60 rtrs-client attach "$3" --session-name "$1" --run-dir "/run/rtrs-$1" \
        --path ip:10.0.0.1@ip:10.0.0.2 --shards 1 --buffer-size 58M --heartbeat 2s \
        --access "$2" --socket "$LAB_WORK/$1" </dev/null
}

close_as() { # session device
    timeout 60 rtrs-client detach "$2" --run-dir "/run/rtrs-$1"
}

# Checks that an attach fails with this error.
refused() { # text session mode device words
    expect_false "$1" open_as "$2" "$3" "$4"
    expect_match "$1: the reason is given" "$(cat "$LAB_HOME/out")" "$5"
}

writes() { # session
    timeout 20 qemu-io -f raw -c 'write -P 1 0 4096' "nbd+unix:///?socket=$LAB_WORK/$1"
}

reads() { # session
    timeout 20 qemu-io -r -f raw -c 'read 0 4096' "nbd+unix:///?socket=$LAB_WORK/$1"
}

scenario() {
    local disk long
    disk=$(brd_disk 16) || exit 1
    assert_true "the server's modules load" kernel_server 1234 sess_queue_depth=32
    assert_true "rw is granted" open_as a rw "$disk"
    refused "a second rw is refused" b rw "$disk" 'EPERM.*open for writing.*--access ro'
    assert_true "ro in addition is granted" open_as c ro "$disk"
    assert_true "the client reads" reads c
    expect_false "c cannot write" writes c
    assert_true "rw can write" writes a
    assert_true "migration in addition to rw is granted" open_as d migration "$disk"
    assert_true "migration can write" writes d
    refused "a third writer is refused" e migration "$disk" 'EPERM'
    cell kernel-server "access modes ro, rw, migration; ro enforced"
    refused "the name of an existing session is refused" a ro "$disk" \
        '(session-name|is already attached|already)'
    for session in a c d; do assert_true "$session detaches" close_as $session "$disk"; done
    assert_true "rw is granted again" open_as b rw "$disk"
    # A second session with the name of an open one, from a different client.
    expect_false "a session name is unique" timeout 60 rtrs-client attach "$disk" \
        --session-name b --run-dir /run/rtrs-f --path ip:10.0.0.1@ip:10.0.0.2 --shards 1 \
        --buffer-size 58M --access ro --socket "$LAB_WORK/f"
    expect_match "the client gives the reason" "$(cat "$LAB_HOME/out")" \
        'another session on the server.*--session-name'
    assert_true "b detaches" close_as b "$disk"
    blockdev --setro "$disk"
    assert_true "auto accepts a read-only disk" open_as g auto "$disk"
    assert_true "auto can read" reads g
    expect_eq "auto opens it read-only" "$(timeout 20 rtrs-client status "$disk" \
        --run-dir /run/rtrs-g -o json | jq .read_only)" true
    assert_true "g detaches" close_as g "$disk"
    refused "rw of a read-only disk is refused" h rw "$disk" 'EACCES.*read-only'
    blockdev --setrw "$disk"
    cell kernel-server "read-only disks"
    refused "an unknown name" n1 ro /dev/nothing 'ENOENT.*no export of that name'
    refused "a name of a character device" n2 ro /dev/null 'ENOTBLK.*something else of that name'
    refused "a name with .." n3 ro /dev/../dev/ram0 'EINVAL.*does not accept this name'
    long=/dev/$(printf 'x%.0s' {1..248})
    refused "254 bytes" n4 ro "${long:0:253}" '(ENOENT|ENAMETOOLONG)'
    expect_false "255 bytes" open_as n5 ro "$long/x"
    expect_match "255 bytes: refused before anything is sent" "$(cat "$LAB_HOME/out")" \
        'is 255 bytes long; use 1 to 254'
    assert_true "slashes collapse" open_as n6 ro //dev///ram0
    assert_true "n6 detaches" close_as n6 //dev///ram0
    cell kernel-server "names: with slashes, unknown, not a block device, too long"
    assert_true "the server's modules unload" kernel_server_gone
}
