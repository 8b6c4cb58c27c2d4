//! Formats the results of commands and prints them to standard output.
//!
//! Everything that is printed here passes through [`escape()`]; log messages do, too ([`crate::logging`]).
//! If standard output is a closed pipe, the program exits silently. Other errors, such as a full disk, are reported.

pub mod counters;
mod escape;
pub mod export;
pub mod plan;
pub mod run;
pub mod run_events;
pub mod soc;
pub mod verdict;

use std::fmt;
use std::io::{self, Write};

pub use self::escape::{escape, escape_line};
use crate::diagnostics::{ExitCode, Failure};

/// Prints text to standard output. Exits the program if standard output is a closed pipe.
pub fn print(text: fmt::Arguments) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(escape(&text.to_string()).as_bytes()).and_then(|()| out.flush()) {
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

/// Prints text and a line feed to standard error.
macro_rules! say_stderr {
    ($($part:tt)*) => {{
        use std::io::Write as _;
        let text = format!($($part)*);
        let _ = writeln!(std::io::stderr(), "{}", $crate::output::escape(&text));
    }};
}
pub(crate) use say_stderr;

/// Formats a speed with two or three digits.
pub fn short_speed(speed: f64) -> String {
    match speed {
        speed if speed >= 99.95 => format!("{speed:.0}"),
        speed if speed >= 9.995 => format!("{speed:.1}"),
        speed if speed >= 0.0995 => format!("{speed:.2}"),
        speed => format!("{speed:.3}"),
    }
}

/// Formats a number of parameters: `270 M`, `8.0 B` or `405 B`.
pub fn format_parameter_count(parameters: u64) -> String {
    match parameters as f64 / 1e9 {
        size if size < 0.9995 => format!("{:.0} M", size * 1e3),
        size if size < 99.95 => format!("{size:.1} B"),
        size => format!("{size:.0} B"),
    }
}
