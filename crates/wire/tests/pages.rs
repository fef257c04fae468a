//! Pages in frames: what was put in comes out, and a liar gets an error.

use dewar_codec::{Codec, WordBase};
use dewar_units::{PAGE_BYTES, PageNumber, PageRange};
use dewar_wire::pages::{
    Entry, Form, MOST_PAGES, MOST_SAME, PagesError, entries, put_pages, put_same, put_zeros,
};
use proptest::prelude::*;

/// Pages of the guest.
const ALL: u64 = 1 << 20;

/// An entry as it is sent.
#[derive(Debug, Clone)]
enum Sent {
    Zeros(u64, u64),
    Pages(Vec<u64>, Form, usize),
    Same(Vec<(u64, u64)>),
}

const RAW: Form = Form::Frame(Codec::Raw);
const LZ4: Form = Form::Frame(Codec::Lz4);
const FORMS: [Form; 5] = [
    RAW,
    LZ4,
    Form::Frame(Codec::Zstd),
    Form::Words(WordBase::PagePresent),
    Form::Words(WordBase::WordBefore),
];

fn sent() -> impl Strategy<Value = Sent> {
    let zeros =
        (0..ALL, 1..ALL / 8).prop_map(|(start, count)| Sent::Zeros(start, count.min(ALL - start)));
    let numbers = prop::collection::vec(0..ALL, 1..=MOST_PAGES);
    let form = prop::sample::select(FORMS.to_vec());
    let pages = (numbers, form, 0..PAGE_BYTES).prop_map(|(pages, form, bytes)| {
        let bytes = if form == RAW { pages.len() * PAGE_BYTES } else { bytes };
        Sent::Pages(pages, form, bytes)
    });
    let same = prop::collection::vec((0..ALL, 0..ALL), 1..40).prop_map(Sent::Same);
    prop_oneof![zeros, pages, same]
}

fn numbers(pages: &[u64]) -> Vec<PageNumber> {
    pages.iter().copied().map(PageNumber).collect()
}

fn numbered(pairs: &[(u64, u64)]) -> Vec<(PageNumber, PageNumber)> {
    pairs.iter().map(|(page, other)| (PageNumber(*page), PageNumber(*other))).collect()
}

fn payload(all: &[Sent]) -> Vec<u8> {
    let mut payload = Vec::new();
    for (fill, entry) in (1..).zip(all) {
        match entry {
            Sent::Zeros(start, count) => {
                put_zeros(&mut payload, PageRange::new(*start, start + count));
            }
            Sent::Pages(pages, form, bytes) => {
                put_pages(&mut payload, &numbers(pages), *form, &vec![fill; *bytes]);
            }
            Sent::Same(pairs) => put_same(&mut payload, &numbered(pairs)),
        }
    }
    payload
}

proptest! {
    #[test]
    fn what_was_put_in_comes_out(all in prop::collection::vec(sent(), 0..5)) {
        let payload = payload(&all);
        let found: Result<Vec<Entry<'_>>, PagesError> = entries(&payload, ALL).collect();
        let found = found.expect("entries");
        prop_assert_eq!(found.len(), all.len());
        for ((fill, entry), found) in (1_u8..).zip(&all).zip(found) {
            match (entry, found) {
                (Sent::Zeros(start, count), Entry::Zeros(range)) => {
                    prop_assert_eq!(range, PageRange::new(*start, start + count));
                }
                (Sent::Pages(wanted, by, size), Entry::Encoded { pages, form, bytes }) => {
                    prop_assert_eq!((pages, form), (numbers(wanted), *by));
                    prop_assert!(bytes.len() == *size && bytes.iter().all(|byte| *byte == fill));
                }
                (Sent::Same(wanted), Entry::Same(pairs)) => {
                    prop_assert_eq!(pairs, numbered(wanted));
                }
                (entry, found) => prop_assert!(false, "{entry:?} came out as {found:?}"),
            }
        }
    }

    #[test]
    fn whatever_a_liar_sends_no_entry_leaves_the_guest_or_its_frame(
        all in prop::collection::vec(sent(), 1..4),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in any::<prop::sample::Index>(),
        pages in 0..2 * ALL,
    ) {
        let mut payload = payload(&all);
        for (index, byte) in damage {
            let index = index.index(payload.len());
            payload[index] = byte;
        }
        payload.truncate(cut.index(payload.len() + 1));
        for entry in entries(&payload, pages) {
            match entry {
                Ok(Entry::Zeros(range)) => prop_assert!(!range.is_empty() && range.end.0 <= pages),
                Ok(Entry::Encoded { pages: numbers, bytes, .. }) => {
                    prop_assert!((1..=MOST_PAGES).contains(&numbers.len()));
                    prop_assert!(numbers.iter().all(|page| page.0 < pages));
                    prop_assert!(bytes.len() <= numbers.len() * PAGE_BYTES);
                }
                Ok(Entry::Same(pairs)) => {
                    prop_assert!((1..=MOST_SAME).contains(&pairs.len()));
                    prop_assert!(pairs.iter().all(|(page, other)| page.0.max(other.0) < pages));
                }
                Err(_) => break,
            }
        }
    }
}

#[test]
fn lies_are_named() {
    let first =
        |payload: &[u8]| entries(payload, 100).next().expect("an entry").expect_err("a lie");
    let mut zeros = Vec::new();
    put_zeros(&mut zeros, PageRange::new(90, 101));
    assert_eq!(first(&zeros), PagesError::OutOfRange { page: 101, pages: 100 });
    zeros[16..24].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(matches!(first(&zeros), PagesError::OutOfRange { .. }));
    let mut page = Vec::new();
    put_pages(&mut page, &[PageNumber(100)], RAW, &[7; PAGE_BYTES]);
    assert_eq!(first(&page), PagesError::OutOfRange { page: 100, pages: 100 });
    assert_eq!(first(&page[..page.len() - 1]), PagesError::OutOfRange { page: 100, pages: 100 });
    page[8] = 99;
    assert_eq!(first(&page[..page.len() - 1]), PagesError::CutShort);
    page[0] = 77;
    assert_eq!(first(&page), PagesError::UnknownForm(77));
    // As many bytes as the page has itself.
    for form in [Codec::Lz4 as u8, 252, 253] {
        page[0] = form;
        assert_eq!(first(&page), PagesError::WrongSize { pages: 1, bytes: PAGE_BYTES as u32 });
    }
    let mut same = Vec::new();
    put_same(&mut same, &numbered(&[(1, 2), (3, 100)]));
    assert_eq!(first(&same), PagesError::OutOfRange { page: 100, pages: 100 });
    same[4] -= 1;
    assert_eq!(first(&same), PagesError::WrongSize { pages: 2, bytes: 31 });
}
