use crate::args::ReferenceArgs;
use crate::context::Context;
use crate::progress::Progress;
use dewar_checkpoint::Observer;
use dewar_lifecycle::Failure;
use serde_json::json;

pub fn run(context: &Context, args: ReferenceArgs) -> Result<(), Failure> {
    let store = context.open_store(args.store.store.as_deref())?;
    let id = store.find(&args.reference)?;
    let progress = Progress::new("verifying");
    let read = dewar_image::verify(&store, &id, &mut |done, of| progress.progress(done, of))?;
    drop(progress);
    let mut text = format!(
        "{id} is whole: {} pages in {} frames and {} segments, {} disks",
        read.pages, read.frames, read.segments, read.disks
    );
    if read.keyed > 0 {
        text.push_str(&format!(", {} pages in dirty stores", read.keyed));
    }
    context.print(
        json!({
            "checkpoint": id, "whole": true, "pages": read.pages, "frames": read.frames,
            "segments": read.segments, "keyed": read.keyed, "disks": read.disks,
        }),
        &text,
    );
    Ok(())
}
