//! A scenario's devices and links with every reference resolved to numbers.
//!
//! The command line reads the files that a scenario names and builds this; planners and the simulator
//! take it and open nothing themselves.

use hearth_profiles::model::ModelProfile;
use hearth_profiles::{Device, Link};

use crate::residency::ResidencyOptions;
use crate::scenario::{KvFormat, Links, Workload};

/// A device of the cluster.
#[derive(Debug, Clone, PartialEq)]
pub struct Member {
    /// Its name in the scenario.
    pub name: String,
    /// Where its worker listens.
    pub address: Option<String>,
    /// What it can do.
    pub device: Device,
    /// How it keeps its weights; the planner's choice if absent.
    pub residency: Option<ResidencyOptions>,
}

/// Every link of the cluster.
#[derive(Debug, Clone, PartialEq)]
pub struct LinkTable {
    links: Links,
}

impl LinkTable {
    /// The links of a scenario.
    pub fn new(links: Links) -> Self {
        Self { links }
    }

    /// The link between two devices by name.
    pub fn between(&self, from: &str, to: &str) -> &Link {
        let joins =
            |pair: &[String; 2]| (pair[0] == from && pair[1] == to) || (pair[0] == to && pair[1] == from);
        self.links
            .between
            .iter()
            .find(|named| joins(&named.devices))
            .map_or(&self.links.default, |named| &named.link)
    }
}

/// A scenario with every reference resolved.
#[derive(Debug, Clone, PartialEq)]
pub struct Cluster {
    /// The devices, in the scenario's order.
    pub members: Vec<Member>,
    /// Index of the head in `members`.
    pub head: usize,
    /// The links between them.
    pub links: LinkTable,
    /// The model.
    pub model: ModelProfile,
    /// Tokens the key-value cache is made for.
    pub context: u32,
    /// How keys and values are stored.
    pub kv_cache: KvFormat,
    /// What is asked.
    pub workload: Workload,
    /// The seed of every random draw.
    pub seed: u64,
}

impl Cluster {
    /// A member by name.
    pub fn member(&self, name: &str) -> Option<&Member> {
        self.members.iter().find(|member| member.name == name)
    }
}
