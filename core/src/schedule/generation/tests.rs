//! Tests of the generation: the order of passes, and properties for any accepted drafts.

use hearth_profiles::{Fraction, Sourced};
use proptest::prelude::*;

use super::*;
use hearth_schema::scenario::ModelRef;
use hearth_schema::workload::Speculation;

fn workload(sequences: u32, micro_batch: u32, drafts: u32) -> Workload {
    let draft = ModelRef { profile: Some("1b".into()), file: None };
    let acceptance = Sourced::new(Fraction(0.5), "test");
    let speculation = Speculation { draft_model: draft, tokens: drafts, acceptance, processor: None };
    let speculation = Some(speculation).filter(|_| drafts > 0);
    Workload { sequences, micro_batch, speculation, ..Workload::new(10, 7) }
}

/// Returns a pass as the text `sequence:first_position+tokens/drafted`, with `!` at the end if it has an output.
fn shape(pass: Pass) -> String {
    let Pass { sequence_index: sequence, first_position, tokens, drafted, has_output: output, .. } = pass;
    format!("{sequence}:{first_position}+{tokens}/{drafted}{}", if output { "!" } else { "" })
}

fn enter(generation: &mut Generation) -> Vec<String> {
    std::iter::from_fn(|| generation.begin_pass()).map(shape).collect()
}

#[test]
fn prompts_enter_first_and_then_sequences_in_the_order_of_their_tokens() {
    let mut generation = Generation::new(&workload(2, 8, 0));
    assert_eq!(enter(&mut generation), ["0:0+8/0", "0:8+2/0!", "1:0+8/0", "1:8+2/0!"]);
    // The output of the second sequence is complete first.
    assert_eq!(generation.complete_pass(3, 0), Ok(1));
    assert_eq!(enter(&mut generation), ["1:10+1/0!"]);
    assert_eq!(generation.complete_pass(1, 0), Ok(1));
    assert_eq!(enter(&mut generation), ["0:10+1/0!"]);
    assert!(!generation.is_finished());
}

/// Enters the next batch, and returns its passes as texts.
fn batch(generation: &mut Generation, in_flight: u32, shared_prompt_tokens: u32) -> Vec<String> {
    let batch = generation.begin_batch(BatchLimits { in_flight, shared_prompt_tokens });
    batch.iter().flat_map(Batch::passes).copied().map(shape).collect()
}

#[test]
fn requests_join_the_batch_of_active_sequences() {
    let mut generation = Generation::with_vacant_slots(4, 8, 0, true);
    assert_eq!(generation.admit_request(0, 9, 0, 9), Ok(0));
    assert_eq!(batch(&mut generation, 1, 4), ["0:0+8/0"], "alone, a chunk may have 8 tokens");
    assert_eq!(batch(&mut generation, 1, 4), ["0:8+1/0!"], "chunks do not wait for each other");
    assert!(batch(&mut generation, 1, 4).is_empty());
    for slot in [1, 2] {
        assert_eq!(generation.admit_request(slot, 6, 0, 9), Ok(0));
    }
    assert_eq!(generation.complete_pass(1, 0), Ok(1));
    assert_eq!(batch(&mut generation, 1, 4), ["1:0+4/0", "0:9+1/0!"]);
    assert!(batch(&mut generation, 1, 4).is_empty(), "one batch is in flight");
    assert_eq!(generation.complete_pass(3, 0), Ok(1));
    assert_eq!(batch(&mut generation, 1, 4), ["1:4+2/0!", "2:0+2/0", "0:10+1/0!"]);
    assert_eq!(generation.complete_pass(4, 0), Ok(1));
    assert_eq!(generation.complete_pass(6, 0), Ok(1));
    assert_eq!(batch(&mut generation, 1, 4), ["2:2+4/0!", "1:6+1/0!", "0:11+1/0!"]);
    for pass in [7, 8, 9] {
        assert_eq!(generation.complete_pass(pass, 0), Ok(1));
    }
    generation.cancel(1);
    assert_eq!(batch(&mut generation, 1, 4), ["2:6+1/0!", "0:12+1/0!"]);
}

#[test]
fn several_prompts_share_a_batch_only_while_it_is_small() {
    let mut generation = Generation::from_prompt_lengths(&[3, 2, 9, 9], 5, 8, 0);
    assert_eq!(batch(&mut generation, 2, 6), ["0:0+3/0!", "1:0+2/0!", "2:0+1/0"]);
    assert_eq!(batch(&mut generation, 2, 6), ["2:1+8/0!"]);
    assert_eq!(batch(&mut generation, 2, 6), ["3:0+8/0"]);
}

