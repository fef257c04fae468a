//! Memory that the kernel itself keeps: files in RAM without a name, by the Live Update Orchestrator (LUO).
//!
//! Nothing needs to be set aside. Both kernels must have it (Linux 6.19, `CONFIG_LIVEUPDATE_MEMFD`) and be told to
//! (`kho=on liveupdate=on`). What the two say to each other is no stable interface yet: only pairs of kernels that
//! were tried together are to be trusted.

use crate::{CommandLine, KernelImage};
use dewar_kernel::LiveUpdate;
use rustix::io::Errno;

/// What each kernel must be built with.
const OPTIONS: [&str; 2] = ["CONFIG_KEXEC_HANDOVER", "CONFIG_LIVEUPDATE_MEMFD"];
/// What its command line must say, and the option that says so by itself.
const WORDS: [(&str, Option<&str>); 2] =
    [("kho", Some("CONFIG_KEXEC_HANDOVER_ENABLE_DEFAULT")), ("liveupdate", None)];

/// That the running kernel would keep files.
///
/// # Errors
/// Why not, and what to add.
pub fn check_running() -> Result<(), String> {
    match LiveUpdate::open() {
        Ok(_) => Ok(()),
        Err(error) if error.errno() == Some(Errno::BUSY.raw_os_error()) => {
            Err("another program has /dev/liveupdate open".to_owned())
        }
        Err(_) => Err(
            "this kernel keeps no memory by itself: Linux 6.19 with CONFIG_LIVEUPDATE_MEMFD, and \
                       kho=on liveupdate=on on its command line"
                .to_owned(),
        ),
    }
}

/// What keeps a new kernel from giving the files back, each a sentence.
pub fn refusals(kernel: &KernelImage, line: &CommandLine) -> Vec<String> {
    let version = &kernel.version;
    let lacks = |name: &&&str| kernel.option(name).is_some_and(|value| value.is_empty());
    let built = OPTIONS.iter().find(lacks);
    let built = built.map(|name| format!("Linux {version} is built without {name}"));
    let said = WORDS.iter().filter(|(word, by_itself)| {
        let is_on = matches!(line.value(word), Some("on" | "1" | "y"));
        let is_usual = by_itself.is_some_and(|name| kernel.option(name).as_deref() == Some("y"));
        !(is_on || is_usual && line.value(word).is_none())
    });
    let said = said.map(|(word, _)| {
        format!(
            "the new kernel's command line does not say {word}=on, and it would lose what is kept"
        )
    });
    built.into_iter().chain(said).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_kernel_must_be_able_and_told_to() {
        let folder = tempfile::tempdir().expect("a folder");
        let kernel = KernelImage { path: folder.path().join("vmlinuz-7"), version: "7".to_owned() };
        let of = |line: &str| refusals(&kernel, &CommandLine::new(line)).len();
        assert_eq!(
            [of("kho=on liveupdate=on"), of("kho=on"), of("quiet"), of("kho=off liveupdate=1")],
            [0, 1, 2, 1]
        );
        let built =
            |text: &str| std::fs::write(folder.path().join("config-7"), text).expect("a file");
        built("CONFIG_KEXEC_HANDOVER=y\n");
        assert!(
            refusals(&kernel, &CommandLine::new("kho=on liveupdate=on"))[0]
                .contains("CONFIG_LIVEUPDATE_MEMFD")
        );
        built(
            "CONFIG_KEXEC_HANDOVER=y\nCONFIG_LIVEUPDATE_MEMFD=y\nCONFIG_KEXEC_HANDOVER_ENABLE_DEFAULT=y\n",
        );
        assert_eq!([of("liveupdate=on"), of("kho=off liveupdate=on"), of("")], [0, 1, 1]);
    }
}
