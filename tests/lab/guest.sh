#!/usr/bin/env bash
# Runs inside a guest of the lab, as root: prepares the guest, runs scenarios one after the other
# and restores the machine between them. scripts/lab-run.sh reads and documents the lines that this
# script prints on stdout.
#
#   guest.sh run ROLE NAME...    ROLE is one, or in a pair server or client
#   guest.sh command             runs the file `command` of the shared folder, topology set up
#   guest.sh shell               an interactive shell
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
export PATH=$PATH:/usr/sbin:/sbin LC_ALL=C.UTF-8
export LAB_SHARE=/run/lab LAB_ROLE=${2:-one}
# shellcheck source=tests/lab/lib.sh
. tests/lab/lib.sh
# shellcheck source=tests/lab/topology.sh
. tests/lab/topology.sh
# shellcheck source=tests/lab/kernel_faults.sh
. tests/lab/kernel_faults.sh

# Lines in the kernel's log that make any scenario fail.
KERNEL_FAULTS='WARNING: |BUG: |BUG at |Oops|general protection|blocked for more than|refcount_t'
KERNEL_FAULTS+='|UBSAN|KASAN|Kernel panic|detected stall|recursive locking|list_(add|del) corr'
KERNEL_FAULTS+='|(rtrs|rnbd)[-_].*([Uu]nexpected|Unknown IMM)'
# Control group with the processes of the running scenario.
GUEST_CGROUP=/sys/fs/cgroup/lab

guest_prepare() {
    mkdir -p "$LAB_WORK" "$LAB_HOME" "$GUEST_CGROUP"
    mkfifo "$LAB_HOME/never" && exec 8<>"$LAB_HOME/never"
    modprobe configfs
    mount -t configfs configfs /sys/kernel/config 2>/dev/null
    # Slow emulation must not count as a hang, but real hangs must be detected within a scenario.
    echo 60 >/proc/sys/kernel/watchdog_thresh
    echo 45 >/proc/sys/kernel/hung_task_timeout_secs
    echo -1 >/proc/sys/kernel/hung_task_warnings
    # Warnings and worse go to the console, whose output the host keeps.
    dmesg -n warn
    ip link set lo up
    ulimit -c 0
}

# Milliseconds that the loop below takes on an idle machine that is as fast as the limits assume.
GUEST_LOOP_MS=700
# Maximum factor by which limits are stretched.
GUEST_SLOW_MAX=8

# Sets LAB_SLOW: how many times slower this guest is, measured by a loop on each of two CPUs.
guest_measure() {
    local loops=() start=${EPOCHREALTIME/./} loop ms before=$LAB_SLOW
    for _ in 1 2; do
        (for ((loop = 0; loop < 40000; loop++)); do :; done) &
        loops+=($!)
    done
    wait "${loops[@]}"
    ms=$(((${EPOCHREALTIME/./} - start) / 1000))
    LAB_SLOW=$(((ms * 10 / GUEST_LOOP_MS + 6) / 10))
    [ "$LAB_SLOW" -ge 1 ] || LAB_SLOW=1
    [ "$LAB_SLOW" -le $GUEST_SLOW_MAX ] || LAB_SLOW=$GUEST_SLOW_MAX
    [ "$LAB_SLOW" = "$before" ] ||
        echo "   the guest is $LAB_SLOW times slower than an idle one ($ms ms), as are its limits"
    echo $((45 * LAB_SLOW)) >/proc/sys/kernel/hung_task_timeout_secs
}

header() { # name key
    local value
    value=$(sed -n "/^#/!q; s/^# $2: *//p" {tests,rds}/lab/scenarios/"$1.sh" 2>/dev/null |
        head -n 1)
    # The same extension as in scripts/lab-run.sh.
    [ "$2" != limit ] || [ -z "${LAB_LONG:-}" ] || value=$((value + 700))
    echo "$value"
}

# Ends processes that the scenario left running. Prints the processes that cannot be ended.
guest_end_processes() {
    local signal pid
    for signal in TERM KILL; do
        while read -r pid; do
            kill "-$signal" "$pid" 2>/dev/null
        done <"$GUEST_CGROUP/cgroup.procs"
        for _ in {1..50}; do
            [ -n "$(cat "$GUEST_CGROUP/cgroup.procs")" ] || return 0
            sleep 0.1
        done
    done
    while read -r pid; do
        echo "process $pid ($(tr '\0' ' ' <"/proc/$pid/cmdline" | cut -c1-60)) does not end:" \
            "$(awk '/^State/ { print $2 }' "/proc/$pid/status")"
    done <"$GUEST_CGROUP/cgroup.procs"
    return 1
}