#[test]
fn sequences_are_divided_among_the_batches_in_flight() {
    let mut generation = Generation::from_prompt_lengths(&[1; 5], 9, 8, 0);
    assert_eq!(batch(&mut generation, 2, 8).len(), 5);
    for pass in 0..5 {
        assert_eq!(generation.complete_pass(pass, 0), Ok(1));
    }
    assert_eq!(batch(&mut generation, 2, 8), ["0:1+1/0!", "1:1+1/0!", "2:1+1/0!"]);
    assert_eq!(batch(&mut generation, 2, 8), ["3:1+1/0!", "4:1+1/0!"]);
    assert!(batch(&mut generation, 2, 8).is_empty());
    for pass in 5..8 {
        assert_eq!(generation.complete_pass(pass, 0), Ok(1));
    }
    assert_eq!(batch(&mut generation, 2, 8), ["0:2+1/0!", "1:2+1/0!", "2:2+1/0!"]);
}

#[test]
fn rejected_drafts_are_rolled_back() {
    // 7 tokens: one from the prompt, then steps of up to 3 drafts.
    let mut generation = Generation::new(&workload(1, 512, 3));
    assert_eq!(generation.begin_pass().map(shape).as_deref(), Some("0:0+10/0!"));
    assert_eq!(generation.complete_pass(0, 0), Ok(1));
    assert_eq!(generation.begin_pass().map(shape).as_deref(), Some("0:10+4/3!"));
    let before = generation.clone();
    let rejected = GenerationError::TooManyAccepted { pass: 1, drafted: 3, accepted: 4 };
    assert_eq!(generation.complete_pass(1, 4), Err(rejected));
    assert_eq!(generation.complete_pass(0, 0), Err(GenerationError::NotAwaited { pass: 0 }));
    assert_eq!(generation, before);
    // The accepted draft has position 11; the token that replaces the second draft has position 12.
    assert_eq!(generation.complete_pass(1, 1), Ok(2));
    assert_eq!(generation.begin_pass().map(shape).as_deref(), Some("0:12+4/3!"));
    assert_eq!(generation.complete_pass(2, 2), Ok(3));
    // 6 of 7 tokens are generated: the last one needs no draft.
    assert_eq!(generation.begin_pass().map(shape).as_deref(), Some("0:15+1/0!"));
    assert_eq!(generation.complete_pass(3, 0), Ok(1));
    assert!(generation.is_finished() && generation.begin_pass().is_none());
}

#[test]
fn restart_processes_all_tokens_so_far_as_prompts() {
    let mut generation = Generation::new(&workload(3, 8, 2));
    for _ in 0..4 {
        generation.begin_pass();
    }
    // The first sequence has three tokens, the second none, and the third has not begun.
    assert_eq!(generation.complete_pass(1, 0), Ok(1));
    generation.begin_pass();
    generation.begin_pass();
    assert_eq!(generation.begin_pass().map(shape).as_deref(), Some("0:10+3/2!"));
    assert_eq!(generation.complete_pass(6, 1), Ok(2));
    assert_eq!((generation.restart(), generation.next_pass_index()), (33, 7));
    let rejected = GenerationError::NotAwaited { pass: 3 };
    assert_eq!(generation.complete_pass(3, 0), Err(rejected), "the pass was dropped");
    let again = ["0:0+8/0", "0:8+5/0!", "1:0+8/0", "1:8+2/0!", "2:0+8/0", "2:8+2/0!"];
    assert_eq!(enter(&mut generation), again);
    assert_eq!(generation.complete_pass(8, 0), Ok(1));
    assert_eq!(enter(&mut generation), ["0:13+3/2!"]);
}

#[test]
fn prompts_may_differ_in_length_and_sequences_can_be_cancelled() {
    let mut generation = Generation::from_prompt_lengths(&[3, 9], 7, 4, 2);
    assert_eq!(enter(&mut generation), ["0:0+3/0!", "1:0+4/0", "1:4+4/0", "1:8+1/0!"]);
    assert_eq!(generation.complete_pass(3, 0), Ok(1));
    assert_eq!(generation.complete_pass(0, 0), Ok(1));
    generation.cancel(1);
    generation.cancel(1);
    assert_eq!(enter(&mut generation), ["0:3+3/2!"]);
    assert!(!generation.is_finished());
    assert_eq!(generation.restart(), 4, "a cancelled sequence does not enter again");
    assert_eq!(generation.begin_pass().map(shape).as_deref(), Some("0:0+4/0!"));
    assert_eq!(generation.complete_pass(5, 0), Ok(1));
    generation.cancel(0);
    assert!(generation.is_finished() && generation.begin_pass().is_none());
}

