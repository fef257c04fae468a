#!/usr/bin/env bash
# Builds the test guest: Debian 12's kernel and a busybox initramfs with Dewar's
# guest program. Result: .cache/guest/{vmlinuz,initrd}.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/bookworm.sh
export PATH="$HOME/.cargo/bin:$PATH"

cache=$PWD/.cache
guest=$cache/guest
mkdir -p "$cache" "$guest"
sources=(crates/beat crates/testkit/guest/main.rs crates/testkit/guest/init scripts/build-guest.sh)
if [ -e "$guest/initrd" ] && [ -z "$(find "${sources[@]}" -type f -newer "$guest/initrd")" ]; then
    exit 0
fi

# A kernel for virtual machines, unpacked, not installed. Debian 12's on every
# machine: Debian 13's (6.12) stops running programs after a while in a TCG
# guest of two processors and two NUMA nodes. The machine's own archive has to
# do where Debian's does not answer.
fetch_kernel() {
    local apt=$1 meta package modules
    shift
    for meta in linux-image-cloud-amd64 linux-image-virtual linux-image-generic; do
        package=$("$@" apt-cache depends "$meta" 2>/dev/null |
            sed -n 's/ *Depends: \(linux-image-[0-9].*\)/\1/p' | head -n1 || true)
        [ -z "$package" ] || break
    done
    [ -n "$package" ] || return 1
    modules=${package/linux-image-/linux-modules-}
    echo "build-guest: fetching $package"
    (cd "$apt" && "$@" apt-get download -qq "$package" &&
        { ! "$@" apt-cache show "$modules" >/dev/null 2>&1 || "$@" apt-get download -qq "$modules"; })
}
if [ ! -e "$cache/kernel/boot" ]; then
    part=$cache/kernel.part
    rm -rf "$part" && mkdir -p "$part/apt"
    sudo=()
    [ "$(id -u)" = 0 ] || sudo=(sudo)
    if ! { bookworm "$part/apt" apt-get update -qq && fetch_kernel "$part/apt" bookworm "$part/apt"; }; then
        echo "build-guest: Debian's archive does not answer; taking this machine's own kernel"
        "${sudo[@]}" apt-get update -qq
        fetch_kernel "$part/apt" env || { echo "build-guest: the package lists have no kernel image" >&2; exit 1; }
    fi
    for deb in "$part"/apt/*.deb; do dpkg -x "$deb" "$part"; done
    rm -rf "$part/apt"
    mv "$part" "$cache/kernel"
fi
version=$(basename "$cache"/kernel/boot/vmlinuz-*)
version=${version#vmlinuz-}
modules=$(find "$cache/kernel" -maxdepth 4 -type d -path "*/lib/modules/$version" | head -n1)

root=$guest/root
rm -rf "$root"
mkdir -p "$root"/{bin,dev,proc,sys,mnt,modules,lib64}
cp "$(command -v busybox)" "$root/bin/busybox"
for applet in sh mount mkdir insmod sleep cat echo poweroff reboot nice ls dd sync mknod ip ifconfig httpd; do
    ln -sf busybox "$root/bin/$applet"
done
# chrt, for a heartbeat that the guest's own load does not delay.
chrt=$(command -v chrt)
cp "$chrt" "$root/bin/chrt"
ldd "$chrt" | grep -o '/[^ ]*' | while read -r library; do
    mkdir -p "$root$(dirname "$library")"
    cp -L "$library" "$root$library"
done
rustc --edition 2024 -O -C target-feature=+crt-static -C panic=abort \
    -o "$root/bin/dewar-guest" crates/testkit/guest/main.rs
# What tells the host about deadlines, and the program that has them.
host=$(rustc -vV | sed -n 's/^host: //p')
RUSTFLAGS='-C target-feature=+crt-static' cargo build --release -q -p dewar-beat \
    --bins --examples --target "$host"
cp "target/$host/release/dewar-beat" "target/$host/release/examples/hashes" "$root/bin/"
cp crates/testkit/guest/init "$root/init"
chmod +x "$root/init"

# The modules that are not built in, each after those that it needs.
depmod -b "${modules%/lib/modules/*}" "$version"
for module in virtio_pci virtio_blk virtio_console virtio_net; do
    { modprobe -d "${modules%/lib/modules/*}" -S "$version" --show-depends "$module" 2>/dev/null || true; } |
        sed -n 's/^insmod //p'
done | awk '!seen[$1]++ {print $1}' | while read -r file; do
    name=$(basename "$file")
    case "$name" in
        *.xz) name=${name%.xz}; xz -dc "$file" >"$root/modules/$name" ;;
        *.zst) name=${name%.zst}; zstd -qdc "$file" >"$root/modules/$name" ;;
        *) cp "$file" "$root/modules/$name" ;;
    esac
    echo "$name" >>"$root/modules/order"
done
touch "$root/modules/order"

cp "$cache/kernel/boot/vmlinuz-$version" "$guest/vmlinuz"
(cd "$root" && find . | cpio -o -H newc --quiet) | gzip -1 >"$guest/initrd.part"
mv "$guest/initrd.part" "$guest/initrd"
