//! A guest that moves by a real ssh: OpenSSH's client, and a server of the test's own on the second host.

use crate::migrate::Hosts;
use dewar_testkit::{GuestSpec, Lab, Ran, wait_until};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// An ssh server on the second host, which lets one key in, and a client on the first that knows it.
struct Ssh {
    folder: PathBuf,
    server: Child,
}

impl Ssh {
    fn start(hosts: &Hosts) -> Self {
        let folder = hosts.a.path().join("ssh");
        let here = |name: &str| folder.join(name).display().to_string();
        fs::create_dir_all(folder.join("bin")).expect("folder");
        for key in ["right", "wrong"] {
            run("ssh-keygen", &["-q", "-t", "ed25519", "-N", "", "-f", &here(key)]);
        }
        run("dropbearkey", &["-t", "ed25519", "-f", &here("host")]);
        fs::create_dir(folder.join("home")).expect("folder");
        fs::copy(folder.join("right.pub"), folder.join("home/authorized_keys")).expect("keys");
        for (path, mode) in [("home", 0o700), ("home/authorized_keys", 0o600)] {
            let mode = fs::Permissions::from_mode(mode);
            fs::set_permissions(folder.join(path), mode).expect("mode");
        }
        // Nothing of the machine's own ssh is touched: the folder is another in that host's view alone.
        let script = format!(
            "keys=$(getent passwd \"$(id -u)\" | cut -d: -f6)/.ssh && mkdir -p \"$keys\" && \
             mount --bind {} \"$keys\" && exec dropbear -F -E -s -r {} -p {}:2222",
            here("home"),
            here("host"),
            hosts.b.address(),
        );
        let words = format!("exec {} sh -c '{script}'", hosts.b.via());
        let log = fs::File::create(folder.join("log")).expect("log");
        let mut server = Command::new("sh");
        let server = server.args(["-c", &words]).stderr(log).spawn().expect("server");
        let ssh = Self { folder, server };
        ssh.configure(&hosts.b.address());
        wait_until("the ssh server", Duration::from_secs(10), || {
            let try_it = format!("{} {} hostb true", hosts.a.via(), ssh.client().display());
            let tried = Command::new("sh").args(["-c", &try_it]).stderr(Stdio::null()).status();
            tried.is_ok_and(|status| status.success())
        });
        ssh
    }

    /// What an `ssh` of the user's own would find in its configuration.
    fn configure(&self, address: &str) {
        let here = |name: &str| self.folder.join(name).display().to_string();
        let of = |host: &str, key: &str, known: &str| {
            format!(
                "Host {host}\nHostName {address}\nPort 2222\nUser root\nIdentityFile {}\n\
                 IdentitiesOnly yes\nBatchMode yes\nUserKnownHostsFile {}\n\
                 StrictHostKeyChecking {}\n",
                here(key),
                here(known),
                if known == "known" { "accept-new" } else { "yes" },
            )
        };
        let config = of("hostb", "right", "known")
            + &of("strangerb", "wrong", "known")
            + &of("unknownb", "right", "nobody");
        fs::write(self.folder.join("config"), config).expect("config");
        let script = format!("#!/bin/sh\nexec /usr/bin/ssh -F {} \"$@\"\n", here("config"));
        fs::write(self.client(), script).expect("client");
        fs::set_permissions(self.client(), fs::Permissions::from_mode(0o755)).expect("mode");
    }

    fn client(&self) -> PathBuf {
        self.folder.join("bin/ssh")
    }

    /// Moves the guest to a host by its name.
    fn migrate(&self, from: &Lab, host: &str, to: &Lab) -> Ran {
        let (root, program) = (to.root().display().to_string(), to.program().display().to_string());
        let line = ["migrate", "g", host, "--remote-root", &root, "--remote-dewar", &program];
        let mut command = from.command(&[&line[..], &["--max-downtime", "1s"]].concat());
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{path}", self.folder.join("bin").display()));
        Ran::of(&command.output().expect("dewar"))
    }
}

impl Drop for Ssh {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_guest_moves_by_ssh() {
    let mut hosts = Hosts::new(&GuestSpec::default());
    hosts.guest.console.ask("check 2000 1 disk").expect("check");
    let ssh = Ssh::start(&hosts);
    // A key that is not let in, and a server that is not known.
    for (host, why) in [("strangerb", "Permission denied"), ("unknownb", "verification failed")] {
        let ran = ssh.migrate(&hosts.a, host, &hosts.b);
        ran.failed(1, &[why, "cannot be reached", "not touched"]);
        assert_eq!(hosts.states(), ["running", "-"].map(str::to_owned), "{host}");
    }
    let moved = ssh.migrate(&hosts.a, "hostb", &hosts.b);
    // By the address that ssh came by, over connections of their own.
    assert!(!moved.stderr.contains("tunnel"), "{}", moved.stderr);
    println!("{}", moved.done().stdout.trim());
    assert!(hosts.assert_on_one("by ssh"));
}
