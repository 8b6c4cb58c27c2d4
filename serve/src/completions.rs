//! The endpoints of chat and text completions: from a request to generations in the ring, and to the response.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use hearth_ring::{Request as RingRequest, SequenceOutput};
use hearth_runtime::chat::{JsonValue, THOUGHT_END, THOUGHT_START};
use hearth_runtime::tokenizer::Fragment;
use hearth_runtime::{
    ChatMessage, ExecError, GrammarCompiler, GrammarMatcher, Sampler, Tokenizer, ToolSyntax,
};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::answer::{Answer, AnswerParser, AnswerSyntax};
use crate::body::RequestBody;
use crate::chat::{ChatFormat, Thinking};
use crate::connections::ResponseGuard;
use crate::constraint::TextFormat;
use crate::error::ApiError;
use crate::generation::{AnswerFormat, Chunk, FinishReason, Generation, PromptTokens};
use crate::logprobs::TokenLogprobs;
use crate::metrics::Usage;
use crate::request::{CompletionRequest, GenerationParams};
use crate::response::{self, FinishedAnswer, ResponseKind, ResponseMetadata};
use crate::{AppState, unix_time};

/// Default of `max_tokens` for text completions. source: OpenAI's API reference
const DEFAULT_COMPLETION_TOKENS: u32 = 16;

pub async fn create_chat_completion(
    State(state): State<Arc<AppState>>,
    body: Result<RequestBody, ApiError>,
) -> Response {
    let parse = |state: &AppState, body: &[u8], id| {
        let mut request = CompletionRequest::from_json(body)?;
        let params = state.params(&request, id)?;
        let chat = state.chat_format()?;
        let (messages, tools) = (request.take_messages()?, request.take_tool_descriptions());
        let of_tools: usize = tools.iter().map(JsonValue::text_bytes).sum();
        let of_messages: usize = messages.iter().map(ChatMessage::text_bytes).sum();
        state.check_length("messages", of_messages + of_tools)?;
        let encoded = chat.encode(&state.tokenizer, messages, tools);
        let (tokens, thinking) = encoded.map_err(|error| ApiError::invalid("messages", error.to_string()))?;
        let grammar = state.compile_grammar(&params, &chat.syntax, thinking)?;
        let tools = params.constraint.can_call().then(|| chat.syntax.clone());
        let can_follow_text = params.constraint.can_follow_text(&chat.syntax);
        let syntax = Some(AnswerSyntax { thinking, tools, can_follow_text });
        Ok(ParsedRequest { id, prompts: vec![tokens], params, grammar, syntax })
    };
    respond(&state, ResponseKind::Chat, body, parse).await
}

pub async fn create_completion(
    State(state): State<Arc<AppState>>,
    body: Result<RequestBody, ApiError>,
) -> Response {
    let parse = |state: &AppState, body: &[u8], id| {
        let mut request = CompletionRequest::from_json(body)?;
        let params = state.params(&request, id)?;
        if !params.constraint.tools.is_empty() {
            let message = "`tools` is not supported for text completions: use /v1/chat/completions";
            return Err(ApiError::invalid("tools", message));
        }
        let encode = |tokenizer: &Tokenizer, text: &str| tokenizer.encode(text, false);
        let prompts = request.take_prompts()?.into_iter();
        let prompts = prompts.map(|prompt| state.prompt_tokens("prompt", prompt, encode));
        let prompts = prompts.collect::<Result<_, _>>()?;
        let grammar = state.compile_grammar(&params, &ToolSyntax::common(), Thinking::Never)?;
        let max_tokens = params.max_tokens.or(Some(DEFAULT_COMPLETION_TOKENS));
        let params = GenerationParams { max_tokens, ..params };
        Ok(ParsedRequest { id, prompts, params, grammar, syntax: None })
    };
    respond(&state, ResponseKind::Completion, body, parse).await
}

/// A request that is ready to start.
struct ParsedRequest {
    /// The number of the request.
    id: u64,
    /// The prompts as tokens.
    prompts: Vec<Vec<u32>>,
    params: GenerationParams,
    grammar: Option<GrammarMatcher>,
    /// What answers consist of; `None` if they are only text.
    syntax: Option<AnswerSyntax>,
}

