//! A program that writes its memory and a disk, and can check both.

use crate::{Checked, PAGE, WORDS, random, word_of};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::thread;
use std::time::Duration;

const O_DIRECT: i32 = 0o40000;
/// Blocks of the first disk that each writer owns.
const BLOCKS: u64 = 512;
/// Where blocks with a fixed content begin, and how many there are.
const FIXED_AT: u64 = 4096;
const FIXED: u64 = 1024;
/// Steps between two rests, and how long each is: a writer that rests writes at most 4,000 pages a second.
const STINT: u64 = 128;
const REST: Duration = Duration::from_millis(32);

/// A program whose memory and disk keep a relation that one step at a time
/// maintains: each page and each block holds what was written at the step that
/// a table remembers for it, and the table's sum is remembered too. A page, a
/// block or a piece of the table from another instant breaks it.
pub struct Writer {
    id: u64,
    state: u64,
    step: u64,
    pages: Vec<u64>,
    page_steps: Vec<u64>,
    page_sum: u64,
    disk: Option<File>,
    block_steps: Vec<u64>,
    block_sum: u64,
    block: Vec<u8>,
    /// Pages filled by the disk, and which block each holds.
    read_into: Vec<u8>,
    read_blocks: Vec<u64>,
    reads: bool,
    rests: bool,
}

/// The part of a buffer that direct I/O accepts.
fn aligned(buffer: &mut [u8], bytes: usize) -> &mut [u8] {
    let skip = buffer.as_ptr().align_offset(PAGE);
    &mut buffer[skip..skip + bytes]
}

fn fixed_block(block: u64) -> impl Iterator<Item = u64> {
    (0..WORDS as u64).map(move |index| word_of(0xf1ed, block, index))
}

impl Writer {
    pub fn new(id: u64, pages: u64, disk: &str, hard: bool) -> Result<Self, String> {
        let open =
            || OpenOptions::new().read(true).write(true).custom_flags(O_DIRECT).open("/dev/vda");
        let disk_file =
            (disk != "none").then(open).transpose().map_err(|error| error.to_string())?;
        let reads = disk == "reads";
        let mut writer = Self {
            id,
            state: 0x1234_5678_9abc_def1 + id,
            step: 0,
            pages: vec![0; pages as usize * WORDS],
            page_steps: vec![0; pages as usize],
            page_sum: 0,
            disk: disk_file,
            block_steps: vec![0; BLOCKS as usize],
            block_sum: 0,
            block: vec![0; 2 * PAGE],
            read_into: vec![0; if reads { (FIXED as usize + 1) * PAGE } else { 0 }],
            read_blocks: vec![0; if reads { FIXED as usize } else { 0 }],
            reads,
            rests: !hard,
        };
        if reads {
            writer.write_fixed(id).map_err(|error| error.to_string())?;
            for slot in 0..FIXED {
                writer.read_fixed(slot, slot).map_err(|error| error.to_string())?;
            }
        }
        Ok(writer)
    }

    fn write_fixed(&mut self, id: u64) -> std::io::Result<()> {
        let Some(disk) = self.disk.as_ref().filter(|_| id == 0) else { return Ok(()) };
        for block in 0..FIXED {
            let buffer = aligned(&mut self.block, PAGE);
            for (bytes, word) in buffer.chunks_exact_mut(8).zip(fixed_block(block)) {
                bytes.copy_from_slice(&word.to_le_bytes());
            }
            disk.write_all_at(buffer, (FIXED_AT + block) * PAGE as u64)?;
        }
        Ok(())
    }

    fn read_fixed(&mut self, slot: u64, block: u64) -> std::io::Result<()> {
        let Some(disk) = &self.disk else { return Ok(()) };
        let start = slot as usize * PAGE;
        let page = &mut aligned(&mut self.read_into, FIXED as usize * PAGE)[start..start + PAGE];
        disk.read_exact_at(page, (FIXED_AT + block) * PAGE as u64)?;
        self.read_blocks[slot as usize] = block;
        Ok(())
    }

