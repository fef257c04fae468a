//! A connection to one server that reads large values straight to where they stay.
//!
//! The client library's own reads an answer into a buffer and copies it from there; of
//! frames of a quarter of a MiB that is most of what a reader does. So the one kind of answer
//! that is large, a string of told length (`$`, "bulk string" in the protocol), is read
//! here; all others by the library's parser. That one may read ahead only within what was
//! asked for, so between two calls nothing of an answer is left anywhere.

use super::wire::{Socket, Wire, tls_of_environment};
use crate::backend::LARGEST_OBJECT;
use redis::cluster::Connect;
use redis::{
    Cmd, ConnectionAddr, ConnectionLike, ErrorKind, IntoConnectionInfo, Parser, RedisError,
    RedisResult, ServerErrorKind, Value,
};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::ToSocketAddrs;
use std::time::Duration;

/// No string that we ask for is as long: four of the largest objects.
const LONGEST: usize = 4 * LARGEST_OBJECT;
/// `$LENGTH\r\n`.
const LONGEST_HEAD: u64 = 32;
/// No answer other than a string is as long: a list of all objects, a batch of pages. (What
/// is made of it here takes up to fifteen times as much.)
const LONGEST_ANSWER: u64 = if cfg!(test) { TESTED_ANSWER } else { 32 << 20 };
/// The same for tests of answers without end: the library's parser takes long in builds without optimisation.
const TESTED_ANSWER: u64 = 2 << 20;
/// Where nobody says how long a node may take.
const UNTOLD: Duration = Duration::from_secs(20);
/// Room for the beginning of an answer; what is longer is not read through it.
const BEGINNING: usize = 1 << 12;

/// The connection.
pub(super) struct ServerConnection {
    stream: BufReader<Wire>,
    parser: Parser,
    database: i64,
    /// Whether something of an answer may be left on the way: it would be taken for the next.
    is_broken: bool,
}

/// The stream of one answer, which has an end in bytes; its end in time the [`Wire`] keeps.
struct Bounded<'s> {
    stream: &'s mut BufReader<Wire>,
    left: u64,
}

impl Read for Bounded<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let bytes = self.stream.read(buffer)?;
        match self.left.checked_sub(bytes as u64) {
            Some(left) => self.left = left,
            None => return Err(std::io::Error::other("an answer without end")),
        }
        Ok(bytes)
    }
}

