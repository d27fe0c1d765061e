#!/usr/bin/env bash
# Boots guests of the lab and runs scenarios in them. Sourced by scripts/lab.sh, which calls
# `lab_run` and `lab_shell`. A guest sees this machine's files read-only and shares one folder with
# it. Inside, tests/lab/guest.sh runs and reports to `lab_listen` in lines:
#
#   @@ up                           booted
#   @@ start NAME SECONDS_MAX       a scenario begins; later lines belong to it
#   @@ end NAME STATUS PASSED FAILED SECONDS [dirty]
#                                   STATUS is passed, failed or skipped, then its checks
#   @@ gone STATUS                  the guest has ended; written by the host
#   CELL PEER | WHAT | RESULT       for the compatibility table; kept in the file `cells`
#   CLASS NAME data|hang            kind of failure of a scenario (lab-verdict.sh)
#   KERNEL NAME FUNCTION MODULE     known kernel bug that occurred in a failed scenario
#   anything else                   shown to the user
#
# A guest that is silent beyond a limit is killed with its process group; the remaining scenarios
# run in a new guest.

# shellcheck source=tests/lab/kernel_faults.sh
. tests/lab/kernel_faults.sh

LAB_BOOT_MAX=600
# Maximum factor by which a slow guest stretches the limits of scenarios (tests/lab/guest.sh).
LAB_SLOW_MAX=8
# Time beyond a scenario's own limit for its topology, clean-up and reports.
LAB_SLACK=150
LAB_PASSED=0 LAB_FAILED=0 LAB_SKIPPED=0 LAB_FAILURES=()
LAB_CHECKS_PASSED=0 LAB_CHECKS_FAILED=0
# Maximum size of the programs that a run copies, in MiB.
LAB_BIN_MAX=200
LAB_GUESTS=()
LAB_WAITER=
LAB_SHARE=

lab_names() {
    local file
    for file in tests/lab/scenarios/*.sh rds/lab/scenarios/*.sh; do
        file=${file##*/}
        printf '%s\n' "${file%.sh}"
    done | LC_ALL=C sort
}

# Prints a value of a scenario's header, e.g. 120 for `# limit: 120`.
lab_header() { # name key
    local value
    value=$(sed -n "/^#/!q; s/^# $2: *//p" {tests,rds}/lab/scenarios/"$1.sh" 2>/dev/null |
        head -n 1)
    # The long variants idle for ten minutes.
    [ "$2" != limit ] || [ -z "${LAB_LONG:-}" ] || value=$((value + 700))
    [ -z "$value" ] || printf '%s\n' "$value"
}

