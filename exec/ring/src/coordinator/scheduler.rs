//! How does one ring answer whoever comes, for as long as it stands?
//!
//! The plan has caches for so many sequences; each is a seat. A guest takes a vacant seat, best one whose text so far is
//! how the guest's prompt begins: what is common need not be computed again, so that a conversation goes on where it
//! was. Guests under way interleave in the ring as the sequences of one request do, and come and go without the others
//! noticing. A guest who is gone (nobody listens to its tokens) leaves its seat with the token that is under way. When a
//! device is lost, all texts under way are computed again, as in any request; what vacant seats held is lost.
//!
//! Not here: which pass enters next (`hearth_core::schedule::Generation`), and what a text is in letters.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use hearth_core::schedule::Generation;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use super::generation::heard;
use super::progress::{Done, LONGEST_WAIT, Progress, Text};
use super::reconfiguration::Lead;
use crate::error::{RingError, strange};
use crate::execution::{Choosing, Lines, Sample};
use crate::wire::Network;

/// Passes after which traces are ordered, so that no device keeps the lines of days.
/// source: assumed, some seconds of a fast ring
const ACCOUNT_EVERY: usize = 256;
/// Or after so long, so that whoever looks at a slow ring sees it work.
/// source: assumed
const ACCOUNT_AFTER: Duration = Duration::from_secs(2);
/// Between two tries to take a device in that was lost.
/// source: assumed, what a person does not mind who waits for a first token
const TAKE_IN_EVERY: Duration = Duration::from_secs(30);

/// Somebody who wants a text continued.
pub struct Guest {
    /// Its tokens, at least one.
    pub prompt: Vec<u32>,
    /// At most so many more, at least one.
    pub generate: u32,
    /// Turns logits into tokens.
    pub sample: Sample,
    /// Where the answer goes. A guest whose receiver is gone is given up.
    pub said: mpsc::UnboundedSender<Said>,
}

/// What a guest is told. That the sender is gone tells that no more tokens come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Said {
    /// It has a seat, and so many tokens of its prompt are computed already.
    Begun {
        /// Tokens.
        held: u32,
    },
    /// A token; one that ends texts is the last.
    Token(u32),
    /// It gets no more, and why.
    Failed(String),
}

/// Hears now and then what a device by name has done since.
pub type OnWork = Arc<dyn Fn(&str, &Lines) + Send + Sync>;

/// How guests are served.
pub struct Service {
    /// The most tokens of a prompt that enter the ring as one batch.
    pub micro_batch: u32,
    /// Tokens that the draft model proposes at a time; 0 drafts nothing.
    pub drafts: u32,
    /// After which tokens a text is over.
    pub stop: Vec<u32>,
    /// Hears what the devices do.
    pub on_work: Option<OnWork>,
}

/// Who is under way and who waits.
struct Desk {
    progress: Progress,
    /// Who has each seat.
    seated: Vec<Option<mpsc::UnboundedSender<Said>>>,
    /// When each seat was taken last, counted in guests.
    taken: Vec<u64>,
    waiting: VecDeque<Guest>,
    guests: u64,
    /// When it is tried again to take in who was lost.
    take_in_at: Instant,
    /// When traces were ordered last.
    accounted_at: Instant,
    is_open: bool,
}

impl Desk {
    fn new(seats: u32, service: &Service) -> Self {
        let count = seats as usize;
        Self {
            progress: nothing_held(seats, service),
            seated: vec![None; count],
            taken: vec![0; count],
            waiting: VecDeque::new(),
            guests: 0,
            take_in_at: Instant::now(),
            accounted_at: Instant::now(),
            is_open: true,
        }
    }

    /// Lets in who has come, as far as that is known without waiting.
    fn let_in(&mut self, guests: &mut mpsc::UnboundedReceiver<Guest>) {
        loop {
            match guests.try_recv() {
                Ok(guest) => self.waiting.push_back(guest),
                Err(mpsc::error::TryRecvError::Empty) => return,
                Err(mpsc::error::TryRecvError::Disconnected) => {
                    self.is_open = false;
                    return;
                }
            }
        }
    }

