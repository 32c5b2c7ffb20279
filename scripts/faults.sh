#!/bin/sh
# Shows that a run of the tests fails when it must: a byte of a restored program is changed on purpose, then a program is
# killed at its checkpoint, each in the first attempt of a test only. The second attempt passes; the run fails all the same.
# The same test without a fault passes.
set -u
cd "$(dirname "$0")/.." || exit 1
nextest=$(sh scripts/nextest.sh)
[ -n "$nextest" ] || { echo "cargo-nextest cannot be had here" && exit 1; }
target=${CARGO_TARGET_DIR:-target}
report=$target/nextest/default/junit.xml
passed=0 failed=0
# run FAULT WORD: the end of the tale has WORD.
run() {
    STILLPOINT_RUN=$(mktemp -d) STILLPOINT_FAULT=$1
    export STILLPOINT_RUN STILLPOINT_FAULT
    echo "== fault: ${1:-none}"
    rm -f "$report"
    cargo build --quiet --workspace --bins &&
        "$nextest" nextest run --workspace -E 'test(=features::memory::anonymous)' \
            >"$STILLPOINT_RUN/output" 2>&1 </dev/null
    mv "$report" "$STILLPOINT_RUN/report.xml"
    told=$("$target/debug/tally" "$STILLPOINT_RUN")
    echo "$told"
    case $told in
    *"$2"*) passed=$((passed + 1)) ;;
    *) failed=$((failed + 1)) && cat "$STILLPOINT_RUN/output" ;;
    esac
    rm -rf "$STILLPOINT_RUN"
}
run "" "1 passed, 0 failed"
run byte "WRONG: after restore"
run kill "WRONG: after a checkpoint"
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
