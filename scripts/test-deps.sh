#!/bin/sh
# Installs the Debian packages whose programs the tests use, as root and where apt is at hand. Whatever is missing in
# the end is named: the tests that need it skip themselves and say so. STILLPOINT_NO_APT=1 installs nothing.
set -u

# package:what shows that it is there (a command, or a file)
wanted="
python3:python3
iproute2:ip
python3-numpy:/usr/lib/python3/dist-packages/numpy
python3-venv:/usr/share/doc/python3-venv
sqlite3:sqlite3
xz-utils:xz
zstd:zstd
redis-server:redis-server
redis-tools:redis-cli
golang-go:go
default-jdk-headless:javac
musl-tools:musl-gcc
gcc:gcc
make:make
git:git
nginx-light:/usr/sbin/nginx
memcached:memcached
gunicorn:/usr/bin/gunicorn
postgresql:/usr/lib/postgresql
nodejs:node
tmux:tmux
python3-ipykernel:/usr/lib/python3/dist-packages/ipykernel
python3-jupyter-client:/usr/lib/python3/dist-packages/jupyter_client
openmpi-bin:mpirun
libopenmpi-dev:/usr/share/doc/libopenmpi-dev
vim:vim
htop:htop
less:less
bindfs:bindfs
clang:clang
llvm-dev:llvm-config
mariadb-server:/usr/sbin/mariadbd
haproxy:/usr/sbin/haproxy
puma:puma
ruby:ruby
erlang-base:escript
sbcl:sbcl
qemu-user:qemu-x86_64
"

present() {
    case $1 in
        /*) [ -e "$1" ] ;;
        *) command -v "$1" >/dev/null ;;
    esac
}

missing() {
    for pair in $wanted; do
        present "${pair#*:}" || printf '%s ' "${pair%%:*}"
    done
}

packages=$(missing)
[ -n "$packages" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && [ -z "${STILLPOINT_NO_APT:-}" ]; then
    # A mirror that does not answer must not use up the time of the tests: what is not there in time is skipped.
    until=$(($(date +%s) + 900))
    apt() {
        left=$((until - $(date +%s)))
        [ "$left" -gt 0 ] || return 1
        DEBIAN_FRONTEND=noninteractive timeout --kill-after=10 "$left" apt-get -qq -y -o Acquire::Retries=2 "$@" \
            >/dev/null 2>&1 </dev/null
    }
    echo "== installing $packages"
    # The servers among them are not to be started.
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod +x "$policy" && trap 'rm -f "$policy"' EXIT
    fi
    apt update
    for package in $packages; do # one by one: a package that a release lacks must not keep the others away
        begin=$(date +%s)
        apt --no-install-recommends install "$package" || echo "$package: not installed"
        echo "$package: $(($(date +%s) - begin)) s"
    done
    packages=$(missing)
fi
[ -z "$packages" ] || echo "== skipped, because it is not installed: what needs $packages"
exit 0
