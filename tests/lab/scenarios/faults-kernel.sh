#!/usr/bin/env bash
# lab: for comparison with faults-links: the kernel's own pair under the same faults
# topology: one
# paths: 2
# limit: 500
# network: spoiled
# groups: failover kernel
# in-all: no

. tests/lab/faults.sh
. tests/lab/interop.sh

# Asserts only that IO survives, which the kernel promises; reports all other results.
round() { # run name break mend
    local since
    faults_mark "$1" "$2"
    assert_true "$2: the link is broken" eval "$3"
    since=$SECONDS
    if wait_until 60 "the path to be gone" ks_states_are fk "1 connected 1 disconnected"; then
        note "$2: the path was reported as lost after $((SECONDS - since)) s"
    else
        note "$2: after 60 s the path is still reported as connected"
    fi
    sleep 3
    assert_true "$2: the link is repaired" eval "$4"
    since=$SECONDS
    if wait_until 60 "the path to reconnect" ks_states_are fk "2 connected"; then
        note "$2: the path was back after $((SECONDS - since)) s"
    else
        note "$2: the path was not back after 60 s"
    fi
}

# Reports the result of IO without a path.
no_link() {
    local since
    assert_true "both links are down" eval 'topology_down_link a 0 && topology_down_link a 1'
    wait_until 60 "no path to be left" ks_states_are fk "2 disconnected" ||
        note "after 60 s a path is still reported as connected"
    since=$(date +%s%3N)
    if timeout 60 dd if="/dev/$KS_DEV" of=/dev/null bs=4k count=1 iflag=direct \
        >"$LAB_WORK/dd.log" 2>&1; then
        fail "a read without a path has no data"
    else
        note "a read without a path ends after $(($(date +%s%3N) - since)) ms:" \
            "$(head -n 1 "$LAB_WORK/dd.log")"
    fi
}

scenario() {
    local disk
    disk=$(brd_disk 64) || exit 1
    assert_true "the server's modules load" kernel_server 1234
    assert_true "the client maps over two paths" ks_map fk "$disk" 2
    assert_eq "both are connected" "$(ks_states fk)" "2 connected"
    faults_begin kernel "/dev/$KS_DEV" $((400 * LAB_SLOW))
    round kernel both-ways 'topology_cut va0 && topology_cut vb0' \
        'topology_mend va0 && topology_mend vb0'
    round kernel down 'topology_down_link a 0' 'topology_up_link a 0'
    faults_end kernel "the kernel's own pair"
    faults_stalls kernel "the kernel's own pair: a silent cable, a link down"
    no_link
    assert_true "the client unmaps" kernel_unmap "$KS_DEV"
}
