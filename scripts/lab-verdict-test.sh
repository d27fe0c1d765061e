#!/usr/bin/env bash
# Checks that scripts/lab-verdict.sh excuses a failure of the lab only for a known bug of the
# guest's kernel (tests/lab/kernel_faults.sh), never when data differ, and that the checks of
# tests/lab/lib.sh report the class of a failure. Uses invented logs and no guest. Called by
# scripts/test.sh. Exit 0 if all checks passed.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
# shellcheck source=scripts/lab-verdict.sh
. scripts/lab-verdict.sh
# shellcheck source=tests/lab/kernel_faults.sh
. tests/lab/kernel_faults.sh

scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
wrong=0

# Checks the output of lab_second_try for the log on stdin.
second_try() { # text wanted
    local found
    cat >"$scratch/log"
    found=$(lab_second_try "$scratch/log" 2>"$scratch/why")
    [ "$found" = "$2" ] && return
    echo "lab-verdict: $1: found '$found', wanted '$2'"
    wrong=1
}

second_try 'a path that did not come back, without a kernel message' '' <<'END'
== two-paths: fio (at most 200 s)
PASS two-paths: the volume attaches [1 s]
FAIL two-paths: both paths are connected [61 s]
   not within 60 s: are_connected vol 2
-- two-paths: failed (checks: 1 passed, 1 failed; 62 s)
FAILED: two-paths
lab: checks: 1 passed, 1 failed
END
second_try 'a known fault of the kernel' 'two-paths' <<'END'
== two-paths: fio (at most 200 s)
FAIL two-paths: the kernel has nothing to complain of [61 s]
KERNEL two-paths __rxe_cleanup rdma_rxe
-- two-paths: failed (checks: 1 passed, 1 failed; 62 s)
FAILED: two-paths
lab: checks: 1 passed, 1 failed
END
second_try 'two of them' 'fs mixed' <<'END'
KERNEL fs __rxe_cleanup rdma_rxe
KERNEL mixed rxe_do_task rdma_rxe
FAILED: fs
FAILED: mixed
END
second_try 'one of two that failed' '' <<'END'
KERNEL fs __rxe_cleanup rdma_rxe
FAILED: fs
FAILED: mixed
END
second_try 'a fault in one of two guests' 'two-guests' <<'END'
client KERNEL two-guests __rxe_cleanup rdma_rxe
FAILED: two-guests
END
second_try 'a fault in another scenario, which passed' '' <<'END'
KERNEL mixed-two __rxe_cleanup rdma_rxe
FAILED: mixed
END
second_try 'a hang that the kernel explains' 'fs' <<'END'
CLASS fs hang
KERNEL fs __rxe_cleanup rdma_rxe
FAILED: fs
END
second_try 'none failed' '' <<<'lab: checks: 5 passed, 0 failed'
second_try 'a failed build' '' <<<'FAILED: build'
second_try 'a guest that did not boot' '' <<'END'
FAIL mixed: the guest did not boot within 180 s
-- mixed: failed (checks: 0 passed, 1 failed; 180 s)
FAILED: mixed
END
second_try 'data' '' <<'END'
== fs: x (at most 1 s)
FAIL fs: the checksums are equal [1 s]
CLASS fs data
KERNEL fs __rxe_cleanup rdma_rxe
-- fs: failed (checks: 0 passed, 1 failed; 2 s)
FAILED: fs
END
second_try 'data in one of two scenarios' '' <<'END'
CLASS fs data
KERNEL fs __rxe_cleanup rdma_rxe
KERNEL mixed __rxe_cleanup rdma_rxe
FAILED: fs
FAILED: mixed
END
second_try 'the class of another scenario, which passed' 'mixed' <<'END'
CLASS mixed-two data
KERNEL mixed __rxe_cleanup rdma_rxe
FAILED: mixed
END
second_try 'fio without a class' '' <<'END'
== mixed: x (at most 1 s)
FAIL mixed: fio reads back what it wrote [9 s]
   | verify: bad magic header 0, wanted acca at file /dev/nbd0 offset 4096, length 4096
