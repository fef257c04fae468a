#!/usr/bin/env bash
# Installs what Dewar's build, tests and demo need (Debian 12/13, Ubuntu 24.04); with 'to-run'
# what the build and the demo do. Does nothing where everything is there.
set -euo pipefail

sudo=()
[ "$(id -u)" = 0 ] || sudo=(sudo)

# The kernel, for the test guests: fetched, never installed.
needed=(qemu-system-x86 qemu-utils busybox-static cpio e2fsprogs util-linux mount kmod iproute2 gcc libc6-dev
    make pkg-config perl xz-utils zstd lz4 binutils ca-certificates)
if [ "${1:-}" != to-run ]; then
    needed+=(redis-tools strace qemu-guest-agent swtpm openssh-client dropbear-bin
        ocl-icd-libopencl1 pocl-opencl-icd runc iptables patchelf python3 ovmf)
    # A browser for the test of the report; Ubuntu has none as a package.
    if grep -q '^ID=debian' /etc/os-release; then needed+=(chromium); fi
fi
# The second QEMU of the tests comes from Debian's archive, everywhere.
if ! grep -q '^ID=debian' /etc/os-release; then needed+=(debian-archive-keyring); fi
missing=()
for package in "${needed[@]}"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
    echo "setup: installing ${missing[*]}"
    "${sudo[@]}" apt-get update -qq
    DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

# Rust 1.85 or later: the one that is there, the distribution's, or rustup's.
version_ok() {
    command -v "$1" >/dev/null 2>&1 && command -v "${1/rustc/cargo}" >/dev/null 2>&1 &&
        [ "$(printf '1.85\n%s\n' "$("$1" --version | cut -d' ' -f2)" | sort -V | head -n1)" = 1.85 ]
}
if ! version_ok rustc; then
    "${sudo[@]}" apt-get update -qq
    newest=$(apt-cache search --names-only '^rustc' | cut -d' ' -f1 |
        grep -xE 'rustc(-1\.[0-9]+)?' | sort -V | tail -n1)
    offered=$(apt-cache policy "${newest:-rustc}" | sed -n 's/ *Candidate: //p')
    if dpkg --compare-versions "${offered:-0}" ge 1.85; then
        echo "setup: installing $newest"
        DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y -qq --no-install-recommends \
            "$newest" "${newest/rustc/cargo}" >/dev/null
        # clippy and rustfmt, where the distribution has them for this version.
        suffix=${newest#rustc}
        DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y -qq --no-install-recommends \
            "rust${suffix}-clippy" "rustfmt$suffix" >/dev/null 2>&1 ||
            DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y -qq --no-install-recommends \
                rust-clippy rustfmt >/dev/null 2>&1 || true
        if [ -n "$suffix" ]; then
            for tool in rustc cargo rustdoc rustfmt cargo-clippy clippy-driver cargo-fmt; do
                for path in "/usr/bin/$tool$suffix" "/usr/lib/rust$suffix/bin/$tool"; do
                    if [ -x "$path" ]; then "${sudo[@]}" ln -sf "$path" "/usr/local/bin/$tool"; fi
                done
            done
        fi
    else
        echo "setup: installing Rust by rustup"
        DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y -qq --no-install-recommends curl >/dev/null
        curl -sSf https://sh.rustup.rs | sh -s -- -y --profile minimal -c clippy -c rustfmt
    fi
fi
