#!/bin/sh
# A computation of shortest paths is checkpointed while it runs, killed, restored, and runs to its end. Its result must
# be that of an undisturbed run.
#
# DEMO_NODES sets the size of the graph, DEMO_CHECKPOINTS how many checkpoints are taken.
set -eu
cd "$(dirname "$0")/.."
release=$(cd "${CARGO_TARGET_DIR:-target}/release" && pwd)
nodes=${DEMO_NODES:-5500}
checkpoints=${DEMO_CHECKPOINTS:-4}
stillpoint=$release/stillpoint
apsp=$release/apsp

dir=$(mktemp -d "${TMPDIR:-/tmp}/stillpoint-demo.XXXXXX")
STILLPOINT_STORE=$dir/store
export STILLPOINT_STORE
pid=
clean_up() {
    [ -z "$pid" ] || kill -9 "$pid" 2>/dev/null || true
    rm -rf "$dir"
}
trap clean_up EXIT
trap 'exit 130' INT TERM HUP

now() { date +%s.%N; }
since() { echo "$1 $(now)" | awk '{ printf "%.1f", $2 - $1 }'; }
# field KEY: the value of a key of the JSON object on standard input
field() { sed -n "s/.*\"$1\":\"\{0,1\}\([^,\"}]*\).*/\1/p"; }
mebibytes() { awk -v b="$1" 'BEGIN { printf "%.1f MiB", b / 1048576 }'; }
progress() { grep -a '%' "$dir/log" | tail -n 1; }
# A process that ended may stay behind as a zombie until its parent looks.
ended() { ! grep -q '^State:.[^ZX]' "/proc/$1/status" 2>/dev/null; }

echo "A graph of $nodes nodes."
"$apsp" --generate "$nodes" 1 "$dir/graph"

echo "First an undisturbed run …"
begin=$(now)
"$apsp" "$dir/graph" "$dir/expected" 2 >"$dir/expected.log"
undisturbed=$(since "$begin")

echo "… then one as a job, with $checkpoints checkpoints, a SIGKILL and a restore."
begin=$(now)
"$stillpoint" run --name demo --detach --json -- "$apsp" "$dir/graph" "$dir/result" 2 >"$dir/log" 2>"$dir/run"
pid=$(field pid <"$dir/run")
pause=$(awk -v t="$undisturbed" -v n="$checkpoints" 'BEGIN { printf "%.2f", t * 0.6 / n }')

echo
printf '%-14s %8s  %12s  %12s  %10s  %10s\n' checkpoint at memory written pause time
i=0
while [ "$i" -lt "$checkpoints" ]; do
    i=$((i + 1))
    sleep "$pause"
    "$stillpoint" checkpoint demo --json >"$dir/report"
    printf '%-14s %8s  %12s  %12s  %7.1f ms  %7.0f ms\n' "demo@$(field id <"$dir/report")" "$(progress)" \
        "$(mebibytes "$(field bytes <"$dir/report")")" "$(mebibytes "$(field written_bytes <"$dir/report")")" \
        "$(field pause_ms <"$dir/report")" "$(field wall_ms <"$dir/report")"
done
sleep "$(awk -v p="$pause" 'BEGIN { printf "%.2f", p / 3 }')"

echo
echo "killed at $(progress) (process $pid)"
kill -9 "$pid"
until ended "$pid"; do sleep 0.05; done
pid=

"$stillpoint" restore demo --detach --json >"$dir/report"
pid=$(field pid <"$dir/report")
printf 'restored at %s as process %s: skeleton %.1f ms, loaded %.0f ms\n' "$(progress)" "$pid" \
    "$(field skeleton_ms <"$dir/report")" "$(field loaded_ms <"$dir/report")"
until ended "$pid"; do sleep 0.1; done
pid=
echo "ended: $(tail -n 1 "$dir/log")"
echo "time: $undisturbed s undisturbed, $(since "$begin") s with checkpoints, kill and restore"

echo
if cmp "$dir/expected" "$dir/result"; then
    echo "OK: the restored program's result is that of the undisturbed run, byte for byte."
else
    echo "FAILED: the results differ."
    exit 1
fi
