#!/usr/bin/env bash
# The known faults of the guests' kernel: the only reason for which scripts/test.sh runs a failed
# scenario once more. Sourced in the guest (guest.sh), by scripts/lab-run.sh for the console of a
# guest that died, and by scripts/lab-verdict-test.sh.
#
# A fault is named by the function of the kernel in which it happens, as the kernel's own log says:
#
#   at FUNCTION MODULE      a WARNING, BUG or oops whose line (or RIP) is in this function
#   waits FUNCTION MODULE   a hung task that waits in this function
#
# List only functions that no byte from our daemons can reach, so that none excuses our own fault.
KERNEL_FAULTS_KNOWN=$(
    cat <<'END'
# rxe gives up to free an object whose references do not come back (WARN_ON after its time-out).
at __rxe_cleanup rdma_rxe
# The same, but it waits for the references without a bound.
waits __rxe_cleanup rdma_rxe
# A work item of a queue pair runs when the queue pair is freed already.
at rxe_do_task rdma_rxe
# The timer that sends again fires for a queue pair that is being freed.
at retransmit_timer rdma_rxe
# A queue pair is taken apart while its tasks still run.
at rxe_qp_do_cleanup rdma_rxe
# rtrs-clt frees connections of a path whose RDMA device goes at the same time.
at rtrs_clt_close_conns rtrs_client
# rtrs-srv does the same.
at rtrs_srv_close_work rtrs_server
END
)

# The known faults that a kernel's log tells of, one a line, each once: `FUNCTION MODULE`. The log
# is on stdin, with or without times and prefixes before its lines.
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
        # A frame with a question mark is what is left on the stack from before.
        hung > 0 {
            hung--
            if ($0 !~ /\? /) found(place($0), "waits")
        }
    '
}
