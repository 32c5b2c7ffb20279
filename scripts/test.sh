#!/bin/sh
# Formatting, lints and all tests. The last line is the sum: `N passed, N failed`.
set -u
cd "$(dirname "$0")/.." || exit 1

# Who is started in the background of a script ignores some signals, and so would every program that is tested.
if [ -z "${STILLPOINT_SIGNALS:-}" ] && env --default-signal true 2>/dev/null; then
    export STILLPOINT_SIGNALS=1
    exec env --default-signal sh scripts/test.sh
fi

# A program can have its old process id again only when somebody buries the dead: some containers have a first process
# that does not. Then the tests run in a pid namespace with one that does.
orphan=$(sh -c 'sleep 0.1 & echo $!')
sleep 3
if [ -z "${STILLPOINT_INIT:-}" ] && [ -e "/proc/$orphan" ] && unshare --pid --fork --mount-proc true 2>/dev/null; then
    echo "the first process here leaves ended orphans about: testing in a pid namespace of our own"
    export STILLPOINT_INIT=1
    exec unshare --pid --fork --kill-child --mount-proc sh -c 'sh scripts/test.sh; exit $?'
fi

# What a disk that is full makes of a test is hard to read.
for place in . "${TMPDIR:-/tmp}"; do
    free=$(df -Pm "$place" | awk 'END { print $4 }')
    if [ "$free" -lt 8192 ]; then
        echo "only $free MiB are free in $place: building and testing may need 8 GiB" >&2
    fi
done

log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
failed=0

begin=$(date +%s)
step() { printf '== %s (after %d s)\n' "$*" $(($(date +%s) - begin)); }

sh scripts/test-deps.sh

# Each of the two is one check, and counts as one.
check() {
    step "$@"
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
step cargo build --workspace
cargo build --workspace || failed=1
step cargo test --workspace
tests=$(mktemp) || exit 1
trap 'rm -f "$log" "$tests" "$tests.pipe"' EXIT
# Through a pipe, for a restored program would cut a file back; but what a test leaves running may hold that open for as long
# as it likes, so nobody waits for its end. It is appended, as is what the watchdog says.
mkfifo "$tests.pipe" || exit 1
cat "$tests.pipe" >>"$tests" &
collector=$!
sh scripts/watchdog.sh "$tests" $$ 480 2900 &
watchdog=$!
tail -n +1 -f --pid=$collector "$tests" | grep -a --line-buffered . &
shown=$!
cargo test --workspace --no-fail-fast >"$tests.pipe" 2>&1 </dev/null || failed=1
sleep 1
kill "$collector" "$watchdog" 2>/dev/null
wait "$shown"
cat "$tests" >>"$log"

awk -v failed="$failed" '
    /^test result:/ { for (i = 1; i < NF; i++) { if ($(i + 1) ~ /^passed/) p += $i; if ($(i + 1) ~ /^failed/) f += $i } }
    END {
        if (failed && !f) f = 1 # it did not even build
        printf "%d passed, %d failed\n", p, f
    }' "$log"
exit "$failed"