#[test]
fn request_reuses_the_cached_prefix_of_its_slot() {
    let mut generation = Generation::with_vacant_slots(2, 4, 0, true);
    assert!(generation.is_finished() && generation.begin_pass().is_none());
    assert_eq!(generation.admit_request(0, 6, 0, 2), Ok(0));
    assert_eq!(generation.admit_request(0, 6, 0, 2), Err(GenerationError::NotVacant { sequence: 0 }));
    assert_eq!(generation.admit_request(2, 6, 0, 2), Err(GenerationError::NotVacant { sequence: 2 }));
    assert_eq!(enter(&mut generation), ["0:0+4/0", "0:4+2/0!"]);
    assert_eq!(generation.complete_pass(1, 0), Ok(1));
    assert_eq!(enter(&mut generation), ["0:6+1/0!"]);
    assert_eq!(generation.complete_pass(2, 0), Ok(1));
    // The last token is sampled but never enters, so it is not cached.
    assert!(generation.is_vacant(0) && generation.is_finished());
    assert_eq!(generation.cached_tokens(0), 7);
    // The conversation continues: the next prompt has all of it and five tokens more.
    assert_eq!(generation.admit_request(0, 13, 7, 3), Ok(7));
    assert_eq!(enter(&mut generation), ["0:7+4/0", "0:11+2/0!"]);
    // If the whole prompt is cached, its last token is still computed.
    assert_eq!(generation.complete_pass(4, 0), Ok(1));
    generation.cancel(0);
    assert_eq!(generation.admit_request(0, 5, 9, 1), Ok(4));
    assert_eq!(enter(&mut generation), ["0:4+1/0!"]);
    // A restart empties the caches.
    assert_eq!(generation.complete_pass(5, 0), Ok(1));
    generation.restart();
    assert_eq!((generation.cached_tokens(0), generation.admit_request(0, 5, 9, 1)), (0, Ok(0)));
}

#[test]
fn recurrent_state_is_kept_or_cleared() {
    let mut generation = Generation::with_vacant_slots(1, 8, 0, false);
    assert_eq!(generation.admit_request(0, 6, 0, 1), Ok(0));
    assert_eq!(enter(&mut generation), ["0:0+6/0!"]);
    assert_eq!(generation.complete_pass(0, 0), Ok(1));
    // All six cached tokens are a prefix of the next prompt.
    assert_eq!(generation.admit_request(0, 8, 6, 1), Ok(6));
    assert_eq!(enter(&mut generation), ["0:6+2/0!"]);
    assert_eq!(generation.complete_pass(1, 0), Ok(1));
    // Five of eight are, then all of them, but the last token has to be computed again.
    assert_eq!(generation.admit_request(0, 8, 5, 1), Ok(0));
    assert_eq!(enter(&mut generation), ["0:0+8/0!"]);
    assert_eq!(generation.complete_pass(2, 0), Ok(1));
    assert_eq!(generation.admit_request(0, 8, 8, 1), Ok(0));
}

#[test]
fn cancelled_slot_is_vacant_when_no_output_is_in_flight() {
    let mut generation = Generation::with_vacant_slots(3, 4, 0, true);
    for sequence in 0..3 {
        assert_eq!(generation.admit_request(sequence, 6, 0, 9), Ok(0));
    }
    generation.begin_pass();
    generation.begin_pass();
    generation.begin_pass();
    // The first waits for a token, the second is in the middle of its prompt, the third has not entered.
    (0..3).for_each(|sequence| generation.cancel(sequence));
    assert_eq!([0, 1, 2].map(|it| generation.is_vacant(it)), [false, true, true]);
    assert_eq!([0, 1, 2].map(|it| generation.cached_tokens(it)), [6, 4, 0]);
    assert!(generation.begin_pass().is_none() && !generation.is_finished());
    assert_eq!(generation.complete_pass(1, 0), Ok(1));
    assert!(generation.is_finished() && generation.begin_pass().is_none());
}

fn any_limits() -> impl Strategy<Value = BatchLimits> {
    let limits = |(in_flight, shared_prompt_tokens)| BatchLimits { in_flight, shared_prompt_tokens };
    (1u32..4, 1u32..12).prop_map(limits)
}