# Expands names, groups, `all` and shares into names, in the order of the files, each once.
lab_select() { # word...
    local word name known groups at
    for word in "$@"; do
        known=0 at=0
        for name in $(lab_names); do
            groups=" $(lab_header "$name" groups) "
            if [ "$word" = "$name" ] || [[ $groups == *" $word "* ]]; then
                :
            elif [ "$(lab_header "$name" in-all)" = no ]; then
                continue
            elif [[ $word =~ ^[1-9][0-9]?/[1-9][0-9]?$ ]]; then
                [[ $groups != *' smoke '* ]] || continue
                at=$((at % ${word#*/} + 1))
                [ $at -eq "${word%/*}" ] || continue
            elif [ "$word" != all ]; then
                continue
            fi
            known=1
            printf '%s\n' "$name"
        done
        if [ $known -eq 0 ]; then
            echo "lab: no scenario or group is named '$word'; see scripts/lab.sh list" >&2
            return 2
        fi
    done | awk '!seen[$0]++'
}

# Prints the series of kernels that scenarios name in their headers, each once.
lab_kernels_of() { # name...
    local name
    for name in "$@"; do lab_header "$name" kernel; done | sort -Vu
}

# Builds the programs of the guest and copies them to the run's own folder, so that a later build
# does not affect running guests; the scripts are there too (lab_prepare). Sets LAB_BIN, the
# folder of the daemons, and LAB_TESTS, the test binaries (lines NAME=FILE), as the guest sees them.
lab_build() { # name...
    local from=${RTRS_BIN_DIR:-} name test file size
    LAB_TESTS=()
    if [ -z "$from" ]; then
        from=${CARGO_TARGET_DIR:-$PWD/target}/release
        lab_say "building the daemons (release)"
        cargo build --release --locked -p rtrs-server -p rtrs-client -p rds -p rds-preload ||
            return 1
    fi
    mkdir -p "$LAB_SHARE/bin"
    for name in rtrs-server rtrs-client rds librds_preload.so; do
        if ! [ -x "$from/$name" ]; then
            lab_say "FAILED: no $name in $from; build it, or leave RTRS_BIN_DIR unset"
            return 1
        fi
    done
    for file in "$from"/rtrs-* "$from/rds" "$from/librds_preload.so"; do
        [ -f "$file" ] && [ -x "$file" ] || continue
        lab_copy "$file" "${file##*/}" || return 1
    done
    LAB_BIN=/run/lab/bin LAB_BUILD=${from##*/}
    for name in "$@"; do
        file=$(lab_header "$name" sample-of)
        [ -z "$file" ] || lab_sample "$file" || return 1
        # PACKAGE/TEST, a test binary the scenario runs.
        for test in $(lab_header "$name" test-binaries); do
            lab_say "building the test binary $test"
            # Builds the whole workspace, as scripts/test.sh does: other features would require a
            # complete rebuild.
            file=$(cargo test --locked --workspace --test "${test#*/}" --no-run \
                --message-format=json 2>"$LAB_SHARE/cargo.log" |
                jq -r --arg name "${test#*/}" 'select(.profile.test == true and
                    .executable != null and .target.name == $name) | .executable' | tail -n 1)
            if [ -z "$file" ]; then
                tail -n 30 "$LAB_SHARE/cargo.log" >&2
                lab_say "FAILED: cargo cannot build $test"
                return 1
            fi
            lab_copy "$file" "test-${test#*/}" || return 1
            LAB_TESTS+=("${test#*/}=$LAB_BIN/test-${test#*/}")
        done
    done
    size=$(du -sm "$LAB_SHARE/bin" | cut -f1)
    if [ "$size" -gt $LAB_BIN_MAX ]; then
        lab_say "FAILED: the programs of this run are $size MiB, the limit is $LAB_BIN_MAX"
        return 1
    fi
}

# Makes a sample of a folder's files, taken at regular intervals, for scenarios that copy files:
# sample.tar, sample (the paths) and sample.sha256 in the run's own folder. A guest reads individual
# files of this machine so slowly that finding them would take minutes.
lab_sample() { # folder
    local files=1200 bytes=$((64 << 20))
    (cd "$1" && find . -type f -size -1024k -printf '%s\t%p\n') | sort -k 2 |
        awk -F '\t' -v files=$files -v bytes=$bytes '{ size[NR] = $1; name[NR] = $2 }
            END {
                step = NR > files ? NR / files : 1
                for (at = 1; at <= NR && sum < bytes; at += step) {
                    sum += size[int(at)]
                    print name[int(at)]
                }
            }' >"$LAB_SHARE/sample"
    tar -C "$1" --no-recursion -cf "$LAB_SHARE/sample.tar" -T "$LAB_SHARE/sample" &&
        env -C "$1" xargs -a "$LAB_SHARE/sample" -d '\n' sha256sum >"$LAB_SHARE/sample.sha256" &&
        return 0
    lab_say "FAILED: cannot copy files of $1 to $LAB_SHARE"
    return 1
}

# Copies a program without debug information, which is nine tenths of it; function names remain.
lab_copy() { # program name
    strip --strip-debug -o "$LAB_SHARE/bin/$2" "$1" && return 0
    lab_say "FAILED: cannot copy $1 to $LAB_SHARE/bin"
    return 1
}

# Writes the settings of the guest to a file in the shared folder.
lab_write_settings() {
    local test
    {
        printf 'LAB_BIN=%q\n' "$LAB_BIN"
        printf 'LAB_MODULES=%q\n' "$LAB_MODULES"
        printf 'LAB_BUILD=%q\n' "$LAB_BUILD"
        printf 'LAB_QUICK=%q\n' "${RTRS_QUICK:-}"
        printf 'LAB_LONG=%q\n' "${LAB_LONG:-}"
        printf 'LAB_FIGURES=%q\n' "${LAB_FIGURES:-}"
        printf 'LAB_RDS_TOOLS=%q\n' "${RTRS_LAB_RDS_TOOLS:-}"
        printf 'LAB_SOAK_ROUNDS=%q\n' "${RTRS_LAB_SOAK_ROUNDS:-}"
        printf 'LAB_SOAK_SEED=%q\n' "${RTRS_LAB_SOAK_SEED:-}"
        printf 'LAB_BENCH_SECONDS=%q\n' "${RTRS_LAB_BENCH_SECONDS:-}"
        printf 'LAB_BENCH_PASSES=%q\n' "${RTRS_LAB_BENCH_PASSES:-}"
        printf 'LAB_BENCH_ROWS=%q\n' "${RTRS_LAB_BENCH_ROWS:-}"
        printf 'LAB_GATEWAY_ROUNDS=%q\n' "${RTRS_LAB_GATEWAY_ROUNDS:-}"
        printf 'LAB_WAN_RTT=%q\n' "${RTRS_LAB_WAN_RTT:-}"
        printf 'LAB_WAN_LOSS=%q\n' "${RTRS_LAB_WAN_LOSS:-}"
        printf 'LAB_BENCH_PEERS=%q\n' "${RTRS_LAB_BENCH_PEERS:-}"
        printf 'declare -A LAB_TESTS=()\n'
        for test in "${LAB_TESTS[@]}"; do
            printf 'LAB_TESTS[%q]=%q\n' "${test%%=*}" "${test#*=}"
        done
    } >"$LAB_SHARE/settings"
}

# Fills LAB_VNG with the command that boots a guest.
lab_vng_command() { # role cpus memory qemu_option...
    local role=$1 cpus=$2 memory=$3
    shift 3
    LAB_VNG=(env "PATH=$LAB_VENV/bin:$PATH" vng --disable-kvm
        -r "$LAB_IMAGE" --cpus "$cpus" -m "$memory"
        --user root --cwd "$PWD" "--rwdir=/run/lab=$LAB_SHARE"
        --append=log_buf_len=4M
        # lab_nmi uses this to make a silent guest report the state of its processors.
        --append=unknown_nmi_panic --append=panic_print=0x40
        # The emulated TSC is one clock for all CPUs. Without this the kernel reads the time from
        # an emulated chip, and so does every program, by system call.
        --append=tsc=reliable
        --append=rcupdate.rcu_cpu_stall_timeout=120
        "--qemu-opts=-qmp unix:$LAB_SHARE/qmp-$role,server=on,wait=off"
        # The console keeps the last kernel messages when all other output has stopped; virtme-ng
        # would discard it.
        "--qemu-opts=-set chardev.console.path=$LAB_SHARE/console-$role.log")
    [ $# -eq 0 ] || LAB_VNG+=("--qemu-opts=$*")
}

# Starts a guest in its own process group; its lines go to $LAB_SHARE/lines, prefixed with its role.
# The guest ends after the sum of all limits even if the script was killed.
lab_boot() { # role cpus memory names qemu_option...
    local role=$1 cpus=$2 memory=$3 names=$4 name max=$((LAB_BOOT_MAX + LAB_SLACK))
    shift 4
    lab_vng_command "$role" "$cpus" "$memory" "$@"
    for name in $names; do
        max=$((max + LAB_SLOW_MAX * $(lab_header "$name" limit) + LAB_SLACK))
    done
    # shellcheck disable=SC2016
    setsid timeout -k 10 "$max" bash -c 'role=$1; shift
        "$@" </dev/null 2>&1 | sed -u "s/\r//g; s/^/$role /"
        echo "$role @@ gone ${PIPESTATUS[0]}"' - \
        "$role" "${LAB_VNG[@]}" -- "bash /run/lab/tree/tests/lab/guest.sh run $role $names" \
        >&5 5>&- 7<&- 9>&- &
    LAB_GUESTS+=($!)
}

lab_kill_guests() {
    local guest
    for guest in "${LAB_GUESTS[@]}"; do
        kill -TERM -- "-$guest" 2>/dev/null || continue
        for _ in {1..30}; do
            kill -0 -- "-$guest" 2>/dev/null || continue 2
            sleep 0.1
        done
        kill -KILL -- "-$guest" 2>/dev/null
    done
    LAB_GUESTS=()
}

lab_count() { # name status checks_passed checks_failed seconds
    local checks=$4
    # A guest that died reported no failed check.
    if [ "$2" = failed ] && [ "$checks" -eq 0 ]; then checks=1; fi
    LAB_CHECKS_PASSED=$((LAB_CHECKS_PASSED + $3))
    LAB_CHECKS_FAILED=$((LAB_CHECKS_FAILED + checks))
    case $2 in
        passed) LAB_PASSED=$((LAB_PASSED + 1)) ;;
        skipped) LAB_SKIPPED=$((LAB_SKIPPED + 1)) ;;
        *)
            LAB_FAILED=$((LAB_FAILED + 1))
            LAB_FAILURES+=("$1")
            ;;
    esac
    printf -- '-- %s: %s (checks: %s passed, %s failed; %s s)\n\n' "$1" "$2" "$3" "$checks" "$5"
}

# Makes the kernel of a silent guest panic, so that it reports the state of its processors.
lab_nmi() { # role
    timeout 30 python3 - "$LAB_SHARE/qmp-$1" <<'END'
import json, socket, sys
qemu = socket.socket(socket.AF_UNIX)
qemu.settimeout(20)
qemu.connect(sys.argv[1])
answers = qemu.makefile()
answers.readline()
for command in "qmp_capabilities", "inject-nmi":
    qemu.sendall(json.dumps({"execute": command}).encode() + b"\n")
    # Events may come before the answer.
    answer = {"event": ""}
    while "event" in answer:
        answer = json.loads(answers.readline() or '{"error": "it has ended"}')
    if "return" not in answer:
        sys.exit(f"   qemu refuses {command}: {answer}")
# QEMU exits once the kernel has panicked.
try:
    while answers.readline():
        pass
except TimeoutError:
    print("   the kernel does not panic")
END
}

# Prints the last messages of the guests' kernels and the known bugs in them. Silent kernels are
# made to panic first.
lab_last_words() { # name ended|timeout
    local role log
    for role in $LAB_ROLES; do
        log=$LAB_SHARE/console-$role.log
        [ "$2" = ended ] || lab_nmi "$role"
        [ -s "$log" ] || continue
        kernel_faults_named <"$log" | sed "s/^/KERNEL $1 /"
        echo "   kernel of the $role guest, last lines of its console:"
        tail -n 120 "$log" | tr -d '\r' | sed 's/^/   | /'
    done
}

# Begins a scenario; sets variables of lab_listen.
lab_begin() { # name seconds_max
    current=$1 ended='' worst=passed goods=0 bads=0 started=$SECONDS
    deadline=$((SECONDS + $2 + LAB_SLACK))
    echo "== $1: $(lab_header "$1" lab) (at most $2 s)"
}

# Reads the guests' lines until all guests have ended or a limit has expired. Removes completed
# scenarios from LAB_LEFT.
lab_listen() { # number_of_guests
    local guests=$1 line role word name status good bad seconds current='' booted=0 ended=''
    local deadline=$((SECONDS + LAB_BOOT_MAX)) start=$SECONDS up_at=0 started=0 worst=passed
    local goods=0 bads=0 early=''
    while :; do
        if [ $SECONDS -ge $deadline ]; then
            status=timeout
            break
        fi
        IFS= read -r -t $((deadline - SECONDS + 1)) line <&7
        case $? in
            0) role=${line%% *} line=${line#* } ;;
            1) status=ended && break ;;
            # A timeout, handled above.
            *) continue ;;
        esac
        case $line in
            '@@ up'*)
                booted=$((booted + 1))
                [ $booted -eq "$guests" ] && up_at=$((SECONDS - start)) &&
                    lab_say "guest is up after $up_at s"
                ;;
            '@@ start '*)
                read -r _ word name seconds <<<"$line"
                # In a pair the first guest to start counts; it may start while the other has yet
                # to end the previous scenario.
                if [ -z "$current" ]; then
                    lab_begin "$name" "$seconds"
                elif [ "$current" != "$name" ]; then
                    early="$name $seconds"
                fi
                ;;
            '@@ end '*)
                read -r _ word name status good bad seconds _ <<<"$line"
                ended="$ended $role" goods=$((goods + good)) bads=$((bads + bad))
                case $worst$status in
                    *failed*) worst=failed ;;
                    *skipped*) worst=skipped ;;
                esac
                if [ "$(wc -w <<<"$ended")" -eq "$guests" ]; then
                    lab_count "$name" "$worst" "$goods" "$bads" "$seconds"
                    LAB_LEFT=("${LAB_LEFT[@]:1}")
                    current=
                    deadline=$((SECONDS + LAB_SLACK))
                    # shellcheck disable=SC2086
                    [ -z "$early" ] || lab_begin $early
                    early=
                fi
                ;;
            '@@ gone '*)
                # The guest ended before its part was over: later lines of the other guest are
                # ignored.
                if [ $booted -lt "$guests" ] || { [ -n "$current" ] &&
                    [[ " $ended " != *" $role "* ]]; }; then
                    lab_say "the guest ($role) has ended, status ${line##* }"
                    status=ended
                    break
                fi
                ;;
            *)
                [[ $line != 'CELL '* ]] ||
                    printf '%s | %s\n' "${line#CELL }" "$current" >>"$LAB_SHARE/cells"
                if [ "$guests" -eq 1 ]; then printf '%s\n' "$line"; else
                    printf '%-6s %s\n' "$role" "$line"
                fi
                ;;
        esac
    done
    if [ -n "$current" ]; then
        printf 'FAIL %s: the guest %s\n' "$current" "$([ "$status" = timeout ] &&
            echo "did not finish in time and was killed" || echo "died")"
        [ "$status" != timeout ] || echo "CLASS $current hang"
        lab_last_words "$current" "$status"
        lab_count "$current" failed "$goods" "$bads" $((SECONDS - started))
        LAB_LEFT=("${LAB_LEFT[@]:1}")
    elif [ $booted -lt "$guests" ]; then
        echo "FAIL ${LAB_LEFT[0]}: the guest $([ "$status" = timeout ] &&
            echo "did not boot within $LAB_BOOT_MAX s" || echo "died at boot")"
        lab_last_words "${LAB_LEFT[0]}" "$status"
        lab_count "${LAB_LEFT[0]}" failed 0 0 $((SECONDS - start))
        LAB_LEFT=("${LAB_LEFT[@]:1}")
    fi
}

