//! A server on 127.0.0.1 that speaks the hub's API, well or badly.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
pub const LIST_PATH: &str = "/api/models/owner/repo/revision/main?blobs=true";

/// A request as the server received it.
#[derive(Debug, Clone)]
pub struct Request {
    pub path: String,
    /// The first byte of a `Range` header.
    pub start: Option<usize>,
    pub authorization: Option<String>,
}

impl Request {
    pub fn is_for_a_file(&self) -> bool {
        self.path.contains("/resolve/")
    }
}

/// What the server sends. By default a body with its length.
pub struct Response {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
    /// Whether the length of the body is sent.
    pub has_length: bool,
    /// Closes the connection after this many bytes of the body.
    pub cut_after: Option<usize>,
    /// Sends nothing after this many bytes of the body, but keeps the connection open.
    pub stall_after: Option<usize>,
    /// Waits before it sends the body.
    pub delay: Duration,
}

impl Response {
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Response {
        let (headers, delay) = (Vec::new(), Duration::ZERO);
        Response {
            status,
            headers,
            body: body.into(),
            has_length: true,
            cut_after: None,
            stall_after: None,
            delay,
        }
    }

    pub fn with_header(mut self, name: &'static str, value: impl Into<String>) -> Response {
        self.headers.push((name, value.into()));
        self
    }

    pub fn redirect(target: impl Into<String>) -> Response {
        Response::new(302, "moved").with_header("Location", target)
    }

    fn send(&self, stream: &mut TcpStream) -> std::io::Result<()> {
        let mut head = format!("HTTP/1.1 {} Status\r\nConnection: close\r\n", self.status).into_bytes();
        if self.has_length {
            write!(head, "Content-Length: {}\r\n", self.body.len())?;
        }
        for (name, value) in &self.headers {
            write!(head, "{name}: {value}\r\n")?;
        }
        head.extend(b"\r\n");
        stream.write_all(&head)?;
        std::thread::sleep(self.delay);
        let end = self.cut_after.or(self.stall_after).unwrap_or(self.body.len()).min(self.body.len());
        stream.write_all(&self.body[..end])?;
        if self.stall_after.is_some() {
            // Ends when the client closes the connection.
            let _ = stream.read(&mut [0]);
        }
        Ok(())
    }
}

/// A repository `owner/repo` with files.
#[derive(Clone)]
pub struct Repo {
    pub files: Vec<(String, Vec<u8>)>,
}

impl Repo {
    pub fn new(files: &[(&str, &[u8])]) -> Repo {
        Repo { files: files.iter().map(|(path, bytes)| ((*path).to_owned(), bytes.to_vec())).collect() }
    }

    pub fn listing(&self) -> Value {
        let sibling = |(path, bytes): &(String, Vec<u8>)| {
            let lfs = json!({ "sha256": sha256(bytes), "size": bytes.len(), "pointerSize": 130 });
            json!({ "rfilename": path, "size": bytes.len(), "blobId": "b", "lfs": lfs })
        };
        json!({ "id": "owner/repo", "sha": COMMIT, "siblings": self.files.iter().map(sibling).collect::<Vec<_>>() })
    }

    /// Answers as the hub does.
    pub fn answer(&self, request: &Request) -> Response {
        if request.path == LIST_PATH {
            return Response::new(200, self.listing().to_string());
        }
        let path = request.path.strip_prefix(&format!("/owner/repo/resolve/{COMMIT}/"));
        let Some((_, bytes)) = self.files.iter().find(|(name, _)| Some(name.as_str()) == path) else {
            return Response::new(404, "{\"error\": \"not found\"}");
        };
        match request.start {
            Some(start) if start >= bytes.len() => Response::new(416, ""),
            Some(start) => {
                let range = format!("bytes {start}-{}/{}", bytes.len() - 1, bytes.len());
                Response::new(206, &bytes[start..]).with_header("Content-Range", range)
            }
            None => Response::new(200, bytes.clone()),
        }
    }
}

/// A server that answers each request on a connection of its own until the end of the test.
pub struct Server {
    pub endpoint: String,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    /// Starts a server. `answer` gets each request and the number of the requests for files before it.
    pub fn start(answer: impl Fn(&Request, usize) -> Response + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
        let requests: Arc<Mutex<Vec<Request>>> = Arc::default();
        let (log, answer) = (requests.clone(), Arc::new(answer));
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let (log, answer) = (log.clone(), answer.clone());
                std::thread::spawn(move || {
                    let Some(request) = read_request(&stream) else { return };
                    let number = {
                        let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
                        let number = log.iter().filter(|request| request.is_for_a_file()).count();
                        log.push(request.clone());
                        number
                    };
                    // A client that has closed the connection is no error of the server.
                    let _ = answer(&request, number).send(&mut stream);
                });
            }
        });
        Server { endpoint, requests }
    }

    pub fn serving(repo: Repo) -> Server {
        Server::start(move |request, _| repo.answer(request))
    }

    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the first bytes of the requests for files.
    pub fn starts(&self) -> Vec<usize> {
        let files = self.requests().into_iter().filter(Request::is_for_a_file);
        files.map(|request| request.start.unwrap_or(0)).collect()
    }
}

fn read_request(stream: &TcpStream) -> Option<Request> {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let path = lines.next()?.split(' ').nth(1)?.to_owned();
    let mut request = Request { path, start: None, authorization: None };
    for line in lines.take_while(|line| !line.is_empty()) {
        let (name, value) = line.split_once(':')?;
        match name.to_ascii_lowercase().as_str() {
            "range" => request.start = value.trim().strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok(),
            "authorization" => request.authorization = Some(value.trim().to_owned()),
            _ => {}
        }
    }
    Some(request)
}

pub fn sha256(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}
