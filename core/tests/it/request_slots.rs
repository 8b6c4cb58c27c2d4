//! Random requests to a server's slots: whatever arrives, is cancelled or is lost, each request gets its own tokens.

use std::collections::VecDeque;

use hearth_core::schedule::Generation;
use hearth_core::schedule::batching::BatchLimits;
use hearth_core::schedule::request_slots::{RequestProgress, RequestSlots};
use hearth_schema::pass::{Batch, CacheChange};
use proptest::prelude::*;

const CONTEXT: u32 = 60;

/// Returns the token that follows a text.
fn next_token(text: &[u32]) -> u32 {
    text.iter().fold(7, |sum: u32, &token| sum.wrapping_mul(31).wrapping_add(token)) % 50
}

/// A request that arrives after `after` batches.
#[derive(Debug, Clone)]
struct Arrival {
    after: u32,
    prompt: Vec<u32>,
    wanted: u32,
    /// The number of tokens after which the client disconnects.
    cancelled_after: Option<u32>,
}

fn arrival() -> impl Strategy<Value = Arrival> {
    let cancelled = proptest::option::weighted(0.2, 1..8u32);
    // Prompts of a few conversations, which have beginnings in common.
    (0..60u32, 0..3u32, 1..40u32, 1..20u32, 0..20u32, cancelled).prop_map(
        |(after, conversation, length, wanted, changed_at, cancelled_after)| {
            let token = |at| if at < changed_at { at % 13 } else { conversation * 100 + at };
            Arrival { after, prompt: (0..length).map(token).collect(), wanted, cancelled_after }
        },
    )
}

/// A batch in flight, with the tokens of its passes.
struct InFlight {
    batch: Batch,
    tokens: Vec<Vec<u32>>,
}

/// A server with a ring of one device, whose caches are lists of tokens. The device computes a first layer when a batch
/// begins, and a second one when it ends, as a device with two windows does.
struct Server {
    generation: Generation,
    /// The requests by their number.
    slots: RequestSlots<usize>,
    texts: Vec<Vec<u32>>,
    in_flight: VecDeque<InFlight>,
    /// The caches of each layer and slot.
    caches: [Vec<Vec<u32>>; 2],
    /// For each slot, the number of positions that were written since its cache was released.
    backed: Vec<usize>,
    generated: Vec<Vec<u32>>,
}

impl Server {
    fn new(slots: usize, capacity: u64, requests: usize) -> Server {
        Server {
            generation: Generation::with_vacant_slots(slots as u32, 5, 0, true),
            slots: RequestSlots::new(slots as u32, capacity, true),
            texts: vec![Vec::new(); slots],
            in_flight: VecDeque::new(),
            caches: [vec![Vec::new(); slots], vec![Vec::new(); slots]],
            backed: vec![0; slots],
            generated: vec![Vec::new(); requests],
        }
    }

    fn admit(&mut self) {
        while self.slots.admit(&mut self.generation, &mut self.texts).expect("a vacant slot").is_some() {}
        self.slots.make_room_for_tokens(&mut self.generation, &self.texts);
    }

    /// Begins a batch, as the device computes it.
    fn begin(&mut self, limits: BatchLimits, capacity: u64) -> bool {
        let Some(batch) = self.generation.begin_batch(limits) else { return false };
        let batch = batch.with_cache_changes(self.slots.take_cache_changes());
        let tokens = batch.passes().iter().map(|pass| {
            let (slot, first) = (pass.sequence_index as usize, pass.first_position as usize);
            self.texts[slot][first..first + pass.tokens as usize].to_vec()
        });
        let begun = InFlight { tokens: tokens.collect(), batch };
        self.compute(0, &begun);
        for change in begun.batch.cache_changes() {
            if let CacheChange::Release { sequence } = change {
                self.backed[*sequence as usize] = 0;
            }
        }
        for (backed, cache) in self.backed.iter_mut().zip(&self.caches[0]) {
            *backed = cache.len().max(*backed);
        }
        // Requests that leave may have two more passes in flight.
        let slack = 2 * self.texts.len();
        assert!(self.backed.iter().sum::<usize>() <= capacity as usize + slack, "{:?}", self.backed);
        self.in_flight.push_back(begun);
        true
    }

