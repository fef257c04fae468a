//! The report, in a real browser.

use crate::common;
use dewar_testkit::GuestSpec;
use std::collections::HashMap;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::process::Command;

/// How often each colour is in a picture.
fn colours(path: &Path) -> HashMap<[u8; 3], u64> {
    let file = BufReader::new(File::open(path).expect("screenshot"));
    let mut reader = png::Decoder::new(file).read_info().expect("PNG");
    let mut pixels = vec![0; reader.output_buffer_size().expect("size")];
    let frame = reader.next_frame(&mut pixels).expect("pixels");
    let mut counts = HashMap::new();
    for pixel in pixels[..frame.buffer_size()].chunks(frame.color_type.samples()) {
        *counts.entry([pixel[0], pixel[1], pixel[2]]).or_default() += 1;
    }
    counts
}

#[test]
fn a_report_is_one_page_that_a_browser_draws() {
    let lab = common::lab();
    let mut guest = lab.run("g", &GuestSpec::default()).expect("guest");
    guest.console.ask("fill 40 noise").expect("fill");
    guest.console.ask("check 6000 1 disk").expect("check");
    for tag in ["first", "<b>second</b>"] {
        lab.dewar(&["checkpoint", "g", "--tag", tag]).done();
    }
    let file = lab.path().join("report.html");
    let told = lab.dewar(&["report", "g", "-o", &file.display().to_string()]).done().json();
    assert_eq!(told["file"], file.display().to_string());
    let html = std::fs::read_to_string(&file).expect("report");
    assert!(html.contains("&lt;b&gt;second") && !html.contains("<b>second"));
    for from_elsewhere in ["http:", "https:", "src=", "@import", "url("] {
        assert!(!html.contains(from_elsewhere), "{from_elsewhere}");
    }
    let missing = lab.path().join("no/report.html");
    lab.dewar(&["report", "g", "-o", &missing.display().to_string()])
        .failed(1, &["cannot write", "No such file"]);

    let Ok(version) = Command::new("chromium").arg("--version").output() else {
        println!(
            "SKIPPED the report in a browser: chromium is not installed (Ubuntu has it only as a snap)"
        );
        return;
    };
    assert!(version.status.success());
    let picture = lab.path().join("report.png");
    let ran = Command::new("chromium")
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"])
        .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
        .args(["--hide-scrollbars", "--window-size=1000,1300"])
        .arg(format!("--user-data-dir={}", lab.path().join("profile").display()))
        .arg(format!("--screenshot={}", picture.display()))
        .arg(format!("file://{}", file.display()))
        .output()
        .expect("chromium");
    assert!(picture.exists(), "{}", String::from_utf8_lossy(&ran.stderr));
    if let Some(kept) = std::env::var_os("DEWAR_TEST_KEEP") {
        std::fs::copy(&picture, Path::new(&kept).join("report.png")).expect("copy");
    }
    let seen = colours(&picture);
    let area = |colour| seen.get(&colour).copied().unwrap_or(0);
    assert_eq!(seen.values().sum::<u64>(), 1000 * 1300);
    // The pause, the bulk pass, the epochs, pages as before.
    assert!(area([0xd2, 0x22, 0x2d]) > 60, "the pause is marked");
    for colour in [[0x2f, 0x6f, 0xb2], [0xe0, 0x93, 0x2b], [0x7f, 0xb2, 0xa2]] {
        assert!(area(colour) > 1000, "{colour:?}: {}", area(colour));
    }
}
