//! Every position of a sequence is computed once, whatever drafts are accepted.

use hearth_profiles::{Fraction, Sourced};
use proptest::prelude::*;

use super::*;
use hearth_schema::scenario::ModelRef;
use hearth_schema::workload::Speculation;

fn workload(sequences: u32, micro_batch: u32, drafts: u32) -> Workload {
    let draft = ModelRef { profile: Some("1b".into()), file: None };
    let acceptance = Sourced::new(Fraction(0.5), "test");
    let speculation = Speculation { draft, tokens: drafts, acceptance, processor: None };
    let speculation = Some(speculation).filter(|_| drafts > 0);
    Workload { sequences, micro_batch, speculation, ..Workload::plain(10, 7) }
}

/// `s:first+tokens/drafted`, with `!` where an output is wanted.
fn shape(pass: Pass) -> String {
    let Pass { sequence, first_position, tokens, drafted, output, .. } = pass;
    format!("{sequence}:{first_position}+{tokens}/{drafted}{}", if output { "!" } else { "" })
}

#[test]
fn prompts_enter_first_and_then_whoever_has_a_token() {
    let mut generation = Generation::new(&workload(2, 8, 0));
    let mut entered = Vec::new();
    while let Some(pass) = generation.begin() {
        entered.push(shape(pass));
    }
    assert_eq!(entered, ["0:0+8/0", "0:8+2/0!", "1:0+8/0", "1:8+2/0!"]);
    // The second sequence's prompt is through first, for what reason ever.
    assert_eq!(generation.output(3, 0), Ok(1));
    assert_eq!(generation.begin().map(shape).as_deref(), Some("1:10+1/0!"));
    assert_eq!(generation.begin(), None);
    assert_eq!(generation.output(1, 0), Ok(1));
    assert_eq!(generation.begin().map(shape).as_deref(), Some("0:10+1/0!"));
    assert!(!generation.is_over());
}

#[test]
fn a_rejected_draft_takes_the_positions_after_it_back() {
    // 7 tokens: one from the prompt, then steps of up to 3 drafts.
    let mut generation = Generation::new(&workload(1, 512, 3));
    assert_eq!(generation.begin().map(shape).as_deref(), Some("0:0+10/0!"));
    assert_eq!(generation.output(0, 0), Ok(1));
    assert_eq!(generation.begin().map(shape).as_deref(), Some("0:10+4/3!"));
    let before = generation.clone();
    let refused = GenerationError::TooManyAccepted { pass: 1, drafted: 3, accepted: 4 };
    assert_eq!(generation.output(1, 4), Err(refused));
    assert_eq!(generation.output(0, 0), Err(GenerationError::NotAwaited { pass: 0 }));
    assert_eq!(generation, before);
    // The first draft stands at 11; the correction of the second is at 12.
    assert_eq!(generation.output(1, 1), Ok(2));
    assert_eq!(generation.begin().map(shape).as_deref(), Some("0:12+4/3!"));
    assert_eq!(generation.output(2, 2), Ok(3));
    // 6 of 7 are out: the last needs no draft.
    assert_eq!(generation.begin().map(shape).as_deref(), Some("0:15+1/0!"));
    assert_eq!(generation.output(3, 0), Ok(1));
    assert!(generation.is_over() && generation.begin().is_none());
}

#[test]
fn a_ring_that_begins_again_computes_all_tokens_so_far_as_prompts() {
    let mut generation = Generation::new(&workload(3, 8, 2));
    let enter = |generation: &mut Generation| {
        std::iter::from_fn(|| generation.begin()).map(shape).collect::<Vec<_>>()
    };
    for _ in 0..4 {
        generation.begin();
    }
    // The first sequence has three tokens, the second none, and the third has not begun.
    assert_eq!(generation.output(1, 0), Ok(1));
    generation.begin();
    generation.begin();
    assert_eq!(generation.begin().map(shape).as_deref(), Some("0:10+3/2!"));
    assert_eq!(generation.output(6, 1), Ok(2));
    assert_eq!((generation.restart(), generation.next_pass()), (33, 7));
    let refused = GenerationError::NotAwaited { pass: 3 };
    assert_eq!(generation.output(3, 0), Err(refused), "it was given up");
    let again = ["0:0+8/0", "0:8+5/0!", "1:0+8/0", "1:8+2/0!", "2:0+8/0", "2:8+2/0!"];
    assert_eq!(enter(&mut generation), again);
    assert_eq!(generation.output(8, 0), Ok(1));
    assert_eq!(enter(&mut generation), ["0:13+3/2!"]);
}

