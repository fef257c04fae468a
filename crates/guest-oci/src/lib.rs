//! Containers as guests: stock runc or crun, saved and restored by stock CRIU.
//!
//! The runtime's own `checkpoint` and `restore` are used: they know what a container is made of. CRIU writes what
//! the processes are into image files; the pages of their memory Dewar reads itself:
//!
//! ```text
//!  runtime, CRIU                              Dewar
//!                                             copies pages while the container runs      PreCopy::round
//!  freezes the container
//!  writes its images, but not the pages
//!  waits at a "lazy pages" port  ---------->  connects: nobody else can end it now      Dump::begin
//!                                             copies what was written since             Dump::copy_pages
//!                                             looks that it stood still all the while
//!  lets the container run  <----------------  closes the connection                     Dump::end
//!                                             puts the pages into the images            Dump::assemble
//! ```
//!
//! A folder of CRIU's images is there then in which nothing is missing, and any runtime restores from it
//! ([`restore`]).
//!
//! A container may be one of podman's ([`Podman`]): saved as any other, and brought back by podman.
//!
//! If CRIU is killed the kernel lets go what it traced, and the code that CRIU put into the processes goes back by
//! itself: the container runs on. What CRIU leaves behind [`Strays`] takes away. The exception is a CRIU that is
//! killed while it puts that code into a process, or takes it out (some milliseconds each): the process ends. So
//! Dewar kills a CRIU only as the last resort, when it hangs.
#![forbid(unsafe_code)]

mod container;
mod criu_images;
mod criu_log;
mod dump;
mod error;
mod fence;
mod folder;
mod held_restore;
mod network;
mod overlay;
mod pages;
mod podman;
mod podman_files;
mod podman_inspect;
mod podman_restores;
mod preconditions;
mod precopy;
mod processes;
mod processor;
mod relay;
mod request;
mod restore;
mod runtime;
mod staged_images;
mod staging;
mod stand_in;
mod strays;

pub use container::{Container, Description, is_container};
pub use dump::{Dump, DumpOptions, free_port};
pub use error::OciError;
pub use fence::Fence;
pub use folder::staging_file;
pub use held_restore::{HeldRestore, discard, finish, lives};
pub use network::{Network, is_apart as has_own_network};
pub use overlay::{Overlay, unmount_from};
pub use pages::PagesFile;
pub use podman::{Definition, Podman};
pub use preconditions::Preconditions;
pub use precopy::PreCopy;
pub use processor::Processor;
pub use relay::run_if_started_as_another;
pub use restore::{RestoreOptions, restore, restored_process};
pub use runtime::{ContainerState, Runtime, Status};
pub use staged_images::{ROOT_FILES, StagingIndex};
pub use strays::Strays;
