#!/usr/bin/env bash
# Runs the tests that need hosts of their own: two small machines (Debian 13 under TCG) with a kernel, a page cache
# and an ssh server each, and a third that has their shared disks (NFS). eth0 leads to this machine and to
# the shared disks, eth1 from host to host; only the second is slowed down and cut. All of it lives in a network
# namespace and a PID namespace, and ends with this script.
#
# usage: hosts-lab.sh run [TEST]     the tests, or those with TEST in their name; WORDS that their runner takes
#        hosts-lab.sh bench WORDS    a benchmark that needs them: its program and what it is told
#        hosts-lab.sh boot HOST      } for the tests, which run inside; HOST is a, b or s, or one that runs guests
#                                      under KVM (emulated: SVM): k has 2 GiB as persistent memory, and l a kernel that
#                                      keeps files in memory itself (scripts/luo-kernel.sh)
#        hosts-lab.sh ssh HOST WORDS }
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$HOME/.cargo/bin:$PATH"
lab=$PWD/.cache/hosts-lab
mkdir -p "$lab"
source scripts/debian-vm.sh

number() { case $1 in a) echo 1 ;; b) echo 2 ;; s) echo 3 ;; k) echo 4 ;; l) echo 5 ;; esac; }

prepare() {
    if is_made "$lab/host.img" hosts-lab.sh; then return; fi
    echo "hosts-lab: building the system of the hosts (Debian 13)"
    local root=$lab/root
    debian_root "$root" qemu-system-x86 qemu-utils iproute2 e2fsprogs nfs-kernel-server nfs-common \
        openssh-server openssh-client criu libcriu2 runc crun iptables nftables podman netavark catatonit
    rm -f "$lab"/key* "$root"/etc/ssh/ssh_host_*
    ssh-keygen -q -t ed25519 -N '' -f "$lab/key"
    ssh-keygen -q -t ed25519 -N '' -f "$root/etc/ssh/ssh_host_ed25519_key"
    local hostkey
    hostkey=$(cut -d' ' -f1,2 "$root/etc/ssh/ssh_host_ed25519_key.pub")
    install -d -m 700 "$root/root/.ssh"
    install -m 600 "$lab/key" "$root/root/.ssh/id_ed25519"
    install -m 600 "$lab/key.pub" "$root/root/.ssh/authorized_keys"
    printf '%s\n' "hosta,10.9.1.1 $hostkey" "hostb,10.9.1.2 $hostkey" >"$root/root/.ssh/known_hosts"
    printf '%s\n' "10.9.0.1,10.9.0.2,10.9.0.3,10.9.0.4,10.9.0.5 $hostkey" >"$lab/known_hosts"
    printf '%s\n' "127.0.0.1 localhost" "10.9.1.1 hosta" "10.9.1.2 hostb" >"$root/etc/hosts"
    echo '/srv/disks 10.9.0.0/24(rw,sync,no_root_squash,no_subtree_check,fsid=0,insecure)' >"$root/etc/exports"
    mkdir -p "$root"/{srv/disks,mnt/disks,lab}
    ln -sf /lab/dewar "$root/usr/local/bin/dewar"
    system_image "$root" "$lab/host.img" 3G
}

# payload DEWAR: the second disk of each host: this dewar, the guest, and what a host does at its start.
payload() {
    local tree=$lab/payload
    rm -rf "$tree" && mkdir -p "$tree/guest" "$tree/bin"
    cp .cache/guest/vmlinux .cache/guest/initrd "$tree/guest/"
    cp "$lab/vmlinuz" "$lab/initrd" "$tree/"
    cp .cache/luo-kernel/vmlinuz "$tree/vmlinuz-luo" 2>/dev/null || true
    cp .cache/guest/root/bin/{dewar-guest,busybox} "$tree/bin/"
    cp "$1" "$tree/dewar"
    strip -g "$tree/dewar"
    cat >"$tree/init" <<'INIT'
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev; mount -o remount,rw /
mkdir -p /dev/pts /dev/shm; mount -t devpts devpts /dev/pts; mount -t tmpfs none /dev/shm
mount -t tmpfs none /run; mount -t tmpfs none /tmp; mount -t cgroup2 none /sys/fs/cgroup
mkdir -p /run/sshd /run/rpc_pipefs /run/lock
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
for word in $(cat /proc/cmdline); do case $word in lab.name=*) name=${word#*=} ;; lab.number=*) number=${word#*=} ;; esac; done
hostname "host$name"
# A kernel of the lab's own has what it needs without modules.
for module in virtio_net sch_netem tun nfsv4 overlay bridge veth nf_tables; do modprobe -q $module; done
ip link set lo up
for net in 0 1; do ip link set eth$net up; ip addr add 10.9.$net.$number/24 dev eth$net; done
if [ "$name" = s ]; then
    mount -t tmpfs -o size=500m none /srv/disks; mkdir -p /var/lib/nfs/v4recovery
    modprobe nfsd; mount -t nfsd nfsd /proc/fs/nfsd; mount -t rpc_pipefs none /run/rpc_pipefs
    exportfs -ra; rpcbind -w; rpc.nfsd -N 3 4; rpc.mountd -N 3
    # Nobody has a lock of before to claim: no 90 s without new ones.
    echo Y > /proc/fs/nfsd/v4_end_grace
elif [ "$name" = k ] || [ "$name" = l ]; then
    for module in kvm_amd nd_e820 nd_pmem; do modprobe -q $module; done
    # What a test has happen in between.
    if [ -e /root/before-thaw ]; then . /root/before-thaw; fi
    # As dewar-host-thaw.service does.
    if [ -e /var/lib/dewar/host-reboot.json ]; then
        dewar --json host-reboot --thaw >/var/log/dewar-thaw.json 2>/var/log/dewar-thaw.log
    fi
else
    mount -t nfs4 -o vers=4.2,soft,timeo=100 10.9.0.3:/ /mnt/disks || echo "hosts-lab: no shared disks"
fi
/usr/sbin/sshd
echo "hosts-lab: $name is up after $(cut -d' ' -f1 /proc/uptime) s"
while :; do sleep 1000; done
INIT
    rm -f "$lab/payload.img"
    mkfs.ext4 -q -F -d "$tree" "$lab/payload.img" 200M
}

