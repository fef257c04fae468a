//! A container on a machine of the lab.

use crate::lab_host::LabHost;

/// Makes a bundle with the test program, in a root file system that is an overlay where that is asked for; `MORE` are
/// its other mounts.
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
    s|"mounts": \[|"mounts": [{"destination": "/run", "type": "bind", "source": "/root/b/volume", "options": ["bind"]},'"${MORE:-}"'|' config.json
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

/// A container `c` on a host, adopted under the same name. Dropped, it is ended and forgotten.
#[derive(Debug)]
pub struct LabContainer<'h> {
    host: &'h LabHost,
    runtime: &'static str,
}

impl<'h> LabContainer<'h> {
    /// Starts and adopts one of a runtime.
    ///
    /// # Panics
    /// Where it does not start.
    pub fn start(host: &'h LabHost, runtime: &'static str, is_overlay: bool) -> Self {
        Self::start_with(host, runtime, is_overlay, "")
    }

    /// The same with more mounts, as the configuration has them.
    ///
    /// # Panics
    /// Where it does not start.
    pub fn start_with(
        host: &'h LabHost,
        runtime: &'static str,
        is_overlay: bool,
        more: &str,
    ) -> Self {
        let c = Self::place(host, runtime, is_overlay, more);
        host.run(&format!(
            "{runtime} run --detach --bundle /root/b c </dev/null >/dev/null 2>&1 && \
             dewar adopt c --container c --runtime {runtime}"
        ))
        .done();
        c
    }

    /// The bundle alone, where one may come to.
    ///
    /// # Panics
    /// Where it cannot be made.
    pub fn place(host: &'h LabHost, runtime: &'static str, is_overlay: bool, more: &str) -> Self {
        host.run(&format!("MORE='{more}'\n{BUNDLE}")).done();
        let root = match is_overlay {
            true => {
                "mount -t overlay overlay -o \
                 lowerdir=/root/b/lower,upperdir=/root/b/upper,workdir=/root/b/work rootfs"
            }
            false => "cp -a lower/. rootfs/",
        };
        host.run(&format!("cd /root/b && {root}")).done();
        Self { host, runtime }
    }

    /// Starts and adopts one of podman's, under a runtime, from an image that the host is given.
    ///
    /// # Panics
    /// Where it does not start.
    pub fn start_by_podman(host: &'h LabHost, runtime: &str) -> Self {
        let c = Self::place_for_podman(host);
        host.run(&format!(
            "podman run --detach --runtime {runtime} --name c --volume /root/b/volume:/pipes localhost/guest:1 \
             /bin/dewar-guest serve /pipes/commands /pipes/answers </dev/null >/dev/null && \
             dewar adopt c --container c --runtime podman"
        ))
        .done();
        c
    }

    /// What one of podman's that comes needs on its host.
    ///
    /// # Panics
    /// Where it cannot be made.
    pub fn place_for_podman(host: &'h LabHost) -> Self {
        let c = Self::place(host, "podman", false, "");
        // One image for all hosts: made once, it has one id.
        host.run(
            "cd /mnt/disks && { [ -e guest.tar ] || { tar -C /root/b/lower -c . | podman import - localhost/guest:1 && \
             podman save --output guest.tar localhost/guest:1; }; } >/dev/null && podman load --input guest.tar",
        )
        .done();
        c
    }

    /// What its program answers.
    ///
    /// # Panics
    /// Where it does not.
    pub fn ask(&self, command: &str) -> String {
        self.host.run(&format!("/root/ask {command}")).done().stdout.trim().to_owned()
    }

    /// A command of `dewar` on its host.
    ///
    /// # Panics
    /// Where it fails.
    pub fn dewar(&self, line: &str) {
        self.host.run(&format!("dewar {line}")).done();
    }

    /// That it works on, and everything in it is as it should be.
    ///
    /// # Panics
    /// Where it is not.
    pub fn is_well(&self) {
        let before = self.ask("count");
        self.host.run("sleep 0.5").done();
        assert_ne!(self.ask("count"), before);
        self.ask("verify");
    }

    /// Ends it as a crash would, and makes the runtime forget it.
    pub fn crash(&self) {
        self.host.run(&format!("{} delete --force c", self.runtime)).done();
    }
}

impl Drop for LabContainer<'_> {
    fn drop(&mut self) {
        let forget = match self.runtime {
            "podman" => {
                "podman rm --force --time 0 c; podman rmi --force localhost/guest:1".to_owned()
            }
            runtime => format!("{runtime} delete --force c"),
        };
        self.host.run(&format!(
            "dewar rm --force c; {forget}; umount /root/b/rootfs; rm -rf /root/b /var/lib/dewar/store",
        ));
    }
}
