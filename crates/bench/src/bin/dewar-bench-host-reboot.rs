//! How long guests are away while the kernel under them is replaced: kept where they are, saved and loaded, or shut down and
//! booted. A program outside asks each guest again and again; an outage is from its last answer before to its first one
//! after. Runs between the small machines that `scripts/hosts-lab.sh` makes, with guests under their (emulated) KVM.

use anyhow::{Context, Result, bail, ensure};
use dewar_bench::median;
use dewar_testkit::{Console, LabHost};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// How often a guest is asked, and how long it may take to answer.
const ASK_EVERY: Duration = Duration::from_millis(50);
const ANSWERS_WITHIN: Duration = Duration::from_millis(500);
/// How long all may take until each guest answers again.
const BACK_WITHIN: Duration = Duration::from_secs(400);
/// How much of a guest's memory is full of noise.
const FULL_PERCENT: u64 = 60;
/// How long the guest stands still by which the bench is proven.
const KNOWN: Duration = Duration::from_secs(3);

/// How the guests come over to the new kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Dax,
    DaxSums,
    Luo,
    LuoSums,
    Store,
    Boot,
    Plain,
}

impl Way {
    const ALL: [Self; 7] =
        [Self::Dax, Self::DaxSums, Self::Luo, Self::LuoSums, Self::Store, Self::Boot, Self::Plain];

    fn name(self) -> &'static str {
        match self {
            Self::Dax => "dewar, DAX, no checksums",
            Self::DaxSums => "dewar, DAX",
            Self::Luo => "dewar, LUO, no checksums",
            Self::LuoSums => "dewar, LUO",
            Self::Store => "saved and loaded, kexec",
            Self::Boot => "shut down and booted, kexec",
            Self::Plain => "shut down and booted, reboot",
        }
    }

    fn is_luo(self) -> bool {
        matches!(self, Self::Luo | Self::LuoSums)
    }

    fn keeps_memory(self) -> bool {
        !matches!(self, Self::Store | Self::Boot | Self::Plain)
    }

    fn host(self) -> (&'static str, &'static str) {
        if self.is_luo() { ("l", "10.9.0.5") } else { ("k", "10.9.0.4") }
    }

    fn command(self) -> String {
        let kernel = if self.is_luo() { "vmlinuz-luo" } else { "vmlinuz" };
        let words = match self {
            Self::Dax | Self::Luo => "--no-checksum",
            Self::Store => "--others store",
            _ => "",
        };
        format!(
            "dewar host-reboot --now --kernel /lab/{kernel} --initrd /lab/initrd --fallback none {words}"
        )
    }
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: dewar-bench-host-reboot OUT.json [REPEATS [GUESTS [MIB [WAY...]]]]";
    let path = arguments.next().context(usage)?;
    let mut number = |usual: u64| arguments.next().map_or(Ok(usual), |it| it.parse());
    let (repeats, guests, mib) = (number(5)?, number(1)?, number(256)?);
    let wanted: Vec<String> = arguments.collect();
    let ways = Way::ALL.into_iter().filter(|way| {
        wanted.is_empty() || wanted.iter().any(|it| format!("{way:?}").eq_ignore_ascii_case(it))
    });
    let mut rows: Vec<Value> = Vec::new();
    for way in ways {
        let mut host = Host::boot(way)?;
        host.start_guests(guests, mib)?;
        host.prove()?;
        for _ in 0..repeats {
            let row = host.run(guests, mib)?;
            println!("{row}");
            rows.push(row);
            std::fs::write(&path, serde_json::to_vec_pretty(&json!({"rows": rows}))?)?;
        }
        let of_way = rows.iter().filter(|row| row["way"] == way.name());
        let longest = median(of_way.filter_map(|row| row["outage_s"].as_f64()).collect());
        println!("{}: {guests} guests of {mib} MiB away for {longest:.2} s (median)", way.name());
    }
    Ok(())
}

/// A host, and its guests.
struct Host {
    way: Way,
    host: LabHost,
    address: &'static str,
    count: u64,
    mib: u64,
}

impl Host {
    fn boot(way: Way) -> Result<Self> {
        let (name, address) = way.host();
        let host = LabHost::new(name);
        host.throw_disk_away();
        host.boot();
        let host = Self { way, host, address, count: 0, mib: 0 };
        host.make_memory();
        Ok(host)
    }

