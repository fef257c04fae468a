//! Images and stores, by what this crate gives others; one program, so that it is linked once.

mod common;
mod damaged_record;
mod dedup;
mod dirty;
mod full;
mod lies;
mod redis;
mod store;
mod versions;