guest_disconnect() {
    local device
    for device in /sys/block/rnbd*/rnbd/unmap_device; do
        [ -e "$device" ] && timeout 60 tee "$device" <<<force >/dev/null
    done
    for device in /sys/block/dm-*/dm/name; do
        [ -e "$device" ] && grep -q ^lab- "$device" &&
            DM_DISABLE_UDEV=1 timeout 20 dmsetup remove --force "$(cat "$device")" >/dev/null 2>&1
    done
    for device in /sys/kernel/config/nullb/*/; do
        [ -e "$device/power" ] && echo 0 >"$device/power" && rmdir "$device"
    done
    for device in /sys/block/nbd*/pid; do
        [ -e "$device" ] || continue
        device=${device%/pid}
        timeout 20 nbd-client -d "/dev/${device##*/}" >/dev/null 2>&1
    done
    return 0
}

# --- the network ---
# A topology is kept for the next scenario if that needs the same one: creating topologies used to
# take half of the scenarios' overhead.
TOPOLOGY_PATHS= TOPOLOGY_STATE=

# Prints the network state that a scenario might change.
topology_state() {
    ip -4 -br addr
    ip -4 rule
    ip -4 route show table all | sort
    tc qdisc show
    rdma link
}

# Sets up this many paths, or keeps the current ones if they are unchanged. A guest that is not in a
# pair has at least two, so that most scenarios can share them.
guest_network() { # paths
    local paths=$1
    [ "$LAB_ROLE" != one ] || [ "$paths" -ge 2 ] || paths=2
    : >"$LAB_HOME/counters"
    if [ "$TOPOLOGY_PATHS" = "$paths" ] && [ "$(topology_state)" = "$TOPOLOGY_STATE" ]; then
        # From here on, the devices' counters are relative to their current values.
        grep -H . /sys/class/infiniband/*/ports/1/hw_counters/* >"$LAB_HOME/counters"
        return 0
    fi
    [ -z "$TOPOLOGY_PATHS" ] || guest_network_down || return 1
    topology_up "$paths" || return 1
    TOPOLOGY_PATHS=$paths
    TOPOLOGY_STATE=$(topology_state)
}

guest_network_down() {
    TOPOLOGY_PATHS=
    topology_down
}

# Restores the machine. Prints what could not be undone.
guest_cleanup() { # [keep]
    local status=0 device module target
    # A process that waits for a device ends when the device is gone.
    guest_end_processes >/dev/null || { guest_disconnect && guest_end_processes; } || status=1
    while read -r target; do
        timeout 20 umount "$target" || { echo "$target stays mounted" && status=1; }
    done < <(awk -v work="$LAB_WORK" 'index($2, work) == 1 { print $2 }' /proc/mounts | sort -r)
    guest_disconnect
    command -v nvme >/dev/null && [ -d /sys/class/nvme ] &&
        timeout 30 nvme disconnect-all >/dev/null 2>&1
    nvmet_down
    losetup -D
    for module in rnbd_client rnbd_server rtrs_client rtrs_server rtrs_core nvme_rdma nvme_tcp \
        nvme_fabrics nvmet_rdma nvmet_tcp nvmet brd null_blk scsi_debug nbd; do
        if [ -d "/sys/module/$module" ] && ! timeout 60 rmmod "$module" 2>"$LAB_HOME/rmmod"; then
            echo "module $module stays: $(tail -n 1 "$LAB_HOME/rmmod")"
            status=1
        fi
    done
    [ "${1:-}" = keep ] || guest_network_down || status=1
    rm -rf "$LAB_WORK" /run/rtrs
    return $status
}

# Prints what a passed scenario must not leave behind.
guest_leftovers() {
    local device name
    while read -r name; do
        echo "process $name: $(tr '\0' ' ' <"/proc/$name/cmdline" | cut -c1-100)"
    done <"$GUEST_CGROUP/cgroup.procs"
    for device in /sys/block/nbd*/pid /sys/block/rnbd*/rnbd; do
        [ -e "$device" ] && name=${device#/sys/block/} && echo "block device ${name%%/*}"
    done
    ps -e -o pid=,stat=,comm= | awk '$2 ~ /^D/ && $3 !~ /^kworker/ { print "process", $0 }'
    # Objects of the kernel's own modules exist for as long as the modules are loaded.
    rdma resource show qp 2>/dev/null | grep -v 'comm \[' | grep ' pid ' | sed 's/^/qp /'
    rdma resource show cm_id 2>/dev/null | grep -v 'comm \[' | grep ' pid ' | sed 's/^/cm_id /'
    rdma resource show mr 2>/dev/null | grep -v 'comm \[' | grep ' pid ' | sed 's/^/mr /'
}

# Prints the kernel's log since the given mark.
kernel_log() { # mark
    dmesg | awk -v mark="$1" 'seen; index($0, mark) { seen = 1 }'
}

# In a pair, waits until the other guest has reached the stage, up to a limit.
barrier() { # name stage
    [ "$LAB_ROLE" = one ] && return 0
    signal "$1.$LAB_ROLE.$2"
    await "$1.$(other_role).$2" 120
}

# Runs a scenario with its time limit. A process that waits in the kernel cannot be killed, and
# `timeout` does not exit before that process does, so `timeout` is abandoned: the guest can then
# still report where the process waits.
guest_scenario() { # limit file
    local scenario deadline=$((SECONDS + $1 * LAB_SLOW + 20))
    # shellcheck disable=SC2016
    timeout -k 5 "$1" bash -c 'echo $$ >"$1/cgroup.procs"; shift; exec "$@"' - \
        "$GUEST_CGROUP" bash tests/lab/scenario.sh "$2" "$LAB_ROLE" </dev/null 8>&- &
    scenario=$!
    while kill -0 $scenario 2>/dev/null; do
        [ $SECONDS -lt $deadline ] || return 137
        # Sleeps without a process: nothing is ever written to descriptor 8.
        read -r -t 0.5 -u 8 _
    done
    wait $scenario
}

run_scenario() { # name last
    local name=$1 limit start=$SECONDS status checks mark dirty='' text allowed keep=
    local file=tests/lab/scenarios/$name.sh
    [ -f "$file" ] || file=rds/lab/scenarios/$name.sh
    guest_measure
    limit=$(header "$name" limit)
    echo "@@ start $name $((limit * LAB_SLOW))"
    mark="lab: $name begins"
    echo "$mark" >/dev/kmsg
    mkdir -p "$LAB_WORK"
    : >"$LAB_HOME/checks"
    : >"$LAB_HOME/classes"
    export LAB_NAME=$name
    if ! barrier "$name" ready >"$LAB_HOME/topology" 2>&1 ||
        ! guest_network "$(header "$name" paths)" >"$LAB_HOME/topology" 2>&1; then
        echo "FAIL $name: the topology does not come up: $(tail -n 5 "$LAB_HOME/topology")"
        status=1 dirty=dirty
    else
        guest_scenario "$limit" "$file"
        status=$?
    fi
    if [ $status -eq 124 ] || [ $status -eq 137 ]; then
        echo "FAIL $name: did not end within $((limit * LAB_SLOW)) s"
        echo failed >>"$LAB_HOME/checks"
        class hang
        status=1 dirty=dirty
        # Prints where hanging processes wait.
        echo w >/proc/sysrq-trigger
    fi
    [ "$LAB_ROLE" = one ] || signal "$name.$LAB_ROLE.over"
    if [ $status -eq 0 ]; then
        # Processes that have just been signaled may still be ending.
        for _ in {1..30}; do
            text=$(guest_leftovers 2>/dev/null)
            [ -n "$text" ] || break
            sleep 0.1
        done
        if [ -n "$text" ]; then
            status=1
            # A process that waits uninterruptibly.
            if grep -Eq '^process +[0-9]+ +D' <<<"$text"; then class hang; fi
            fail "the scenario leaves nothing behind" "left: $text"
        fi
    fi
    # The topology of a pair is kept until both guests have finished.
    [ "$LAB_ROLE" = one ] || await "$name.$(other_role).over" "$limit" || dirty=dirty
    [ $status -eq 0 ] || [ $status -eq 77 ] || guest_report "$mark"
    # The last scenario shows that the modules can be unloaded.
    [ $status -ne 0 ] || [ "$LAB_ROLE" != one ] || [ "${2:-}" = last ] ||
        [ "$(header "$name" network)" = spoiled ] || keep=keep
    if ! guest_cleanup $keep >"$LAB_HOME/cleanup" 2>&1; then
        echo "   left after $name: $(tail -n 10 "$LAB_HOME/cleanup")"
        dirty=dirty
    fi
    [ "$(header "$name" guest)" != spoiled ] || dirty=dirty
    allowed=$(header "$name" kernel-may-say)
    text=$(kernel_log "$mark" | grep -E "$KERNEL_FAULTS" | grep -vE "${allowed:-^$}")
    if [ -n "$text" ]; then
        # Only a long hang of a task or a processor is logged with this text.
        if grep -Eq 'blocked for more than|detected stall' <<<"$text"; then class hang; fi
        fail "the kernel reports no error" "$text"
        kernel_log "$mark" | tail -n 60 | sed 's/^/   | /'
        status=1 dirty=dirty
    fi
    if [ $status -eq 0 ] && grep -q failed "$LAB_HOME/checks"; then status=1; fi
    if [ $status -eq 0 ] && ! [ -s "$LAB_HOME/checks" ]; then
        fail "the scenario asserts something"
        status=1
    fi
    # This also covers failures after the last failed check, or without a failed check.
    if [ $status -ne 0 ] && [ $status -ne 77 ]; then
        show_classes
        kernel_log "$mark" | kernel_faults_named | sed "s/^/KERNEL $name /"
    fi
    checks="$(grep -c passed "$LAB_HOME/checks") $(grep -c failed "$LAB_HOME/checks")"
    case $status in
        0) text=passed ;;
        77) text=skipped ;;
        *) text=failed ;;
    esac
    echo "@@ end $name $text $checks $((SECONDS - start)) $dirty"
    [ -z "$dirty" ]
}

