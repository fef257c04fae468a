use crate::args::StopArgs;
use crate::context::{Context, connect, qmp_failure};
use crate::failure::{Code, Failure};
use dewar_guest_qemu::launch::kill;
use dewar_guest_qemu::registry::GuestRecord;
use serde_json::json;
use std::time::Duration;

/// How long QEMU itself may take to end.
const QUIT_WITHIN: Duration = Duration::from_secs(10);
const SERVER_WITHIN: Duration = Duration::from_secs(3);

pub fn run(context: &Context, args: StopArgs) -> Result<(), Failure> {
    let held = context.hold(&args.name)?;
    held.require_alive()?;
    let by_itself = !args.now && power_down(&held.record, args.timeout)?;
    if !by_itself {
        end(&held.record)?;
    }
    await_server(&held.record);
    held.folder.remove_ram(&held.record)?;
    let how = if by_itself { "shut itself down" } else { "was ended" };
    context.print(
        json!({"name": args.name, "shut_itself_down": by_itself}),
        &format!("{} {how}", args.name),
    );
    Ok(())
}

/// Presses the power button; says whether the guest obeyed.
fn power_down(record: &GuestRecord, timeout: Duration) -> Result<bool, Failure> {
    connect(record)?
        .execute("system_powerdown", json!({}))
        .map_err(|error| qmp_failure(record, &error))?;
    Ok(record.process.ends_within(timeout))
}

/// Waits for the end of an ended guest's page server, which reads a checkpoint
/// that could not be deleted meanwhile. One that waits for a far store takes
/// longer, and harms nobody else.
pub fn await_server(record: &GuestRecord) {
    if let Some(server) = record.server {
        server.ends_within(SERVER_WITHIN);
    }
}

/// Ends QEMU: by its own command, and by SIGKILL where it does not obey.
pub fn end(record: &GuestRecord) -> Result<(), Failure> {
    let asked = connect(record).map(|mut qmp| qmp.execute("quit", json!({})));
    if asked.is_ok_and(|said| said.is_ok()) && record.process.ends_within(QUIT_WITHIN) {
        return Ok(());
    }
    if kill(&record.process) {
        return Ok(());
    }
    let what = format!("process {} of '{}' does not end", record.process.pid, record.name);
    Err(Failure::new(Code::Attention, what)
        .state("it was killed, and the kernel still waits for it: for a disk, as a rule")
        .advice("try again when it is gone; its memory and its disks were left alone"))
}
