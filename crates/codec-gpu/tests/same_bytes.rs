//! What the device makes of pages is what the CPU codecs make of them, byte for byte; its LZ4 blocks are read by
//! a reader of LZ4.

use dewar_codec::{encode_words, is_zero};
use dewar_codec_gpu::{Batch, Devices, Encoding, Gpu};
use std::sync::{Mutex, PoisonError};
use twox_hash::XxHash3_64;

const PAGE: usize = 4096;

/// Does this with the devices of this machine, by each interface; the driver that computes on the CPU is one.
fn with_each_gpu(check: fn(&Gpu)) {
    // PoCL has been seen to abort where a program was given back while kernels of another ran.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let found: Vec<Gpu> =
        Gpu::each(Devices::Any).map(|gpu| gpu.expect("a device that works")).collect();
    found.iter().for_each(|gpu| println!("on {} by {}", gpu.name(), gpu.interface()));
    if found.is_empty() {
        println!(
            "SKIPPED codec-gpu: this machine has no GPU and no OpenCL device; the package pocl-opencl-icd is one"
        );
    }
    found.iter().for_each(check);
}

/// Random numbers, the same each time (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// Pages of all kinds: zero, noise, runs of words, text, and nearly zero.
fn pages(random: &mut Random, count: usize) -> Vec<u8> {
    (0..count).flat_map(|index| page(random, index)).collect()
}

fn page(random: &mut Random, kind: usize) -> Vec<u8> {
    let mut page = vec![0; PAGE];
    match kind % 6 {
        0 => {}
        1 => page
            .chunks_exact_mut(8)
            .for_each(|word| word.copy_from_slice(&random.next().to_le_bytes())),
        2 => {
            let (mut word, mut left) = (0, 0);
            for place in page.chunks_exact_mut(8) {
                if left == 0 {
                    (word, left) = (random.below(3), random.below(150));
                } else {
                    left -= 1;
                }
                place.copy_from_slice(&u64::to_le_bytes(word));
            }
        }
        3 => {
            let words = ["the ", "page ", "of ", "a ", "guest ", "that ", "moves ", "\n"];
            let text: String =
                std::iter::repeat_with(|| words[random.below(8) as usize]).take(PAGE).collect();
            page.copy_from_slice(&text.as_bytes()[..PAGE]);
        }
        4 => page[random.below(PAGE as u64) as usize] = 1 + random.below(255) as u8,
        // Long runs of bytes, and a tail that matches to its end.
        _ => {
            let (first, length) = (random.next() as u8, 1 + random.below(PAGE as u64) as usize);
            page[..length].fill(first);
            page[length..].fill(first.wrapping_add(random.below(2) as u8));
        }
    }
    page
}

/// Each page again, with some words written.
fn versions(random: &mut Random, pages: &[u8]) -> Vec<u8> {
    let mut versions = pages.to_vec();
    for page in versions.chunks_exact_mut(PAGE) {
        let most = [1, 4, 40, 512][random.below(4) as usize];
        for _ in 0..random.below(most) {
            page[random.below(PAGE as u64) as usize] ^= 1 + random.below(255) as u8;
        }
    }
    versions
}

#[test]
fn each_page_is_encoded_as_on_the_cpu() {
    with_each_gpu(compare_with_the_cpu);
}

fn compare_with_the_cpu(gpu: &Gpu) {
    let capacity = 1000;
    let mut batch = Batch::new(gpu, capacity).expect("a batch");
    let mut random = Random(1);
    for (count, most) in [(capacity, 4096), (1, 4096), (7, 100), (257, 1), (999, 1024), (100, 0)] {
        let present = pages(&mut random, count);
        let written = versions(&mut random, &present);
        for encoding in [Encoding::Runs, Encoding::Deltas] {
            batch.fill().expect("fill")[..written.len()].copy_from_slice(&written);
            let theirs = batch.fill_present().expect("fill");
            theirs[..present.len()].copy_from_slice(&present);
            batch.begin(count, encoding, most).expect("begin");
            let encoded = batch.finish().expect("finish");
            assert_eq!(encoded.count(), count);
            for (index, page) in written.chunks_exact(PAGE).enumerate() {
                let base = (encoding == Encoding::Deltas).then(|| &present[index * PAGE..][..PAGE]);
                let mut expected = Vec::new();
                let fits = encode_words(page, base, most, &mut expected);
                assert_eq!(
                    encoded.page(index),
                    fits.then_some(&expected[..]),
                    "{encoding:?} {index}"
                );
                assert_eq!(encoded.hash(index), XxHash3_64::oneshot(page), "{index}");
                assert_eq!(encoded.is_zero(index), is_zero(page), "{index}");
            }
        }
    }
}