# Prints the requests in the kernel's block layer for each connected /dev/nbdX.
guest_report_nbd() {
    local device queue part
    mountpoint -q /sys/kernel/debug || mount -t debugfs none /sys/kernel/debug 2>/dev/null
    for device in /sys/kernel/debug/block/nbd*; do
        [ -e "/sys/block/${device##*/}/pid" ] || continue
        for queue in "$device"/hctx*; do
            for part in state busy dispatch; do
                sed "s/^/   | ${device##*/} ${queue##*/} $part: /" "$queue/$part" 2>/dev/null |
                    head -n 8
            done
        done
    done
}

# Prints the stacks of the kernel threads that read a device's sockets.
guest_report_receivers() {
    local task name
    for task in /proc/[0-9]*; do
        name=$(cat "$task/comm" 2>/dev/null) || continue
        if [[ $name == nbd*-recv ]] || grep -q recv_work "$task/stack" 2>/dev/null; then
            echo "   | kernel thread $name: $(tr '\n' ' ' <"$task/stack" | cut -c1-200)"
        fi
    done
}

# Prints the counters of our running daemons and where each of their threads sleeps.
guest_report_daemons() {
    local control pid task
    for control in /run/rtrs/*.ctl; do
        [ -e "$control" ] || continue
        control=${control##*/}
        # Other characters in a name are written as %XX.
        control=$(printf '%b' "${control//%/\\x}")
        echo "   counters of ${control%.ctl}:"
        timeout 10 rtrs-client stats "${control%.ctl}" 2>&1 | head -n 60 | sed 's/^/   | /'
        timeout 10 rtrs-client stats "${control%.ctl}" -o json 2>&1 | jq -c .nbd | sed 's/^/   | /'
    done
    guest_report_nbd
    guest_report_receivers
    for pid in $(pgrep '^rtrs-'); do
        echo "   threads of $(tr '\0' ' ' <"/proc/$pid/cmdline" | cut -c1-80):"
        for task in "/proc/$pid/task"/*; do
            echo "   | $(cat "$task/comm") $(awk '/^State/ { print $2 }' "$task/status")" \
                "$(tr '\n' ' ' <"$task/stack" | cut -c1-300)"
        done
    done
}

# Prints information about a failed scenario.
guest_report() { # mark
    local log
    guest_report_daemons 2>/dev/null
    for log in "$LAB_WORK"/*.log /run/rtrs/*.log; do
        [ -s "$log" ] || continue
        echo "   ${log##*/}, last lines:"
        tail -n 15 "$log" | cut -c1-300 | sed 's/^/   | /'
    done
    echo "   kernel log of the scenario, last lines:"
    kernel_log "$1" | tail -n 40 | sed 's/^/   | /'
}

case $1 in
    run)
        shift 2
        guest_prepare
        echo "@@ up"
        while [ $# -gt 0 ]; do
            # The next scenario needs a restored machine.
            run_scenario "$1" "$([ $# -gt 1 ] || echo last)" || break
            shift
        done
        ;;
    command | shell)
        guest_prepare
        mkdir -p "$LAB_WORK"
        topology_up 2 || exit 1
        if [ "$1" = command ]; then
            bash -c ". tests/lab/lib.sh; . $LAB_SHARE/command"
            exit
        fi
        cat <<EOF
Soft RDMA: $(rdma link | awk '{ print $2 }' | tr '\n' ' ')
Client side 10.0.0.1 10.0.1.1 (va0 va1), server side 10.0.0.2 10.0.1.2 (vb0 vb1).
rtrs-server and rtrs-client are on the PATH. The functions of tests/lab/lib.sh are loaded.
The files of the host are read-only; /tmp and /run end with the guest. Leave with exit.
EOF
        bash --rcfile tests/lab/lib.sh -i
        ;;
esac
