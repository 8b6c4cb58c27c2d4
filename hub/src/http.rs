//! Requests to the hub: redirects, the token, and what a status code means.
//!
//! Redirects are followed here and not by the HTTP client. So the token is sent to the hub only, a redirect never
//! leaves HTTPS, and the number of redirects is limited.

use std::fmt::Write;
use std::time::Duration;

use ureq::http::header::{AUTHORIZATION, LOCATION, RANGE, RETRY_AFTER};
use ureq::http::{Response, Uri};
use ureq::{Agent, Body, Proxy};

use crate::config::Token;
use crate::{HubConfig, HubError, RetryPolicy};

/// Maximum number of redirects of a request. source: assumed; a renamed repository and a download server need three
const MAX_REDIRECTS: usize = 6;
/// Longest URL in an error message, in characters. source: assumed, a line
const MAX_SHOWN_URL: usize = 120;

/// Scheme, host, port and path of the hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Origin {
    is_https: bool,
    /// In lower case, with the port.
    authority: String,
    /// The path before those of the hub, for a mirror; without a slash at the end.
    path: String,
}

impl Origin {
    pub(crate) fn parse(url: &str) -> Result<Origin, &'static str> {
        let url: Uri = url.parse().map_err(|_| "it is not a URL")?;
        if url.query().is_some() {
            return Err("it has a query");
        }
        Self::of(&url)
    }

    fn of(url: &Uri) -> Result<Origin, &'static str> {
        let is_https = match url.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err("it begins with neither https:// nor http://"),
        };
        let authority = url.authority().ok_or("it has no host")?;
        if authority.as_str().contains('@') || authority.host().is_empty() {
            return Err("it has no host, or a password");
        }
        let port = authority.port_u16().unwrap_or(if is_https { 443 } else { 80 });
        let authority = format!("{}:{port}", authority.host().to_ascii_lowercase());
        Ok(Origin { is_https, authority, path: url.path().trim_end_matches('/').to_owned() })
    }

    fn is_same_server(&self, other: &Origin) -> bool {
        self.is_https == other.is_https && self.authority == other.authority
    }

    fn is_loopback(&self) -> bool {
        let host = self.authority.rsplit_once(':').map_or("", |(host, _)| host);
        let address = host.trim_matches(['[', ']']).parse::<std::net::IpAddr>();
        host == "localhost" || address.is_ok_and(|address| address.is_loopback())
    }

    /// Returns the URL of a path of the hub. Each segment is percent-encoded.
    pub(crate) fn url<'s>(&self, segments: impl IntoIterator<Item = &'s str>) -> String {
        let (scheme, default_port) = if self.is_https { ("https", ":443") } else { ("http", ":80") };
        let authority = self.authority.strip_suffix(default_port).unwrap_or(&self.authority);
        let mut url = format!("{scheme}://{authority}{}", self.path);
        for segment in segments {
            url.push('/');
            for byte in segment.bytes() {
                if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
                    url.push(char::from(byte));
                } else {
                    let _ = write!(url, "%{byte:02X}");
                }
            }
        }
        url
    }
}

/// Why a request has no usable response.
#[derive(Debug)]
pub(crate) enum RequestError {
    /// The same request may succeed later, after the time that the server asks for.
    Transient {
        error: HubError,
        retry_after: Option<Duration>,
    },
    Permanent(HubError),
}

impl RequestError {
    pub(crate) fn transient(error: HubError) -> Self {
        RequestError::Transient { error, retry_after: None }
    }
}

/// A client for one hub.
#[derive(Debug, Clone)]
pub(crate) struct HttpClient {
    agent: Agent,
    pub(crate) endpoint: Origin,
    token: Option<Token>,
    listing_timeout: Duration,
}

impl HttpClient {
    pub(crate) fn new(config: &HubConfig) -> HttpClient {
        let RetryPolicy { connect, response, no_data, listing, .. } = config.retry_policy;
        let endpoint = config.endpoint.clone();
        // A proxy cannot reach this machine's loopback addresses.
        let proxy = if endpoint.is_loopback() { None } else { Proxy::try_from_env() };
        let settings = Agent::config_builder()
            .user_agent(concat!("hearth/", env!("CARGO_PKG_VERSION")))
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .proxy(proxy)
            .timeout_resolve(Some(connect))
            .timeout_connect(Some(connect))
            .timeout_send_request(Some(response))
            .timeout_recv_response(Some(response))
            .timeout_per_read(Some(no_data))
            .timeout_per_write(Some(no_data))
            .build();
        let is_private = endpoint.is_https || endpoint.is_loopback();
        if config.token.is_some() && !is_private {
            tracing::warn!("the token is not sent, because the hub's address does not begin with https://");
        }
        let token = config.token.clone().filter(|_| is_private);
        HttpClient { agent: settings.into(), endpoint, token, listing_timeout: listing }
    }

