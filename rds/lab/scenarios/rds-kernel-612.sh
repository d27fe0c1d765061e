#!/usr/bin/env bash
# lab: the checks of rds-kernel against Linux 6.12
# topology: one
# paths: 1
# limit: 360
# groups: rds ours
# kernel: 6.12

# shellcheck source=rds/lab/scenarios/rds-kernel.sh
. rds/lab/scenarios/rds-kernel.sh
