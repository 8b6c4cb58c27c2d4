//! The requests of a server: which slot each one enters, which wait, and which are preempted.
//!
//! Requests enter in the order of arrival, as soon as a slot is vacant and its cache has room. A request that leaves its
//! slot, because there is no memory for its next tokens (preemption), waits before all others, with its tokens so far as
//! its prompt.
//!
//! The executor and the simulator keep the tokens of each slot, its *text*: the prompt of its last request, and the
//! tokens that were generated after it.
//!
//! Not here: which passes start next ([`super::Generation`]), and which caches are released for others (`cache_pool`).

use std::collections::VecDeque;

use hearth_profiles::model::ModelShape;
use hearth_schema::pass::CacheChange;
use hearth_schema::plan::Plan;

use super::cache_pool::CachePool;
use super::{Generation, GenerationError};

/// The requests of a server. `R` is what the caller keeps of each request.
#[derive(Debug, Clone)]
pub struct RequestSlots<R> {
    caches: CachePool,
    active: Vec<Option<Active<R>>>,
    waiting: VecDeque<Waiting<R>>,
}

/// A request in a slot.
#[derive(Debug, Clone)]
struct Active<R> {
    request: R,
    /// The number of tokens that it may still generate.
    remaining_tokens: u32,
    /// Whether it leaves its slot after the pass in flight, to continue later.
    is_preempted: bool,
}

#[derive(Debug, Clone)]
struct Waiting<R> {
    request: R,
    prompt: Vec<u32>,
    wanted: u32,
    was_preempted: bool,
}

/// A request that has entered a slot.
#[derive(Debug, PartialEq, Eq)]
pub struct EnteredRequest<'a, R> {
    pub request: &'a mut R,
    pub slot: u32,
    /// The number of tokens of the prompt that need not be computed.
    pub cached_tokens: u32,
    /// Whether the request continues after a preemption.
    pub is_resumed: bool,
}

/// What became of a request with new tokens.
#[derive(Debug, PartialEq, Eq)]
pub enum RequestProgress<'a, R> {
    /// It generates more tokens, or the slot has no request.
    Continues,
    /// It was the last token.
    Ended(R),
    /// The request has been preempted and waits.
    Preempted(&'a mut R),
}

/// Returns whether the devices of a plan can give the memory of a sequence's cache to other sequences, and copy a cache.
/// They cannot if a cache is on a GPU, if a draft model has other caches, or if layers use the keys and values of other
/// layers.
pub fn can_change_caches(plan: &Plan, shape: &ModelShape) -> bool {
    let is_on_cpu = plan.devices.iter().all(|device| device.gpu_layers == 0);
    is_on_cpu && plan.draft_model.is_none() && shape.shared_kv_layers().is_empty()
}

impl<R> RequestSlots<R> {
    /// Creates `slots` vacant slots with memory for the keys and values of `capacity` tokens together. Without
    /// `can_change_caches`, each slot must have memory for its whole context.
    pub fn new(slots: u32, capacity: u64, can_change_caches: bool) -> Self {
        Self {
            caches: CachePool::new(slots, capacity, can_change_caches),
            active: (0..slots).map(|_| None).collect(),
            waiting: VecDeque::new(),
        }
    }

    /// Adds a request for `wanted` tokens after `prompt`. Both have at least one token, and fit the context together.
    pub fn enqueue(&mut self, request: R, prompt: Vec<u32>, wanted: u32) {
        self.waiting.push_back(Waiting { request, prompt, wanted, was_preempted: false });
    }

