#!/usr/bin/env bash
# lab: the RDS socket API, over the kernel and over the library: only documented results differ
# topology: one
# paths: 1
# limit: 300
# groups: rds ours
# guest: spoiled

# Prints the names of results that differ between two outputs, or are in only one of them.
different() { # output output
    awk '/^#/ { next } FNR == NR { of[$1] = $2; next } { there[$1] }
        of[$1] != $2 { print $1 } END { for (name in of) if (!(name in there)) print name }' \
        "$1" "$2" | sort
}

# Shows both results of each name.
both() { # output output name...
    local name outputs=("$1" "$2")
    shift 2
    for name in "$@"; do
        note "$(grep -h "^$name " "${outputs[@]}" | xargs)"
    done
}

scenario() {
    # shellcheck source=rds/lab/rds.sh
    . rds/lab/rds.sh
    local kernel=$LAB_SHARE/api.kernel ours=$LAB_SHARE/api.ours found documented
    assert_true "namespaces are connected, and the kernel has RDS" rds_up
    assert_true "our nodes start" eval "RDS_PEER_PORT=$RDS_PORT rds_node ru 10.9.0.1 10.9.0.9"
    assert_true "the checks compile" timeout 60 gcc -O1 -o "$LAB_WORK/api" rds/lab/api.c
    # In Linux 6.1 a bind to a port in use never releases its reference to the transport's module
    # (rds_bind).
    RDS_HELD=1
    # The results are written to files that are kept in the run's logs.
    rds_in rk timeout 120 "$LAB_WORK/api" 10.9.0.5 10.9.0.6 /run/netns/rk2 >"$kernel" \
        2>"$LAB_WORK/api.log"
    expect_eq "the checks run over the kernel" $? 0
    found=$(different rds/lab/api.kernel "$kernel")
    # shellcheck disable=SC2086
    both rds/lab/api.kernel "$kernel" $found
    expect_eq "the kernel's results are those of rds/lab/api.kernel" "$found" ''
    rds_preloaded ru timeout 120 "$LAB_WORK/api" 10.9.0.1 10.9.0.9 >"$ours" 2>>"$LAB_WORK/api.log"
    expect_eq "the checks run over the library" $? 0
    documented=$(cut -d: -f1 rds/lab/api.differences | sort)
    expect_num "few differences are documented" "$(grep -c . <<<"$documented")" -le 5
    found=$(different "$kernel" "$ours")
    # shellcheck disable=SC2086
    both "$kernel" "$ours" $found
    expect_eq "only the results in rds/lab/api.differences differ" "$found" "$documented"
}
