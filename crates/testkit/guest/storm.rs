//! A program that takes, grows, moves and gives back memory and starts other programs, and knows what its memory
//! holds.

use crate::{Checked, PAGE, random, word_of};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

/// Most pieces of memory at a time, and most pages of one when it is taken.
const PIECES: usize = 48;
const PAGES: u64 = 256;
/// One of so many steps starts a program.
const STEPS_A_PROGRAM: u64 = 64;
const REST: Duration = Duration::from_micros(300);

/// Pieces of memory, each with words that its seed determines. They are large enough for the allocator to map each
/// by itself, and to move it in the address space when it grows.
pub struct Storm {
    state: u64,
    steps: u64,
    pieces: Vec<(u64, Vec<u64>)>,
}

impl Storm {
    pub fn new() -> Self {
        Self { state: 0x5707_4d00_5707_4d01, steps: 0, pieces: Vec::new() }
    }

    fn grow(&mut self, piece: usize, words: usize) {
        let (seed, memory) = &mut self.pieces[piece];
        let length = memory.len() + words;
        memory.reserve_exact(words);
        memory.extend((memory.len()..length).map(|at| word_of(*seed, 0, at as u64)));
    }

    fn check(&self, piece: usize) -> Result<(), String> {
        let (seed, memory) = &self.pieces[piece];
        let wrong = memory.iter().zip(0..).position(|(word, at)| *word != word_of(*seed, 0, at));
        wrong.map_or(Ok(()), |at| Err(format!("word {at} of piece {seed} of {}", memory.len())))
    }
}

impl Checked for Storm {
    fn step(&mut self) -> Result<(), String> {
        self.steps += 1;
        let words = (64 + random(&mut self.state) % PAGES) as usize * PAGE / 8;
        let chosen = random(&mut self.state) as usize % PIECES;
        match random(&mut self.state) % 4 {
            _ if chosen >= self.pieces.len() => {
                self.pieces.push((self.steps, Vec::new()));
                self.grow(self.pieces.len() - 1, words);
            }
            0 if self.pieces[chosen].1.len() < (4 * PAGES) as usize * PAGE / 8 => {
                self.grow(chosen, words);
            }
            1 => {
                self.check(chosen)?;
                self.pieces.swap_remove(chosen);
            }
            2 => {
                // Some of it is given back.
                let (_, memory) = &mut self.pieces[chosen];
                memory.truncate(memory.len() / 2);
                memory.shrink_to_fit();
            }
            _ => {
                // The same memory with other words.
                let seed = self.steps;
                let (was, memory) = &mut self.pieces[chosen];
                *was = seed;
                memory.iter_mut().zip(0..).for_each(|(word, at)| *word = word_of(seed, 0, at));
            }
        }
        if self.steps % STEPS_A_PROGRAM == 0 {
            let mut command = Command::new("cat");
            let command = command.arg("/proc/self/maps").stdin(Stdio::null()).stdout(Stdio::null());
            command.status().map_err(|error| error.to_string())?;
        }
        thread::sleep(REST);
        Ok(())
    }

    fn verify(&mut self) -> Result<u64, String> {
        (0..self.pieces.len()).try_for_each(|piece| self.check(piece)).map(|()| self.steps)
    }
}
