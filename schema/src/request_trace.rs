//! A recording of the requests to a server: when each one arrived, and its numbers of tokens.
//!
//! The format is that of the public Azure LLM inference traces (Patel et al., ISCA 2024): a line with the names of the
//! columns, and a line for each request. The time is a date with a time, or a number of seconds.
//!
//! ```text
//! TIMESTAMP,ContextTokens,GeneratedTokens
//! 2023-11-16 18:15:46.6805900,4808,10
//! 2023-11-16 18:15:50.9951690,3180,8
//! ```

use std::fmt::Write;
use std::time::Duration;

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;

use crate::workload::MAX_REQUESTS;

/// A request that arrives during a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// Nanoseconds from the start of the run; in a recording, from its first request.
    pub at_ns: u64,
    pub prompt_tokens: u32,
    pub generated_tokens: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {what}")]
pub struct RequestTraceError {
    pub line: usize,
    pub what: String,
}

/// The names of the columns, in lower case.
const COLUMNS: [&str; 3] = ["timestamp", "contexttokens", "generatedtokens"];

/// The longest time from the first request to the last. source: assumed, a year
pub const MAX_SPAN: Duration = Duration::from_hours(366 * 24);
/// [`MAX_SPAN`] in nanoseconds.
const MAX_SPAN_NS: i128 = MAX_SPAN.as_nanos() as i128;

/// Parses a recording, and returns its first `limit` requests in the order of arrival. Fails at the first line that is
/// not valid.
pub fn parse_requests(text: &str, limit: Option<u32>) -> Result<Vec<Arrival>, RequestTraceError> {
    // Spreadsheets begin a file with a byte order mark.
    let text = text.trim_start_matches('\u{feff}');
    let mut lines = (1..).zip(text.lines()).filter(|(_, text)| !text.trim().is_empty());
    let fail = |line, what: String| RequestTraceError { line, what };
    let (first, header) = lines.next().unwrap_or((1, ""));
    let names: Vec<String> = header.split(',').map(|name| name.trim().to_lowercase()).collect();
    let mut columns = [0; 3];
    for (column, name) in columns.iter_mut().zip(COLUMNS) {
        *column = names.iter().position(|it| it == name).ok_or_else(|| {
            fail(first, "this is not a recording of requests; it must begin with `TIMESTAMP,ContextTokens,GeneratedTokens`".into())
        })?;
    }
    let mut rows = Vec::new();
    for (line, text) in lines {
        let fields: Vec<&str> = text.split(',').map(str::trim).collect();
        let [time, prompt, generated] = columns.map(|column| fields.get(column).copied().unwrap_or_default());
        let time = nanoseconds(time).ok_or_else(|| {
            fail(line, format!("`{time}` is not a time: write seconds, or a date and time such as `2023-11-16 18:15:46.68`"))
        })?;
        let tokens = |name: &str, text: &str| {
            let number = text.parse::<u32>().ok().filter(|&number| number > 0);
            number.ok_or_else(|| {
                fail(line, format!("`{text}` is not a number of {name}: it must be at least 1"))
            })
        };
        rows.push((line, time, tokens("prompt tokens", prompt)?, tokens("generated tokens", generated)?));
        if rows.len() > MAX_REQUESTS as usize && limit.is_none() {
            return Err(fail(
                line,
                format!("there are more than {MAX_REQUESTS} requests: give the number of `requests`"),
            ));
        }
    }
    rows.sort_by_key(|&(_, time, ..)| time);
    rows.truncate(limit.unwrap_or(MAX_REQUESTS) as usize);
    let Some(&(_, start, ..)) = rows.first() else {
        return Err(fail(first, "the recording has no requests".into()));
    };
    let request = |(line, time, prompt_tokens, generated_tokens)| {
        let since: i128 = time - start;
        if since > MAX_SPAN_NS {
            return Err(fail(line, "this request is more than a year after the first one".into()));
        }
        Ok(Arrival { at_ns: since as u64, prompt_tokens, generated_tokens })
    };
    rows.into_iter().map(request).collect()
}

