//! Formats the results of commands and prints them to standard output.
//!
//! If standard output is a closed pipe, the program exits silently. Other errors, such as a full disk, are reported.

pub mod counters;
pub mod plan;
pub mod run;
pub mod run_events;
pub mod soc;

use std::fmt;
use std::io::{self, Write};

use crate::diagnostics::{ExitCode, Failure};

/// Prints text to standard output. Exits the program if standard output is a closed pipe.
pub fn print(text: fmt::Arguments) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_fmt(text).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS.exit(),
        Err(error) => Err(Failure::failed(format!("cannot write to standard output: {error}"))),
        Ok(()) => Ok(()),
    }
}

/// Prints formatted text to standard output. Returns the error from the calling function if printing fails.
macro_rules! say {
    ($($part:tt)*) => {
        $crate::output::print(format_args!($($part)*))?
    };
}
pub(crate) use say;

/// Prints a line to standard error.
macro_rules! say_stderr {
    ($($part:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($part)*);
    }};
}
pub(crate) use say_stderr;
