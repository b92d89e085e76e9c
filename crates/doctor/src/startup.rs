//! Judges whether the service would start with a configuration. `doctor serve` asks before its first cycle and `doctor
//! config check` asks without starting anything, so that both refuse the same settings in the same words.
//!
//! The judgement changes nothing: the store is read and neither created nor migrated, an address is bound until all are
//! tried, the shared directory gets a file that is gone at once, and no cluster is asked.

mod port_holder;

use std::{
    io,
    net::{SocketAddr, TcpListener},
};

use doctor_api::{
    ListenError,
    operator_api::{ApiServer, ApiServerError},
};
use doctor_backend::state_directory;
use doctor_engine::share::{Share, ShareError};
use doctor_store::{Store, StoreProbe, StoreUrl};

use crate::{
    agent_certificate::EndpointCertificate,
    config::{Config, ConfigError, ConfigSource},
    context::{self, Context},
    failure::{Failure, Result},
};

/// Whether the service would start.
#[derive(Debug, Default)]
pub(crate) struct StartupReport {
    /// Why it would not, in the order in which the service would find out.
    pub failures: Vec<Failure>,
    /// Valid settings that will not work yet. They do not prevent the start.
    pub remarks: Vec<String>,
    /// What could not be tried, and why.
    pub notes: Vec<String>,
    /// What the store holds. `None`: it cannot be opened.
    pub store: Option<StoreProbe>,
}

/// Judges the configuration of this context.
///
/// # Errors
/// If the files are invalid: then nothing else can be judged.
pub(crate) fn judge(context: &Context) -> Result<StartupReport> {
    let loaded = context.loaded()?;
    let config = &loaded.config;
    let mut report = StartupReport::default();
    match judge_store(config, &loaded.source) {
        Ok(probe) => report.store = Some(probe),
        Err(failure) => report.failures.push(failure),
    }
    match judge_share(config, &loaded.source) {
        Ok(remark) => report.remarks.extend(remark),
        Err(failure) => report.failures.push(failure),
    }
    let cluster = config.backend.verify(&config.service(&config.state())).map_err(Failure::OpenCluster);
    report.failures.extend(cluster.err());
    let has_tokens = report.store.as_ref().is_some_and(|store| store.has_tokens);
    report.failures.extend(judge_addresses(config, has_tokens, report.store.is_some()));
    report.remarks.extend(config.alerts.unreadable_files());
    if loaded.settings.tests.is_empty() {
        report.remarks.push("no test is enabled: nothing will be tested".to_owned());
    }
    Ok(report)
}

impl StartupReport {
    /// Turns the failures into an error.
    ///
    /// # Errors
    /// If the service would not start.
    pub(crate) fn refuse(&mut self) -> Result<()> {
        let mut failures = std::mem::take(&mut self.failures);
        match failures.len() {
            0 => Ok(()),
            1 => Err(failures.remove(0)),
            _ => Err(Failure::Several(failures)),
        }
    }

    /// Turns addresses that a running `doctor` of this machine holds into notes: most often that is the service whose
    /// configuration is checked. Only `config check` may do this; a second service cannot start beside the first.
    pub(crate) fn excuse_running_service(&mut self) {
        let failures = std::mem::take(&mut self.failures);
        for failure in failures {
            match address_in_use(&failure).and_then(|at| Some((at, port_holder::running_doctor(at.port())?))) {
                Some((at, process)) => {
                    self.notes.push(format!("could not try to listen on {at}: doctor runs there, process {process}"));
                }
                None => self.failures.push(failure),
            }
        }
    }
}

fn address_in_use(failure: &Failure) -> Option<SocketAddr> {
    let (at, source) = match failure {
        Failure::AgentListener(
            ListenError::Agents { at, source }
            | ListenError::Metrics { at, source }
            | ListenError::Probes { at, source },
        )
        | Failure::Web(ApiServerError::Listen { at, source }) => (at, source),
        _ => return None,
    };
    (source.kind() == io::ErrorKind::AddrInUse).then_some(*at)
}

