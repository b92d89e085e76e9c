//! Sends the hook's results to the controller, through the running agent or in its place.

use std::{io, path::Path, time::Duration};

use crate::agent::{
    config::{AgentSettings, Config, ConfigError},
    hook_reports::{self, HookReport, SubmitOutcome},
};

/// Loads the agent's settings: the controller's address and this node's identity.
pub(super) fn agent_config(agent: &Path) -> Result<Config, ConfigError> {
    let file = agent.exists().then_some(agent);
    Config::load(&AgentSettings::default(), file)
}

/// Submits the evidence. If no agent runs, sends it from here within `limit`; what the controller does not accept is
/// spooled.
pub(super) fn report(config: &Config, hook_report: &HookReport, limit: Duration) -> io::Result<SubmitOutcome> {
    hook_report.submit(&config.state)?;
    if hook_reports::wake_agent(&config.state) {
        return Ok(SubmitOutcome::ByAgent);
    }
    hook_reports::deliver(config, limit)
}
