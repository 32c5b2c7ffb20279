#!/bin/sh
# Before the end-to-end tests: builds the command and the library that they test, and tells the tests where they are.
set -eu
cd "$(dirname "$0")/.."
# All of the workspace is chosen, so that the same features are as in the tests, and nothing is built twice.
cargo build --quiet --workspace --lib --bin stillpoint --bin apsp
folder=$(cd "${CARGO_TARGET_DIR:-target}/debug" && pwd)
{
    [ -n "${STILLPOINT_BIN:-}" ] || echo "STILLPOINT_BIN=$folder/stillpoint"
    [ -n "${STILLPOINT_LIBRARY:-}" ] || echo "STILLPOINT_LIBRARY=$folder"
} >>"$NEXTEST_ENV"