/// Parses a request, starts a generation for each prompt, and returns the HTTP response, either streamed or complete.
async fn respond(
    state: &Arc<AppState>,
    kind: ResponseKind,
    body: Result<RequestBody, ApiError>,
    parse: impl FnOnce(&AppState, &[u8], u64) -> Result<ParsedRequest, ApiError> + Send + 'static,
) -> Response {
    let (endpoint, id_prefix) = match kind {
        ResponseKind::Chat => ("chat", "chatcmpl"),
        ResponseKind::Completion => ("completions", "cmpl"),
    };
    let id = state.next_request_id();
    let started = async {
        let (parsed, guard) = body?.parse(state, move |state, body| parse(state, body, id)).await?;
        let (is_stream, include_usage) = (parsed.params.stream, parsed.params.include_usage);
        Ok((state.start(parsed)?, is_stream, include_usage, guard))
    };
    let response = match started.await {
        Err(error) => ApiError::into_response(error),
        Ok((generations, is_stream, include_usage, guard)) => {
            let header = ResponseMetadata {
                kind,
                id: format!("{id_prefix}-{}-{id}", state.start_unix_time),
                created: unix_time(),
                model: state.model_name.clone(),
                tokenizer: state.tokenizer.clone(),
            };
            if is_stream {
                response::stream(header, generations, include_usage, guard)
            } else {
                let _open: Option<ResponseGuard> = guard;
                collect_all(&header, generations).await.into_response()
            }
        }
    };
    state.metrics.record_response(endpoint, response.status().as_u16());
    response
}

/// Waits for all generations concurrently, so that the time to first token of each generation is measured correctly.
/// Dropping the returned future cancels the generations.
async fn collect_all(
    header: &ResponseMetadata,
    generations: Vec<Generation>,
) -> Result<Json<Value>, ApiError> {
    let finished = join_all(generations.into_iter().map(collect)).await?;
    let (answers, usages): (Vec<_>, Vec<Usage>) = finished.into_iter().unzip();
    Ok(Json(header.response_json(answers, usages.into_iter().sum())))
}

/// Runs all futures concurrently. Returns their results in order, or the first error. Dropping the returned future
/// cancels them.
pub async fn join_all<T: Send + 'static>(
    futures: impl Iterator<Item: Future<Output = Result<T, ApiError>> + Send + 'static>,
) -> Result<Vec<T>, ApiError> {
    let mut tasks = JoinSet::new();
    for (index, future) in futures.enumerate() {
        tasks.spawn(async move { (index, future.await) });
    }
    let failed = |error: tokio::task::JoinError| {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "failed", error.to_string())
    };
    let mut finished = BTreeMap::new();
    while let Some(joined) = tasks.join_next().await {
        let (index, result) = joined.map_err(failed)?;
        finished.insert(index, result?);
    }
    Ok(finished.into_values().collect())
}

/// Waits until a generation ends. Returns its answer and token usage.
async fn collect(mut generation: Generation) -> Result<(FinishedAnswer, Usage), ApiError> {
    let (answer, logprobs, reason) = (Answer::default(), Vec::new(), FinishReason::Length);
    let mut finished = FinishedAnswer { answer, logprobs, reason };
    while let Some(chunk) = generation.next_chunk().await {
        match chunk {
            Chunk::Parts(parts, logprobs) => {
                for part in parts {
                    finished.answer.add(part);
                }
                finished.logprobs.extend(logprobs);
            }
            Chunk::End(why) => finished.reason = why,
            Chunk::Failed(error) => return Err(error),
        }
    }
    Ok((finished, generation.usage))
}

impl AppState {
    fn params(&self, request: &CompletionRequest, id: u64) -> Result<GenerationParams, ApiError> {
        self.check_model(request.model.as_deref())?;
        // Each request has its own random numbers; `seed` makes it repeatable.
        request.to_generation_params(self.unique_number(id))
    }

    /// Returns a number that differs between the requests of all servers that were started at different times.
    fn unique_number(&self, id: u64) -> u64 {
        self.start_unix_time.wrapping_mul(1 << 20).wrapping_add(id)
    }

    fn chat_format(&self) -> Result<&ChatFormat, ApiError> {
        self.chat_format.as_ref().map_err(|reason| {
            let message = format!("{reason}: use /v1/completions instead, which continues a prompt");
            ApiError::new(StatusCode::BAD_REQUEST, "no_chat_template", message)
        })
    }

    /// Compiles the grammar of an answer; `None` if the answer is not restricted.
    fn compile_grammar(
        &self,
        params: &GenerationParams,
        syntax: &ToolSyntax,
        thinking: Thinking,
    ) -> Result<Option<GrammarMatcher>, ApiError> {
        let Some(grammar) = params.constraint.grammar(syntax, &self.tokenizer, thinking) else {
            return Ok(None);
        };
        let create =
            || GrammarCompiler::new(&self.tokenizer, self.vocab_size).map_err(|error| error.to_string());
        let compiled = match self.grammars.get_or_init(create) {
            Ok(compiler) => compiler.compile(&grammar).map_err(|error| error.to_string()),
            Err(reason) => Err(reason.clone()),
        };
        let is_gbnf = matches!(&params.constraint.text, TextFormat::Grammar(text) if text.contains("::="));
        let compiled = compiled.map_err(|error| {
            if is_gbnf { format!("{error} (it looks like GBNF, which is not)") } else { error }
        });
        compiled.map(Some).map_err(|message| ApiError::invalid(params.constraint.field(), message))
    }

