//! What a runtime asks of CRIU (CRIU's `images/rpc.proto`), with the numbers of files changed and all else as it was.
//!
//! A message is fields, one after the other: a number and a kind, and what the kind says (the encoding of Protocol
//! Buffers). It is not decoded into a type: what that does not know would be lost.

use std::io;
use std::os::fd::RawFd;

/// `criu_req.opts`.
const OPTIONS: u64 = 2;
/// `criu_opts.images_dir_fd`, `work_dir_fd` and `status_fd`: numbers in the process that asks.
const FILES: [u64; 3] = [1, 17, 49];

const VARINT: u64 = 0;
const EIGHT_BYTES: u64 = 1;
const BYTES: u64 = 2;
const FOUR_BYTES: u64 = 5;

/// The request with other numbers for the files that it names. One that is not there is negative, and stays so.
///
/// # Errors
/// Where it is no message, or `change` fails.
pub(crate) fn with_other_files(
    request: &[u8],
    change: &mut dyn FnMut(RawFd) -> io::Result<RawFd>,
) -> io::Result<Vec<u8>> {
    map_fields(request, &mut |number, field| match field {
        Field::Bytes(options) if number == OPTIONS => {
            let changed = map_fields(options, &mut |number, field| match field {
                Field::Varint(file) if FILES.contains(&number) => {
                    let Ok(file) = RawFd::try_from(file) else { return Ok(None) };
                    let mut changed = Vec::new();
                    put_varint(&mut changed, change(file)? as u64);
                    Ok(Some(changed))
                }
                _ => Ok(None),
            })?;
            let mut bytes = Vec::new();
            put_varint(&mut bytes, changed.len() as u64);
            bytes.extend(changed);
            Ok(Some(bytes))
        }
        _ => Ok(None),
    })
}

/// What a field holds; of those that nobody asks for nothing.
enum Field<'f> {
    Varint(u64),
    Bytes(&'f [u8]),
    Other,
}

/// What a field is encoded as after its number and kind, where that is another than before.
type Mapped = io::Result<Option<Vec<u8>>>;

/// Each field as `map` encodes it, or as it was.
fn map_fields(
    message: &[u8],
    map: &mut dyn FnMut(u64, Field<'_>) -> Mapped,
) -> io::Result<Vec<u8>> {
    let mut out = Vec::new();
    let mut rest = message;
    while !rest.is_empty() {
        let key = take_varint(&mut rest)?;
        let from = rest;
        let field = match key & 7 {
            VARINT => Field::Varint(take_varint(&mut rest)?),
            BYTES => {
                let length = take_varint(&mut rest)?;
                Field::Bytes(take(&mut rest, length)?)
            }
            EIGHT_BYTES => take(&mut rest, 8).map(|_| Field::Other)?,
            FOUR_BYTES => take(&mut rest, 4).map(|_| Field::Other)?,
            _ => return Err(damaged()),
        };
        put_varint(&mut out, key);
        match map(key >> 3, field)? {
            Some(changed) => out.extend(changed),
            None => out.extend(&from[..from.len() - rest.len()]),
        }
    }
    Ok(out)
}

fn take<'f>(rest: &mut &'f [u8], length: u64) -> io::Result<&'f [u8]> {
    let length = usize::try_from(length).ok().filter(|it| *it <= rest.len()).ok_or_else(damaged)?;
    let (taken, after) = rest.split_at(length);
    *rest = after;
    Ok(taken)
}

fn take_varint(rest: &mut &[u8]) -> io::Result<u64> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let byte = take(rest, 1)?[0];
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(damaged())
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn damaged() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "what the runtime asks of CRIU is no message")
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message;

    #[derive(Clone, PartialEq, Message)]
    struct Options {
        #[prost(int32, tag = "1")]
        images: i32,
        #[prost(fixed32, tag = "2")]
        other: u32,
        #[prost(int32, optional, tag = "17")]
        work: Option<i32>,
        #[prost(string, repeated, tag = "20")]
        names: Vec<String>,
        #[prost(int32, tag = "49")]
        status: i32,
    }

    #[derive(Clone, PartialEq, Message)]
    struct Request {
        #[prost(int32, tag = "1")]
        kind: i32,
        #[prost(message, optional, tag = "2")]
        options: Option<Options>,
        #[prost(double, tag = "9")]
        more: f64,
    }

    #[test]
    fn the_numbers_of_files_change_and_nothing_else() {
        let options = Options {
            images: 9,
            other: 17,
            work: Some(300),
            names: vec!["a".into(), "b".repeat(500)],
            status: -1,
        };
        let request = Request { kind: 3, options: Some(options.clone()), more: 1.5 };
        let bytes = request.encode_to_vec();
        let changed = with_other_files(&bytes, &mut |it| Ok(it + 1000)).expect("a message");
        let changed = Request::decode(changed.as_slice()).expect("a message");
        let expected = Options { images: 1009, work: Some(1300), ..options };
        assert_eq!(changed, Request { options: Some(expected), ..request });
        let same = with_other_files(&bytes, &mut Ok).expect("a message");
        assert_eq!(same, bytes);
        // Cut anywhere it is one of fewer fields, or none; it is never taken for more.
        for cut in 0..bytes.len() {
            let cut = with_other_files(&bytes[..cut], &mut Ok);
            assert!(cut.is_err() || cut.is_ok_and(|it| it.len() < bytes.len()));
        }
        assert!(with_other_files(&bytes, &mut |_| Err(io::ErrorKind::NotFound.into())).is_err());
    }
}