#[test]
fn any_reader_of_lz4_takes_its_blocks() {
    with_each_gpu(read_its_blocks);
}

fn read_its_blocks(gpu: &Gpu) {
    let count = 3000;
    let mut batch = Batch::new(gpu, count).expect("a batch");
    let pages = pages(&mut Random(2), count);
    for most in [4096, 2000, 60, 5, 0] {
        batch.fill().expect("fill").copy_from_slice(&pages);
        batch.begin(count, Encoding::Lz4, most).expect("begin");
        let encoded = batch.finish().expect("finish");
        let mut bytes = 0;
        for (index, page) in pages.chunks_exact(PAGE).enumerate() {
            let theirs = lz4_flex::block::compress(page).len();
            let Some(block) = encoded.page(index) else {
                // What is left out did not fit, or hardly.
                assert!(theirs + theirs / 4 + 60 > most, "{index}: {theirs} would fit {most}");
                continue;
            };
            assert!(block.len() <= most);
            let back = lz4_flex::block::decompress(block, PAGE).expect("it is LZ4");
            assert!(back == page, "{index} is another page");
            assert_ends_as_it_must(block);
            bytes += block.len();
        }
        println!("{bytes} bytes of at most {most} a page");
        assert!(most < PAGE || bytes < pages.len() / 8, "they compress well");
    }
}

/// Some readers copy more than they must at a time, and rely on how a block ends: its last 5 bytes are literals,
/// and its last match begins 12 bytes before its end or earlier (lz4_Block_format.md, "End of block conditions").
fn assert_ends_as_it_must(block: &[u8]) {
    let (mut at, mut written) = (0, 0);
    let length = |at: &mut usize, half: u8| {
        let mut length = usize::from(half);
        let mut more = half == 15;
        while more {
            length += usize::from(block[*at]);
            more = block[*at] == 255;
            *at += 1;
        }
        length
    };
    loop {
        let token = block[at];
        at += 1;
        let literals = length(&mut at, token >> 4);
        (at, written) = (at + literals, written + literals);
        if at == block.len() {
            assert!(literals >= 5, "the last {literals} bytes are literals");
            return;
        }
        assert!(written + 12 <= PAGE, "a match begins at {written}");
        at += 2;
        written += 4 + length(&mut at, token & 15);
    }
}

/// What a batch made is that of its pages, however many are under way beside it.
#[test]
fn batches_under_way_at_once_do_not_mix() {
    with_each_gpu(encode_many_at_once);
}

fn encode_many_at_once(gpu: &Gpu) {
    let count = 300;
    let mut batches: Vec<Batch<'_>> =
        (0..4).map(|_| Batch::new(gpu, count).expect("a batch")).collect();
    for round in 0..3 {
        for (number, batch) in batches.iter_mut().enumerate() {
            let pages = pages(&mut Random((round * 10 + number) as u64), count);
            batch.fill().expect("fill").copy_from_slice(&pages);
            batch.begin(count, Encoding::Runs, PAGE).expect("begin");
        }
        for (number, batch) in batches.iter_mut().enumerate() {
            let pages = pages(&mut Random((round * 10 + number) as u64), count);
            let encoded = batch.finish().expect("finish");
            for (index, page) in pages.chunks_exact(PAGE).enumerate() {
                let mut expected = Vec::new();
                let fits = encode_words(page, None, PAGE, &mut expected);
                assert_eq!(encoded.page(index), fits.then_some(&expected[..]), "{number}, {index}");
                assert_eq!(encoded.hash(index), XxHash3_64::oneshot(page), "{number}, {index}");
            }
        }
    }
}
