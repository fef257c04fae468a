//! The guest agent (`qemu-ga`), by which a guest's clock can be set: after a restore or a thaw
//! it is as old as what was saved (docs/interop/qemu-ga-ref in QEMU's sources).

use crate::cmdline::{Properties, arguments};
use serde_json::{Value, json};
use std::io::{BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// The name of its port.
const PORT: &str = "org.qemu.guest_agent.0";
/// How long it may take to answer, all in all: its memory may still be arriving.
const ANSWERS_WITHIN: Duration = Duration::from_secs(5);

/// The socket at which the agent of a guest with this command line is reached, if it has one
/// that listens.
fn socket(line: &[String], folder: &Path) -> Option<PathBuf> {
    let all = arguments(line);
    let options = |name: &str| -> Vec<Properties> {
        let of = all.iter().filter(|it| it.name == name);
        of.filter_map(|it| Properties::parse(it.value?).ok()).collect()
    };
    let ports = options("device");
    let port = ports.iter().find(|it| it.get("name", "").as_deref() == Some(PORT))?;
    let chardev = port.get("chardev", "")?;
    let chardevs = options("chardev");
    let device = chardevs.iter().find(|it| it.get("id", "").as_deref() == Some(&chardev))?;
    let listens = device.switch("server") == Some(true);
    device.get("path", "").filter(|_| listens).map(|path| folder.join(path))
}

/// Sets a running guest's clock to the host's, by its agent; nothing where it has none.
///
/// # Errors
/// Why it was not set: the agent does not answer, or says so.
pub fn set_time(line: &[String], folder: &Path) -> Option<Result<(), String>> {
    let socket = socket(line, folder)?;
    Some(talk(&socket).map_err(|error| format!("its guest agent: {error}")))
}

fn talk(socket: &Path) -> Result<(), String> {
    let text = |error: std::io::Error| error.to_string();
    let mut stream = UnixStream::connect(socket).map_err(text)?;
    let deadline = Instant::now() + ANSWERS_WITHIN;
    let mut answers = BufReader::new(stream.try_clone().map_err(text)?);
    // What it said to others before is passed over.
    let id = u64::from(std::process::id());
    ask(&mut stream, &json!({"execute": "guest-sync", "arguments": {"id": id}}))?;
    while answer(&mut answers, deadline)?["return"] != id {}
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let time = now.as_nanos() as u64;
    ask(&mut stream, &json!({"execute": "guest-set-time", "arguments": {"time": time}}))?;
    let said = answer(&mut answers, deadline)?;
    match (said.get("return"), said["error"]["desc"].as_str()) {
        (Some(_), _) => Ok(()),
        (None, Some(why)) => Err(why.to_owned()),
        (None, None) => Err("its answer is none".to_owned()),
    }
}

fn ask(stream: &mut UnixStream, command: &Value) -> Result<(), String> {
    stream.set_write_timeout(Some(ANSWERS_WITHIN)).map_err(|error| error.to_string())?;
    stream.write_all(format!("{command}\n").as_bytes()).map_err(|error| error.to_string())
}

fn answer(answers: &mut BufReader<UnixStream>, deadline: Instant) -> Result<Value, String> {
    const LONGEST: usize = 1 << 16;
    let mut line = Vec::new();
    // Byte by byte: a read timeout begins anew with each piece that comes.
    while line.last() != Some(&b'\n') {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || line.len() >= LONGEST {
            return Err("it does not answer".to_owned());
        }
        answers.get_ref().set_read_timeout(Some(left)).map_err(|error| error.to_string())?;
        let mut byte = [0];
        match answers.read(&mut byte) {
            Ok(0) => return Err("it is not there".to_owned()),
            Ok(_) => line.push(byte[0]),
            Err(_) => return Err("it does not answer".to_owned()),
        }
    }
    Ok(serde_json::from_slice(&line).unwrap_or(Value::Null))
}
