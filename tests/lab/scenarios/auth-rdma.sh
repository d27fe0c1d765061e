#!/usr/bin/env bash
# lab: proofs over RDMA: our client with a known key, with others; the kernel's client only by list
# topology: one
# paths: 1
# limit: 150
# groups: issue ours interop

# shellcheck source=tests/lab/interop.sh
. tests/lab/interop.sh

PORTAL=rdma://10.0.0.1@10.0.0.2

# Prints the result of a kernel client's map: "mapped", an errno, or nothing if the errno is
# unknown.
try() { # session
    ks_answer "sessname=$1" "$(ks_paths 1)" device_path=vol access_mode=rw 2>/dev/null
}

# Prints our client's error when it may not attach.
refused() { # file argument...
    local out=$LAB_WORK/$1.out
    shift
    if timeout 60 rtrs-client attach vol --path "$PORTAL" --socket "$LAB_WORK/none.sock" "$@" \
        --connect-timeout $((5 * LAB_SLOW))s \
        >"$out" 2>&1 </dev/null; then
        echo "it attached"
        timeout 60 rtrs-client detach vol
        return
    fi
    tr '\n' ' ' <"$out"
}

scenario() {
    local key=$LAB_WORK/db1.key other=$LAB_WORK/other.key server module wrong
    modprobe nbd nbds_max=1
    rtrs-server key generate "$LAB_WORK/server.key" >"$LAB_WORK/server.pub"
    rtrs-client key generate "$key" >"$LAB_WORK/db1.pub"
    rtrs-client key generate "$other" >"$LAB_WORK/other.pub"
    server=$(cat "$LAB_WORK/server.pub") wrong=$(cat "$LAB_WORK/other.pub")
    echo "db1 $(cat "$LAB_WORK/db1.pub")" >"$LAB_WORK/clients"
    start_server --export vol=mem:64M --listen rdma://10.0.0.2 --key-file "$LAB_WORK/server.key" \
        --clients-file "$LAB_WORK/clients" --audit-log "$LAB_WORK/audit.log"
    local known=(--key-file "$key" --server-key "$server")

    expect_match "without a key" "$(refused none)" "authenticate.*key-file and server-key"
    expect_match "another key" "$(refused another --key-file "$other" --server-key "$server")" \
        "does not accept this client"
    expect_match "another server" "$(refused wrong --key-file "$key" --server-key "$wrong")" \
        "not the intended one"
    expect_match "doctor names what is wrong" \
        "$(timeout 60 rtrs-client doctor "$PORTAL" --key-file "$key" --server-key "$wrong" 2>&1)" \
        "compare server-key with what"
    expect_match "doctor with good keys" \
        "$(timeout 60 rtrs-client doctor "$PORTAL" "${known[@]}" 2>&1)" "both ends authenticated"
    expect_match "discover with good keys" \
        "$(timeout 60 rtrs-client discover "$PORTAL" "${known[@]}" 2>&1 | tail -n 1)" "^vol "
    expect_true "ping with good keys" timeout 60 rtrs-client ping "$PORTAL" -c 3 -i 0s "${known[@]}"
    expect_false "ping with the key of another server" timeout 60 rtrs-client ping "$PORTAL" -c 3 \
        -i 0s --key-file "$key" --server-key "$wrong"

    assert_true "a known key attaches" attach vol --path "$PORTAL" --device auto "${known[@]}"
    expect_match "the server shows its name" "$(timeout 20 rtrs-server session list)" "key:db1"
    expect_match "its path is authenticated" "$(timeout 20 rtrs-server session list)" \
        ", authenticated, up"
    assert_true "the client writes" dd if=/dev/urandom of=/dev/nbd0 bs=64k count=32 oflag=direct
    assert_true "the volume detaches" detach vol
    expect_match "the audit log has the proof" "$(cat "$LAB_WORK/audit.log")" \
        '"event":"authenticate","result":"ok","identity":"db1"'
    expect_match "the audit log has a refusal" "$(cat "$LAB_WORK/audit.log")" \
        '"event":"authenticate","result":"refused"'

    for module in rtrs-core rtrs-client rnbd-client; do
        loaded $module || assert_true "$module is loaded" load $module
    done
    expect_eq "a kernel client without a list" "$(try early)" EACCES
    assert_true "a list admits kernel clients" rtrs-server export set vol access=db1:rw \
        access=kernel@10.0.0.0/24:rw
    assert_true "a kernel client maps" ks_map kernel vol 1 access_mode=rw
    assert_true "the kernel client writes" dd if=/dev/urandom of="/dev/$KS_DEV" bs=64k count=32 \
        oflag=direct
    expect_match "the kernel client is anonymous" "$(timeout 20 rtrs-server session list)" \
        "anonymous"
    assert_true "the client unmaps" kernel_unmap "$KS_DEV"
    cell kernel-client "a server with keys: admitted only by kernel@NETWORK"
    assert_true "a known key attaches again" attach vol --path "$PORTAL" --device auto "${known[@]}"
    assert_true "its key leaves the list" sed -i 's/^db1 /#/' "$LAB_WORK/clients"
    assert_true "the server rereads it" timeout 20 rtrs-server reload
    assert_within 20 "its path is gone" are_connected vol 0
    expect_match "the client gives the reason" "$(client_json status vol '.paths[0].last_error')" \
        "does not accept this client|lost|closed"
    timeout 60 rtrs-client detach vol --force >/dev/null
    assert_true "the server exits cleanly" stop_server
}
