//! A store in a folder: objects are files by their names. Private to their
//! owner; held by `flock`, which the kernel drops when the holder dies.

use crate::backend::{Backend, Lock, LockAttempt, LockKind, Object};
use crate::{StoreError, direct, files};
use rustix::fs::{Advice, FlockOperation, fadvise, flock, statvfs};
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Seek, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const PART: &str = ".part";
/// How long a program may take to call exec(2).
const UNTIL_EXEC: Duration = Duration::from_millis(40);

/// A store in a folder.
#[derive(Debug)]
pub struct Folder {
    root: PathBuf,
}

impl Folder {
    /// The folder at `root`, there or not.
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// Makes it and its sub-folders.
    ///
    /// # Errors
    /// Where the file system refuses.
    pub fn make(&self) -> Result<(), StoreError> {
        ["", "segments", "images", "disks", "writers"]
            .into_iter()
            .try_for_each(|folder| files::make_private_folder(&self.root.join(folder)))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// All that a sub-folder holds, by name. What cannot be listed is an error: who
    /// asks may remove whatever is not needed by what is there.
    fn entries(&self, folder: &str) -> Result<Vec<(String, fs::DirEntry)>, StoreError> {
        let path = self.path(folder);
        let list = || -> std::io::Result<Vec<_>> {
            let entries = fs::read_dir(&path)?.collect::<Result<Vec<_>, _>>()?;
            let named = |entry: fs::DirEntry| Some((entry.file_name().into_string().ok()?, entry));
            Ok(entries.into_iter().filter_map(named).collect())
        };
        list().map_err(StoreError::io("list", &path))
    }
}

impl Backend for Folder {
    fn url(&self) -> String {
        format!("file:{}", self.root.display())
    }

    fn folder(&self) -> Option<&Path> {
        Some(&self.root)
    }

    fn get(&self, name: &str) -> Result<Option<Vec<u8>>, StoreError> {
        let path = self.path(name);
        unless_missing(fs::read(&path)).map_err(StoreError::io("read", &path))
    }

    fn has_ample_room(&self, bytes: u64) -> bool {
        statvfs(&self.root).is_ok_and(|it| it.f_bavail.saturating_mul(it.f_frsize) >= bytes)
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        files::write_atomically(&self.path(name), bytes)
    }

    fn put_new(&self, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        direct::write_new(&self.path(name), bytes)
    }

    fn create(&self, name: &str, bytes: &[u8]) -> Result<bool, StoreError> {
        let path = self.path(name);
        let made = self.path(&format!("{name}.{}", std::process::id()));
        files::write_atomically(&made, bytes)?;
        let linked = fs::hard_link(&made, &path);
        files::remove(&made)?;
        match linked {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(StoreError::io("create", &path)(error)),
            Ok(()) => path.parent().map_or(Ok(()), files::sync_folder).map(|()| true),
        }
    }

    fn sync_folder(&self, folder: &str) -> Result<(), StoreError> {
        files::sync_folder(&self.path(folder))
    }

    fn open(&self, name: &str) -> Result<Box<dyn Object>, StoreError> {
        let path = self.path(name);
        let file = File::open(&path).map_err(StoreError::io("open", &path))?;
        let bytes = file.metadata().map_err(StoreError::io("read", &path))?.len();
        Ok(Box::new(OpenFile { file, path, bytes }))
    }

    fn size(&self, name: &str) -> Result<Option<u64>, StoreError> {
        let path = self.path(name);
        let data = unless_missing(fs::metadata(&path)).map_err(StoreError::io("read", &path))?;
        Ok(data.map(|data| data.len()))
    }

    fn list(&self, folder: &str) -> Result<Vec<(String, u64)>, StoreError> {
        let mut objects = Vec::new();
        for (name, entry) in self.entries(folder)? {
            if name.ends_with(PART) {
                continue;
            }
            // One that vanishes meanwhile is not there.
            let data = unless_missing(entry.metadata());
            let data = data.map_err(|error| StoreError::io("read", &entry.path())(error))?;
            objects.extend(data.map(|data| (name, data.len())));
        }
        Ok(objects)
    }

    fn remove(&self, name: &str) -> Result<(), StoreError> {
        files::remove(&self.path(name))
    }

    fn tidy(&self, folder: &str) -> Result<(), StoreError> {
        let entries = self.entries(folder)?;
        let left = entries.iter().filter(|(name, _)| name.ends_with(PART));
        left.map(|(_, entry)| entry.path()).try_for_each(|path| files::remove(&path))
    }

