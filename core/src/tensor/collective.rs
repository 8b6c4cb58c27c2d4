//! All-reduce: the messages of each pattern until every device has the sum.
//!
//! A device's part in one all-reduce depends only on the number of messages it has received: it may have sent
//! [`Collective::due`] of its own by now, and is done after [`Collective::awaited`]. For `N` devices and a partial
//! result of `p` bytes:
//!
//! | pattern | messages | of bytes each | one after another |
//! | --- | --- | --- | --- |
//! | all-gather | N (N - 1) | p | 1 |
//! | star | 2 (N - 1) | p | 2 |
//! | ring | 2 N (N - 1) | p / N | 2 (N - 1) |
//! | over the air | none | - | - |
//!
//! dllama sends 2 L (N - 1) partial results a node and token: with Llama-3-8B (L = 32, 4096 numbers) in blocks of 34
//! bytes for 32 that is 272 KiB for two nodes and 816 KiB for four.
//!
//! Not here: how long a message takes.

use hearth_profiles::Bytes;

use hearth_schema::plan::tensor::AllReduce;

/// The pattern of messages of one all-reduce.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Collective {
    /// The algorithm: which devices add up, and how the sum is distributed.
    pub pattern: AllReduce,
    /// How many devices take part.
    pub devices: usize,
}

impl Collective {
    /// The number of messages that a device must have sent once it has received `received` messages.
    pub fn due(self, place: usize, received: usize) -> usize {
        let others = self.devices - 1;
        match self.pattern {
            _ if others == 0 => 0,
            AllReduce::AllGather => others,
            AllReduce::Star if place == 0 => {
                if received >= others {
                    others
                } else {
                    0
                }
            }
            AllReduce::Star => 1,
            AllReduce::Ring => (1 + received).min(2 * others),
            AllReduce::OverTheAir => 0,
        }
    }

    /// The device that receives the message with this number, from 0.
    pub fn receiver(self, place: usize, number: usize) -> usize {
        match self.pattern {
            AllReduce::Star if place > 0 => 0,
            AllReduce::Star => number + 1,
            AllReduce::AllGather | AllReduce::OverTheAir => (place + 1 + number) % self.devices,
            AllReduce::Ring => (place + 1) % self.devices,
        }
    }

    /// The number of messages that a device receives in total.
    pub fn awaited(self, place: usize) -> usize {
        let others = self.devices - 1;
        match self.pattern {
            _ if others == 0 => 0,
            AllReduce::AllGather => others,
            AllReduce::Star if place == 0 => others,
            AllReduce::Star => 1,
            AllReduce::Ring => 2 * others,
            AllReduce::OverTheAir => 0,
        }
    }

    /// The size of one message, where a partial result has `partial` bytes.
    pub fn message(self, partial: Bytes) -> Bytes {
        match self.pattern {
            AllReduce::Ring => Bytes(partial.0.div_ceil(self.devices as u64)),
            AllReduce::AllGather | AllReduce::Star | AllReduce::OverTheAir => partial,
        }
    }

    /// The places that a device sends to in an all-reduce, and the head also when it hands a token out.
    pub fn receivers(self, place: usize) -> Vec<usize> {
        let all = self.due(place, usize::MAX / 2);
        let mut places: Vec<usize> = (0..all).map(|number| self.receiver(place, number)).collect();
        if place == 0 {
            places.extend(1..self.devices);
        }
        places.sort_unstable();
        places.dedup();
        places
    }
}