    /// Interrupts the requests of this client, also those that wait for data. The client cannot be used any more.
    pub(crate) fn shut_down(&self) {
        self.agent.clone().shutdown();
    }

    /// Requests a document, whose whole transfer has a deadline.
    pub(crate) fn get_document(&self, url: &str) -> Result<Response<Body>, RequestError> {
        self.get(url, None, Some(self.listing_timeout))
    }

    /// Requests a file from the byte `start` on.
    pub(crate) fn get_file(&self, url: &str, start: u64) -> Result<Response<Body>, RequestError> {
        self.get(url, (start > 0).then_some(start), None)
    }

    /// Sends a request and follows redirects. The result is a response with a status that [`status_error`] accepts.
    fn get(
        &self,
        url: &str,
        start: Option<u64>,
        timeout: Option<Duration>,
    ) -> Result<Response<Body>, RequestError> {
        let mut url = url.to_owned();
        for _ in 0..=MAX_REDIRECTS {
            let server = self.check_url(&url).map_err(RequestError::Permanent)?;
            let mut request = self.agent.get(&url).header("Accept-Encoding", "identity");
            if let Some(start) = start {
                request = request.header(RANGE, format!("bytes={start}-"));
            }
            if let Some(token) = self.token.as_ref().filter(|_| server.is_same_server(&self.endpoint)) {
                request = request.header(AUTHORIZATION, format!("Bearer {}", token.0));
            }
            let request = request.config().timeout_global(timeout).build();
            let response = request.call().map_err(|error| connection_error(&url, &error))?;
            if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                let is_hub = server.is_same_server(&self.endpoint);
                return self.status_error(&url, is_hub, &response).map_or(Ok(response), Err);
            }
            url = redirect_target(&server, &response).map_err(|reason| {
                let what = format!("the server redirects to a wrong address: {reason}");
                RequestError::Permanent(HubError::failed(what).with_location(shown(&url)))
            })?;
        }
        let what = format!("the server redirects more than {MAX_REDIRECTS} times");
        Err(RequestError::Permanent(HubError::failed(what).with_location(shown(&url))))
    }

    /// Checks that a URL may be requested: only a hub that the user gave with http:// may lead to http://.
    fn check_url(&self, url: &str) -> Result<Origin, HubError> {
        let refused = |reason: &str| {
            HubError::failed(format!("refused to open a URL: {reason}")).with_location(shown(url))
        };
        let server = url
            .parse::<Uri>()
            .map_err(|_| "it is not a URL")
            .and_then(|url| Origin::of(&url))
            .map_err(refused)?;
        if !server.is_https && self.endpoint.is_https {
            return Err(refused("it does not begin with https://"));
        }
        Ok(server)
    }

    /// Returns the error for a status; `None` for the content, and for status 416, which callers with a range handle.
    fn status_error(&self, url: &str, is_hub: bool, response: &Response<Body>) -> Option<RequestError> {
        let status = response.status().as_u16();
        let location = shown(url);
        Some(match status {
            200 | 206 | 416 => return None,
            401 | 403 if is_hub => {
                let (what, hint) = if self.token.is_some() {
                    (
                        "the hub refuses access: the repository does not exist, or the token is wrong or may not read it",
                        "check the name and the token; for a gated model, accept its terms on its web page",
                    )
                } else {
                    (
                        "the hub refuses access: the repository does not exist, or is private or gated",
                        "check the name; for a private or gated model, accept its terms on its web page, and set \
                         `HF_TOKEN` to a token of your account",
                    )
                };
                RequestError::Permanent(
                    HubError::invalid(format!("{what} (HTTP status {status})"))
                        .with_location(location)
                        .with_hint(hint),
                )
            }
            404 if is_hub => RequestError::Permanent(
                HubError::invalid("there is no such repository or file on the hub (HTTP status 404)")
                    .with_location(location)
                    .with_hint(
                        "check the owner and the name; they are part of the address of the model's web page",
                    ),
            ),
            429 => RequestError::Transient {
                error: HubError::unreachable("the hub refuses further requests for now (HTTP status 429)")
                    .with_location(location)
                    .with_hint("wait, or set `HF_TOKEN` to a token of your account, which raises the limit"),
                retry_after: retry_after(response),
            },
            408 | 425 | 500..=599 => RequestError::Transient {
                error: HubError::unreachable(format!("the server failed with HTTP status {status}"))
                    .with_location(location),
                retry_after: retry_after(response),
            },
            _ => RequestError::Permanent(
                HubError::failed(format!("the server answered with HTTP status {status}"))
                    .with_location(location),
            ),
        })
    }
}

