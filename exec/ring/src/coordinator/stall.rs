//! Where activations are stuck: finds the device or the connection because of which a pass does not return.
//!
//! All passes take the same way around the ring, and each device sends one message for each that it receives. The
//! counts of all devices therefore show where the first message is missing.

use crate::wire::ActivationCounts;

/// The place where activations are stuck. Devices are given by their index in the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stall {
    /// The worker has received activations and has not passed them on.
    Worker(usize),
    /// Activations that `sender` has sent have not arrived at `receiver`.
    Link { sender: usize, receiver: usize },
}

/// Returns the place where activations are stuck, from the counts of the devices in ring order, the head first. Of
/// several workers, it is the one with the most activations. Returns `None` if nothing is missing.
pub(super) fn find_stall(counts: &[ActivationCounts]) -> Option<Stall> {
    let backlog = |counts: &ActivationCounts| counts.received.saturating_sub(counts.sent);
    let workers = counts.iter().enumerate().skip(1).filter(|(_, own)| backlog(own) > 0);
    // The earliest of those with the same number: the later ones wait for it.
    if let Some((worker, _)) = workers.rev().max_by_key(|(_, own)| backlog(own)) {
        return Some(Stall::Worker(worker));
    }
    let mut links = (0..counts.len()).map(|sender| (sender, (sender + 1) % counts.len()));
    let lost = links.find(|&(sender, receiver)| counts[sender].sent > counts[receiver].received);
    lost.map(|(sender, receiver)| Stall::Link { sender, receiver })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stalls_are_found_from_the_counts() {
        let find = |counts: &[(u64, u64)]| {
            let counts: Vec<_> =
                counts.iter().map(|&(received, sent)| ActivationCounts { received, sent }).collect();
            find_stall(&counts)
        };
        assert_eq!(find(&[(5, 5), (5, 5), (5, 5)]), None, "nothing is in flight");
        assert_eq!(find(&[(4, 5), (5, 5), (5, 4)]), Some(Stall::Worker(2)));
        assert_eq!(find(&[(4, 5), (5, 4), (4, 4)]), Some(Stall::Worker(1)));
        // The second worker does not read, so that the first one cannot send everything.
        assert_eq!(find(&[(1, 9), (9, 8), (8, 1)]), Some(Stall::Worker(2)));
        assert_eq!(find(&[(1, 9), (9, 5), (5, 1)]), Some(Stall::Worker(1)), "the same number");
        assert_eq!(find(&[(4, 5), (4, 4), (4, 4)]), Some(Stall::Link { sender: 0, receiver: 1 }));
        assert_eq!(find(&[(4, 5), (5, 5), (4, 4)]), Some(Stall::Link { sender: 1, receiver: 2 }));
        assert_eq!(find(&[(4, 5), (5, 5), (5, 5)]), Some(Stall::Link { sender: 2, receiver: 0 }));
        assert_eq!(find(&[(0, 0)]), None, "the head alone");
    }
}
