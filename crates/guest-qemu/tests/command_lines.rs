//! QEMU command lines in, the exact command lines out, and the refused ones.

use dewar_guest_qemu::cmdline::{
    Holder, Listening, disk_places, inherited, plan_restore, plan_run, take_over,
};
use dewar_registry::Descriptors;
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
        ("-machine q35,memory.size=384M,smp.cpus=2", 384 << 20),
        ("-machine memory.size=384M -m 1G", G),
        ("-m 1G -machine memory.size=402653184", 384 << 20),
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
            r#"-object {"qom-type":"memory-backend-file","id":"m","size":67108864,"mem-path":"/x","share":true} -M memory-backend=m"#,
            r#"-object {"id":"m","mem-path":"/x","qom-type":"memory-backend-file","share":true,"size":67108864} -M memory-backend=m"#,
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
        ("-m 1G -netdev type=vhost-user,id=n,chardev=c", "vhost-user"),
        (r#"-m 1G -netdev {"type":"vhost-user","id":"n","chardev":"c"}"#, "vhost-user"),
        ("-m 1G -drive file=a.qcow2,snapshot=on", "snapshot=on"),
        ("-m 1G -drive file=a.qcow2,snapshot=yes", "snapshot=on"),
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
        ("-object memory-backend-file,id=m,size=1G,mem-path=/template -m 1G", "say share=on"),
        ("-object memory-backend-file,id=m,size=1G,mem-path=/x,share=off -m 1G", "private"),
        ("-m 1G -device ivshmem-plain,memdev=x,master=on", "ivshmem"),
    ] {
        let why = run(line).expect_err(line);
        assert!(why.contains(reason), "{line}: {why}");
    }
}

fn restore(line: &str, disks: &[usize]) -> (String, String) {
    let overlays: HashMap<usize, PathBuf> =
        disks.iter().map(|place| (*place, PathBuf::from(format!("/o{place}")))).collect();
    let folder = Path::new("/nowhere");
    let plan = plan_restore(&words(line), Path::new("/q"), ram, &overlays, "pc-q35-7.2", folder)
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
        // Media come last: an older Dewar, which knew none, numbered without them.
        (
            "-m 1G -cdrom cd.iso -hda a.img -fda f.img",
            &[0],
            "-m 1G -cdrom cd.iso -hda /o0 -fda f.img",
        ),
        (
            "-m 1G -blockdev driver=raw,node-name=d,file.driver=file,file.filename=a.raw",
            &[0],
            "-m 1G -blockdev driver=qcow2,node-name=d,file.driver=file,file.filename=/o0",
        ),
        // What an option says of the content would be believed before the overlay's header.
        (
            r#"-m 1G -blockdev {"driver":"file","node-name":"f","filename":"a.qcow2"} -blockdev {"backing":null,"driver":"qcow2","file":"f","node-name":"d"}"#,
            &[0],
            r#"-m 1G -blockdev {"driver":"file","filename":"/o0","node-name":"f"} -blockdev {"driver":"qcow2","file":"f","node-name":"d"}"#,
        ),
        (
            "-m 1G -blockdev driver=file,node-name=f,filename=a -blockdev raw,node-name=d,file=f,offset=512,size=1M",
            &[0],
            "-m 1G -blockdev driver=file,node-name=f,filename=/o0 -blockdev qcow2,node-name=d,file=f",
        ),
        (
            "-m 1G -drive driver=qcow2,file=a.qcow2,backing.file.filename=b.qcow2,backing.driver=qcow2",
            &[0],
            "-m 1G -drive file=/o0,format=qcow2",
        ),
        // A block device's content is in a file now.
        (
            "-m 1G -blockdev host_device,node-name=f,filename=/dev/vg/a -blockdev raw,node-name=d,file=f",
            &[0],
            "-m 1G -blockdev file,node-name=f,filename=/o0 -blockdev qcow2,node-name=d,file=f",
        ),
        (
            r#"-m 1G -blockdev {"driver":"raw","file":{"driver":"host_device","filename":"/dev/vg/a"},"node-name":"d"}"#,
            &[0],
            r#"-m 1G -blockdev {"driver":"qcow2","file":{"driver":"file","filename":"/o0"},"node-name":"d"}"#,
        ),
    ] {
        assert!(disks.iter().all(|place| *place < disk_places(&words(line)).expect(line).len()));
        let (own, run) = restore(line, disks);
        assert_eq!(own, expected);
        assert_eq!(
            run,
            format!("{expected} -machine type=pc-q35-7.2 {} {QMP} -incoming defer", added(G))
        );
    }
}

