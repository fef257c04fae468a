//! Direct connections: the source that was named is heard, and nobody else.

use dewar_migrate::{DirectListener, Identity, connect};
use dewar_wire::frame::Kind;
use std::io::{Read, Write};
use std::net::TcpStream;

const SESSION: u64 = 0xd14e_c700;

fn at(port: u16) -> Vec<(String, u16)> {
    // The first leads nowhere.
    vec![("nowhere.invalid".to_owned(), port), ("127.0.0.1".to_owned(), port)]
}

#[test]
fn the_source_that_was_named_is_heard_and_nobody_else() {
    let [source, destination, stranger] = [(); 3].map(|()| Identity::new().expect("identity"));
    let listener =
        DirectListener::new(&destination, &source.certificate(), SESSION).expect("listener");
    let port = listener.port();
    // A port scanner: one that says something, and one that says nothing.
    let mut scanner = TcpStream::connect(("127.0.0.1", port)).expect("connect");
    scanner.write_all(b"GET / HTTP/1.0\r\n\r\n").expect("write");
    let _silent = TcpStream::connect(("127.0.0.1", port)).expect("connect");
    // One with another key, one of another migration, one that meets another destination.
    let theirs = destination.certificate();
    let mut refused = connect(&at(port), &stranger, &theirs, SESSION, 1);
    if let Ok(links) = &mut refused {
        // The destination looks at its key when it has sent its own; then nothing arrives.
        while links[0].send(Kind::Pages, &[0; 1000]).is_ok() {}
    }
    drop(refused);
    let _other_session = connect(&at(port), &source, &theirs, SESSION + 1, 1).expect("secured");
    let wrong = connect(&at(port), &source, &stranger.certificate(), SESSION, 1);
    assert!(wrong.err().expect("refused").to_string().contains("another than was named"));
    // The source, in any order.
    let mut links = connect(&at(port), &source, &theirs, SESSION, 3).expect("connected");
    for (number, link) in links.iter_mut().enumerate() {
        link.send(Kind::Pages, &[number as u8; 100]).expect("sent");
    }
    let mut come = listener.connections(3).expect("all have come");
    drop(links);
    for (number, link) in come.iter_mut().enumerate() {
        assert_eq!(usize::from(link.shard()), number);
        let (kind, bytes) = link.receive().expect("frame").expect("frame");
        assert_eq!((kind, bytes), (Kind::Pages, &[number as u8; 100][..]));
        assert!(link.receive().expect("the end").is_none());
    }
    // The scanner heard no more than TLS says.
    let mut heard = Vec::new();
    let _ = scanner.read_to_end(&mut heard);
    assert!(heard.len() < 20, "{heard:?}");
    // The port is closed.
    std::thread::sleep(std::time::Duration::from_millis(100));
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
}
