#!/usr/bin/env bash
# lab: ext4 and xfs on /dev/nbd0 over one RDMA path: copy, fsync, fsck, mount again, checksums
# topology: one
# paths: 1
# limit: 400
# groups: issue ours
# sample-of: /usr/share
#
# Copying all of /usr/share takes an emulated machine half an hour, mostly for reading the host's
# files. So the host selects files from it at regular intervals and passes them in one archive.

file_system() { # kind mkfs_argument...
    local kind=$1 mount=$LAB_WORK/mnt
    shift
    assert_true "mkfs.$kind" timeout 60 "mkfs.$kind" -q "$@" /dev/nbd0
    assert_true "the file system mounts" mount /dev/nbd0 "$mount"
    assert_true "files are copied" timeout 120 tar -xf "$LAB_SHARE/sample.tar" -C "$mount"
    assert_true "fsync of every file" timeout 60 env -C "$mount" \
        xargs -a "$LAB_SHARE/sample" -d '\n' -n 200 sync
    assert_true "the file system is synced" timeout 60 sync -f "$mount"
    assert_true "the file system unmounts" timeout 60 umount "$mount"
    case $kind in
        ext4) assert_true "e2fsck finds it clean" timeout 60 e2fsck -fn /dev/nbd0 ;;
        xfs) assert_true "xfs_repair finds it clean" timeout 60 xfs_repair -n /dev/nbd0 ;;
    esac
    # After that, nothing of the file system is in this machine's memory.
    assert_true "the volume detaches" detach vol
    assert_true "the volume attaches again" attach vol --path rdma://10.0.0.1@10.0.0.2 --device \
        /dev/nbd0
    assert_true "the file system mounts again" mount /dev/nbd0 "$mount"
    assert_true "$kind: the checksums match" timeout 120 env -C "$mount" \
        sha256sum --check --strict --quiet "$LAB_SHARE/sample.sha256"
    assert_true "the file system unmounts again" timeout 60 umount "$mount"
}

scenario() {
    modprobe nbd nbds_max=2 max_part=8
    mkdir -p "$LAB_WORK/mnt"
    assert_num "there are files to copy" "$(wc -l <"$LAB_SHARE/sample.sha256")" -gt 500
    note "$(($(stat -c %s "$LAB_SHARE/sample.tar") >> 20)) MiB of files"
    truncate -s 512M "$LAB_WORK/vol.img"
    start_server --export "vol=$LAB_WORK/vol.img" --listen rdma://10.0.0.2
    assert_true "the volume attaches" attach vol --path rdma://10.0.0.1@10.0.0.2 --device /dev/nbd0
    file_system ext4 -F
    file_system xfs -f
    assert_num "the RDMA device carried data" "$(rxe_counter rxa0 sent_pkts)" -gt 10000
    assert_true "the volume detaches finally" detach vol
    assert_true "the server exits cleanly" stop_server
}
