#!/bin/sh
# install.sh [--remove] PREFIX: the command, its manual page and its completions.
set -eu
remove=
if [ "$1" = --remove ]; then
    remove=1
    shift
fi
prefix=$1
target=${CARGO_TARGET_DIR:-target}/release/stillpoint
man=$prefix/share/man/man1/stillpoint.1
bash=$prefix/share/bash-completion/completions/stillpoint
zsh=$prefix/share/zsh/site-functions/_stillpoint
fish=$prefix/share/fish/vendor_completions.d/stillpoint.fish

if [ -n "$remove" ]; then
    rm -f "$prefix/bin/stillpoint" "$man" "$bash" "$zsh" "$fish"
    exit 0
fi
install -D -m 755 "$target" "$prefix/bin/stillpoint"
mkdir -p "${man%/*}" "${bash%/*}" "${zsh%/*}" "${fish%/*}"
"$target" man >"$man"
"$target" completions bash >"$bash"
"$target" completions zsh >"$zsh"
"$target" completions fish >"$fish"
echo "installed $prefix/bin/stillpoint; stillpoint doctor tells what works here"
