use crate::args::RmArgs;
use crate::context::{Context, Held, connect};
use crate::failure::{Code, Failure};
use crate::tracking;
use crate::verbs::stop::{await_server, end};
use dewar_guest_qemu::{map_backends, remove_bitmaps};
use serde_json::json;

pub fn run(context: &Context, args: RmArgs) -> Result<(), Failure> {
    let held = context.hold(&args.name)?;
    if held.record.process.is_alive() {
        if held.record.adopted && !args.force {
            // It was never ours: it is only forgotten, and left as it was found, as far as
            // it lets us.
            let _ = leave(&held);
            held.folder.remove_all()?;
            context.print(json!({"name": args.name}), &format!("{} runs on, forgotten", args.name));
            return Ok(());
        }
        if !args.force {
            return Err(Failure::new(Code::Failed, format!("guest '{}' is running", args.name))
                .state("it runs on")
                .advice("'dewar stop' it first, or use --force"));
        }
        end(&held.record)?;
    }
    if held.record.frozen.is_some() && !args.force {
        return Err(Failure::new(Code::Failed, format!("guest '{}' is frozen", args.name))
            .state("its memory is kept")
            .advice("'dewar thaw' it first, or use --force"));
    }
    await_server(&held.record);
    held.folder.remove_ram(&held.record)?;
    held.folder.remove_all()?;
    context.print(json!({"name": args.name}), &format!("{} is removed", args.name));
    Ok(())
}

/// Takes away what a checkpoint left in a QEMU for the next one: writes are not tracked any
/// more, and nothing keeps its user from going back to a snapshot of his own.
fn leave(held: &Held) -> Option<()> {
    let mut qmp = connect(&held.record).ok()?;
    let removed = remove_bitmaps(&mut qmp).ok();
    let ram = map_backends(&mut qmp, &held.record).ok()?;
    tracking::end(&held.folder, &held.record, &ram).and(removed)
}
