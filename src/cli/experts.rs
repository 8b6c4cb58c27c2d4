//! Flags of `hearth experts`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use hearth_core::expert_cache::EvictionPolicy;
use hearth_profiles::Bytes;

#[derive(Debug, Args)]
pub struct ExpertsArgs {
    /// The recording of expert routing (`route_trace v1`).
    pub routes: PathBuf,
    /// Set the sizes of the cache, such as `1000 MiB,4 GiB`.
    #[arg(long, value_name = "SIZE,..", value_delimiter = ',', value_parser = Bytes::from_str,
        default_values = ["1 GiB", "2 GiB", "4 GiB"])]
    pub budget: Vec<Bytes>,
    /// Set the policies by which experts are evicted.
    #[arg(long, value_name = "POLICY,..", value_delimiter = ',', value_parser = parse_policy,
        default_values = ["lru", "lfu", "layer-lru", "layer-lfu", "next-use", "belady"])]
    pub policy: Vec<EvictionPolicy>,
}

fn parse_policy(text: &str) -> Result<EvictionPolicy, String> {
    let found = EvictionPolicy::ALL.iter().find(|(name, _)| *name == text);
    let names = || EvictionPolicy::ALL.map(|(name, _)| name).join(", ");
    found.map(|(_, policy)| *policy).ok_or_else(|| format!("there is no policy `{text}`: use {}", names()))
}
