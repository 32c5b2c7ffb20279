#!/bin/sh
# Formatting, lints and all tests. The last line is the sum: `N passed, N failed`.
set -u
cd "$(dirname "$0")/.." || exit 1
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
failed=0

sh scripts/test-deps.sh

# Each of the two is one check, and counts as one.
check() {
    printf '== %s\n' "$*"
    if "$@"; then
        echo "test result: ok. 1 passed; 0 failed" >>"$log"
    else
        echo "test result: FAILED. 0 passed; 1 failed" >>"$log"
        failed=1
    fi
}

check cargo fmt --all --check
check cargo clippy --workspace --all-targets --quiet -- -D warnings

# The tests start the demo's program and the command themselves.
cargo build --workspace || failed=1
printf '== %s\n' "cargo test --workspace"
{ cargo test --workspace --no-fail-fast 2>&1; echo "status $?"; } | tee -a "$log" | grep -v '^status '
grep -q '^status 0$' "$log" || failed=1

awk -v failed="$failed" '
    /^test result:/ { for (i = 1; i < NF; i++) { if ($(i + 1) ~ /^passed/) p += $i; if ($(i + 1) ~ /^failed/) f += $i } }
    END {
        if (failed && !f) f = 1 # it did not even build
        printf "%d passed, %d failed\n", p, f
    }' "$log"
exit "$failed"
