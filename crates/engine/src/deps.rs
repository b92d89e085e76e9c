//! The dependencies of the engine: backend, store, clock, share and settings.

use std::{path::PathBuf, sync::Arc};

use doctor_backend::{Backend, clock::Clock, progress::Progress};
use doctor_core::time::Span;
use doctor_store::Store;

use crate::{inbox::Inbox, settings::Settings, share::Share};

/// Source of the random bits of one-time keys: the system, or a seed.
pub type KeySource = Box<dyn FnMut() -> [u8; 32] + Send>;

/// The dependencies of the engine.
pub struct EngineDeps {
    pub backend: Arc<dyn Backend>,
    pub store: Store,
    pub clock: Arc<dyn Clock>,
    pub share: Option<Share>,
    /// Where the published copy is made before it goes to the share: a private directory on a local disk. `None`: a temporary one.
    pub copy_folder: Option<PathBuf>,
    pub settings: Settings,
    pub inboxes: Vec<Box<dyn Inbox>>,
    pub keys: KeySource,
    /// Spreads ids: random in production, the seed in a simulation.
    pub salt: u64,
    /// The holder's name in the lease.
    pub holder: String,
    pub lease: Span,
    /// How the loop reports that it advances. The engine passes it to the backend.
    pub progress: Progress,
    /// Number of concurrent effects.
    pub workers: usize,
    /// How often the free-node list and the published copy are refreshed.
    pub publish_every: Span,
}

impl std::fmt::Debug for EngineDeps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineDeps").field("backend", &self.backend.name()).finish_non_exhaustive()
    }
}
