#!/usr/bin/env bash
# lab: /dev/nbd0 over two gateways of a Ceph image: moved, killed, frozen, cut off, OSD stopped
# topology: one
# paths: 2
# limit: 600
# groups: failover device

# shellcheck source=tests/lab/topology.sh
. tests/lab/topology.sh

CLUSTER=$LAB_WORK/ceph
ROUNDS=${LAB_GATEWAY_ROUNDS:-1}
EVENTS=(planned asked_by_client killed frozen cut_off osd_stops) WRITES=1500
[ -z "$LAB_QUICK" ] || EVENTS=(planned killed) WRITES=600
GATEWAYS=()

start_gateway() { # number
    local out=$LAB_WORK/gateway$1.out
    : >"$out"
    rtrs-server --insecure-open --name "gateway$1" --server-id "gateway$1" \
        --export "vol=rbd:rbd/vol,gateway,conf=$CLUSTER/ceph.conf,connect-timeout=2m" \
        --listen "tcp://10.0.$1.2" >"$out" 2>>"$LAB_WORK/gateway$1.log" </dev/null &
    GATEWAYS[$1]=$!
    wait_until 60 "gateway $1 to listen" grep -q '^listening on ' "$out"
}

# Prints the states of the paths: to gateway 0 and to gateway 1.
states() {
    client_json status vol '[.paths[].state] | join(" ")'
}

are_states() { # states
    [ "$(states)" = "$1" ]
}

# Prints the gateway that serves the volume.
active() {
    client_json status vol '[.paths[].state] | index("connected")'
}

is_active() { # number
    [ "$(active)" = "$1" ]
}

is_standby() { # number
    [ "$(client_json status vol ".paths[$1].state")" = standby ]
}

# Writes and verifies while an event happens.
round() { # what event
    local what=$1 event=$2 fio before other
    before=$(active)
    other=$((1 - before))
    fio_run verify $((240 * LAB_SLOW)) --filename=/dev/nbd0 --direct=1 --ioengine=libaio \
        --rw=randwrite --bs=4k --iodepth=8 --size=16M --number_ios=$WRITES --rate_iops=100 \
        --verify=crc32c --verify_fatal=1 &
    fio=$!
    sleep 4
    assert_true "$what: the event starts" "$event" "$before"
    if [ "$event" != osd_stops ]; then
        assert_within 60 "$what: gateway $other is active" is_active "$other"
    fi
    [ "$(type -t "${event}_after")" != function ] ||
        assert_true "$what: the event ends" "${event}_after" "$before"
    wait "$fio"
    assert_eq "$what: fio reads back what it wrote" $? 0
    note "$what: the longest write took $(fio_value verify '.jobs[0].write.clat_ns.max / 1e6 |
        round') ms"
    assert_within 120 "$what: the other gateway is standby" is_standby $((1 - $(active)))
}

planned() { # active
    rtrs-server export drain vol --name "gateway$1"
}

asked_by_client() { # active
    rtrs-client path switch vol
}

killed() { # active
    kill -KILL "${GATEWAYS[$1]}"
}

killed_after() { # number
    start_gateway "$1"
}

frozen() { # active
    kill -STOP "${GATEWAYS[$1]}"
}

frozen_after() { # number
    sleep 20
    kill -CONT "${GATEWAYS[$1]}"
    wait_until 60 "gateway $1 to notice the takeover" grep -Eq \
        'blocklisted this server|another server has taken over|was paused' "$LAB_WORK/gateway$1.log"
}

cut_off() { # active
    topology_cut "vb$1"
}

cut_off_after() { # number
    topology_mend "vb$1"
}

osd_stops() {
    local pid
    pid=$(cat "$CLUSTER"/run/osd.*.pid)
    kill -STOP "$pid" && sleep 5 && kill -CONT "$pid"
}

scenario() {
    local round event
    command -v ceph-mon ceph-osd rbd >/dev/null || skip "no Ceph here: scripts/ceph.sh install"
    modprobe nbd nbds_max=2
    export CEPH_CONF=$CLUSTER/ceph.conf
    assert_true "Ceph starts" timeout 300 scripts/ceph.sh start "$CLUSTER"
    assert_true "Ceph has an image" timeout 60 rbd create --size 64M rbd/vol
    assert_true "gateway 0 starts" start_gateway 0
    assert_true "gateway 1 starts" start_gateway 1
    assert_true "the volume attaches over a path to each" attach vol --device auto \
        --path tcp://10.0.0.1@10.0.0.2 --path tcp://10.0.1.1@10.0.1.2
    assert_within 60 "one gateway is active, one standby" eval \
        'are_states "connected standby" || are_states "standby connected"'
    for ((round = 0; round < ROUNDS; round++)); do
        for event in "${EVENTS[@]}"; do
            round "${event//_/ }" "$event"
        done
    done
    assert_eq "no request failed" "$(client_json stats vol '[.ops[].errors] | add')" 0
    assert_true "the volume detaches" detach vol
    kill -TERM "${GATEWAYS[@]}"
    assert_within 60 "both gateways end" eval \
        "! kill -0 ${GATEWAYS[0]} && ! kill -0 ${GATEWAYS[1]}"
    assert_true "Ceph ends" timeout 60 scripts/ceph.sh stop "$CLUSTER"
}
