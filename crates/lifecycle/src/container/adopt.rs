//! `adopt --container`: a container that a runtime started becomes a guest. Nothing of it is changed.

use crate::failure::{Code, Failure};
use crate::host::Host;
use crate::locked_guest::{NextGuest, clear_predecessor};
use dewar_guest_oci::{Container, Preconditions, Runtime};
use dewar_registry::GuestRecord;

/// Adopts a container. Returns the guest's record.
///
/// # Errors
/// Where the runtime knows no such container, it is a guest already, or CRIU could not take it.
pub fn adopt(host: &Host, name: &str, runtime: &Runtime, id: &str) -> Result<GuestRecord, Failure> {
    let folder = host.registry.guest(name)?;
    let _lock = folder.lock()?;
    drop(clear_predecessor(&folder, None, NextGuest::Another)?);
    let untouched = |failure: Failure| failure.state("the container was not touched");
    let (container, process) =
        Container::find(runtime, id).map_err(|error| untouched(error.into()))?;
    for (_, other) in host.guests()? {
        if other.process.is_same(&process) {
            let what = format!("container '{id}' is guest '{}' already", other.name);
            return Err(untouched(Failure::new(Code::Failed, what)));
        }
    }
    let missing = Preconditions::of(&container).map_err(|error| untouched(error.into()))?;
    missing.require(&container).map_err(|error| untouched(error.into()))?;
    let record = GuestRecord::new_container(name, process, container.record());
    folder.set_record(&record)?;
    Ok(record)
}
