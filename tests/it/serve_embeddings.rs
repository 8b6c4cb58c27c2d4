//! Tests of embeddings of `hearth serve`: they are equal on every ring and beside other requests.

use hearth_profiles::gguf;
use serde_json::{Value, json};

use crate::processes::{assert_rejected, model_path};
use crate::serve::Server;

const PATH: &str = "/v1/embeddings";
const TEXTS: [&str; 2] = ["In the beginning", "Blessed are the poor in spirit, for theirs is the kingdom"];

fn embeddings(server: &Server, body: &Value) -> Value {
    let (status, response) = server.post(PATH, body);
    assert_eq!(status, 200, "{body}: {response}");
    response
}

fn elements(response: &Value, index: usize) -> Vec<f32> {
    let object = &response["data"][index];
    assert_eq!((&object["object"], &object["index"]), (&json!("embedding"), &json!(index)));
    let elements = object["embedding"].as_array().unwrap_or_else(|| panic!("{response}"));
    elements.iter().map(|element| element.as_f64().expect("a number") as f32).collect()
}

/// Returns the sum of the products of the elements, which is the cosine of two vectors of length 1.
fn product(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[test]
fn embeddings_are_the_same_on_every_ring_and_beside_other_requests() {
    let alone = Server::start(0, &["--pooling", "last"]);
    let [first, second] = TEXTS.map(|text| embeddings(&alone, &json!({"input": text, "model": "psalm"})));
    assert_eq!((&first["object"], &first["model"]), (&json!("list"), &json!("psalm")));
    let [first, second] = [first, second].map(|response| elements(&response, 0));
    assert!(first.len() == 256 && first != second);
    assert!((product(&first, &first) - 1.0).abs() < 1e-5);
    let both = embeddings(&alone, &json!({"input": TEXTS}));
    assert_eq!([elements(&both, 0), elements(&both, 1)], [first.clone(), second.clone()]);

    // The file says how its embeddings are computed.
    let keys = [("llama.pooling_type", gguf::Value::U32(3))];
    let ring = Server::start_with_plan(2, |plan| plan, &keys, &["--sequences", "3"]);
    let completion = json!({"prompt": TEXTS[0], "max_tokens": 60, "temperature": 0});
    let (_, expected) = alone.post("/v1/completions", &completion);
    std::thread::scope(|scope| {
        let completions = [(); 3].map(|()| scope.spawn(|| ring.post("/v1/completions", &completion).1));
        for _ in 0..3 {
            let both = embeddings(&ring, &json!({"input": TEXTS}));
            assert_eq!([elements(&both, 0), elements(&both, 1)], [first.clone(), second.clone()]);
        }
        for completion in completions {
            assert_eq!(completion.join().expect("no panic")["choices"], expected["choices"]);
        }
    });
}

#[test]
fn embeddings_have_the_form_that_was_asked_for() {
    let server = Server::start(0, &["--pooling", "last"]);
    let whole = embeddings(&server, &json!({"input": TEXTS[0]}));
    // The same text as token ids, which are not changed: BOS is one of them.
    let (_, tokens) = server.post("/tokenize", &json!({"content": TEXTS[0], "add_special": true}));
    for input in [json!(tokens["tokens"]), json!([tokens["tokens"]]), json!([TEXTS[0]])] {
        assert_eq!(embeddings(&server, &json!({"input": input})), whole);
    }
    let count = &tokens["count"];
    assert_eq!(whole["usage"], json!({"prompt_tokens": count, "total_tokens": count}));
    // The first elements, with length 1 again.
    let short = embeddings(&server, &json!({"input": TEXTS[0], "dimensions": 8, "user": "me"}));
    let (short, whole) = (elements(&short, 0), elements(&whole, 0));
    assert!(short.len() == 8 && (product(&short, &short) - 1.0).abs() < 1e-5);
    let ratio = short[0] / whole[0];
    assert!(short.iter().zip(&whole).all(|(short, whole)| (short / whole - ratio).abs() < 1e-3 * ratio));
    let encoded = json!({"input": TEXTS[0], "encoding_format": "base64"});
    let encoded = embeddings(&server, &encoded)["data"][0]["embedding"].as_str().expect("a text").len();
    // Four characters for three bytes.
    assert_eq!(encoded, (256_usize * 4).div_ceil(3) * 4);
}

#[test]
fn invalid_requests_for_embeddings_get_an_error_that_says_why() {
    let server = Server::start(0, &["--pooling", "last"]);
    let cases = [
        (json!({}), "`input` is missing"),
        (json!({"input": []}), "`input` is missing"),
        (json!({"input": ""}), "empty text"),
        (json!({"input": ["a", ""]}), "empty text"),
        (json!({"input": [[]]}), "without tokens"),
        (json!({"input": {"text": "a"}}), "a string or a list"),
        (json!({"input": ["a", 1]}), "beside other values"),
        (json!({"input": [9_999_999]}), "there is no token 9999999"),
        (json!({"input": "word ".repeat(3000)}), "context_length_exceeded"),
        (json!({"input": vec![5; 1024]}), "send at most 1023 tokens"),
        (json!({"input": vec!["a"; 2049]}), "send at most 2048"),
        (json!({"input": "a", "dimensions": 257}), "it must be 1 to 256"),
        (json!({"input": "a", "dimensions": 0}), "it must be 1 to 256"),
        (json!({"input": "a", "encoding_format": "int8"}), "expected `float` or `base64`"),
        (json!({"input": "a", "truncate": true}), "`truncate` is not supported"),
    ];
    for (body, what) in cases {
        let (status, response) = server.post(PATH, &body);
        assert!(status == 400 && response["error"].to_string().contains(what), "{what}: {status} {response}");
    }
    assert_eq!(server.post(PATH, &json!({"input": "a", "model": "gpt-4"})).0, 404);
    let head = "Host: localhost\r\nContent-Type: application/json\r\nContent-Length: 14";
    let head = format!("POST {PATH} HTTP/1.0\r\n{head}\r\n\r\n");
    let response = server.send([head.as_bytes(), b"{\"input\":\"\xff\"}\n"].concat());
    assert!(response.starts_with("HTTP/1.0 400"), "{response}");
    // The longest text and the largest list that are accepted.
    embeddings(&server, &json!({"input": vec![5; 1023]}));
    let many = embeddings(&server, &json!({"input": vec!["a"; 2048], "dimensions": 1}));
    assert_eq!(many["data"].as_array().map(Vec::len), Some(2048));
}

#[test]
fn other_pooling_types_are_rejected_by_name() {
    let keys = [("llama.pooling_type", gguf::Value::U32(1))];
    let server = Server::start_with_plan(0, |plan| plan, &keys, &[]);
    let (status, response) = server.post(PATH, &json!({"input": "a"}));
    assert_eq!((status, &response["error"]["code"]), (400, &json!("no_embeddings")));
    assert!(response.to_string().contains("pooling type `mean` is not supported"), "{response}");
    for name in ["none", "mean", "cls", "rank", "first"] {
        let what = format!("pooling type `{name}` is not supported, because it");
        assert_rejected(&["serve", &model_path("q4_k"), "--pooling", name], &[&what]);
    }
}
