#!/bin/bash
# Usage: plainly.sh COMMAND…: runs it as if from a fresh login, whoever starts it: no descriptors but the standard ones,
# default signal actions, the usual umask, limits and locale, no terminal's kind. (The signal mask is empty, for what starts
# the tests empties it.) Where it may, it has a network of its own, in which nobody takes a port that is free for a moment.
for descriptor in /proc/self/fd/*; do
    number=${descriptor##*/}
    [ "$number" -gt 2 ] && eval "exec $number>&-"
done
umask 022
ulimit -S -c 0
ulimit -S -n 1024 2>/dev/null
ulimit -S -s 8192 2>/dev/null
unset LANG LANGUAGE "${!LC_@}"
export LC_ALL=C.UTF-8 TERM=dumb
alone=(unshare --net sh -c 'ip link set lo up && exec "$@"' sh)
"${alone[@]}" true 2>/dev/null || alone=()
exec "${alone[@]}" env --default-signal "$@"
