use crate::args::RmArgs;
use crate::context::Context;
use crate::failure::{Code, Failure};
use crate::verbs::stop::{await_server, end};
use serde_json::json;

pub fn run(context: &Context, args: RmArgs) -> Result<(), Failure> {
    let held = context.hold(&args.name)?;
    if held.record.process.is_alive() {
        if held.record.adopted && !args.force {
            // It was never ours: it is only forgotten.
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
