#!/usr/bin/env bash
# lab: the checks of rds-faults against the node of Linux 6.12
# topology: one
# paths: 1
# limit: 600
# groups: rds ours
# kernel: 6.12

# shellcheck source=rds/lab/scenarios/rds-faults.sh
. rds/lab/scenarios/rds-faults.sh
