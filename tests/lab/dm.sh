#!/usr/bin/env bash
# Device-mapper disks. Sourced by scenarios; guest.sh removes devices named lab-*.

# Creates lab-NAME from a table; prints its device.
dm_create() { # name table
    local device
    modprobe dm-mod
    # On every call, dmsetup prints that it creates the device node itself.
    DM_DISABLE_UDEV=1 dmsetup create "lab-$1" --table "$2" 2> >(grep -v DM_DISABLE_UDEV >&2) ||
        return 1
    device=/dev/dm-$(dmsetup info -c --noheadings -o minor "lab-$1")
    wait_until 10 "$device" test -b "$device" && echo "$device"
}

# Replaces the table of lab-NAME while the disk is in use.
dm_change() { # name table
    dmsetup suspend --nolockfs --noflush "lab-$1" && dmsetup load "lab-$1" --table "$2" &&
        dmsetup resume "lab-$1"
}

dm_remove() { # name
    DM_DISABLE_UDEV=1 wait_until 20 "lab-$1 to go" dmsetup remove "lab-$1"
}

# Prints the length of a disk in sectors of 512 bytes.
dm_sectors() { # device
    blockdev --getsz "$1"
}