    /// Gives up who is gone.
    fn dismiss(&mut self) {
        self.waiting.retain(|guest| !guest.said.is_closed());
        for (sequence, said) in (0..).zip(&mut self.seated) {
            if said.as_ref().is_some_and(mpsc::UnboundedSender::is_closed) {
                *said = None;
                self.progress.generation.give_up(sequence);
            }
        }
    }

    /// The vacant seat for a prompt, and how many of its first tokens are there already. What is gained is computing
    /// these; what is lost is the rest of what the seat holds, which somebody may come back for. Of seats that are
    /// equally good it is the one that nobody has had for longest.
    fn seat_for(&self, prompt: &[u32]) -> Option<(u32, u32)> {
        let generation = &self.progress.generation;
        let seat = |sequence: u32| {
            let text = &self.progress.texts[sequence as usize].all;
            let held = &text[..text.len().min(generation.held(sequence) as usize)];
            let common = held.iter().zip(prompt).take_while(|(one, other)| one == other).count();
            (sequence, common, held.len() - common)
        };
        let vacant = (0..self.seated.len() as u32).filter(|&sequence| generation.is_vacant(sequence));
        let worth = |&(sequence, gained, lost): &(u32, usize, usize)| {
            (gained as i64 - lost as i64, std::cmp::Reverse(self.taken[sequence as usize]))
        };
        vacant.map(seat).max_by_key(worth).map(|(sequence, common, _)| (sequence, common as u32))
    }

    /// Tells a guest its tokens; the last ones end it.
    fn tell(&mut self, sequence: u32, tokens: Vec<u32>) {
        let Some(seat) = self.seated.get_mut(sequence as usize) else { return };
        let Some(said) = seat else { return };
        // Whether anybody listens is seen by `dismiss`.
        for token in tokens {
            let _ = said.send(Said::Token(token));
        }
        if self.progress.generation.is_vacant(sequence) {
            *seat = None;
        }
    }

    /// Nobody gets any more.
    fn fail(&mut self, why: &RingError) {
        let seated = self.seated.iter_mut().filter_map(Option::take);
        let waiting = self.waiting.drain(..).map(|guest| guest.said);
        for said in seated.chain(waiting) {
            let _ = said.send(Said::Failed(why.to_string()));
        }
    }
}

/// Seats that hold nothing.
fn nothing_held(seats: u32, service: &Service) -> Progress {
    let generation = Generation::vacant(seats, service.micro_batch, service.drafts);
    let texts = vec![Text::default(); seats as usize];
    let mut progress = Progress::new(generation, texts, service.stop.clone());
    progress.reports = Some(Vec::new());
    progress
}

impl<N: Network> Lead<N> {
    /// Answers guests until none can come any more. If the ring fails, all who are there are told.
    pub(super) async fn serve(
        &mut self,
        service: Service,
        guests: &mut mpsc::UnboundedReceiver<Guest>,
    ) -> Result<(), RingError> {
        let mut desk = Desk::new(self.recovery.plan().sequences, &service);
        let ended = match self.renew_for_request(Choosing::new(Vec::new(), service.stop.clone())).await {
            Ok(()) => self.attend(&mut desk, &service, guests).await,
            Err(error) => Err(error),
        };
        if let Err(error) = &ended {
            desk.let_in(guests);
            desk.fail(error);
        }
        ended
    }

    async fn attend(
        &mut self,
        desk: &mut Desk,
        service: &Service,
        guests: &mut mpsc::UnboundedReceiver<Guest>,
    ) -> Result<(), RingError> {
        loop {
            desk.let_in(guests);
            desk.dismiss();
            self.take_in_the_lost(desk, service).await?;
            self.seat(desk)?;
            let done = match self.advance(&mut desk.progress).await? {
                Done::Nothing if !desk.is_open && desk.progress.generation.is_over() => return Ok(()),
                Done::Nothing => self.news(desk, guests).await?,
                done => done,
            };
            if let Done::Tokens(sequence, tokens) = done {
                desk.tell(sequence, tokens);
            }
            self.account(desk, service)?;
        }
    }

