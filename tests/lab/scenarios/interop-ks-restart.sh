#!/usr/bin/env bash
# lab: the kernel's client on our server: stopped, killed and restarted, remap_device
# topology: one
# paths: 2
# limit: 150
# groups: interop issue ours

# shellcheck source=tests/lab/interop.sh
. tests/lab/interop.sh

# Three servers share one wait for the kernel's reconnect (31 s): one is stopped, one is killed, and
# one is killed and finds its file gone when it restarts.
declare -A PID=() DEV=()

serve() { # which
    case $1 in
        stopped) start_server --export "vol=$LAB_WORK/stopped.img" --listen rdma://10.0.0.2 ;;
        killed) start_server --export "vol=$LAB_WORK/killed.img" --listen rdma://10.0.1.2 ;;
        moved)
            start_server --search-path "$LAB_WORK/vols/%SESSNAME%" --listen rdma://10.0.0.2:4321
            ;;
    esac
    PID[$1]=$LAB_SERVER
}

map() { # which path [argument]
    ks_map "$1" vol '' "${@:3}" "path=ip:10.0.$2.1@ip:10.0.$2.2"
    DEV[$1]=$KS_DEV
}

write_to() { # which
    fio_run "$1" 60 --filename="/dev/${DEV[$1]}" --direct=1 --rw=randwrite --bs=4k --iodepth=8 \
        --ioengine=libaio --size=2M --verify=crc32c "${@:2}"
}

scenario() {
    local which vols=$LAB_WORK/vols/moved
    mkdir -p "$vols"
    truncate -s 16M "$LAB_WORK/stopped.img" "$LAB_WORK/killed.img" "$vols/vol"
    ln -s "$LAB_WORK/killed.img" "$vols/outside"
    for which in stopped killed moved; do serve $which; done
    assert_true "a device of the server to be stopped" map stopped 0
    assert_true "a device of the server to be killed" map killed 1
    assert_true "a device below the search path, in the session's directory" map moved 0 \
        dest_port=4321
    expect_eq "a name that does not exist" \
        "$(ks_answer sessname=moved device_path=other access_mode=rw)" ENOENT
    expect_eq "a link out of the search path" \
        "$(ks_answer sessname=moved device_path=outside access_mode=rw)" EACCES
    cell kernel-client "names below a search path with %SESSNAME%; a link out of it: EACCES"
    for which in stopped killed moved; do
        assert_true "$which: fio writes" write_to $which --do_verify=0
    done
    LAB_SERVER=${PID[stopped]}
    assert_true "one server stops" stop_server
    kill -9 "${PID[killed]}" "${PID[moved]}"
    wait "${PID[killed]}" "${PID[moved]}" 2>/dev/null
    mv "$vols/vol" "$vols/away"
    for which in stopped killed moved; do
        assert_within 20 "$which: the client notices at once" \
            ks_dev_state_is "${DEV[$which]}" closed
        # The kernel's client does not make IO wait for a path.
        expect_false "$which: meanwhile IO fails" dd "if=/dev/${DEV[$which]}" of=/dev/null bs=4k \
            count=1 iflag=direct
    done
    for which in stopped killed moved; do serve $which; done
    for which in stopped killed; do
        assert_within 60 "$which: the device is open again" ks_dev_state_is "${DEV[$which]}" open
        assert_true "$which: fio finds its data" write_to $which --verify_only
        assert_true "$which: the device continues" ks_verify "on-$which" 60 "${DEV[$which]}" \
            --size=4M \
            --offset=8M
        expect_match "$which: one reconnect" \
            "$(cat "$KS_CLIENT/$which"/paths/*/stats/reconnects)" '^1 '
    done
    cell kernel-client "server stopped or killed and restarted: reconnects, device continues"
    assert_within 60 "moved: the session is back" ks_states_are moved "1 connected"
    expect_true "moved: its device stays closed" ks_dev_state_is "${DEV[moved]}" closed
    mv "$vols/away" "$vols/vol"
    assert_true "moved: the device is remapped" eval \
        'echo 1 >"/sys/block/${DEV[moved]}/rnbd/remap_device"'
    assert_within 20 "moved: the device is open" ks_dev_state_is "${DEV[moved]}" open
    assert_true "moved: fio finds its data" write_to moved --verify_only
    cell kernel-client "remap_device after its name was missing"
    for which in stopped killed moved; do
        assert_true "$which: the client unmaps" kernel_unmap "${DEV[$which]}"
        LAB_SERVER=${PID[$which]}
        assert_true "$which: the server exits cleanly" stop_server
    done
    expect_quiet_server
}
