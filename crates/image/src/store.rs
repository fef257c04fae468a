use crate::lease::{self, WriterLease};
use crate::segment::SegmentFile;
use crate::{
    FileDigest, ImageError, ImageId, ImageOptions, ImageReader, ImageWriter, Record, files,
};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

const FORMAT: &str = "dewar-store";
const VERSION: u32 = 1;
const RECORD_SUFFIX: &str = ".json";

/// A folder of images: the `file:` store.
#[derive(Debug)]
pub struct FileStore {
    root: PathBuf,
    id: [u8; 16],
}

#[derive(Serialize, Deserialize)]
struct StoreFile {
    format: String,
    version: u32,
    id: String,
}

impl FileStore {
    /// Opens the store in `root`, and makes it where there is none.
    ///
    /// # Errors
    /// Where the folder cannot be made, is not a store, or is a newer one.
    pub fn open_or_create(root: &Path) -> Result<Self, ImageError> {
        if !root.join("store.json").exists() {
            for folder in ["", "segments", "images", "disks", "writers"] {
                files::make_private_folder(&root.join(folder))?;
            }
            let mut id = [0; 16];
            let random = Path::new("/dev/urandom");
            File::open(random)
                .and_then(|mut file| file.read_exact(&mut id))
                .map_err(ImageError::io("read", random))?;
            let text = serde_json::json!({"format": FORMAT, "version": VERSION, "id": hex(&id)});
            // Of two who make it at once, the second must not win.
            let path = root.join("store.json");
            let made = root.join(format!("store.json.{}", std::process::id()));
            files::write_atomically(&made, format!("{text}\n").as_bytes())?;
            let linked = fs::hard_link(&made, &path);
            files::remove(&made)?;
            match linked {
                Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                    return Err(ImageError::io("create", &path)(error));
                }
                _ => files::sync_folder(root)?,
            }
        }
        Self::open(root)
    }

    /// Opens the store in `root`.
    ///
    /// # Errors
    /// Where there is none, or a newer one.
    pub fn open(root: &Path) -> Result<Self, ImageError> {
        let path = root.join("store.json");
        let text = fs::read_to_string(&path).map_err(ImageError::io("open", &path))?;
        let damaged = |problem: String| ImageError::damaged(path.display().to_string(), problem);
        let file: StoreFile =
            serde_json::from_str(&text).map_err(|error| damaged(error.to_string()))?;
        if file.format != FORMAT {
            return Err(damaged(format!("it calls itself '{}'", file.format)));
        }
        if file.version != VERSION {
            let problem = format!("store version {}", file.version);
            return Err(ImageError::TooNew { place: path.display().to_string(), problem });
        }
        let id = u128::from_str_radix(&file.id, 16)
            .ok()
            .filter(|_| file.id.len() == 32)
            .ok_or_else(|| damaged("its id is not 32 hexadecimal digits".to_owned()))?;
        Ok(Self { root: root.to_owned(), id: id.to_be_bytes() })
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The store's own name, in hexadecimal.
    pub fn id(&self) -> String {
        hex(&self.id)
    }

    /// The path of a disk copy named in a record.
    pub fn disk_path(&self, file: &str) -> PathBuf {
        self.root.join("disks").join(file)
    }

    /// Begins an image, on top of `parent` where there is one; first removes
    /// what writers that died left behind.
    ///
    /// # Errors
    /// Where the store cannot be written, or the parent's page table not read.
    pub fn begin<'s>(
        &'s self,
        options: ImageOptions,
        parent: Option<&'s ImageReader>,
    ) -> Result<ImageWriter<'s>, ImageError> {
        self.sweep()?;
        let id = ImageId::fresh(&self.id);
        let lease = WriterLease::take(&self.root.join("writers"), &id)?;
        ImageWriter::new(self, id, lease, options, parent)
    }

    /// Removes the files of images whose writers died.
    ///
    /// # Errors
    /// Where the store cannot be read or written.
    pub fn sweep(&self) -> Result<(), ImageError> {
        lease::sweep(&self.root, &self.root.join("writers"), |id| self.record_path(id).exists())
    }

    /// The ids of all images. Damaged ones are among them.
    ///
    /// # Errors
    /// Where the store cannot be read.
    pub fn ids(&self) -> Result<Vec<ImageId>, ImageError> {
        let folder = self.root.join("images");
        let entries = fs::read_dir(&folder).map_err(ImageError::io("list", &folder))?;
        let mut ids: Vec<_> = entries
            .flatten()
            .filter_map(|entry| {
                let name = entry.file_name().into_string().ok()?;
                name.strip_suffix(RECORD_SUFFIX).map(|id| ImageId(id.to_owned()))
            })
            .collect();
        ids.sort();
        Ok(ids)
    }

    /// Reads and checks the record of an image.
    ///
    /// # Errors
    /// Where it is missing or damaged.
    pub fn record(&self, id: &ImageId) -> Result<Record, ImageError> {
        let path = self.record_path(id);
        let bytes = fs::read(&path).map_err(ImageError::io("read", &path))?;
        Record::parse(&bytes, id, &self.id())
    }

    /// All images that can be read, oldest first, and the problems of the
    /// others.
    ///
    /// # Errors
    /// Where the store cannot be read.
    pub fn records(&self) -> Result<(Vec<Record>, Vec<ImageError>), ImageError> {
        let (mut records, mut problems) = (Vec::new(), Vec::new());
        for id in self.ids()? {
            match self.record(&id) {
                Ok(record) => records.push(record),
                Err(problem) => problems.push(problem),
            }
        }
        records.sort_by_key(|record| record.created_ms);
        Ok((records, problems))
    }

    /// Finds an image by its id, the beginning of it, its tag, `GUEST:TAG`, or
    /// the name of its guest (then the newest). A newer image wins where
    /// several have a tag.
    ///
    /// # Errors
    /// Where none fits, or several ids do.
    pub fn find(&self, reference: &str) -> Result<ImageId, ImageError> {
        let ids = self.ids()?;
        if let Some(id) = ids.iter().find(|id| id.0 == reference) {
            return Ok(id.clone());
        }
        let (records, _) = self.records()?;
        let newest = |fits: &dyn Fn(&Record) -> bool| {
            records.iter().rev().find(|record| fits(record)).map(|record| record.id.clone())
        };
        let tagged = newest(&|record| record.tag.as_deref() == Some(reference));
        let of_guest = || newest(&|record| record.guest == reference);
        let pair = || {
            let (guest, tag) = reference.split_once(':')?;
            newest(&|record| record.guest == guest && record.tag.as_deref() == Some(tag))
        };
        if let Some(id) = tagged.or_else(of_guest).or_else(pair) {
            return Ok(id);
        }
        let begin: Vec<_> = ids.iter().filter(|id| id.0.starts_with(reference)).collect();
        match begin.as_slice() {
            [id] if reference.len() >= 3 => Ok((*id).clone()),
            [_, _, ..] if reference.len() >= 3 => Err(ImageError::Ambiguous {
                reference: reference.to_owned(),
                candidates: begin.iter().map(|id| id.0.clone()).collect(),
            }),
            _ => Err(ImageError::NotFound {
                reference: reference.to_owned(),
                store: self.root.clone(),
            }),
        }
    }

    /// Opens an image for reading; until the reader is dropped it cannot be
    /// deleted.
    ///
    /// # Errors
    /// Where its record is missing or damaged.
    pub fn open_image(&self, id: &ImageId) -> Result<ImageReader, ImageError> {
        let lock = self.lock_record(id, FlockOperation::NonBlockingLockShared)?;
        ImageReader::new(self.root.clone(), self.id, self.record(id)?, lock)
    }

    /// Removes an image: its record first, so that from then on it does not
    /// exist, then its files, except for segments that other images share.
    ///
    /// No image can begin to share one of them meanwhile: it would have to be
    /// taken on top of an image that has it, and hold that one's record. Two
    /// deletions at once might each leave a segment to the other; so only one
    /// goes on at a time.
    ///
    /// # Errors
    /// Where it is being read, another image's record cannot be, or the store
    /// cannot be written.
    pub fn delete(&self, id: &ImageId) -> Result<(), ImageError> {
        let _one_at_a_time = self.lock_deletions()?;
        let _lock = self.lock_record(id, FlockOperation::NonBlockingLockExclusive)?;
        let record = self.record(id)?;
        let mut doomed: BTreeSet<u64> =
            record.segments.iter().chain(&record.inherited_segments).copied().collect();
        for other in self.ids()?.iter().filter(|other| *other != id) {
            // Of a record that cannot be read it is not known what it needs.
            let other = self.record(other)?;
            for number in other.segments.iter().chain(&other.inherited_segments) {
                doomed.remove(number);
            }
        }
        // Should we die in between, the sweep of the next writer goes on.
        let mut lease = WriterLease::take(&self.root.join("writers"), id)?;
        let segments = doomed.into_iter().map(segment_name);
        let disks = record.disks.iter().map(|disk| format!("disks/{}", disk.file));
        lease.note(&segments.chain(disks).collect::<Vec<_>>())?;
        files::remove(&self.record_path(id))?;
        files::sync_folder(&self.root.join("images"))?;
        lease.abandon(&self.root)
    }

    pub(crate) fn lock_deletions(&self) -> Result<File, ImageError> {
        let path = self.root.join("store.json");
        File::open(&path)
            .and_then(|file| Ok(flock(&file, FlockOperation::LockExclusive).map(|()| file)?))
            .map_err(ImageError::io("lock", &path))
    }

    pub(crate) fn raw_id(&self) -> [u8; 16] {
        self.id
    }

    pub(crate) fn record_path(&self, id: &ImageId) -> PathBuf {
        self.root.join("images").join(format!("{id}{RECORD_SUFFIX}"))
    }

    /// Hands out segment numbers that were never used and never will be again.
    pub(crate) fn allocate_segments(&self, count: u64) -> Result<std::ops::Range<u64>, ImageError> {
        let path = self.root.join("next-segment");
        let allocate = || -> std::io::Result<std::ops::Range<u64>> {
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
            writeln!(file, "{:020}", noted + count)?;
            file.sync_data()?;
            Ok(noted..noted + count)
        };
        allocate().map_err(ImageError::io("write", &path))
    }

    /// Checks the copies of an image's disks.
    ///
    /// # Errors
    /// Where one is missing or altered.
    pub fn check_disks(&self, record: &Record) -> Result<(), ImageError> {
        for disk in &record.disks {
            let path = self.disk_path(&disk.file);
            if FileDigest::of(&path)? != disk.digest {
                let place = format!("{} (disk '{}')", path.display(), disk.name);
                return Err(ImageError::damaged(place, "its content changed since the checkpoint"));
            }
        }
        Ok(())
    }

    fn lock_record(&self, id: &ImageId, how: FlockOperation) -> Result<File, ImageError> {
        let path = self.record_path(id);
        let file = File::open(&path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => {
                ImageError::NotFound { reference: id.0.clone(), store: self.root.clone() }
            }
            _ => ImageError::io("open", &path)(error),
        })?;
        flock(&file, how).map_err(|_| ImageError::InUse { id: id.0.clone() })?;
        Ok(file)
    }
}

pub(crate) fn segment_name(number: u64) -> String {
    format!("segments/{number:016x}.seg")
}

pub(crate) fn open_segment(
    root: &Path,
    store: [u8; 16],
    number: u64,
) -> Result<SegmentFile, ImageError> {
    SegmentFile::open(&root.join(segment_name(number)), store, number)
}

fn hex(bytes: &[u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(*bytes))
}
