//! `doctor agent certificate`: shows the certificate of the agent endpoint, and changes the key of one that the controller made.

use std::path::PathBuf;

use doctor_api::self_made_certificate;
use doctor_checks::key_fingerprint::KeyFingerprint;
use doctor_core::time::Timestamp;
use serde::Serialize;

use doctor_backend::clock::{Clock, SystemClock};

use super::super::confirmation::{Change, ChangeArgs};
use crate::{
    agent_certificate::{self, EndpointCertificate},
    config::Config,
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
};

/// Show the fingerprint of the agent endpoint's public key, which agents pin, or change the key.
///
/// A key is changed in three steps, so that no agent falls silent: prepare the next one, add its fingerprint to `fingerprints` in
/// every agent's settings (or enroll the nodes again), and switch when all agents know both. docs/guide/agent.md shows them.
#[derive(Debug, clap::Args)]
pub(super) struct CertificateArgs {
    /// Make the next certificate and key beside those in use.
    #[arg(long, conflicts_with = "switch")]
    prepare: bool,
    /// Put the prepared certificate into use. A running controller loads it within seconds.
    #[arg(long)]
    switch: bool,
    #[command(flatten)]
    change_args: ChangeArgs,
}

/// The JSON output.
#[derive(Debug, Serialize)]
struct CertificateView {
    /// Whether the controller made the certificate.
    self_made: bool,
    certificate: PathBuf,
    fingerprint: KeyFingerprint,
    /// The fingerprint of the prepared certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<KeyFingerprint>,
}

pub(super) fn run(context: &Context, args: &CertificateArgs) -> Result<Exit> {
    let config = context.config()?;
    let endpoint = EndpointCertificate::of(config).ok_or_else(|| {
        let why = "the agent endpoint has no certificate: it is off, or not encrypted";
        Failure::Refused {
            why: why.to_owned(),
            instead: "`listen` and `tls`, or `plain = false`, under [agents]".to_owned(),
        }
    })?;
    if args.prepare || args.switch {
        if endpoint != EndpointCertificate::SelfMade {
            let why = "the certificate is the site's (`agents.tls`)".to_owned();
            return Err(Failure::Refused {
                why,
                instead: "replace its files; they are loaded within seconds".to_owned(),
            });
        }
        change(config, args)?;
    }
    let files = endpoint.files(config);
    if !files.certificate.exists() {
        return Err(Failure::Unreachable(format!(
            "there is no certificate at {} yet: `doctor serve` makes it when it starts",
            files.certificate.display()
        )));
    }
    let fingerprints = endpoint.fingerprints(config)?;
    let view = CertificateView {
        self_made: endpoint == EndpointCertificate::SelfMade,
        certificate: files.certificate,
        fingerprint: fingerprints[0],
        next: fingerprints.get(1).copied(),
    };
    context.out.show(&view, |page| {
        page.line(view.fingerprint.to_string());
        if let Some(next) = &view.next {
            page.line(format!("{next} (prepared, not in use yet)"));
        }
    })?;
    Ok(Exit::Ok)
}

fn change(config: &Config, args: &CertificateArgs) -> Result<()> {
    let state = config.state();
    let (plan, done, next) = match args.prepare {
        true => (
            "Would make the next certificate of the agent endpoint.",
            "Made the next certificate.",
            "add its fingerprint to every agent, then `doctor agent certificate --switch`",
        ),
        false => (
            "Would replace the certificate of the agent endpoint; agents that do not know the new key cannot report.",
            "Replaced the certificate.",
            "remove the old fingerprint from the agents",
        ),
    };
    let at: Timestamp = SystemClock.now();
    let change = Change {
        plan: plan.to_owned(),
        changes: Vec::new(),
        done: done.to_owned(),
        next: next.to_owned(),
        why: "changed on the command line".to_owned(),
        by: args.change_args.operator_name(),
        at,
    };
    args.change_args.confirm(&change)?;
    let changed = match args.prepare {
        true => self_made_certificate::prepare(&state, &agent_certificate::names(config)),
        false => self_made_certificate::switch(&state),
    };
    changed?;
    Ok(())
}
