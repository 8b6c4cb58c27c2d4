//! The memory of the KV caches of a server's slots, which the slots share.
//!
//! Each slot has an address range for the whole context, of which the system provides memory where something was
//! written. So a slot can become as long as the context, while the slots together have room for fewer tokens than all
//! contexts. The pool counts, for each slot, the positions that have memory, and decides what to do when they are too
//! many: caches of earlier requests are released, least recently used first; then the youngest request leaves its slot,
//! and is computed again later.
//!
//! A request whose prompt begins as the tokens of another slot do gets a copy of these positions (prefix sharing).
//!
//! Not here: which passes start next ([`super::Generation`]).

use std::cmp::Reverse;

use hearth_schema::pass::CacheChange;

use super::Generation;

/// Positions of each active request that are kept free for its next tokens, so that requests leave their slots seldom.
/// source: assumed
pub(super) const HEADROOM_TOKENS: u64 = 16;
/// Minimum number of positions that are copied to another slot. source: assumed; a template begins with as many tokens
/// whatever the request is
const MIN_COPIED_TOKENS: u32 = 16;

/// The memory of the KV caches of a server's slots.
#[derive(Debug, Clone)]
pub struct CachePool {
    /// The number of positions for which there is memory.
    capacity: u64,
    /// Whether devices can release and copy caches.
    can_change: bool,
    /// For each slot, the number of positions that have memory.
    backed: Vec<u32>,
    /// For each slot, the number of its last request, counted from 1; 0 before its first request.
    last_used: Vec<u64>,
    requests: u64,
    /// What the devices have to do before the next batch.
    changes: Vec<CacheChange>,
}

/// Where a request enters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    pub slot: u32,
    /// The number of tokens of the prompt that are cached and need not be computed.
    pub cached: u32,
}

/// A slot that a request can enter.
struct Candidate {
    slot: u32,
    /// The number of tokens that need not be computed.
    reused: u32,
    /// The slot from which they are copied.
    donor: Option<u32>,
    /// The number of cached tokens that a later request can no longer use.
    lost: u32,
}

impl CachePool {
    /// Creates the pool of `slots` empty slots with memory for `capacity` positions. Without `can_change`, each slot must
    /// have memory for its whole context.
    pub fn new(slots: u32, capacity: u64, can_change: bool) -> CachePool {
        CachePool {
            capacity,
            can_change,
            backed: vec![0; slots as usize],
            last_used: vec![0; slots as usize],
            requests: 0,
            changes: Vec::new(),
        }
    }

    /// Chooses a vacant slot for a prompt, and makes room for it. `tokens` are the tokens of each slot. Returns `None` if
    /// the request must wait for others.
    ///
    /// The score of a slot is the number of tokens that it saves minus the number of cached tokens that are lost, which a
    /// later request could use. Of slots with the same score, the least recently used slot is chosen.
    pub fn place(
        &mut self,
        generation: &mut Generation,
        tokens: &[Vec<u32>],
        prompt: &[u32],
    ) -> Option<Placement> {
        if !(0..self.slots()).any(|slot| generation.is_vacant(slot)) {
            return None;
        }
        self.observe(generation);
        let length = prompt.len() as u32;
        let common = |slot: u32| {
            let cached = generation.cached_tokens(slot) as usize;
            let own = tokens.get(slot as usize).map_or(&[][..], |own| &own[..own.len().min(cached)]);
            own.iter().zip(prompt).take_while(|(one, other)| one == other).count() as u32
        };
        let donor = (0..self.slots()).max_by_key(|&slot| (common(slot), Reverse(slot)));
        let donor = donor.map(|slot| (slot, common(slot).min(length.saturating_sub(1))));
        let donor = donor.filter(|&(_, tokens)| {
            self.can_change && generation.can_truncate() && tokens >= MIN_COPIED_TOKENS
        });
        let vacant = (0..self.slots()).filter(|&slot| generation.is_vacant(slot));
        let candidates = vacant.flat_map(|slot| {
            let cached = generation.cached_tokens(slot);
            let reused = generation.reusable_tokens(slot, length, common(slot));
            let own = Candidate { slot, reused, donor: None, lost: cached - reused };
            let copy = |(donor, reused)| Candidate { slot, reused, donor: Some(donor), lost: cached };
            [Some(own), donor.filter(|&(donor, _)| donor != slot).map(copy)].into_iter().flatten()
        });
        let rank = |it: &Candidate| {
            let score = i64::from(it.reused) - i64::from(it.lost);
            (score, it.donor.is_none(), Reverse(self.last_used[it.slot as usize]), it.slot)
        };
        let Candidate { slot, reused, donor, .. } = candidates.max_by_key(rank)?;
        let is_emptied = self.can_change && (donor.is_some() || reused == 0);
        let kept = if is_emptied { 0 } else { self.backed[slot as usize] };
        let positions = kept.max(length);
        let released = self.changes.len();
        if !self.make_room(generation, slot, donor, positions) {
            return None;
        }
        // Making room may have released the donor, which must be copied before.
        let mut changes = self.changes.split_off(released);
        if is_emptied {
            self.release(generation, slot);
        }
        if let Some(from) = donor {
            self.changes.push(CacheChange::Copy { from, to: slot, tokens: reused });
            generation.set_cached_tokens(slot, reused);
        }
        self.changes.append(&mut changes);
        self.backed[slot as usize] = positions;
        self.requests += 1;
        self.last_used[slot as usize] = self.requests;
        Some(Placement { slot, cached: reused })
    }

