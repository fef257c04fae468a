//! The pages of a container that stands still, put where CRIU's images say that they are.

use crate::criu_images::{LAZY, PARENT, PRESENT, Pagemap};
use crate::error::OciError;
use crate::processes::Processes;
use dewar_units::PAGE_BYTES;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes that are copied at a time.
const STEP: usize = 1 << 20;

/// A file of pages in a folder of images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PagesFile {
    /// Its name.
    pub name: String,
    /// How many pages it has.
    pub pages: u64,
}

/// Bytes to copy from one file to another.
struct Copy<'f> {
    from: &'f File,
    from_path: &'f Path,
    at: u64,
    to: &'f File,
    to_path: &'f Path,
    offset: u64,
    bytes: u64,
}

/// A pagemap of which pages are missing, and what they are copied from and to.
struct Missing {
    map: Pagemap,
    /// The memory of its process.
    memory: (File, PathBuf),
    /// The pages that there are.
    old: (File, PathBuf),
    new: (File, PathBuf),
}

/// Copies the pages that CRIU left out of its images from the memory of the processes, which must stand still.
/// From then on the images say that they have them.
///
/// # Errors
/// Where memory cannot be read, or there is no room; the images are of no use then.
pub fn complete(folder: &Path, processes: &Processes) -> Result<(), OciError> {
    let mut all = Vec::new();
    for map in Pagemap::all(folder)? {
        if map.runs.iter().any(|run| run.flags() & LAZY != 0) {
            all.push(open(map, folder, processes)?);
        }
    }
    let mut copies = Vec::new();
    for missing in &all {
        copies.extend(copies_of(missing)?);
    }
    run(&copies)?;
    for Missing { mut map, old, new, .. } in all {
        fs::rename(&new.1, &old.1).map_err(OciError::io("rename", &new.1))?;
        map.runs = map.runs.into_iter().map(|run| run.into_present()).collect();
        map.write()?;
    }
    Ok(())
}

/// The files of pages in a folder of images, none of which may want pages of elsewhere.
///
/// # Errors
/// Where one has not all its pages.
pub fn files(folder: &Path) -> Result<Vec<PagesFile>, OciError> {
    let mut files = Vec::new();
    for map in Pagemap::all(folder)? {
        let is_here = |flags: u32| flags & PRESENT != 0 && flags & (LAZY | PARENT) == 0;
        if !map.runs.iter().all(|run| is_here(run.flags())) {
            let problem = "it has pages that are elsewhere".to_owned();
            return Err(OciError::Image { path: map.path, problem });
        }
        let (name, pages) = (map.pages_name(), map.pages());
        let path = folder.join(&name);
        let bytes = fs::metadata(&path).map_err(OciError::io("look at", &path))?.len();
        if bytes != pages * PAGE_BYTES as u64 {
            let problem = format!("it has {bytes} bytes in place of {pages} pages");
            return Err(OciError::Image { path, problem });
        }
        if pages > 0 {
            files.push(PagesFile { name, pages });
        }
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(files)
}

fn open(map: Pagemap, folder: &Path, processes: &Processes) -> Result<Missing, OciError> {
    let pid =
        map.task().and_then(|task| processes.on_host(task)).ok_or_else(|| OciError::Image {
            path: map.path.clone(),
            problem: "it is of no process of the container".to_owned(),
        })?;
    let memory = PathBuf::from(format!("/proc/{pid}/mem"));
    let old = folder.join(map.pages_name());
    let new = folder.join(format!("{}.whole", map.pages_name()));
    let opened = |path: PathBuf| {
        let file = File::open(&path).map_err(OciError::io("open", &path))?;
        Ok::<_, OciError>((file, path))
    };
    let file = File::create_new(&new).map_err(OciError::io("create", &new))?;
    Ok(Missing { map, memory: opened(memory)?, old: opened(old)?, new: (file, new) })
}

fn copies_of(missing: &Missing) -> Result<Vec<Copy<'_>>, OciError> {
    let (mut old, mut new) = (0, 0);
    let mut copies = Vec::new();
    for run in &missing.map.runs {
        let bytes = run.pages() * PAGE_BYTES as u64;
        let is_present = run.flags() & PRESENT != 0;
        if run.flags() & PARENT != 0 {
            return Err(OciError::Image {
                path: missing.map.path.clone(),
                problem: "it stands on another".to_owned(),
            });
        }
        let ((from, from_path), at) = match is_present {
            true => (&missing.old, old),
            false => (&missing.memory, run.address),
        };
        for start in (0..bytes).step_by(STEP) {
            copies.push(Copy {
                from,
                from_path,
                at: at + start,
                to: &missing.new.0,
                to_path: &missing.new.1,
                offset: new + start,
                bytes: (bytes - start).min(STEP as u64),
            });
        }
        old += if is_present { bytes } else { 0 };
        new += bytes;
    }
    Ok(copies)
}

/// Does all the copies, on all cores: the container stands still meanwhile.
fn run(copies: &[Copy<'_>]) -> Result<(), OciError> {
    let next = AtomicUsize::new(0);
    let work = || -> Result<(), OciError> {
        let mut buffer = vec![0; STEP];
        while let Some(copy) = copies.get(next.fetch_add(1, Ordering::Relaxed)) {
            let bytes = &mut buffer[..copy.bytes as usize];
            copy.from
                .read_exact_at(bytes, copy.at)
                .map_err(OciError::io("read", copy.from_path))?;
            let written = copy.to.write_all_at(bytes, copy.offset);
            written.map_err(OciError::io("write", copy.to_path))?;
        }
        Ok(())
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .fold(Ok(()), Result::and)
    })
}
