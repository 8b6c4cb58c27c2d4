//! Settings of the hub: address, token, cache folder and deadlines, from the variables that Hugging Face's tools use.

use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::time::Duration;

use crate::HubError;
use crate::http::Origin;

const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
/// Maximum length of a token, in bytes. source: assumed, far longer than a token of the hub
const MAX_TOKEN_LEN: u64 = 4096;

/// How long each wait may last, and how often a request is repeated.
#[derive(Debug, Clone, Copy)]
pub struct RetryPolicy {
    /// Time limit for finding the address of the host and opening a connection.
    pub connect: Duration,
    /// Time limit for the headers of a response.
    pub response: Duration,
    /// Time limit for the next bytes of a response.
    pub no_data: Duration,
    /// Time limit for the list of the files of a repository.
    pub listing: Duration,
    /// Maximum number of attempts in a row that bring no data. Each pause is twice the pause before.
    pub attempts: u32,
    /// The first pause between two attempts.
    pub first_pause: Duration,
    /// The longest pause that a server may ask for.
    pub max_pause: Duration,
    /// Time limit for another process that downloads the same file and makes no progress.
    pub other_process: Duration,
}

impl Default for RetryPolicy {
    /// source: assumed; a phone's network pauses for several seconds, and a person waits about a minute
    fn default() -> Self {
        RetryPolicy {
            connect: Duration::from_secs(15),
            response: Duration::from_secs(30),
            no_data: Duration::from_secs(30),
            listing: Duration::from_mins(1),
            attempts: 5,
            first_pause: Duration::from_secs(1),
            max_pause: Duration::from_mins(1),
            other_process: Duration::from_mins(10),
        }
    }
}

/// The settings of a [`Hub`](crate::Hub).
#[derive(Debug, Clone)]
pub struct HubConfig {
    pub(crate) endpoint: Origin,
    pub(crate) token: Option<Token>,
    /// The folder with a folder for each repository.
    pub(crate) cache: PathBuf,
    /// Whether only the cache is used.
    pub(crate) is_offline: bool,
    pub(crate) retry_policy: RetryPolicy,
}

/// A secret that is sent to the hub and is not printed.
#[derive(Clone)]
pub(crate) struct Token(pub(crate) String);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(..)")
    }
}

impl HubConfig {
    /// Reads the settings from the environment: `HF_ENDPOINT`, `HF_TOKEN` or the file `token` in `HF_HOME`,
    /// `HF_HUB_CACHE` or the folder `hub` in `HF_HOME`, and `HF_HUB_OFFLINE`. `HF_HOME` is `~/.cache/huggingface` by
    /// default.
    pub fn from_env() -> Result<HubConfig, HubError> {
        Self::from_variables(|name| std::env::var_os(name))
    }

