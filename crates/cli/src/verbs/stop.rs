use crate::args::StopArgs;
use crate::context::Context;
use dewar_lifecycle::container_process::ask_to_end;
use dewar_lifecycle::power::power_down;
use dewar_lifecycle::{Failure, LockedGuest, loss, would_lose};
use dewar_registry::Phase;
use serde_json::json;

pub fn run(context: &Context, args: StopArgs) -> Result<(), Failure> {
    let mut guest = match args.now {
        true => context.lock_to_end(&args.name)?,
        false => context.lock(&args.name)?,
    };
    if guest.record.phase == Phase::Frozen && guest.record.frozen.is_some() {
        return give_up(context, &mut guest, args.yes);
    }
    let by_itself = if args.now {
        false
    } else {
        guest.require_alive()?;
        match guest.record.container {
            Some(_) => ask_to_end(&guest.record, args.timeout)?,
            None => power_down(&guest.record, args.timeout)?,
        }
    };
    if args.now && !guest.record.process.is_alive() {
        // What a dead command left may be all that there is of it.
        guest.end()?;
        guest.require_alive()?;
    }
    guest.end()?;
    if guest.record.phase == Phase::Frozen && guest.record.frozen.is_some() {
        // Its thaw was cut short: what was kept of it is there, and nobody said to lose it.
        return give_up(context, &mut guest, args.yes);
    }
    guest.folder.remove_ram(&guest.record)?;
    let how = if by_itself { "shut itself down" } else { "was ended" };
    context.print(
        json!({"name": args.name, "shut_itself_down": by_itself}),
        &format!("{} {how}", args.name),
    );
    Ok(())
}

/// Gives up what is kept of a frozen guest, which then is one that has ended.
fn give_up(context: &Context, guest: &mut LockedGuest, yes: bool) -> Result<(), Failure> {
    let name = guest.record.name.clone();
    if !yes {
        return Err(would_lose(&guest.record).advice(format!(
            "'dewar thaw {name}' lets it go on; 'dewar stop {name} --yes' gives it up"
        )));
    }
    let lost = loss(&guest.record);
    guest.give_up_frozen()?;
    context.print(
        json!({"name": name, "shut_itself_down": false, "lost": lost}),
        &format!("{name} was given up: {lost}"),
    );
    Ok(())
}
