//! QEMU command lines in, the exact command lines out, and the refused ones.

use dewar_guest_qemu::cmdline::{disk_places, plan_restore, plan_run};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

const QMP: &str =
    "-chardev socket,id=dewar-qmp,path=/q,server=on,wait=off -mon chardev=dewar-qmp,mode=control";

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

fn ram(id: &str) -> PathBuf {
    PathBuf::from(format!("/ram/{id}"))
}

fn run(line: &str) -> Result<String, String> {
    plan_run(&words(line), Path::new("/q"), ram)
        .map(|plan| plan.arguments.join(" "))
        .map_err(|why| why.to_string())
}

/// What is added where the user names no backend.
fn added(bytes: u64) -> String {
    format!(
        "-object memory-backend-file,id=dewar-ram,size={bytes},mem-path=/ram/dewar-ram,share=on,align=2M -machine memory-backend=dewar-ram"
    )
}

#[test]
fn lines_without_a_backend_get_one_and_keep_every_word() {
    const G: u64 = 1 << 30;
    for (line, bytes) in [
        ("-m 2G", 2 * G),
        ("-m 2048", 2 * G),
        ("-m size=2G,slots=4,maxmem=8G", 2 * G),
        ("-m 1.5G -nographic", 3 * G / 2),
        ("--m 512", G / 2),
        ("-hda disk.img", 128 << 20),
        ("disk.img -m 1G", G),
        ("-machine q35,accel=kvm -cpu host -m 4G -enable-kvm -daemonize", 4 * G),
        ("-M pc-i440fx-7.2 -accel tcg,thread=multi -m 1G", G),
        ("-serial mon:stdio -m 256M -nographic -pidfile /run/x.pid", 256 << 20),
        (
            "-m 1G -drive file=a,,b.qcow2,if=virtio -drive file=c.raw,format=raw -device virtio-net",
            G,
        ),
        ("-m 1G -numa node,cpus=0-1", G),
        ("-m 1G -qmp unix:/run/user.qmp,server=on,wait=off -monitor none", G),
    ] {
        assert_eq!(run(line), Ok(format!("{line} {} {QMP}", added(bytes))), "{line}");
    }
}

#[test]
fn backends_of_the_user_become_shared_files_under_their_ids() {
    for (line, expected) in [
        (
            "-object memory-backend-ram,id=m0,size=1G -machine q35,memory-backend=m0 -m 1G",
            "-object memory-backend-file,id=m0,size=1G,mem-path=/ram/m0,share=on,align=2M -machine q35,memory-backend=m0 -m 1G",
        ),
        (
            "-object memory-backend-memfd,id=m0,size=1G,share=off,seal=on,prealloc=on -machine memory-backend=m0",
            "-object memory-backend-file,id=m0,size=1G,share=on,prealloc=on,mem-path=/ram/m0,align=2M -machine memory-backend=m0",
        ),
        (
            "-object memory-backend-file,id=m0,size=1G,mem-path=/dev/shm/x,share=on -M q35,memory-backend=m0",
            "-object memory-backend-file,id=m0,size=1G,mem-path=/dev/shm/x,share=on -M q35,memory-backend=m0",
        ),
        (
            "-object memory-backend-file,id=m0,size=1G,mem-path=/dev/shm/x -M q35,memory-backend=m0",
            "-object memory-backend-file,id=m0,size=1G,mem-path=/dev/shm/x,share=on -M q35,memory-backend=m0",
        ),
        (
            "-m 2G -object memory-backend-ram,id=a,size=1G,host-nodes=0,policy=bind -numa node,memdev=a -object memory-backend-ram,id=b,size=1G -numa node,memdev=b",
            "-m 2G -object memory-backend-file,id=a,size=1G,host-nodes=0,policy=bind,mem-path=/ram/a,share=on,align=2M -numa node,memdev=a -object memory-backend-file,id=b,size=1G,mem-path=/ram/b,share=on,align=2M -numa node,memdev=b",
        ),
        (
            r#"-object {"qom-type":"memory-backend-ram","id":"m0","size":1073741824} -machine memory-backend=m0"#,
            r#"-object {"align":2097152,"id":"m0","mem-path":"/ram/m0","qom-type":"memory-backend-file","share":true,"size":1073741824} -machine memory-backend=m0"#,
        ),
        (
            "-object iothread,id=io0 -object memory-backend-ram,id=m0,size=64M -machine memory-backend=m0 -object rng-random,id=r,filename=/dev/urandom",
            "-object iothread,id=io0 -object memory-backend-file,id=m0,size=64M,mem-path=/ram/m0,share=on,align=2M -machine memory-backend=m0 -object rng-random,id=r,filename=/dev/urandom",
        ),
    ] {
        assert_eq!(run(line), Ok(format!("{expected} {QMP}")), "{line}");
    }
}

