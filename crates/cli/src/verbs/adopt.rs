use crate::args::AdoptArgs;
use crate::context::Context;
use crate::verbs::doctor::require_tracking;
use dewar_guest_oci::Runtime;
use dewar_lifecycle::{Failure, adopt, container};
use serde_json::json;

pub fn run(context: &Context, args: AdoptArgs) -> Result<(), Failure> {
    if let Some(id) = &args.container {
        let runtime = Runtime { program: args.runtime, root: args.runtime_root };
        let record = container::adopt(context, &args.name, &runtime, id)?;
        let pid = record.process.pid;
        context.print(
            json!({"name": record.name, "pid": pid, "container": id, "runtime": record.program}),
            &format!("{} is container {id}, process {pid}; nothing was changed", record.name),
        );
        return Ok(());
    }
    require_tracking()?;
    let socket = args.qmp.unwrap_or_default();
    let (record, version) = adopt::adopt(context, &args.name, &socket)?;
    let pid = record.process.pid;
    context.print(
        json!({"name": record.name, "pid": pid, "qemu": version}),
        &format!("{} is process {pid}, QEMU {version}; nothing was changed", record.name),
    );
    Ok(())
}
