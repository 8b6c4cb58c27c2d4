//! Export of a plan: the command lines with which llama.cpp or prima.cpp run the placement of a plan.
//!
//! [`export`] is a pure function. Besides the commands, it returns what the flags of the other engine cannot express,
//! and the placeholders in the commands for what the scenario does not name, such as the address of a device.
//!
//! Not here: plans that other systems would make ([`crate::systems`]), and the printing of the commands.

mod command;
mod llama_cpp;
mod prima_cpp;

use std::collections::BTreeSet;

use hearth_core::Cluster;
use hearth_core::memory::{DeviceMemory, draft};
use hearth_profiles::DeviceProfile;
use hearth_profiles::device::Gpu;
use hearth_schema::address::split_host_port;
use hearth_schema::plan::{Plan, PlannedDevice, Processor};
use hearth_schema::scenario::Scenario;
use serde::Serialize;

pub use command::{DeviceCommand, LayerRange};

/// A program that can run a placement of layers on several devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Engine {
    /// `llama-server` on the head, and `ggml-rpc-server` on the other devices.
    #[serde(rename = "llama.cpp")]
    LlamaCpp,
    /// `llama-cli` of prima.cpp on every device, as a ring.
    #[serde(rename = "prima.cpp")]
    PrimaCpp,
}

/// The commands of another engine for a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ExportedPlan {
    pub engine: Engine,
    /// What a user must know to run the commands.
    pub notes: Vec<String>,
    /// The words in the commands that the user must replace.
    pub placeholders: Vec<Placeholder>,
    /// A command for each device that the engine uses, in the order in which they must be started.
    pub commands: Vec<DeviceCommand>,
    /// The properties of the plan that the flags of the engine cannot express, a sentence or two for each.
    pub not_expressed: Vec<String>,
}

/// A word in a command that stands for something that the scenario does not name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Placeholder {
    pub name: String,
    pub meaning: String,
}

/// The paths of the model files, as the commands name them; `None` where only the kind of the model is known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ModelFiles<'a> {
    pub model: Option<&'a str>,
    pub draft_model: Option<&'a str>,
}

/// Why a plan cannot be exported.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExportError {
    #[error(
        "the plan slices every layer over all devices (`kind: tensor`), but these commands place whole layers; plan \
         with another strategy, such as `--strategy overlap`"
    )]
    TensorPlan,
    #[error(
        "the plan is for the model `{planned}`, but the scenario has `{given}`; plan again from this scenario"
    )]
    OtherModel { planned: String, given: String },
    #[error(
        "the plan uses the device `{name}`, which the scenario does not have; plan again from this scenario"
    )]
    UnknownDevice { name: String },
    #[error(
        "the plan has layers on the GPU of `{name}`, whose profile has no GPU; plan again from this scenario"
    )]
    NoGpu { name: String },
}

/// Returns the commands with which `engine` runs the placement of a valid plan. `scenario` is the scenario of the plan,
/// and `cluster` the same scenario with profiles in place of its references.
pub fn export(
    engine: Engine,
    plan: &Plan,
    scenario: &Scenario,
    cluster: &Cluster,
    files: ModelFiles,
) -> Result<ExportedPlan, ExportError> {
    let ring = Ring::new(plan, scenario, cluster, files)?;
    Ok(match engine {
        Engine::LlamaCpp => llama_cpp::export(&ring),
        Engine::PrimaCpp => prima_cpp::export(&ring),
    })
}

/// A ring plan with what the commands need to know about its devices.
struct Ring<'a> {
    plan: &'a Plan,
    cluster: &'a Cluster,
    files: ModelFiles<'a>,
    devices: Vec<RingDevice<'a>>,
}

struct RingDevice<'a> {
    planned: &'a PlannedDevice,
    profile: &'a DeviceProfile,
    memory: DeviceMemory,
    threads: u32,
    /// Host and port of the device's worker, if the plan or the scenario has them.
    address: Option<(&'a str, u16)>,
    /// The word that stands for the host if the address is unknown, unique in the ring.
    address_placeholder: String,
    /// The layers of all rounds in order, joined where they are adjacent.
    layers: Vec<LayerRange>,
}

impl<'a> Ring<'a> {
    fn new(
        plan: &'a Plan,
        scenario: &'a Scenario,
        cluster: &'a Cluster,
        files: ModelFiles<'a>,
    ) -> Result<Self, ExportError> {
        if !plan.kind.is_ring() {
            return Err(ExportError::TensorPlan);
        }
        let (planned, model) = (&plan.model, &cluster.model);
        if !planned.matches(model) {
            let (planned, given) = (planned.name.clone(), model.name.clone());
            return Err(ExportError::OtherModel { planned, given });
        }
        let mut placeholders = BTreeSet::new();
        let devices = plan.devices.iter().enumerate().map(|(index, planned)| {
            let name = &planned.name;
            let unknown = || ExportError::UnknownDevice { name: name.clone() };
            let member = cluster.member(name).ok_or_else(unknown)?;
            let profile = &member.device;
            if planned.gpu_layers > 0 && profile.gpu.is_none() {
                return Err(ExportError::NoGpu { name: name.clone() });
            }
            // A draft model that does not fit is reported when the plan is simulated or run.
            let free = draft::device_without_draft(plan, index, cluster.draft_model.as_ref(), profile);
            let memory = DeviceMemory::new(plan, index, model, free.as_deref().unwrap_or(profile), false);
            let address = planned.address.as_ref().or(member.address.as_ref());
            Ok(RingDevice {
                planned,
                profile,
                memory,
                threads: threads(scenario, name, profile),
                address: address.and_then(|address| split_host_port(address)),
                address_placeholder: address_placeholder(name, &mut placeholders),
                layers: planned_layers(plan, index),
            })
        });
        Ok(Self { plan, cluster, files, devices: devices.collect::<Result<_, _>>()? })
    }