KERNEL mixed __rxe_cleanup rdma_rxe
-- mixed: failed (checks: 1 passed, 1 failed; 9 s)
FAILED: mixed
END
second_try 'the output of another scenario, which passed' 'mixed' <<'END'
== fs: x (at most 1 s)
   verify: bad magic header 0, as it should be
-- fs: passed (checks: 1 passed, 0 failed; 9 s)
== mixed: x (at most 1 s)
FAIL mixed: the volume attaches [1 s]
KERNEL mixed __rxe_cleanup rdma_rxe
-- mixed: failed (checks: 0 passed, 1 failed; 2 s)
FAILED: mixed
END

# Checks the known bugs found in the kernel log on stdin.
named() { # text wanted
    local found
    found=$(kernel_faults_named | paste -sd, -)
    [ "$found" = "$2" ] && return
    echo "lab-verdict: kernel, $1: found '$found', wanted '$2'"
    wrong=1
}

named 'a warning' '__rxe_cleanup rdma_rxe' <<'END'
[  41.1] ------------[ cut here ]------------
[  41.1] WARNING: CPU: 1 PID: 9 at rxe_pool.c:242 __rxe_cleanup+0x124/0x170 [rdma_rxe]
[  41.1] RIP: 0010:__rxe_cleanup+0x124/0x170 [rdma_rxe]
END
named 'an oops, on the console of a dead guest' 'rxe_do_task rdma_rxe' < <(
    printf '%s\r\n' '[  41.1] BUG: kernel NULL pointer dereference, address: 00000008' \
        '[  41.1] RIP: 0010:rxe_do_task+0x42/0xe0 [rdma_rxe]'
)
named 'a hung task' '__rxe_cleanup rdma_rxe' <<'END'
   | [  99.1] INFO: task rmmod:912 blocked for more than 45 seconds.
   | [  99.1] Call Trace:
   | [  99.1]  wait_for_completion+0x8a/0x150
   | [  99.1]  __rxe_cleanup+0xfa/0x170 [rdma_rxe]
END
named 'a hung task with such a frame from before' '' <<'END'
[  99.1] INFO: task fio:912 blocked for more than 45 seconds.
[  99.1]  ? __rxe_cleanup+0xfa/0x170 [rdma_rxe]
END
named 'a hung task of a function that is known for its warnings' '' <<'END'
[  99.1] INFO: task fio:912 blocked for more than 45 seconds.
[  99.1]  rxe_do_task+0x42/0xe0 [rdma_rxe]
END
named 'a warning elsewhere with it in the trace' '' <<'END'
[  41.1] WARNING: CPU: 1 PID: 9 at workqueue.c:3 flush_work+0x1/0x17
[  41.1]  __rxe_cleanup+0x124/0x170 [rdma_rxe]
END
named 'the same function of another module' '' <<'END'
[  41.1] RIP: 0010:rxe_do_task+0x42/0xe0 [other]
END
named 'nothing to complain of' '' <<<'[  41.1] rxe_do_task ran'
count=$(grep -c '^# ' <<<"$KERNEL_FAULTS_KNOWN")
if [ "$count" -ne "$(grep -vc '^# ' <<<"$KERNEL_FAULTS_KNOWN")" ]; then
    echo "lab-verdict: tests/lab/kernel_faults.sh: a fault without its comment"
    wrong=1
fi

# Classes reported by the checks of a scenario, with the functions of the guest.
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
# A fake fio, with its output and status.
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
classes 'an expected difference' '' equal_before_another_fails
classes 'another command' '' expect_true x timeout 60 false
classes 'a value that is about data' data expect_eq x 1 2 data
classes 'another value' '' expect_eq x 1 2
classes 'a passed check' '' expect_eq x 1 1 data
classes 'fio that finds other data' data fio_says 84 'verify: bad magic header 0, wanted acca'
classes 'fio whose sum is wrong' data fio_says 1 'crc32c: verify failed at file /dev/nbd0 offset 0'
classes 'fio that reports it in its JSON' data fio_says 1 '      "error" : 84,'
classes 'fio with an IO error' '' fio_says 5 '      "error" : 5,'
classes 'fio that hangs' hang fio_says 124 ''
classes 'fio that was ended by a signal' '' fio_says 128 ''

[ $wrong -eq 0 ] && echo "lab-verdict: all checks passed"
exit $wrong
