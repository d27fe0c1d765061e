#!/usr/bin/env bash
# Functions for the lab's scenarios. Sourced in the guest, in the root of the source tree.
#
# A failed assert_* ends the scenario; a failed expect_* continues and fails the scenario at its
# end. Both print a PASS or FAIL line with their first argument and the time since the start. Every
# wait has a bound. Addresses: client 10.0.PATH.1, server 10.0.PATH.2.

LAB_HOME=/run/lab-home LAB_WORK=/run/lab-work
LAB_SHARE=${LAB_SHARE:-/run/lab} LAB_ROLE=${LAB_ROLE:-one} LAB_NAME=${LAB_NAME:-shell}
export HOME=$LAB_HOME XDG_RUNTIME_DIR=$LAB_HOME
# shellcheck disable=SC1091
. "$LAB_SHARE/settings"
export PATH=$LAB_BIN:$PATH:/usr/sbin:/sbin

# Factor by which this guest is slower than an idle machine (measured by guest.sh); all time limits
# of waits are multiplied by it.
export LAB_SLOW=${LAB_SLOW:-1}

# The program `timeout` with its time limit stretched for this guest. If another program runs it
# (`xargs timeout`), the limit is not stretched.
timeout() { # [-k SECONDS] seconds_max command...
    local flags=()
    [ "$1" != -k ] || { flags=(-k "$2") && shift 2; }
    command timeout "${flags[@]}" $(($1 * LAB_SLOW)) "${@:2}"
}

# --- verdicts ---

pass() { # text
    echo "PASS $LAB_NAME: $1 [$SECONDS s]"
    echo passed >>"$LAB_HOME/checks"
}

fail() { # text [detail] [class]
    echo "FAIL $LAB_NAME: $1 [$SECONDS s]"
    [ -z "${2:-}" ] || printf '%s\n' "$2" | head -n 30 | cut -c1-300 | sed 's/^/   /'
    echo failed >>"$LAB_HOME/checks"
    [ -z "${3:-}" ] || class "$3"
    show_classes
    return 1
}

# Records the class of the failure: `data` if data is wrong, `hang` if something never ended. A bug
# in the guest's kernel never excuses `data` (scripts/lab-verdict.sh). Shown once the scenario has
# failed.
class() { # data|hang
    echo "$1" >>"$LAB_HOME/classes"
}

show_classes() {
    [ -s "$LAB_HOME/classes" ] || return 0
    sort -u "$LAB_HOME/classes" | sed "s/^/CLASS $LAB_NAME /"
}

