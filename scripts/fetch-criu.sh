#!/usr/bin/env bash
# Unpacks CRIU, and a crun that was built with it, from Debian's next release, with the C library that they were
# built for, for the tests of containers. Debian 12's CRIU (3.17) fails on kernels of today, Debian 13's (4.1) at
# TCP sockets since Linux 6.16, and Ubuntu 24.04 has none. Nothing is installed.
# Result: .cache/criu/criu and .cache/criu/crun. Without them those tests are skipped by name.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/debian-packages.sh

cache=$PWD/.cache/criu
[ -x "$cache/criu" ] && exit 0
apt=$cache.part/apt
for suite in forky trixie none; do
    if [ $suite = none ]; then
        echo "fetch-criu: Debian's archive does not answer; no CRIU" >&2
        exit 0
    fi
    echo "fetch-criu: fetching CRIU from $suite"
    rm -rf "$cache.part"
    mkdir -p "$cache.part/root"
    if fetch_debian_packages "$apt" $suite $suite criu crun libcriu2; then break; fi
done
for package in "$apt"/archives/*.deb; do
    dpkg -x "$package" "$cache.part/root"
done
rm -rf "$apt"
for program in usr/sbin/criu usr/bin/crun; do
    cat >"$cache.part/${program##*/}" <<WRAPPER
#!/bin/sh
root=\$(dirname "\$0")/root
libraries=\$root/usr/lib/x86_64-linux-gnu
exec "\$libraries/ld-linux-x86-64.so.2" --library-path "\$libraries" "\$root/$program" "\$@"
WRAPPER
    chmod +x "$cache.part/${program##*/}"
done
"$cache.part/criu" --version | head -n1
rm -rf "$cache"
mv "$cache.part" "$cache"