#[test]
fn prompts_have_lengths_of_their_own_and_a_text_may_come_to_an_end() {
    let mut generation = Generation::of_prompts(&[3, 9], 7, 4, 2);
    let entered: Vec<_> = std::iter::from_fn(|| generation.begin()).map(shape).collect();
    assert_eq!(entered, ["0:0+3/0!", "1:0+4/0", "1:4+4/0", "1:8+1/0!"]);
    assert_eq!(generation.output(3, 0), Ok(1));
    assert_eq!(generation.output(0, 0), Ok(1));
    generation.give_up(1);
    generation.give_up(1);
    assert_eq!(generation.begin().map(shape).as_deref(), Some("0:3+3/2!"));
    assert_eq!((generation.begin(), generation.is_over()), (None, false));
    assert_eq!(generation.restart(), 4, "what has ended does not enter again");
    assert_eq!(generation.begin().map(shape).as_deref(), Some("0:0+4/0!"));
    assert_eq!(generation.output(5, 0), Ok(1));
    generation.give_up(0);
    assert!(generation.is_over() && generation.begin().is_none());
}

#[test]
fn a_text_enters_behind_what_its_slot_holds() {
    let mut generation = Generation::vacant(2, 4, 0);
    assert!(generation.is_over() && generation.begin().is_none());
    assert_eq!(generation.enter(0, 6, 0, 2), Ok(0));
    assert_eq!(generation.enter(0, 6, 0, 2), Err(GenerationError::NotVacant { sequence: 0 }));
    assert_eq!(generation.enter(2, 6, 0, 2), Err(GenerationError::NotVacant { sequence: 2 }));
    let enter = |generation: &mut Generation| {
        std::iter::from_fn(|| generation.begin()).map(shape).collect::<Vec<_>>()
    };
    assert_eq!(enter(&mut generation), ["0:0+4/0", "0:4+2/0!"]);
    assert_eq!(generation.output(1, 0), Ok(1));
    assert_eq!(enter(&mut generation), ["0:6+1/0!"]);
    assert_eq!(generation.output(2, 0), Ok(1));
    // The last token never entered.
    assert!(generation.is_vacant(0) && generation.is_over());
    assert_eq!(generation.held(0), 7);
    // The conversation continues: the next prompt has all of it and five tokens more.
    assert_eq!(generation.enter(0, 13, 7, 3), Ok(7));
    assert_eq!(enter(&mut generation), ["0:7+4/0", "0:11+2/0!"]);
    // One that is the same as what is held has its last token enter again.
    assert_eq!(generation.output(4, 0), Ok(1));
    generation.give_up(0);
    assert_eq!(generation.enter(0, 5, 9, 1), Ok(4));
    assert_eq!(enter(&mut generation), ["0:4+1/0!"]);
    // After the ring has begun again nothing is held.
    assert_eq!(generation.output(5, 0), Ok(1));
    generation.restart();
    assert_eq!((generation.held(0), generation.enter(0, 5, 9, 1)), (0, Ok(0)));
}

#[test]
fn who_is_given_up_is_vacant_when_nothing_of_it_is_under_way() {
    let mut generation = Generation::vacant(3, 4, 0);
    for sequence in 0..3 {
        assert_eq!(generation.enter(sequence, 6, 0, 9), Ok(0));
    }
    generation.begin();
    generation.begin();
    generation.begin();
    // The first waits for a token, the second is in the middle of its prompt, the third has not entered.
    for sequence in 0..3 {
        generation.give_up(sequence);
    }
    assert_eq!([0, 1, 2].map(|it| generation.is_vacant(it)), [false, true, true]);
    assert_eq!([0, 1, 2].map(|it| generation.held(it)), [6, 4, 0]);
    assert!(generation.begin().is_none() && !generation.is_over());
    assert_eq!(generation.output(1, 0), Ok(1));
    assert!(generation.is_over() && generation.begin().is_none());
}

