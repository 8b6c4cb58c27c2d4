//! Requests that a ring serves concurrently receive the same tokens as each request alone.

use std::sync::Arc;
use std::time::Duration;

use hearth_profiles::model::Architecture;
use hearth_ring::{
    LocalModel, MemoryTransport, ModelSource, Request, ResponseEvent, Ring, RingError, RingOptions,
    SequenceOutput, ServeOptions, plan_for_sequences, plan_with_draft_model,
};
use hearth_runtime::synth::{SynthOptions, synthesise};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use super::{DRAFT, GENERATE, alone, plan, sampler};
use crate::fixture::{Q4_MODEL, open_model, prompts, ring_options, start_worker, workers};

#[derive(Debug, Default, PartialEq)]
struct Response {
    cached_tokens: Option<u32>,
    tokens: Vec<u32>,
    failed: Option<String>,
}

async fn collect(mut response_rx: mpsc::UnboundedReceiver<ResponseEvent>) -> Response {
    let mut response = Response::default();
    while let Some(event) = response_rx.recv().await {
        match event {
            ResponseEvent::Started { cached_tokens } => response.cached_tokens = Some(cached_tokens),
            ResponseEvent::Token(token) => response.tokens.push(token),
            ResponseEvent::Failed(reason) => response.failed = Some(reason),
        }
    }
    response
}

struct Server {
    request_tx: mpsc::UnboundedSender<Request>,
    serving: JoinHandle<Result<(), RingError>>,
}

impl Server {
    async fn start(
        transport: &MemoryTransport,
        model: &Arc<LocalModel>,
        windows: &[u32],
        slots: u32,
        draft: Option<Arc<LocalModel>>,
    ) -> Server {
        Server::with_context(transport, model, windows, slots, 128 * slots, draft).await
    }

    /// Starts a server whose slots share caches for `context` tokens or, with a draft model, divide them.
    async fn with_context(
        transport: &MemoryTransport,
        model: &Arc<LocalModel>,
        windows: &[u32],
        slots: u32,
        context: u32,
        draft: Option<Arc<LocalModel>>,
    ) -> Server {
        let mut plan = plan(model, windows, context);
        if let Some(draft) = &draft {
            plan = plan_with_draft_model(plan, model, draft).expect("a draft of the same vocabulary");
        }
        let plan = plan_for_sequences(plan, slots, &model.profile.shape);
        let draft_tokens = if draft.is_some() { 3 } else { 0 };
        let options = RingOptions { draft_model: draft, ..ring_options() };
        let mut ring = Ring::connect(transport, plan, model.clone(), options).await.expect("a ring");
        let (request_tx, request_rx) = mpsc::unbounded_channel();
        let options =
            ServeOptions { micro_batch: 5, draft_tokens, stop_tokens: vec![], on_device_report: None };
        let serving = tokio::spawn(async move {
            let (_, ended) = ring.serve(options, request_rx).await;
            ring.close().await;
            ended
        });
        Server { request_tx, serving }
    }

    /// Sends a request; `number` selects the random stream of the sampler.
    fn send(
        &self,
        prompt: &[u32],
        max_new_tokens: u32,
        temperature: f32,
        number: u32,
    ) -> mpsc::UnboundedReceiver<ResponseEvent> {
        let mut sampler = sampler(temperature, number);
        let output = SequenceOutput::Tokens(Box::new(move |logits: &[f32]| sampler.sample(logits)));
        self.send_for(prompt, max_new_tokens, output)
    }

    fn send_for(
        &self,
        prompt: &[u32],
        max_new_tokens: u32,
        output: SequenceOutput,
    ) -> mpsc::UnboundedReceiver<ResponseEvent> {
        let (response_tx, response_rx) = mpsc::unbounded_channel();
        let request = Request { prompt: prompt.to_vec(), max_new_tokens, output, response_tx };
        assert!(self.request_tx.send(request).is_ok());
        response_rx
    }

    /// Requests the embedding of a prompt, and checks that the response has no token.
    async fn embedding(&self, prompt: &[u32]) -> Vec<f32> {
        let (embedding_tx, embedding_rx) = oneshot::channel();
        let response = collect(self.send_for(prompt, 1, SequenceOutput::Embedding(embedding_tx))).await;
        assert_eq!((response.tokens, response.failed), (vec![], None));
        embedding_rx.await.expect("an embedding")
    }

