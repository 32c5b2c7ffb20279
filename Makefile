# The ways to build, try, test, measure and install Stillpoint.

CARGO  ?= cargo
PREFIX ?= /usr/local

.PHONY: all build demo test bench install uninstall clean

all: build

build:
	$(CARGO) build --release

# A real computation is checkpointed, killed and restored; its result is compared with an undisturbed run.
demo:
	$(CARGO) build --release -p stillpoint -p apsp
	sh scripts/demo.sh

# Formatting, lints, and all tests; the last line is the sum.
test:
	sh scripts/test.sh

# Pauses, times and slowdown of every engine, against a raw write of the same bytes and other tools where they are
# installed: about 15 minutes. BENCH_ONLY=pause,durable measures a part; bench/src/main.rs has the names and the rest.
bench:
	$(CARGO) build --release --workspace
	sh scripts/bench.sh

install: build
	sh scripts/install.sh "$(DESTDIR)$(PREFIX)"

uninstall:
	sh scripts/install.sh --remove "$(DESTDIR)$(PREFIX)"

clean:
	$(CARGO) clean