    /// Computes a layer for a batch: changes caches, and adds the tokens of the passes.
    fn compute(&mut self, layer: usize, InFlight { batch, tokens }: &InFlight) {
        let caches = &mut self.caches[layer];
        for change in batch.cache_changes() {
            match *change {
                CacheChange::Release { sequence } => caches[sequence as usize].clear(),
                CacheChange::Copy { from, to, tokens } => {
                    caches[to as usize] = caches[from as usize][..tokens as usize].to_vec();
                }
            }
        }
        for (pass, tokens) in batch.passes().iter().zip(tokens) {
            let (slot, first) = (pass.sequence_index as usize, pass.first_position as usize);
            let (text, cache) = (&self.texts[slot], &mut caches[slot]);
            assert!(cache.len() >= first, "the positions before a pass are cached");
            // The slot may belong to another request when the second layer is computed.
            assert!(layer > 0 || cache[..first] == text[..first], "they are those of the sequence");
            cache.truncate(first);
            cache.extend_from_slice(tokens);
        }
    }

    /// Completes the oldest batch in flight. The client of a request disconnects after `cancelled_after` tokens.
    fn complete(&mut self, arrivals: &[Arrival]) {
        let Some(ended) = self.in_flight.pop_front() else { return };
        self.compute(1, &ended);
        for pass in ended.batch.passes().iter().filter(|pass| pass.has_output) {
            let slot = pass.sequence_index as usize;
            let cached = &self.caches[1][slot];
            assert!(self.texts[slot].starts_with(cached), "both layers have the positions of the sequence");
        }
        let batch = ended.batch;
        for pass in batch.passes().iter().filter(|pass| pass.has_output) {
            let slot = pass.sequence_index as usize;
            let token = next_token(&self.texts[slot]);
            self.generation.complete_pass(pass.index, 0).expect("awaited");
            self.texts[slot].push(token);
            let Some(&request) = self.slots.request(pass.sequence_index) else { continue };
            let generated = &mut self.generated[request];
            generated.push(token);
            let cancelled_after = arrivals[request].cancelled_after;
            if cancelled_after.is_some_and(|after| generated.len() as u32 >= after) {
                self.slots.cancel(&mut self.generation, |&it| it == request);
            }
            let progress =
                self.slots.add_tokens(pass.sequence_index, 1, false, &self.generation, &self.texts);
            if let RequestProgress::Ended(ended) = progress {
                let count = self.generated[ended].len() as u32;
                assert_eq!(count, arrivals[ended].wanted, "only a preempted request ends early");
            }
        }
    }

    /// Loses all caches, as when a device is lost.
    fn restart(&mut self) {
        self.generation.restart();
        self.in_flight.clear();
        self.slots.lose_caches();
        self.caches.iter_mut().flatten().for_each(Vec::clear);
        self.backed.fill(0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn every_request_gets_the_tokens_that_it_has_alone(
        arrivals in proptest::collection::vec(arrival(), 1..12),
        slots in 1..6usize,
        capacity in u64::from(CONTEXT)..150,
        in_flight in 1..4u32,
        lost_at in proptest::option::weighted(0.3, 0..60u32),
        choices in proptest::collection::vec(any::<bool>(), 64),
    ) {
        let mut server = Server::new(slots, capacity, arrivals.len());
        let limits = BatchLimits { in_flight, shared_prompt_tokens: 3 };
        let mut waiting: Vec<usize> = (0..arrivals.len()).collect();
        for step in 0..20_000u32 {
            waiting.retain(|&request| {
                let arrival = &arrivals[request];
                let arrives = arrival.after <= step;
                if arrives {
                    server.slots.enqueue(request, arrival.prompt.clone(), arrival.wanted);
                }
                !arrives
            });
            if lost_at == Some(step) {
                server.restart();
            }
            server.admit();
            let has_begun = server.in_flight.len() < 4 && server.begin(limits, capacity);
            if !has_begun || choices[step as usize % choices.len()] {
                server.complete(&arrivals);
            }
            let is_idle = server.slots.active_slots().next().is_none() && server.in_flight.is_empty();
            if is_idle && !server.slots.is_any_waiting() && waiting.is_empty() {
                break;
            }
            prop_assert!(step < 19_999, "the requests do not end");
        }
        for (arrival, generated) in arrivals.iter().zip(&server.generated) {
            let mut text = arrival.prompt.clone();
            let count = arrival.cancelled_after.unwrap_or(u32::MAX).min(arrival.wanted);
            let expected: Vec<u32> = (0..count).map(|_| {
                let token = next_token(&text);
                text.push(token);
                token
            }).collect();
            prop_assert_eq!(generated, &expected);
        }
    }
}
