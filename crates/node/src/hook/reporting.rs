//! With a controller: what the hook saw goes to it, by the agent that runs here, or by the hook in its place.

use std::{io, path::Path, time::Duration};

use crate::agent::{
    config::{Config, ConfigError, Written},
    handed::{self, Handed, Reported},
};

/// Where reports go, and as whom, as the agent's settings have it.
pub(super) fn road(agent: &Path) -> Result<Config, ConfigError> {
    let file = agent.exists().then_some(agent);
    Config::load(&Written::default(), file)
}

/// Hands it in. Where no agent runs, it is sent from here within this time, and what is not taken waits on disk.
pub(super) fn report(config: &Config, news: &Handed, limit: Duration) -> io::Result<Reported> {
    news.hand_in(&config.state)?;
    if handed::ring(&config.state) {
        return Ok(Reported::ByAgent);
    }
    handed::deliver(config, limit)
}
