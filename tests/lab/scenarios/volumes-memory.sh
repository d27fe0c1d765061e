#!/usr/bin/env bash
# lab: fifty volumes of one session over two RDMA paths pin no more memory than one
# topology: one
# paths: 2
# limit: 150
# groups: memory

VOLUMES=50
SESSION=(--socket "$LAB_WORK/{name}.sock" --path rdma://10.0.0.1@10.0.0.2:1234
    --path rdma://10.0.1.1@10.0.1.2:1234)

# Prints the KiB that the kernel has pinned for a process, for registration with RDMA devices.
pinned() { # pid
    awk '/^VmPin/ { print $2 }' "/proc/$1/status"
}

# Writes and reads back data that is unique to this volume, through its NBD socket.
use_volume() { # number
    timeout 60 qemu-io -f raw -c "write -P $1 0 1M" -c flush -c "read -P $1 0 1M" \
        "nbd+unix:///v$1?socket=$LAB_WORK/v$1.sock"
}

holds_own() { # number
    timeout 60 qemu-io -r -f raw -c "read -P $1 0 1M" "nbd+unix:///v$1?socket=$LAB_WORK/v$1.sock"
}

detach_all() { # name...
    local name
    for name in "$@"; do timeout 60 rtrs-client detach "$name" || return 1; done
}

scenario() {
    local at client exports=() names=() one
    for ((at = 1; at <= VOLUMES; at++)); do
        exports+=(--export "v$at=mem:2M")
        names+=("v$at")
    done
    start_server "${exports[@]}" --listen rdma://10.0.0.2:1234 --listen rdma://10.0.1.2:1234
    assert_true "one volume attaches" attach v1 "${SESSION[@]}"
    assert_within 20 "both paths are connected" are_connected v1 2
    assert_true "the volume can be used" use_volume 1
    one="$(pinned "$(client_pid v1)") $(pinned "$LAB_SERVER")"
    note "KiB pinned by client and server: $one"
    assert_num "the client pins memory" "${one% *}" -gt 0
    assert_num "the server pins memory" "${one#* }" -gt 0
    assert_true "the volume detaches" detach v1
    assert_true "forty-nine volumes attach" attach "${names[@]:0:VOLUMES-1}" "${SESSION[@]}"
    assert_true "one more volume joins" timeout 60 rtrs-client attach v$VOLUMES --session v1 \
        --socket "$LAB_WORK/{name}.sock"
    assert_within 20 "both paths are connected again" are_connected v1 2
    expect_eq "all volumes share one process" \
        "$(rtrs-client list -o json | jq -c '[length, ([.[].pid] | unique | length)]')" \
        "[$VOLUMES,1]"
    client=$(client_pid v1)
    for at in 1 2 3 25 $VOLUMES; do expect_true "volume $at can be used" use_volume $at; done
    for at in 1 2 3 25 $VOLUMES; do expect_true "volume $at has its own data" holds_own $at; done
    expect_eq "fifty volumes pin as much memory as one" \
        "$(pinned "$client") $(pinned "$LAB_SERVER")" "$one"
    assert_true "all volumes detach" detach_all "${names[@]}"
    assert_within 20 "the process ends" eval "! kill -0 $client"
    assert_true "the server exits cleanly" stop_server
}
