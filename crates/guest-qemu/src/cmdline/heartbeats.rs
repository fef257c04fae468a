//! The serial port on which a guest tells how it meets its deadlines.

use super::options::change_option;
use serde_json::Value;
use std::path::Path;

/// The socket of the port, in a guest's folder.
pub const PORT_FILE: &str = "qos.sock";
/// What the guest knows the port by.
const PORT_NAME: &str = "org.dewar.qos.0";
const CHARDEV: &str = "dewar-qos";

/// The command line with such a port, of which QEMU keeps the host's end in
/// `socket`.
pub fn with_heartbeats(line: &[String], socket: &Path) -> Vec<String> {
    // QEMU takes two commas for one.
    let path = socket.display().to_string().replace(',', ",,");
    let port = [
        "-device",
        &format!("virtio-serial-pci,id={CHARDEV}-bus"),
        "-chardev",
        &format!("socket,id={CHARDEV},path={path},server=on,wait=off"),
        "-device",
        &format!("virtserialport,bus={CHARDEV}-bus.0,chardev={CHARDEV},name={PORT_NAME}"),
    ]
    .map(str::to_owned);
    line.iter().cloned().chain(port).collect()
}

/// Moves the port of a command line that has one to another socket: the guest may
/// come back by another name while the one before still runs, or at another host.
pub fn move_heartbeats(line: &mut [String], socket: &Path) {
    let path = socket.display().to_string();
    change_option(line, "chardev", ("id", CHARDEV), |chardev| {
        chardev.set("path", &path, Value::from(path.as_str()));
        chardev.to_string()
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_port_is_added_and_moved() {
        let line: Vec<String> =
            ["-m", "1G", "-chardev", "socket,id=x,path=/x"].map(str::to_owned).to_vec();
        let mut with = with_heartbeats(&line, Path::new("/a,b/qos.sock"));
        assert_eq!(with[..4], line);
        assert!(with[7].contains("path=/a,,b/qos.sock,server=on"), "{}", with[7]);
        move_heartbeats(&mut with, Path::new("/c,d/qos.sock"));
        assert!(with[7].contains("path=/c,,d/qos.sock"), "{}", with[7]);
        assert_eq!(with[..4], line);
    }
}
