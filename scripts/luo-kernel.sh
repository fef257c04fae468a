#!/usr/bin/env bash
# Builds the kernel of the lab's host that keeps memory by itself (Live Update Orchestrator), once, into .cache: no
# distribution's kernel has it switched on yet. From Debian's source, with a small configuration of our own; 5 minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
version=7.3
config=scripts/host-reboot/luo.config
made=$PWD/.cache/luo-kernel
if [ -e "$made/vmlinuz" ] && [ "$made/vmlinuz" -nt "$config" ]; then exit 0; fi

missing=()
for package in flex bison bc libelf-dev libssl-dev gcc make xz-utils curl ca-certificates; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

echo "luo-kernel: building Linux $version (5 minutes on two processors)"
# From the Debian mirror that this machine uses, where it uses one.
mirror=$(grep -rhoE 'https?://[^ ]+/debian/?( |$)' /etc/apt/sources.list /etc/apt/sources.list.d 2>/dev/null |
    head -n1 | tr -d ' ' || true)
mirror=${mirror:-http://deb.debian.org/debian}
build=$made/build
rm -rf "$build" && mkdir -p "$build"
package=$(curl -fsS "${mirror%/}/dists/trixie-backports/main/binary-amd64/Packages.xz" | xz -dc |
    awk -v name="linux-source-$version" '$1 == "Package:" { ours = $2 == name } ours && $1 == "Filename:" { print $2 }' |
    tail -n1)
[ -n "$package" ] || { echo "luo-kernel: Debian's backports have no linux-source-$version any more" >&2; exit 1; }
curl -fsS -o "$build/source.deb" "${mirror%/}/$package"
dpkg-deb -x "$build/source.deb" "$build/deb"
tar -C "$build" -xf "$build"/deb/usr/src/linux-source-*.tar.xz
rm -rf "$build/deb" "$build/source.deb"
(
    cd "$build"/linux-source-*
    make -s tinyconfig
    scripts/kconfig/merge_config.sh -m -Q .config "$OLDPWD/$config" >/dev/null
    make -s olddefconfig
    grep -v '^#' "$OLDPWD/$config" | while read -r line; do
        grep -qx "$line" .config || { echo "luo-kernel: $line could not be had" >&2; exit 1; }
    done
    make -s -j"$(nproc)" bzImage
    cp arch/x86/boot/bzImage "$made/vmlinuz.part"
)
mv "$made/vmlinuz.part" "$made/vmlinuz"
rm -rf "$build"
