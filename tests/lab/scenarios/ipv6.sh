#!/usr/bin/env bash
# lab: server and client in two guests, over IPv6: a path over RDMA and one over TCP, ping, doctor
# topology: two
# paths: 2
# limit: 150
# network: spoiled
# groups: issue ours ping

# Adds IPv6 addresses, fd00:0:0:PATH::END. They appear in the device's table slightly later.
addresses() { # letter end
    local path
    for path in 0 1; do
        ip addr add "fd00:0:0:$path::$2/64" dev "v$1$path" nodad || return 1
        wait_until 30 "rx$1$path to have its address" grep -qi \
            "fd00:0000:0000:000$path:0000:0000:0000:000$2" -r \
            "/sys/class/infiniband/rx$1$path/ports/1/gids" || return 1
    done
}

server() {
    local disk
    assert_true "the server has addresses" addresses b 2
    disk=$(brd_disk 64) || exit 1
    start_server --export "vol=$disk" --listen 'rdma://[fd00::2]' \
        --listen 'tcp://[fd00:0:0:1::2]'
    tell serving
    hear detached 140
    assert_true "the server exits cleanly" stop_server
}

client() {
    local path paths=('rdma://[fd00::1]@[fd00::2]' 'tcp://[fd00:0:0:1::1]@[fd00:0:0:1::2]')
    modprobe nbd nbds_max=2
    assert_true "the client has addresses" addresses a 1
    hear serving 60
    for path in "${paths[@]}"; do
        expect_true "$path: ping" timeout 60 rtrs-client ping "$path" -c 20 -i 0
        expect_true "$path: doctor reports no failure" timeout 60 rtrs-client doctor "$path"
    done
    assert_true "the volume attaches over both" attach vol --path "${paths[0]}" --path \
        "${paths[1]}" \
        --device /dev/nbd0 --policy round-robin
    assert_within 30 "both paths are connected" are_connected vol 2
    assert_true "fio reads back what it wrote" fio_run verify 60 --filename=/dev/nbd0 --direct=1 \
        --rw=randwrite --bs=4k --iodepth=8 --ioengine=libaio --size=32M --io_size=4M \
        --verify=crc32c
    for path in 0 1; do
        assert_num "path $path carried requests" "$(path_stat vol "$path" requests)" -gt 100
    done
    assert_num "rxa0 sent packets" "$(rxe_counter rxa0 sent_pkts)" -gt 500
    assert_true "the volume detaches" detach vol
    tell detached
}
