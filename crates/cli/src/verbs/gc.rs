use crate::args::GcArgs;
use crate::context::Context;
use crate::failure::{Code, Failure};
use crate::progress::Progress;
use dewar_checkpoint::Observer;
use dewar_units::ByteSize;
use serde_json::json;

pub fn run(context: &Context, args: GcArgs) -> Result<(), Failure> {
    let store = context.store(args.store.store.as_deref())?;
    let progress = Progress::new("looking what checkpoints need");
    let collected = dewar_image::collect(&store, args.dry_run, |done, of| {
        progress.progress(done, of);
        progress.signal_at(&format!("gc-{done}"));
    })?;
    drop(progress);
    let would = if args.dry_run { "would be " } else { "" };
    let mut text = format!(
        "{} {would}freed: {} segments {would}removed, {} {would}compacted",
        ByteSize(collected.bytes_freed),
        collected.segments_removed,
        collected.segments_compacted
    );
    if collected.dirty_removed > 0 {
        let images = collected.dirty_removed;
        text.push_str(&format!("; pages of {images} images in dirty stores {would}removed"));
    }
    if let Some(why) = collected.dirty_problem {
        return Err(Failure::new(Code::Failed, why)
            .state(text)
            .advice("'dewar delete --only-here' takes checkpoints whose dirty store is gone"));
    }
    context.print(
        json!({
            "dry_run": args.dry_run, "segments_removed": collected.segments_removed,
            "segments_compacted": collected.segments_compacted,
            "bytes_freed": collected.bytes_freed, "dirty_removed": collected.dirty_removed,
        }),
        &text,
    );
    Ok(())
}