    fn write_block(&mut self) -> std::io::Result<()> {
        let Some(disk) = &self.disk else { return Ok(()) };
        let block = random(&mut self.state) % BLOCKS;
        let buffer = aligned(&mut self.block, PAGE);
        for (index, bytes) in buffer.chunks_exact_mut(8).enumerate() {
            bytes.copy_from_slice(&word_of(self.step, block, index as u64).to_le_bytes());
        }
        disk.write_all_at(buffer, (self.id * BLOCKS + block) * PAGE as u64)?;
        self.block_sum += self.step - self.block_steps[block as usize];
        self.block_steps[block as usize] = self.step;
        Ok(())
    }

    fn verify_disk(&mut self) -> Result<(), String> {
        let Some(disk) = &self.disk else { return Ok(()) };
        let mut all = vec![0; (BLOCKS as usize + 1) * PAGE];
        let blocks = aligned(&mut all, BLOCKS as usize * PAGE);
        disk.read_exact_at(blocks, self.id * BLOCKS * PAGE as u64)
            .map_err(|error| error.to_string())?;
        for (block, step) in self.block_steps.iter().enumerate().filter(|(_, step)| **step != 0) {
            let bytes = &blocks[block * PAGE..(block + 1) * PAGE];
            for (index, word) in bytes.chunks_exact(8).enumerate() {
                if word != word_of(*step, block as u64, index as u64).to_le_bytes() {
                    return Err(format!("disk block {block} is not that of step {step}"));
                }
            }
        }
        Ok(())
    }
}

impl Checked for Writer {
    fn step(&mut self) -> Result<(), String> {
        if self.rests && self.step % STINT == 0 {
            thread::sleep(REST);
        }
        self.step += 1;
        let page = random(&mut self.state) % self.page_steps.len() as u64;
        let at = page as usize * WORDS;
        for (index, word) in self.pages[at..at + WORDS].iter_mut().enumerate() {
            *word = word_of(self.step, page, index as u64);
        }
        self.page_sum += self.step - self.page_steps[page as usize];
        self.page_steps[page as usize] = self.step;
        if self.reads && self.step % 8 == 0 {
            let number = random(&mut self.state);
            let result = self.read_fixed(number % FIXED, number >> 20 & (FIXED - 1));
            result.map_err(|error| error.to_string())?;
        }
        let every = if self.reads { 64 } else { 256 };
        if self.disk.is_some() && self.step % every == 0 {
            self.write_block().map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn verify(&mut self) -> Result<u64, String> {
        for (page, step) in self.page_steps.iter().enumerate() {
            let words = &self.pages[page * WORDS..(page + 1) * WORDS];
            for (index, word) in words.iter().enumerate() {
                let expected =
                    if *step == 0 { 0 } else { word_of(*step, page as u64, index as u64) };
                if *word != expected {
                    return Err(format!("page {page} is not that of step {step}"));
                }
            }
        }
        if self.page_steps.iter().sum::<u64>() != self.page_sum {
            return Err("the table of pages is not of one instant".to_owned());
        }
        if self.block_steps.iter().sum::<u64>() != self.block_sum {
            return Err("the table of blocks is not of one instant".to_owned());
        }
        let blocks: Vec<u64> = self.read_blocks.clone();
        for (slot, block) in blocks.into_iter().enumerate() {
            let pages = aligned(&mut self.read_into, FIXED as usize * PAGE);
            let page = &pages[slot * PAGE..(slot + 1) * PAGE];
            let mut words = page.chunks_exact(8).zip(fixed_block(block));
            if !words.all(|(bytes, word)| bytes == word.to_le_bytes()) {
                return Err(format!("read page {slot} is not block {block}"));
            }
        }
        self.verify_disk()?;
        Ok(self.step)
    }
}