    /// Lets the first waiting request enter a slot; `None` if there is none, or if it must wait for others.
    pub fn admit(
        &mut self,
        generation: &mut Generation,
        texts: &mut [Vec<u32>],
    ) -> Result<Option<EnteredRequest<'_, R>>, GenerationError> {
        let Some(first) = self.waiting.front() else { return Ok(None) };
        let Some(placed) = self.caches.place(generation, texts, &first.prompt) else { return Ok(None) };
        let Some(Waiting { request, prompt, wanted, was_preempted }) = self.waiting.pop_front() else {
            return Ok(None);
        };
        let slot = placed.slot;
        let cached_tokens = generation.admit_request(slot, prompt.len() as u32, placed.cached, wanted)?;
        debug_assert_eq!(cached_tokens, placed.cached, "the cache of slot {slot}");
        texts[slot as usize] = prompt;
        let active = &mut self.active[slot as usize];
        let active = active.insert(Active { request, remaining_tokens: wanted, is_preempted: false });
        Ok(Some(EnteredRequest {
            request: &mut active.request,
            slot,
            cached_tokens,
            is_resumed: was_preempted,
        }))
    }

    /// Releases caches of earlier requests if the next tokens need their memory. If that is not enough, the youngest
    /// request is preempted. Returns it, with its slot, if it waits already.
    pub fn make_room_for_tokens(
        &mut self,
        generation: &mut Generation,
        texts: &[Vec<u32>],
    ) -> Option<(u32, &mut R)> {
        if self.active.iter().flatten().any(|active| active.is_preempted) {
            return None;
        }
        let slot = self.caches.make_room_for_tokens(generation)?;
        generation.cancel(slot);
        let active = &mut self.active[slot as usize];
        if !generation.is_vacant(slot) {
            active.as_mut()?.is_preempted = true;
            return None;
        }
        let Active { request, remaining_tokens, .. } = active.take()?;
        Some((slot, self.requeue(request, remaining_tokens, &texts[slot as usize])))
    }

    /// Counts `tokens` new tokens of the request in a slot, whose text has them. `is_stopped` says that the last one
    /// ends the request.
    pub fn add_tokens(
        &mut self,
        slot: u32,
        tokens: u32,
        is_stopped: bool,
        generation: &Generation,
        texts: &[Vec<u32>],
    ) -> RequestProgress<'_, R> {
        let active = &mut self.active[slot as usize];
        if let Some(active) = active {
            active.remaining_tokens = active.remaining_tokens.saturating_sub(tokens);
        }
        match active.take_if(|_| generation.is_vacant(slot)) {
            None => RequestProgress::Continues,
            Some(Active { request, remaining_tokens, is_preempted: true })
                if remaining_tokens > 0 && !is_stopped =>
            {
                RequestProgress::Preempted(self.requeue(request, remaining_tokens, &texts[slot as usize]))
            }
            Some(Active { request, .. }) => RequestProgress::Ended(request),
        }
    }

    /// Ends the requests that `is_abandoned` names. Their slots become vacant after the pass in flight.
    pub fn cancel(&mut self, generation: &mut Generation, is_abandoned: impl Fn(&R) -> bool) {
        self.waiting.retain(|waiting| !is_abandoned(&waiting.request));
        for (slot, active) in (0..).zip(&mut self.active) {
            if active.take_if(|active| is_abandoned(&active.request)).is_some() {
                generation.cancel(slot);
            }
        }
    }

    /// Removes and returns all requests.
    pub fn drain(&mut self) -> Vec<R> {
        let active = self.active.iter_mut().filter_map(Option::take).map(|active| active.request);
        active.chain(self.waiting.drain(..).map(|waiting| waiting.request)).collect()
    }

    /// Records that the caches of all slots are lost.
    pub fn lose_caches(&mut self) {
        self.caches.clear();
    }

    /// Removes and returns what the devices have to do before the next batch.
    pub fn take_cache_changes(&mut self) -> Vec<CacheChange> {
        self.caches.take_changes()
    }

    /// Returns the request in a slot.
    pub fn request(&self, slot: u32) -> Option<&R> {
        self.active.get(slot as usize)?.as_ref().map(|active| &active.request)
    }

    /// Returns the slots with a request.
    pub fn active_slots(&self) -> impl Iterator<Item = u32> {
        (0..).zip(&self.active).filter_map(|(slot, active)| active.as_ref().map(|_| slot))
    }

    pub fn is_any_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Adds a preempted request to the front of the queue. The slot keeps its text: its cache is used if its memory is not
    /// needed before.
    fn requeue(&mut self, request: R, remaining_tokens: u32, text: &[u32]) -> &mut R {
        let prompt = text.to_vec();
        self.waiting.push_front(Waiting { request, prompt, wanted: remaining_tokens, was_preempted: true });
        &mut self.waiting[0].request
    }
}
