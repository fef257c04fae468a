use crate::args::RebootArgs;
use crate::context::Context;
use crate::progress::Progress;
use dewar_lifecycle::reboot::{Rebooted, reboot};
use dewar_lifecycle::{Failure, Reporter};
use dewar_units::{ByteSize, PAGE_BYTES};
use serde_json::json;

pub fn run(context: &Context, args: &RebootArgs) -> Result<(), Failure> {
    let guest = context.lock(&args.name)?;
    let progress = Progress::new("rebooting");
    progress.stage("waiting for the guest");
    let Rebooted { by_itself, held_ms, found, cold } = reboot(guest, args.timeout, args.now)?;
    progress.clear();
    let kept = found.as_ref().map(|it| {
        let (kept, known) = (it.kept * PAGE_BYTES as u64, it.known * PAGE_BYTES as u64);
        format!(
            "; {} of {} that it had cached of its disks is kept",
            ByteSize(kept),
            ByteSize(known)
        )
    });
    let cold = cold.map(|why| (format!("; nothing of its cache was kept: {why}"), why));
    context.print(
        json!({
            "name": args.name, "by_itself": by_itself, "held_ms": held_ms, "search": found,
            "cold": cold.as_ref().map(|(_, why)| why),
        }),
        &format!(
            "{} boots{}{}",
            args.name,
            kept.unwrap_or_default(),
            cold.as_ref().map(|(text, _)| text.as_str()).unwrap_or_default()
        ),
    );
    Ok(())
}