    /// Makes room for the next tokens of the active requests. Returns a request that must leave its slot.
    pub fn make_room_for_tokens(&mut self, generation: &mut Generation) -> Option<u32> {
        if !self.can_change {
            return None;
        }
        self.observe(generation);
        let active = (0..self.slots()).filter(|&slot| !generation.is_vacant(slot));
        let youngest = active.max_by_key(|&slot| self.last_used[slot as usize])?;
        // A request alone always has room.
        let has_room = self.make_room(generation, youngest, None, self.backed[youngest as usize]);
        (!has_room).then_some(youngest)
    }

    /// Removes and returns what the devices have to do before the next batch.
    pub fn take_changes(&mut self) -> Vec<CacheChange> {
        std::mem::take(&mut self.changes)
    }

    /// Records that all caches are empty, because the ring is another one.
    pub fn clear(&mut self) {
        self.backed.fill(0);
        self.changes.clear();
    }

    fn slots(&self) -> u32 {
        self.backed.len() as u32
    }

    fn observe(&mut self, generation: &Generation) {
        for (slot, backed) in (0..).zip(&mut self.backed) {
            *backed = (*backed).max(generation.needed_positions(slot));
        }
    }

    /// Releases caches of vacant slots until `slot` can have memory for `positions`. Returns false, and releases nothing,
    /// if that is not enough.
    fn make_room(
        &mut self,
        generation: &mut Generation,
        slot: u32,
        donor: Option<u32>,
        positions: u32,
    ) -> bool {
        if !self.can_change {
            return true;
        }
        let others = (0..self.slots()).filter(|&other| other != slot);
        let (mut vacant, active): (Vec<u32>, Vec<u32>) =
            others.partition(|&other| generation.is_vacant(other));
        let backed =
            |slots: &[u32]| slots.iter().map(|&slot| u64::from(self.backed[slot as usize])).sum::<u64>();
        let headroom = HEADROOM_TOKENS * (active.len() as u64 + 1);
        // A request alone always has room: it fits the context.
        let headroom = if active.is_empty() { 0 } else { headroom };
        let needed = u64::from(positions) + backed(&active) + headroom;
        if needed > self.capacity && !active.is_empty() {
            return false;
        }
        vacant.sort_by_key(|&slot| (Some(slot) == donor, self.last_used[slot as usize], slot));
        let mut total = needed + backed(&vacant);
        for other in vacant {
            if total <= self.capacity {
                break;
            }
            total -= u64::from(self.backed[other as usize]);
            self.release(generation, other);
        }
        true
    }

