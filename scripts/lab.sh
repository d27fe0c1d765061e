#!/usr/bin/env bash
# The lab: virtual machines with Debian's kernel, soft RDMA devices and nbd, in which the daemons
# run as users run them. docs/explanation/lab.md explains it.
#
#   scripts/lab.sh setup [NAME|GROUP|all]
#                                      install and build the requirements, in seconds if
#                                      repeated; with names, also the other kernels of these
#                                      scenarios
#   scripts/lab.sh list [-o json]      the scenarios
#   scripts/lab.sh run NAME|GROUP|all  run scenarios; several may be named. K/N, for example
#                                      1/20, is a share of the scenarios outside the group smoke
#   scripts/lab.sh shell [COMMAND]     a root shell in a guest, or one command
#
# Environment: RTRS_LAB_LOCK is the lock that prevents two labs on one machine [default: in the
# cache], RTRS_LAB_CACHE the cache [~/.cache/rtrs-lab], RTRS_BIN_DIR a folder with daemons to use
# instead of building them.
#
# Exit codes: 0 nothing failed, 1 a scenario or step failed, 2 wrong usage, 3 setup: this machine
# cannot have a lab.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

# shellcheck source=scripts/lab-setup.sh
. scripts/lab-setup.sh
# shellcheck source=scripts/lab-run.sh
. scripts/lab-run.sh

usage() {
    [ $# -eq 0 ] || echo "lab: $*; see scripts/lab.sh --help" >&2
    exit 2
}

list() { # format
    local name format='%-18s %-4s %6s  %-14s %s\n'
    if [ "$1" = json ]; then
        if ! command -v jq >/dev/null; then
            echo "lab: list -o json needs jq; scripts/lab.sh setup installs it" >&2
            return 1
        fi
        for name in $(lab_names); do
            jq -n --arg name "$name" --arg about "$(lab_header "$name" lab)" \
                --arg topology "$(lab_header "$name" topology)" \
                --arg kernel "$(lab_header "$name" kernel)" \
                --argjson limit "$(lab_header "$name" limit)" \
                --arg groups "$(lab_header "$name" groups)" \
                '{name: $name, about: $about, topology: $topology, limit_s: $limit,
                  kernel: (if $kernel == "" then null else $kernel end),
                  groups: ($groups | split(" "))}'
        done | jq -s .
        return
    fi
    # shellcheck disable=SC2059
    printf "$format" NAME MACH LIMIT GROUPS ABOUT
    for name in $(lab_names); do
        # shellcheck disable=SC2059
        printf "$format" "$name" "$(lab_header "$name" topology)" "$(lab_header "$name" limit) s" \
            "$(lab_header "$name" groups)" "$(lab_header "$name" lab)"
    done
}

case ${1:-} in
    -h | --help)
        sed -n '2,/^set /{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
        ;;
    setup)
        shift
        lab_setup "$@"
        ;;
    list)
        case "$*" in
            list) list text ;;
            "list -o json" | "list --output json") list json ;;
            "list -o text" | "list --output text") list text ;;
            *) usage "list takes -o text or -o json" ;;
        esac
        ;;
    run)
        shift
        [ $# -gt 0 ] || usage "run what? a name of 'scripts/lab.sh list', a group, or all"
        lab_run "$@"
        ;;
    shell)
        shift
        lab_shell "$@"
        ;;
    '') usage "setup, list, run or shell?" ;;
    *) usage "unknown command '$1'; known: setup, list, run, shell" ;;
esac
