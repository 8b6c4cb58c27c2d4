//! Prints the sizes of all shipped models, or of the model in a GGUF file.
//!
//! `cargo run -p hearth-profiles --example models [FILE.gguf]`

use hearth_profiles::Format;
use hearth_profiles::gguf::GgufModel;
use hearth_profiles::model::{ModelProfile, shipped_names, shipped_profile};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!(
        "{:<12} {:>6} {:>15} {:>12} {:>12} {:>12} {:>12} {:>12}",
        "model", "layers", "bytes", "mean layer", "max layer", "input", "output", "KV at 4096"
    );
    if let Some(path) = std::env::args().nth(1) {
        let profile = ModelProfile::from_gguf(&GgufModel::open(path)?)?;
        show(&profile);
        println!("{} {}\n{}\n{}", profile.name, profile.quant, profile.digest, profile.shape_digest());
        return Ok(());
    }
    for name in shipped_names() {
        show(&shipped_profile(name)?);
    }
    Ok(())
}

fn show(profile: &ModelProfile) {
    println!(
        "{:<12} {:>6} {:>15} {:>12} {:>12} {:>12} {:>12} {:>12}",
        profile.name.chars().take(12).collect::<String>(),
        profile.shape.layers.0,
        profile.total_bytes().0,
        profile.mean_layer_bytes().to_string(),
        profile.max_layer_bytes().to_string(),
        profile.input_embedding_bytes().to_string(),
        profile.output_head_bytes().to_string(),
        profile.shape.cache_bytes(4096, Format::F16).to_string(),
    );
}
