#!/usr/bin/env bash
# lab: ext4 and xfs on /dev/nbd0 over one RDMA path: copy, fsync, fsck, mount again, checksums
# topology: one
# paths: 1
# limit: 300
# groups: issue ours
#
# All of /usr/share takes an emulated machine half an hour, most of it for reading the host's
# files. So every so many files of it are taken, evenly, up to FILES and BYTES.

FILES=2500
BYTES=$((96 << 20))

# Paths of the files to copy, one a line.
chosen() {
    (cd /usr/share && find . -type f -size -1024k -printf '%s %p\n') | sort -k 2 |
        awk -v files=$FILES -v bytes=$BYTES '{ size[NR] = $1; $1 = ""; name[NR] = substr($0, 2) }
            END {
                step = NR > files ? NR / files : 1
                for (at = 1; at <= NR && sum < bytes; at += step) {
                    sum += size[int(at)]
                    print name[int(at)]
                }
            }'
}

sums() { # directory
    (cd "$1" && xargs -d '\n' sha256sum <"$LAB_WORK/files" | sha256sum)
}

file_system() { # kind mkfs_argument...
    local kind=$1 mount=$LAB_WORK/mnt found
    shift
    assert_true "mkfs.$kind" timeout 60 "mkfs.$kind" -q "$@" /dev/nbd0
    assert_true "it mounts" mount /dev/nbd0 "$mount"
    assert_true "files are copied" timeout 120 tar -xf "$LAB_WORK/files.tar" -C "$mount"
    assert_true "fsync of every file" timeout 60 env -C "$mount" \
        xargs -a "$LAB_WORK/files" -d '\n' -n 200 sync
    assert_true "and of the file system" timeout 60 sync -f "$mount"
    assert_true "it unmounts" timeout 60 umount "$mount"
    case $kind in
        ext4) assert_true "e2fsck finds it clean" timeout 60 e2fsck -fn /dev/nbd0 ;;
        xfs) assert_true "xfs_repair finds it clean" timeout 60 xfs_repair -n /dev/nbd0 ;;
    esac
    # Nothing of it can be in this machine's memory after that.
    assert_true "it detaches" detach vol
    assert_true "it attaches again" attach vol --path rdma://10.0.0.1@10.0.0.2 --device /dev/nbd0
    assert_true "it mounts again" mount /dev/nbd0 "$mount"
    found=$(sums "$mount")
    assert_eq "$kind: the checksums are equal" "$found" "$SUMS"
    assert_true "it unmounts at last" timeout 60 umount "$mount"
}

scenario() {
    local start=$SECONDS
    modprobe nbd nbds_max=2 max_part=8
    mkdir -p "$LAB_WORK/mnt" "$LAB_WORK/source"
    chosen >"$LAB_WORK/files"
    tar -C /usr/share --no-recursion -cf "$LAB_WORK/files.tar" -T "$LAB_WORK/files"
    tar -xf "$LAB_WORK/files.tar" -C "$LAB_WORK/source"
    SUMS=$(sums "$LAB_WORK/source")
    rm -rf "$LAB_WORK/source"
    assert_num "files are chosen" "$(wc -l <"$LAB_WORK/files")" -gt 500
    note "$(($(stat -c %s "$LAB_WORK/files.tar") >> 20)) MiB, prepared in $((SECONDS - start)) s"
    truncate -s 512M "$LAB_WORK/vol.img"
    start_server --export "vol=$LAB_WORK/vol.img" --listen rdma://10.0.0.2
    assert_true "it attaches" attach vol --path rdma://10.0.0.1@10.0.0.2 --device /dev/nbd0
    file_system ext4 -F
    file_system xfs -f
    assert_num "the RDMA device carried it" "$(rxe_counter rxa0 sent_pkts)" -gt 10000
    assert_true "it detaches at last" detach vol
    assert_true "the server ends well" stop_server
}
