//! Locks of objects in Redis: each has an end, which a thread of ours moves ahead
//! again and again.
//!
//! Holders are members of a sorted set whose scores are the times, by the
//! server's clock, at which their locks end. A holder that could not move its
//! end in time has *lost* its lock, even if no other command took it.
//! An exclusive lock is never renewed after its end, since what it guards may have been
//! swept in between. A shared lock is taken again, if the object
//! is still there and no command has it exclusively: an object is removed before what it stands for.

use super::shared::Shared;
use crate::StoreError;
use crate::backend::{Lock, LockAttempt, LockKind};
use redis::Script;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

/// How long a lock lasts when its holder is silent.
const LASTS: Duration = Duration::from_secs(20);
const RENEWED_EVERY: Duration = Duration::from_secs(4);
const WAIT: Duration = Duration::from_millis(50);
/// For how long letting go is tried.
const LEAVING: Duration = Duration::from_millis(500);

const NOW: &str = "local t = redis.call('TIME')
    local now = t[1] * 1000 + math.floor(t[2] / 1000)
    redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)\n";

/// The keys that a lock is about, all in one slot.
#[derive(Debug, Clone)]
pub(super) struct Keys {
    /// The sorted set of holders.
    pub hold: String,
    /// The object.
    pub object: String,
    /// The index of its folder.
    pub index: String,
    /// Its name there.
    pub entry: String,
}

/// A lock. Dropped, it is released.
#[derive(Debug)]
pub(super) struct LockedKey {
    shared: Arc<Shared>,
    name: String,
    keys: Keys,
    /// `x` alone, `s` shared; and who we are.
    member: String,
    /// Dropped, it ends the thread.
    renewing: Option<(mpsc::Sender<()>, JoinHandle<()>)>,
}

impl LockedKey {
    pub(super) fn take(
        shared: &Arc<Shared>,
        name: &str,
        keys: Keys,
        how: LockKind,
    ) -> Result<LockAttempt, StoreError> {
        let member = format!("{}{}", if how == LockKind::Shared { 's' } else { 'x' }, token());
        let take = format!(
            "{NOW}if redis.call('ZSCORE', KEYS[1], ARGV[1]) == false then
                if ARGV[3] == 'new' then
                    redis.call('SET', KEYS[2], '')
                    redis.call('HSET', KEYS[3], ARGV[4], 0)
                elseif redis.call('EXISTS', KEYS[2]) == 0 then return 'missing' end
                local alone = string.sub(ARGV[1], 1, 1) == 'x'
                for _, other in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
                    if alone or string.sub(other, 1, 1) == 'x' then return 'taken' end
                end
            end
            redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
            redis.call('PEXPIRE', KEYS[1], ARGV[2] * 2)
            return 'held'"
        );
        let script = Script::new(&take);
        let mut call = script.key(&keys.hold);
        call.key(&keys.object).key(&keys.index).arg(&member).arg(LASTS.as_millis() as u64);
        call.arg(if how == LockKind::New { "new" } else { "there" }).arg(&keys.entry);
        loop {
            let answer: String =
                shared.pool.run("hold", name, |connection| call.invoke(connection))?;
            match answer.as_str() {
                "held" => break,
                "missing" => return Ok(LockAttempt::Missing),
                _ if how == LockKind::AloneAfterAll => std::thread::sleep(WAIT),
                _ => return Ok(LockAttempt::Taken),
            }
        }
        let renewing = Some(keep_renewing(Arc::clone(shared), name, &keys, &member));
        let (shared, name) = (Arc::clone(shared), name.to_owned());
        Ok(LockAttempt::Locked(Box::new(Self { shared, name, keys, member, renewing })))
    }

    /// Runs a script in which `KEYS[1]` is the lock and `ARGV[1]` our member;
    /// it fails where the lock was lost.
    fn while_held(
        &self,
        operation: &'static str,
        name: &str,
        then: &str,
        keys: &[&str],
        arguments: &[&[u8]],
    ) -> Result<(), StoreError> {
        let text = format!(
            "{NOW}if redis.call('ZSCORE', KEYS[1], ARGV[1]) == false then return 0 end
             {then}
             return 1"
        );
        let script = Script::new(&text);
        let mut call = script.key(&self.keys.hold);
        for key in keys {
            call.key(*key);
        }
        call.arg(&self.member);
        for argument in arguments {
            call.arg(*argument);
        }
        match self.shared.pool.run(operation, name, |connection| call.invoke::<u8>(connection))? {
            1 => Ok(()),
            _ => Err(self.shared.pool.error(
                operation,
                name,
                "the store did not hear of us for too long, and may have given our place away",
            )),
        }
    }

