#!/bin/sh
# Measures pauses, times and slowdown, and writes bench/results. BENCH_ONLY=pause,durable measures a part; the head of
# bench/src/main.rs lists the experiments' names and all that can be changed.
set -eu
cd "$(dirname "$0")/.."
bench=${CARGO_TARGET_DIR:-target}/release/stillpoint-bench
[ -x "$bench" ] || cargo build --release -p stillpoint -p stillpoint-bench
exec "$bench" "$@"
