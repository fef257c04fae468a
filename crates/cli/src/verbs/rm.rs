use crate::args::RmArgs;
use crate::context::Context;
use dewar_lifecycle::container_process::unmount_files;
use dewar_lifecycle::remove::{leave, remove_by_force};
use dewar_lifecycle::{Code, Failure};
use serde_json::json;

pub fn run(context: &Context, args: RmArgs) -> Result<(), Failure> {
    if args.force {
        return force(context, &args.name);
    }
    let guest = context.lock(&args.name)?;
    guest.require_here()?;
    if guest.record.process.is_alive() {
        if guest.record.adopted {
            // It was never ours: it is only forgotten, and left as it was found, as far as
            // it lets us.
            unmount_files(&guest.folder)?;
            let _ = leave(&guest);
            guest.folder.remove_all()?;
            context.print(json!({"name": args.name}), &format!("{} runs on, forgotten", args.name));
            return Ok(());
        }
        return Err(Failure::new(Code::Failed, format!("guest '{}' is running", args.name))
            .state("it runs on")
            .advice("'dewar stop' it first, or use --force"));
    }
    if guest.record.frozen.is_some() {
        return Err(Failure::new(Code::Failed, format!("guest '{}' is frozen", args.name))
            .state("its memory is kept")
            .advice("'dewar thaw' it first, or use --force"));
    }
    unmount_files(&guest.folder)?;
    guest.folder.remove_ram(&guest.record)?;
    guest.folder.remove_all()?;
    context.print(json!({"name": args.name}), &format!("{} is removed", args.name));
    Ok(())
}

fn force(context: &Context, name: &str) -> Result<(), Failure> {
    let left = remove_by_force(context, name)?;
    let more = left.as_ref().map_or(String::new(), |what| format!("\nleft as it is: {what}"));
    context.print(json!({"name": name, "left": left}), &format!("{name} is removed{more}"));
    Ok(())
}
