//! The guest's network: an address, and what answers there.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

pub fn network(address: &str) -> Result<String, String> {
    let ip = |words: &[&str]| {
        let status = std::process::Command::new("ip").args(words).status();
        status.is_ok_and(|it| it.success()).then_some(()).ok_or("ip failed".to_owned())
    };
    ip(&["addr", "add", address, "dev", "eth0"])?;
    ip(&["link", "set", "eth0", "up"])?;
    Ok(String::new())
}

/// Serves each connection to a port with a thread of its own.
pub fn listen(port: u16, serve: fn(TcpStream) -> std::io::Result<()>) -> Result<String, String> {
    let listener = TcpListener::bind(("0.0.0.0", port)).map_err(|error| error.to_string())?;
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || serve(stream));
        }
    });
    Ok(String::new())
}

pub fn web(mut stream: TcpStream) -> std::io::Result<()> {
    let mut request = [0; 1024];
    let _ = stream.read(&mut request)?;
    stream.write_all(b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nwarm\n")
}

pub fn echo(mut stream: TcpStream) -> std::io::Result<()> {
    let mut bytes = [0; 1024];
    loop {
        let count = stream.read(&mut bytes)?;
        if count == 0 {
            return Ok(());
        }
        stream.write_all(&bytes[..count])?;
    }
}