proptest! {
    /// Requests enter and are cancelled at any time, outputs come in any order, and the ring restarts now and then: a
    /// pass begins at the position that is held, and each request gets its tokens.
    #[test]
    fn slots_take_any_text(
        sequences in 1u32..4,
        micro_batch in 1u32..9,
        drafts in 0u32..3,
        acts in prop::collection::vec((0u8..16, any::<u32>(), any::<u32>()), 1..200),
    ) {
        let mut generation = Generation::vacant(sequences, micro_batch, drafts);
        let mut known = vec![0u32; sequences as usize];
        let mut under_way: Vec<Pass> = Vec::new();
        for (act, which, much) in acts {
            let sequence = which % sequences;
            match act {
                0..3 => {
                    let (prompt, held) = (much % 20 + 1, much / 32 % 25);
                    let vacant = generation.is_vacant(sequence);
                    let entered = generation.enter(sequence, prompt, held, much % 7 + 1);
                    prop_assert_eq!(entered.is_ok(), vacant);
                    if let Ok(position) = entered {
                        prop_assert!(position <= known[sequence as usize] && position < prompt);
                        known[sequence as usize] = position;
                    }
                }
                3 => generation.give_up(sequence),
                4 if much % 8 == 0 => {
                    generation.restart();
                    under_way.clear();
                    known.fill(0);
                }
                5..10 if !under_way.is_empty() => {
                    let pass = under_way.remove(which as usize % under_way.len());
                    let accepted = much % (pass.drafted + 1);
                    prop_assert_eq!(generation.output(pass.index, accepted), Ok(accepted + 1));
                    known[pass.sequence as usize] -= pass.drafted - accepted;
                }
                _ => {
                    if let Some(pass) = generation.begin() {
                        let known = &mut known[pass.sequence as usize];
                        prop_assert_eq!(pass.first_position, *known, "what stands is what came before");
                        *known += pass.tokens;
                        under_way.extend(Some(pass).filter(|pass| pass.output));
                    }
                }
            }
            for sequence in 0..sequences {
                prop_assert_eq!(generation.held(sequence), known[sequence as usize]);
            }
            let vacant = (0..sequences).all(|sequence| generation.is_vacant(sequence));
            prop_assert_eq!(generation.is_over(), vacant);
        }
        (0..sequences).for_each(|sequence| generation.give_up(sequence));
        prop_assert!(generation.begin().is_none(), "nobody is waited for");
    }

    /// Outputs come in any order, with anything accepted, and the ring begins again now and then: every sequence gets
    /// its tokens, no position is skipped, and none past the last token wanted is computed.
    #[test]
    fn every_sequence_gets_its_tokens(
        prompt in 1u32..40,
        generate in 1u32..20,
        sequences in 1u32..6,
        micro_batch in 1u32..20,
        drafts in 0u32..6,
        choices in prop::collection::vec((any::<u32>(), any::<u32>()), 1..50),
    ) {
        let workload = Workload { prompt, generate, ..workload(sequences, micro_batch, drafts) };
        let mut generation = Generation::new(&workload);
        let count = sequences as usize;
        let (mut known, mut tokens, mut under_way) = (vec![0; count], vec![0; count], Vec::new());
        let mut choices = choices.iter().cycle();
        let (mut index, mut began_again) = (0, false);
        while !generation.is_over() {
            while let Some(pass) = generation.begin() {
                prop_assert_eq!(pass.index, index);
                index += 1;
                let known = &mut known[pass.sequence as usize];
                prop_assert_eq!(pass.first_position, *known, "what stands is what came before");
                *known += pass.tokens;
                prop_assert!(*known < prompt + generate, "nobody wants what would follow");
                if pass.output {
                    under_way.push(pass);
                }
            }
            prop_assert!(!under_way.is_empty(), "someone is waited for");
            let (which, accepted) = choices.next().expect("endless");
            if accepted % 7 == 6 && !std::mem::replace(&mut began_again, true) {
                generation.restart();
                under_way.clear();
                let unfinished = |(known, tokens): (&mut u32, &u32)| {
                    *known = if *tokens == generate { *known } else { 0 };
                };
                known.iter_mut().zip(&tokens).for_each(unfinished);
                continue;
            }
            began_again = false;
            let pass = under_way.remove(*which as usize % under_way.len());
            let accepted = accepted % (pass.drafted + 1);
            prop_assert_eq!(generation.output(pass.index, accepted), Ok(accepted + 1));
            let sequence = pass.sequence as usize;
            known[sequence] -= pass.drafted - accepted;
            tokens[sequence] += accepted + 1;
        }
        prop_assert!(tokens.iter().all(|&tokens| tokens == generate), "{:?}", tokens);
        prop_assert!(generation.begin().is_none());
    }
}