#[test]
fn a_restored_guest_writes_on_in_its_logs_and_waits_for_nobody() {
    let line = "-m 1G -chardev file,id=l,path=log -chardev socket,id=s,path=s,server=on -S -incoming tcp:0:4444";
    let (own, run) = restore(line, &[]);
    assert_eq!(own, line);
    let (start, _) = run.split_once(" -machine").expect("a machine");
    assert_eq!(
        start,
        "-m 1G -chardev file,id=l,path=log,append=on -chardev socket,id=s,path=s,server=on,wait=off"
    );
}

#[test]
fn a_restored_line_preallocates_nothing() {
    let (_, run) = restore(
        "-mem-prealloc -object memory-backend-file,id=m,size=1G,mem-path=/dev/shm/x,share=on,prealloc=on -machine memory-backend=m",
        &[],
    );
    assert_eq!(
        run,
        format!(
            "-object memory-backend-file,id=m,size=1G,share=on,mem-path=/ram/m,align=2M -machine memory-backend=m -machine type=pc-q35-7.2 {QMP} -incoming defer"
        )
    );
}

/// A QEMU that listens on port 4444, and whose tap `tap0` has two queues.
struct Files;

impl Holder for Files {
    fn listener(&mut self, at: &Listening<'_>) -> Option<i32> {
        (at.port == 4444).then_some(40)
    }

    fn tap(&mut self, id: Option<&str>, name: Option<&str>) -> Vec<i32> {
        if id == Some("t0") || name == Some("tap0") { vec![50, 51] } else { Vec::new() }
    }

    fn number(&mut self, fd: i32) -> Option<i32> {
        Some(fd + 100)
    }
}

fn take(line: &str, beside: bool, present: &Descriptors) -> Result<String, String> {
    let mut files = Files;
    let holder: Option<&mut dyn Holder> = if beside { Some(&mut files) } else { None };
    let (cwd, scratch) = (Path::new("/nowhere"), Path::new("/scratch"));
    take_over(&words(line), cwd, scratch, holder, present)
        .map(|taken| taken.line.join(" "))
        .map_err(|why| why.to_string())
}

