#!/bin/sh
# Usage: test.sh check|test|soak. Formatting, lints and tests; the last line is the sum: `N passed, N failed`.
#
# check  what every commit must pass: the tests of each crate, and one program through all of its life
# test   everything once
# soak   the same scenarios with all engines, again and again in an order by chance, for MINUTES (60)
#
# SEED sets the run's seed. What the run has to tell stays in target/runs; tests/README.md says how to read it.
set -u
tier=${1:-test}
cd "$(dirname "$0")/.." || exit 1
case $tier in
check | test | soak) ;;
*)
    echo "usage: test.sh check|test|soak" >&2
    exit 2
    ;;
esac

# A program can have its old process id again only when somebody buries the dead: some containers have a first process
# that does not. Then the tests run in a pid namespace with one that does.
orphan=$(sh -c 'sleep 0.1 & echo $!')
sleep 1
if [ -z "${STILLPOINT_INIT:-}" ] && [ -e "/proc/$orphan" ] && unshare --pid --fork --mount-proc true 2>/dev/null; then
    echo "the first process here leaves ended orphans about: testing in a pid namespace of our own"
    export STILLPOINT_INIT=1
    exec unshare --pid --fork --kill-child --mount-proc sh scripts/test.sh "$@"
fi

# What a disk that is full makes of a test is hard to read.
for place in . "${TMPDIR:-/tmp}"; do
    free=$(df -Pm "$place" | awk 'END { print $4 }')
    if [ "$free" -lt 8192 ]; then
        echo "only $free MiB are free in $place: building and testing may need 8 GiB" >&2
    fi
done

STILLPOINT_SEED=${SEED:-${STILLPOINT_SEED:-$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}}
STILLPOINT_TIER=$tier
target=${CARGO_TARGET_DIR:-target}
mkdir -p "$target/runs" || exit 1
STILLPOINT_RUN=$(mktemp -d "$(cd "$target/runs" && pwd)/$tier.$(date +%m%d-%H%M%S).XXX") || exit 1
export STILLPOINT_SEED STILLPOINT_TIER STILLPOINT_RUN

begin=$(date +%s)
elapsed() { echo $(($(date +%s) - begin)); }
step() { printf '== %s (after %d s)\n' "$*" "$(elapsed)"; }
# check NAME COMMAND…: one thing that must succeed, and counts as one.
check() {
    name=$1
    shift
    step "$name"
    if "$@"; then outcome=ok; else outcome=failed; fi
    echo "$outcome $name" >>"$STILLPOINT_RUN/checks"
}

echo "seed $STILLPOINT_SEED, what this run tells is kept in $STILLPOINT_RUN"
[ "$tier" = check ] || sh scripts/test-deps.sh
nextest=$(sh scripts/nextest.sh)
# Tests have a network of their own, and some want sources that are never built.
cargo fetch --quiet --locked </dev/null || echo "not all packages of Cargo.lock can be fetched"

check formatting cargo fmt --all --check

# Clippy is the compiler with lints: what it has looked at is built as well, and all is compiled once. (What `cargo clippy -- -D warnings`
# sets, which only checks.) What tests have built is built in the same way, and so not again.
lint() {
    export RUSTC_WORKSPACE_WRAPPER=clippy-driver CLIPPY_ARGS=-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__
    command -v "$RUSTC_WORKSPACE_WRAPPER" >/dev/null && cargo build --workspace --all-targets --quiet && return
    unset RUSTC_WORKSPACE_WRAPPER CLIPPY_ARGS
    return 1
}
check lints lint

if [ -z "$nextest" ]; then
    # Without it a test has no process of its own, no second attempt, and no time limit.
    echo "cargo-nextest cannot be had here: cargo test runs instead"
    cargo build --workspace && cargo test --workspace --no-fail-fast >"$STILLPOINT_RUN/output" 2>&1 </dev/null
    failed=$?
    cat "$STILLPOINT_RUN/output"
    cat "$STILLPOINT_RUN/wrong" 2>/dev/null && failed=1
    grep -q ^failed "$STILLPOINT_RUN/checks" && failed=1
    awk -v failed="$failed" '
        /^test result:/ { for (i = 1; i < NF; i++) { if ($(i + 1) ~ /^passed/) p += $i; if ($(i + 1) ~ /^failed/) f += $i } }
        END { if (failed && !f) f = 1; printf "%d passed, %d failed\n", p, f }' "$STILLPOINT_RUN/output"
    exit "$failed"
fi

# tests PROFILE NAME ARGUMENTS…: one run, whose report goes to the run's folder.
tests() {
    report=$target/nextest/$1/junit.xml name=$2
    profile=$1
    shift 2
    rm -f "$report"
    "$nextest" nextest run --workspace --profile "$profile" "$@" </dev/null
    code=$?
    # With 100 it says that tests have failed, as the report does; with anything else that they did not all run.
    case $code in 0 | 100) ;; *) echo "failed $name, the runner ended with $code" >>"$STILLPOINT_RUN/checks" ;; esac
    mv "$report" "$STILLPOINT_RUN/$name.xml"
}

check building "$nextest" nextest run --workspace --no-run --cargo-quiet
step "testing"
case $tier in
check) tests check check ;;
test) tests default test ;;
soak)
    # The scenarios in shares, the shares in an order by chance, each with another seed; none begins after the time is over.
    shares=48 until=$(($(date +%s) + 60 * ${MINUTES:-60})) round=0
    while [ "$(date +%s)" -lt "$until" ]; do
        for share in $(seq "$shares" | awk -v seed="$STILLPOINT_SEED" 'BEGIN { srand(seed) } { print rand(), $0 }' | sort -n | cut -d ' ' -f 2); do
            [ "$(date +%s)" -lt "$until" ] || break
            round=$((round + 1)) STILLPOINT_SEED=$((STILLPOINT_SEED + 1))
            step "round $round: share $share of $shares, seed $STILLPOINT_SEED"
            tests soak "round-$round" --partition "slice:$share/$shares"
        done
    done
    ;;
esac

step "done"
"$target/debug/tally" "$STILLPOINT_RUN"
