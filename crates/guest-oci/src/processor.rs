//! What a processor can do, as CRIU describes it (criu(8), `cpuinfo`).
//!
//! A program asks its processor once, and then uses what it found. On one that lacks it, it would die at the first such
//! instruction.

use crate::error::OciError;
use crate::runtime::find_program;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// Instructions that must be there, and states of registers that must have the same size.
const COMPARED: &str = "--cpu-cap=fpu,ins";
/// CRIU's name for its description.
const IMAGE: &str = "cpuinfo.img";

/// The processor that a container's programs know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Processor {
    /// CRIU's image.
    image: Vec<u8>,
}

impl Processor {
    /// That of this machine; `None` where CRIU cannot describe it.
    pub fn of_this_machine() -> Option<Self> {
        let folder = tempfile::tempdir().ok()?;
        if !criu("dump", folder.path())? {
            return None;
        }
        Some(Self { image: fs::read(folder.path().join(IMAGE)).ok()? })
    }

    /// That the processor of this machine can do as much.
    ///
    /// # Errors
    /// [`OciError::Unsupported`] where it cannot.
    pub fn require_here(&self, id: &str) -> Result<(), OciError> {
        let folder = tempfile::tempdir().map_err(OciError::io("make", &std::env::temp_dir()))?;
        let path = folder.path().join(IMAGE);
        fs::write(&path, &self.image).map_err(OciError::io("write", &path))?;
        match criu("check", folder.path()) {
            Some(false) => Err(OciError::Unsupported {
                id: id.to_owned(),
                reasons: vec![
                    "the processor of this host lacks what that of the other has, and its programs may use it: \
                     bring it to a host with a processor of the same kind"
                        .to_owned(),
                ],
            }),
            _ => Ok(()),
        }
    }
}

/// Whether CRIU's command for the image in a folder succeeds; `None` where there is no CRIU.
fn criu(verb: &str, folder: &Path) -> Option<bool> {
    let mut command = Command::new(find_program(Path::new("criu"))?);
    command.args(["cpuinfo", verb, COMPARED, "-D"]).arg(folder);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().ok().map(|status| status.success())
}
