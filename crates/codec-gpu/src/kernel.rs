//! What runs on a device: `kernels.cl`, which OpenCL's drivers compile, and `kernels.ptx`, which was made of it
//! (`scripts/make-ptx.sh`) for those of NVIDIA that have no OpenCL.

/// The source.
pub(crate) const OPENCL_C: &str = include_str!("kernels.cl");
/// The same as NVIDIA's drivers take it, with the zero at its end that they look for.
pub(crate) const PTX: &str = concat!(include_str!("kernels.ptx"), "\0");

/// A function of it. The comments there say what each takes and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernel {
    Look,
    MeasureWords,
    WriteWords,
    Place,
    Lz4,
    WriteBlocks,
}

impl Kernel {
    /// In the order of their numbers.
    pub(crate) const ALL: [Self; 6] = [
        Self::Look,
        Self::MeasureWords,
        Self::WriteWords,
        Self::Place,
        Self::Lz4,
        Self::WriteBlocks,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Look => "look",
            Self::MeasureWords => "measure_words",
            Self::WriteWords => "write_words",
            Self::Place => "place",
            Self::Lz4 => "lz4",
            Self::WriteBlocks => "write_blocks",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    /// A change of the source needs the PTX made again.
    #[test]
    fn the_ptx_is_that_of_the_source() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
        let sums = Command::new("sha256sum")
            .args(["kernels.cl", "opencl_on_ptx.h"])
            .current_dir(folder)
            .output()
            .expect("sha256sum");
        let sums = String::from_utf8(sums.stdout).expect("text");
        for line in sums.lines() {
            assert!(
                super::PTX.contains(&format!("// {line}\n")),
                "{line} is not what kernels.ptx was made of: run scripts/make-ptx.sh"
            );
        }
        assert_eq!(sums.lines().count(), 2);
    }
}
