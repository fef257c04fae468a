//! A guest that runs, and whose page server is gone, gets another.

use crate::failure::{Code, Failure};
use crate::host::Host;
use crate::page_server::{lacks_server, prepare};
use dewar_guest_qemu::launch::kill;
use dewar_memory::UffdOrigin;
use dewar_registry::ProcessId;

/// Where the guest that `reference` means runs but its page server is gone: starts another, and
/// returns the guest's name. `reference` is the guest's own name, or a checkpoint of which the guest,
/// or `name`, was made; `store` is the checkpoint's.
///
/// # Errors
/// Where no server can be started.
pub fn resume_service(
    host: &Host,
    reference: &str,
    name: Option<&str>,
    store: Option<&str>,
) -> Result<Option<String>, Failure> {
    let is_guest = |name: &str| host.registry.guest(name).is_ok_and(|it| it.record().is_ok());
    let first = name.unwrap_or(reference);
    let name = if is_guest(first) {
        first.to_owned()
    } else {
        let Ok(store) = host.store(store) else { return Ok(None) };
        let Ok(id) = store.find(reference) else { return Ok(None) };
        let guest = match name {
            Some(name) => name.to_owned(),
            None => store.record(&id)?.guest,
        };
        if !is_guest(&guest) {
            return Ok(None);
        }
        guest
    };
    let mut resumed = false;
    host.lock_after(&name, |folder, record| {
        if !lacks_server(folder, record) {
            return Ok(());
        }
        let origin = record.origin.as_ref().ok_or_else(|| {
            Failure::new(Code::Failed, format!("'{name}' was not restored from a checkpoint"))
        })?;
        // A server that was stopped (SIGSTOP) would be in the way of the next.
        if let Some(server) = record.server.filter(ProcessId::is_halted) {
            kill(&server);
        }
        let root = host.registry.root();
        let server = prepare(root, folder, &origin.store, &origin.image, &[])?;
        // What the first made is still there; QEMU itself may wait for a page.
        record.server = Some(server.attach(&record.process, UffdOrigin::Syscall)?);
        folder.set_record(record)?;
        resumed = true;
        Ok(())
    })?;
    Ok(resumed.then_some(name))
}
