#!/usr/bin/env bash
# Decides which failed scenarios of the lab may be repeated. Sourced by scripts/test.sh.
#
# A failure counts however rare it is. The only exception is a known bug of the guest's kernel
# (tests/lab/kernel_faults.sh) that the guest's own log shows during the scenario. The lab reports
# it in a separate line:
#
#   KERNEL NAME FUNCTION MODULE
#
# Wrong data is never excused. The lab marks it, too:
#
#   CLASS NAME data
#
# A guest that is killed may not get to print that line, so the output of the scenario is also
# searched for the text of such failures.

# Text that scenarios print only if data differ.
LAB_DATA_WORDS='verify: bad|verify failed|bad magic header'

# Prints the failed scenarios from the log of a run, one per line.
lab_failed() { # log
    sed -n 's/^FAILED: //p' "$1"
}

# Prints the output of a scenario, from its first line to its verdict.
lab_section() { # log name
    awk -v name="$2" '
        index($0, "== " name ": ") == 1 { inside = 1 }
        inside { print }
        index($0, "-- " name ": ") == 1 { inside = 0 }
        index($0, "FAIL " name ": ") == 1 && !inside { print }
    ' "$1"
}

# Prints the known kernel bugs of a failed scenario in one line; for a pair, those of either guest.
lab_kernel_faults() { # log name
    sed -nE "s/^([a-z]+ +)?KERNEL $2 ([^ ]+ [^ ]+)\$/\2/p" "$1" | sort -u | paste -sd, -
}

# Returns whether data differed in a failed scenario.
lab_data_differed() { # log name
    grep -Eq "^([a-z]+ +)?CLASS $2 data\$" "$1" ||
        lab_section "$1" "$2" | grep -Eq "$LAB_DATA_WORDS"
}

# Prints the scenarios to repeat in one line, or nothing. If one must not be repeated, none is,
# because the run has failed anyway. Prints the reasons on stderr.
lab_second_try() { # log
    local name names faults why=
    names=$(lab_failed "$1" | xargs)
    for name in $names; do
        faults=$(lab_kernel_faults "$1" "$name")
        if [ -z "$faults" ] || lab_data_differed "$1" "$name"; then
            [ -z "$faults" ] || echo "NO SECOND TRY: $name: data differ, besides $faults" >&2
            return 0
        fi
        why="$why; $name: $faults"
    done
    [ -z "$names" ] || echo "KERNEL FAULT: ${why#; }" >&2
    echo "$names"
}
