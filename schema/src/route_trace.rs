//! A recording of which experts the tokens of a run used, for models that are mixtures of experts.
//!
//! The format is `route_trace v1` of the public project Helldez/BigMoeOnEdge: comment lines with the sizes, a line with
//! the names of the columns, and a line for each use of an expert. All tokens of a prompt are one batch in each layer,
//! and each generated token is a batch of its own.
//!
//! ```text
//! # route_trace v1
//! # model=model.gguf arch=qwen3moe n_layer=2 n_expert=8 n_expert_used=2
//! # layer=0 expert_bytes=3059712 dense_bytes=11953152
//! # layer=1 expert_bytes=2654208 dense_bytes=11682816
//! turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
//! 0,0,0,0,0,5,0.6,0,3059712
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use hearth_profiles::Bytes;

/// The largest numbers of layers and of experts of a layer in a recording.
const MAX_LAYERS: usize = 1 << 12;
const MAX_EXPERTS: u32 = 1 << 12;
/// The largest size of an expert, so that the bytes of a recording cannot overflow.
const MAX_EXPERT_BYTES: u64 = 1 << 36;

/// The different experts that a layer used for the tokens of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteBatch {
    pub layer: u32,
    /// Whether the batch is a generated token, and not a prompt.
    pub is_decode: bool,
    /// The experts in the order of their last use.
    pub experts: Vec<u32>,
}

/// A recording of expert routing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteTrace {
    /// The model file, as the recording names it.
    pub model: String,
    pub expert_count: u32,
    /// Size of one expert of each layer.
    pub expert_bytes: Vec<Bytes>,
    /// The batches in the order of computation.
    pub batches: Vec<RouteBatch>,
}

/// A use of an expert by a token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouteUse {
    /// Position of the token in its sequence.
    pub position: u32,
    pub layer: u32,
    pub expert: u32,
    /// The factor of the expert's output.
    pub weight: f32,
}

/// What a run records of the experts of one sequence. It is displayed in the format of this module.
#[derive(Debug, Clone, PartialEq)]
pub struct RouteRecording {
    /// The model file.
    pub model: String,
    pub architecture: String,
    pub expert_count: u32,
    /// Number of experts that a token uses.
    pub experts_used: u32,
    /// Size of one expert and of all other weights of each layer.
    pub layer_bytes: Vec<[Bytes; 2]>,
    pub prompt_tokens: u32,
    pub uses: Vec<RouteUse>,
}

impl fmt::Display for RouteRecording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, architecture, expert_count, experts_used, layer_bytes, prompt_tokens, uses } = self;
        // Words are separated by spaces.
        let model = model.replace(char::is_whitespace, "_");
        writeln!(f, "# route_trace v1")?;
        writeln!(
            f,
            "# model={model} arch={architecture} n_layer={} n_expert={expert_count} n_expert_used={experts_used}",
            layer_bytes.len()
        )?;
        for (layer, [expert, dense]) in layer_bytes.iter().enumerate() {
            writeln!(f, "# layer={layer} expert_bytes={} dense_bytes={}", expert.0, dense.0)?;
        }
        writeln!(f, "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes")?;
        let mut uses = uses.clone();
        let step = |position: u32| (position + 1).saturating_sub(*prompt_tokens);
        uses.sort_by_key(|it| (step(it.position), it.layer, it.position));
        let mut last = None;
        let mut slot = 0;
        for RouteUse { position, layer, expert, weight } in uses {
            slot = if last.replace((position, layer)) == Some((position, layer)) { slot + 1 } else { 0 };
            let (step, bytes) = (step(position), layer_bytes.get(layer as usize).map_or(0, |it| it[0].0));
            let phase = u32::from(step > 0);
            writeln!(f, "0,{phase},{step},{layer},{slot},{expert},{weight:.6},0,{bytes}")?;
        }
        Ok(())
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {what}")]
pub struct RouteTraceError {
    pub line: usize,
    pub what: String,
}

