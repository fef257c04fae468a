# Two commands do everything: `make demo` and `make test`. Both install what
# they need (Debian 12/13, Ubuntu 24.04; root or sudo).

SHELL := /bin/bash
export PATH := $(HOME)/.cargo/bin:$(PATH)
BENCH_OUT ?= target/bench
# dewar itself, dewar-link and the benchmarks.
BENCH_PROGRAMS = cargo build --release -q -p dewar-cli -p dewar-testkit -p dewar-bench && mkdir -p $(BENCH_OUT)

.PHONY: help demo test prepared setup setup-to-run guest next-qemu criu podman lint test-fast test-long test-sweeps coverage test-kvm test-hosts test-host-reboot test-debian bench-checkpoint bench-store bench-tlc bench-upgrade bench-migrate bench-codecs bench-containers bench-move bench-warm bench-prefetch bench-warmcache bench-warmweb bench-host-reboot bench-qos fuzz install clean

help:
	@echo "make demo              boot a guest, checkpoint it while it runs, kill it, bring it back"
	@echo "make test              set up everything and run all tests but the long ones"
	@echo "make test-fast         the libraries, and the main jobs with real guests; two minutes"
	@echo "make test-long         the tests that 'make test' leaves out: many rounds, slow links, variants of what it tests"
	@echo "make test-sweeps       all guest tests, trying every step and call where 'make test' tries some"
	@echo "make coverage          which lines of the crates 'make test' runs"
	@echo "make test-kvm          the tests that need real KVM, in a nested machine"
	@echo "make test-hosts        the tests that need hosts of their own, between small virtual machines"
	@echo "make test-host-reboot  other kernels under hosts whose guests keep their memory"
	@echo "make test-debian       reboots of a whole Debian from a disk that stays warm"
	@echo "make bench-checkpoint  measure checkpoint and restore beside stock QEMU"
	@echo "make bench-store       measure stores: incremental checkpoints, files, Redis, many images"
	@echo "make bench-tlc         TLC's experiment: checkpoints of a guest that runs HPC Challenge"
	@echo "make bench-upgrade     measure upgrade, freeze and thaw beside stock QEMU and a boot"
	@echo "make bench-migrate     measure moves to another host beside QEMU's own, over one link"
	@echo "make bench-codecs      measure page codecs on a core and on a GPU"
	@echo "make bench-containers  measure checkpoints of containers beside the runtime's own"
	@echo "make bench-move        measure moves of containers beside the runtime's checkpoint, a copy and its restore"
	@echo "make bench-warm        measure what it costs to learn which pages are used, and how well they are found and used"
	@echo "make bench-prefetch    measure what a container reads that moves between small machines, with and without its files"
	@echo "make bench-warmcache   measure what a guest reads first after a reboot, with its cache kept and without"
	@echo "make bench-warmweb     measure a web server in a guest that reboots, with its cache kept and without"
	@echo "make bench-host-reboot measure how long guests are away while the host's kernel is replaced, beside a shutdown and a save"
	@echo "make bench-qos         measure deadlines met and CPU reserved, in a guest and as a process"
	@echo "make install           put dewar, dewar-beat, man pages, completions and units into /usr/local"
	@echo "make lint              formatting, clippy and rustdoc, as 'make test' does first"
	@echo "make fuzz              fuzz the readers of images, migrations and CRIU's files for longer than the tests do"
	@echo "make clean             remove what was built"

setup:
	@scripts/setup.sh

# What the demo and 'make install' need, without what only tests do.
setup-to-run:
	@scripts/setup.sh to-run

# Its rustc is none of make's jobs.
guest: setup-to-run
	@env -u MAKEFLAGS -u MFLAGS scripts/build-guest.sh

next-qemu: setup
	@scripts/fetch-qemu.sh

criu: setup
	@scripts/fetch-criu.sh

podman: setup
	@scripts/fetch-podman.sh

demo: guest
	@echo "building dewar and the demo (a few minutes, the first time)"
	cargo build --release -p dewar-cli -p dewar-testkit
	@target/release/dewar-demo target/release/dewar

lint: setup
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -q -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --lib -q
	@if command -v cargo-deny >/dev/null; then cargo deny -L error check bans licenses sources; \
	else echo "SKIPPED cargo deny check: cargo-deny is not installed"; fi

# The first build needs nothing for the next ones, and is a sixth faster without.
ifeq ($(wildcard target/debug),)
test: export CARGO_INCREMENTAL = 0
endif
test: setup
	@$(MAKE) --no-print-directory --jobs=5 --output-sync=target prepared
	scripts/test.sh

# What is fetched comes while the code is looked through.
prepared: guest lint next-qemu criu podman