fn connection_error(url: &str, error: &ureq::Error) -> RequestError {
    let what = match error {
        ureq::Error::Timeout(_) => format!("the server did not answer in time ({error})"),
        _ => format!("cannot reach the server: {error}"),
    };
    let error_at = |hint| HubError::unreachable(what).with_location(shown(url)).with_hint(hint);
    match error {
        ureq::Error::Tls(_) | ureq::Error::Rustls(_) | ureq::Error::BadUri(_) | ureq::Error::TlsRequired => {
            RequestError::Permanent(error_at(
                "the connection is not secure: check the clock of this machine and its network",
            ))
        }
        _ => RequestError::transient(error_at(
            "check the network; `HF_HUB_OFFLINE=1` uses downloaded models only",
        )),
    }
}

/// Returns the absolute URL of a redirect of `server`.
fn redirect_target(server: &Origin, response: &Response<Body>) -> Result<String, &'static str> {
    let target = response.headers().get(LOCATION).ok_or("it has no Location")?;
    let target = target.to_str().map_err(|_| "the Location is not text")?;
    if target.starts_with('/') && !target.starts_with("//") {
        let root = Origin { path: String::new(), ..server.clone() };
        return Ok(format!("{}{target}", root.url([])));
    }
    let is_url = target.parse::<Uri>().is_ok_and(|url| Origin::of(&url).is_ok());
    if is_url { Ok(target.to_owned()) } else { Err("it is neither a path nor a URL of a web server") }
}

fn retry_after(response: &Response<Body>) -> Option<Duration> {
    let seconds = response.headers().get(RETRY_AFTER)?.to_str().ok()?;
    seconds.trim().parse().ok().map(Duration::from_secs)
}

/// Returns a URL for error messages, without its query: the queries of download servers have signatures.
fn shown(url: &str) -> String {
    let url = url.split(['?', '#']).next().unwrap_or_default();
    let short: String = url.escape_debug().take(MAX_SHOWN_URL).collect();
    if short.len() < url.len() { format!("{short}..") } else { short }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_encoded_and_compared_by_server() {
        let hub = Origin::parse("https://Hub.example/mirror/").expect("a URL");
        assert_eq!(hub.url(["a", "b c", "ü?#.gguf"]), "https://hub.example/mirror/a/b%20c/%C3%BC%3F%23.gguf");
        let same = |url: &str| Origin::parse(url).is_ok_and(|other| other.is_same_server(&hub));
        assert!(same("https://hub.example") && same("https://HUB.example:443/x"));
        assert!(
            !same("http://hub.example:443")
                && !same("https://hub.example.evil")
                && !same("https://hub.example:444")
        );
        for (url, is_loopback) in [
            ("http://127.0.0.1:80", true),
            ("http://[::1]:1", true),
            ("http://localhost", true),
            ("http://127.0.0.1.evil.example", false),
        ] {
            assert_eq!(Origin::parse(url).expect("a URL").is_loopback(), is_loopback, "{url}");
        }
    }

    #[test]
    fn secure_hub_never_leads_to_plain_http() {
        let client = |endpoint: &str| {
            let variables = [("HF_HOME", "unused"), ("HF_ENDPOINT", endpoint)];
            let config = HubConfig::from_variables(|name| {
                variables.iter().find(|(other, _)| *other == name).map(|(_, value)| value.into())
            });
            HttpClient::new(&config.expect("valid"))
        };
        let secure = client("https://hub.example");
        assert!(secure.check_url("https://cdn.example/x").is_ok());
        for refused in ["http://hub.example/x", "http://127.0.0.1/x", "file:///x", "data:,x", ""] {
            assert!(secure.check_url(refused).is_err(), "{refused}");
        }
        assert!(
            client("http://hub.example").check_url("http://cdn.example/x").is_ok(),
            "the user chose plain HTTP"
        );
    }

    #[test]
    fn shown_urls_have_no_signatures_and_no_control_characters() {
        assert_eq!(shown("https://a.example/b?Signature=secret"), "https://a.example/b");
        assert!(!shown("https://a.example/\u{1b}[31m").contains('\u{1b}'));
        assert!(shown(&format!("https://a.example/{}", "b".repeat(4000))).len() < 200);
    }
}
