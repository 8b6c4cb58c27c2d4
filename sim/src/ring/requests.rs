//! Requests that arrive during a simulated run, as at a server.
//!
//! [`RequestSlots`] decides which request enters which slot. No two requests have tokens in common, so no cache is used
//! again; the text of a request is its number, once for each token.
//!
//! Deviation: copies and releases of caches take no time, because a copied beginning is much shorter to copy than to
//! compute. The experts that a mixture draws for a position are the same for all requests of a slot. A ring that adapts its
//! plan does not do so while it is idle.

use std::sync::Arc;

use hearth_core::schedule::arrivals::arrivals;
use hearth_core::schedule::request_slots::{RequestProgress, RequestSlots, can_change_caches};
use hearth_schema::pass::{CacheChange, Pass};
use hearth_schema::request_trace::Arrival;
use hearth_schema::trace::Admission;

use super::Simulation;
use crate::device::context::Event;
use crate::error::SimError;
use crate::input::Input;

/// The requests of a run, and the texts of their slots.
#[derive(Debug)]
pub struct SimulatedRequests {
    arrivals: Arc<[Arrival]>,
    /// The number of requests that have arrived and entered the queue.
    arrived: usize,
    /// The request for whose arrival the timer was set.
    timer_is_for: Option<usize>,
    /// The requests by their index.
    slots: RequestSlots<u32>,
    texts: Vec<Vec<u32>>,
    finished: usize,
    pub admissions: Vec<Admission>,
}

impl SimulatedRequests {
    /// Creates the requests of a run; `None` if all start when the run begins.
    pub fn new(input: &Input) -> Option<Self> {
        let arrivals = arrivals(input.cluster)?;
        let slots = input.cluster.workload.sequences;
        let can_change = can_change_caches(input.plan, &input.cluster.model.shape);
        Some(Self {
            arrivals,
            arrived: 0,
            timer_is_for: None,
            slots: RequestSlots::new(slots, input.plan.total_cache_tokens(), can_change),
            texts: vec![Vec::new(); slots as usize],
            finished: 0,
            admissions: Vec::new(),
        })
    }

    /// Returns the slots with a request.
    pub fn active_slots(&self) -> impl Iterator<Item = u32> {
        self.slots.active_slots()
    }

    pub fn are_finished(&self) -> bool {
        self.finished == self.arrivals.len()
    }

    /// Records that the caches of all slots are lost.
    pub fn lose_caches(&mut self) {
        self.slots.lose_caches();
    }

    pub fn take_cache_changes(&mut self) -> Vec<CacheChange> {
        self.slots.take_cache_changes()
    }
}

impl Simulation<'_> {
    /// Lets the requests that have arrived enter vacant slots.
    pub fn admit_requests(&mut self) -> Result<(), SimError> {
        let (now, first_pass) = (self.engine.now(), self.generation.next_pass_index());
        let Some(requests) = &mut self.requests else { return Ok(()) };
        loop {
            // Only the first waiting request has its prompt, because long queues of long prompts would need much memory.
            if !requests.slots.is_any_waiting() {
                let Some(next) = requests.arrivals.get(requests.arrived) else { break };
                if next.at_ns > now {
                    if requests.timer_is_for.replace(requests.arrived) != Some(requests.arrived) {
                        self.engine.set_timer(self.arrival_timer, next.at_ns, Event::Arrival);
                    }
                    break;
                }
                let number = requests.arrived as u32;
                let prompt = vec![number; next.prompt_tokens as usize];
                requests.slots.enqueue(number, prompt, next.generated_tokens);
                requests.arrived += 1;
            }
            let Some(entered) = requests.slots.admit(&mut self.generation, &mut requests.texts)? else {
                break;
            };
            let (request, sequence) = (*entered.request, entered.slot);
            let arrival_ns = requests.arrivals.get(request as usize).map_or(0, |arrival| arrival.at_ns);
            requests.admissions.push(Admission {
                request,
                sequence,
                first_pass,
                arrival_ns,
                admitted_ns: now,
            });
        }
        requests.slots.make_room_for_tokens(&mut self.generation, &requests.texts);
        Ok(())
    }

    /// Returns the request of a pass; its sequence if all start when the run begins.
    pub fn request_of(&self, pass: &Pass) -> u32 {
        let requests = self.requests.as_ref();
        let request = requests.and_then(|requests| requests.slots.request(pass.sequence_index));
        request.copied().unwrap_or(pass.sequence_index)
    }

    /// Adds the tokens of a completed pass to the text of its request.
    pub fn add_request_tokens(&mut self, pass: &Pass, tokens: u32) {
        let Some(requests) = &mut self.requests else { return };
        let slot = pass.sequence_index;
        if let Some(&number) = requests.slots.request(slot) {
            requests.texts[slot as usize].extend(std::iter::repeat_n(number, tokens as usize));
        }
        let progress = requests.slots.add_tokens(slot, tokens, false, &self.generation, &requests.texts);
        requests.finished += usize::from(matches!(progress, RequestProgress::Ended(_)));
    }
}
