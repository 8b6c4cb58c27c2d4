//! Tests of what requests to `hearth serve` may ask of answers: JSON, tools, grammars, log-probabilities.

use serde_json::{Value, json};

use crate::processes::{model_path, run_json};
use crate::serve::Server;

const CHAT: &str = "/v1/chat/completions";

/// A question, with more fields.
fn question(more: &Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "Who art thou?"}]});
    let fields = body.as_object_mut().expect("an object");
    fields.extend(more.as_object().expect("an object").clone());
    body
}

fn tool(name: &str) -> Value {
    let parameters = json!({
        "type": "object",
        "properties": {"psalm": {"type": "integer", "minimum": 1, "maximum": 150}, "loud": {"type": "boolean"}},
        "required": ["psalm", "loud"],
        "additionalProperties": false
    });
    json!({"type": "function", "function": {"name": name, "description": "x", "parameters": parameters}})
}

/// Parses the arguments of a call, and checks that they are valid.
fn check_arguments(arguments: &Value) {
    let arguments: Value = serde_json::from_str(arguments.as_str().expect("a text")).expect("JSON");
    let psalm = arguments["psalm"].as_u64().expect("a number");
    assert!((1..=150).contains(&psalm) && arguments["loud"].is_boolean(), "{arguments}");
    assert_eq!(arguments.as_object().map(serde_json::Map::len), Some(2));
}

#[test]
fn answers_have_the_form_that_was_asked_for() {
    let server = Server::start(1, &[]);
    let ask = |more: Value| {
        let (status, response) = server.post(CHAT, &question(&more));
        assert_eq!(status, 200, "{more}: {response}");
        response["choices"][0].clone()
    };
    let schema = json!({
        "type": "object",
        "properties": {"names": {"type": "array", "items": {"enum": ["David", "Saul"]}, "minItems": 1, "maxItems": 3}},
        "required": ["names"],
        "additionalProperties": false
    });
    let format = json!({"type": "json_schema", "json_schema": {"name": "names", "schema": schema}});
    for seed in 0..8 {
        let choice = ask(json!({"response_format": format, "seed": seed}));
        let text = choice["message"]["content"].as_str().expect("a text");
        let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        let names = value["names"].as_array().expect("a list");
        assert!((1..=3).contains(&names.len()) && names.iter().all(|name| name == "David" || name == "Saul"));
        assert_eq!(choice["finish_reason"], "stop");
    }
    let choice = ask(json!({"grammar": "start: \"yea\" | \"nay\""}));
    assert!(["yea", "nay"].contains(&choice["message"]["content"].as_str().expect("a text")), "{choice}");

    let tools = json!([tool("sing"), tool("pray.loudly")]);
    for seed in 0..4 {
        let choice = ask(
            json!({"tools": tools, "tool_choice": "required", "parallel_tool_calls": false, "stop": ["\n"], "seed": seed}),
        );
        let calls = choice["message"]["tool_calls"].as_array().unwrap_or_else(|| panic!("{choice}"));
        assert_eq!(calls.len(), 1);
        assert!(
            choice["finish_reason"] == "tool_calls" && choice["message"]["content"].is_null(),
            "{choice}"
        );
        check_arguments(&calls[0]["function"]["arguments"]);
    }
    let named = json!({"type": "function", "function": {"name": "pray.loudly"}});
    let request = question(&json!({"tools": tools, "tool_choice": named, "parallel_tool_calls": false}));
    let deltas: Vec<Value> =
        server.stream(CHAT, request).iter().map(|event| event["choices"][0]["delta"].clone()).collect();
    let functions = || deltas.iter().map(|delta| &delta["tool_calls"][0]["function"]);
    let names: Vec<&str> = functions().filter_map(|function| function["name"].as_str()).collect();
    let arguments: String = functions().filter_map(|function| function["arguments"].as_str()).collect();
    assert_eq!(names, ["pray.loudly"], "{deltas:?}");
    check_arguments(&arguments.into());
    // The next turn has the call and its result.
    let call =
        json!({"id": "1", "type": "function", "function": {"name": "sing", "arguments": "{\"psalm\": 1}"}});
    let messages = json!([
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Sing."},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "la"}
    ]);
    let (status, response) =
        server.post(CHAT, &question(&json!({"messages": messages, "tools": tools, "max_tokens": 4})));
    assert_eq!(status, 200, "{response}");
}

