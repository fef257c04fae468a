use crate::args::DiffArgs;
use crate::context::Context;
use crate::output::table;
use dewar_lifecycle::Failure;
use dewar_units::{ByteSize, PAGE_BYTES, PageNumber};
use serde_json::{Value, json};

pub fn run(context: &Context, args: DiffArgs) -> Result<(), Failure> {
    let store = context.open_store(args.store.store.as_deref())?;
    let a = store.open_image(&store.find(&args.a)?)?;
    let b = store.open_image(&store.find(&args.b)?)?;
    let differing = dewar_image::diff(&a, &b)?;
    let (mut regions, mut rows) = (Vec::<Value>::new(), Vec::new());
    let mut first = 0;
    for region in &a.record().memory.regions {
        let pages = (first..first + region.pages).map(PageNumber);
        let changed = pages.filter(|page| differing.contains(*page)).count() as u64;
        first += region.pages;
        let bytes = ByteSize(changed * PAGE_BYTES as u64).to_string();
        rows.push(vec![region.name.clone(), region.pages.to_string(), changed.to_string(), bytes]);
        regions.push(json!({"name": region.name, "pages": region.pages, "changed": changed}));
    }
    context.print(
        json!({
            "a": a.record().id, "b": b.record().id, "changed": differing.count(),
            "regions": regions,
        }),
        &table(&["RAM", ">pages", ">changed", ">size"], rows),
    );
    Ok(())
}
