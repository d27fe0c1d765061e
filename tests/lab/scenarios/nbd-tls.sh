#!/usr/bin/env bash
# lab: nbd-client attaches /dev/nbd0 to our NBD server over TLS, and not without TLS
# topology: one
# paths: 1
# limit: 120
# groups: ours

# Creates ca, server and client in $LAB_WORK/pki, as in docs/how-to/tls.md. They use RSA, because
# nbd-client 3.24 does not present a certificate with an Ed25519 key.
certificates() {
    local name pki=$LAB_WORK/pki
    mkdir -p "$pki" && cd "$pki" || return 1
    printf 'cn = "lab CA"\nca\ncert_signing_key\nexpiration_days = 1\n' >ca.cfg
    printf 'cn = "gateway"\nip_address = "127.0.0.1"\ntls_www_server\nexpiration_days = 1\n' \
        >server.cfg
    printf 'cn = "db1"\ntls_www_client\nexpiration_days = 1\n' >client.cfg
    umask 077
    for name in ca server client; do
        certtool --generate-privkey --key-type rsa --outfile $name-key.pem || return 1
    done
    certtool --generate-self-signed --load-privkey ca-key.pem --template ca.cfg \
        --outfile ca-cert.pem || return 1
    for name in server client; do
        certtool --generate-certificate --load-ca-certificate ca-cert.pem \
            --load-ca-privkey ca-key.pem --load-privkey $name-key.pem --template $name.cfg \
            --outfile $name-cert.pem || return 1
    done
}

scenario() {
    local disk pki=$LAB_WORK/pki
    disk=$(brd_disk 64) || exit 1
    modprobe nbd nbds_max=2 max_part=8
    assert_true "certtool creates the certificates" certificates
    start_server --export "vol0=$disk" --listen tcp://10.0.0.2:1234
    assert_true "the volume attaches with an NBD server over TLS" attach vol0 \
        --path tcp://10.0.0.1@10.0.0.2 --listen 127.0.0.1:10809 --nbd-tls require \
        --nbd-tls-dir "$pki"
    expect_false "nbd-client without TLS is refused" timeout 20 nbd-client 127.0.0.1 10809 -N vol0 \
        /dev/nbd1
    assert_true "nbd-client connects the kernel to it over TLS" timeout 30 nbd-client 127.0.0.1 \
        10809 -N vol0 /dev/nbd0 -cacertfile "$pki/ca-cert.pem" -certfile "$pki/client-cert.pem" \
        -keyfile "$pki/client-key.pem" -tlshostname 127.0.0.1
    assert_eq "/dev/nbd0 has the disk's size" "$(blockdev --getsize64 /dev/nbd0)" \
        "$(blockdev --getsize64 "$disk")"
    assert_true "fio reads back what it wrote" fio_run verify 60 --filename=/dev/nbd0 \
        --direct=1 --rw=randwrite --bs=4k --iodepth=16 --ioengine=libaio --size=64M --io_size=8M \
        --verify=crc32c
    assert_true "nbd-client disconnects" timeout 30 nbd-client -d /dev/nbd0
    assert_true "the volume detaches" detach vol0
    assert_true "the server exits cleanly" stop_server
}