impl RouteTrace {
    /// Parses a recording. Fails at the first line that is not valid.
    pub fn parse(text: &str) -> Result<Self, RouteTraceError> {
        let (mut header, mut sizes) = (BTreeMap::new(), BTreeMap::new());
        let mut columns: Option<Columns> = None;
        let mut batches: Vec<RouteBatch> = Vec::new();
        let mut last = None;
        let mut expert_count = 0;
        for (line, text) in (1..).zip(text.lines()) {
            let fail = |what: String| Err(RouteTraceError { line, what });
            if line == 1 && text.trim() != "# route_trace v1" {
                return fail(
                    "this is not a recording of routes; it must begin with `# route_trace v1`".into(),
                );
            }
            if let Some(comment) = text.strip_prefix('#') {
                let words: BTreeMap<&str, &str> =
                    comment.split_whitespace().filter_map(|word| word.split_once('=')).collect();
                if let Some(layer) = words.get("layer") {
                    let layer: u32 = number(layer, "layer", line)?;
                    let bytes = words.get("expert_bytes").copied().unwrap_or_default();
                    let bytes: u64 = number(bytes, "expert_bytes", line)?;
                    if bytes > MAX_EXPERT_BYTES {
                        return fail(format!(
                            "`expert_bytes` is {bytes}, but may be at most {MAX_EXPERT_BYTES}"
                        ));
                    }
                    sizes.insert(layer, Bytes(bytes));
                } else {
                    header.extend(words.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())));
                }
                continue;
            }
            let Some(columns) = &columns else {
                columns = Some(Columns::new(text, line)?);
                expert_count = header.get("n_expert").map_or("", String::as_str).parse().unwrap_or(0);
                if !(1..=MAX_EXPERTS).contains(&expert_count) || sizes.len() > MAX_LAYERS {
                    return fail(format!(
                        "`n_expert` must be from 1 to {MAX_EXPERTS}, and there may be at most {MAX_LAYERS} layers"
                    ));
                }
                if !sizes.keys().copied().eq(0..sizes.len() as u32) || sizes.is_empty() {
                    return fail(
                        "the comments before must give `expert_bytes` of every layer, from 0 on".into(),
                    );
                }
                continue;
            };
            let row: Vec<&str> = text.split(',').collect();
            let get =
                |at: usize, name: &str| number::<u32>(row.get(at).copied().unwrap_or_default(), name, line);
            let (turn, phase) = (get(columns.turn, "turn")?, get(columns.phase, "phase")?);
            let (step, layer) = (get(columns.step, "step")?, get(columns.layer, "layer")?);
            let expert = get(columns.expert, "expert")?;
            if layer as usize >= sizes.len() || expert >= expert_count {
                let layers = sizes.len();
                return fail(format!(
                    "expert {expert} of layer {layer}: the model has {layers} layers of {expert_count} experts"
                ));
            }
            let is_decode = phase > 0;
            let key = (turn, phase, if is_decode { step } else { 0 }, layer);
            if last != Some(key) {
                batches.push(RouteBatch { layer, is_decode, experts: Vec::new() });
                last = Some(key);
            }
            if let Some(batch) = batches.last_mut() {
                batch.experts.retain(|used| *used != expert);
                batch.experts.push(expert);
            }
        }
        if batches.is_empty() {
            let what = "the recording has no routes".to_owned();
            return Err(RouteTraceError { line: text.lines().count(), what });
        }
        let model = header.remove("model").unwrap_or_default();
        Ok(Self { model, expert_count, expert_bytes: sizes.into_values().collect(), batches })
    }
}

/// The positions of the columns that are used.
struct Columns {
    turn: usize,
    phase: usize,
    step: usize,
    layer: usize,
    expert: usize,
}

impl Columns {
    fn new(text: &str, line: usize) -> Result<Self, RouteTraceError> {
        let names: Vec<&str> = text.split(',').map(str::trim).collect();
        let find = |name: &str| {
            let missing = || RouteTraceError { line, what: format!("there is no column `{name}`") };
            names.iter().position(|found| *found == name).ok_or_else(missing)
        };
        Ok(Self {
            turn: find("turn")?,
            phase: find("phase")?,
            step: find("step")?,
            layer: find("layer")?,
            expert: find("expert")?,
        })
    }
}

