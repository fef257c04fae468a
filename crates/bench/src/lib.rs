//! Benchmarks, each a program of its own, and what they share. `bench/README.md` says what each measures.
#![forbid(unsafe_code)]

mod heart;
mod qemu;
mod sample;
mod warm;
mod witness;

pub use heart::{beat_into_fifo, listen};
pub use qemu::{connect_soon, start_qemu, wait_for_migration};
pub use sample::file as sample_file;
pub use warm::touch_free_memory;
pub use witness::Witness;

/// Guest RAM in MiB that is left to the guest's own kernel and program.
pub fn reserved_mib(gib: u64) -> u64 {
    200 + 48 * gib
}

/// The middle one; the mean of the two in the middle; not a number where there
/// is none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => values[count / 2],
        count => (values[count / 2 - 1] + values[count / 2]) / 2.0,
    }
}
