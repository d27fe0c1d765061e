#!/usr/bin/env bash
# Compares the speed of this project with other programs: scripts/bench.sh [NAME] [OPTION...].
# --help lists the comparisons (default: peers), NAME --help the options of one. Installs what is
# missing and builds the release binaries, unless --bin-dir or RTRS_BIN_DIR names their directory.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case " $* " in
    *" -h "* | *" --help "* | *" --list "* | *" --rtt"* | *" --loss"*) ;;
    *)
        # shellcheck source=scripts/deps.sh
        . scripts/deps.sh
        ;;
esac
exec python3 scripts/bench "$@"
