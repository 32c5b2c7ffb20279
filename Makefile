# The ways to build, try, test, measure and install Stillpoint.

CARGO  ?= cargo
PREFIX ?= /usr/local

.PHONY: all build demo check test soak faults bench install uninstall clean

all: build

build:
	$(CARGO) build --release

# A real computation is checkpointed, killed and restored; its result is compared with an undisturbed run.
demo:
	$(CARGO) build --release -p stillpoint -p apsp
	sh scripts/demo.sh

# For every commit: formatting, lints, the tests of each crate, and one program through all of its life.
check:
	sh scripts/test.sh check

# All of that and every feature, engine and program once; the last line is the sum.
test:
	sh scripts/test.sh test

# The same scenarios with all engines, thousands of kills and random moments, for MINUTES (60), by the seed SEED.
soak:
	sh scripts/test.sh soak

# That a run notices a wrong byte and a killed program, in spite of second attempts: faults on purpose.
faults:
	sh scripts/faults.sh

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