fn number<T: FromStr>(text: &str, name: &str, line: usize) -> Result<T, RouteTraceError> {
    text.trim()
        .parse()
        .map_err(|_| RouteTraceError { line, what: format!("`{name}` is `{}`, not a number", text.trim()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "# route_trace v1
# model=m.gguf arch=qwen3moe n_layer=2 n_expert=8 n_expert_used=2
# layer=0 expert_bytes=300 dense_bytes=1
# layer=1 expert_bytes=200 dense_bytes=1
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,0,0,5,0.6,0,300
0,0,0,0,1,2,0.4,0,300
0,0,1,0,0,5,0.6,0,300
0,0,1,1,0,1,0.6,0,200
0,1,2,0,0,5,0.6,0,300
0,1,3,0,0,5,0.6,0,300
";

    #[test]
    fn tokens_of_a_prompt_are_one_batch() {
        let trace = RouteTrace::parse(GOOD).unwrap();
        assert_eq!((trace.model.as_str(), trace.expert_count), ("m.gguf", 8));
        assert_eq!(trace.expert_bytes, [Bytes(300), Bytes(200)]);
        let batch =
            |layer, is_decode, experts: &[u32]| RouteBatch { layer, is_decode, experts: experts.to_vec() };
        let expected =
            [batch(0, false, &[2, 5]), batch(1, false, &[1]), batch(0, true, &[5]), batch(0, true, &[5])];
        assert_eq!(trace.batches, expected);
    }

    #[test]
    fn recording_of_a_run_can_be_read() {
        let used = |position, layer, expert| RouteUse { position, layer, expert, weight: 0.5 };
        let recording = RouteRecording {
            model: "my model.gguf".into(),
            architecture: "qwen3moe".into(),
            expert_count: 8,
            experts_used: 2,
            layer_bytes: vec![[Bytes(300), Bytes(1)], [Bytes(200), Bytes(1)]],
            prompt_tokens: 2,
            // The layers of the second token of the prompt follow those of the first.
            uses: vec![
                used(0, 0, 5),
                used(0, 1, 1),
                used(1, 0, 2),
                used(1, 1, 1),
                used(2, 0, 7),
                used(2, 1, 3),
            ],
        };
        let text = recording.to_string();
        let trace = RouteTrace::parse(&text).unwrap();
        assert_eq!((trace.model.as_str(), trace.expert_bytes[1]), ("my_model.gguf", Bytes(200)));
        let batch =
            |layer, is_decode, experts: &[u32]| RouteBatch { layer, is_decode, experts: experts.to_vec() };
        let expected =
            [batch(0, false, &[5, 2]), batch(1, false, &[1]), batch(0, true, &[7]), batch(1, true, &[3])];
        assert_eq!(trace.batches, expected, "{text}");
    }

    #[test]
    fn invalid_recordings_are_refused() {
        let error =
            |from: &str, to: &str| RouteTrace::parse(&GOOD.replace(from, to)).unwrap_err().to_string();
        for (from, to, expected) in [
            ("# route_trace v1", "hello", "line 1: this is not a recording of routes"),
            ("n_expert=8", "n_expert=0", "line 5: `n_expert` must be from 1 to 4096"),
            ("n_expert=8", "n_expert=99999999999", "line 5: `n_expert` must be"),
            ("# layer=1", "# layer=7", "line 5: the comments before must give `expert_bytes` of every layer"),
            ("expert_bytes=200", "expert_bytes=-2", "line 4: `expert_bytes` is `-2`, not a number"),
            (
                "expert_bytes=200",
                "expert_bytes=18446744073709551615",
                "line 4: `expert_bytes` is 18446744073709551615, but",
            ),
            ("phase", "fase", "line 5: there is no column `phase`"),
            (
                "0,0,1,1,0,1,",
                "0,0,1,1,0,8,",
                "line 9: expert 8 of layer 1: the model has 2 layers of 8 experts",
            ),
            ("0,0,1,1,0,1,", "0,0,1,2,0,1,", "line 9: expert 1 of layer 2"),
            ("0,0,1,1,0,1,0.6,0,200", "0,0,1", "line 9: `layer` is ``, not a number"),
        ] {
            let found = error(from, to);
            assert!(found.starts_with(expected), "{found}");
        }
        let empty = GOOD.lines().take(5).collect::<Vec<_>>().join("\n");
        assert!(RouteTrace::parse(&empty).unwrap_err().to_string().contains("no routes"));
        assert!(RouteTrace::parse("").is_err());
    }
}
