//! Requests that arrive during a simulated run, as at a server.
//!
//! [`RequestSlots`] decides which request enters which slot. No two requests have tokens in common, so no cache is used
//! again; the text of a request is its number, once for each token.
//!
//! Deviation: the copies and the release of caches take no time.

use std::sync::Arc;

use hearth_core::schedule::arrivals::{Arrival, arrivals};
use hearth_core::schedule::request_slots::{RequestProgress, RequestSlots, can_change_caches};
use hearth_schema::pass::{CacheChange, Pass};
use hearth_schema::trace::Admission;

use super::Simulation;
use crate::device::context::Event;
use crate::error::SimError;
use crate::input::Input;

/// The requests of a run, and the texts of their slots.
#[derive(Debug)]
pub struct SimulatedRequests {
    arrivals: Arc<[Arrival]>,
    /// The number of requests that have arrived.
    arrived: usize,
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
            slots: RequestSlots::new(slots, input.plan.total_cache_tokens(), can_change),
            texts: vec![Vec::new(); slots as usize],
            finished: 0,
            admissions: Vec::new(),
        })
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
        let before = requests.arrived;
        while let Some(arrival) = requests.arrivals.get(requests.arrived).filter(|it| it.at_ns <= now) {
            let number = requests.arrived as u32;
            let prompt = vec![number; arrival.prompt_tokens as usize];
            requests.slots.enqueue(number, prompt, arrival.generated_tokens);
            requests.arrived += 1;
        }
        if let Some(next) = requests.arrivals.get(requests.arrived)
            && (requests.arrived > before || requests.arrived == 0)
        {
            self.engine.set_timer(self.arrival_timer, next.at_ns, Event::Arrival);
        }
        while let Some(entered) = requests.slots.admit(&mut self.generation, &mut requests.texts)? {
            let (request, sequence) = (*entered.request, entered.slot);
            let arrival_ns = requests.arrivals.get(request as usize).map_or(0, |arrival| arrival.at_ns);
            requests.admissions.push(Admission { request, sequence, first_pass, arrival_ns, entry_ns: now });
        }
        requests.slots.make_room_for_tokens(&mut self.generation, &requests.texts);
        Ok(())
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
