//! Containers on a Debian 13 as it comes: its kernel, runc, crun and CRIU.

use crate::host::{Host, OneHost};

/// Makes a bundle with the test program, in a root file system that is an overlay where that is asked for.
const BUNDLE: &str = r#"
set -e
mkdir -p /root/b/lower/bin /root/b/lower/proc /root/b/lower/sys /root/b/lower/dev /root/b/lower/tmp /root/b/lower/run
mkdir -p /root/b/rootfs /root/b/upper /root/b/work /root/b/volume
cp /lab/bin/dewar-guest /lab/bin/busybox /root/b/lower/bin/
for name in sh cat sleep; do ln -sf busybox /root/b/lower/bin/$name; done
for fifo in commands answers; do rm -f /root/b/volume/$fifo; mkfifo /root/b/volume/$fifo; done
cd /root/b; rm -f config.json; runc spec
sed -i 's/"terminal": true/"terminal": false/; s/"readonly": true/"readonly": false/;
    s|"sh"|"/bin/dewar-guest", "serve", "/run/commands", "/run/answers"|;
    s|"mounts": \[|"mounts": [{"destination": "/run", "type": "bind", "source": "/root/b/volume", "options": ["bind"]},|' config.json
cat > /root/ask <<'ASK'
#!/bin/bash
exec 3<>/root/b/volume/commands 4<>/root/b/volume/answers
echo "$*" >&3
while read -r -t 60 line <&4; do
    case $line in @ok*) echo "${line#@ok }"; exit 0 ;; @bad*) echo "$line"; exit 1 ;; esac
done
echo silent; exit 1
ASK
chmod +x /root/ask
"#;

/// A container `c` on a host, adopted under the same name.
struct Container<'h> {
    host: &'h Host,
    runtime: &'static str,
}

impl<'h> Container<'h> {
    fn start(host: &'h Host, runtime: &'static str, is_overlay: bool) -> Self {
        host.run(BUNDLE).done();
        let root = match is_overlay {
            true => {
                "mount -t overlay overlay -o \
                 lowerdir=/root/b/lower,upperdir=/root/b/upper,workdir=/root/b/work rootfs"
            }
            false => "cp -a lower/. rootfs/",
        };
        host.run(&format!("cd /root/b && {root}")).done();
        host.run(&format!(
            "{runtime} run --detach --bundle /root/b c </dev/null >/dev/null 2>&1 && \
             dewar adopt c --container c --runtime {runtime}"
        ))
        .done();
        Self { host, runtime }
    }

    fn ask(&self, command: &str) -> String {
        self.host.run(&format!("/root/ask {command}")).done().stdout.trim().to_owned()
    }

    fn dewar(&self, line: &str) {
        self.host.run(&format!("dewar {line}")).done();
    }

    /// That it works on, and everything in it is as it should be.
    fn is_well(&self) {
        let before = self.ask("count");
        self.host.run("sleep 0.5").done();
        assert_ne!(self.ask("count"), before);
        self.ask("verify");
    }

    fn crash(&self) {
        self.host.run(&format!("{} delete --force c", self.runtime)).done();
    }
}

impl Drop for Container<'_> {
    fn drop(&mut self) {
        self.host.run(&format!(
            "dewar rm --force c; {} delete --force c; umount /root/b/rootfs; rm -rf /root/b /var/lib/dewar/store",
            self.runtime
        ));
    }
}

#[test]
fn one_of_runc_comes_back_with_its_files() {
    let one = OneHost::new();
    let c = Container::start(one.host, "runc", true);
    // Huge pages are how Debian comes; what is written is told page by page all the same.
    one.host.run("echo always > /sys/kernel/mm/transparent_hugepage/enabled").done();
    c.ask("fill 48 noise");
    c.ask("words 200");
    c.ask("check 300 2 none");
    c.ask("append /tmp/log one");
    c.is_well();
    c.dewar("checkpoint c");
    c.ask("append /tmp/log two");
    let again = one.host.run("dewar --json checkpoint c").done().json();
    let (stopped, all) = (&again["captured"]["stopped"], &again["pages"]["total"]);
    assert!(stopped.as_u64() < all.as_u64().map(|all| all / 10), "{again}");
    assert!(again["stored_bytes"].as_u64() < all.as_u64().map(|all| all * 4096 / 5), "{again}");
    c.ask("append /tmp/log three");
    c.crash();
    c.dewar("restore c");
    c.is_well();
    assert_eq!(c.ask("show /tmp/log"), "one;two");
    c.ask("verify");
}

#[test]
fn one_of_crun_comes_back() {
    let one = OneHost::new();
    let c = Container::start(one.host, "crun", false);
    c.ask("check 1000 2 none");
    c.is_well();
    c.dewar("checkpoint c");
    c.is_well();
    c.crash();
    c.dewar("restore c");
    c.is_well();
    c.dewar("checkpoint c");
    c.dewar("stop c --now");
    c.dewar("restore c");
    c.is_well();
}
