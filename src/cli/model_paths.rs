//! The model files that a command line names.

use std::path::PathBuf;

use super::Verb;

impl Verb {
    /// Returns the paths of all model files, each of which may be the name of a model on a hub.
    pub fn model_paths_mut(&mut self) -> Vec<&mut PathBuf> {
        // Without a wildcard, so that a new command cannot be forgotten.
        match self {
            Verb::Plan(args) => args.planning.model.iter_mut().collect(),
            Verb::Simulate(args) => args.source.planning.model.iter_mut().collect(),
            Verb::Sweep(args) => args.source.planning.model.iter_mut().collect(),
            Verb::Lint(args) => args.source.planning.model.iter_mut().collect(),
            Verb::Whatif(args) => args.planning.model.iter_mut().collect(),
            Verb::Lab(args) => args.planning.model.iter_mut().collect(),
            Verb::Execute(args) => [&mut args.model].into_iter().chain(&mut args.ring.draft_model).collect(),
            Verb::Serve(args) => [&mut args.model].into_iter().chain(&mut args.ring.draft_model).collect(),
            Verb::Worker(args) => args.model.iter_mut().collect(),
            Verb::Profile(args) => args.model.iter_mut().collect(),
            Verb::Bench(args) => vec![&mut args.model],
            Verb::Tokenize(args) => vec![&mut args.model],
            Verb::Gpu(_)
            | Verb::Pull(_)
            | Verb::Report(_)
            | Verb::Reproduce(_)
            | Verb::Synth(_)
            | Verb::Init(_)
            | Verb::Completions(_)
            | Verb::Schema(_)
            | Verb::Man(_) => Vec::new(),
        }
    }
}
