#!/usr/bin/env bash
# Prints the bench table: compares this project with nbdkit, qemu-nbd and nbd-server on the same
# file with the same fio jobs. Installs what is missing, builds the release binaries, then calls
# bench.py, which takes all the options: scripts/bench.sh --help. With --rtt or --loss, lists such
# as 0.2ms,20ms and 0,0.01%, it compares block devices over such a link in a guest of the lab,
# because only the lab has netem.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Help and list need neither packages nor a build.
for arg in "$@"; do
    case $arg in
        -h | --help | --list) exec python3 scripts/bench.py "$@" ;;
    esac
done

case " $* " in
    *" --rtt"* | *" --loss"*)
        while [ $# -gt 0 ]; do
            case $1 in
                --rtt | --loss | --rounds | --runtime)
                    [ $# -ge 2 ] || { echo "bench: $1 needs a value" >&2 && exit 2; }
                    value=${2//,/ }
                    case $1 in
                        --rtt) export RTRS_LAB_WAN_RTT=$value ;;
                        --loss) export RTRS_LAB_WAN_LOSS=$value ;;
                        --rounds) export RTRS_LAB_BENCH_PASSES=$value ;;
                        --runtime) export RTRS_LAB_BENCH_SECONDS=$value ;;
                    esac
                    shift 2
                    ;;
                *)
                    echo "bench: $1 cannot be used with --rtt or --loss" >&2
                    exit 2
                    ;;
            esac
        done
        for value in ${RTRS_LAB_WAN_RTT:-}; do
            [[ $value =~ ^[0-9]+(\.[0-9]+)?ms$ ]] && continue
            echo "bench: --rtt $value is not a round trip time; use for example 0.2ms,20ms" >&2
            exit 2
        done
        for value in ${RTRS_LAB_WAN_LOSS:-}; do
            [[ $value =~ ^[0-9]+(\.[0-9]+)?%?$ ]] && continue
            echo "bench: --loss $value is not a percentage; use for example 0,0.01%" >&2
            exit 2
        done
        scripts/lab.sh setup && exec scripts/lab.sh run wan
        ;;
esac

# shellcheck source=scripts/deps.sh
. scripts/deps.sh
target=${CARGO_TARGET_DIR:-target}
case " $* " in
    *" --peers-only "* | *" --bin-dir"*) ;;
    *)
        echo "bench: building the release binaries" >&2
        cargo build --release --locked --bin rtrs-server --bin rtrs-client >&2
        ;;
esac
exec python3 scripts/bench.py --bin-dir "$target/release" "$@"