    /// Reads the settings from variables like [`from_env`](Self::from_env).
    pub fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Result<HubConfig, HubError> {
        let text = |name: &str| variable(name).map(|value| value.to_string_lossy().trim().to_owned());
        let text = |name: &str| text(name).filter(|text| !text.is_empty());
        let home_folder = variable("HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
        let folder = |name: &str| {
            let path = PathBuf::from(variable(name).filter(|path| !path.is_empty())?);
            // Python's tools expand the tilde, which a shell leaves as it is inside quotes.
            match (path.strip_prefix("~"), &home_folder) {
                (Ok(rest), Some(home)) => Some(home.join(rest)),
                _ => Some(path),
            }
        };
        let default_home = || {
            Some(
                folder("XDG_CACHE_HOME")
                    .or_else(|| Some(home_folder.as_ref()?.join(".cache")))?
                    .join("huggingface"),
            )
        };
        let hf_home = folder("HF_HOME").or_else(default_home);
        let cache =
            folder("HF_HUB_CACHE").or_else(|| Some(hf_home.as_ref()?.join("hub"))).ok_or_else(|| {
                HubError::invalid("there is no folder for downloaded models")
                    .with_hint("set `HF_HOME` to a folder")
            })?;
        let named = text("HF_ENDPOINT");
        let endpoint = Origin::parse(named.as_deref().unwrap_or(DEFAULT_ENDPOINT)).map_err(|reason| {
            HubError::invalid(format!("this is not the address of a hub: {reason}"))
                .with_location("HF_ENDPOINT")
                .with_hint(format!("use a URL such as {DEFAULT_ENDPOINT}"))
        })?;
        let token_file = folder("HF_TOKEN_PATH").or_else(|| Some(hf_home?.join("token")));
        let token = match (text("HF_TOKEN"), token_file) {
            (Some(token), _) => Some(checked_token(token, "HF_TOKEN")?),
            (None, Some(path)) => read_token(&path)
                .map(|token| checked_token(token, &path.display().to_string()))
                .transpose()?,
            (None, None) => None,
        };
        let is_offline = text("HF_HUB_OFFLINE")
            .is_some_and(|value| ["1", "ON", "YES", "TRUE"].contains(&value.to_ascii_uppercase().as_str()));
        Ok(HubConfig { endpoint, token, cache, is_offline, retry_policy: RetryPolicy::default() })
    }

    #[must_use]
    pub fn with_retry_policy(self, retry_policy: RetryPolicy) -> Self {
        HubConfig { retry_policy, ..self }
    }
}

/// Reads a file with a token; `None` if there is no such file or it is empty.
fn read_token(path: &std::path::Path) -> Option<String> {
    let mut text = String::new();
    File::open(path).ok()?.take(MAX_TOKEN_LEN + 1).read_to_string(&mut text).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// Checks that a token can be sent in a header.
fn checked_token(token: String, location: &str) -> Result<Token, HubError> {
    if token.len() as u64 <= MAX_TOKEN_LEN && token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Ok(Token(token));
    }
    Err(HubError::invalid("the token must be one word of printable characters")
        .with_location(location)
        .with_hint("copy the token from the settings of your account on the hub; it begins with `hf_`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(variables: &[(&str, &str)]) -> Result<HubConfig, HubError> {
        HubConfig::from_variables(|name| {
            variables.iter().find(|(other, _)| *other == name).map(|(_, value)| value.into())
        })
    }

    #[test]
    fn folders_are_those_of_other_tools() {
        for (variables, cache) in [
            (&[("HOME", "/h")][..], "/h/.cache/huggingface/hub"),
            (&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")], "/x/huggingface/hub"),
            (&[("HOME", "/h"), ("HF_HOME", "~/models")], "/h/models/hub"),
            (&[("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/c")], "/c"),
            (&[("HF_HOME", "/hf"), ("HF_HUB_CACHE", "")], "/hf/hub"),
        ] {
            assert_eq!(config(variables).expect("valid").cache, PathBuf::from(cache));
        }
        assert!(config(&[]).is_err(), "there is no home folder");
    }

    #[test]
    fn token_comes_from_the_variable_or_the_file() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let home = folder.path().to_str().expect("UTF-8");
        let token = |variables: &[(&str, &str)]| {
            let all = [&[("HF_HOME", home)], variables].concat();
            config(&all).map(|config| config.token.map(|token| token.0))
        };
        assert_eq!(token(&[]).expect("valid"), None);
        std::fs::write(folder.path().join("token"), "hf_file\n").expect("it is ours");
        assert_eq!(token(&[]).expect("valid").as_deref(), Some("hf_file"));
        assert_eq!(token(&[("HF_TOKEN", " hf_variable ")]).expect("valid").as_deref(), Some("hf_variable"));
        for wrong in ["two words", "a\r\nX-Header: b", "schlüssel"] {
            let error = token(&[("HF_TOKEN", wrong)]).expect_err("no header value");
            assert_eq!(error.location(), Some("HF_TOKEN"));
            assert!(!error.to_string().contains(wrong), "secrets are not printed");
        }
        let shown = format!("{:?}", config(&[("HF_HOME", home), ("HF_TOKEN", "hf_secret")]));
        assert!(!shown.contains("hf_secret"), "{shown}");
    }

    #[test]
    fn endpoint_is_a_url_without_a_query() {
        for right in ["https://huggingface.co/", "http://127.0.0.1:8080", "https://mirror.example/hf/"] {
            assert!(config(&[("HOME", "/h"), ("HF_ENDPOINT", right)]).is_ok(), "{right}");
        }
        for wrong in [
            "huggingface.co",
            "ftp://a.example",
            "file:///etc",
            "https://",
            "https://u:p@a.example",
            "https://a.example/?q",
            "/x",
        ] {
            assert!(config(&[("HOME", "/h"), ("HF_ENDPOINT", wrong)]).is_err(), "{wrong}");
        }
        let offline = |value| config(&[("HOME", "/h"), ("HF_HUB_OFFLINE", value)]).expect("valid").is_offline;
        assert!(offline("1") && offline("true") && !offline("0") && !offline(""));
    }
}