fn judge_store(config: &Config, source: &ConfigSource) -> Result<StoreProbe> {
    let url = &config.store;
    if let (ConfigSource::BuiltIn { .. }, StoreUrl::Sqlite(path)) = (source, url)
        && path.parent().is_some_and(|folder| !folder.exists() && config.data.starts_with(folder))
    {
        // The service creates the directory of the data, and with it that of the store; see `judge_share`.
        return Ok(StoreProbe::default());
    }
    let probe = Store::probe(url).map_err(|source| context::store_failure(url, source))?;
    if probe.schema.is_some() && !probe.is_current() {
        // Found out now, while the controller of the older version still leads.
        let planned = Store::plan_migration(url, &config.migration_backup);
        planned.map_err(|source| context::store_failure(url, source))?;
    }
    Ok(probe)
}

/// Returns a remark if the directory is full or away for now: that must not keep the service from starting. A file server that
/// hangs or fails would otherwise keep a controller that restarts from taking bad nodes out of service.
fn judge_share(config: &Config, source: &ConfigSource) -> Result<Option<String>> {
    if matches!(source, ConfigSource::BuiltIn { .. }) && !config.data.exists() {
        let usable = state_directory::check_usable(&config.data);
        let failed =
            |text| ConfigError::CreateStateDirectory { path: config.data.clone(), source: io::Error::other(text) };
        return usable.map_err(|text| failed(text).into()).map(|()| None);
    }
    match Share::open_for_command(&config.data).and_then(|share| share.check_writable()) {
        Ok(()) => Ok(None),
        Err(error) if passes(&error) => Ok(Some(error.to_string())),
        Err(error) => Err(error.into()),
    }
}

/// Whether the directory works again without a change of the configuration. One that does not exist, is none or may not be read is a
/// mistake in it.
fn passes(error: &ShareError) -> bool {
    use io::ErrorKind::{NotADirectory, NotFound, PermissionDenied};
    let is_mistake = matches!(
        error,
        ShareError::File { source, .. } if matches!(source.kind(), NotADirectory | NotFound | PermissionDenied)
    );
    error.is_full() || (error.is_outage() && !is_mistake)
}

/// Binds all addresses at the same time, so that two equal ones are found, and frees them again. Without a known store it
/// is unknown whether there are tokens, and the API is not judged.
fn judge_addresses(config: &Config, has_tokens: bool, store_is_known: bool) -> Vec<Failure> {
    let agents = config.agents.listen.map(|at| doctor_api::try_agent_address(at).map_err(Failure::from));
    let probes = config.probes.listen.map(|at| doctor_api::try_probes_address(at).map_err(Failure::from));
    let metrics = config.metrics.listen.map(|at| doctor_api::try_metrics_address(at).map_err(Failure::from));
    let web = config.web.as_ref().filter(|_| store_is_known);
    let web = web.map(|web| ApiServer::verify(web, has_tokens).map_err(Failure::from));
    let results: Vec<Result<TcpListener>> = [agents, probes, metrics, web].into_iter().flatten().collect();
    let agent_tls = judge_agent_tls(config).err();
    agent_tls.into_iter().chain(results.into_iter().filter_map(std::result::Result::err)).collect()
}

/// Loads the certificate of the agent endpoint. One that the service would make at its first start is not made here.
fn judge_agent_tls(config: &Config) -> Result<()> {
    let Some(endpoint) = EndpointCertificate::of(config) else { return Ok(()) };
    let files = endpoint.files(config);
    match endpoint {
        EndpointCertificate::SelfMade if !files.certificate.exists() => Ok(()),
        EndpointCertificate::SelfMade | EndpointCertificate::Site(_) => Ok(doctor_api::try_agent_tls(&files)?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_that_fails_for_now_does_not_keep_the_service_from_starting() {
        // Linux' numbers: EIO, ESTALE, ENOSPC; then ENOENT, ENOTDIR, EACCES, EROFS.
        for (operation, code, expected) in [
            ("opening", 5, true),
            ("opening the shared directory", 116, true),
            ("writing to", 28, true),
            ("opening the shared directory", 2, false),
            ("opening the shared directory", 20, false),
            ("opening the shared directory", 13, false),
            ("writing to", 30, false),
        ] {
            let error =
                ShareError::File { operation, path: "/data".into(), source: io::Error::from_raw_os_error(code) };
            assert_eq!(passes(&error), expected, "{error}");
        }
        assert!(passes(&ShareError::Busy { root: "/data".into(), doing: "writing to it" }));
    }
}
