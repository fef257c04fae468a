//! Requests to a web server in the guest, over a tap, while its QEMU changes.

use crate::Plan;
use crate::report::Row;
use crate::subject::{command, run};
use anyhow::{Result, ensure};
use dewar_bench::listen;
use dewar_testkit::{Console, GuestSpec, Lab, Network, web_load};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const MIB: u64 = 256;
const REQUESTS_A_SECOND: u32 = 200;
const BETWEEN: Duration = Duration::from_secs(2);

pub fn measure(plan: &Plan) -> Result<Option<Row>> {
    let network = match Network::new() {
        Ok(network) => network,
        Err(error) => {
            println!("web requests over a tap were not measured: {error}");
            return Ok(None);
        }
    };
    let lab = Lab::new(&plan.dewar)?;
    let tap = "tap,id=n0,ifname=tap0,script=no,downscript=no";
    let extra = ["-netdev", tap, "-device", "virtio-net-pci,netdev=n0"].map(str::to_owned).to_vec();
    let spec = GuestSpec { memory_mib: MIB, extra, beat_ms: 1, ..GuestSpec::measured() };
    let line = command(&lab, plan, "g", spec)?;
    let _heart = listen(&lab.path().join("g"))?;
    let mut guest = network.within(|| run(&lab, "g", &line))?;
    guest.console.ask("net 10.9.0.2/24")?;
    guest.console.ask("listen")?;
    let mut row = Row::new("requests over a tap, 200 a second", MIB, 1);
    let stop = AtomicBool::new(false);
    let address = SocketAddr::from(([10, 9, 0, 2], 80));
    let load = std::thread::scope(|scope| -> Result<_> {
        let clients =
            scope.spawn(|| network.within(|| web_load(address, REQUESTS_A_SECOND, &stop)));
        let result = (0..plan.repeats).try_for_each(|repeat| {
            std::thread::sleep(BETWEEN);
            let from = Instant::now();
            let program = &plan.qemus[(repeat + 1) % 2];
            let ran = lab.dewar(&["upgrade", "g", "--qemu", program]);
            ensure!(ran.code == 0, "dewar upgrade: {}", ran.stderr);
            row.totals_ms.push(from.elapsed().as_secs_f64() * 1e3);
            guest.console = Console::connect(&guest.folder.join("console"))?;
            Ok(())
        });
        std::thread::sleep(BETWEEN);
        stop.store(true, Ordering::Relaxed);
        let load = clients.join().map_err(|_| anyhow::anyhow!("the clients died"))?;
        result.map(|()| load)
    })?;
    row.gaps_ms.push(load.slowest.as_secs_f64() * 1e3);
    row.requests = Some((load.answered, load.failed.len() as u64));
    println!(
        "{}: {} answered, {} failed, the slowest after {:.0} ms, across {} upgrades",
        row.way,
        load.answered,
        load.failed.len(),
        load.slowest.as_secs_f64() * 1e3,
        plan.repeats
    );
    Ok(Some(row))
}
