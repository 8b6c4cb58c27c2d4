//! An interrupted command leaves nothing half done.
//!
//! Labs and sweeps have tests of their own.

use std::fs;
use std::process::Stdio;
use std::time::Duration;

use crate::processes::{hearth, signal};

#[test]
fn unfinished_model_is_removed() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("8b.gguf").display().to_string();
    let arguments = ["synth", "--preset", "8b", "--output", &model];
    let mut writer =
        hearth(&arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
    let files = || fs::read_dir(folder.path()).expect("the folder").count();
    for _ in 0..1000 {
        if files() > 0 {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(files(), 1, "an unfinished file");
    signal(writer.id(), "INT");
    assert_eq!(writer.wait().expect("it ends").code(), Some(130));
    assert_eq!(files(), 0);
}
