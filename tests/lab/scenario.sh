#!/usr/bin/env bash
# Runs one scenario in a separate process: its function `scenario` or, in a pair of guests, `server`
# or `client`. Called by guest.sh. Exit codes: 0 passed, 77 skipped, others failed.
set -u
# shellcheck source=tests/lab/lib.sh
. tests/lab/lib.sh
# shellcheck disable=SC1090
. "$1" || exit 1
case $2 in
    one) scenario ;;
    *) "$2" ;;
esac
