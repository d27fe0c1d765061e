#!/usr/bin/env bash
# RDS in a guest: the kernel's node and ours, each in its own network namespace, on one bridge.
#
#   rk, rk2   the kernel's nodes: 10.9.0.5 and 10.9.0.6, fd09::5 and fd09::6
#   ru, ru2   ours: 10.9.0.1 and 10.9.0.9, fd09::1 and fd09::9, one smaller and one larger than
#             those of the kernel; ru2 has 10.9.0.2 and fd09::2
#
# The kernel listens on port 16385 in every namespace once rds_tcp is loaded, so our namespaces
# redirect that port. Sourced by scenarios.

RDS_PORT=26385
RDS_PRELOAD=$LAB_BIN/librds_preload.so
# Path of the oracle/rds-tools programs, if they were built.
export PATH=${LAB_RDS_TOOLS:+$LAB_RDS_TOOLS:}$PATH

# Runs a command in a namespace. A leading `timeout` is stretched like the function `timeout`.
rds_in() { # namespace command...
    [ "$2" != timeout ] || set -- "$1" timeout $(($3 * LAB_SLOW)) "${@:4}"
    ip netns exec "$@"
}

rds_namespace() { # name last...
    local name=$1 last
    shift
    ip netns add "$name" && ip link add "v$name" type veth peer name "p$name" &&
        ip link set "p$name" netns "$name" && ip link set "v$name" master rdsbr up &&
        rds_in "$name" ip link set lo up && rds_in "$name" ip link set "p$name" up || return 1
    rds_in "$name" sysctl -qw net.ipv6.conf.all.accept_dad=0 net.ipv6.conf.default.accept_dad=0 \
        "net.ipv6.conf.p$name.accept_dad=0"
    for last in "$@"; do
        rds_in "$name" ip addr add "10.9.0.$last/24" dev "p$name" &&
            rds_in "$name" ip -6 addr add "fd09::$last/64" dev "p$name" nodad || return 1
    done
}

# Redirects connections for the kernel's listener to ours. The address is kept: `redirect` would
# replace it with the first address of the link.
rds_redirect() { # namespace last...
    local name=$1 last family
    shift
    for family in ip ip6; do
        rds_in "$name" nft add table $family rds &&
            rds_in "$name" nft add chain $family rds in \
                '{ type nat hook prerouting priority -100 ; }' || return 1
    done
    for last in "$@"; do
        rds_in "$name" nft add rule ip rds in ip daddr "10.9.0.$last" tcp dport 16385 \
            dnat to "10.9.0.$last:$RDS_PORT" &&
            rds_in "$name" nft add rule ip6 rds in ip6 daddr "fd09::$last" tcp dport 16385 \
                dnat to "[fd09::$last]:$RDS_PORT" || return 1
    done
}

rds_up() {
    trap rds_down EXIT
    # Buffer space for messages of 1 MiB in the kernel's sockets.
    sysctl -qw net.core.wmem_max=4194304 net.core.rmem_max=4194304
    modprobe rds && modprobe rds_tcp && ip link add rdsbr type bridge &&
        ip link set rdsbr up || return 1
    rds_namespace rk 5 && rds_namespace rk2 6 && rds_namespace ru 1 9 && rds_namespace ru2 2 &&
        rds_redirect ru 1 9 && rds_redirect ru2 2 || return 1
    wait_until 20 "an answer over the bridge" rds_in ru ping -q -c 1 -W 1 10.9.0.5
}

rds_down() {
    local name pid
    for name in ru ru2 rk rk2; do
        for pid in $(ip netns pids $name 2>/dev/null); do kill "$pid" 2>/dev/null; done
    done
    wait
    for name in ru ru2 rk rk2; do
        ip netns del $name 2>/dev/null
    done
    ip link del rdsbr 2>/dev/null
    [ -z "${RDS_HELD:-}" ] || return 0
    wait_until 30 "rds_tcp to go" rmmod rds_tcp
    wait_until 30 "rds to go" rmmod rds
    return 0
}

# Starts `rds node` for addresses of a namespace and sets RDS_NODE to its pid. RDS_DIR of its users
# is $LAB_WORK/NAMESPACE. RDS_PEER_PORT is its peers' port, if not that of the kernel.
rds_node() { # namespace address...
    local name=$1 address arguments=()
    shift
    for address in "$@"; do arguments+=(--address "$address"); done
    [ -z "${RDS_PEER_PORT:-}" ] || arguments+=(--peer-port "$RDS_PEER_PORT")
    mkdir -p "$LAB_WORK/$name"
    : >"$LAB_WORK/$name.out"
    # Not a function, because its shell would be killed instead.
    ip netns exec "$name" rds node "${arguments[@]}" --listen-port $RDS_PORT \
        --socket-dir "$LAB_WORK/$name" >"$LAB_WORK/$name.out" 2>>"$LAB_WORK/$name.log" &
    RDS_NODE=$!
    wait_until 30 "rds node $*" eval "[ \$(grep -c ready '$LAB_WORK/$name.out') = $# ]"
}

