//! The user that a QEMU becomes once it has started (`-runas`, `-run-with user=`), and what we
//! make for it: it opens its disks again later, when the guest is let run, when a snapshot is
//! written back, and must find them and be let in then.

use crate::cmdline::{Properties, Unsupported, arguments};
use crate::launch::without_ours;
use dewar_kernel::User;
use rustix::fs::Access;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A user of a command line's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QemuUser {
    name: String,
    user: User,
}

/// What a command line names as the user to become.
pub(crate) fn named(line: &[String]) -> Option<String> {
    arguments(line).iter().rev().find_map(|argument| match argument.name {
        "runas" => argument.value.map(str::to_owned),
        "run-with" => Properties::parse(argument.value?).ok()?.get("user", ""),
        _ => None,
    })
}

impl QemuUser {
    /// The user that a command line names.
    ///
    /// # Errors
    /// Where this host does not know it.
    pub fn of(line: &[String]) -> Result<Option<Self>, Unsupported> {
        let Some(name) = named(line) else { return Ok(None) };
        let numbers = name.split_once(':').and_then(|(uid, gid)| {
            Some(User { uid: uid.parse().ok()?, gid: gid.parse().ok()?, groups: Vec::new() })
        });
        let user = numbers.or_else(|| {
            let uid = ids(&["-u", &name])?.first().copied()?;
            let gid = ids(&["-g", &name])?.first().copied()?;
            Some(User { uid, gid, groups: ids(&["-G", &name])? })
        });
        let unknown = || {
            Unsupported(format!("QEMU is to run as user '{name}', of whom this host knows nothing"))
        };
        user.map(|user| Some(Self { name: name.clone(), user })).ok_or_else(unknown)
    }

    /// Gives it a file that we made below `root`, and lets it reach that.
    ///
    /// # Errors
    /// Where it cannot, with what keeps it from that.
    pub fn give(&self, path: &Path, root: &Path) -> Result<(), Unsupported> {
        let failed = |path: &Path, error: std::io::Error| {
            Unsupported(format!(
                "{} cannot be given to user '{}': {error}",
                path.display(),
                self.name
            ))
        };
        self.let_in(path.parent().unwrap_or(root), root)?;
        chown(path, Some(self.user.uid), Some(self.user.gid)).map_err(|error| failed(path, error))
    }

    /// Lets it enter a folder of ours below `root`; those who may not list it still may not.
    ///
    /// # Errors
    /// Where a folder above `root` keeps it out.
    pub fn let_in(&self, folder: &Path, root: &Path) -> Result<(), Unsupported> {
        let mut above: Vec<&Path> = folder.ancestors().collect();
        above.reverse();
        for step in above.into_iter().filter(|step| step.exists()) {
            if self.user.may(step, Access::EXEC_OK) {
                continue;
            }
            if !step.starts_with(root) {
                return Err(Unsupported(format!(
                    "user '{}', as which QEMU is to run, may not enter {}, and could not open what \
                     is made for it in {}: 'chmod o+x {}', or take another --root",
                    self.name,
                    step.display(),
                    root.display(),
                    step.display()
                )));
            }
            let enter = |mode: u32| fs::Permissions::from_mode(mode | 0o011);
            fs::metadata(step)
                .and_then(|data| {
                    fs::set_permissions(step, enter(data.permissions().mode() & 0o7777))
                })
                .map_err(|error| Unsupported(format!("{}: {error}", step.display())))?;
        }
        Ok(())
    }
}

/// What id(1) prints of a user, also of one that a directory service knows.
fn ids(arguments: &[&str]) -> Option<Vec<u32>> {
    let output = without_ours(Command::new("id").args(arguments)).output().ok()?;
    let text = String::from_utf8(output.stdout).ok().filter(|_| output.status.success())?;
    text.split_whitespace().map(|number| number.parse().ok()).collect()
}

/// The first of these disks that a running QEMU could not open again, since it is another
/// user's process by now; as the end of a sentence.
pub(crate) fn closed_disk(process: i32, disks: &[PathBuf]) -> Option<String> {
    let status = procfs::process::Process::new(process).and_then(|it| it.status()).ok()?;
    if status.euid == 0 || status.euid == rustix::process::geteuid().as_raw() {
        return None;
    }
    let groups = status.groups.into_iter().collect();
    let user = User { uid: status.euid, gid: status.egid, groups };
    let is_closed =
        |path: &&PathBuf| path.exists() && !user.may(path, Access::READ_OK | Access::WRITE_OK);
    let disk = disks.iter().find(is_closed)?;
    Some(format!(
        "disk {} cannot be opened again by user {}, as which its QEMU runs by now: let that user \
         read and write it",
        disk.display(),
        user.uid
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_user_is_found_however_it_is_written() {
        let line = |words: &[&str]| words.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>();
        assert_eq!(named(&line(&["-m", "1G", "-runas", "nobody"])).as_deref(), Some("nobody"));
        let modern = line(&["-run-with", "async-teardown=on,user=5:6"]);
        assert_eq!(named(&modern).as_deref(), Some("5:6"));
        let user = QemuUser::of(&modern).expect("known").expect("a user").user;
        assert_eq!((user.uid, user.gid), (5, 6));
        QemuUser::of(&line(&["-runas", "no-such-user-here"])).expect_err("unknown");
        assert_eq!(QemuUser::of(&line(&["-m", "1G"])), Ok(None));
    }
}