    fn head(&self) -> &RingDevice<'a> {
        &self.devices[0]
    }

    /// Returns the devices other than the head that compute layers, in ring order.
    fn workers(&self) -> impl Iterator<Item = &RingDevice<'a>> {
        self.devices[1..].iter().filter(|device| !device.layers.is_empty())
    }

    /// Returns the devices other than the head that only forward messages.
    fn relays(&self) -> impl Iterator<Item = &RingDevice<'a>> {
        self.devices[1..].iter().filter(|device| device.layers.is_empty())
    }
}

impl RingDevice<'_> {
    fn name(&self) -> &str {
        &self.planned.name
    }

    fn gpu(&self) -> Option<&Gpu> {
        self.profile.gpu.as_ref()
    }

    /// Returns the number of layers on a processor, over all rounds.
    fn layer_count(&self, processor: Processor) -> u32 {
        let layers = self.layers.iter().filter(|layers| layers.processor == processor);
        layers.map(|layers| layers.last + 1 - layers.first).sum()
    }

    /// Whether the weights exceed the memory that is left for them, so that a part is read for every token.
    fn exceeds_memory(&self) -> bool {
        self.memory.weights > self.memory.weight_cache
    }
}

impl ExportedPlan {
    fn new(engine: Engine) -> Self {
        let (notes, placeholders) = (Vec::new(), Vec::new());
        Self { engine, notes, placeholders, commands: Vec::new(), not_expressed: Vec::new() }
    }

    /// Returns the path of a file, or the placeholder `name` if it is unknown.
    fn file(&mut self, path: Option<&str>, name: &str, meaning: &str) -> String {
        path.map_or_else(|| self.placeholder(name, meaning.to_owned()), str::to_owned)
    }

    /// Returns the host of a device, or a placeholder for it.
    fn host(&mut self, device: &RingDevice, host: Option<&str>) -> String {
        let meaning = || format!("the address of `{}`", device.name());
        host.map_or_else(|| self.placeholder(&device.address_placeholder, meaning()), str::to_owned)
    }

    fn placeholder(&mut self, name: &str, meaning: String) -> String {
        if self.placeholders.iter().all(|known| known.name != name) {
            self.placeholders.push(Placeholder { name: name.to_owned(), meaning });
        }
        name.to_owned()
    }
}

/// Returns the number of computing threads of a device: the limit of the scenario, or all cores.
fn threads(scenario: &Scenario, name: &str, profile: &DeviceProfile) -> u32 {
    let entry = scenario.devices.iter().find(|entry| entry.name == name);
    let limit = entry.and_then(|entry| entry.limits.as_ref()?.threads);
    limit.unwrap_or(profile.cpu.cores).max(1)
}

/// Returns the placeholder for the address of a device, such as `DESKTOP_ADDRESS`, and adds it to those in use. It
/// contains only letters, digits and underscores, whatever the name of the device is.
fn address_placeholder(name: &str, used: &mut BTreeSet<String>) -> String {
    let upper = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' };
    let stem: String = name.chars().map(upper).collect();
    let stem = if stem.contains(|c| c != '_') { stem } else { "DEVICE".to_owned() };
    let numbered = (2..).map(|number| format!("{stem}_{number}_ADDRESS"));
    let mut candidates = std::iter::once(format!("{stem}_ADDRESS")).chain(numbered);
    let name = candidates.find(|name| !used.contains(name)).expect("numbers do not end");
    used.insert(name.clone());
    name
}

/// Returns the layers of a device of the plan in the order of rounds, with adjacent ranges joined.
fn planned_layers(plan: &Plan, index: usize) -> Vec<LayerRange> {
    let mut all: Vec<LayerRange> = Vec::new();
    for round in 0..plan.rounds {
        let (window, gpu) = (plan.window(index, round), plan.gpu_window(index, round));
        let cpu = gpu.end.max(window.start)..window.end;
        for (processor, layers) in [(Processor::Gpu, gpu), (Processor::Cpu, cpu)] {
            let Some(range) = LayerRange::new(processor, layers) else { continue };
            match all
                .last_mut()
                .filter(|before| before.processor == processor && before.last + 1 == range.first)
            {
                Some(before) => before.last = range.last,
                None => all.push(range),
            }
        }
    }
    all
}

/// Returns the names of devices in backquotes, separated by commas.
fn names<'a, 'd: 'a>(devices: impl IntoIterator<Item = &'a RingDevice<'d>>) -> String {
    let quoted: Vec<String> = devices.into_iter().map(|device| format!("`{}`", device.name())).collect();
    quoted.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placeholders_of_addresses_are_unique_words() {
        let mut used = BTreeSet::new();
        let mut of = |name: &str| address_placeholder(name, &mut used);
        assert_eq!(of("desktop"), "DESKTOP_ADDRESS");
        assert_eq!(of("old-mac; rm -rf ~"), "OLD_MAC__RM__RF___ADDRESS");
        assert_eq!([of("a b"), of("a-b"), of("a_b")], ["A_B_ADDRESS", "A_B_2_ADDRESS", "A_B_3_ADDRESS"]);
        assert_eq!([of("\u{7b14}"), of("\n")], ["DEVICE_ADDRESS", "DEVICE_2_ADDRESS"]);
    }
}
