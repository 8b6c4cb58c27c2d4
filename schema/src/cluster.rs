//! A scenario's devices and links with every reference resolved to numbers.
//!
//! The command line reads the files that a scenario names and builds this; planners and the simulator
//! take it and open nothing themselves.

use std::sync::Arc;

use hearth_profiles::model::ModelProfile;
use hearth_profiles::{Device, Link};

use crate::plan::Plan;
use crate::residency::ResidencyOptions;
use crate::scenario::{KvFormat, Links, Unreachable, Workload};
use crate::schedule::Schedule;

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

    /// The link between devices of which nothing else is known.
    pub fn usual(&self) -> &Link {
        &self.links.default
    }

    /// The link from one device to another by name, `None` if the first cannot send to the second.
    pub fn between(&self, from: &str, to: &str) -> Option<&Link> {
        let forward = |pair: &[String; 2]| pair[0] == from && pair[1] == to;
        let joins = |pair: &[String; 2]| forward(pair) || (pair[0] == to && pair[1] == from);
        let Some(named) = self.links.between.iter().find(|named| joins(&named.devices)) else {
            return Some(&self.links.default);
        };
        match named.unreachable {
            Some(Unreachable::Both) => None,
            Some(Unreachable::Forward) if forward(&named.devices) => None,
            _ => Some(named.link.as_ref().unwrap_or(&self.links.default)),
        }
    }

    /// Checks that every device of a valid plan can send to those that it has to send to.
    pub fn carry(&self, plan: &Plan) -> Result<(), NoLink> {
        let shared = Arc::new(plan.clone());
        for (place, sender) in plan.devices.iter().enumerate() {
            let receivers = match plan.kind.tensor() {
                None => Schedule::new(shared.clone(), place).receivers(),
                Some(tensor) => tensor.all_reduce.receivers(place, plan.devices.len()),
            };
            for to in receivers {
                let receiver = &plan.devices[to].name;
                if self.between(&sender.name, receiver).is_none() {
                    return Err(NoLink { from: sender.name.clone(), to: receiver.clone() });
                }
            }
        }
        Ok(())
    }
}

/// A plan sends where the scenario says that nothing can be sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the plan sends from `{from}` to `{to}`, which the scenario says cannot be reached from there; plan again \
     from this scenario"
)]
pub struct NoLink {
    /// Who sends.
    pub from: String,
    /// Who would receive.
    pub to: String,
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
