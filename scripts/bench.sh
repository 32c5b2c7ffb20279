#!/bin/sh
# Measures pauses, times and slowdown, and writes bench/results. BENCH_ONLY=pause,durable measures a part; the head of
# bench/src/main.rs lists the experiments' names and all that can be changed.
set -eu
cd "$(dirname "$0")/.."
bench=${CARGO_TARGET_DIR:-target}/release/stillpoint-bench
[ -x "$bench" ] || cargo build --release -p stillpoint -p stillpoint-bench

# A twin that has ended has to be buried, as have programs that are restored under their old process id: some containers
# have a first process that does not do it. Then a pid namespace with one that does is the place to measure in.
orphan=$(sh -c 'sleep 0.1 & echo $!')
sleep 3
if [ -e "/proc/$orphan" ] && unshare --pid --fork --mount-proc true 2>/dev/null; then
    echo "the first process here leaves ended orphans about: measuring in a pid namespace of our own" >&2
    # A shell that waits is the first process there; it buries whatever is handed to it.
    exec unshare --pid --fork --kill-child --mount-proc sh -c '"$@"; exit $?' sh "$bench" "$@"
fi
exec "$bench" "$@"
