use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

/// A copy of a file that was left open for this program when it was started, by its number. The copy is not passed on.
///
/// # Errors
/// Where no file has that number.
pub fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    if number < 0 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: the number is not -1, which is all that the type's layout relies on. It is used for one fcntl(2),
    // which refuses a number that no file has, and is not kept.
    let file = unsafe { BorrowedFd::borrow_raw(number) };
    file.try_clone_to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_file_is_known_by_its_number() {
        let (one, mut other) = UnixStream::pair().expect("pair");
        let copy = inherited(one.as_raw_fd()).expect("copy");
        drop(one);
        other.write_all(b"x").expect("the copy is open");
        drop(copy);
        assert!(other.write_all(b"x").is_err());
        assert!(inherited(-1).is_err());
        assert!(inherited(1_000_000).is_err());
    }
}
