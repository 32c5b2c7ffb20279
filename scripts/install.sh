#!/bin/sh
# install.sh [--remove] PREFIX: the command, its manual page and its completions; the library for programs that take snapshots of
# themselves; what continues jobs at boot, which is not enabled.
set -eu
remove=
if [ "$1" = --remove ]; then
    remove=1
    shift
fi
prefix=$1
built=${CARGO_TARGET_DIR:-target}/release
target=$built/stillpoint
header=$prefix/include/stillpoint.h
shared=$prefix/lib/libstillpoint.so
static=$prefix/lib/libstillpoint.a
package=$prefix/lib/pkgconfig/stillpoint.pc
man=$prefix/share/man/man1/stillpoint.1
bash=$prefix/share/bash-completion/completions/stillpoint
zsh=$prefix/share/zsh/site-functions/_stillpoint
fish=$prefix/share/fish/vendor_completions.d/stillpoint.fish
unit=$prefix/lib/systemd/system/stillpoint-resume.service
rc=$prefix/share/stillpoint/stillpoint.rc

if [ -n "$remove" ]; then
    rm -f "$prefix/bin/stillpoint" "$man" "$bash" "$zsh" "$fish"
    rm -f "$header" "$shared" "$static" "$package" "$unit" "$rc"
    rmdir "${rc%/*}" 2>/dev/null || true
    exit 0
fi
install -D -m 755 "$target" "$prefix/bin/stillpoint"
install -D -m 644 crates/library/include/stillpoint.h "$header"
install -D -m 755 "$built/libstillpoint.so" "$shared"
install -D -m 644 "$built/libstillpoint.a" "$static"
mkdir -p "${package%/*}"
version=$(sed -n '/^\[workspace.package\]/,/^$/s/^version = "\(.*\)"/\1/p' Cargo.toml)
cat >"$package" <<END
Name: stillpoint
Description: A running program, all of its threads, goes back to where it was
Version: $version
Cflags: -I${prefix#"${DESTDIR:-}"}/include
Libs: -L${prefix#"${DESTDIR:-}"}/lib -lstillpoint
Libs.private: -lpthread -ldl
END
# Where the command will be, which is not where it is put while a package is made.
place=${prefix#"${DESTDIR:-}"}
escaped=$(printf '%s\n' "$place" | sed 's/[&|\\]/\\&/g')
mkdir -p "${unit%/*}" "${rc%/*}"
sed "s|@PREFIX@|$escaped|g" scripts/boot/stillpoint-resume.service.in >"$unit"
sed "s|@PREFIX@|$escaped|g" scripts/boot/stillpoint.rc.in >"$rc"
chmod 644 "$unit"
chmod 755 "$rc"
mkdir -p "${man%/*}" "${bash%/*}" "${zsh%/*}" "${fish%/*}"
"$target" man >"$man"
"$target" completions bash >"$bash"
"$target" completions zsh >"$zsh"
"$target" completions fish >"$fish"
echo "installed $prefix/bin/stillpoint; stillpoint doctor tells what works here"
