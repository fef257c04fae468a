#!/usr/bin/env bash
# Unpacks podman and conmon from Debian 13, with the C library that they were built for, for the tests of podman's
# containers: Debian 12's podman (4.3) takes no settings for one command. Nothing is installed.
# Result: .cache/podman/bin/podman. Without it those tests are skipped by name.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/debian-packages.sh

cache=$PWD/.cache/podman
# The programs know the path of their libraries.
if [ -x "$cache/bin/podman" ] && "$cache/bin/podman" --version >/dev/null 2>&1; then exit 0; fi
echo "fetch-podman: fetching podman from trixie"
rm -rf "$cache"
apt=$cache/apt
mkdir -p "$cache/root" "$cache/bin"
if ! fetch_debian_packages "$apt" trixie trixie podman conmon netavark; then
    echo "fetch-podman: Debian's archive does not answer; no podman" >&2
    rm -rf "$cache"
    exit 0
fi
for package in "$apt"/archives/*.deb; do
    dpkg -x "$package" "$cache/root"
done
rm -rf "$apt"
# podman starts itself again by its own name, so no loader can be put before it.
libraries=$cache/root/usr/lib/x86_64-linux-gnu
for program in usr/bin/conmon usr/lib/podman/netavark usr/bin/podman; do
    patchelf --set-interpreter "$libraries/ld-linux-x86-64.so.2" --force-rpath --set-rpath "$libraries" \
        "$cache/root/$program"
    ln -s "../root/$program" "$cache/bin/"
done
"$cache/bin/podman" --version
