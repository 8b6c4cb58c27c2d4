//! `hearth key`: creates the key of a ring, or the API key of a server.

use hearth_ring::create_secret_file;
use serde::Serialize;

use super::print_result;
use crate::cli::KeyArgs;
use crate::diagnostics::{ExitCode, Failure};

/// The created file, as `--json` prints it.
#[derive(Serialize)]
struct Created {
    path: String,
}

pub fn run(args: &KeyArgs, json: bool) -> Result<ExitCode, Failure> {
    create_secret_file(&args.file)?;
    let created = Created { path: args.file.display().to_string() };
    print_result(json, &created, |created| {
        let protected = if cfg!(unix) { "; only you can read the file" } else { "" };
        format!("wrote 32 random bytes to {}{protected}\n", created.path)
    })
}
