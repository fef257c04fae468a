#!/usr/bin/env bash
# Builds the test guest: the distribution's kernel and a busybox initramfs with
# Dewar's guest program. Result: .cache/guest/{vmlinuz,initrd}, an initrd-small without what few guests
# need, and vmlinux where the kernel can be booted without unpacking itself, which takes an emulated
# processor a second.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$HOME/.cargo/bin:$PATH"

cache=$PWD/.cache
guest=$cache/guest
mkdir -p "$cache" "$guest"
sources=(crates/beat crates/testkit/guest scripts/build-guest.sh)
# One that was built without the guest agent is built again when that is there.
has_agent() { ! command -v qemu-ga >/dev/null || [ -e "$guest/more/bin/qemu-ga" ]; }
if [ -e "$guest/initrd-small" ] && [ -e "$guest/initrd" ] && has_agent && [ -z "$(find "${sources[@]}" -type f -newer "$guest/initrd")" ]; then
    exit 0
fi

# The newest kernel for virtual machines that the distribution has; unpacked,
# not installed.
if [ ! -e "$cache/kernel" ]; then
    for meta in linux-image-cloud-amd64 linux-image-virtual linux-image-generic; do
        package=$(apt-cache depends "$meta" 2>/dev/null | sed -n 's/ *Depends: \(linux-image-[0-9].*\)/\1/p' | head -n1 || true)
        [ -z "$package" ] || break
    done
    if [ -z "${package:-}" ]; then
        if [ -z "${DEWAR_APT_UPDATED:-}" ]; then
            if [ "$(id -u)" = 0 ]; then apt-get update -qq; else sudo apt-get update -qq; fi
            DEWAR_APT_UPDATED=1 exec "$0"
        fi
        echo "build-guest: the package lists have no kernel image" >&2
        exit 1
    fi
    # Where the kernel is split: its modules, and (Debian from 6.19 on) the kernel itself, are
    # packages of their own.
    more=("${package/linux-image-/linux-modules-}" "${package/linux-image-/linux-binary-}")
    rm -rf "$cache/kernel.part" && mkdir "$cache/kernel.part"
    echo "build-guest: fetching $package"
    (cd "$cache/kernel.part" &&
        apt-get download -qq "$package" 2>/dev/null &&
        for other in "${more[@]}"; do
            if apt-cache show "$other" >/dev/null 2>&1; then
                apt-get download -qq "$other" 2>/dev/null || true
            fi
        done &&
        for deb in *.deb; do dpkg -x "$deb" .; done && rm -f ./*.deb)
    mv "$cache/kernel.part" "$cache/kernel"
fi
# In /boot, or (from Debian's 7.3 on) beside its modules.
vmlinuz=$(find "$cache/kernel" \( -path '*/boot/vmlinuz-*' -o -path '*/lib/modules/*/vmlinuz' \) -type f | head -n1)
case "$vmlinuz" in
    */boot/vmlinuz-*) version=${vmlinuz##*/vmlinuz-} ;;
    *) version=$(basename "$(dirname "$vmlinuz")") ;;
esac
modules=$(find "$cache/kernel" -maxdepth 4 -type d -path "*/lib/modules/$version" | head -n1)

root=$guest/root
# With it goes the state of the guests that booted from another.
rm -rf "$root" "$guest/warm"
mkdir -p "$root"/{bin,dev,proc,sys,mnt,modules,lib64}
cp "$(command -v busybox)" "$root/bin/busybox"
for applet in sh mount mkdir insmod sleep cat echo poweroff reboot nice ls dd sync mknod ip ifconfig httpd; do
    ln -sf busybox "$root/bin/$applet"
done
# Copies a program and the libraries that it needs.
with_libraries() {
    local to=$1 program=$2 library
    cp "$program" "$to/bin/$(basename "$program")"
    ldd "$program" | grep -o '/[^ ]*' | while read -r library; do
        mkdir -p "$to$(dirname "$library")"
        cp -L "$library" "$to$library"
    done
}
# chrt, for a heartbeat that the guest's own load does not delay.
with_libraries "$root" "$(command -v chrt)"
# Without symbols: the guests have little memory, and all this lies in it.
rustc --edition 2024 -O -C target-feature=+crt-static -C panic=abort -C strip=symbols \
    -o "$root/bin/dewar-guest" crates/testkit/guest/main.rs
cp crates/testkit/guest/init "$root/init"
chmod +x "$root/init"

# What few guests need is in few guests' memory.
few=$guest/more
rm -rf "$few" && mkdir -p "$few/bin"
# The guest agent, where it is installed: tests need it.
if agent=$(command -v qemu-ga); then
    with_libraries "$few" "$agent"
    # It sets the hardware clock by this.
    mkdir -p "$few/sbin" "$few/var/run" "$few/run" "$few/tmp"
    ln -sf ../bin/busybox "$few/sbin/hwclock"
fi
# What tells the host about deadlines, and the program that has them.
host=$(rustc -vV | sed -n 's/^host: //p')
RUSTFLAGS='-C target-feature=+crt-static -C strip=symbols' cargo build --release -q -p dewar-beat \
    --bins --examples --target "$host"
cp "target/$host/release/dewar-beat" "target/$host/release/examples/hashes" "$few/bin/"

# The modules that are not built in, each after those that it needs.
depmod -b "${modules%/lib/modules/*}" "$version"
for module in virtio_pci virtio_blk virtio_console virtio_net ext4; do
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

cp "$vmlinuz" "$guest/vmlinuz"
# The ELF file in a bzImage, where the boot protocol says (Linux, Documentation/arch/x86/boot.rst).
number() { od -An -t "u$2" -j "$1" -N "$2" "$vmlinuz" | tr -d ' '; }
unpack_kernel() {
    local setup start length
    setup=$(number $((0x1f1)) 1)
    start=$((((setup == 0 ? 4 : setup) + 1) * 512 + $(number $((0x248)) 4)))
    length=$(number $((0x24c)) 4)
    tail -c +$((start + 1)) "$vmlinuz" | head -c "$length" >"$guest/payload"
    case "$(od -An -t x1 -N 4 "$guest/payload" | tr -d ' ')" in
        fd377a58) xz -dc ;;
        28b52ffd) zstd -dc ;;
        02214c18) lz4 -dc ;;
        1f8b*) gzip -dc ;;
    esac <"$guest/payload" 2>/dev/null
}
# What follows the payload is its length: all unpackers but zstd call that an error.
unpack_kernel >"$guest/vmlinux" || true
rm -f "$guest/payload"
# Without the note that says where to enter (PVH), QEMU cannot boot it.
if ! readelf -nW "$guest/vmlinux" 2>/dev/null | grep 'Xen .*0x0*12\b' >/dev/null; then
    rm -f "$guest/vmlinux"
    echo "build-guest: no unpacked kernel that QEMU can enter was found; guests boot vmlinuz, a second slower"
fi
(cd "$root" && find . | cpio -o -H newc --quiet) >"$guest/small.part"
# The kernel unpacks one archive after the other (Linux, Documentation/driver-api/early-userspace/buffer-format.rst).
(cd "$few" && find . | cpio -o -H newc --quiet) | cat "$guest/small.part" - >"$guest/initrd.part"
mv "$guest/small.part" "$guest/initrd-small"
mv "$guest/initrd.part" "$guest/initrd"
