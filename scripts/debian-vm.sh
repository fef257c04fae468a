# What the labs (kvm-lab.sh, hosts-lab.sh) share: a Debian 13 system in an image, and an initramfs that starts
# what is on a second disk of it. To be sourced.

# is_made IMAGE SCRIPT: whether an image is there that was made by this script as it is.
is_made() {
    [ -e "$1" ] && [ "$1" -nt scripts/debian-vm.sh ] && [ "$1" -nt "scripts/$2" ]
}

# debian_root FOLDER PACKAGE...: a Debian 13 with these packages, without what only people read.
debian_root() {
    local root=$1 package missing=() mirror
    shift
    for package in mmdebstrap debian-archive-keyring; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
    done
    if [ ${#missing[@]} -gt 0 ]; then
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
    fi
    # From the Debian mirror that this machine uses, where it uses one.
    mirror=$(grep -rhoE 'https?://[^ ]+/debian/?( |$)' /etc/apt/sources.list /etc/apt/sources.list.d 2>/dev/null |
        head -n1 | tr -d ' ' || true)
    rm -rf "$root"
    mmdebstrap --quiet --variant=apt --mode=root --include="linux-image-cloud-amd64,kmod,procps,util-linux,$(
        IFS=,
        echo "$*"
    )" trixie "$root" ${mirror:+"$mirror"}
    rm -rf "$root"/usr/share/{doc,man,locale} "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/*
}

# system_image ROOT IMAGE SIZE: a file system of this size with what is in ROOT; its kernel and initramfs beside it.
# The image comes last: it says that all is made.
system_image() {
    rm -f "$2" "$2.part"
    truncate -s "$3" "$2.part"
    mkfs.ext4 -q -F -d "$1" "$2.part"
    kernel_and_initrd "$1" "$(dirname "$2")"
    mv "$2.part" "$2"
}

# kernel_and_initrd ROOT FOLDER [INIT]: its kernel as FOLDER/vmlinuz, and an initramfs FOLDER/initrd that mounts the
# first disk as the root and the second, if there is one, under /lab, and becomes INIT: /lab/init, where nothing is said.
kernel_and_initrd() {
    local root=$1 folder=$2 start=${3:-/bin/sh /lab/init} version init=$2/initrd-root module file name applet
    version=$(basename "$root"/boot/vmlinuz-*)
    version=${version#vmlinuz-}
    cp "$root/boot/vmlinuz-$version" "$folder/vmlinuz"
    rm -rf "$init" && mkdir -p "$init"/{bin,proc,sys,dev,root,modules}
    cp "$(command -v busybox)" "$init/bin/"
    for applet in sh mount insmod switch_root mkdir sleep; do ln -sf busybox "$init/bin/$applet"; done
    # ext4 may be built in.
    for module in virtio_pci virtio_blk ext4; do
        modprobe -d "$root" -S "$version" --show-depends "$module" 2>/dev/null || [ "$module" = ext4 ]
    done | sed -n 's/^insmod \([^ ]*\).*/\1/p' | awk '!seen[$1]++' | while read -r file; do
        name=$(basename "${file%.xz}")
        case "$file" in *.xz) xz -dc "$file" >"$init/modules/$name" ;; *) cp "$file" "$init/modules/$name" ;; esac
        echo "$name" >>"$init/modules/order"
    done
    cat >"$init/init" <<INIT
#!/bin/sh
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
while read -r module; do insmod /modules/\$module 2>/dev/null; done </modules/order
mount -t ext4 /dev/vda /root
if [ -e /dev/vdb ]; then
    mkdir -p /root/lab
    mount -t ext4 /dev/vdb /root/lab || mount -t ext4 -o ro /dev/vdb /root/lab
fi
exec switch_root /root $start
INIT
    chmod +x "$init/init"
    (cd "$init" && find . | cpio -o -H newc --quiet) | gzip -1 >"$folder/initrd"
}

# test_program NAME: builds a test program of dewar's guests, and says where it is.
test_program() {
    cargo test -q -p dewar-cli --test "$1" --no-run --message-format=json |
        sed -n 's/.*"executable":"\([^"]*\/'"$1"'-[^"]*\)".*/\1/p' | tail -n1
}