    /// Returns the control tokens that are part of the text of an answer: those around thoughts and calls.
    fn visible_tokens(&self, syntax: Option<&ToolSyntax>) -> BTreeSet<u32> {
        let texts = syntax.map(|syntax| {
            [&syntax.opening, &syntax.middle, &syntax.ending, syntax.next.as_ref().unwrap_or(&syntax.ending)]
        });
        let texts = texts.into_iter().flatten().map(String::as_str).chain([THOUGHT_START, THOUGHT_END]);
        let fragments = texts.flat_map(|text| self.tokenizer.split_control_tokens(text));
        let tokens =
            fragments.filter_map(|part| if let Fragment::Token(id) = part { Some(id) } else { None });
        // The detokenizer converts those of the harmony format.
        tokens.filter(|&token| !self.tokenizer.is_harmony_token(token)).collect()
    }

    /// Starts the generations of `params.choices` answers to each prompt.
    fn start(&self, request: ParsedRequest) -> Result<Vec<Generation>, ApiError> {
        let ParsedRequest { id, prompts, params, grammar, syntax } = request;
        let choices = params.choices;
        self.check_capacity(prompts.len() as u64 * u64::from(choices))?;
        let sampler = Sampler::new(params.sampler).map_err(|error| {
            let param = if let ExecError::Sampling { name, .. } = &error { *name } else { "temperature" };
            ApiError::invalid(param, error.to_string())
        })?;
        let limits = prompts.iter().map(|prompt| self.tokens_to_generate(prompt.len() as u64, &params));
        let limits = limits.collect::<Result<Vec<u32>, _>>()?;
        if let Some((token, _)) = params.logit_bias.range(self.vocab_size..).next() {
            let count = self.vocab_size;
            let message = format!("`logit_bias` has token {token}, but the vocabulary has {count} tokens");
            return Err(ApiError::invalid("logit_bias", message));
        }
        let visible = syntax.as_ref().map(|syntax| self.visible_tokens(syntax.tools.as_deref()));
        let visible = Arc::new(visible.unwrap_or_default());
        let start = |(index, (prompt, max_new_tokens)): (u32, (Vec<u32>, u32))| {
            // The usage counts a prompt once.
            let reported = if index % choices == 0 { prompt.len() as u32 } else { 0 };
            let prompt_tokens = PromptTokens { count: prompt.len() as u32, reported };
            let (response_tx, events) = mpsc::unbounded_channel();
            let mut sampler = sampler.for_sequence(index).with_prompt_and_biases(&prompt, &params.logit_bias);
            let mut grammar_failure = None;
            if let Some(grammar) = grammar.clone() {
                grammar_failure = Some(grammar.failure());
                sampler = sampler.with_grammar(grammar);
            }
            let (logprobs_tx, logprobs) = mpsc::unbounded_channel();
            let count = params.logprobs;
            let mut clock = self.metrics.start_token_clock();
            let output = SequenceOutput::Tokens(Box::new(move |logits: &[f32]| {
                let token = sampler.sample(logits);
                clock.tick();
                if let Some(count) = count {
                    // The client may have gone.
                    let _ = logprobs_tx.send(TokenLogprobs::new(logits, token, count as usize));
                }
                token
            }));
            self.send_to_ring(RingRequest { prompt, max_new_tokens, output, response_tx });
            let format = AnswerFormat {
                parser: syntax.as_ref().map(|syntax| {
                    // The calls of different answers have different ids.
                    AnswerParser::new(syntax, (self.unique_number(id), index))
                }),
                visible: visible.clone(),
                stop_strings: params.stop_strings.clone(),
                logprobs: count.map(|_| logprobs),
                grammar_failure,
            };
            let tokenizer = self.tokenizer.clone();
            Generation::new(events, tokenizer, prompt_tokens, format, self.metrics.start_request())
        };
        let all = prompts.into_iter().zip(limits);
        let all = all.flat_map(|request| std::iter::repeat_n(request, choices as usize));
        Ok((0..).zip(all).map(start).collect())
    }

    /// Returns the maximum number of tokens to generate after a prompt of `prompt_tokens` tokens.
    fn tokens_to_generate(&self, prompt_tokens: u64, params: &GenerationParams) -> Result<u32, ApiError> {
        let context = u64::from(self.context_length);
        let left = context.saturating_sub(prompt_tokens);
        let wanted = params.max_tokens.map_or(left, u64::from);
        if left == 0 || wanted > left {
            let message = format!(
                "{prompt_tokens} prompt tokens and {wanted} generated tokens do not fit in the context of {context} \
                 tokens: shorten the prompt or lower `max_tokens`"
            );
            return Err(ApiError::context_length_exceeded("max_tokens", message));
        }
        Ok(wanted as u32)
    }
}