    /// Seats who waits, as far as there is room.
    fn seat(&mut self, desk: &mut Desk) -> Result<(), RingError> {
        while let Some(guest) = desk.waiting.front() {
            let Some((sequence, common)) = desk.seat_for(&guest.prompt) else { return Ok(()) };
            let Some(Guest { prompt, generate, sample, said }) = desk.waiting.pop_front() else {
                return Ok(());
            };
            let tokens = prompt.len() as u64 + u64::from(generate);
            if prompt.is_empty() || generate == 0 || tokens > u64::from(self.recovery.plan().context) {
                let _ = said.send(Said::Failed(format!(
                    "{} prompt tokens and {generate} new ones do not fit the context of {} positions",
                    prompt.len(),
                    self.recovery.plan().context
                )));
                continue;
            }
            let entered = desk.progress.generation.enter(sequence, prompt.len() as u32, common, generate);
            let held = entered.map_err(|error| strange("the head", &error.to_string()))?;
            self.node()?.choose_with(sequence, sample);
            desk.guests += 1;
            desk.taken[sequence as usize] = desk.guests;
            desk.progress.texts[sequence as usize] = Text { prompt: prompt.len(), all: prompt };
            let _ = said.send(Said::Begun { held });
            desk.seated[sequence as usize] = Some(said);
        }
        Ok(())
    }

    /// Waits for whatever comes first: news of the ring, or a guest.
    async fn news(
        &mut self,
        desk: &mut Desk,
        guests: &mut mpsc::UnboundedReceiver<Guest>,
    ) -> Result<Done, RingError> {
        let limit = self.options.pass_deadline;
        let alarm = if desk.progress.under_way.is_empty() {
            // Nothing can be late.
            Instant::now() + LONGEST_WAIT
        } else {
            desk.progress.alarm(limit, self.recovery.plan().rounds)
        };
        tokio::select! {
            event = timeout_at(alarm, self.events.recv()) => self.take(heard(event, limit), &mut desk.progress).await,
            guest = guests.recv(), if desk.is_open => {
                desk.is_open = guest.is_some();
                desk.waiting.extend(guest);
                Ok(Done::Work)
            }
        }
    }

    /// Before a guest enters a ring that stands idle, devices that were lost may come back; that ring holds nothing.
    async fn take_in_the_lost(&mut self, desk: &mut Desk, service: &Service) -> Result<(), RingError> {
        let is_idle = desk.progress.generation.is_over() && desk.progress.under_way.is_empty();
        let is_due = Instant::now() >= desk.take_in_at && !desk.waiting.is_empty();
        if !is_idle || !is_due || self.recovery.gone().is_empty() {
            return Ok(());
        }
        desk.take_in_at = Instant::now() + TAKE_IN_EVERY;
        desk.progress = nothing_held(self.recovery.plan().sequences, service);
        self.renew_for_request(Choosing::new(Vec::new(), service.stop.clone())).await
    }

    /// Has the devices hand over what they have written down, and passes on what came.
    fn account(&mut self, desk: &mut Desk, service: &Service) -> Result<(), RingError> {
        let progress = &mut desk.progress;
        let is_due = desk.accounted_at.elapsed() >= ACCOUNT_AFTER && !progress.passes.is_empty();
        if is_due || progress.passes.len() >= ACCOUNT_EVERY {
            desk.accounted_at = Instant::now();
            progress.passes.clear();
            self.order_lines();
            let name = self.recovery.plan().devices[0].name.clone();
            let own = self.node()?.take_all_lines();
            progress
                .reports
                .get_or_insert_default()
                .extend(own.into_iter().map(|(_, lines)| (name.clone(), lines)));
        }
        for (name, lines) in progress.reports.iter_mut().flat_map(|reports| reports.drain(..)) {
            if let Some(on_work) = &service.on_work {
                on_work(&name, &lines);
            }
        }
        Ok(())
    }
}
