//! All-reduce: the messages of each pattern until every device has the sum.
//!
//! What a device does in an all-reduce depends only on the number of messages that it has received: by then it must
//! have sent [`Collective::due_messages`] messages, and after [`Collective::total_messages`] received messages it is
//! done. For `N` devices and a partial result of `p` bytes:
//!
//! | pattern | messages | bytes per message | sequential messages |
//! | --- | --- | --- | --- |
//! | all-gather | N (N - 1) | p | 1 |
//! | star | 2 (N - 1) | p | 2 |
//! | ring | 2 N (N - 1) | p / N | 2 (N - 1) |
//! | over the air | none | - | - |
//!
//! A node of dllama sends 2 L (N - 1) partial results per token of a model with L layers. With Llama-3-8B (L = 32, 4096
//! elements in blocks of 34 bytes for 32 elements) these are 272 KiB for two nodes and 816 KiB for four nodes.
//!
//! Not here: how long a message takes.

use std::collections::BTreeSet;

use hearth_profiles::Bytes;
use hearth_schema::plan::tensor_parallel::AllReduce;

/// The message pattern of one all-reduce.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Collective {
    /// The algorithm, which determines which devices add the partial results and how the sum is distributed.
    pub algorithm: AllReduce,
    /// The number of devices.
    pub devices: usize,
}

impl Collective {
    /// Returns the number of messages that the device with index `index` must have sent after it has received
    /// `received` messages.
    pub fn due_messages(self, index: usize, received: usize) -> usize {
        let others = self.devices - 1;
        match self.algorithm {
            _ if others == 0 => 0,
            AllReduce::Star if index > 0 => 1,
            AllReduce::Star if received < others => 0,
            AllReduce::AllGather | AllReduce::Star => others,
            AllReduce::Ring => (1 + received).min(2 * others),
            AllReduce::OverTheAir => 0,
        }
    }

    /// Returns the index of the device that receives message `number` (from 0) of the device with index `index`.
    pub fn receiver(self, index: usize, number: usize) -> usize {
        match self.algorithm {
            AllReduce::Star if index > 0 => 0,
            AllReduce::Star => number + 1,
            AllReduce::AllGather | AllReduce::OverTheAir => (index + 1 + number) % self.devices,
            AllReduce::Ring => (index + 1) % self.devices,
        }
    }

    /// Returns the number of messages that a device receives in one all-reduce, which equals the number that it sends.
    pub fn total_messages(self, index: usize) -> usize {
        self.due_messages(index, usize::MAX / 2)
    }

    /// Returns the size of one message for a partial result of `partial` bytes.
    pub fn message_bytes(self, partial: Bytes) -> Bytes {
        match self.algorithm {
            AllReduce::Ring => Bytes(partial.0.div_ceil(self.devices as u64)),
            AllReduce::AllGather | AllReduce::Star | AllReduce::OverTheAir => partial,
        }
    }

    /// Returns the indices of the devices to which the device with index `index` sends messages: partial results, and
    /// from the head device also generated tokens.
    pub fn receivers(self, index: usize) -> Vec<usize> {
        let sent = 0..self.total_messages(index);
        let mut receivers: BTreeSet<usize> = sent.map(|number| self.receiver(index, number)).collect();
        if index == 0 {
            receivers.extend(1..self.devices);
        }
        receivers.into_iter().collect()
    }
}
