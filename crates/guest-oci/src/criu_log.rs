//! What CRIU failed at, told from its log.

/// A part of a line that says why, the reason in other words, and what can be done.
struct Known {
    said: &'static str,
    reason: &'static str,
    advice: Option<&'static str>,
}

/// What is to be done about files that went on without the container.
const FILES_TOO: &str = "a checkpoint has what was written to a root file system that is an overlay, and nothing of volumes: \
     put the file back, or start the container so that it lies there";

/// What CRIU says when not all processes have stopped in time.
const TIMED_OUT: &str = "Timeout reached";

const KNOWN: [Known; 16] = [
    Known {
        said: "anon_inode:[io_uring]",
        reason: "it uses io_uring, which cannot be saved",
        advice: Some("switch io_uring off in the program"),
    },
    Known {
        said: "io_uring",
        reason: "it uses io_uring, which cannot be saved",
        advice: Some("switch io_uring off in the program"),
    },
    Known {
        said: "userfaultfd",
        reason: "it has a userfaultfd open, which cannot be saved",
        advice: None,
    },
    Known { said: "bpf-map", reason: "it has a BPF map open, which cannot be saved", advice: None },
    Known {
        said: "Can't lookup mount=",
        reason: "it has a file open that lies outside its own mounts",
        advice: Some(
            "start it with standard output and standard error at /dev/null, a pipe or a file inside the container",
        ),
    },
    Known {
        said: "iptables-restore",
        reason: "its network cannot be locked: iptables-restore is missing or fails",
        advice: Some("install iptables"),
    },
    Known {
        said: "Can't lock network",
        reason: "its network cannot be locked",
        advice: Some("install iptables"),
    },
    Known {
        said: "Can't dump half of stopped",
        reason: "a process of it is stopped by somebody outside",
        advice: None,
    },
    Known {
        said: "is already seized",
        reason: "a process of it is traced by a debugger",
        advice: Some("end the debugger"),
    },
    Known {
        said: "Can't dump nested pid namespace",
        reason: "it has a PID namespace inside, which cannot be saved",
        advice: None,
    },
    Known {
        said: "unsupported external device",
        reason: "it has a device open that cannot be saved",
        advice: None,
    },
    Known {
        said: "has bad size",
        reason: "a file that it had open is not as it was",
        advice: Some(FILES_TOO),
    },
    Known {
        said: "Can't open file",
        reason: "a file that it had open is gone",
        advice: Some(FILES_TOO),
    },
    Known {
        said: "Address already in use",
        reason: "an address that it listens on is taken",
        advice: Some("end who has it, the container that it was saved from perhaps"),
    },
    Known {
        said: TIMED_OUT,
        reason: "its processes did not all stop in time",
        advice: Some("try again; one that waits in vfork(2) for its child cannot be stopped"),
    },
    Known { said: "No space left on device", reason: "there is no room for it", advice: None },
];

/// Errors that come after others, and say less; and those that are none.
const SAYS_LITTLE: [&str; 7] = [
    "Dumping FAILED",
    "Restoring FAILED",
    "failed with -1",
    "Can't setup RLIMIT_NOFILE",
    "exited, status=",
    "(empty-image)",
    "Lazy pages transfer FAILED",
];

/// Why CRIU failed, and what can be done; `None` where its log says nothing.
pub fn reason(log: &str) -> Option<(String, Option<&'static str>)> {
    let errors: Vec<&str> = log
        .lines()
        .filter_map(|line| line.split_once("Error (").map(|(_, rest)| rest))
        .filter(|line| !SAYS_LITTLE.iter().any(|little| line.contains(little)))
        .collect();
    for known in &KNOWN {
        if let Some(line) = errors.iter().find(|line| line.contains(known.said)) {
            let file = file_of(line).map(|file| format!(": {file}"));
            return Some((format!("{}{}", known.reason, file.unwrap_or_default()), known.advice));
        }
    }
    // `criu/file.c:12): text`: where it is in CRIU says nothing to its user.
    let first = errors.first()?;
    Some((first.split_once("): ").map_or(*first, |(_, text)| text).to_owned(), None))
}

/// Whether CRIU gave up since not all processes had stopped.
pub fn has_timed_out(log: &str) -> bool {
    log.contains(TIMED_OUT)
}

/// The file that a line is about.
fn file_of(line: &str) -> Option<&str> {
    if let Some((_, path)) = line.rsplit_once("path=") {
        return Some(path);
    }
    // `File run/log has bad size 5 (expect 4)`, `Can't open file run/log on restore: …`
    let (_, after) = line.split_once(" File ").or_else(|| line.split_once(" file "))?;
    after.split(' ').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_is_told_in_words_and_with_its_file() {
        let log = "(00.042) Error (criu/util.c:1533): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted\n\
                   (00.149) Error (criu/files-reg.c:1790): Can't lookup mount=27 for fd=2 path=/var/log/web\n\
                   (00.149) Error (criu/cr-dump.c:1681): Dump files (pid: 1607) failed with -1\n\
                   (00.236) Error (criu/cr-dump.c:2111): Dumping FAILED.";
        let (cause, advice) = reason(log).expect("reason");
        assert_eq!(cause, "it has a file open that lies outside its own mounts: /var/log/web");
        assert!(advice.is_some());
        let log = "(00.1) Error (criu/files-reg.c:2300): File run/last has bad size 5 (expect 4)";
        let (cause, _) = reason(log).expect("reason");
        assert_eq!(cause, "a file that it had open is not as it was: run/last");
    }

    #[test]
    fn what_is_not_known_is_told_as_it_was_said_first() {
        let log = "(00.1) Error (criu/pie.c:1): no such luck\n(00.2) Error (criu/cr.c:2): Dumping FAILED.";
        assert_eq!(reason(log), Some(("no such luck".to_owned(), None)));
        assert_eq!(reason("(00.1) Dumping finished successfully"), None);
    }
}