# Prints the class of a failed command that compares data.
class_of() { # command...
    while [ $# -gt 0 ]; do
        case $1 in
            cmp | diff | sha256sum | md5sum | e2fsck | xfs_repair) class data && return ;;
            timeout | env | -* | *=* | [0-9]* | /*) shift ;;
            *) return ;;
        esac
    done
}

# Wrapper for scenario functions that compare in a pipe.
cmp() {
    command cmp "$@" && return 0
    class data
    return 1
}

note() { # text
    echo "   $*"
}

# Ends the scenario and counts it as skipped.
skip() { # reason
    echo "SKIP $LAB_NAME: $1"
    exit 77
}

expect_eq() { # text found wanted [class]
    if [ "$2" = "$3" ]; then pass "$1"; else fail "$1" "found '$2', wanted '$3'" "${4:-}"; fi
}

# Compares integers with an operator of [ ]: -gt, -ge, -lt, -le.
expect_num() { # text found operator wanted
    if [[ $2 =~ ^-?[0-9]+$ ]] && test "$2" "$3" "$4"; then pass "$1 ($2)"; else
        fail "$1" "found '$2', wanted $3 $4"
    fi
}

# Runs a command that must succeed; its output is shown if it fails.
expect_true() { # text command...
    local text=$1 out=$LAB_HOME/out status
    shift
    # No subshell: variables and processes of the command belong to the scenario.
    "$@" >"$out" 2>&1 </dev/null
    status=$?
    if [ $status -eq 0 ]; then pass "$text"; else
        class_of "$@"
        fail "$text" "status $status of: $*
$(tail -n 20 "$out")"
    fi
}

expect_false() { # text command...
    local text=$1 out=$LAB_HOME/out status classes
    shift
    classes=$(cat "$LAB_HOME/classes" 2>/dev/null)
    "$@" >"$out" 2>&1 </dev/null
    status=$?
    # An expected failure has no class.
    printf '%s' "${classes:+$classes$'\n'}" >"$LAB_HOME/classes"
    if [ $status -eq 0 ]; then fail "$text" "succeeded: $*
$(tail -n 20 "$out")"; else pass "$text"; fi
}


expect_match() { # text found regex
    if [[ $2 =~ $3 ]]; then pass "$1"; else fail "$1" "found '$2', wanted /$3/"; fi
}

assert_eq() { expect_eq "$@" || exit 1; }
assert_num() { expect_num "$@" || exit 1; }
assert_true() { expect_true "$@" || exit 1; }
assert_false() { expect_false "$@" || exit 1; }
assert_match() { expect_match "$@" || exit 1; }

# Reports a cell of the compatibility table, covering the checks since the previous cell or the
# start of the scenario. PEER is kernel-client or kernel-server. scripts/interop-table.sh generates
# the table.
LAB_CELL_CHECKS=0
cell() { # peer what [result]
    local result=${3:-works} since
    since=$(tail -n "+$((LAB_CELL_CHECKS + 1))" "$LAB_HOME/checks")
    LAB_CELL_CHECKS=$(wc -l <"$LAB_HOME/checks")
    # A cell without checks would have no result.
    [ -n "$since" ] || fail "the cell '$2' has checks"
    case $since in
        '' | *failed*) result=FAILED ;;
    esac
    echo "CELL $1 | $2 | $result"
}

# --- waiting ---

# Repeats a command until it succeeds.
wait_until() { # seconds_max what command...
    local deadline=$((SECONDS + $1 * LAB_SLOW)) what=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        if [ $SECONDS -ge $deadline ]; then
            echo "timed out waiting for $what" >&2
            return 1
        fi
        sleep 0.1
    done
}

assert_within() { # seconds_max text command...
    local seconds_max=$1 text=$2
    shift 2
    if wait_until "$seconds_max" "$text" "$@"; then pass "$text"; else
        fail "$text" "not within $((seconds_max * LAB_SLOW)) s: $*"
        exit 1
    fi
}

# Signals between the two guests of a pair.
signal() { # word
    : >"$LAB_SHARE/sync/$1"
}

await() { # word seconds_max
    wait_until "$2" "the other guest's signal '$1'" test -e "$LAB_SHARE/sync/$1"
}

other_role() {
    if [ "$LAB_ROLE" = client ]; then echo server; else echo client; fi
}

# Signals of this scenario. `hear` ends the scenario if the other guest ends before sending the
# signal.
tell() { # word
    signal "$LAB_NAME.word.$1"
}

hear() { # word seconds_max
    local word=$LAB_SHARE/sync/$LAB_NAME.word.$1 over
    over=$LAB_SHARE/sync/$LAB_NAME.$(other_role).over
    if ! wait_until "$2" "the signal $1" eval "test -e '$word' || test -e '$over'" ||
        [ ! -e "$word" ]; then
        fail "the other guest reaches '$1' within $(($2 * LAB_SLOW)) s"
        exit 1
    fi
}

# --- our daemons ---

# Starts rtrs-server and waits until it listens; its pid is LAB_SERVER, its log is server.log.
start_server() { # argument...
    # Without the output of an earlier server.
    : >"$LAB_WORK/server.out"
    # The guest itself decides who can reach the server.
    rtrs-server --insecure-open "$@" >"$LAB_WORK/server.out" 2>>"$LAB_WORK/server.log" </dev/null &
    LAB_SERVER=$!
    wait_until 30 "rtrs-server $* to listen" server_listens \
        "$(printf '%s\n' "$@" | grep -c -e '^--listen')" || {
        fail "rtrs-server listens" "$(tail -n 5 "$LAB_WORK/server.log")"
        exit 1
    }
}

server_listens() { # portals
    [ "$(grep -c '^listening on ' "$LAB_WORK/server.out")" -ge "$(($1 > 0 ? $1 : 1))" ]
}

# Sends SIGTERM to the server, and returns its exit status.
stop_server() {
    local tries
    kill -TERM "$LAB_SERVER" || return 1
    for ((tries = 0; tries < 200 * LAB_SLOW; tries++)); do
        if ! kill -0 "$LAB_SERVER" 2>/dev/null; then
            wait "$LAB_SERVER"
            return
        fi
        sleep 0.1
    done
    echo "rtrs-server does not end within $((tries / 10)) s of SIGTERM"
    return 1
}

# Runs rtrs-client attach with a time limit. Its output goes to attach.out; the session's log is
# /run/rtrs/NAME.log. Heartbeats are given more time than by default, so that delays of the
# emulation do not end a path.
attach() { # name argument...
    timeout 90 rtrs-client attach "$@" --heartbeat "${LAB_HEARTBEAT_MS:-$((2000 * LAB_SLOW))}ms" \
        >"$LAB_WORK/attach.out" 2>&1 </dev/null || {
        tail -n 5 "$LAB_WORK/attach.out"
        return 1
    }
}

detach() { # name argument...
    local pid
    pid=$(client_pid "$1")
    timeout 90 rtrs-client detach "$@" || return 1
    wait_until 20 "the process of $1 to end" eval "! kill -0 $pid"
}

client_json() { # status|stats name jq_expression
    timeout 20 rtrs-client "$1" "$2" -o json | jq -r "$3"
}

client_pid() { # name
    client_json status "$1" .pid
}

# Prints the number of connected paths of a session.
connected() { # name
    client_json status "$1" '[.paths[] | select(.state == "connected")] | length'
}

are_connected() { # name number
    [ "$(connected "$1")" = "$2" ]
}

# Prints a counter of a path, e.g. requests, answers, errors.
path_stat() { # name path attribute
    client_json stats "$1" ".paths[$2].$3"
}

# --- kernel ---

# Loads a module that the lab has built, or one of the kernel package.
load() { # module setting...
    local module=$1
    shift
    if [ -e "$LAB_MODULES/$module.ko" ]; then
        insmod "$LAB_MODULES/$module.ko" "$@"
    else
        modprobe "$module" "$@"
    fi
}

loaded() { # module
    [ -d "/sys/module/${1//-/_}" ]
}

# Starts the kernel's server by loading its modules. It occupies the port. Settings are module
# parameters, e.g. always_invalidate=N.
kernel_server() { # port setting...
    local port=$1
    shift
    loaded rtrs-core || load rtrs-core || return 1
    loaded rtrs-server || load rtrs-server "$@" || return 1
    loaded rnbd-server || load rnbd-server "port_nr=$port"
}

# Unloads the kernel's server, even with clients connected.
kernel_server_gone() {
    local module
    for module in rnbd_server rtrs_server; do
        ! loaded $module || timeout 60 rmmod $module || return 1
    done
}

# Maps a device on the kernel's client and prints the block device. Arguments are those of
# map_device.
kernel_map() { # argument...
    local module sysfs=/sys/devices/virtual/rnbd-client/ctl before
    for module in rtrs-core rtrs-client rnbd-client; do
        loaded $module || load $module || return 1
    done
    before=$(find /sys/block -name 'rnbd*')
    timeout 60 tee "$sysfs/map_device" <<<"$*" >/dev/null || return 1
    find /sys/block -name 'rnbd*' -printf '%f\n' | grep -vxF "${before//\/sys\/block\//}"
}

kernel_unmap() { # device
    timeout 60 tee "/sys/block/$1/rnbd/unmap_device" <<<normal >/dev/null
}

# Serves a disk with the kernel's NVMe target.
nvmet_up() { # rdma|tcp address port name device
    local root=/sys/kernel/config/nvmet system port
    modprobe "nvmet-$1" || return 1
    system=$root/subsystems/$4 port=$root/ports/$3
    mkdir -p "$system/namespaces/1" "$port" && echo 1 >"$system/attr_allow_any_host" &&
        echo "$5" >"$system/namespaces/1/device_path" && echo 1 >"$system/namespaces/1/enable" &&
        echo ipv4 >"$port/addr_adrfam" && echo "$1" >"$port/addr_trtype" &&
        echo "$2" >"$port/addr_traddr" && echo "$3" >"$port/addr_trsvcid" &&
        ln -s "$system" "$port/subsystems/$4"
}

# Removes the exports that nvmet_up added to the kernel's NVMe target.
nvmet_down() {
    local root=/sys/kernel/config/nvmet item
    [ -d "$root" ] || return 0
    for item in "$root"/ports/*/subsystems/*; do [ -e "$item" ] && rm "$item"; done
    for item in "$root"/ports/*; do [ -d "$item" ] && rmdir "$item"; done
    for item in "$root"/subsystems/*/namespaces/*; do
        [ -d "$item" ] && echo 0 >"$item/enable" && rmdir "$item"
    done
    for item in "$root"/subsystems/*; do [ -d "$item" ] && rmdir "$item"; done
}

# --- soft RDMA ---

# Prints a counter of a device since the scenario began, e.g. sent_pkts.
rxe_counter() { # device counter
    local file=/sys/class/infiniband/$1/ports/1/hw_counters/$2 before
    before=$(grep -sF "$file:" "$LAB_HOME/counters" | cut -d: -f2)
    echo $(($(cat "$file") - ${before:-0}))
}

# Prints the number of objects of a kind (qp, cm_id, mr, pd, cq) on all devices.
rdma_count() { # kind
    rdma resource show "$1" | wc -l
}

# Prints the packet numbers of each connection of a device as "QP PSN" lines. A connection has two
# queue pairs for one of the peer's; the second only binds windows and never sends.
rxe_sent() { # device
    rdma resource show qp link "$1" -d |
        sed -n 's/.* lqpn \([0-9]*\) rqpn \([0-9]*\) .*type RC .* sq-psn \([0-9]*\) .*/\2 \1 \3/p' |
        sort -n -k1,1 -k2,2 | awk '!seen[$1]++ { print $2, $3 }' | sort
}

