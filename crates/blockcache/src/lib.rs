//! A guest's disks, served to its QEMU over NBD, and a cache of them that outlives a reboot of the guest's OS.
//!
//! An operating system that boots finds its file cache empty, though most of what was in it still lies in the machine's
//! memory. The server has seen each block on its way to or from the guest, and remembers a hash of it ([`Index`]). When
//! the guest has been reset, the memory that it had is searched for pages with those hashes ([`find`]); they are kept
//! ([`Kept`]), and the guest's first reads are answered from there, at the speed of memory.
//!
//! ```text
//!  QEMU  <- NBD ->  connection  ->  Export  ->  DiskFile     the user's file
//!                                     |-- RangeLocks         one request at a time for each block
//!                                     |-- Index              block -> hashes of what it holds
//!                                     `-- Kept               block -> a page of the memory before the reboot
//! ```
//!
//! **Never a wrong byte.** The invariant: an entry of the index is the hash of what the disk holds at that block.
//! - It is taken from a buffer of the server's own, which nobody else writes: of what was read before it is sent, of
//!   what was written when it is on the disk. (Hashes of the guest's memory would let a program in the guest that reads
//!   past its cache change what it read before it is hashed, and so plant foreign bytes in a file.)
//! - A write takes the entry away before it begins, and puts one there when it has succeeded. Both happen under a lock
//!   of the blocks, so an overlapping read cannot put back what it saw before ([`RangeLocks`]).
//! - A page is kept only if its keyed BLAKE3 is that of the entry *now*. The key is random and known to this process
//!   alone, so nobody can make another page with that hash; XXH3 only finds candidates. From then on no process can write
//!   the page: its file has no name, and nobody has it mapped. What changes the block takes the page away. When the page is
//!   used its XXH3 tells whether it was damaged since.
//!
//! A lost index, or lost pages, are only a cold cache: all can be dropped at any time.
#![forbid(unsafe_code)]

mod buffer;
mod client;
mod connection;
mod disk;
mod disk_lock;
mod error;
mod export;
mod find;
mod handshake;
mod hash;
mod index;
mod kept;
mod nbd;
mod order;
mod server;

pub use client::release_locks;
pub use disk::{DiskFile, DiskOptions};
pub use error::BlockError;
pub use export::{Export, ReadFrom};
pub use find::{Found, find};
pub use hash::{Fingerprint, Hasher};
pub use index::Index;
pub use kept::{Kept, KeptMemory};
pub use order::RangeLocks;
pub use server::serve;