proptest! {
    /// Checks that each pass begins at the first position that is not cached, and that all requests end. Requests enter
    /// and are cancelled at any time, outputs arrive in any order, and the ring restarts sometimes.
    #[test]
    fn slots_survive_any_events(
        sequences in 1u32..4,
        micro_batch in 1u32..9,
        drafts in 0u32..3,
        can_truncate in any::<bool>(),
        limits in any_limits(),
        actions in prop::collection::vec((0u8..16, any::<u32>(), any::<u32>()), 1..200),
    ) {
        let drafts = if can_truncate { drafts } else { 0 };
        let mut generation = Generation::with_vacant_slots(sequences, micro_batch, drafts, can_truncate);
        let mut cached = vec![0u32; sequences as usize];
        let mut in_flight: Vec<Pass> = Vec::new();
        for (action, which, amount) in actions {
            let sequence = which % sequences;
            match action {
                0..3 => {
                    let (prompt, prefix) = (amount % 20 + 1, amount / 32 % 25);
                    let vacant = generation.is_vacant(sequence);
                    let entered = generation.admit_request(sequence, prompt, prefix, amount % 7 + 1);
                    prop_assert_eq!(entered.is_ok(), vacant);
                    if let Ok(position) = entered {
                        let before = cached[sequence as usize];
                        prop_assert!(position <= before && position < prompt);
                        prop_assert!(can_truncate || position == 0 || position == before, "{before} to {position}");
                        cached[sequence as usize] = position;
                    }
                }
                3 => generation.cancel(sequence),
                4 if amount % 8 == 0 => {
                    generation.restart();
                    in_flight.clear();
                    cached.fill(0);
                }
                5..10 if !in_flight.is_empty() => {
                    let pass = in_flight.remove(which as usize % in_flight.len());
                    let accepted = amount % (pass.drafted + 1);
                    prop_assert_eq!(generation.complete_pass(pass.index, accepted), Ok(accepted + 1));
                    cached[pass.sequence_index as usize] -= pass.drafted - accepted;
                }
                _ => {
                    let batch = generation.begin_batch(limits);
                    for &pass in batch.iter().flat_map(Batch::passes) {
                        let cached = &mut cached[pass.sequence_index as usize];
                        prop_assert_eq!(pass.first_position, *cached, "begins after the cached positions");
                        *cached += pass.tokens;
                        in_flight.extend(Some(pass).filter(|pass| pass.has_output));
                    }
                }
            }
            for sequence in 0..sequences {
                prop_assert_eq!(generation.cached_tokens(sequence), cached[sequence as usize]);
            }
            let vacant = (0..sequences).all(|sequence| generation.is_vacant(sequence));
            prop_assert_eq!(generation.is_finished(), vacant);
        }
        (0..sequences).for_each(|sequence| generation.cancel(sequence));
        prop_assert!(generation.begin_batch(limits).is_none(), "all sequences are cancelled");
    }

    /// Checks that every sequence gets its tokens and no position is skipped or computed after the last token. Outputs
    /// arrive in any order with any number of accepted drafts, and the ring restarts sometimes.
    #[test]
    fn every_sequence_gets_its_tokens(
        prompt in 1u32..40,
        generate in 1u32..20,
        sequences in 1u32..6,
        micro_batch in 1u32..20,
        drafts in 0u32..6,
        limits in any_limits(),
        choices in prop::collection::vec((any::<u32>(), any::<u32>()), 1..50),
    ) {
        let workload = Workload { prompt_tokens: prompt, generated_tokens: generate, ..workload(sequences, micro_batch, drafts) };
        let mut generation = Generation::new(&workload);
        let count = sequences as usize;
        let (mut cached, mut tokens, mut in_flight) = (vec![0; count], vec![0; count], Vec::new());
        let mut choices = choices.iter().cycle();
        let (mut index, mut restarted) = (0, false);
        while !generation.is_finished() {
            while let Some(batch) = generation.begin_batch(limits) {
                prop_assert!(batch.tokens() <= MAX_PASS_TOKENS);
                for &pass in batch.passes() {
                    prop_assert_eq!(pass.index, index);
                    index += 1;
                    let cached = &mut cached[pass.sequence_index as usize];
                    prop_assert_eq!(pass.first_position, *cached, "begins after the cached positions");
                    *cached += pass.tokens;
                    prop_assert!(*cached < prompt + generate, "the last token does not enter");
                    if pass.has_output {
                        in_flight.push(pass);
                    }
                }
            }
            prop_assert!(!in_flight.is_empty(), "an output is awaited");
            let (which, accepted) = choices.next().expect("endless");
            if accepted % 7 == 6 && !std::mem::replace(&mut restarted, true) {
                generation.restart();
                in_flight.clear();
                let unfinished = |(cached, tokens): (&mut u32, &u32)| {
                    *cached = if *tokens == generate { *cached } else { 0 };
                };
                cached.iter_mut().zip(&tokens).for_each(unfinished);
                continue;
            }
            restarted = false;
            let pass = in_flight.remove(*which as usize % in_flight.len());
            let accepted = accepted % (pass.drafted + 1);
            prop_assert_eq!(generation.complete_pass(pass.index, accepted), Ok(accepted + 1));
            let sequence = pass.sequence_index as usize;
            cached[sequence] -= pass.drafted - accepted;
            tokens[sequence] += accepted + 1;
        }
        prop_assert!(tokens.iter().all(|&tokens| tokens == generate), "{:?}", tokens);
        prop_assert!(generation.begin_pass().is_none());
    }
}
