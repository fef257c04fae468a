//! Guests that move between hosts of their own: small machines with a kernel, a page cache and an ssh server
//! each, disks that they share by NFS, and a link that is slow, loses packets, or is cut. `make test-hosts` runs
//! these; `scripts/hosts-lab.sh` makes the hosts.

mod containers;
mod host;
mod host_reboot;
mod kvm_host;
mod moves;
mod power;
