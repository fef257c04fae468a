use crate::args::{CacheArgs, OnOff};
use crate::context::Context;
use dewar_lifecycle::Failure;
use dewar_lifecycle::served_disks::{CacheSwitch, ServedDisk, switch_cache};
use dewar_units::ByteSize;
use serde_json::json;

pub fn run(context: &Context, args: CacheArgs) -> Result<(), Failure> {
    let guest = context.lock(&args.name)?;
    let wanted = CacheSwitch {
        disk: args.disk,
        is_warm: args.wanted == OnOff::On,
        cache_bytes: args.size.map(|size| size.0),
    };
    let disks = switch_cache(&guest, &wanted)?;
    let lines: Vec<String> = disks.iter().map(line).collect();
    context.print(json!({"name": args.name, "disks": disks}), &lines.join("\n"));
    Ok(())
}

fn line(disk: &ServedDisk) -> String {
    let ServedDisk { id, path, is_warm, cache_bytes, .. } = disk;
    let most =
        cache_bytes.map_or_else(String::new, |bytes| format!(", at most {}", ByteSize(bytes)));
    match is_warm {
        true => format!(
            "{id} {}: what is read of it from now on outlives a reboot{most}",
            path.display()
        ),
        false => format!("{id} {}: nothing of it is kept over a reboot", path.display()),
    }
}
