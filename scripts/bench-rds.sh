#!/usr/bin/env bash
# Compares RDS over loopback with plain TCP: scripts/bench-rds.sh [SECONDS [ROUNDS]] (default: 3 5),
# or with the options that scripts/bench.sh rds --help lists.
set -euo pipefail

if [[ ${1-} =~ ^[0-9]+$ ]]; then
    set -- --runtime "$1" --rounds "${2:-5}" "${@:3}"
fi
exec "${BASH_SOURCE[0]%/*}/bench.sh" rds "$@"