impl ServerConnection {
    /// Connects to the first address that answers; `times`: for that, and for any answer.
    pub(super) fn connect(
        host: &str,
        port: u16,
        is_tls: bool,
        database: i64,
        credentials: Option<(Option<&str>, &str)>,
        times: [Duration; 2],
    ) -> RedisResult<Self> {
        let tls = if is_tls { Some(tls_of_environment()?) } else { None };
        let mut failure = RedisError::from((ErrorKind::InvalidClientConfig, "no address"));
        for address in (host, port).to_socket_addrs()? {
            let wire = Wire::connect(&address, host, tls.as_ref(), times[0]);
            match wire.and_then(|wire| Self::begin(wire, database, credentials, times[1])) {
                Ok(connection) => return Ok(connection),
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    fn begin(
        wire: Wire,
        database: i64,
        credentials: Option<(Option<&str>, &str)>,
        answer: Duration,
    ) -> RedisResult<Self> {
        let stream = BufReader::with_capacity(BEGINNING, wire);
        let mut connection = Self { stream, parser: Parser::new(), database, is_broken: false };
        if let Value::ServerError(refusal) = connection.req_command(&redis::cmd("PING"))? {
            welcome(refusal.into())?;
        }
        if let Some((name, password)) = credentials {
            let mut login = redis::cmd("AUTH");
            name.map(|name| login.arg(name));
            login.arg(password).query::<()>(&mut connection).map_err(explained)?;
        }
        if database != 0 {
            redis::cmd("SELECT").arg(database).query::<()>(&mut connection)?;
        }
        connection.socket().set_read_timeout(answer)?;
        connection.socket().set_write_timeout(answer)?;
        Ok(connection)
    }

    fn socket(&self) -> &Socket {
        self.stream.get_ref().socket()
    }

    /// Does something with the stream, which is of no more use where that fails.
    fn attempt<T>(&mut self, work: impl FnOnce(&mut Self) -> RedisResult<T>) -> RedisResult<T> {
        if self.is_broken {
            return Err(std::io::Error::from(std::io::ErrorKind::BrokenPipe).into());
        }
        self.stream.get_mut().begin();
        let result = work(self);
        self.is_broken = result.is_err();
        result
    }

    fn send(&mut self, packed: &[u8]) -> RedisResult<()> {
        self.attempt(|connection| {
            connection.stream.get_mut().write_all(packed)?;
            Ok(connection.stream.get_mut().flush()?)
        })
    }

    fn answer(&mut self) -> RedisResult<Value> {
        self.attempt(|connection| match connection.stream.fill_buf()?.first() {
            Some(b'$') => connection.string(),
            _ => connection.parsed(),
        })
    }

    /// An answer by the library's parser.
    fn parsed(&mut self) -> RedisResult<Value> {
        let mut stream = Bounded { stream: &mut self.stream, left: LONGEST_ANSWER };
        self.parser.parse_value(&mut stream)
    }

    /// `$LENGTH\r\nBYTES\r\n`, or `$-1\r\n` for none.
    fn string(&mut self) -> RedisResult<Value> {
        let mut head = Vec::new();
        (&mut self.stream).take(LONGEST_HEAD).read_until(b'\n', &mut head)?;
        if head.last() != Some(&b'\n') && (head.len() as u64) < LONGEST_HEAD {
            return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof).into());
        }
        let head = String::from_utf8_lossy(&head);
        if head == "$-1\r\n" {
            return Ok(Value::Nil);
        }
        let length = head.strip_prefix('$').and_then(|rest| rest.strip_suffix("\r\n"));
        let length = length.and_then(|digits| digits.parse().ok());
        let Some(length) = length.filter(|length| *length <= LONGEST) else {
            return Err((ErrorKind::Parse, "no length of a string", head.into_owned()).into());
        };
        // Not into zeros that would be written for nothing.
        let mut bytes = Vec::with_capacity(length);
        (&mut self.stream).take(length as u64).read_to_end(&mut bytes)?;
        if bytes.len() < length {
            return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof).into());
        }
        let mut end = [0; 2];
        self.stream.read_exact(&mut end)?;
        match &end {
            b"\r\n" => Ok(Value::BulkString(bytes)),
            _ => Err((ErrorKind::Parse, "a string goes on behind its end").into()),
        }
    }
}

/// What a server says unasked to those that it sends away; it may ask who we are.
fn welcome(refusal: RedisError) -> RedisResult<()> {
    match refusal.code() {
        Some("NOAUTH" | "NOPERM") => Ok(()),
        // To be tried again.
        _ if refusal.to_string().contains("max number of clients") => {
            Err(std::io::Error::other(refusal.to_string()).into())
        }
        _ => Err(refusal),
    }
}

/// Older servers, and those without a password, have no code of their own for a refusal.
fn explained(error: RedisError) -> RedisError {
    match error.kind() {
        ErrorKind::Server(ServerErrorKind::ResponseError) => {
            (ErrorKind::AuthenticationFailed, "AUTH was refused", error.to_string()).into()
        }
        _ => error,
    }
}

impl ConnectionLike for ServerConnection {
    fn req_packed_command(&mut self, packed: &[u8]) -> RedisResult<Value> {
        self.send(packed)?;
        self.answer()
    }

    fn req_command(&mut self, command: &Cmd) -> RedisResult<Value> {
        self.req_packed_command(&command.get_packed_command())
    }

    fn req_packed_commands(
        &mut self,
        packed: &[u8],
        offset: usize,
        count: usize,
    ) -> RedisResult<Vec<Value>> {
        self.send(packed)?;
        let all = (0..offset + count).map(|_| self.attempt(Self::parsed));
        let mut all = all.collect::<RedisResult<Vec<_>>>()?;
        Ok(all.split_off(offset))
    }

    fn get_db(&self) -> i64 {
        self.database
    }

    fn check_connection(&mut self) -> bool {
        redis::cmd("PING").query::<String>(self).is_ok()
    }

