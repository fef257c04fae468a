#!/usr/bin/env bash
# Runs guest tests under real kvm-amd on a machine without hardware
# virtualisation: QEMU's TCG emulates AMD SVM with nested paging, so a TCG
# machine (L1, Debian 13) plays the host and the test guests (L2) run under its
# KVM. Slow, but the kernel code is the real one.
#
# L1 has one processor: with two its kernel panics now and then ("stack guard
# page was hit" in a vCPU thread, right after a #VMEXIT), with QEMU 7.2 and 10.0
# as the emulator. With one, an idle L1 now and then misses its timer, and
# sleeps until something comes from outside: so a newline comes to its console
# twice a second. The tests wait six times as long as usual.
#
# usage: kvm-lab.sh prepare | kvm-lab.sh run [TEST...]
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$HOME/.cargo/bin:$PATH"
repo=$PWD
lab=$repo/.cache/kvm-lab
mkdir -p "$lab"
source scripts/debian-vm.sh

all=(
    exact::every_page_is_that_of_the_pause
    consistent::under_kvm
    killed::five_kills_under_kvm
    upgrade::moves_and_freezes_under_kvm
    moves::a_guest_moves_again_and_again_under_kvm
    warm_reboot::a_guest_reboots_warm_under_kvm
)

prepare() {
    if is_made "$lab/l1.img" kvm-lab.sh; then return; fi
    echo "kvm-lab: building the L1 system (Debian 13)"
    debian_root "$lab/root" qemu-system-x86 qemu-utils iproute2 e2fsprogs
    system_image "$lab/root" "$lab/l1.img" 2500M
}

# The disk with these tests: binaries at the paths that they were built for.
tests_disk() {
    local tree=$lab/tests
    rm -rf "$tree" && mkdir -p "$tree/guest" "$tree/bin"
    cp .cache/guest/vmlinu[xz] .cache/guest/initrd "$tree/guest/"
    cargo build -q -p dewar-cli
    cp target/debug/dewar "$tree/dewar"
    binary=$(test_program guests)
    cp "$binary" "$tree/bin/guests"
    strip -g "$tree/dewar" "$tree"/bin/*
    cat >"$tree/init" <<INIT
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
mkdir -p /dev/shm /run; mount -t tmpfs none /dev/shm; mount -t tmpfs none /run; mount -t tmpfs none /tmp
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root RUST_BACKTRACE=0
stty -echo </dev/ttyS0
modprobe kvm_amd
mkdir -p $repo/target/debug
cp /lab/dewar $repo/target/debug/dewar
export DEWAR_TEST_GUEST=/lab/guest DEWAR_TEST_ACCEL=kvm DEWAR_TEST_SLOW=1
echo "L1: Linux \$(uname -r), \$(qemu-system-x86_64 --version | head -n1)"
[ -e /dev/kvm ] || echo "L1: no /dev/kvm"
failed=0
# A name that no test has any more must not pass.
run() {
    timeout 1500 /lab/bin/guests "\$1" --test-threads=1 --nocapture 2>&1 | tee /tmp/said
    grep -q '^test result: ok. [1-9]' /tmp/said || failed=1
}
for test in $*; do run \$test; done
echo "kvm-lab: exit \$failed"
sync
echo o >/proc/sysrq-trigger
sleep 10
INIT
    rm -f "$lab/tests.img"
    mkfs.ext4 -q -F -d "$tree" "$lab/tests.img" 300M
}

run() {
    prepare
    tests_disk "${@:-${all[@]}}"
    local log=$lab/log inside=$lab/root/lab
    mkdir -p "$inside"
    cp --sparse=always "$lab/l1.img" "$inside/l1.img"
    mv "$lab/tests.img" "$inside/tests.img"
    cp "$lab/vmlinuz" "$lab/initrd" "$inside/"
    # The emulator is Debian 13's too, in its own root: the same everywhere.
    timeout -k 10 2400 chroot "$lab/root" qemu-system-x86_64 -machine pc \
        -accel tcg,thread=multi,tb-size=1024 -cpu EPYC,svm=on,npt=on \
        -smp 1 -m 4G -nodefaults -display none -serial stdio -no-reboot \
        -kernel /lab/vmlinuz -initrd /lab/initrd \
        -append "console=ttyS0 quiet panic=-1 mitigations=off nokaslr audit=0" \
        -drive file=/lab/l1.img,format=raw,if=virtio,cache=unsafe \
        -drive file=/lab/tests.img,format=raw,if=virtio,cache=unsafe \
        < <(while sleep 0.5; do echo; done) 2> >(grep -v 'TCG doesn.t support' >&2) | tee "$log"
    rm -f "$inside"/*.img
    grep -q '^kvm-lab: exit 0' "$log"
}

command=${1:-run}
shift || true
"$command" "$@"
