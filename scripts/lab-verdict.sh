#!/usr/bin/env bash
# Which failed scenarios of the lab may be run once more. Sourced by scripts/test.sh.
#
# The kernel in the guests has faults of its own that strike at random (docs/TESTING.md, "A second
# try"): a path that does not come back, a module that does not end. What our users fear is never
# tried again, however rare it is: data that is not what was written, and IO or a scenario that does
# not end. A failure says that it is one of these in a line of its own,
#
#   CLASS NAME data|hang
#
# which tests/lab/lib.sh prints. A guest that is killed may not come to it, so the words of such
# failures are looked for besides, in what the scenario said.

# Words that no scenario says unless data differ or something hangs.
LAB_NO_SECOND_TRY='verify: bad|verify failed|bad magic header|did not end within'
LAB_NO_SECOND_TRY+='|did not end it in time|blocked for more than|detected stall'

# Of the log of a run, the failed scenarios, one a line.
lab_failed() { # log
    sed -n 's/^FAILED: //p' "$1"
}

# What a scenario said, from its head line to its verdict.
lab_section() { # log name
    awk -v name="$2" '
        index($0, "== " name ": ") == 1 { inside = 1 }
        inside { print }
        index($0, "-- " name ": ") == 1 { inside = 0 }
        index($0, "FAIL " name ": ") == 1 && !inside { print }
    ' "$1"
}

# Why a failed scenario must not be run again; nothing when it may.
lab_no_second_try() { # log name
    local words
    words=$(sed -nE "s/^([a-z]+ +)?CLASS $2 (data|hang)\$/\2/p" "$1" | sort -u | xargs)
    if [ -z "$words" ]; then
        words=$(lab_section "$1" "$2" | grep -Eom 1 "$LAB_NO_SECOND_TRY")
    fi
    [ -z "$words" ] || echo "$words"
}

# The scenarios to be run once more, in a line; nothing when none may. One that must not be takes
# the others with it: the run has failed. Says on stderr why not.
lab_second_try() { # log
    local names name why
    names=$(lab_failed "$1" | xargs)
    case $(wc -w <<<"$names") in
        1 | 2) ;;
        *) return 0 ;;
    esac
    # Programs that do not build.
    [ "$names" != build ] || return 0
    for name in $names; do
        why=$(lab_no_second_try "$1" "$name")
        if [ -n "$why" ]; then
            echo "NO SECOND TRY: $name: $why" >&2
            return 0
        fi
    done
    echo "$names"
}
