#!/usr/bin/env bash
# Builds a guest that runs HPC Challenge (package hpcc): the test guest's kernel,
# and its initramfs with hpcc, Open MPI and their libraries. Takes the order of
# the matrix. Result: .cache/hpcc/{vmlinuz,initrd}.
set -euo pipefail
cd "$(dirname "$0")/.."
order=${1:?usage: build-hpcc.sh N}
guest=$PWD/.cache/guest
cache=$PWD/.cache/hpcc
mkdir -p "$cache"

if [ ! -d "$cache/packages" ]; then
    rm -rf "$cache/part" && mkdir -p "$cache/part/archives/partial" "$cache/part/root"
    : >"$cache/part/status"
    # All that hpcc needs, as if nothing were installed here.
    apt-get -qq -y -o "Dir::State::status=$cache/part/status" \
        -o "Dir::Cache::archives=$cache/part/archives" -o APT::Sandbox::User=root \
        --no-install-recommends --download-only install hpcc >/dev/null
    for deb in "$cache"/part/archives/*.deb; do dpkg -x "$deb" "$cache/part/root"; done
    rm -rf "$cache/part/archives"
    mv "$cache/part" "$cache/packages"
fi

packages=$cache/packages/root
libraries=usr/lib/x86_64-linux-gnu
plugins=$libraries/openmpi/lib/openmpi3
root=$cache/root
rm -rf "$root"
cp -a "$guest/root" "$root"
mkdir -p "$root"/{usr/bin,etc,tmp,root,"$plugins",usr/share}
cp "$packages/usr/bin/hpcc" "$root/usr/bin/"
cp -L "$packages/lib64/ld-linux-x86-64.so.2" "$root/lib64/" 2>/dev/null ||
    cp -L "$packages/usr/lib64/ld-linux-x86-64.so.2" "$root/lib64/"
cp -a "$packages/usr/share/openmpi" "$root/usr/share/"
# The plugins but those for networks that one process has no use for.
for plugin in "$packages/$plugins"/mca_*.so; do
    case "$plugin" in
        *ucx* | *ofi* | *psm* | *usnic* | *openib* | *mtl* | *ucc* | *hcoll*) ;;
        *) cp "$plugin" "$root/$plugins/" ;;
    esac
done
# Libraries, with those that they need.
todo=("$root/usr/bin/hpcc" "$root/$plugins"/mca_*.so)
while [ ${#todo[@]} -gt 0 ]; do
    needed=$(readelf -d "${todo[@]}" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | sort -u)
    todo=()
    for name in $needed; do
        [ ! -e "$root/$libraries/$name" ] || continue
        for folder in "$libraries" lib/x86_64-linux-gnu "$libraries/blas" "$libraries/openmpi/lib"; do
            if [ -e "$packages/$folder/$name" ]; then
                cp -L "$packages/$folder/$name" "$root/$libraries/$name"
                todo+=("$root/$libraries/$name")
                break
            fi
        done
    done
done

echo 'root:x:0:0::/root:/bin/sh' >"$root/etc/passwd"
cat >"$root/init" <<'INIT'
#!/bin/sh
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
while read -r module; do insmod "/modules/$module" 2>/dev/null; done </modules/order
chrt -f 50 dewar-guest heartbeat </dev/null >/dev/ttyS1 2>/dev/null &
# One process without a launcher, which may be root.
export HOME=/root PATH=/bin:/usr/bin OMPI_MCA_ess_singleton_isolated=1 OMPI_MCA_pml=ob1 \
    OMPI_MCA_btl=self OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
cd /root
: >hpccoutf.txt
echo "dewar-guest ready" >/dev/ttyS0
busybox tail -f hpccoutf.txt >/dev/ttyS0 &
hpcc >/dev/ttyS0 2>&1
echo "hpcc ended with $?" >/dev/ttyS0
while :; do sleep 60; done
INIT
chmod +x "$root/init"
# HPL's input file: the value of each line counts, the words after it do not.
{
    printf '%s\n' "HPC Challenge input" "one process" "HPL.out" "8 device" "1 sizes" "$order" \
        "1 blockings" "64" "0 mapping" "1 grids" "1" "1" "16.0 threshold" "1 panel" "2" "1 stop" \
        "4" "1 panels" "2" "1 recursive" "1" "1 broadcasts" "0" "1 depths" "0" "2 swap" "64" \
        "0 L1" "0 U" "1 equilibration" "8 alignment" "---" "0 PTRANS sizes" "1200" \
        "0 PTRANS blockings" "40"
} >"$root/root/hpccinf.txt"
cp "$guest/vmlinuz" "$cache/vmlinuz"
(cd "$root" && find . | cpio -o -H newc --quiet) | gzip -1 >"$cache/initrd.part"
mv "$cache/initrd.part" "$cache/initrd"
