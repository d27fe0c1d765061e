#!/usr/bin/env bash
# Known bugs in the guests' kernel: the only reason for which scripts/test.sh repeats a failed
# scenario. Sourced in the guest (guest.sh), by scripts/lab-run.sh for the console of a guest that
# died, and by scripts/lab-verdict-test.sh.
#
# A bug is identified by the kernel function in which it occurs, according to the kernel's log:
#
#   at FUNCTION MODULE      a WARNING, BUG or oops whose line (or RIP) is in this function
#   waits FUNCTION MODULE   a hung task that waits in this function
#
# List only functions that no data from our daemons can reach, so that no bug of ours is excused.
KERNEL_FAULTS_KNOWN=$(
    cat <<'END'
# rxe gives up freeing an object whose references are not released (WARN_ON after its timeout).
at __rxe_cleanup rdma_rxe
# rxe waits for these references without a bound.
waits __rxe_cleanup rdma_rxe
# A queue pair's work item runs after the queue pair was freed.
at rxe_do_task rdma_rxe
# The retransmit timer fires for a queue pair that is being freed.
at retransmit_timer rdma_rxe
# A queue pair is destroyed while its tasks still run.
at rxe_qp_do_cleanup rdma_rxe
# rtrs-clt frees a path's connections while its RDMA device is being removed.
at rtrs_clt_close_conns rtrs_client
# rtrs-srv closes a path while its RDMA device is being removed.
at rtrs_srv_close_work rtrs_server
END
)

# Prints the known bugs found in a kernel log, one per line, each once: `FUNCTION MODULE`. The log
# is read from stdin, with or without times and prefixes.
kernel_faults_named() {
    awk -v known="$KERNEL_FAULTS_KNOWN" '
        BEGIN {
            count = split(known, lines, "\n")
            for (at = 1; at <= count; at++) {
                if (lines[at] !~ /^#/) is_known[lines[at]] = 1
            }
        }
        # "FUNCTION MODULE" of the first FUNCTION+0x12/0x34 [MODULE] in the line.
        function place(line) {
            if (!match(line, /[A-Za-z_][A-Za-z0-9_.]*\+0x[0-9a-f]+\/0x[0-9a-f]+ \[[a-z0-9_]+\]/))
                return ""
            line = substr(line, RSTART, RLENGTH)
            sub(/\+0x[^ ]* \[/, " ", line)
            sub(/\]$/, "", line)
            return line
        }
        function found(where, by) {
            if (is_known[by " " where] && !seen[where]++) print where
        }
        { sub(/\r$/, "") }
        /WARNING: CPU|RIP: 0010:/ { found(place($0), "at") }
        /blocked for more than/ { hung = 40 }
        # A frame marked with a question mark is a stale leftover on the stack.
        hung > 0 {
            hung--
            if ($0 !~ /\? /) found(place($0), "waits")
        }
    '
}
