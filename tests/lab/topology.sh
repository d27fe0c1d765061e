#!/usr/bin/env bash
# Networks of a guest. One guest: for path I a veth pair, vaI 10.0.I.1 (the client's side) and vbI
# 10.0.I.2 (the server's), with a soft RDMA device on each end: rxaI, rxbI. A pair of guests: the
# same names and addresses, but va and rxa are in the client's guest, vb and rxb in the server's.
# The MTU is 5000, so that the RDMA MTU is 4096. In both, traffic from one end to the other crosses
# the cable, whether RDMA or TCP, and stops when a link is taken down.
#
# Called by guest.sh and by scenarios that take a network down and up.

# Both ends are addresses of one machine, but packets must cross the veth: without these settings,
# ARP requests between the two go unanswered.
topology_sysctls() {
    sysctl -qw net.core.netdev_max_backlog=100000
    sysctl -qw net.ipv4.conf.all.accept_local=1 net.ipv4.conf.default.accept_local=1 \
        net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0 \
        net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2
}

# If two CPUs send packets of a queue pair, these wait in two queues and overtake each other, and a
# full queue drops them. On rdma_rxe of Linux 6.1, either can break a queue pair of the kernel's
# modules: a retransmission runs REG_MR and LOCAL_INV a second time, which fails; after that,
# nothing is sent or reported (rxe_req.c, req_retry and rxe_requester). So one CPU receives the
# packets of a link, in order, from a long queue.
topology_order() { # device
    echo 1 >"/sys/class/net/$1/queues/rx-0/rps_cpus"
}

# Routes traffic from one end to the other through the cable, including TCP, for which the kernel
# would use lo: the table of local addresses is consulted first only for incoming packets.
topology_routes() { # paths
    local path
    ip rule add pref 100 lookup local 2>/dev/null
    for ((path = 0; path < $1; path++)); do
        ip rule add pref 10 iif "va$path" lookup local
        ip rule add pref 10 iif "vb$path" lookup local
        ip rule add pref 20 iif lo to "10.0.$path.2" lookup "$((1000 + path))"
        ip rule add pref 20 iif lo to "10.0.$path.1" lookup "$((2000 + path))"
    done
    ip rule del pref 0 2>/dev/null
}

# Prints the devices of this guest as "side path" lines, side a or b.
topology_sides() { # paths
    local path side
    for ((path = 0; path < $1; path++)); do
        for side in a b; do
            case $LAB_ROLE$side in
                one? | clienta | serverb) echo "$side $path" ;;
            esac
        done
    done
}

topology_up() { # paths
    local paths=${1:-2} side path host module device
    for module in ib_core ib_cm iw_cm rdma_cm rdma_ucm ib_uverbs rdma_rxe libcrc32c; do
        modprobe "$module" || return 1
    done
    topology_sysctls || return 1
    for ((path = 0; path < paths; path++)); do
        if [ "$LAB_ROLE" = one ]; then
            ip link add "va$path" mtu 5000 type veth peer name "vb$path" mtu 5000 &&
                topology_order "va$path" && topology_order "vb$path" || return 1
        else
            topology_rename "$path" || return 1
        fi
    done
    while read -r side path; do
        host=1
        [ "$side" = a ] || host=2
        ip addr add "10.0.$path.$host/24" dev "v$side$path" &&
            ip link set "v$side$path" up &&
            rdma link add "rx$side$path" type rxe netdev "v$side$path" || return 1
        if [ "$LAB_ROLE" = one ]; then
            ip route add "10.0.$path.$((3 - host))" dev "v$side$path" src "10.0.$path.$host" \
                table "$((host * 1000 + path))" || return 1
        fi
    done < <(topology_sides "$paths")
    [ "$LAB_ROLE" != one ] || topology_routes "$paths"
    while read -r side path; do
        device=/sys/class/infiniband/rx$side$path/ports/1
        host=1
        [ "$side" = a ] || host=2
        # Addresses appear in the device's table slightly later; connecting before then is slow.
        wait_until 30 "rx$side$path to have its address" grep -qi \
            "$(printf 'ffff:0a00:%02x%02x' "$path" "$host")" -r "$device/gids" || return 1
        wait_until 30 "rx$side$path to be active" grep -q ACTIVE "$device/state" || return 1
        wait_until 60 "an answer over v$side$path" ping -q -c 1 -W 1 -I "v$side$path" \
            "10.0.$path.$((3 - host))" || return 1
    done < <(topology_sides "$paths")
}