    fn make_memory(&self) {
        if !self.way.is_luo() {
            let make = "mkfs.ext4 -q -b 4096 -F /dev/pmem0 && mkdir -p /mnt/keep && mount -o dax /dev/pmem0 /mnt/keep";
            self.host.run(make).done();
        }
    }

    fn start_guests(&mut self, count: u64, mib: u64) -> Result<()> {
        (self.count, self.mib) = (count, mib);
        let folder = match self.way {
            Way::Dax | Way::DaxSums => "--memory-dir /mnt/keep",
            _ => "",
        };
        let mut ways = Vec::new();
        for at in 0..count {
            let line = format!(
                "dewar run g{at} {folder} -- qemu-system-x86_64 -machine q35 -accel kvm -cpu host -m {mib}M \
                 -display none -nodefaults -vga none -kernel /lab/guest/vmlinux -initrd /lab/guest/initrd \
                 -append console=ttyS0\\ quiet\\ panic=-1\\ mitigations=off\\ audit=0\\ beat_ms=1000 \
                 -chardev socket,id=s0,path=/run/g{at}.console,server=on,wait=off -serial chardev:s0 -serial null \
                 -netdev user,id=n0,hostfwd=tcp:0.0.0.0:{}-:7 -device virtio-net-pci,netdev=n0",
                7000 + at
            );
            self.host.run(&line).done();
            // At once: what a guest says while nobody listens is lost.
            ways.push(self.way_to(at)?);
        }
        for mut way in ways {
            way.console.wait_ready(Duration::from_secs(60))?;
            way.console.ask("net 10.0.2.15/24")?;
            // The program that asks is not in its network.
            way.console.ask("run ip route add default via 10.0.2.2")?;
            way.console.ask("listen")?;
        }
        Ok(())
    }

    /// Fills their memory, for ways that keep or save it.
    fn fill(&self) -> Result<()> {
        for at in 0..self.count {
            let line = format!("fill {} noise", self.mib * FULL_PERCENT / 100);
            self.way_to(at)?.console.ask(&line)?;
        }
        Ok(())
    }

    fn way_to(&self, guest: u64) -> Result<ConsoleWay> {
        let folder = TempDir::new()?;
        let local = folder.path().join("console");
        let way = format!("{}:/run/g{guest}.console", local.display());
        let forward = self.host.ssh(&["-N", "-L", &way]).stdout(Stdio::null()).spawn()?;
        Ok(ConsoleWay { console: Console::connect(&local)?, forward, _folder: folder })
    }

    fn ask_all(&self) -> Vec<Asked> {
        let port = |at: u64| format!("{}:{}", self.address, 7000 + at);
        (0..self.count).filter_map(|at| Some(Asked::begin(port(at).parse().ok()?))).collect()
    }

    /// That an outage whose length is known is measured so.
    fn prove(&self) -> Result<()> {
        self.fill()?;
        let asked = self.ask_all();
        wait_for_answers(&asked)?;
        let stop = format!(
            "pkill -STOP qemu-system-x86; sleep {}; pkill -CONT qemu-system-x86",
            KNOWN.as_secs()
        );
        self.host.run(&stop).done();
        std::thread::sleep(Duration::from_secs(2));
        for outage in asked.into_iter().map(Asked::end) {
            let error = outage.as_secs_f64() - KNOWN.as_secs_f64();
            println!(
                "an outage of {} s is measured as {:.2}",
                KNOWN.as_secs(),
                outage.as_secs_f64()
            );
            ensure!((-0.1..1.0).contains(&error), "what is measured is not what it was");
        }
        Ok(())
    }

