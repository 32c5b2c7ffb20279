#!/bin/sh
# Measures pause, time and restore, and writes bench/results. BENCH_SIZES (MiB), BENCH_RUNS, BENCH_WRITES and
# BENCH_DIRECTORY change what is measured and where; STILLPOINT_BIN which command.
set -eu
cd "$(dirname "$0")/.."
bench=${CARGO_TARGET_DIR:-target}/release/stillpoint-bench
[ -x "$bench" ] || cargo build --release -p stillpoint -p stillpoint-bench
exec "$bench" "$@"
