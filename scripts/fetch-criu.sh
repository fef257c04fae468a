#!/usr/bin/env bash
# Unpacks CRIU 4.1 of Debian 13 with the C library that it was built for, for the tests of containers: Debian 12's
# own (3.17) fails on kernels of today, and Ubuntu 24.04 has none. Nothing is installed.
# Result: .cache/criu/criu. Without it those tests are skipped by name.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/debian-packages.sh

cache=$PWD/.cache/criu
[ -x "$cache/criu" ] && exit 0
echo "fetch-criu: fetching CRIU from trixie"

rm -rf "$cache.part"
apt=$cache.part/apt
mkdir -p "$cache.part/root"
if ! fetch_debian_packages "$apt" trixie trixie criu; then
    echo "fetch-criu: Debian's archive does not answer; no CRIU" >&2
    exit 0
fi
for package in "$apt"/archives/*.deb; do
    dpkg -x "$package" "$cache.part/root"
done
rm -rf "$apt"
cat >"$cache.part/criu" <<'WRAPPER'
#!/bin/sh
root=$(dirname "$0")/root
libraries=$root/usr/lib/x86_64-linux-gnu
exec "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries" "$root/usr/sbin/criu" "$@"
WRAPPER
chmod +x "$cache.part/criu"
"$cache.part/criu" --version | head -n1
rm -rf "$cache"
mv "$cache.part" "$cache"