#[test]
fn what_only_one_can_have_is_made_aside_taken_over_or_left_out() {
    const CHARDEV: &str = "-chardev socket,";
    for (line, expected) in [
        ("-m 1G -smp 2", "-m 1G -smp 2".to_owned()),
        ("-S -s -device x", "-device x".to_owned()),
        ("-loadvm snap -mem-prealloc", String::new()),
        ("-pidfile run.pid", "-pidfile run.pid~".to_owned()),
        ("-serial stdio -monitor none", "-serial stdio -monitor none".to_owned()),
        (
            "-serial file:/log",
            "-chardev file,path=/log,id=dewar-c0,append=on -serial chardev:dewar-c0".to_owned(),
        ),
        (
            "-qmp unix:/q.sock,server,nowait",
            format!("{CHARDEV}path=/q.sock~,server,id=dewar-c0,wait=off -qmp chardev:dewar-c0"),
        ),
        (
            "-qmp unix:path=/q=1.sock,server=on",
            format!(
                "{CHARDEV}path=/q=1.sock~,server=on,id=dewar-c0,wait=off -qmp chardev:dewar-c0"
            ),
        ),
        (
            "-serial mon:telnet:localhost:4444,server=on,wait=on",
            format!(
                "{CHARDEV}server=on,telnet=on,id=dewar-c0,wait=off,fd=40,mux=on -mon \
                 chardev=dewar-c0,mode=readline -serial chardev:dewar-c0"
            ),
        ),
        (
            "-chardev socket,id=a,path=/a,server=on",
            format!("{CHARDEV}id=a,path=/a~,server=on,wait=off"),
        ),
        ("-chardev socket,id=a,path=/a", format!("{CHARDEV}id=a,path=/a")),
        (
            "-netdev user,id=n,hostfwd=tcp::1-:2,hostfwd=tcp::3-:4,net=10.1.0.0/24",
            "-netdev user,id=n,net=10.1.0.0/24".to_owned(),
        ),
        ("-netdev tap,id=t0,script=no,vhost=on", "-netdev tap,id=t0,vhost=on,fds=50:51".to_owned()),
        ("-nic tap,ifname=tap0,queues=2", "-nic tap,fds=50:51".to_owned()),
        ("-netdev bridge,id=t0,br=br0", "-netdev tap,id=t0,fds=50:51".to_owned()),
        ("-netdev tap,id=u,fd=3", "-netdev tap,id=u,fd=103".to_owned()),
        ("-vnc unix:/v,password=on", "-vnc unix:/v~,password=on".to_owned()),
        ("-vnc 127.0.0.1:3", "-vnc unix:/scratch/vnc.sock".to_owned()),
        ("-display vnc=127.0.0.1:3", "-vnc unix:/scratch/vnc.sock".to_owned()),
        (
            "-chardev socket,id=a,path=/a,server=y",
            format!("{CHARDEV}id=a,path=/a~,server=y,wait=off"),
        ),
        (
            "-object memory-backend-file,id=m,prealloc=on,discard-data=on,mem-path=/m",
            "-object memory-backend-file,id=m,mem-path=/m".to_owned(),
        ),
    ] {
        assert_eq!(take(line, true, &Descriptors::new()), Ok(expected), "{line}");
    }
    // A process that took the guest over has them under other numbers.
    let present: Descriptors = [("tap,id=u,fd=3".to_owned(), "77".to_owned())].into();
    let taken = take("-netdev tap,id=u,fd=3", true, &present);
    assert_eq!(taken, Ok("-netdev tap,id=u,fd=177".to_owned()));
    for line in [
        "-netdev socket,id=n,listen=:1",
        "-netdev tap,id=unknown",
        "-chardev socket,id=a,port=1,server=on",
        "-chardev socket,id=a,path=x,abstract=on,server=on",
        "-spice port=1",
        "-D log",
        "-readconfig file",
        "-add-fd fd=3,set=1",
        "-vnc :0,to=9",
        "-device usb-host,hostbus=1",
        "-object filter-dump,id=f,file=x",
        "-trace enable=a,file=x",
        "-device usb-kbd,pcap=x",
    ] {
        assert!(take(line, true, &Descriptors::new()).is_err(), "{line}");
    }
}

#[test]
fn a_guest_without_a_process_gets_its_own_back() {
    for (line, expected) in [
        ("-S -pidfile run.pid", "-pidfile run.pid"),
        ("-netdev user,id=n,hostfwd=tcp::1-:2", "-netdev user,id=n,hostfwd=tcp::1-:2"),
        ("-netdev tap,id=t0", "-netdev tap,id=t0"),
        ("-chardev socket,id=a,port=1,server=on", "-chardev socket,id=a,port=1,server=on,wait=off"),
        ("-vnc :1 -gdb tcp::1", "-vnc :1 -gdb tcp::1"),
    ] {
        assert_eq!(take(line, false, &Descriptors::new()), Ok(expected.to_owned()), "{line}");
    }
    for line in ["-netdev tap,id=t0,fd=3", "-add-fd fd=3,set=1", "-serial udp::4555@:4556"] {
        assert_eq!(take(line, false, &Descriptors::new()), Ok(line.to_owned()));
        assert_eq!(inherited(&words(line)).is_some(), line.contains("fd="), "{line}");
    }
}
