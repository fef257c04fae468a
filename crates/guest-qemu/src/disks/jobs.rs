//! Jobs in QEMU, by which it makes and copies files.

use super::error::DiskError;
use crate::qmp::Qmp;
use serde_json::json;
use std::time::{Duration, Instant};

pub(super) const POLL: Duration = Duration::from_millis(2);

pub(super) struct JobState {
    pub(super) status: String,
    pub(super) error: Option<String>,
}

pub(super) fn job_state(qmp: &mut Qmp, id: &str) -> Result<Option<JobState>, DiskError> {
    let jobs = qmp.execute("query-jobs", json!({}))?;
    Ok(jobs.as_array().into_iter().flatten().find(|job| job["id"] == id).map(|job| JobState {
        status: job["status"].as_str().unwrap_or_default().to_owned(),
        error: job["error"].as_str().map(str::to_owned),
    }))
}

/// Waits for a job of ours to conclude, and dismisses it. One that somebody else dismissed
/// may have failed.
pub(super) fn await_job(qmp: &mut Qmp, id: &str) -> Result<(), DiskError> {
    let failed = |why: String| DiskError::Job(id.to_owned(), why);
    loop {
        let Some(state) = job_state(qmp, id)? else {
            return Err(failed("somebody else dismissed it".to_owned()));
        };
        if state.status == "concluded" {
            qmp.execute("job-dismiss", json!({"id": id}))?;
            return state.error.map_or(Ok(()), |error| Err(failed(error)));
        }
        std::thread::sleep(POLL);
    }
}

/// Ends a job, if there is one.
pub(super) fn abandon_job(qmp: &mut Qmp, id: &str) -> Result<(), DiskError> {
    abandon_job_until(qmp, id, None)
}

/// The same for one that may wait for somebody else: not longer than until then.
pub(super) fn abandon_job_until(
    qmp: &mut Qmp,
    id: &str,
    deadline: impl Into<Option<Instant>>,
) -> Result<(), DiskError> {
    let (mut asked, deadline) = (false, deadline.into());
    while let Some(state) = job_state(qmp, id)? {
        match state.status.as_str() {
            "concluded" => drop(qmp.execute("job-dismiss", json!({"id": id}))?),
            _ if !asked => {
                asked = true;
                // Refused where it concludes this very moment.
                let _ = qmp.execute("job-cancel", json!({"id": id}));
            }
            _ if deadline.is_some_and(|deadline| Instant::now() > deadline) => {
                return Err(DiskError::Job(id.to_owned(), "it does not end".to_owned()));
            }
            _ => std::thread::sleep(POLL),
        }
    }
    Ok(())
}
