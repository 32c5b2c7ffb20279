#!/bin/sh
# Builds the barrier pass: build.sh DIRECTORY. Needs clang and llvm-dev (14 or newer) of one version.
set -eu
cd "$(dirname "$0")"
out=$1
config=${LLVM_CONFIG:-llvm-config}
command -v "$config" >/dev/null || { echo "$config is missing: install llvm-dev" >&2; exit 3; }
mkdir -p "$out"
version=$("$config" --version)
part=$out/.stillpoint-mirror-pass.$$
# shellcheck disable=SC2046 # the flags are words
${CXX:-c++} -O2 -fPIC -shared -Wall -Wextra -Wno-unused-parameter $("$config" --cxxflags | tr ' ' '\n' | grep -v '^-W') \
    -o "$part" Barrier.cpp
mv "$part" "$out/stillpoint-mirror-pass.so"
echo "$out/stillpoint-mirror-pass.so (LLVM $version)"
