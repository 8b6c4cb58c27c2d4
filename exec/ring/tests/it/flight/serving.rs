//! Does everybody who comes to a ring get what it would give them alone?

use std::sync::Arc;
use std::time::Duration;

use hearth_ring::{
    Guest, LocalModel, Memory, Ring, RingError, RingOptions, Said, Service, Worker, bind, for_sequences,
    with_draft,
};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::{DRAFT, FILE, GENERATE, alone, open, plan, prompts, sampler, start};

/// What a guest was told.
#[derive(Debug, Default, PartialEq)]
struct Heard {
    held: Option<u32>,
    tokens: Vec<u32>,
    failed: Option<String>,
}

async fn hear(mut said: mpsc::UnboundedReceiver<Said>) -> Heard {
    let mut heard = Heard::default();
    while let Some(said) = said.recv().await {
        match said {
            Said::Begun { held } => heard.held = Some(held),
            Said::Token(token) => heard.tokens.push(token),
            Said::Failed(why) => heard.failed = Some(why),
        }
    }
    heard
}

type Serving = JoinHandle<Result<(), RingError>>;
type Door = mpsc::UnboundedSender<Guest>;

/// A ring that serves, and where guests come in.
async fn open_ring(
    network: &Memory,
    model: &Arc<LocalModel>,
    windows: &[u32],
    seats: u32,
    draft: Option<Arc<LocalModel>>,
) -> (Door, Serving) {
    // They share the positions.
    let mut plan = for_sequences(plan(model, windows, 128 * seats), seats);
    if let Some(draft) = &draft {
        plan = with_draft(plan, model, draft).expect("a draft of the same vocabulary");
    }
    let drafts = if draft.is_some() { 3 } else { 0 };
    let options =
        RingOptions { threads: 1, pass_deadline: Duration::from_mins(1), draft, ..RingOptions::default() };
    let mut ring = Ring::connect(network, plan, model.clone(), options).await.expect("a ring");
    let (door, guests) = mpsc::unbounded_channel();
    let service = Service { micro_batch: 5, drafts, stop: vec![], on_work: None };
    let serving = tokio::spawn(async move {
        let (_, ended) = ring.serve(service, guests).await;
        ring.close().await;
        ended
    });
    (door, serving)
}

/// A guest with a sampler by number.
fn guest(
    prompt: Vec<u32>,
    generate: u32,
    temperature: f32,
    number: u32,
) -> (Guest, mpsc::UnboundedReceiver<Said>) {
    let (said, answer) = mpsc::unbounded_channel();
    let mut sampler = sampler(temperature, number);
    (Guest { prompt, generate, sample: Box::new(move |logits| sampler.sample(logits)), said }, answer)
}

