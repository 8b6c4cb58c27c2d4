//! Prints the quantisation that hearth reads from the name of each GGUF file, or those of a few known repositories.
//!
//! ```text
//! cargo run -p hearth-hub --example quantisations [FILE..]
//! ```

use hearth_hub::Variant;

const KNOWN: [&str; 5] = [
    "Qwen3-8B-Q4_K_M.gguf",
    "llama-2-7b.Q5_K_S.gguf",
    "UD-Q4_K_XL/DeepSeek-R1-UD-Q4_K_XL-00001-of-00002.gguf",
    "UD-Q4_K_XL/DeepSeek-R1-UD-Q4_K_XL-00002-of-00002.gguf",
    "mmproj-F16.gguf",
];

fn main() {
    let named: Vec<String> = std::env::args().skip(1).collect();
    let names = if named.is_empty() { KNOWN.map(str::to_owned).to_vec() } else { named };
    for variant in Variant::find_all(names.iter().map(String::as_str)) {
        println!("{:<12} {}", variant.quant, variant.paths.join(" "));
    }
}
