#!/usr/bin/env bash
# Which failed scenarios of the lab may be run once more. Sourced by scripts/test.sh.
#
# A failure is a failure, however rare. The one exception is a known fault of the guest's kernel
# (tests/lab/kernel_faults.sh) that the guest's own log shows during the scenario. The lab says so
# in a line of its own:
#
#   KERNEL NAME FUNCTION MODULE
#
# Data that is not what was written is never excused. The lab marks it, too:
#
#   CLASS NAME data
#
# A guest that is killed may not come to it, so the words of such failures are looked for besides,
# in what the scenario said.

# Words that no scenario says unless data differ.
LAB_DATA_WORDS='verify: bad|verify failed|bad magic header'

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

# The known faults of the kernel that struck in a failed scenario, in a line; of a pair, of either.
lab_kernel_faults() { # log name
    sed -nE "s/^([a-z]+ +)?KERNEL $2 ([^ ]+ [^ ]+)\$/\2/p" "$1" | sort -u | paste -sd, -
}

# Whether data differed in a failed scenario.
lab_data_differed() { # log name
    grep -Eq "^([a-z]+ +)?CLASS $2 data\$" "$1" ||
        lab_section "$1" "$2" | grep -Eq "$LAB_DATA_WORDS"
}

# The scenarios to be run once more, in a line; nothing when none may. One that must not be takes
# the others with it: the run has failed. Says on stderr why.
lab_second_try() { # log
    local name names faults why=
    names=$(lab_failed "$1" | xargs)
    for name in $names; do
        faults=$(lab_kernel_faults "$1" "$name")
        if [ -z "$faults" ] || lab_data_differed "$1" "$name"; then
            [ -z "$faults" ] || echo "NO SECOND TRY: $name: data differ, beside $faults" >&2
            return 0
        fi
        why="$why; $name: $faults"
    done
    [ -z "$names" ] || echo "KERNEL FAULT: ${why#; }" >&2
    echo "$names"
}