/// Fails if a request does not fit in a context of `context` tokens, and says which.
pub fn check_context(requests: &[Arrival], context: u32) -> Result<(), String> {
    let fits = |it: &&Arrival| u64::from(it.prompt_tokens) + u64::from(it.generated_tokens) <= context.into();
    let Some(Arrival { at_ns, prompt_tokens, generated_tokens }) = requests.iter().find(|it| !fits(it))
    else {
        return Ok(());
    };
    let seconds = *at_ns as f64 / 1e9;
    Err(format!(
        "the request {seconds} s after the first one has {prompt_tokens} prompt tokens and {generated_tokens} generated \
         ones, but the context is {context}"
    ))
}

/// Formats requests as [`parse_requests`] reads them.
pub fn format_requests(requests: &[Arrival]) -> String {
    let mut text = "TIMESTAMP,ContextTokens,GeneratedTokens\n".to_owned();
    for Arrival { at_ns, prompt_tokens, generated_tokens } in requests {
        let (seconds, rest) = (at_ns / 1_000_000_000, at_ns % 1_000_000_000);
        let _ = writeln!(text, "{seconds}.{rest:09},{prompt_tokens},{generated_tokens}");
    }
    text
}

/// Parses a time in nanoseconds, from any zero.
fn nanoseconds(text: &str) -> Option<i128> {
    if let Ok(seconds) = text.parse::<f64>() {
        return (seconds.is_finite() && seconds.abs() < 1e18).then_some((seconds * 1e9).round() as i128);
    }
    if let Ok(time) = text.parse::<Timestamp>() {
        return Some(time.as_nanosecond());
    }
    // Without an offset from UTC.
    let time: DateTime = text.parse().ok()?;
    time.to_zoned(TimeZone::UTC).ok().map(|time| time.timestamp().as_nanosecond())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_and_seconds_are_sorted_and_counted_from_the_first() {
        let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:50.9951690,3180,8\n\
                     2023-11-16 18:15:46.6805900,4808,10\n2024-05-10 00:00:00.009930+00:00,1,2\n";
        let parsed = parse_requests(azure, Some(2)).expect("valid");
        let request =
            |at_ns, prompt_tokens, generated_tokens| Arrival { at_ns, prompt_tokens, generated_tokens };
        assert_eq!(parsed, [request(0, 4808, 10), request(4_314_579_000, 3180, 8)]);
        let seconds = "generatedtokens, timestamp ,ContextTokens\r\n7,1.5,3\r\n\r\n9,2,4\r\n";
        assert_eq!(parse_requests(seconds, None), Ok(vec![request(0, 3, 7), request(500_000_000, 4, 9)]));
        assert_eq!(parse_requests(&format_requests(&parsed), None), Ok(parsed));
    }

    #[test]
    fn offsets_from_utc_count() {
        let text = "\u{feff}TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 02:00:00+02:00,1,2\n2024-05-10T00:00:01Z,3,4";
        let times: Vec<u64> =
            parse_requests(text, None).expect("valid").iter().map(|request| request.at_ns).collect();
        assert_eq!(times, [0, 1_000_000_000]);
    }

    #[test]
    fn requests_must_fit_in_the_context() {
        let request = |at_ns, prompt_tokens| Arrival { at_ns, prompt_tokens, generated_tokens: 2 };
        assert_eq!(check_context(&[request(0, 6), request(5, 8)], 10), Ok(()));
        let what = check_context(&[request(0, 6), request(1_500_000_000, 9)], 10).expect_err("11 tokens");
        assert!(what.starts_with("the request 1.5 s after the first one has 9 prompt tokens"), "{what}");
        assert!(check_context(&[request(0, u32::MAX)], u32::MAX).is_err());
    }

    #[test]
    fn errors_name_the_line() {
        let message = |text: &str| parse_requests(text, None).expect_err("invalid").to_string();
        let head = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
        assert!(message("").starts_with("line 1: this is not a recording of requests"));
        assert!(message("time,tokens\n1,2").starts_with("line 1: this is not"));
        assert_eq!(message(head), "line 1: the recording has no requests");
        assert!(message(&format!("{head}1,2,3\nsoon,2,3")).starts_with("line 3: `soon` is not a time"));
        assert!(message(&format!("{head}1,0,3")).starts_with("line 2: `0` is not a number of prompt tokens"));
        assert!(message(&format!("{head}1,2")).starts_with("line 2: `` is not a number of generated tokens"));
        assert!(message(&format!("{head}inf,2,3")).contains("is not a time"));
        assert!(
            message(&format!("{head}0,2,3\n1e15,2,3"))
                .starts_with("line 3: this request is more than a year")
        );
    }
}
