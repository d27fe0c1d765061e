#!/usr/bin/env bash
# Shows that scripts/lab-verdict.sh tells failures that may be tried again from those that may not,
# and that the checks of tests/lab/lib.sh say which they are. Made-up logs, no guest. Called by
# scripts/test.sh. Exit 0 if all is as it should be.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
# shellcheck source=scripts/lab-verdict.sh
. scripts/lab-verdict.sh

scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
wrong=0

# The log on stdin; what lab_second_try gives.
second_try() { # text wanted
    local found
    cat >"$scratch/log"
    found=$(lab_second_try "$scratch/log" 2>"$scratch/why")
    [ "$found" = "$2" ] && return
    echo "lab-verdict: $1: found '$found', wanted '$2'"
    wrong=1
}

second_try 'a path that did not come back' 'two-paths' <<'END'
== two-paths: fio (at most 200 s)
PASS two-paths: it attaches [1 s]
FAIL two-paths: both paths are connected [61 s]
   not within 60 s: are_connected vol 2
-- two-paths: failed (checks: 1 passed, 1 failed; 62 s)
FAILED: two-paths
lab: checks: 1 passed, 1 failed
END
second_try 'two of them' 'fs mixed' <<'END'
== fs: x (at most 1 s)
FAIL fs: it attaches [1 s]
-- fs: failed (checks: 0 passed, 1 failed; 2 s)
== mixed: x (at most 1 s)
FAIL mixed: it attaches [1 s]
-- mixed: failed (checks: 0 passed, 1 failed; 2 s)
FAILED: fs
FAILED: mixed
END
second_try 'three are too many' '' <<'END'
FAILED: fs
FAILED: mixed
FAILED: ipv6
END
second_try 'none failed' '' <<<'lab: checks: 5 passed, 0 failed'
second_try 'what does not build' '' <<<'FAILED: build'
second_try 'data' '' <<'END'
== fs: x (at most 1 s)
FAIL fs: the checksums are equal [1 s]
CLASS fs data
-- fs: failed (checks: 0 passed, 1 failed; 2 s)
FAILED: fs
END
second_try 'a hang in one of two guests' '' <<'END'
== two-guests: x (at most 1 s)
client CLASS two-guests hang
-- two-guests: failed (checks: 0 passed, 1 failed; 2 s)
FAILED: two-guests
END
second_try 'data in one of two scenarios' '' <<'END'
== fs: x (at most 1 s)
CLASS fs data
-- fs: failed (checks: 0 passed, 1 failed; 2 s)
FAILED: fs
FAILED: mixed
END
second_try 'the class of another scenario, which passed' 'mixed' <<'END'
CLASS mixed-two data
FAILED: mixed
END
second_try 'fio without a class' '' <<'END'
== mixed: x (at most 1 s)
FAIL mixed: fio reads back what it wrote [9 s]
   | verify: bad magic header 0, wanted acca at file /dev/nbd0 offset 4096, length 4096
-- mixed: failed (checks: 1 passed, 1 failed; 9 s)
FAILED: mixed
END
second_try 'a guest that was killed' '' <<'END'
== mixed: x (at most 1 s)
FAIL mixed: the guest did not end it in time and was killed
-- mixed: failed (checks: 1 passed, 1 failed; 9 s)
FAILED: mixed
END
second_try 'a scenario over its limit' '' <<'END'
== mixed: x (at most 1 s)
FAIL mixed: did not end within 1 s
-- mixed: failed (checks: 1 passed, 1 failed; 9 s)
FAILED: mixed
END
second_try 'the words of another scenario, which passed' 'mixed' <<'END'
== fs: x (at most 1 s)
   verify: bad magic header 0, as it should be
-- fs: passed (checks: 1 passed, 0 failed; 9 s)
== mixed: x (at most 1 s)
FAIL mixed: it attaches [1 s]
-- mixed: failed (checks: 0 passed, 1 failed; 2 s)
FAILED: mixed
END
second_try 'a guest that did not boot' 'mixed' <<'END'
FAIL mixed: the guest did not boot within 180 s
-- mixed: failed (checks: 0 passed, 1 failed; 180 s)
FAILED: mixed
END

# What the checks of a scenario say. The functions are those of the guest.
classes() { # text wanted command...
    local text=$1 wanted=$2 found
    shift 2
    found=$(
        LAB_SHARE=$scratch LAB_NAME=made-up
        printf 'LAB_BIN=/bin\n' >"$scratch/settings"
        # shellcheck source=tests/lab/lib.sh
        . tests/lab/lib.sh
        LAB_HOME=$scratch/home LAB_WORK=$scratch
        rm -rf "$LAB_HOME" && mkdir "$LAB_HOME" && : >"$LAB_HOME/classes"
        "$@"
    )
    found=$(sed -n 's/^CLASS made-up //p' <<<"$found" | xargs)
    [ "$found" = "$wanted" ] && return
    echo "lab-verdict: class of $text: found '$found', wanted '$wanted'"
    wrong=1
}

compared_in_a_pipe() { echo a | cmp - <(echo b); }
# A made-up fio: its words and its status.
fio_says() { # status words
    printf '%s\n' "$2" >"$LAB_WORK/fio.log"
    fio_class "$1" "$LAB_WORK/fio.log"
    expect_eq "fio reads back what it wrote" "$1" 0
}
equal_before_another_fails() {
    expect_false "they differ" cmp <(echo a) <(echo b)
    expect_true "something else" false
}

classes 'files that differ' data expect_true x cmp <(echo a) <(echo b)
classes 'sums that differ' data expect_true x timeout 60 env -C / sha256sum --check /dev/null
classes 'a file system that is not clean' data expect_true x timeout 60 e2fsck -fn /dev/null
classes 'a comparison in a pipe' data expect_true x compared_in_a_pipe
classes 'a difference that was wanted' '' equal_before_another_fails
classes 'another command' '' expect_true x timeout 60 false
classes 'a value that is about data' data expect_eq x 1 2 data
classes 'another value' '' expect_eq x 1 2
classes 'what passes' '' expect_eq x 1 1 data
classes 'fio that finds other data' data fio_says 84 'verify: bad magic header 0, wanted acca'
classes 'fio whose sum is wrong' data fio_says 1 'crc32c: verify failed at file /dev/nbd0 offset 0'
classes 'fio that says so in its JSON' data fio_says 1 '      "error" : 84,'
classes 'fio that met an IO error' '' fio_says 5 '      "error" : 5,'
classes 'fio that hangs' hang fio_says 124 ''
classes 'fio that was told to end' '' fio_says 128 ''

[ $wrong -eq 0 ] && echo "lab-verdict: all as it should be"
exit $wrong
