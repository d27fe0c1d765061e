#!/usr/bin/env bash
# Generates the table of compatibility with Linux from the cells that lab scenarios report (`cell`
# in tests/lab/lib.sh): a row for each feature, a column for each peer.
#
#   scripts/interop-table.sh [FILE...]           print the table
#   scripts/interop-table.sh --write [FILE...]   write the table to docs/PROTOCOL.md
#
# FILE is `cells` in the log folder of a run [default: from the newest run that has the file]. Later
# files override earlier ones. Exit codes: 0 good, 1 no cells or a failed cell, 2 wrong usage.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

document=docs/PROTOCOL.md
begin='<!-- by scripts/interop-table.sh -->' end='<!-- end of the table -->'
write=0
case ${1:-} in
    -h | --help) exec sed -n '2,/^set /{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" ;;
    --write) write=1 && shift ;;
    -*) echo "interop-table: unknown flag '$1'; see --help" >&2 && exit 2 ;;
esac
if [ $# -eq 0 ]; then
    logs=${RTRS_LAB_CACHE:-$HOME/.cache/rtrs-lab}/logs
    newest=$(find "$logs" -name cells -printf '%T@ %p\n' 2>/dev/null | sort -n | tail -n 1)
    if [ -z "$newest" ]; then
        echo "interop-table: no run in $logs has cells; scripts/lab.sh run interop" >&2
        exit 1
    fi
    set -- "${newest#* }"
fi
for file in "$@"; do
    [ -r "$file" ] || { echo "interop-table: '$file' cannot be read" >&2 && exit 2; }
done

table=$(awk -F ' [|] ' '
    NF >= 3 {
        if (!($2 in row)) { row[$2] = ++rows; name[rows] = $2 }
        result[$1, row[$2]] = $3
    }
    END {
        print "| | kernel client, our server | our client, kernel server |"
        print "|---|---|---|"
        for (at = 1; at <= rows; at++)
            print "| " name[at] " | " result["kernel-client", at] " | " \
                result["kernel-server", at] " |"
    }' "$@" | sed 's/|  |/| |/g')
if [ "$(wc -l <<<"$table")" -le 2 ]; then
    echo "interop-table: no cells in $*" >&2
    exit 1
fi
printf '%s\n' "$table"
if grep -q FAILED <<<"$table"; then
    echo "interop-table: some cells failed" >&2
    exit 1
fi
[ $write -eq 1 ] || exit 0
if ! grep -qxF "$begin" "$document" || ! grep -qxF "$end" "$document"; then
    echo "interop-table: $document lacks the lines '$begin' and '$end'" >&2
    exit 1
fi
new=$(awk -v begin="$begin" -v end="$end" -v table="$table" '
    $0 == end { inside = 0 }
    !inside { print }
    $0 == begin { inside = 1; print table }' "$document") || exit 1
printf '%s\n' "$new" >"$document"
