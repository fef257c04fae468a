use crate::args::GcArgs;
use crate::context::Context;
use crate::progress::Progress;
use crate::verbs::delete::may_be_one;
use dewar_checkpoint::Observer;
use dewar_image::{Collected, ImageId, Store};
use dewar_lifecycle::Reporter;
use dewar_lifecycle::recovery::replaced;
use dewar_lifecycle::{Code, Failure};
use dewar_registry::Origin;
use dewar_units::ByteSize;
use serde_json::json;

pub fn run(context: &Context, args: GcArgs) -> Result<(), Failure> {
    let store = context.open_store(args.store.store.as_deref())?;
    refuse_bereft(context, &store)?;
    if args.only_here {
        store.sweep_only_here()?;
    }
    let progress = Progress::new("looking what checkpoints need");
    let collected = dewar_image::collect(&store, args.dry_run, &mut |done, of| {
        progress.progress(done, of);
        progress.reached(&format!("gc-{done}"));
    })?;
    drop(progress);
    let would = if args.dry_run { "would be " } else { "" };
    let mut text = format!(
        "{} {would}freed: {} segments {would}removed, {} {would}compacted",
        ByteSize(collected.bytes_freed),
        collected.segments_removed,
        collected.segments_compacted
    );
    if collected.disks_removed > 0 {
        text.push_str(&format!(
            ", {} pieces of disk copies {would}removed",
            collected.disks_removed
        ));
    }
    if collected.dirty_removed > 0 {
        let images = collected.dirty_removed;
        text.push_str(&format!("; pages of {images} images in dirty stores {would}removed"));
    }
    let end = all_done(&collected);
    context.print_with(
        json!({
            "dry_run": args.dry_run, "segments_removed": collected.segments_removed,
            "segments_compacted": collected.segments_compacted,
            "disks_removed": collected.disks_removed,
            "bytes_freed": collected.bytes_freed, "dirty_removed": collected.dirty_removed,
        }),
        &text,
        end,
    )
}

/// That nothing was left that could be freed.
fn all_done(collected: &Collected) -> Result<(), Failure> {
    let compact = collected.compact_problem.as_ref().map(|why| format!("not compacted: {why}"));
    let problems: Vec<String> =
        compact.into_iter().chain(collected.dirty_problem.clone()).collect();
    if problems.is_empty() {
        return Ok(());
    }
    let failure = Failure::new(Code::Failed, problems.join("; "))
        .state("what could not be freed was left as it was");
    Err(match collected.dirty_problem {
        None => failure,
        Some(_) => failure.advice(
            "of a dirty store that is gone for good, 'dewar delete --only-here' takes the \
             checkpoints, and 'dewar gc --only-here' what killed ones left",
        ),
    })
}

/// That no guest of this host stands on disk copies of which no record tells any more.
fn refuse_bereft(context: &Context, store: &Store) -> Result<(), Failure> {
    for (folder, record) in context.guests()? {
        let name = record.name.clone();
        // Should a restore that is under way fail, the guest before has its place again.
        let guests = [Some(record), replaced::kept(&folder)?].into_iter().flatten();
        for origin in guests.filter_map(|it| it.origin).filter(Origin::disks_in_store) {
            let image = ImageId(origin.image);
            if may_be_one(&origin.store, &store.url()) && !store.has_record(&image)? {
                let what = format!(
                    "guest '{name}' stands on disks of checkpoint {image}, whose record is gone"
                );
                return Err(Failure::new(Code::Failed, what)
                    .state("nothing was removed")
                    .advice(format!("put the record back, or 'dewar rm {name}' first")));
            }
        }
    }
    Ok(())
}