# Adds the address 10.0.PATH.HOST to one side of a path; the other side reaches it over the cable.
topology_address() { # path side host
    local table=1000 other=2
    if [ "$2" = a ]; then table=2000 other=1; fi
    ip addr add "10.0.$1.$3/24" dev "v$2$1" || return 1
    if [ "$LAB_ROLE" = one ]; then
        ip route add "10.0.$1.$3" dev "v$([ "$2" = a ] && echo b || echo a)$1" \
            src "10.0.$1.$((3 - other))" table "$((table + $1))" &&
            ip rule add pref 20 iif lo to "10.0.$1.$3" lookup "$((table + $1))" || return 1
    fi
    wait_until 30 "rx$2$1 to have 10.0.$1.$3" grep -qi \
        "$(printf 'ffff:0a00:%02x%02x' "$1" "$3")" -r "/sys/class/infiniband/rx$2$1/ports/1/gids"
}

# topology_cut makes a cable lose everything that this end sends while the link stays up at both
# ends; topology_mend repairs it. Unlike `ip link set down`, a cut has no lasting effect: rdma_rxe
# of Linux 6.1 never reconnects over a port that was down while something had to be sent.
topology_cut() { # device
    modprobe sch_netem && tc qdisc add dev "$1" root netem loss 100%
}

topology_mend() { # device
    tc qdisc del dev "$1" root
}

# Runs `ip link set down` and up for one end, and restores what the kernel drops with a down link.
topology_down_link() { # side path
    ip link set "v$1$2" down
}

topology_up_link() { # side path
    local host=1
    [ "$1" = a ] || host=2
    ip link set "v$1$2" up || return 1
    [ "$LAB_ROLE" != one ] || ip route replace "10.0.$2.$((3 - host))" dev "v$1$2" \
        src "10.0.$2.$host" table "$((host * 1000 + $2))"
}

# Names a card of a pair by its MAC: 52:54:00:00:PATH:END.
topology_rename() { # path
    local mac side=a name
    [ "$LAB_ROLE" = client ] || side=b
    mac=$(printf '52:54:00:00:%02x:%02x' "$1" "$([ "$side" = a ] && echo 1 || echo 2)")
    [ -e "/sys/class/net/v$side$1" ] && return 0
    wait_until 30 "a card $mac" grep -q "$mac" -r /sys/class/net/*/address || return 1
    name=$(grep -l "$mac" /sys/class/net/*/address | cut -d/ -f5 | head -n 1)
    ip link set "$name" down && ip link set "$name" name "v$side$1" mtu 5000
}

# Removes everything. Prints what remains.
topology_down() {
    local device status=0
    if ip rule show pref 100 | grep -q local; then
        ip rule add pref 0 lookup local
        for device in 10 20 100; do
            while ip rule del pref "$device" 2>/dev/null; do :; done
        done
    fi
    for device in $(rdma link 2>/dev/null | awk '{ print $2 }' | cut -d/ -f1); do
        timeout 60 rdma link delete "$device" || { echo "$device stays" && status=1; }
    done
    for device in /sys/class/net/va[0-9]* /sys/class/net/vb[0-9]*; do
        [ -e "$device" ] || continue
        device=${device##*/}
        if [ "$LAB_ROLE" = one ]; then
            # The other end of a veth is removed with the first.
            ip link delete "$device" 2>/dev/null
        else
            ip addr flush dev "$device"
            ip link set "$device" down
        fi
    done
    if ! timeout 60 rmmod rdma_rxe; then
        echo "rdma_rxe stays"
        status=1
    fi
    return $status
}
