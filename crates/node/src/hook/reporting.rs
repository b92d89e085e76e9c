//! Sends the hook's results to the controller, through the running agent or in its place.

use std::{io, path::Path, time::Duration};

use crate::agent::{
    config::{Config, ConfigError, Written},
    handed::{self, Handed, Reported},
};

/// Loads the agent's settings: the controller's address and this node's identity.
pub(super) fn road(agent: &Path) -> Result<Config, ConfigError> {
    let file = agent.exists().then_some(agent);
    Config::load(&Written::default(), file)
}

/// Submits the evidence. If no agent runs, sends it from here within `limit`; what the controller does not accept is
/// spooled.
pub(super) fn report(config: &Config, news: &Handed, limit: Duration) -> io::Result<Reported> {
    news.hand_in(&config.state)?;
    if handed::ring(&config.state) {
        return Ok(Reported::ByAgent);
    }
    handed::deliver(config, limit)
}
