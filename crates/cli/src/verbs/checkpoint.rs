use crate::args::{CheckpointArgs, DedupChoice};
use crate::context::Context;
use crate::progress::Progress;
use crate::render::checkpoint::{describe, describe_container, to_json};
use dewar_checkpoint::DirtyStoreOptions;
use dewar_guest::Health;
use dewar_guest_qemu::QemuGuest;
use dewar_image::{Dedup, DirtyStore, Location, Store};
use dewar_lifecycle::checkpoint::{CheckpointRequest, take_guarded};
use dewar_lifecycle::container::{self, ContainerCheckpoint};
use dewar_lifecycle::{AttachedGuest, Code, Failure};
use dewar_units::PAGE_BYTES;
use std::time::Duration;

pub fn run(context: &Context, args: CheckpointArgs) -> Result<(), Failure> {
    let progress = Progress::new("looking at the guest");
    if context.registry.guest(&args.name)?.record()?.container.is_some() {
        return of_container(context, args, progress);
    }
    let mut attached = AttachedGuest::lock(context, &args.name, Duration::ZERO, &progress)?;
    exclude(&mut attached.guest, &args)?;
    let untouched = |failure: Failure| failure.state("the guest was not touched");
    let location = context.store_location(args.store.store.as_deref())?;
    let store = Store::open_or_create(&location).map_err(|error| untouched(error.into()))?;
    let dirty_store =
        args.dirty_store.as_deref().map(|url| DirtyStore::open(&Location::parse(url)?));
    let dirty_store = dirty_store.transpose().map_err(|error| untouched(error.into()))?;
    let max_pause = args.max_pause;
    let request = CheckpointRequest {
        full: args.full,
        max_pause,
        buffer: args.buffer.map(|size| size.0),
        compression: args.codec.into(),
        dedup: match args.dedup {
            // Its hashes are as good.
            DedupChoice::Store => Dedup::Store,
            _ if args.hashes => Dedup::Known,
            DedupChoice::Image => Dedup::Image,
            DedupChoice::Off => Dedup::Off,
        },
        dirty: dirty_store.map(|store| DirtyStoreOptions {
            store,
            epoch: args.epoch,
            spread_pages: args.spread.map_or(0, |size| size.0 / PAGE_BYTES as u64),
        }),
        tag: args.tag,
    };
    let root = context.registry.root();
    let (taken, health) = take_guarded(root, &mut attached, &store, request, &progress)?;
    drop(progress);
    let mut report = to_json(&taken.record, &store);
    report["tracked"] = taken.by_tracking.into();
    report["max_pause_ms"] = (max_pause.as_secs_f64() * 1e3).into();
    context.print(report, &describe(&taken, &store.url(), max_pause));
    if health == Health::IoStalled {
        let what = format!("the checkpoint of '{}' was made", args.name);
        return Err(Failure::new(Code::Attention, what)
            .state(health.to_string())
            .already_printed());
    }
    Ok(())
}

/// The same of a container.
fn of_container(
    context: &Context,
    args: CheckpointArgs,
    progress: Progress,
) -> Result<(), Failure> {
    let untouched = |failure: Failure| failure.state("the container was not touched");
    let for_machines =
        [(args.dirty_store.is_some(), "--dirty-store"), (!args.exclude.is_empty(), "--exclude")];
    if let Some((_, option)) = for_machines.iter().find(|(is_given, _)| *is_given) {
        let what = format!("'{}' is a container, and {option} is for virtual machines", args.name);
        return Err(untouched(Failure::new(Code::Usage, what)));
    }
    let guest = context.lock(&args.name)?;
    guest.require_alive()?;
    let location = context.store_location(args.store.store.as_deref())?;
    let store = Store::open_or_create(&location).map_err(|error| untouched(error.into()))?;
    let request = ContainerCheckpoint {
        full: args.full,
        compression: args.codec.into(),
        dedup: match args.dedup {
            DedupChoice::Store => Dedup::Store,
            // Pages move about: an earlier checkpoint's are found by their hashes.
            DedupChoice::Image | DedupChoice::Off => Dedup::Known,
        },
        tag: args.tag,
    };
    let record = container::take(context.registry.root(), &guest, &store, request, &progress)?;
    drop(progress);
    context.print(to_json(&record, &store), &describe_container(&record, &store.url()));
    Ok(())
}

/// Leaves out the disks that the user named.
fn exclude(guest: &mut QemuGuest, args: &CheckpointArgs) -> Result<(), Failure> {
    guest.exclude(&args.exclude).map_err(|(wanted, has)| {
        let what = format!("guest '{}' has no writable disk '{wanted}'", args.name);
        let has = if has.is_empty() { "it has none".to_owned() } else { has.join(", ") };
        Failure::new(Code::NotFound, what)
            .state("the guest was not touched")
            .advice(format!("its disks: {has}"))
    })
}
