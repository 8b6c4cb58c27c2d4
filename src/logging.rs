//! Log messages on standard error, as text or as JSON lines.
//!
//! Log messages as text have no timestamps, and messages of level info have no prefix. The filter is a log level, or a
//! list of targets with log levels. The default filter shows messages of hearth itself, from level info on.

use std::fmt;
use std::io::{self, Write};
use std::str::FromStr;

use clap::ValueEnum;
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;

use crate::diagnostics::Failure;
use crate::output::escape_line;

const LOG_VARIABLE: &str = "HEARTH_LOG";

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines of human-readable text.
    Text,
    /// One JSON object per line, with a timestamp.
    Json,
}

/// Installs the global logger. `filter` is the value of the flag `--log`.
pub fn init(filter: Option<&str>, format: LogFormat) -> Result<(), Failure> {
    let (location, filter) = match filter {
        Some(filter) => ("--log", Some(filter.to_owned())),
        None => (LOG_VARIABLE, std::env::var(LOG_VARIABLE).ok().filter(|filter| !filter.trim().is_empty())),
    };
    let targets = match filter {
        Some(filter) => Targets::from_str(&filter).map_err(|error| {
            Failure::invalid(format!("invalid log filter `{filter}`: {error}"))
                .with_location(location)
                .with_hint(
                    "use a log level, such as `debug` or `off`, or a level for each target, such as `hearth=info,hyper=debug`",
                )
        })?,
        None => Targets::new().with_target("hearth", LevelFilter::INFO),
    };
    let layer = tracing_subscriber::fmt::layer().with_writer(|| LogWriter).with_ansi(false);
    let layer = layer.log_internal_errors(false);
    let registry = tracing_subscriber::registry().with(targets);
    match format {
        LogFormat::Text => registry.with(layer.event_format(TextFormatter)).init(),
        LogFormat::Json => registry.with(layer.json()).init(),
    }
    Ok(())
}

/// Writes log messages to standard error, each on one line without control characters.
struct LogWriter;

impl Write for LogWriter {
    /// Writes one message, which `tracing_subscriber` passes as a whole.
    fn write(&mut self, message: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(message);
        writeln!(io::stderr(), "{}", escape_line(text.trim_end_matches('\n')))?;
        Ok(message.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Formats a log message as text: a prefix for the log level, and no timestamp.
struct TextFormatter;

impl<S, N> FormatEvent<S, N> for TextFormatter
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        writer.write_str(match *event.metadata().level() {
            Level::ERROR => "error: ",
            Level::WARN => "warning: ",
            Level::INFO => "",
            Level::DEBUG => "debug: ",
            Level::TRACE => "trace: ",
        })?;
        context.format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}
