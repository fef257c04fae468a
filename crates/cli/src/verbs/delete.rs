use crate::args::{DeleteArgs, ReferenceArgs};
use crate::context::Context;
use dewar_image::{Deleted, ImageId, Location, Store};
use dewar_lifecycle::page_server::ServerState;
use dewar_lifecycle::recovery::replaced;
use dewar_lifecycle::{Code, Failure};
use dewar_registry::{Frozen, Kept, Origin};
use serde_json::json;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

pub fn run(context: &Context, args: DeleteArgs) -> Result<(), Failure> {
    let DeleteArgs { which: ReferenceArgs { reference, store }, only_here } = args;
    let store = context.open_store(store.store.as_deref())?;
    let id = store.find(&reference)?;
    refuse_needed(context, &store, &id)?;
    let deletion = store.begin_deletion(&id)?;
    // From here on nobody reads it; a restore that ended meanwhile has its guest on record.
    refuse_needed(context, &store, &id)?;
    let deleted = deletion.finish(only_here).map_err(|error| match error {
        error if error.is_server_failure() && !only_here => Failure::from(error)
            .advice("--only-here leaves pages where a dirty store does not answer"),
        error => Failure::from(error),
    })?;
    let text = match deleted {
        Deleted::Whole => format!("{id} is deleted"),
        Deleted::Record => {
            format!("{id} is deleted; its record was damaged: 'dewar gc' frees what only it needed")
        }
    };
    context.print(json!({"checkpoint": id, "left_to_gc": deleted == Deleted::Record}), &text);
    Ok(())
}

/// That no guest of this host needs an image.
fn refuse_needed(context: &Context, store: &Store, id: &ImageId) -> Result<(), Failure> {
    let is_here = |other: &str| may_be_one(other, &store.url());
    for (folder, record) in context.guests()? {
        let name = &record.name;
        let needs_memory = record.process.is_alive() && !ServerState::of(&folder, &record).complete;
        // Should the restore that is under way fail, that guest has its place again.
        let replaced = replaced::kept(&folder)?.and_then(|before| before.origin);
        let kept_in = |frozen: &Frozen| match &frozen.kept {
            Kept::InStore { store, image } => *image == id.0 && is_here(store),
            Kept::InPlace { .. } | Kept::AtSource => false,
        };
        if record.frozen.as_ref().is_some_and(kept_in) {
            let what = format!("checkpoint {id} is all that there is of frozen guest '{name}'");
            return Err(Failure::new(Code::Failed, what)
                .state("nothing was removed")
                .advice(format!("'dewar thaw {name}' first")));
        }
        let stands_on = |origin: Origin, needs_memory: bool| {
            origin.image == id.0
                && (origin.disks_in_store() || needs_memory)
                && is_here(&origin.store)
        };
        if record.origin.is_some_and(|origin| stands_on(origin, needs_memory))
            || replaced.is_some_and(|origin| stands_on(origin, false))
        {
            let what = format!("guest '{name}' still stands on checkpoint {id}");
            return Err(Failure::new(Code::Failed, what)
                .state("nothing was removed")
                .advice(format!("'dewar rm {name}' first")));
        }
    }
    Ok(())
}

/// Whether two names may mean one store: a folder has many paths, a server many names.
pub fn may_be_one(one: &str, other: &str) -> bool {
    let folder = |path: &PathBuf| fs::metadata(path).map(|it| (it.dev(), it.ino())).ok();
    match (Location::parse(one), Location::parse(other)) {
        (Ok(Location::Folder(one)), Ok(Location::Folder(other))) => {
            one == other || folder(&one).is_some_and(|it| folder(&other) == Some(it))
        }
        (Ok(Location::Redis(_)), Ok(Location::Redis(_))) => true,
        _ => false,
    }
}