#[test]
fn log_probabilities_are_those_of_the_tokens() {
    let server = Server::start(0, &[]);
    let greedy = json!({"logprobs": true, "top_logprobs": 2, "temperature": 0, "max_tokens": 6});
    let (_, response) = server.post(CHAT, &question(&greedy));
    let choice = &response["choices"][0];
    let content = choice["logprobs"]["content"].as_array().expect("log-probabilities");
    let text: String = content.iter().filter_map(|token| token["token"].as_str()).collect();
    assert_eq!(text.trim(), choice["message"]["content"].as_str().expect("a text").trim());
    for token in content {
        let top = token["top_logprobs"].as_array().expect("a list");
        assert!(top.len() == 2 && top[0]["token"] == token["token"], "the most probable is greedy: {token}");
        assert!(top[0]["logprob"].as_f64() >= top[1]["logprob"].as_f64());
        assert!(token["logprob"].as_f64().is_some_and(|logprob| logprob <= 0.0));
    }
    let streamed: Vec<Value> = server
        .stream(CHAT, question(&greedy))
        .iter()
        .map(|event| event["choices"][0]["logprobs"]["content"].clone())
        .collect();
    let streamed: Vec<&Value> = streamed.iter().filter_map(Value::as_array).flatten().collect();
    assert_eq!(streamed, content.iter().collect::<Vec<_>>());
    let text = json!({"prompt": "the LORD", "logprobs": 1, "temperature": 0, "max_tokens": 3});
    let (_, response) = server.post("/v1/completions", &text);
    let logprobs = &response["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"].as_array().map(Vec::len), Some(3), "{response}");
    assert_eq!(logprobs["text_offset"][0], 0);
}

#[test]
fn texts_become_tokens_and_text_again() {
    let server = Server::start(0, &["--cors-origin", "https://chat.example"]);
    let text = "Blessed is the man";
    let (status, response) = server.post("/tokenize", &json!({"content": text, "add_special": true}));
    let expected = run_json(&["tokenize", &model_path("q4_k"), text]);
    let ids: Vec<&Value> =
        expected["tokens"].as_array().expect("tokens").iter().map(|token| &token["id"]).collect();
    assert_eq!((status, json!(ids)), (200, response["tokens"].clone()), "{response}");
    let (_, pieces) = server.post("/tokenize", &json!({"content": text, "with_pieces": true}));
    assert!(pieces["tokens"][0]["piece"].is_string(), "{pieces}");
    let (_, back) = server.post("/detokenize", &json!({"tokens": response["tokens"]}));
    assert_eq!(back["content"], text);
    assert_eq!(server.post("/detokenize", &json!({"tokens": [9_999_999]})).0, 400);
    assert_eq!(server.post("/tokenize", &json!({"text": "a"})).0, 400);
    let (_, models) = server.get("/v1/models");
    assert!(models.contains("\"max_model_len\":1024"), "{models}");
    // A page of another origin may ask what it may do, without the token.
    let preflight = |origin: &str| {
        let headers = format!("Origin: {origin}\r\nAccess-Control-Request-Method: POST\r\n");
        server.send(crate::serve::with_headers("OPTIONS", CHAT, &headers, ""))
    };
    let allowed = "access-control-allow-origin: https://chat.example";
    assert!(preflight("https://chat.example").contains(allowed));
    assert!(!preflight("https://other.example").contains("access-control-allow-origin"));
}