test-long test-sweeps: setup guest next-qemu criu podman
	scripts/test.sh $(@:test-%=%)

test-fast: setup guest next-qemu criu podman
	scripts/test-fast.sh

coverage: setup guest next-qemu criu podman
	scripts/coverage.sh

test-kvm: setup guest
	scripts/kvm-lab.sh run

test-hosts: setup guest
	scripts/hosts-lab.sh run --skip host_reboot::

# Without the kernel that keeps memory by itself the tests that need it are skipped by name.
test-host-reboot: setup guest
	scripts/luo-kernel.sh || true
	scripts/hosts-lab.sh run host_reboot::

test-debian: setup guest
	scripts/debian-guest.sh run

bench-checkpoint: setup guest
	@$(BENCH_PROGRAMS)
	@target/release/dewar-bench target/release/dewar $(BENCH_OUT)/checkpoint.json $(BENCH_ARGS)

# The order of HPC Challenge's matrix.
HPCC_N ?= 5000

bench-tlc: setup guest
	@scripts/build-hpcc.sh $(HPCC_N)
	@$(BENCH_PROGRAMS)
	@DEWAR_TEST_GUEST=.cache/hpcc target/release/dewar-bench-tlc target/release/dewar $(BENCH_OUT)/tlc.json $(BENCH_ARGS)

bench-store: setup guest
	@$(BENCH_PROGRAMS)
	@target/release/dewar-bench-store target/release/dewar $(BENCH_OUT)/store.json $(BENCH_ARGS)

bench-upgrade: setup guest next-qemu
	@$(BENCH_PROGRAMS)
	@target/release/dewar-bench-upgrade target/release/dewar $(BENCH_OUT)/upgrade.json $(BENCH_ARGS)

bench-migrate: setup guest
	@$(BENCH_PROGRAMS)
	@target/release/dewar-bench-migrate target/release/dewar $(BENCH_OUT)/migrate.json $(BENCH_ARGS)

bench-codecs: setup
	@$(BENCH_PROGRAMS)
	@target/release/dewar-bench-codecs $(BENCH_OUT)/codecs.json $(BENCH_ARGS)

bench-containers: setup guest criu podman
	@$(BENCH_PROGRAMS)
	@target/release/dewar-bench-containers target/release/dewar $(BENCH_OUT)/containers.json $(BENCH_ARGS)

bench-move: setup guest criu
	@$(BENCH_PROGRAMS)
	@target/release/dewar-bench-move target/release/dewar $(BENCH_OUT)/move.json $(BENCH_ARGS)

bench-warm: setup guest criu
	@$(BENCH_PROGRAMS)
	@target/release/dewar-bench-warm target/release/dewar $(BENCH_OUT)/warm.json $(BENCH_ARGS)

bench-prefetch: setup guest
	@$(BENCH_PROGRAMS)
	@scripts/hosts-lab.sh bench target/release/dewar-bench-prefetch $(BENCH_OUT)/prefetch.json $(BENCH_ARGS)

bench-warmcache: setup guest
	@$(BENCH_PROGRAMS)
	@target/release/dewar-bench-warmcache target/release/dewar $(BENCH_OUT)/warmcache.json $(BENCH_ARGS)

bench-warmweb: setup guest
	@scripts/debian-guest.sh prepare
	@$(BENCH_PROGRAMS)
	@target/release/dewar-bench-warmweb target/release/dewar $(BENCH_OUT)/warmweb.json .cache/debian-guest $(BENCH_ARGS)

bench-host-reboot: setup guest
	@scripts/luo-kernel.sh || true
	@$(BENCH_PROGRAMS)
	@scripts/hosts-lab.sh bench target/release/dewar-bench-host-reboot $(BENCH_OUT)/host-reboot.json $(BENCH_ARGS)

bench-qos: setup guest
	@$(BENCH_PROGRAMS)
	@target/release/dewar-bench-qos target/release/dewar $(BENCH_OUT)/qos.json $(BENCH_ARGS)

fuzz:
	scripts/fuzz.sh

install: guest
	cargo build --release -p dewar-cli
	install -D -m 755 .cache/guest/more/bin/dewar-beat $(DESTDIR)/usr/local/bin/dewar-beat
	install -D -m 755 target/release/dewar $(DESTDIR)/usr/local/bin/dewar
	target/release/dewar man $(DESTDIR)/usr/local/share/man/man1
	install -d $(DESTDIR)/usr/local/share/bash-completion/completions
	install -D -m 644 -t $(DESTDIR)/usr/local/lib/systemd/system contrib/systemd/*.service
	target/release/dewar completions bash >$(DESTDIR)/usr/local/share/bash-completion/completions/dewar

clean:
	cargo clean
	rm -rf .cache