async fn over(serving: Serving) -> Result<(), RingError> {
    let ended = tokio::time::timeout(Duration::from_mins(1), serving).await;
    ended.expect("the ring ends when nobody can come").expect("it does not panic")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guests_who_come_when_they_like_get_what_they_would_get_alone() {
    let model = open(FILE);
    let numbers: Vec<u32> = (0..7).collect();
    for (temperature, draft, seats) in [(0.0, None, 2), (0.8, None, 3), (0.0, Some(open(DRAFT)), 2)] {
        let expected = alone(&model, &numbers, temperature).await;
        let network = Memory::default();
        start(&network, &model).await;
        let (door, serving) = open_ring(&network, &model, &[3, 3, 2], seats, draft).await;
        let all = prompts();
        let mut answers = Vec::new();
        for &number in &numbers {
            let prompt = all[number as usize % all.len()].clone();
            let (guest, answer) = guest(prompt, GENERATE, temperature, number);
            assert!(door.send(guest).is_ok());
            answers.push(tokio::spawn(hear(answer)));
            tokio::time::sleep(Duration::from_millis(u64::from(number) * 7)).await;
        }
        for (number, answer) in answers.into_iter().enumerate() {
            let heard = answer.await.expect("no panic");
            assert_eq!((heard.tokens, heard.failed), (expected[number].clone(), None), "guest {number}");
        }
        drop(door);
        over(serving).await.expect("a ring that ends in order");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conversation_goes_on_where_it_was() {
    let (model, network) = (open(FILE), Memory::default());
    start(&network, &model).await;
    let (door, serving) = open_ring(&network, &model, &[3, 3, 2], 2, None).await;
    let all = prompts();
    let ask = async |prompt: &[u32]| {
        let (guest, answer) = guest(prompt.to_vec(), 8, 0.0, 0);
        assert!(door.send(guest).is_ok());
        hear(answer).await
    };
    let first = ask(&all[0]).await;
    // Somebody else in between, who takes the other seat.
    let other = ask(&all[1]).await;
    assert_eq!((first.held, other.held), (Some(0), Some(0)));
    // All that was said, and more: of that only the last token has not entered the ring yet.
    let said = [&all[0][..], &first.tokens].concat();
    let longer = [&said[..], &all[2][..4]].concat();
    let second = ask(&longer).await;
    assert_eq!(second.held, Some(said.len() as u32 - 1));
    // The same words again, and the turn before with another ending.
    assert_eq!(ask(&longer).await, Heard { held: Some(longer.len() as u32 - 1), ..ask(&longer).await });
    let changed = [&said[..], &all[1][..4]].concat();
    assert!(ask(&changed).await.held >= Some(said.len() as u32));
    drop(door);
    over(serving).await.expect("a ring that ends in order");
    // What was kept gave what is computed from nothing.
    let fresh = Memory::default();
    let (door, serving) = open_ring(&fresh, &model, &[8], 1, None).await;
    let (guest, answer) = guest(longer, 8, 0.0, 0);
    assert!(door.send(guest).is_ok());
    assert_eq!(hear(answer).await.tokens, second.tokens);
    drop(door);
    over(serving).await.expect("a ring that ends in order");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_leaves_makes_room_and_who_asks_too_much_is_told() {
    let (model, network) = (open(FILE), Memory::default());
    start(&network, &model).await;
    let (door, serving) = open_ring(&network, &model, &[2, 3, 3], 1, None).await;
    let all = prompts();
    let (endless, mut answer) = guest(all[0].clone(), 100, 0.0, 0);
    let (next, next_answer) = guest(all[1].clone(), 4, 0.0, 1);
    let (impatient, never) = guest(all[1].clone(), 4, 0.0, 1);
    for guest in [endless, impatient, next] {
        assert!(door.send(guest).is_ok());
    }
    drop(never);
    assert_eq!(answer.recv().await, Some(Said::Begun { held: 0 }));
    assert!(matches!(answer.recv().await, Some(Said::Token(_))));
    drop(answer);
    // The only seat is free again.
    let heard = tokio::time::timeout(Duration::from_secs(20), hear(next_answer)).await.expect("a seat");
    assert_eq!(heard.tokens, alone(&model, &[1], 0.0).await[0][..4]);
    for (prompt, generate) in [(vec![], 4), (all[0].clone(), 0), (all[0].clone(), 127)] {
        let (guest, answer) = guest(prompt, generate, 0.0, 0);
        assert!(door.send(guest).is_ok());
        let why = hear(answer).await.failed.expect("told");
        assert!(why.contains("do not fit the context of 128 positions"), "{why}");
    }
    drop(door);
    over(serving).await.expect("a ring that ends in order");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_device_takes_no_token_from_any_guest() {
    let model = open(FILE);
    let expected = alone(&model, &[0, 1, 2], 0.0).await;
    let network = Memory::default();
    let mut workers = Vec::new();
    for place in 1..=2 {
        let listener = bind(&network, &format!("localhost:{}", 9000 + place)).await.expect("a free name");
        let worker = Worker::new(network.clone(), model.clone(), 1);
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        runtime.spawn(async move { worker.serve(listener, |_| {}).await });
        workers.push(runtime);
    }
    let (door, serving) = open_ring(&network, &model, &[3, 3, 2], 3, None).await;
    let all = prompts();
    let mut answers = Vec::new();
    for number in 0..3 {
        let (guest, answer) = guest(all[number as usize].clone(), GENERATE, 0.0, number);
        assert!(door.send(guest).is_ok());
        answers.push(answer);
    }
    let mut third = answers.pop().expect("three");
    assert_eq!(third.recv().await, Some(Said::Begun { held: 0 }));
    assert!(matches!(third.recv().await, Some(Said::Token(token)) if token == expected[2][0]));
    // All its tasks end, and with them its connections.
    workers.pop().expect("two").shutdown_background();
    assert_eq!(hear(third).await.tokens, expected[2][1..]);
    for (answer, expected) in answers.into_iter().zip(&expected) {
        assert_eq!(hear(answer).await.tokens, *expected);
    }
    drop(door);
    over(serving).await.expect("a ring that ends in order");
    workers.into_iter().for_each(tokio::runtime::Runtime::shutdown_background);
}
