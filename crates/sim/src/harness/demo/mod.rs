//! The demo: a month of a cluster in seconds, to watch and to inspect afterwards.
//!
//! It is an ordinary session with the default policy: bad nodes are marked, operators repair them, requalification
//! returns them. The store is in memory during the demo, because a simulated month of real fsyncs would only measure
//! the disk, and is written to a file at the end.

mod running_demo;
mod terminal_view;

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use doctor_core::time::Span;
use doctor_store::{Store, StoreUrl};

use super::{
    score::Score,
    session::{Session, SessionConfig, SessionError},
};
use crate::WorldConfig;
use terminal_view::TerminalView;

pub use running_demo::RunningDemo;

/// The parameters of a demo.
#[derive(Debug, Clone)]
pub struct Demo {
    pub nodes: u32,
    pub days: u32,
    pub seed: u64,
    /// The directory of the store and the shared directory; an earlier demo there is replaced.
    pub folder: PathBuf,
    /// Whether to draw the cluster while time passes.
    pub live: bool,
    /// The least duration of the drawing, so that a viewer can follow it.
    pub min_duration: Duration,
}

#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error("{operation} {}: {source}", path.display())]
    File { operation: &'static str, path: PathBuf, source: io::Error },
    #[error("{} contains something other than an earlier demonstration; choose another one with --dir", .0.display())]
    NotOurs(PathBuf),
    #[error("drawing on the terminal: {0}")]
    Drawing(io::Error),
}

/// The result of a demo and the paths for its inspection.
#[derive(Debug)]
pub struct DemoSummary {
    pub score: Score,
    pub store: PathBuf,
    pub share: PathBuf,
    /// The assumptions of the simulation.
    pub assumptions: String,
    pub took: Duration,
}

fn fail(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DemoError {
    let path = path.to_owned();
    move |source| DemoError::File { operation, path, source }
}

/// The file that marks a directory as a demo's.
const MARKER_FILE: &str = ".cluster-doctor-demo";

impl Demo {
    /// Plays the demo.
    ///
    /// # Errors If the directory cannot be used or the session fails.
    pub fn play(&self, screen: &mut dyn Write) -> Result<DemoSummary, DemoError> {
        self.play_session(screen).map(|(summary, _)| summary)
    }

    /// Plays the demo, and returns a session that continues on its store.
    ///
    /// # Errors If the directory cannot be used or the session fails.
    pub fn play_and_continue(&self, screen: &mut dyn Write) -> Result<(DemoSummary, RunningDemo), DemoError> {
        let (summary, mut session) = self.play_session(screen)?;
        let store = Store::open(&StoreUrl::Sqlite(summary.store.clone())).map_err(SessionError::from)?;
        session.move_to(store)?;
        Ok((summary, RunningDemo::new(session)))
    }

    fn play_session(&self, screen: &mut dyn Write) -> Result<(DemoSummary, Session), DemoError> {
        let began = Instant::now();
        let (store, share) = self.prepare()?;
        let mut config = SessionConfig::new(WorldConfig::of(self.nodes).with_seed(self.seed));
        config.world.share = Some(share.clone());
        config.share = Some(share.clone());
        // Intermediate copies are never read.
        config.publish_every = Span::days(1);
        let assumptions = config.world.assumptions.to_string();
        let mut session = Session::new(config)?;
        let start = session.backend().world().now();
        let until = start.plus(Span::days(i64::from(self.days)));
        let mut view = self.live.then(|| TerminalView::new(self.days, self.min_duration));
        let mut drawing = Ok(());
        session.run_until(until, |session, report| {
            if let Some(view) = &mut view
                && drawing.is_ok()
            {
                drawing = view.update(session, report, start, screen);
            }
            Ok(())
        })?;
        if let Some(view) = &mut view
            && drawing.is_ok()
        {
            drawing = view.finish(&session, screen);
        }
        drawing.map_err(DemoError::Drawing)?;
        session.stop()?;
        session.store().backup(&store).map_err(SessionError::from)?;
        self.remove_earlier()?;
        let summary = DemoSummary { score: Score::of(&session)?, store, share, assumptions, took: began.elapsed() };
        Ok((summary, session))
    }

    /// Returns the path to which an earlier demo is moved before its removal.
    fn find_earlier(&self) -> PathBuf {
        let mut name = self.folder.clone().into_os_string();
        name.push(".old");
        name.into()
    }

    fn remove_earlier(&self) -> Result<(), DemoError> {
        let earlier = self.find_earlier();
        if !earlier.join(MARKER_FILE).exists() {
            return Ok(());
        }
        fs::remove_dir_all(&earlier).map_err(fail("removing", &earlier))
    }

    /// Creates an empty directory. An earlier demo in it is moved aside, anything else is an error. The earlier demo is
    /// removed at the end, because some file systems are slow to create files where as many have just been removed.
    fn prepare(&self) -> Result<(PathBuf, PathBuf), DemoError> {
        let sign = self.folder.join(MARKER_FILE);
        if self.folder.exists() {
            let mut entries = fs::read_dir(&self.folder).map_err(fail("reading", &self.folder))?;
            if !sign.exists() && entries.next().is_some() {
                return Err(DemoError::NotOurs(self.folder.clone()));
            }
            if sign.exists() {
                self.remove_earlier()?;
                fs::rename(&self.folder, self.find_earlier()).map_err(fail("moving", &self.folder))?;
            }
        }
        let share = self.folder.join("data");
        fs::create_dir_all(&share).map_err(fail("making", &share))?;
        fs::write(&sign, "A demonstration of Cluster Doctor. It may be deleted.\n").map_err(fail("writing", &sign))?;
        Ok((self.folder.join("doctor.db"), share))
    }
}
