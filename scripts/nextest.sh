#!/bin/sh
# Prints the path of the runner of the tests, cargo-nextest in the version that is pinned here, which it builds first where it
# is not there (two to three minutes); nothing where it cannot be had.
set -u
version=0.9.151
cd "$(dirname "$0")/.." || exit 1
tools=${CARGO_TARGET_DIR:-$PWD/target}/tools
for candidate in "$(command -v cargo-nextest)" "$tools/bin/cargo-nextest"; do
    if [ -x "$candidate" ] && "$candidate" nextest --version 2>/dev/null | grep -q "^cargo-nextest $version "; then
        echo "$candidate"
        exit 0
    fi
done
echo "== building cargo-nextest $version" >&2
# Unoptimized and without notes for debuggers it is there in half the time, and waits as well.
CARGO_PROFILE_DEV_DEBUG=0 cargo install --quiet --locked --version "$version" --root "$tools" --target-dir "$tools/build" --no-track \
    --no-default-features --features default-no-update --debug cargo-nextest >&2 </dev/null || exit 0
rm -rf "$tools/build"
echo "$tools/bin/cargo-nextest"