    fn is_open(&self) -> bool {
        !self.is_broken && self.socket().is_well()
    }
}

/// As a node of a Cluster, of which the library knows who has what.
impl Connect for ServerConnection {
    fn connect<T: IntoConnectionInfo>(info: T, timeout: Option<Duration>) -> RedisResult<Self> {
        let info = info.into_connection_info()?;
        let (host, port, is_tls) = match info.addr() {
            ConnectionAddr::Tcp(host, port) => (host, *port, false),
            ConnectionAddr::TcpTls { host, port, .. } => (host, *port, true),
            _ => return Err((ErrorKind::InvalidClientConfig, "a node without a port").into()),
        };
        let settings = info.redis_settings();
        let credentials = settings.password().map(|password| (settings.username(), password));
        let times = [timeout.unwrap_or(UNTOLD); 2];
        Self::connect(host, port, is_tls, settings.db(), credentials, times)
    }

    fn send_packed_command(&mut self, packed: &[u8]) -> RedisResult<()> {
        self.send(packed)
    }

    fn set_write_timeout(&self, time: Option<Duration>) -> RedisResult<()> {
        Ok(self.socket().set_write_timeout(time.unwrap_or(UNTOLD))?)
    }

    fn set_read_timeout(&self, time: Option<Duration>) -> RedisResult<()> {
        Ok(self.socket().set_read_timeout(time.unwrap_or(UNTOLD))?)
    }

