//! Dirty stores that do not answer.
//!
//! To ask such a store costs a whole timeout. So after a failure it is left alone for a while, and pages of
//! other stores do not wait for it.
//!
//! Of a Cluster one node alone may be down. So a failure is noted for the key that holds the pages. The whole
//! store counts as unavailable only where none of its keys answered lately. A key is left alone for longer
//! than a store is: when the store is asked again, it is asked for another key.

use dewar_image::ImageError;
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// For how long a store is not asked of which nothing answers,
const STORE: Duration = Duration::from_secs(1);
/// and a part of it that did not.
const PART: Duration = Duration::from_secs(2);

/// A source, and a key of it.
pub(super) type Part = (u32, u64);

/// Which do not.
#[derive(Debug, Default)]
pub(super) struct Away(Mutex<Heard>);

#[derive(Debug, Default)]
struct Heard {
    stores: HashMap<u32, Instant>,
    parts: HashMap<Part, Instant>,
    /// When a store answered last.
    answered: HashMap<u32, Instant>,
}

impl Away {
    /// Whether it may be here; what is in no dirty store is.
    pub(super) fn may_ask(&self, part: Option<Part>) -> bool {
        let Some(part) = part else { return true };
        let heard = self.lock();
        !is_fresh(heard.stores.get(&part.0), STORE) && !is_fresh(heard.parts.get(&part), PART)
    }

    /// Notes how it answered.
    pub(super) fn note(&self, part: Option<Part>, error: Option<&ImageError>) {
        let Some(part) = part else { return };
        let (mut heard, now) = (self.lock(), Instant::now());
        if !error.is_some_and(ImageError::is_server_failure) {
            heard.stores.remove(&part.0);
            heard.parts.remove(&part);
            heard.answered.insert(part.0, now);
            return;
        }
        heard.parts.insert(part, now);
        if !is_fresh(heard.answered.get(&part.0), PART) {
            heard.stores.insert(part.0, now);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Heard> {
        self.0.lock().unwrap_or_else(|locked| locked.into_inner())
    }
}

fn is_fresh(noted: Option<&Instant>, within: Duration) -> bool {
    noted.is_some_and(|noted| noted.elapsed() < within)
}

#[cfg(test)]
mod tests {
    use super::*;

    use dewar_image::StoreError;

    fn silence() -> ImageError {
        let (object, store) = (String::new(), String::new());
        let cause = "silence".into();
        StoreError::Server { operation: "read", object, store, is_full: false, cause }.into()
    }

    #[test]
    fn a_store_of_which_a_part_answers_is_asked_for_the_others() {
        let away = Away::default();
        let (dead, living) = (Some((1, 7)), Some((1, 8)));
        away.note(dead, Some(&silence()));
        assert!(
            !away.may_ask(dead)
                && !away.may_ask(living)
                && away.may_ask(None)
                && away.may_ask(Some((2, 7)))
        );
        std::thread::sleep(STORE);
        assert!(!away.may_ask(dead) && away.may_ask(living));
        away.note(living, None);
        away.note(dead, Some(&silence()));
        assert!(!away.may_ask(dead) && away.may_ask(living));
        std::thread::sleep(PART);
        assert!(away.may_ask(dead));
    }
}