    fn release(&mut self, generation: &mut Generation, slot: u32) {
        if std::mem::take(&mut self.backed[slot as usize]) > 0 {
            generation.set_cached_tokens(slot, 0);
            self.changes.push(CacheChange::Release { sequence: slot });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The slots of a server: the pool, and the tokens of each slot.
    struct Slots {
        pool: CachePool,
        generation: Generation,
        tokens: Vec<Vec<u32>>,
    }

    impl Slots {
        fn new(slots: u32, capacity: u64) -> Slots {
            let generation = Generation::with_vacant_slots(slots, 512, 0, true);
            let pool = CachePool::new(slots, capacity, true);
            Slots { pool, generation, tokens: vec![Vec::new(); slots as usize] }
        }

        /// Admits a request. Returns its slot and the number of tokens that it need not compute.
        fn admit(&mut self, prompt: &[u32], wanted: u32) -> Option<(u32, u32)> {
            let Placement { slot, cached } = self.pool.place(&mut self.generation, &self.tokens, prompt)?;
            let reused = self.generation.admit_request(slot, prompt.len() as u32, cached, wanted);
            self.tokens[slot as usize] = prompt.to_vec();
            Some((slot, reused.expect("a vacant slot")))
        }

        /// Runs a pass of each sequence.
        fn step(&mut self) {
            let mut passes = Vec::new();
            while let Some(pass) = self.generation.begin_pass() {
                passes.push(pass);
            }
            for pass in passes.into_iter().filter(|pass| pass.has_output) {
                self.generation.complete_pass(pass.index, 0).expect("awaited");
                self.tokens[pass.sequence_index as usize].push(7);
            }
        }
    }

    fn text(seed: u32, length: u32) -> Vec<u32> {
        (0..length).map(|at| seed * 1000 + at).collect()
    }

    #[test]
    fn caches_are_released_when_others_need_the_memory() {
        let mut slots = Slots::new(3, 200);
        assert_eq!(slots.admit(&text(1, 100), 1), Some((2, 0)));
        slots.step();
        assert_eq!(slots.admit(&text(2, 60), 1), Some((1, 0)));
        slots.step();
        assert!(slots.pool.take_changes().is_empty(), "both fit");
        // The least recently used cache is released, the other one is kept.
        assert_eq!(slots.admit(&text(3, 90), 1), Some((0, 0)));
        assert_eq!(slots.pool.take_changes(), [CacheChange::Release { sequence: 2 }]);
        assert_eq!([1, 2].map(|slot| slots.generation.cached_tokens(slot)), [60, 0]);
    }

    #[test]
    fn requests_wait_for_memory_and_leave_when_there_is_none() {
        let mut slots = Slots::new(3, 200);
        slots.admit(&text(1, 80), 100).expect("room");
        slots.admit(&text(2, 70), 100).expect("room");
        assert_eq!(slots.admit(&text(3, 40), 1), None, "150 of 200 positions and some headroom are used");
        for step in 0..100 {
            if let Some(slot) = slots.pool.make_room_for_tokens(&mut slots.generation) {
                assert!(slot == 1 && step >= 5, "the youngest leaves after {step} tokens");
                slots.generation.cancel(slot);
                break;
            }
            slots.step();
        }
        // The remaining request uses the memory of the other one.
        for _ in 0..90 {
            assert_eq!(slots.pool.make_room_for_tokens(&mut slots.generation), None);
            slots.step();
        }
        assert_eq!(slots.pool.take_changes(), [CacheChange::Release { sequence: 1 }]);
    }

    #[test]
    fn a_common_beginning_is_copied_from_a_busy_slot() {
        let mut slots = Slots::new(2, 1000);
        let shared = text(1, 50);
        slots.admit(&[shared.clone(), text(2, 10)].concat(), 100).expect("room");
        slots.step();
        let second = [shared.clone(), text(3, 10)].concat();
        assert_eq!(slots.admit(&second, 1), Some((0, 50)));
        assert_eq!(slots.pool.take_changes(), [CacheChange::Copy { from: 1, to: 0, tokens: 50 }]);
        slots.step();
        // The same conversation continues in its slot, and nothing is copied.
        assert_eq!(slots.admit(&[second, text(4, 5)].concat(), 1), Some((0, 60)));
        assert!(slots.pool.take_changes().is_empty());
        assert_eq!(slots.admit(&text(5, 8), 1), None, "both slots are busy");
    }

    #[test]
    fn a_donor_is_copied_before_it_is_released() {
        let mut slots = Slots::new(2, 120);
        let long = text(1, 60);
        slots.admit(&long, 1).expect("room");
        slots.step();
        slots.admit(&text(2, 10), 50).expect("room");
        slots.step();
        // The slot with the common beginning is vacant, so it is used in place.
        assert_eq!(slots.admit(&[&long[..30], &text(3, 40)].concat(), 1).map(|(slot, _)| slot), Some(1));
    }
}
