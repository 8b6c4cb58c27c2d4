//! The source of a worker's layers: a model file, or the head.
//!
//! A worker without a file fetches over a connection of its own: first the lengths of the model's files and of their
//! headers, then the chunks of the headers, and when these have given the place of each tensor, the chunks of its
//! layers and of the small tensors that belong to none. Each chunk comes with its hash. A few are requested ahead, so
//! that the link does not idle. What was fetched stays in a folder that the user names and is not fetched again, by a
//! later session or after a broken connection.
//!
//! The head is trusted as the model is: a holder of the key could send other weights. The hash finds damage, on the way
//! where there is no key, and on the disk afterwards.
//!
//! Not here: the folder's files ([`hearth_runtime::fetched`]).

use std::collections::VecDeque;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hearth_profiles::gguf::GgufModel;
use hearth_profiles::model::ModelProfile;
use hearth_schema::Plan;
use hearth_schema::pass::MAX_PASS_TOKENS;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::error::{RingError, protocol_error};
use crate::execution::{LocalModel, check_executable, facts};
use crate::wire::{
    FileOutline, Frame, Message, Purpose, Transport, WRITE_DEADLINE, WorkerFacts, open_connection,
    with_deadline,
};
use hearth_runtime::accelerator::Accelerator;
use hearth_runtime::error::ExecError;
use hearth_runtime::fetched::{CHUNK, FetchedFile};
use hearth_runtime::weights::Weights;

/// The time limit for one chunk to arrive over a slow link from a slow disk. source: assumed, 1 MiB at half a megabit
/// per second
const CHUNK_DEADLINE: Duration = Duration::from_secs(20);
/// Chunks requested ahead.
/// source: assumed, 4 MiB fill a gigabit link of 30 ms
const AHEAD: usize = 4;
/// More files than a model is split into.
const MAX_FILES: usize = 1024;
/// A header is a table and a vocabulary.
const MAX_HEADER_BYTES: u64 = 1 << 30;
/// Keeps sums of lengths far from overflow.
const MAX_FILE_BYTES: u64 = 1 << 50;

/// The largest activations taken before the model is known: a batch of the widest model, twice over.
const MAX_ACTIVATION_BYTES: usize = 2 * MAX_PASS_TOKENS as usize * (16 << 10) * size_of::<f32>();

/// Where a worker's layers come from.
#[derive(Debug, Clone)]
pub enum ModelSource {
    /// A file that is here.
    File(Arc<LocalModel>),
    /// The head; what has come is kept in this folder.
    Fetch(PathBuf),
}

impl ModelSource {
    pub(super) fn facts(&self) -> WorkerFacts {
        match self {
            ModelSource::File(model) => model.facts(),
            ModelSource::Fetch(_) => facts(),
        }
    }

    /// The largest activations a pass can have, in bytes.
    pub(super) fn max_activation_bytes(&self) -> usize {
        match self {
            ModelSource::File(model) => model.max_activation_bytes(),
            ModelSource::Fetch(_) => MAX_ACTIVATION_BYTES,
        }
    }

    pub(super) fn check(&self, plan: &Plan) -> Result<(), RingError> {
        match self {
            ModelSource::File(model) => model.check(plan),
            ModelSource::Fetch(_) => check_executable(plan),
        }
    }
}

/// Fetches the layers of one place.
pub struct LayerFetcher<'a, T> {
    pub transport: &'a T,
    /// The head's address.
    pub head: &'a str,
    pub session: u64,
    pub plan: &'a Plan,
    /// The worker's place in it.
    pub place: usize,
    /// Where fetched files are kept, one folder a model.
    pub folder: &'a Path,
    /// What computes layers on a GPU.
    pub accelerator: Option<&'a Accelerator>,
}