#[test]
fn what_cannot_be_taken_is_refused_with_its_reason() {
    for (line, reason) in [
        ("-m 1G -snapshot", "-snapshot"),
        ("-m 1G -mem-path /dev/hugepages", "memory-backend-file"),
        ("-m 1G -incoming tcp:0:4444", "migration"),
        ("-m 1G -device vfio-pci,host=01:00.0", "VFIO"),
        ("-m 1G -device vhost-user-fs-pci,chardev=c", "vhost-user"),
        ("-m 1G -netdev vhost-user,id=n,chardev=c", "vhost-user"),
        ("-m 1G,slots=2,maxmem=4G -device pc-dimm,memdev=d", "memory devices"),
        ("-m 1G -device nvdimm,memdev=d", "memory devices"),
        ("-m 1G -device virtio-mem-pci,memdev=d", "memory devices"),
        (r#"-m 1G -device {"driver":"vfio-pci","host":"01:00.0"}"#, "VFIO"),
        ("-m 1G -numa node,mem=1G", "memdev="),
        ("-m 1G -object memory-backend-epc,id=e,size=64M", "memory-backend-epc"),
        ("-machine memory-backend=nowhere", "'nowhere'"),
        ("-m lots", "'lots'"),
        ("-object memory-backend-ram,size=1G -m 1G", "no id"),
        ("-object memory-backend-ram,id=m -m 1G", "no size"),
    ] {
        let why = run(line).expect_err(line);
        assert!(why.contains(reason), "{line}: {why}");
    }
}

fn restore(line: &str, disks: &[usize], lazy: bool) -> (String, String) {
    let overlays: HashMap<usize, PathBuf> =
        disks.iter().map(|place| (*place, PathBuf::from(format!("/o{place}")))).collect();
    let plan = plan_restore(&words(line), Path::new("/q"), ram, &overlays, "pc-q35-7.2", lazy)
        .expect(line);
    (plan.line.join(" "), plan.run.arguments.join(" "))
}

#[test]
fn a_restored_line_has_other_disks_and_fresh_ram() {
    const G: u64 = 1 << 30;
    for (line, disks, expected) in [
        ("-m 1G -hda a.img", &[0][..], "-m 1G -hda /o0"),
        ("-m 1G a.img", &[0], "-m 1G /o0"),
        (
            "-m 1G -drive file=a.raw,format=raw,if=virtio,cache=none,aio=native",
            &[0],
            "-m 1G -drive file=/o0,format=qcow2,if=virtio,cache=none,aio=native",
        ),
        (
            "-m 1G -drive if=virtio,file=a.qcow2 -drive file=cd.iso,readonly=on -drive file=b.qcow2",
            &[0, 2],
            "-m 1G -drive if=virtio,file=/o0,format=qcow2 -drive file=cd.iso,readonly=on -drive file=/o2,format=qcow2",
        ),
        (
            "-m 1G -blockdev driver=file,node-name=f,filename=a.raw -blockdev driver=raw,node-name=d,file=f -device virtio-blk,drive=d",
            &[0],
            "-m 1G -blockdev driver=file,node-name=f,filename=/o0 -blockdev driver=qcow2,node-name=d,file=f -device virtio-blk,drive=d",
        ),
        (
            "-m 1G -blockdev driver=raw,node-name=d,file.driver=file,file.filename=a.raw",
            &[0],
            "-m 1G -blockdev driver=qcow2,node-name=d,file.driver=file,file.filename=/o0",
        ),
    ] {
        assert!(disks.iter().all(|place| *place < disk_places(&words(line)).expect(line).len()));
        let (own, run) = restore(line, disks, false);
        assert_eq!(own, expected);
        assert_eq!(
            run,
            format!("{expected} -machine type=pc-q35-7.2 {} {QMP} -incoming defer", added(G))
        );
    }
}

#[test]
fn a_lazily_restored_line_preallocates_nothing() {
    let (_, run) = restore(
        "-mem-prealloc -object memory-backend-file,id=m,size=1G,mem-path=/dev/shm/x,share=on,prealloc=on -machine memory-backend=m",
        &[],
        true,
    );
    assert_eq!(
        run,
        format!(
            "-object memory-backend-file,id=m,size=1G,share=on,mem-path=/ram/m,align=2M -machine memory-backend=m -machine type=pc-q35-7.2 {QMP} -incoming defer"
        )
    );
}
