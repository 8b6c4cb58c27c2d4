//! How many may knock at once?
//!
//! Anybody can connect to a port. Whoever has not said yet what it wants is a stranger: it holds a connection and a task
//! until the deadline of its first frame. There are few of them at a time. When there are too many, the one that has
//! been silent longest is sent away, so that an honest device, which speaks at once, gets through between those who
//! only hold connections open.
//!
//! Not here: who has the key ([`crate::security::encrypted`]). Strangers who come faster than honest devices can speak still keep
//! these out.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::task::AbortHandle;

/// Connections that have not said yet what they are for; far fewer than a process may have open.
/// source: assumed, more than a home has devices
const MAX_STRANGERS: usize = 64;

/// Connections that have not said yet what they are for, the oldest first.
#[derive(Default)]
pub struct Strangers(VecDeque<(Arc<Mutex<bool>>, AbortHandle)>);

/// A connection's mark that it is no stranger any more.
pub struct Known(Arc<Mutex<bool>>);

impl Known {
    /// It has said what it is for.
    pub fn greeted(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
    }
}

impl Strangers {
    /// Serves a connection; the one that has said nothing longest makes room if there are too many.
    pub fn let_in<F>(&mut self, connection: impl FnOnce(Known) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.0.retain(|(known, task)| {
            !task.is_finished() && !*known.lock().unwrap_or_else(PoisonError::into_inner)
        });
        if self.0.len() >= MAX_STRANGERS
            && let Some((_, oldest)) = self.0.pop_front()
        {
            oldest.abort();
        }
        let known = Arc::new(Mutex::new(false));
        let task = tokio::spawn(connection(Known(known.clone())));
        self.0.push_back((known, task.abort_handle()));
    }
}