# Starts a host, whose disk is new at its first start; says its process.
boot() {
    local host=$1 net more=() memory=768 svm=off words='' kernel=$lab/vmlinuz log=$lab/$1.log
    if [ ! -e "$lab/run/$host.qcow2" ]; then
        qemu-img create -q -f qcow2 -b "$lab/host.img" -F raw "$lab/run/$host.qcow2"
    fi
    [ "$host" != s ] || memory=1024
    if [ "$host" = k ] || [ "$host" = l ]; then
        if [ ! -x "$lab/tsc-khz" ]; then gcc -O1 -o "$lab/tsc-khz" scripts/host-reboot/tsc-khz.c; fi
        words="tsc_early_khz=$("$lab/tsc-khz") "
    fi
    case $host in
    k) memory=6144 svm=on,npt=on words+=memmap=2G!4G ;;
    l) memory=6144 svm=on,npt=on words+="kho=on liveupdate=on" kernel=.cache/luo-kernel/vmlinuz ;;
    esac
    # A guest that is booted already, where the tests made one.
    if [ -e "$lab/run/booted.qcow2" ]; then
        more+=(-drive "file=$lab/run/booted.qcow2,format=raw,if=virtio,readonly=on")
    fi
    for net in 0 1; do
        [ -e "/sys/class/net/$host$net" ] || ip tuntap add "$host$net" mode tap
        ip link set "$host$net" master "net$net" up
        more+=(-netdev "tap,id=n$net,ifname=$host$net,script=no,downscript=no"
            -device "virtio-net-pci,netdev=n$net,mac=52:54:00:09:0$net:0$(number "$host")")
    done
    rm -f "$log"
    qemu-system-x86_64 -machine pc -accel tcg,thread=multi,tb-size=256 -cpu "EPYC,cx16=off,svm=$svm" -smp 1 \
        -m "$memory" -nodefaults -display none -serial stdio -no-reboot \
        -kernel "$kernel" -initrd "$lab/initrd" \
        -append "console=ttyS0 quiet panic=-1 mitigations=off nokaslr audit=0 net.ifnames=0 lab.name=$host lab.number=$(number "$host") $words" \
        -drive "file=$lab/run/$host.qcow2,if=virtio" \
        -drive "file=$lab/payload.img,format=raw,if=virtio,readonly=on" \
        -device virtio-rng-pci "${more[@]}" 2> >(grep -v 'TCG doesn.t support' >&2) \
        < <(while [ "$svm" != off ] && sleep 0.5; do echo; done) >"$log" &
    for _ in $(seq 600); do
        if grep -q 'is up' "$log" 2>/dev/null; then
            grep -a 'hosts-lab:' "$log" >&2
            echo $!
            return
        fi
        sleep 0.2
    done
    echo "hosts-lab: $host does not come up:" >&2
    tail -n 20 "$log" >&2
    return 1
}

host_ssh() {
    local host=$1
    shift
    exec ssh -i "$lab/key" -o IdentitiesOnly=yes -o "UserKnownHostsFile=$lab/known_hosts" -o LogLevel=ERROR \
        -o ConnectTimeout=20 -o ServerAliveInterval=5 -o ServerAliveCountMax=4 "root@10.9.0.$(number "$host")" "$@"
}

run() {
    prepare
    cargo build -q -p dewar-cli
    payload target/debug/dewar
    local program
    program=$(test_program hosts)
    outside "$program" --test-threads=1 --nocapture "$@"
}

bench() {
    prepare
    payload target/release/dewar
    outside "$@"
}

# Runs a program in the namespaces of the lab.
outside() {
    exec unshare --net --mount --pid --fork --kill-child --mount-proc "$0" inside "$@"
}

inside() {
    local net
    rm -rf "$lab/run" && mkdir "$lab/run"
    # The interfaces of this namespace.
    mount -t sysfs none /sys
    ip link set lo up
    for net in 0 1; do ip link add "net$net" type bridge && ip link set "net$net" up; done
    ip addr add 10.9.0.254/24 dev net0
    export DEWAR_HOSTS_LAB=$PWD/scripts/hosts-lab.sh DEWAR_TEST_SLOW=1
    timeout -k 10 3000 "$@"
}

command=$1
shift
case $command in ssh) host_ssh "$@" ;; *) "$command" "$@" ;; esac
