use crate::args::RmArgs;
use crate::context::{Context, LockedGuest, connect};
use crate::failure::{Code, Failure};
use crate::ram_dir::usual_dirs;
use crate::tracking;
use dewar_guest_qemu::launch::end_strays;
use dewar_guest_qemu::{Journal, map_backends, remove_bitmaps};
use dewar_registry::{GuestFolder, RegistryError};
use serde_json::json;

pub fn run(context: &Context, args: RmArgs) -> Result<(), Failure> {
    if args.force {
        return force(context, &args.name);
    }
    let held = context.hold(&args.name)?;
    if held.record.process.is_alive() {
        if held.record.adopted {
            // It was never ours: it is only forgotten, and left as it was found, as far as
            // it lets us.
            let _ = leave(&held);
            held.folder.remove_all()?;
            context.print(json!({"name": args.name}), &format!("{} runs on, forgotten", args.name));
            return Ok(());
        }
        return Err(Failure::new(Code::Failed, format!("guest '{}' is running", args.name))
            .state("it runs on")
            .advice("'dewar stop' it first, or use --force"));
    }
    if held.record.frozen.is_some() {
        return Err(Failure::new(Code::Failed, format!("guest '{}' is frozen", args.name))
            .state("its memory is kept")
            .advice("'dewar thaw' it first, or use --force"));
    }
    held.folder.remove_ram(&held.record)?;
    held.folder.remove_all()?;
    context.print(json!({"name": args.name}), &format!("{} is removed", args.name));
    Ok(())
}

/// Ends a guest whatever state it is in, and forgets it. What could not be put right of its
/// disks is told: nobody else will.
fn force(context: &Context, name: &str) -> Result<(), Failure> {
    let folder = context.registry.guest(name)?;
    if !folder.file("").exists() {
        return Err(RegistryError::NoSuchGuest(name.to_owned()).into());
    }
    let lock = folder.lock()?;
    let left = match folder.record() {
        Ok(record) => {
            let mut held = LockedGuest { folder: folder.clone(), record, lock };
            let left = held.end().err();
            if let Some(failure) = left {
                if held.record.process.is_alive() || holds_disks(&folder) {
                    return Err(failure);
                }
                held.folder.remove_ram(&held.record)?;
                Some(failure.whole())
            } else {
                held.folder.remove_ram(&held.record)?;
                None
            }
        }
        // Its record is damaged or was never written: what there is of it goes by its name.
        Err(_) => {
            end_strays(&folder.file("qmp.sock"), None);
            None
        }
    };
    usual_dirs().into_iter().try_for_each(|it| folder.sweep_ram(it))?;
    folder.remove_all()?;
    let more = left.as_ref().map_or(String::new(), |what| format!("\nleft as it is: {what}"));
    context.print(json!({"name": name, "left": left}), &format!("{name} is removed{more}"));
    Ok(())
}

/// Whether the guest's folder holds what was written to a disk and is not in it yet.
fn holds_disks(folder: &GuestFolder) -> bool {
    let journal = Journal::load(folder).ok().flatten();
    let inside = folder.file("");
    journal.is_some_and(|it| it.disks.iter().any(|disk| disk.overlay.starts_with(&inside)))
}

/// Takes away what a checkpoint left in a QEMU for the next one: writes are not tracked any
/// more, and nothing keeps its user from going back to a snapshot of his own.
fn leave(held: &LockedGuest) -> Option<()> {
    let mut qmp = connect(&held.record).ok()?;
    let removed = remove_bitmaps(&mut qmp).ok();
    let ram = map_backends(&mut qmp, &held.record).ok()?;
    tracking::end(&held.folder, &held.record, &ram).and(removed)
}
