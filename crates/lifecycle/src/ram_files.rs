//! A guest's RAM files, as its record has them.

use dewar_guest_qemu::cmdline::PlannedRegion;
use dewar_registry::RamFile;

/// The files of these regions.
pub fn ram_files(regions: &[PlannedRegion]) -> Vec<RamFile> {
    let file = |region: &PlannedRegion| RamFile {
        id: region.id.clone(),
        path: region.path.clone(),
        bytes: region.bytes,
    };
    regions.iter().map(file).collect()
}