# Prints a free TCP port of 127.0.0.1.
lab_free_port() {
    python3 - <<'END'
import random, socket
# Below the ports of outgoing connections, which could take the port before the guest does.
for port in random.sample(range(10000, 32000), 1000):
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            continue
    print(port)
    break
END
}

# Two network cards, each one end of a cable; the MAC identifies the end: 52:54:00:00:PATH:END.
lab_cables() { # listen|connect end port...
    local how=$1 end=$2 path=0 port
    shift 2
    for port in "$@"; do
        printf -- '-netdev socket,id=n%d,%s=127.0.0.1:%d ' "$path" "$how" "$port"
        printf -- '-device virtio-net-pci,netdev=n%d,mac=52:54:00:00:%02x:%02x,romfile= ' \
            "$path" "$path" "$end"
        path=$((path + 1))
    done
}

# Boots one guest or a pair and runs as many scenarios of LAB_LEFT as possible.
lab_boot_once() { # topology
    local ports left=${#LAB_LEFT[@]}
    rm -rf "$LAB_SHARE"/lines "$LAB_SHARE"/console-*.log "$LAB_SHARE"/qmp-* "$LAB_SHARE/sync"
    mkdir -p "$LAB_SHARE/sync"
    mkfifo "$LAB_SHARE/lines"
    # Guests write to 5, and 7 is read; the read-write descriptor lets both be opened without
    # blocking. shellcheck disable=SC2094
    exec 6<>"$LAB_SHARE/lines" 5>"$LAB_SHARE/lines" 7<"$LAB_SHARE/lines" 6>&-
    lab_say "booting $([ "$1" = two ] && echo two guests || echo a guest)," \
        "Linux $LAB_RELEASE: ${LAB_LEFT[*]}"
    if [ "$1" = two ]; then
        LAB_ROLES="server client"
        ports="$(lab_free_port) $(lab_free_port)"
        # shellcheck disable=SC2046,SC2086
        lab_boot server 1 2G "${LAB_LEFT[*]}" $(lab_cables listen 2 $ports)
        # The other end connects once, when it starts.
        # shellcheck disable=SC2086
        lab_wait_listening $ports
        # shellcheck disable=SC2046,SC2086
        lab_boot client 1 2G "${LAB_LEFT[*]}" $(lab_cables connect 1 $ports)
    else
        LAB_ROLES=one
        lab_boot one 2 4G "${LAB_LEFT[*]}"
    fi
    # Now only guests hold the writing end, so the stream ends with them.
    exec 5>&-
    lab_listen "$(wc -w <<<"$LAB_ROLES")"
    lab_kill_guests
    exec 7<&-
    if [ ${#LAB_LEFT[@]} -eq "$left" ]; then
        echo "FAIL ${LAB_LEFT[0]}: the guest ended before it began"
        lab_last_words "${LAB_LEFT[0]}" ended
        lab_count "${LAB_LEFT[0]}" failed 0 0 0
        LAB_LEFT=("${LAB_LEFT[@]:1}")
    fi
}

# Waits until each port of 127.0.0.1 has a listener, for at most 20 s.
lab_wait_listening() { # port...
    local port
    for port in "$@"; do
        for _ in {1..100}; do
            [ -n "$(ss -Htln "sport = :$port")" ] && break
            sleep 0.2
        done
    done
}

lab_cleanup() {
    [ -z "$LAB_WAITER" ] || kill "$LAB_WAITER" 2>/dev/null
    lab_kill_guests
    if [ -n "$LAB_SHARE" ]; then
        # The logs are kept, the programs are not.
        rm -rf "$LAB_LOGS" "$LAB_SHARE/bin" "$LAB_SHARE/tree" "$LAB_SHARE"/sample*
        mkdir -p "${LAB_LOGS%/*}" && rm -f "$LAB_SHARE/lines" && mv "$LAB_SHARE" "$LAB_LOGS"
        # Logs of the last ten runs are kept.
        find "${LAB_LOGS%/*}" -mindepth 1 -maxdepth 1 -name 'run-*' | sort | head -n -10 |
            xargs -r rm -rf
    fi
    LAB_SHARE=
}

# Only one lab runs at a time, because its guests use the whole machine.
lab_take_lock() {
    local lock=${RTRS_LAB_LOCK:-$LAB_CACHE/run.lock}
    mkdir -p "${lock%/*}"
    exec 9>>"$lock"
    flock -n 9 && return 0
    lab_say "waiting for another lab on this machine ($lock)"
    # In the background, because bash handles signals only between commands or in `wait`.
    flock -w 3600 9 &
    LAB_WAITER=$!
    wait $LAB_WAITER && LAB_WAITER='' && return 0
    lab_say "FAILED: another lab has held $lock for an hour"
    return 1
}

lab_prepare() {
    LAB_SHARE=$(mktemp -d "${TMPDIR:-/tmp}/rtrs-lab.XXXXXX") || return 1
    # bash reads a script while running it, so a change would break a running guest.
    mkdir -p "$LAB_SHARE/tree/tests" "$LAB_SHARE/tree/rds" "$LAB_SHARE/tree/scripts" &&
        cp -r tests/lab "$LAB_SHARE/tree/tests/" &&
        cp -r rds/lab "$LAB_SHARE/tree/rds/" &&
        cp scripts/ceph.sh "$LAB_SHARE/tree/scripts/" || return 1
    LAB_LOGS=$LAB_CACHE/logs/run-$(date +%Y%m%d-%H%M%S)-$$
    trap lab_cleanup EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
}

lab_close() { # start
    local name
    for name in "${LAB_FAILURES[@]}"; do echo "FAILED: $name"; done
    [ $LAB_FAILED -eq 0 ] || echo "lab: logs of the guests: $LAB_LOGS"
    [ ! -e "$LAB_SHARE/bench.json" ] || echo "lab: every figure: $LAB_LOGS/bench.json"
    [ ! -e "$LAB_SHARE/cells" ] || echo "lab: cells of the compatibility table: $LAB_LOGS/cells"
    echo "lab: checks: $LAB_CHECKS_PASSED passed, $LAB_CHECKS_FAILED failed"
    echo "lab: $LAB_PASSED passed, $LAB_FAILED failed, $LAB_SKIPPED skipped in $((SECONDS - $1)) s"
    [ $LAB_FAILED -eq 0 ]
}

lab_run() { # word...
    local start=$SECONDS names missing name topology kernel
    names=$(lab_select "$@") || return 2
    if ! missing=$(lab_ready); then
        echo "SKIP: this machine has no lab; missing:"
        printf '%s\n' "$missing" | sed 's/^/  /'
        echo "hint: scripts/lab.sh setup"
        for name in $names; do echo "SKIP $name"; done
        LAB_SKIPPED=$(printf '%s\n' "$names" | wc -l)
        lab_close "$start"
        return
    fi
    lab_ready >/dev/null
    lab_prepare || return 1
    # shellcheck disable=SC2086
    if ! lab_build $names; then
        LAB_FAILED=1 LAB_FAILURES=(build) LAB_CHECKS_FAILED=1
        lab_close "$start"
        return
    fi
    lab_take_lock || return 1
    # shellcheck disable=SC2086
    for kernel in '' $(lab_kernels_of $names); do
        if ! lab_use_kernel "$kernel"; then
            # shellcheck disable=SC2086
            lab_skip_kernel "$kernel" $names
            continue
        fi
        lab_write_settings
        for topology in one two; do
            LAB_LEFT=()
            for name in $names; do
                [ "$(lab_header "$name" topology)" = "$topology" ] &&
                    [ "$(lab_header "$name" kernel)" = "$kernel" ] && LAB_LEFT+=("$name")
            done
            while [ ${#LAB_LEFT[@]} -gt 0 ]; do lab_boot_once "$topology"; done
        done
    done
    lab_close "$start"
}

# Counts the scenarios of a kernel that this machine does not have as skipped.
lab_skip_kernel() { # series name...
    local series=$1 name
    shift
    for name in "$@"; do
        [ "$(lab_header "$name" kernel)" = "$series" ] || continue
        echo "SKIP $name: no kernel $series; scripts/lab.sh setup $name"
        lab_count "$name" skipped 0 0 0
    done
}

lab_shell() { # [command]
    local missing
    if ! missing=$(lab_ready); then
        printf 'lab: not ready; missing: %s\nhint: scripts/lab.sh setup\n' "$missing" >&2
        return 1
    fi
    lab_ready >/dev/null
    lab_prepare && lab_build && lab_write_settings && lab_take_lock || return 1
    lab_vng_command one 2 4G
    if [ $# -gt 0 ]; then
        printf '%s\n' "$*" >"$LAB_SHARE/command"
        timeout --foreground -k 10 "${RTRS_LAB_SHELL_MAX:-600}" "${LAB_VNG[@]}" -- \
            "bash /run/lab/tree/tests/lab/guest.sh command" </dev/null
    elif [ -t 0 ]; then
        "${LAB_VNG[@]}" -- "bash /run/lab/tree/tests/lab/guest.sh shell"
    else
        lab_say "a shell needs a terminal; without one: scripts/lab.sh shell 'COMMAND'"
        return 1
    fi
}