    fn run(&mut self, guests: u64, mib: u64) -> Result<Value> {
        let asked = self.ask_all();
        wait_for_answers(&asked)?;
        self.host.run("rm -f /var/log/dewar-thaw.*; sync").done();
        match self.way {
            Way::Boot | Way::Plain => {
                let stop = (0..guests).map(|at| format!("dewar stop g{at} --timeout 5s & "));
                self.host.run(&format!("{}wait", stop.collect::<String>())).done();
            }
            _ => {}
        }
        match self.way {
            Way::Plain => {
                self.host.lose_power();
                self.host.boot();
            }
            _ => {
                let ran = self.host.run(&self.way.command());
                ensure!(ran.code == 255, "its connection ends with its kernel: {ran:?}");
                self.wait_until_it_is_back()?;
            }
        }
        if matches!(self.way, Way::Boot | Way::Plain) {
            self.start_guests(guests, mib)?;
        }
        wait_for_return(&asked)?;
        let outages: Vec<f64> = asked.into_iter().map(|it| it.end().as_secs_f64()).collect();
        let longest = outages.iter().copied().fold(0.0, f64::max);
        let mut row = json!({"way": self.way.name(), "guests": guests, "memory_mib": mib, "outage_s": longest});
        if self.way.keeps_memory() {
            let told = self.host.run("cat /var/log/dewar-thaw.json").done().json();
            let parts = told["parts"].as_object().context("the parts of the outage")?;
            for (name, ms) in parts {
                row[name.replace("_ms", "_s")] = json!(ms.as_f64().unwrap_or_default() / 1e3);
            }
            let of = |name: &str| row[name].as_f64().unwrap_or_default();
            // All but the kernels' and init's.
            let own = longest - of("old_kernel_s") - of("new_kernel_s");
            row["own_s"] = json!(own);
        }
        Ok(row)
    }

    fn wait_until_it_is_back(&self) -> Result<()> {
        let deadline = Instant::now() + BACK_WITHIN;
        while self.host.run("cat /var/log/dewar-thaw.json").code != 0 {
            ensure!(Instant::now() < deadline, "the new kernel does not come up");
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.host.lose_power();
        self.host.throw_disk_away();
    }
}

/// A way to a guest's console.
struct ConsoleWay {
    console: Console,
    forward: Child,
    _folder: TempDir,
}

impl Drop for ConsoleWay {
    fn drop(&mut self) {
        let _ = self.forward.kill();
        let _ = self.forward.wait();
    }
}

/// A guest that is asked again and again.
struct Asked {
    seen: Arc<Mutex<Seen>>,
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

/// What was seen of it.
#[derive(Default)]
struct Seen {
    last: Option<Instant>,
    longest: Duration,
}

impl Asked {
    fn begin(address: SocketAddr) -> Self {
        let (seen, is_over) = (Arc::new(Mutex::new(Seen::default())), Arc::default());
        let (theirs, ends) = (Arc::clone(&seen), Arc::clone(&is_over));
        let thread = std::thread::spawn(move || ask(address, &theirs, &ends));
        Self { seen, is_over, thread }
    }

    fn seen<T>(&self, look: impl FnOnce(&Seen) -> T) -> T {
        look(&self.seen.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The longest time in which it did not answer.
    fn end(self) -> Duration {
        self.is_over.store(true, Relaxed);
        let _ = self.thread.join();
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.longest
    }
}

fn ask(address: SocketAddr, seen: &Mutex<Seen>, is_over: &AtomicBool) {
    while !is_over.load(Relaxed) {
        if answers(address).is_ok_and(|it| it) {
            let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
            let now = Instant::now();
            if let Some(last) = seen.last.replace(now) {
                seen.longest = seen.longest.max(now - last);
            }
        }
        std::thread::sleep(ASK_EVERY);
    }
}

fn answers(address: SocketAddr) -> std::io::Result<bool> {
    let mut stream = TcpStream::connect_timeout(&address, ANSWERS_WITHIN)?;
    stream.set_read_timeout(Some(ANSWERS_WITHIN))?;
    stream.write_all(b"?")?;
    let mut answer = [0];
    Ok(stream.read(&mut answer)? == 1)
}

fn wait_for_answers(asked: &[Asked]) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !asked.iter().all(|it| it.seen(|seen| seen.last.is_some())) {
        if Instant::now() > deadline {
            bail!("a guest does not answer");
        }
        std::thread::sleep(ASK_EVERY);
    }
    // Its usual pace, before anything is done to it.
    std::thread::sleep(Duration::from_secs(1));
    Ok(())
}

/// Waits until each answers, and answers on.
fn wait_for_return(asked: &[Asked]) -> Result<()> {
    let began = Instant::now();
    let is_back = |it: &Asked| it.seen(|seen| seen.last.is_some_and(|last| last > began));
    while !asked.iter().all(is_back) {
        ensure!(began.elapsed() < BACK_WITHIN, "a guest does not come back");
        std::thread::sleep(ASK_EVERY);
    }
    Ok(())
}
