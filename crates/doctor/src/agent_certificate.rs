//! The certificate of the agent endpoint: the site's, or one that the controller makes in its state directory.

use std::net::SocketAddr;

use doctor_api::{
    TlsFiles,
    self_made_certificate::{self, CertificateError},
};
use doctor_checks::key_fingerprint::KeyFingerprint;

use crate::config::Config;

/// The certificate of an endpoint that is encrypted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum EndpointCertificate {
    /// Of `tls` in the configuration.
    Site(TlsFiles),
    /// In the state directory.
    SelfMade,
}

impl EndpointCertificate {
    /// Returns the certificate that the configuration asks for. `None`: the endpoint is off, or not encrypted.
    pub(crate) fn of(config: &Config) -> Option<Self> {
        config.agents.listen?;
        match &config.agents.tls {
            _ if config.agents.is_plain() => None,
            Some(files) => Some(Self::Site(files.clone())),
            None => Some(Self::SelfMade),
        }
    }

    /// Returns the files, which need not exist yet.
    pub(crate) fn files(&self, config: &Config) -> TlsFiles {
        match self {
            Self::Site(files) => files.clone(),
            Self::SelfMade => self_made_certificate::current_files(&config.state()),
        }
    }

    /// Returns the files and whether they were made now.
    ///
    /// # Errors
    /// If there are none and they cannot be made.
    pub(crate) fn ensure(&self, config: &Config) -> Result<(TlsFiles, bool), CertificateError> {
        match self {
            Self::Site(files) => Ok((files.clone(), false)),
            Self::SelfMade => self_made_certificate::ensure(&config.state(), &names(config)),
        }
    }

    /// Returns the fingerprints of the keys that agents may meet: the one in use, and the prepared next one.
    ///
    /// # Errors
    /// If a certificate cannot be read.
    pub(crate) fn fingerprints(&self, config: &Config) -> Result<Vec<KeyFingerprint>, CertificateError> {
        let mut all = vec![self_made_certificate::fingerprint(&self.files(config).certificate)?];
        let next = self_made_certificate::next_files(&config.state()).certificate;
        if *self == Self::SelfMade && next.exists() {
            all.push(self_made_certificate::fingerprint(&next)?);
        }
        Ok(all)
    }
}

/// Returns the names of a certificate that the controller makes: those by which agents may reach it, as far as the configuration says.
/// An agent that pins the key does not look at them.
pub(crate) fn names(config: &Config) -> Vec<String> {
    let mut names = vec!["localhost".to_owned()];
    names.extend(
        config.agents.listen.map(|at: SocketAddr| at.ip()).filter(|ip| !ip.is_unspecified()).map(|ip| ip.to_string()),
    );
    names.extend(config.agents.url.as_deref().and_then(host_of).map(str::to_owned));
    names.sort();
    names.dedup();
    names
}

/// Returns the host of an https URL, without brackets.
fn host_of(url: &str) -> Option<&str> {
    let authority = url.strip_prefix("https://")?.split('/').next()?;
    let host = match authority.strip_prefix('[') {
        Some(rest) => rest.split_once(']')?.0,
        None => authority.split(':').next()?,
    };
    (!host.is_empty()).then_some(host)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn config(agents: &str) -> Config {
        Config::parse(&format!("store = \"state/doctor.db\"\n[agents]\n{agents}"), Path::new("/etc/doctor")).unwrap()
    }

    #[test]
    fn only_an_endpoint_on_loopback_or_with_an_explicit_setting_is_plain() {
        let certificate = |agents: &str| EndpointCertificate::of(&config(agents));
        assert_eq!(certificate(""), None, "there is no endpoint");
        for plain in ["listen = \"127.0.0.1:1\"", "listen = \"[::1]:1\"", "listen = \"0.0.0.0:1\"\nplain = true"] {
            assert_eq!(certificate(plain), None, "{plain}");
        }
        for made in ["listen = \"0.0.0.0:1\"", "listen = \"10.0.0.5:1\"", "listen = \"127.0.0.1:1\"\nplain = false"] {
            assert_eq!(certificate(made), Some(EndpointCertificate::SelfMade), "{made}");
        }
        let files = TlsFiles::new("/etc/doctor/a.crt", "/k");
        let site = certificate("listen = \"127.0.0.1:1\"\ntls = { certificate = \"a.crt\", key = \"/k\" }\n");
        assert_eq!(site, Some(EndpointCertificate::Site(files)));
    }

    #[test]
    fn a_made_certificate_has_the_names_by_which_agents_call() {
        for (agents, expected) in [
            ("listen = \"0.0.0.0:1\"", &["localhost"][..]),
            (
                "listen = \"10.0.0.5:1\"\nurl = \"https://ctl.example:7443/x\"",
                &["10.0.0.5", "ctl.example", "localhost"],
            ),
            ("listen = \"[::]:1\"\nurl = \"https://[fd00::1]:7443\"", &["fd00::1", "localhost"]),
        ] {
            assert_eq!(names(&config(agents)), expected, "{agents}");
        }
    }
}