# Prints the number of objects of each kind that user processes hold on all devices.
rdma_objects() {
    local kind
    for kind in qp cq pd mr cm_id; do
        rdma resource show $kind | grep ' pid ' | grep -vc 'comm \['
    done | xargs
}

# --- disks ---

# Creates a disk in memory with sectors of 512 bytes.
brd_disk() { # mebibytes
    modprobe brd rd_nr=1 "rd_size=$(($1 * 1024))" max_part=0 &&
        wait_until 10 /dev/ram0 test -b /dev/ram0 && echo /dev/ram0
}

sysfs_queue() { # device attribute
    cat "/sys/block/${1#/dev/}/queue/$2"
}

# --- fio ---

# Runs fio with a time limit; its JSON goes to $LAB_WORK/NAME.json, its messages to NAME.log. fio
# fails if a block is wrong.
fio_run() { # name seconds_max argument...
    local name=$1 seconds_max=$2 status
    shift 2
    timeout -k 5 "$seconds_max" fio --name="$name" --output-format=json \
        --output="$LAB_WORK/$name.json" --group_reporting --verify_state_save=0 "$@" \
        >"$LAB_WORK/fio-$name.log" 2>&1
    status=$?
    fio_class $status "$LAB_WORK/$name.json" "$LAB_WORK/fio-$name.log"
    return $status
}

# Classifies a failure of fio as wrong data or a hang, by its status and messages.
fio_class() { # status file...
    case $1 in
        0 | 128) return 0 ;;
        124 | 137) class hang ;;
    esac
    shift
    # 84 is EILSEQ, which fio reports for a wrong block.
    if grep -Eqs 'verify: bad|verify failed|bad magic header|"error" : 84,' "$@"; then
        class data
    fi
    return 0
}

fio_value() { # name jq_expression
    # fio may print remarks first.
    sed -n '/^{/,$p' "$LAB_WORK/$1.json" | jq -r "$2"
}