    fn let_go(&mut self) {
        if let Some((end, thread)) = self.renewing.take() {
            drop(end);
            let _ = thread.join();
        }
    }
}

impl Lock for LockedKey {
    fn append(&mut self, text: &str) -> Result<(), StoreError> {
        let then = "local n = redis.call('APPEND', KEYS[2], ARGV[2])
             redis.call('HSET', KEYS[3], ARGV[3], n)";
        let keys = [self.keys.object.as_str(), &self.keys.index];
        let arguments = [text.as_bytes(), self.keys.entry.as_bytes()];
        self.while_held("write", &self.name, then, &keys, &arguments)
    }

    fn put(&mut self, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        let then = "redis.call('SET', KEYS[2], ARGV[2])
             redis.call('HSET', KEYS[3], ARGV[3], #ARGV[2])";
        let keys = [self.shared.key(name), self.shared.index(name)];
        let entry = super::shared::folder_of(name).1.as_bytes();
        let put = self.while_held("write", name, then, &[&keys[0], &keys[1]], &[bytes, entry]);
        // It may have been put at the first try, and the answer been lost until our
        // lock had run out.
        put.or_else(|lost| match self.shared.get(name)?.as_deref() == Some(bytes) {
            true => Ok(()),
            false => Err(lost),
        })
    }

    fn remove(self: Box<Self>) -> Result<(), StoreError> {
        let then = "redis.call('DEL', KEYS[2])
             redis.call('HDEL', KEYS[3], ARGV[2])";
        let keys = [self.keys.object.as_str(), &self.keys.index];
        let entry = self.keys.entry.as_bytes();
        let removed = self.while_held("remove", &self.name, then, &keys, &[entry]);
        // As above.
        removed.or_else(|lost| match self.shared.size(&self.name)? {
            None => Ok(()),
            Some(_) => Err(lost),
        })
    }
}

impl Drop for LockedKey {
    fn drop(&mut self) {
        self.let_go();
        let mut leave = redis::cmd("ZREM");
        leave.arg(&self.keys.hold).arg(&self.member);
        // Where the server stays away, the lock runs out by itself; where it was
        // started again, a second connection finds it.
        let _ = self
            .shared
            .pool
            .run_within(LEAVING, "let go", &self.name, |connection| leave.query::<()>(connection));
    }
}

fn keep_renewing(
    shared: Arc<Shared>,
    name: &str,
    keys: &Keys,
    member: &str,
) -> (mpsc::Sender<()>, JoinHandle<()>) {
    let (end, ended) = mpsc::channel();
    let (name, keys, member) = (name.to_owned(), keys.clone(), member.to_owned());
    let text = format!(
        "{NOW}if redis.call('ZSCORE', KEYS[1], ARGV[1]) == false then
             if string.sub(ARGV[1], 1, 1) == 'x' or redis.call('EXISTS', KEYS[2]) == 0 then
                 return 0
             end
             for _, other in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
                 if string.sub(other, 1, 1) == 'x' then return 0 end
             end
         end
         redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
         redis.call('PEXPIRE', KEYS[1], ARGV[2] * 2)
         return 1"
    );
    let thread = std::thread::spawn(move || {
        let script = Script::new(&text);
        let mut call = script.key(keys.hold);
        call.key(keys.object).arg(member).arg(LASTS.as_millis() as u64);
        while ended.recv_timeout(RENEWED_EVERY) == Err(RecvTimeoutError::Timeout) {
            // Where it fails the next round tries again; where the lock is
            // lost, the holder hears of it when it matters.
            let _ = shared.pool.run_within(RENEWED_EVERY, "hold", &name, |connection| {
                call.invoke::<u8>(connection)
            });
        }
    });
    (end, thread)
}

/// A name that no other holder has.
fn token() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("{host}-{}-{}-{number}", std::process::id(), now.as_nanos())
}
