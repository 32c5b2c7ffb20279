#!/bin/sh
# Usage: watchdog.sh LOG PID SECONDS TOTAL. Looks after PID, below which `cargo test` runs into LOG, until it is killed
# or PID has ended. When LOG has not grown for SECONDS, a test hangs: this writes into LOG what every process waits for,
# and ends the test's executable, so that the hang has a name and the other tests still run. After TOTAL seconds it ends
# whatever still runs: tests that say what failed are worth more than a machine that gives up on them.
set -u
log=$1 root=$2 patience=$3 total=$4

children() { cat "/proc/$1/task"/*/children 2>/dev/null; }

# A process and all below it.
tree() {
    echo "$1"
    for child in $(children "$1"); do tree "$child"; done
}

tell() {
    echo "-- $1: $(tr '\0' ' ' <"/proc/$1/cmdline" | cut -c 1-200)"
    for task in "/proc/$1/task"/*; do
        echo "   thread ${task##*/} ($(cat "$task/comm")) $(sed -n 's/^State:\t//p' "$task/status")," \
            "call $(cut -d ' ' -f 1-4 "$task/syscall"), in $(sed 's/^[^ ]* //; s/+.*//' "$task/stack" | head -5 | tr '\n' ' ')"
    done
}

# Why, and what every process waits for; also those that a test has left to the first process.
report() {
    echo "$1; what runs:"
    for process in /proc/[0-9]*; do
        [ -n "$(readlink "$process/exe")" ] && tell "${process#/proc/}"
    done
} >>"$log" 2>/dev/null

# Ends the executable of the tests that runs now; cargo goes on with the next.
end() {
    for process in $(tree "$root"); do
        executable=$(readlink "/proc/$process/exe")
        case $executable in
        */deps/*)
            echo "ended: $executable" >>"$log"
            kill -s KILL "$process"
            return
            ;;
        esac
    done
}

until=$(($(date +%s) + total)) size=0 quiet=0
while kill -0 "$root" 2>/dev/null && [ "$(date +%s)" -lt "$until" ]; do
    sleep 2
    now=$(stat -c %s "$log")
    if [ "$now" != "$size" ]; then
        size=$now quiet=0
        continue
    fi
    quiet=$((quiet + 2))
    if [ "$quiet" -ge "$patience" ]; then
        report "no test has ended for $patience s"
        end
        quiet=0
    fi
done
kill -0 "$root" 2>/dev/null || exit 0
report "the tests take longer than $total s in all"
while kill -0 "$root" 2>/dev/null; do
    end
    sleep 1
done
