//! The code that an injection borrows from its target.

use crate::Pid;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// `syscall; ret`
const SYSCALL_RET: &[u8] = &[0x0f, 0x05, 0xc3];
/// `mov $15, %rax; syscall`, as glibc and musl write their signal restorer.
const RESTORER: &[u8] = &[0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05];
/// `mov $15, %eax; syscall`
const RESTORER_SHORT: &[u8] = &[0xb8, 0x0f, 0, 0, 0, 0x0f, 0x05];

/// Addresses in the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Gadgets {
    pub syscall: u64,
    pub restorer: u64,
}

impl Gadgets {
    pub(super) fn find(pid: Pid) -> io::Result<Self> {
        let memory = File::open(format!("/proc/{}/mem", pid.0))?;
        let mut syscall = None;
        let mut restorer = None;
        for range in executable_ranges(pid)? {
            if syscall.is_some() && restorer.is_some() {
                break;
            }
            let mut code = vec![0; (range.end - range.start) as usize];
            if memory.read_exact_at(&mut code, range.start).is_err() {
                continue;
            }
            let find = |pattern: &[u8]| {
                let at = code.windows(pattern.len()).position(|window| window == pattern)?;
                Some(range.start + at as u64)
            };
            syscall = syscall.or_else(|| find(SYSCALL_RET));
            restorer = restorer.or_else(|| find(RESTORER)).or_else(|| find(RESTORER_SHORT));
        }
        match (syscall, restorer) {
            (Some(syscall), Some(restorer)) => Ok(Self { syscall, restorer }),
            _ => Err(io::Error::other("its code has no 'syscall; ret' or no signal restorer")),
        }
    }
}

/// Executable mappings, the likeliest first: vDSO, C library, loader, rest.
fn executable_ranges(pid: Pid) -> io::Result<Vec<Range<u64>>> {
    let maps = fs::read_to_string(format!("/proc/{}/maps", pid.0))?;
    let mut found: Vec<(u8, Range<u64>)> = maps.lines().filter_map(parse_line).collect();
    found.sort_by_key(|(rank, _)| *rank);
    Ok(found.into_iter().map(|(_, range)| range).collect())
}

fn parse_line(line: &str) -> Option<(u8, Range<u64>)> {
    let mut fields = line.split_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let flags = fields.next()?;
    let name = fields.nth(3).unwrap_or("");
    // Without a name it is code that the guest's emulator made: not to be
    // relied on, and not to be searched for minutes. What is shared others may change.
    if !flags.starts_with("r-xp") || name.is_empty() || name == "[vsyscall]" {
        return None;
    }
    let rank = match name {
        "[vdso]" => 0,
        name if name.contains("/libc.") || name.contains("/libc-") => 1,
        name if name.contains("/ld-") => 2,
        _ => 3,
    };
    let address = |text| u64::from_str_radix(text, 16).ok();
    Some((rank, address(start)?..address(end)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_what_is_needed() {
        Gadgets::find(Pid(std::process::id() as i32)).expect("gadgets");
    }
}