    fn lock(&self, name: &str, how: LockKind) -> Result<LockAttempt, StoreError> {
        let path = self.path(name);
        let held = |file| {
            LockAttempt::Locked(Box::new(LockedFile {
                file,
                path: path.clone(),
                root: self.root.clone(),
            }))
        };
        if how == LockKind::New {
            return make_locked(&path).map(held).map_err(StoreError::io("create", &path));
        }
        let opened = match how {
            LockKind::Shared => File::open(&path),
            // NFS locks for one alone only what may be written.
            _ => File::options().read(true).write(true).open(&path).or_else(|error| {
                use ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
                match error.kind() {
                    PermissionDenied | ReadOnlyFilesystem => File::open(&path),
                    _ => Err(error),
                }
            }),
        };
        let opened = unless_missing(opened).map_err(StoreError::io("open", &path))?;
        let Some(file) = opened else { return Ok(LockAttempt::Missing) };
        let lock = match how {
            LockKind::AloneAfterAll => FlockOperation::LockExclusive,
            LockKind::Shared => FlockOperation::NonBlockingLockShared,
            LockKind::Alone | LockKind::New => FlockOperation::NonBlockingLockExclusive,
        };
        match flock_soon(&file, lock) {
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(LockAttempt::Taken),
            Err(error) => Err(StoreError::io("lock", &path)(error.into())),
            // It may have been removed while we opened or waited.
            Ok(()) => match is_at(&file, &path).map_err(StoreError::io("read", &path))? {
                true => Ok(held(file)),
                false => Ok(LockAttempt::Missing),
            },
        }
    }

    fn count(&self, name: &str, more: u64) -> Result<u64, StoreError> {
        let path = self.path(name);
        let count = || -> std::io::Result<u64> {
            let mut file = files::private_options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(&path)?;
            flock(&file, FlockOperation::LockExclusive)?;
            let mut text = String::new();
            file.read_to_string(&mut text)?;
            let noted: u64 = match text.trim() {
                "" => 1,
                number => number.parse().map_err(std::io::Error::other)?,
            };
            file.rewind()?;
            // Of fixed length, so that an overwrite is never half a number.
            writeln!(file, "{:020}", noted + more)?;
            file.sync_data()?;
            Ok(noted)
        };
        count().map_err(StoreError::io("write", &path))
    }
}

#[derive(Debug)]
struct OpenFile {
    file: File,
    path: PathBuf,
    bytes: u64,
}

impl Object for OpenFile {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, bytes: usize, buffer: &mut Vec<u8>) -> Result<(), StoreError> {
        buffer.resize(bytes, 0);
        self.file.read_exact_at(buffer, offset).map_err(StoreError::io("read", &self.path))
    }

    fn read_ahead(&self) {
        // Advice: without it, reading is as right. Not `WillNeed`, which has the whole file
        // read here and now, by single pages: with it half as much comes out of a fast disk.
        let _ = fadvise(&self.file, 0, None, Advice::Sequential);
    }
}

#[derive(Debug)]
struct LockedFile {
    file: File,
    path: PathBuf,
    root: PathBuf,
}

impl Lock for LockedFile {
    fn append(&mut self, text: &str) -> Result<(), StoreError> {
        self.file
            .write_all(text.as_bytes())
            .and_then(|()| self.file.sync_data())
            .map_err(StoreError::io("write", &self.path))
    }

    fn put(&mut self, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        let path = self.root.join(name);
        files::write_atomically(&path, bytes).inspect_err(|_| {
            // It may be in place already; told to have failed, it must not stay.
            let _ = files::remove(&path);
        })
    }

    fn remove(self: Box<Self>) -> Result<(), StoreError> {
        files::remove(&self.path)
    }
}

/// Takes a lock, and does not give up at once where it is taken: a program that a holder starts has copies of the
/// holder's descriptors until it calls exec(2), and so has the lock for a moment after the holder let go.
fn flock_soon(file: &File, lock: FlockOperation) -> rustix::io::Result<()> {
    let began = Instant::now();
    loop {
        match flock(file, lock) {
            Err(rustix::io::Errno::WOULDBLOCK) if began.elapsed() < UNTIL_EXEC => {
                std::thread::sleep(UNTIL_EXEC / 20);
            }
            result => return result,
        }
    }
}

/// Locked before it gets its name: who finds it unlocked knows its maker dead.
fn make_locked(path: &Path) -> std::io::Result<File> {
    let mut part = path.as_os_str().to_owned();
    part.push(PART);
    // One that died in between left it, and nothing in it.
    let file = files::private_options().write(true).create(true).truncate(false).open(&part)?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    if !is_at(&file, Path::new(&part))? {
        // Somebody else's, who was faster.
        return Err(ErrorKind::AlreadyExists.into());
    }
    fs::rename(&part, path)?;
    Ok(file)
}

/// Whether `path` still means the file that we opened and locked.
fn is_at(file: &File, path: &Path) -> std::io::Result<bool> {
    let now = unless_missing(fs::metadata(path))?;
    Ok(now.is_some_and(|now| file.metadata().is_ok_and(|data| data.ino() == now.ino())))
}

fn unless_missing<T>(result: std::io::Result<T>) -> std::io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}