impl<T: Transport> LayerFetcher<'_, T> {
    /// Fetches what is missing. `progress` receives the bytes that are there, and the bytes to fetch.
    pub async fn model(&self, progress: impl Fn(u64, u64)) -> Result<LocalModel, RingError> {
        let (mut stream, _) =
            open_connection(self.transport, "the head", self.head, self.session, Purpose::Fetch).await?;
        let outlines = outline(&mut stream).await?;
        let paths = self.paths(outlines.len())?;
        let cannot = |path: &Path| {
            let path = path.display().to_string();
            move |error: std::io::Error| RingError::FetchFolder { path, reason: error.to_string() }
        };
        let mut files = Vec::new();
        for (outline, path) in outlines.iter().zip(&paths) {
            files.push(FetchedFile::open(path, outline.length).map_err(cannot(path))?);
        }
        let header = |outline: &FileOutline| std::iter::once(0..outline.header).collect();
        let headers: Vec<Vec<Range<u64>>> = outlines.iter().map(header).collect();
        let missing = missing(&mut files, &headers).map_err(cannot(self.folder))?;
        self.chunks(&mut stream, &mut files, missing, &progress).await?;
        let model = GgufModel::open(&paths[0]).map_err(ExecError::from)?;
        let profile = ModelProfile::from_gguf(&model).map_err(ExecError::from)?;
        if profile.shape_digest() != self.plan.model.shape_digest {
            return Err(protocol_error("the head", "it gives another model than its plan is for"));
        }
        let missing =
            missing_of_layers(&mut files, &model, self.plan, self.place).map_err(cannot(self.folder))?;
        self.chunks(&mut stream, &mut files, missing, &progress).await?;
        let own = self.plan.windows(self.place).into_iter().flatten().collect();
        let weights = Arc::new(Weights::open_fetched(&paths[0], own)?);
        Ok(LocalModel { weights, profile, accelerator: self.accelerator.cloned() })
    }

    /// The files of the plan's model, in a folder named by its digest.
    fn paths(&self, count: usize) -> Result<Vec<PathBuf>, RingError> {
        let model = &self.plan.model;
        let digest = model.digest.as_ref().unwrap_or(&model.shape_digest);
        // It comes from another device: nothing but letters and digits may become a path.
        let name: String = digest.chars().filter(char::is_ascii_alphanumeric).take(80).collect();
        let folder = self.folder.join(if name.is_empty() { "model" } else { &name });
        std::fs::create_dir_all(&folder).map_err(|error| RingError::FetchFolder {
            path: folder.display().to_string(),
            reason: error.to_string(),
        })?;
        Ok(match count {
            1 => vec![folder.join("model.gguf")],
            _ => (1..=count).map(|part| folder.join(format!("model-{part:05}-of-{count:05}.gguf"))).collect(),
        })
    }

    /// Fetches chunks, with a few requested ahead.
    async fn chunks<S>(
        &self,
        stream: &mut S,
        files: &mut [FetchedFile],
        missing: Vec<(u16, u64)>,
        progress: &impl Fn(u64, u64),
    ) -> Result<(), RingError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let total = missing.len() as u64;
        let (mut wanted, mut asked, mut done) = (missing.into_iter(), VecDeque::new(), 0);
        loop {
            while asked.len() < AHEAD
                && let Some((file, chunk)) = wanted.next()
            {
                let want = Frame::from(Message::Want { file, chunk });
                with_deadline(WRITE_DEADLINE, "asking for layers", want.write(stream)).await??;
                asked.push_back((file, chunk));
            }
            let Some(expected) = asked.pop_front() else { return Ok(()) };
            let frame =
                with_deadline(CHUNK_DEADLINE, "a chunk of the model", Frame::read(stream, CHUNK as usize))
                    .await??;
            let Some(Frame { message: Message::Chunk { file, chunk, hash }, payload }) = frame else {
                return Err(protocol_error("the head", "it does not give the layers that were asked for"));
            };
            let target = files.get_mut(usize::from(file)).filter(|_| (file, chunk) == expected);
            let Some(target) = target else {
                return Err(protocol_error("the head", "it gives layers that were not asked for"));
            };
            let written = target.write(chunk, &payload, hash).map_err(|error| RingError::FetchFolder {
                path: self.folder.display().to_string(),
                reason: error.to_string(),
            })?;
            if !written {
                return Err(protocol_error(
                    "the head",
                    &format!("chunk {chunk} of file {file} is not what its hash says"),
                ));
            }
            done += 1;
            progress(done * CHUNK, total * CHUNK);
        }
    }
}

async fn outline<S>(stream: &mut S) -> Result<Vec<FileOutline>, RingError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let asked = Frame::from(Message::Outline);
    with_deadline(WRITE_DEADLINE, "asking for the model's outline", asked.write(stream)).await??;
    let frame = with_deadline(CHUNK_DEADLINE, "the model's outline", Frame::read(stream, 0)).await??;
    let Some(Frame { message: Message::Files { files }, .. }) = frame else {
        return Err(protocol_error("the head", "it does not give its model's outline"));
    };
    let is_sound = |file: &FileOutline| {
        file.header <= file.length.min(MAX_HEADER_BYTES) && (1..=MAX_FILE_BYTES).contains(&file.length)
    };
    if files.is_empty() || files.len() > MAX_FILES || !files.iter().all(is_sound) {
        return Err(protocol_error("the head", "its model's outline is that of no model"));
    }
    Ok(files)
}

fn missing(files: &mut [FetchedFile], ranges: &[Vec<Range<u64>>]) -> std::io::Result<Vec<(u16, u64)>> {
    let mut missing = Vec::new();
    for (index, (file, ranges)) in files.iter_mut().zip(ranges).enumerate() {
        missing.extend(file.missing(ranges)?.into_iter().map(|chunk| (index as u16, chunk)));
    }
    Ok(missing)
}

/// What a place needs: its layers, and what belongs to no layer but the ends of the model.
fn missing_of_layers(
    files: &mut [FetchedFile],
    model: &GgufModel,
    plan: &Plan,
    place: usize,
) -> std::io::Result<Vec<(u16, u64)>> {
    let own = plan.windows(place);
    let is_needed = |name: &str| {
        let layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        match layer.map(|(layer, _)| layer.parse::<u32>()) {
            Some(Ok(layer)) => own.iter().any(|window| window.contains(&layer)),
            _ => !["token_embd.weight", "output.weight"].contains(&name),
        }
    };
    let mut ranges = vec![Vec::new(); files.len()];
    for tensor in model.tensors.iter().filter(|tensor| is_needed(&tensor.name)) {
        if let Some(ranges) = ranges.get_mut(tensor.part) {
            ranges.push(tensor.offset..tensor.offset.saturating_add(tensor.bytes.0));
        }
    }
    missing(files, &ranges)
}
