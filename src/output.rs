//! How is something printed, when whoever reads it may stop reading?
//!
//! A closed pipe ends the program in silence, as other tools do; a full disk is an error like any other.

use std::fmt;
use std::io::{self, Write};

use crate::diagnostics::Failure;

/// Prints to standard output.
pub fn print(text: fmt::Arguments) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_fmt(text).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => std::process::exit(0),
        Err(error) => Err(Failure::running(format!("cannot write the output: {error}"))),
        Ok(()) => Ok(()),
    }
}

/// Prints a line or more to standard output, or returns why it cannot.
macro_rules! say {
    ($($part:tt)*) => {
        $crate::output::print(format_args!($($part)*))?
    };
}
pub(crate) use say;

/// Prints a line or more to standard error, if anybody reads it.
macro_rules! tell {
    ($($part:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($part)*);
    }};
}
pub(crate) use tell;
