//! What every verb starts from: the host's guests, and the way to tell a result.

use crate::output::{print, warn};
use dewar_image::Store;
use dewar_lifecycle::{Failure, Host};
use serde_json::Value;
use std::ops::Deref;
use std::path::Path;

/// Flags that hold for all verbs.
pub struct Context {
    host: Host,
    pub json: bool,
}

impl Deref for Context {
    type Target = Host;

    fn deref(&self) -> &Host {
        &self.host
    }
}

impl Context {
    pub fn new(root: &Path, json: bool) -> Self {
        Self { host: Host::new(root), json }
    }

    /// Prints the result: `json` for programs, `text` for people. Returns whether it was read.
    pub fn print(&self, json: Value, text: &str) -> bool {
        match self.json {
            true => print(json),
            false => print(text.trim_end()),
        }
    }

    /// Prints a result of which not all may be as it should be, and ends so.
    pub fn print_with(
        &self,
        json: Value,
        text: &str,
        end: Result<(), Failure>,
    ) -> Result<(), Failure> {
        let json = match &end {
            Ok(()) => json,
            Err(failure) => failure.beside(json),
        };
        self.print(json, text);
        end.map_err(Failure::already_printed)
    }

    /// Opens a store that must exist, and says where it may lose what it has.
    pub fn open_store(&self, url: Option<&str>) -> Result<Store, Failure> {
        let store = self.store(url)?;
        warn_of(&store);
        Ok(store)
    }
}

/// Says where a store may lose what it has.
pub fn warn_of(store: &Store) {
    if let Some(why) = store.warning() {
        warn(&why);
    }
}