    fn recv_response(&mut self) -> RedisResult<Value> {
        self.answer()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::time::Instant;

    /// Where a server of a test listens, and its port.
    fn listening() -> (TcpListener, u16) {
        let server = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = server.local_addr().expect("its address").port();
        (server, port)
    }

    /// What comes of asking a server that says this, whatever it is asked, and goes.
    fn asked(answer: Vec<u8>) -> RedisResult<Value> {
        let (server, port) = listening();
        let served = std::thread::spawn(move || {
            let (mut peer, _) = server.accept().expect("a connection");
            for answer in [b"+PONG\r\n", &answer[..]] {
                let _ = peer.read(&mut [0; 64]);
                let _ = peer.write_all(answer);
            }
        });
        let times = [Duration::from_secs(5); 2];
        let mut connection =
            ServerConnection::connect("127.0.0.1", port, false, 0, None, times).expect("connects");
        let result = redis::cmd("PING").query(&mut connection);
        drop(connection);
        served.join().expect("the server ends");
        result
    }

    #[test]
    fn strings_of_every_length_are_read() {
        for length in [0, 1, BEGINNING - 9, BEGINNING, BEGINNING + 1, 1 << 20] {
            let content: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
            let framed = [format!("${length}\r\n").as_bytes(), &content, b"\r\n"].concat();
            assert_eq!(asked(framed), Ok(Value::BulkString(content)), "{length}");
        }
        assert_eq!(asked(b"$-1\r\n".to_vec()), Ok(Value::Nil));
        assert_eq!(asked(b"+PONG\r\n".to_vec()), Ok(Value::SimpleString("PONG".to_owned())));
        assert_eq!(asked(b":7\r\n".to_vec()), Ok(Value::Int(7)));
    }

    #[test]
    fn what_is_no_answer_is_an_error() {
        let bad: [&[u8]; 8] = [
            b"",
            b"$",
            b"$5\r\nabc",
            b"$3\r\nabcdefg",
            b"$99999999999\r\n",
            b"$-2\r\n",
            b"$0000000000000000000000000000000000000000001\r\na\r\n",
            b"-ERR no\r\n",
        ];
        for answer in bad {
            asked(answer.to_vec()).expect_err(&String::from_utf8_lossy(answer));
        }
        // Told as such, to be asked again elsewhere.
        for gone in [&b""[..], b"$", b"$5", b"$5\r\nab"] {
            assert_eq!(asked(gone.to_vec()).expect_err("it went").kind(), ErrorKind::Io);
        }
    }

    /// What comes of asking a server that says `first`, and then `again` for as long as it is
    /// heard, so far apart.
    fn asked_endlessly(first: &'static [u8], again: &'static [u8], apart: Duration) -> RedisError {
        let (server, port) = listening();
        let served = std::thread::spawn(move || {
            let (mut peer, _) = server.accept().expect("a connection");
            let _ = peer.read(&mut [0; 64]);
            let _ = peer.write_all(b"+PONG\r\n");
            let _ = peer.read(&mut [0; 64]);
            let _ = peer.write_all(first);
            while peer.write_all(again).is_ok() {
                std::thread::sleep(apart);
            }
        });
        let times = [Duration::from_secs(5), Duration::from_millis(500)];
        let mut connection =
            ServerConnection::connect("127.0.0.1", port, false, 0, None, times).expect("connects");
        let began = Instant::now();
        let error = connection.req_command(&redis::cmd("PING")).expect_err("an answer without end");
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
        drop(connection);
        served.join().expect("the server ends");
        error
    }

    #[test]
    fn an_answer_without_end_ends() {
        const MANY: &[u8] = &[b'x'; 1 << 16];
        const NUMBERS: &[u8] = b":1\r\n:1\r\n:1\r\n:1\r\n:1\r\n:1\r\n:1\r\n:1\r\n";
        let endless = asked_endlessly(b"+", MANY, Duration::ZERO);
        assert!(endless.to_string().contains("without end"), "{endless}");
        asked_endlessly(b"*2000000000\r\n", NUMBERS, Duration::ZERO);
        let slow = Duration::from_millis(100);
        for first in [&b"+"[..], b"*9\r\n$9\r\n", b"$999999\r\n", b"$"] {
            asked_endlessly(first, b"0", slow);
        }
    }

    /// Below TLS, where nobody above sees the bytes of a record that is not whole yet.
    #[test]
    fn a_record_that_drips_ends() {
        let (server, port) = listening();
        let served = std::thread::spawn(move || {
            let (mut peer, _) = server.accept().expect("a connection");
            // A handshake record of 16 KiB.
            let _ = peer.write_all(&[0x16, 3, 3, 0x40, 0]);
            while peer.write_all(&[2]).is_ok() {
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        let (times, began) = ([Duration::from_millis(500); 2], Instant::now());
        let ended = ServerConnection::connect("127.0.0.1", port, true, 0, None, times).map(drop);
        assert_eq!(ended.expect_err("no handshake").kind(), ErrorKind::Io);
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
        served.join().expect("the server ends");
    }

    /// What is left of an answer that failed is not taken for the next.
    #[test]
    fn a_broken_connection_stays_so() {
        let (server, port) = listening();
        let served = std::thread::spawn(move || {
            let (mut peer, _) = server.accept().expect("a connection");
            for answer in [&b"+PONG\r\n"[..], b"$3\r\nabcXX+OK\r\n"] {
                let _ = peer.read(&mut [0; 64]);
                let _ = peer.write_all(answer);
            }
            let _ = peer.read(&mut [0; 64]);
        });
        let times = [Duration::from_secs(5); 2];
        let mut connection =
            ServerConnection::connect("127.0.0.1", port, false, 0, None, times).expect("connects");
        for _ in 0..2 {
            connection.req_command(&redis::cmd("PING")).expect_err("not the rest of another");
            assert!(!connection.is_open());
        }
        drop(connection);
        served.join().expect("the server ends");
    }

    #[test]
    fn who_is_sent_away_hears_why() {
        let greeted = |answer: &[u8]| match redis::parse_redis_value(answer).expect("an answer") {
            Value::ServerError(refusal) => welcome(refusal.into()),
            other => panic!("{other:?}"),
        };
        greeted(b"-NOAUTH Authentication required.\r\n").expect("it asks who we are");
        let full = greeted(b"-ERR max number of clients reached\r\n").expect_err("full");
        assert_eq!(full.kind(), ErrorKind::Io, "to be tried again");
        let denied = greeted(b"-DENIED Redis is running in protected mode\r\n").expect_err("no");
        assert!(denied.to_string().contains("protected mode"), "{denied}");
    }

    #[test]
    fn who_says_nothing_is_no_server() {
        let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = silent.local_addr().expect("its address").port();
        let times = [Duration::from_millis(100), Duration::from_secs(600)];
        ServerConnection::connect("127.0.0.1", port, false, 0, None, times)
            .map(drop)
            .expect_err("no answer");
    }
}
