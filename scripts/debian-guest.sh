#!/usr/bin/env bash
# Runs the tests that need a guest with a whole operating system on its disk: Debian 13 with systemd.
#
# usage: debian-guest.sh prepare | debian-guest.sh run [TEST]
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$HOME/.cargo/bin:$PATH"
lab=$PWD/.cache/debian-guest
mkdir -p "$lab"
source scripts/debian-vm.sh

prepare() {
    if is_made "$lab/disk.img" debian-guest.sh && [ "$lab/disk.img" -nt .cache/guest/root/bin/dewar-guest ]; then
        return
    fi
    echo "debian-guest: building the guest's system (Debian 13)"
    local root=$lab/root
    debian_root "$root" systemd-sysv udev dbus qemu-guest-agent nginx-light
    cp .cache/guest/root/bin/dewar-guest "$root/usr/local/bin/"
    echo debian >"$root/etc/hostname"
    echo '/dev/vda / ext4 defaults 0 1' >"$root/etc/fstab"
    # What it obeys, where other guests have it too.
    cat >"$root/etc/systemd/system/dewar-guest.service" <<'UNIT'
[Unit]
Description=Obeys tests on the first serial port
[Service]
ExecStart=/usr/local/bin/dewar-guest serve /dev/ttyS0
[Install]
WantedBy=multi-user.target
UNIT
    cat >"$root/usr/local/bin/sums" <<'SUMS'
#!/bin/sh
# A number that is another where a file of the system is.
find /usr /etc /boot /var/lib/dpkg -xdev -type f ! -path /etc/resolv.conf -print0 | sort -z | xargs -0 sha1sum | sha1sum
SUMS
    # A web server with 100 MiB of noise, for 'make bench-warmweb'.
    printf '#!/bin/sh\nexec cat /var/www/html/f* >/dev/null\n' >"$root/usr/local/bin/readweb"
    chmod +x "$root/usr/local/bin/sums" "$root/usr/local/bin/readweb"
    head -c 100M /dev/urandom | split -b 64k -d -a 4 - "$root/var/www/html/f"
    sed -i 's/access_log .*/access_log off;/; s/keepalive_timeout .*/keepalive_requests 1000000;/' "$root/etc/nginx/nginx.conf"
    printf '[Match]\nName=e*\n[Network]\nAddress=10.0.2.15/24\nGateway=10.0.2.2\n' \
        >"$root/etc/systemd/network/80-user.network"
    chroot "$root" systemctl -q enable systemd-networkd.service nginx.service
    chroot "$root" systemctl -q enable dewar-guest.service
    chroot "$root" systemctl -q mask serial-getty@ttyS0.service systemd-networkd-wait-online.service
    rm -f "$lab/disk.img" "$lab/disk.img.part"
    truncate -s 1500M "$lab/disk.img.part"
    mkfs.ext4 -q -F -b 4096 -d "$root" "$lab/disk.img.part"
    kernel_and_initrd "$root" "$lab" /sbin/init
    mv "$lab/disk.img.part" "$lab/disk.img"
}

run() {
    prepare
    DEWAR_TEST_DEBIAN=$lab cargo test -q --workspace --test guests -- "debian_guest::${1:-}" --nocapture --test-threads=1
}

command=${1:-run}
shift || true
"$command" "$@"