rds_stop() { # pid
    kill "$1" && wait "$1"
}

# Runs a command in a namespace that uses its `rds node`.
rds_by() { # namespace command...
    RDS_DIR=$LAB_WORK/$1 rds_in "$@"
}

# Runs an unmodified program in a namespace with the preload library. `env` follows `ip netns exec`,
# because the library must not be loaded into `ip`.
rds_preloaded() { # namespace command...
    local name=$1
    shift
    [ "$1" != timeout ] || set -- timeout $(($2 * LAB_SLOW)) "${@:3}"
    RDS_DIR=$LAB_WORK/$name rds_in "$name" env LD_PRELOAD="$RDS_PRELOAD" "$@"
}

# Prints a number from the last output of `rds stress -o json`.
rds_value() { # attribute
    jq -r ".$1" "$LAB_WORK/stress.json"
}

# Runs a load from one side to the other and checks all bytes; the server must be running. The
# output goes to stress.json.
rds_load() { # namespace argument...
    rds_by "$1" rds stress "${@:2}" -W $((10 * LAB_SLOW))s -o json >"$LAB_WORK/stress.json" \
        2>>"$LAB_WORK/stress.log"
}

# Starts the server of a load, which runs until the scenario ends.
rds_serve() { # namespace argument...
    local name=$1 out=$LAB_WORK/serve.$1.out
    shift
    : >"$out"
    RDS_DIR=$LAB_WORK/$name ip netns exec "$name" rds stress --listen "$@" >"$out" \
        2>>"$LAB_WORK/serve.log" &
    RDS_SERVER=$!
    wait_until 30 "rds stress to listen" grep -q listening "$out"
}

# Sends messages of many lengths with `rds send` and compares them at the other side.
rds_sizes() { # from_namespace from_flags to_namespace to_flags to_address port
    local from=$1 from_flags=$2 to=$3 to_flags=$4 address=$5 port=$6 size receiver
    for size in 0 1 47 48 4096 65536 100000; do
        head -c "$size" /dev/urandom >"$LAB_WORK/in"
        # shellcheck disable=SC2086
        rds_by "$to" timeout 60 rds recv "$port" -n 1 --raw $to_flags >"$LAB_WORK/out" \
            2>>"$LAB_WORK/recv.log" &
        receiver=$!
        # shellcheck disable=SC2086
        wait_until 20 "a socket at $port" eval \
            "rds_by $to rds info -k $to_flags | grep -q ' $port '" || return 1
        # shellcheck disable=SC2086
        rds_by "$from" timeout 60 rds send "$address" "$port" --whole $from_flags <"$LAB_WORK/in" \
            >>"$LAB_WORK/send.log" 2>&1 || return 1
        wait $receiver && cmp "$LAB_WORK/in" "$LAB_WORK/out" || return 1
    done
}

# Runs qperf over the kernel at one end and over the library at the other, with each end as the
# server in turn.
rds_qperf() { # test
    local server result
    ip netns exec rk timeout $((60 * LAB_SLOW)) qperf >"$LAB_WORK/qperf.server" 2>&1 &
    server=$!
    rds_qperf_client rk rds_preloaded ru 10.9.0.5 "$1"
    result=$?
    kill $server && wait $server
    [ $result = 0 ] || return 1
    RDS_DIR=$LAB_WORK/ru ip netns exec ru env LD_PRELOAD="$RDS_PRELOAD" \
        timeout $((60 * LAB_SLOW)) qperf >"$LAB_WORK/qperf.server" 2>&1 &
    server=$!
    rds_qperf_client ru rds_in rk 10.9.0.1 "$1"
    result=$?
    kill $server && wait $server
    return $result
}

rds_qperf_client() { # server_namespace runner namespace address test
    wait_until 20 "qperf to listen" eval "rds_in $1 ss -Hltn | grep -q :19765" || return 1
    local attempt
    for attempt in {1..10}; do
        "$2" "$3" timeout 40 qperf -t 2 "$4" "$5" >"$LAB_WORK/qperf.out" 2>&1 &&
            grep -q ' = ' "$LAB_WORK/qperf.out" && return
        # A server of qperf names its port before it listens there.
        grep -q 'connect failed: Connection refused' "$LAB_WORK/qperf.out" || break
        sleep 0.2
    done
    # The test prints what failed.
    head "$LAB_WORK/qperf.out" "$LAB_WORK/qperf.server" >&2
    return 1
}
