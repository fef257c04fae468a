use crate::args::ReportArgs;
use crate::context::Context;
use crate::report;
use dewar_lifecycle::Failure;
use serde_json::json;

pub fn run(context: &Context, args: ReportArgs) -> Result<(), Failure> {
    let store = context.open_store(args.store.store.as_deref())?;
    let id = store.find(&args.reference)?;
    let record = store.record(&id)?;
    let (mut history, _) = store.records()?;
    history.retain(|it| it.guest == record.guest && it.created_ms <= record.created_ms);
    // The last ones are what people compare with.
    let history = &history[history.len().saturating_sub(24)..];
    let output = args.output.unwrap_or_else(|| format!("{id}.html").into());
    report::Drawing::open(&output)?.write(&report::page(&record, history))?;
    context.print(
        json!({"checkpoint": id, "file": output}),
        &format!("{} tells of {id}; open it in a browser", output.display()),
    );
    Ok(())
}
