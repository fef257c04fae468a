use crate::args::AdoptArgs;
use crate::context::Context;
use crate::verbs::doctor::require_tracking;
use dewar_lifecycle::{Failure, adopt};
use serde_json::json;

pub fn run(context: &Context, args: AdoptArgs) -> Result<(), Failure> {
    require_tracking()?;
    let (record, version) = adopt::adopt(context, &args.name, &args.qmp)?;
    let pid = record.process.pid;
    context.print(
        json!({"name": record.name, "pid": pid, "qemu": version}),
        &format!("{} is process {pid}, QEMU {version}; nothing was changed", record.name),
    );
    Ok(())
}
