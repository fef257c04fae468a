#!/usr/bin/env bash
# Unpacks another real version of QEMU beside the distribution's, for the tests
# of `dewar upgrade`: Debian 12's backport (10.0), or Debian 12's own (7.2)
# where the machine's is 10 or later. Nothing is installed.
# Result: .cache/qemu-next/qemu-system-x86_64. Without it those tests are
# skipped by name.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/debian-packages.sh

cache=$PWD/.cache/qemu-next
program=$cache/qemu-system-x86_64
[ -x "$program" ] && exit 0
own=$(qemu-system-x86_64 --version | sed -n 's/.*version \([0-9]*\)\..*/\1/p')
suite=bookworm-backports
[ "$own" -lt 10 ] || suite=bookworm
echo "fetch-qemu: fetching QEMU from $suite"

rm -rf "$cache.part"
apt=$cache.part/apt
mkdir -p "$cache.part/root"
if ! fetch_debian_packages "$apt" "bookworm bookworm-backports" "$suite" qemu-system-x86 seabios; then
    echo "fetch-qemu: Debian's archive does not answer; no second QEMU" >&2
    exit 0
fi
for package in "$apt"/archives/*.deb; do
    case $(basename "$package") in
        # The machine's own C library is newer, and must match its loader.
        libc6_* | libgcc-s1_* | libstdc++6_*) ;;
        *) dpkg -x "$package" "$cache.part/root" ;;
    esac
done
rm -rf "$apt"
cat >"$cache.part/qemu-system-x86_64" <<'WRAPPER'
#!/bin/sh
root=$(dirname "$0")/root
libraries=$root/usr/lib/x86_64-linux-gnu:$root/lib/x86_64-linux-gnu
export QEMU_MODULE_DIR=$root/usr/lib/x86_64-linux-gnu/qemu
LD_LIBRARY_PATH=$libraries exec "$root/usr/bin/qemu-system-x86_64" \
    -L "$root/usr/share/qemu" -L "$root/usr/share/seabios" -L "$root/usr/lib/ipxe/qemu" "$@"
WRAPPER
chmod +x "$cache.part/qemu-system-x86_64"
"$cache.part/qemu-system-x86_64" --version | head -n1
rm -rf "$cache"
mv "$cache.part" "$cache"
