//! Replays the corpus of a fuzz target, and random changes of it, in the unit tests of the crates.
//!
//! A unit test cannot measure coverage, so it finds little that is new; it keeps what fuzzing found. `PROPTEST_CASES`
//! sets the number of changed inputs. Not here: fuzzing itself (`scripts/fuzz.sh`).

use std::fs;
use std::path::Path;

#[path = "memory.rs"]
mod memory;

/// The number of changed inputs if `PROPTEST_CASES` is not set.
const CASES: usize = 256;

/// Calls `entry` with every file of `fuzz/corpus/TARGET`, and with changed copies of these files. Panics if a call
/// panics, or needs more memory than `allowed_memory` returns for the length of the input.
pub fn replay(target: &str, allowed_memory: fn(usize) -> usize, entry: fn(&[u8])) {
    // Crates are in the root of the repository or in one of its folders.
    let above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let folder = above.map(|above| above.join("fuzz/corpus").join(target)).find(|folder| folder.is_dir());
    let folder = folder.unwrap_or_else(|| panic!("`{target}` has no corpus"));
    let mut paths: Vec<_> =
        fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("a file").path()).collect();
    paths.sort();
    let files: Vec<Vec<u8>> = paths.iter().map(|path| fs::read(path).expect("a file")).collect();
    for (path, file) in paths.iter().zip(&files) {
        run(&path.display().to_string(), file, allowed_memory, entry);
    }
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(CASES);
    let mut random = Random(0);
    for case in 0..cases {
        let mut input = files[random.below(files.len())].clone();
        for _ in 0..=random.below(4) {
            random.change(&mut input, &files);
        }
        run(&format!("changed input {case}"), &input, allowed_memory, entry);
    }
}

fn run(name: &str, input: &[u8], allowed_memory: fn(usize) -> usize, entry: fn(&[u8])) {
    /// Prints the input if the call panics.
    struct Input<'a>(&'a str, &'a [u8]);
    impl Drop for Input<'_> {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("the call failed for {}: b\"{}\"", self.0, self.1.escape_ascii());
            }
        }
    }
    let _input = Input(name, input);
    memory::check(input, allowed_memory(input.len()), entry);
}

/// A random number generator (SplitMix64), so that the tests need no crate and always run the same cases.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    /// Replaces, removes, inserts or repeats bytes of `input`.
    fn change(&mut self, input: &mut Vec<u8>, files: &[Vec<u8>]) {
        let at = self.below(input.len() + 1);
        let end = (at + self.below(16)).min(input.len());
        let number = [1 << self.below(64), (1 << self.below(64)) - 1, self.next()][self.below(3)];
        let file = &files[self.below(files.len())];
        let from = self.below(file.len());
        let (range, bytes) = match self.below(7) {
            0 => (at..(at + 1).min(input.len()), vec![number as u8]),
            1 => (at..(at + 4).min(input.len()), number.to_le_bytes()[..4].to_vec()),
            2 => (at..(at + 8).min(input.len()), number.to_le_bytes().to_vec()),
            3 => (at..end, Vec::new()),
            4 => (at..at, input[at..end].repeat(1 + self.below(8))),
            5 => (at..end, number.to_string().into_bytes()),
            _ => (at..end, file[from..(from + self.below(64)).min(file.len())].to_vec()),
        };
        input.splice(range, bytes);
    }
}
