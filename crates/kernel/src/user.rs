use rustix::fs::{Access, access};
use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use std::path::Path;

/// Whose rights a process has (credentials(7)).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// Its user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Its other groups.
    pub groups: Vec<u32>,
}

impl User {
    /// Whether this user may enter a folder, or a file be opened as it says. Asked by a thread
    /// that becomes the user, so that all that the file system goes by is counted; where we may
    /// not become another, the answer is ours.
    pub fn may(&self, path: &Path, how: Access) -> bool {
        let ask = || {
            let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
            let groups: Vec<Gid> = self.groups.iter().map(|it| Gid::from_raw(*it)).collect();
            // A thread of its own: the kernel keeps credentials for each.
            let _ = set_thread_groups(&groups);
            let _ = set_thread_res_gid(gid, gid, gid);
            let _ = set_thread_res_uid(uid, uid, uid);
            access(path, how).is_ok()
        };
        std::thread::scope(|scope| scope.spawn(ask).join().unwrap_or(false))
    }
}