    /// Closes the request channel, and waits until the ring has ended without an error.
    async fn close(self) {
        drop(self.request_tx);
        let ended = tokio::time::timeout(Duration::from_mins(1), self.serving).await;
        let ended = ended.expect("the ring ends when the channel is closed").expect("it does not panic");
        ended.expect("no error");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_requests_get_the_tokens_of_each_alone() {
    let model = open_model(Q4_MODEL);
    let numbers: Vec<u32> = (0..7).collect();
    let all = prompts();
    for (temperature, draft, slots) in [(0.0, None, 2), (0.8, None, 3), (0.0, Some(open_model(DRAFT)), 2)] {
        let expected = alone(&model, &numbers, temperature).await;
        let server = Server::start(&workers(&model, 3).await, &model, &[3, 3, 2], slots, draft).await;
        let mut responses = Vec::new();
        for &number in &numbers {
            let prompt = &all[number as usize % all.len()];
            responses.push(tokio::spawn(collect(server.send(prompt, GENERATE, temperature, number))));
            tokio::time::sleep(Duration::from_millis(u64::from(number) * 7)).await;
        }
        for (number, response) in responses.into_iter().enumerate() {
            let Response { tokens, failed, .. } = response.await.expect("no panic");
            assert_eq!((&tokens, failed), (&expected[number], None), "request {number}");
        }
        server.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recurrent_state_is_used_only_for_its_own_continuation() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    let mut options = SynthOptions::from_preset("tiny").expect("shipped");
    options.shape.architecture = Architecture::Qwen35;
    options.shape = options.shape.with_default_hybrid();
    synthesise(&options, &path, &mut |_, _| ()).expect("a tiny model");
    let model = Arc::new(LocalModel::open(&path).expect("a sound model"));
    let layers = model.profile.shape.layers.0;
    let server = Server::start(&workers(&model, 2).await, &model, &[layers - 1, 1], 1, None).await;
    let all = prompts();
    let ask = async |prompt: &[u32]| collect(server.send(prompt, 8, 0.0, 0)).await;
    let first = ask(&all[0]).await;
    let conversation = [&all[0][..], &first.tokens].concat();
    let longer = [&conversation[..], &all[2][..4]].concat();
    let second = ask(&longer).await;
    assert_eq!(second.cached_tokens, Some(conversation.len() as u32 - 1));
    // The same prompt again begins with an empty state.
    assert_eq!(ask(&longer).await, Response { cached_tokens: Some(0), ..second });
    assert_eq!(ask(&all[0]).await, Response { cached_tokens: Some(0), ..first });
    server.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conversation_continues_from_its_cached_prefix() {
    let model = open_model(Q4_MODEL);
    let server = Server::start(&workers(&model, 3).await, &model, &[3, 3, 2], 2, None).await;
    let all = prompts();
    let ask = async |prompt: &[u32]| collect(server.send(prompt, 8, 0.0, 0)).await;
    let first = ask(&all[0]).await;
    // Another request in between, which takes the other slot.
    let other = ask(&all[1]).await;
    assert_eq!((first.cached_tokens, other.cached_tokens), (Some(0), Some(0)));
    // The whole conversation so far, and more. Only its last token is not in the cache.
    let conversation = [&all[0][..], &first.tokens].concat();
    let longer = [&conversation[..], &all[2][..4]].concat();
    let second = ask(&longer).await;
    assert_eq!(second.cached_tokens, Some(conversation.len() as u32 - 1));
    // The same prompt again, and the previous conversation with another continuation.
    let cached_tokens = Some(longer.len() as u32 - 1);
    assert_eq!(ask(&longer).await, Response { cached_tokens, ..ask(&longer).await });
    let changed = [&conversation[..], &all[1][..4]].concat();
    assert!(ask(&changed).await.cached_tokens >= Some(conversation.len() as u32));
    server.close().await;
    // An empty cache gives the same tokens.
    let fresh = Server::start(&MemoryTransport::default(), &model, &[8], 1, None).await;
    assert_eq!(collect(fresh.send(&longer, 8, 0.0, 0)).await.tokens, second.tokens);
    fresh.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_share_memory_get_the_tokens_of_each_alone() {
    let model = open_model(Q4_MODEL);
    let numbers: Vec<u32> = (0..12).collect();
    let all = prompts();
    for temperature in [0.0, 0.8] {
        let expected = alone(&model, &numbers, temperature).await;
        // Each request fits, but not all at once: some leave their slots and continue later.
        let server = Server::with_context(&workers(&model, 3).await, &model, &[3, 3, 2], 6, 128, None).await;
        let send = |&number: &u32| {
            let prompt = &all[number as usize % all.len()];
            tokio::spawn(collect(server.send(prompt, GENERATE, temperature, number)))
        };
        let responses: Vec<_> = numbers.iter().map(send).collect();
        for (number, response) in responses.into_iter().enumerate() {
            let Response { tokens, failed, .. } = response.await.expect("no panic");
            assert_eq!((&tokens, failed), (&expected[number], None), "request {number}");
        }
        server.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn common_beginning_of_a_busy_slot_is_not_computed_again() {
    let model = open_model(Q4_MODEL);
    let all = prompts();
    let shared: Vec<u32> = all.iter().flatten().copied().cycle().take(40).collect();
    let [one, two] = [&all[1], &all[2]].map(|own| [&shared[..], &own[..4]].concat());
    let server = Server::start(&workers(&model, 3).await, &model, &[3, 3, 2], 3, None).await;
    let mut first = server.send(&one, 100, 0.0, 0);
    assert_eq!(first.recv().await, Some(ResponseEvent::Started { cached_tokens: 0 }));
    assert!(matches!(first.recv().await, Some(ResponseEvent::Token(_))));
    let second = collect(server.send(&two, 12, 0.0, 0)).await;
    assert!(second.cached_tokens >= Some(40), "{second:?}");
    drop(first);
    server.close().await;
    let fresh = Server::start(&MemoryTransport::default(), &model, &[8], 1, None).await;
    assert_eq!(collect(fresh.send(&two, 12, 0.0, 0)).await.tokens, second.tokens);
    fresh.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disconnected_client_frees_its_slot_and_oversized_requests_fail() {
    let model = open_model(Q4_MODEL);
    let server = Server::start(&workers(&model, 3).await, &model, &[2, 3, 3], 1, None).await;
    let all = prompts();
    let mut endless = server.send(&all[0], 100, 0.0, 0);
    drop(server.send(&all[1], 4, 0.0, 1));
    let next = server.send(&all[1], 4, 0.0, 1);
    assert_eq!(endless.recv().await, Some(ResponseEvent::Started { cached_tokens: 0 }));
    assert!(matches!(endless.recv().await, Some(ResponseEvent::Token(_))));
    drop(endless);
    // The only slot is free again.
    let response = tokio::time::timeout(Duration::from_secs(20), collect(next)).await.expect("a slot");
    assert_eq!(response.tokens, alone(&model, &[1], 0.0).await[0][..4]);
    for (prompt, max_new_tokens) in [(vec![], 4), (all[0].clone(), 0), (all[0].clone(), 127)] {
        let failed = collect(server.send(&prompt, max_new_tokens, 0.0, 0)).await.failed.expect("an error");
        assert!(failed.contains("do not fit the context of 128 positions"), "{failed}");
    }
    server.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_survive_the_loss_of_a_worker() {
    let model = open_model(Q4_MODEL);
    let expected = alone(&model, &[0, 1, 2], 0.0).await;
    let transport = MemoryTransport::default();
    let mut runtimes = Vec::new();
    for device_index in 1..=2 {
        let (transport, source) = (transport.clone(), ModelSource::File(model.clone()));
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let starting = runtime.spawn(async move { start_worker(&transport, device_index, source).await });
        starting.await.expect("no panic");
        runtimes.push(runtime);
    }
    let all = prompts();
    let one = Server::start(&MemoryTransport::default(), &model, &[8], 1, None).await;
    let embedding = one.embedding(&all[0]).await;
    one.close().await;
    let server = Server::start(&transport, &model, &[3, 3, 2], 3, None).await;
    let send = |number: u32| server.send(&all[number as usize], GENERATE, 0.0, number);
    let [first, second, mut third] = [0, 1, 2].map(send);
    assert_eq!(third.recv().await, Some(ResponseEvent::Started { cached_tokens: 0 }));
    assert!(matches!(third.recv().await, Some(ResponseEvent::Token(token)) if token == expected[2][0]));
    // All tasks and connections of a worker end.
    runtimes.pop().expect("two").shutdown_background();
    // It waits for a slot until after the loss.
    assert!(server.embedding(&all[0]).await == embedding);
    assert_eq!(collect(third).await.tokens, expected[2][1..]);
    for (response_rx, expected) in [first, second].into_iter().zip(&expected) {
        assert_eq!(collect(response_rx).await.tokens, *expected);
    }
    server.close().await;
    runtimes.into_iter().for_each(tokio::runtime::Runtime::shutdown_background);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn embeddings_are_the_same_alone_and_beside_others() {
    let model = open_model(Q4_MODEL);
    let all = prompts();
    let one = Server::start(&MemoryTransport::default(), &model, &[8], 1, None).await;
    let mut expected = Vec::new();
    for prompt in &all {
        expected.push(one.embedding(prompt).await);
    }
    assert!(expected.iter().all(|hidden| hidden.len() == model.profile.shape.embedding_length as usize));
    assert!(expected[0] != expected[1]);
    // All but the last token are cached.
    assert_eq!(one.embedding(&all[0]).await, expected[0]);
    one.close().await;
    let numbers: Vec<u32> = (0..6).collect();
    let tokens = alone(&model, &numbers, 0.8).await;
    for (draft, context) in [(None, 6 * 128), (None, 128), (Some(open_model(DRAFT)), 6 * 128)] {
        let transport = workers(&model, 3).await;
        let server = Server::with_context(&transport, &model, &[3, 3, 2], 6, context, draft).await;
        let server = Arc::new(server);
        let mut responses = Vec::new();
        let mut embeddings = Vec::new();
        for &number in &numbers {
            let index = number as usize % all.len();
            responses.push(tokio::spawn(collect(server.send(&all[index], GENERATE, 0.8, number))));
            let (server, prompt) = (server.clone(), all[index].clone());
            embeddings.push((index, tokio::spawn(async move { server.embedding(&prompt).await })));
        }
        for (index, embedding) in embeddings {
            assert!(embedding.await.expect("no panic") == expected[index], "prompt {index}, {context}");
        }
        for (number, response) in responses.into_iter().enumerate() {
            assert_eq!(response.await.expect("no panic").tokens, tokens[number], "request {number}");
        }
        Arc::into_inner(server).expect("no other user").close().await;
    }
}
