//! A certificate that the controller makes for its agent endpoint, where the site provides none. Agents pin its key, so that it needs
//! no authority; see `doctor_checks::key_fingerprint`.
//!
//! Certificate and key are `agents.crt` and `agents.key` in the state directory. They are never replaced without an operator: a new
//! key would silence every agent that pins the old one. A change of the key is prepared: `agents-next.crt` and `agents-next.key` exist
//! beside them until every agent knows the next key too, and then take their place.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, fchown},
    path::{Path, PathBuf},
};

use doctor_checks::key_fingerprint::KeyFingerprint;
use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, KeyPair, KeyUsagePurpose, date_time_ymd,
};
use rustls::{
    pki_types::{CertificateDer, pem::PemObject},
    server::ParsedCertificate,
};

use super::tls::TlsFiles;

/// Agents that pin the key do not look at the dates. Where the certificate itself is given to clients as trusted, a client with a
/// wrong clock must not reject it, so that the dates are the widest that all of them read.
const FIRST_YEAR: i32 = 2000;
const LAST_YEAR: i32 = 2099;

/// Why a certificate cannot be made or read.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    #[error("{operation} {} failed", .path.display())]
    File { operation: &'static str, path: PathBuf, source: io::Error },
    #[error("cannot make a certificate")]
    Make(#[from] rcgen::Error),
    #[error("{}: {text}", .path.display())]
    Unreadable { path: PathBuf, text: String },
    #[error("no next certificate is prepared in {}: `doctor agent certificate --prepare` makes one", .0.display())]
    NotPrepared(PathBuf),
    #[error("a next certificate is prepared in {} already: `doctor agent certificate --switch` puts it into use", .0.display())]
    AlreadyPrepared(PathBuf),
}

/// A certificate and its key, in PEM.
#[derive(Clone)]
pub struct MadeCertificate {
    pub certificate: String,
    pub key: String,
}

impl std::fmt::Debug for MadeCertificate {
    /// Without the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MadeCertificate").field("certificate", &self.certificate).finish_non_exhaustive()
    }
}

impl MadeCertificate {
    /// Makes a key (P-256) and a certificate for these host names and addresses, signed with itself.
    ///
    /// # Errors
    /// If a name is none, or there is no randomness.
    pub fn for_names(names: &[String]) -> Result<Self, CertificateError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(names)?;
        let mut subject = DistinguishedName::new();
        subject.push(DnType::CommonName, "cluster-doctor");
        params.distinguished_name = subject;
        params.not_before = date_time_ymd(FIRST_YEAR, 1, 1);
        params.not_after = date_time_ymd(LAST_YEAR, 12, 31);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        Ok(Self { certificate: params.self_signed(&key)?.pem(), key: key.serialize_pem() })
    }

    /// Writes both files. The key appears under its name first and with mode 0600 from its creation, so that a certificate is never
    /// there without its key.
    fn write(&self, to: &TlsFiles) -> Result<(), CertificateError> {
        write_file(&to.key, &self.key, 0o600)?;
        write_file(&to.certificate, &self.certificate, 0o644)
    }
}

/// Returns the files of the certificate in use in this state directory.
pub fn current_files(state: &Path) -> TlsFiles {
    TlsFiles { made_in: Some(state.to_owned()), ..TlsFiles::new(state.join("agents.crt"), state.join("agents.key")) }
}

/// Returns the files of the prepared next certificate.
pub fn next_files(state: &Path) -> TlsFiles {
    let files = TlsFiles::new(state.join("agents-next.crt"), state.join("agents-next.key"));
    TlsFiles { made_in: Some(state.to_owned()), ..files }
}

/// Makes the certificate if there is none yet, and returns its files and whether it was made now.
///
/// # Errors
/// If it cannot be made or written.
pub fn ensure(state: &Path, names: &[String]) -> Result<(TlsFiles, bool), CertificateError> {
    let files = current_files(state);
    if files.certificate.exists() {
        return Ok((files, false));
    }
    let failed = |source| CertificateError::File { operation: "creating", path: state.to_owned(), source };
    fs::create_dir_all(state).map_err(failed)?;
    MadeCertificate::for_names(names)?.write(&files)?;
    Ok((files, true))
}

/// Makes the next certificate beside the one in use.
///
/// # Errors
/// If one is prepared already, or cannot be made or written.
pub fn prepare(state: &Path, names: &[String]) -> Result<TlsFiles, CertificateError> {
    let files = next_files(state);
    if files.certificate.exists() {
        return Err(CertificateError::AlreadyPrepared(state.to_owned()));
    }
    MadeCertificate::for_names(names)?.write(&files)?;
    Ok(files)
}

/// Puts the prepared certificate into use. A running controller loads it within seconds.
///
/// # Errors
/// If none is prepared, or the files cannot be renamed.
pub fn switch(state: &Path) -> Result<TlsFiles, CertificateError> {
    let (next, current) = (next_files(state), current_files(state));
    if !next.certificate.exists() {
        return Err(CertificateError::NotPrepared(state.to_owned()));
    }
    let renamed = |from: &Path, to: &Path| {
        let failed = |source| CertificateError::File { operation: "replacing", path: to.to_owned(), source };
        fs::rename(from, to).map_err(failed)
    };
    // A crash between the two leaves a key that does not fit: the controller keeps what it has loaded, and a repeated switch ends it.
    if next.key.exists() {
        renamed(&next.key, &current.key)?;
    }
    renamed(&next.certificate, &current.certificate)?;
    Ok(current)
}

/// Returns the fingerprint of the public key of the first certificate in a PEM file: the server's own.
///
/// # Errors
/// If the file cannot be read, or does not begin with a certificate.
pub fn fingerprint(certificate: &Path) -> Result<KeyFingerprint, CertificateError> {
    let unreadable = |text: String| CertificateError::Unreadable { path: certificate.to_owned(), text };
    let der = CertificateDer::from_pem_file(certificate).map_err(|error| unreadable(error.to_string()))?;
    let parsed = ParsedCertificate::try_from(&der).map_err(|error| unreadable(error.to_string()))?;
    Ok(KeyFingerprint::of(&parsed.subject_public_key_info()))
}

/// Replaces a file. A link at either name is not followed. The file belongs to the owner of its directory, so that a service of
/// another user can read what root has made.
fn write_file(path: &Path, text: &str, mode: u32) -> Result<(), CertificateError> {
    let temporary = path.with_extension("new");
    let done = || -> io::Result<()> {
        match fs::remove_file(&temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = File::options().write(true).create_new(true).mode(mode).open(&temporary)?;
        file.write_all(text.as_bytes())?;
        if let Some(folder) = path.parent().map(fs::metadata).transpose()? {
            // Only root can give a file away; that of another user stays its own.
            let _own = fchown(&file, Some(folder.uid()), Some(folder.gid()));
        }
        file.sync_all()?;
        fs::rename(&temporary, path)
    };
    done().map_err(|source| CertificateError::File { operation: "writing", path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> Vec<String> {
        vec!["controller.example".to_owned(), "10.0.0.5".to_owned()]
    }

    #[test]
    fn a_certificate_is_made_once_and_its_key_is_readable_by_its_owner_only() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        let (files, made) = ensure(&state, &names()).unwrap();
        assert!(made);
        assert_eq!(fs::metadata(&files.key).unwrap().mode() & 0o777, 0o600);
        let first = fingerprint(&files.certificate).unwrap();
        assert_eq!(ensure(&state, &names()).unwrap(), (files.clone(), false));
        assert_eq!(fingerprint(&files.certificate).unwrap(), first);
        crate::tls::Tls::open(&files).unwrap();
        let shown = format!("{:?}", MadeCertificate::for_names(&names()).unwrap());
        assert!(!shown.contains("PRIVATE"), "{shown}");
    }

    #[test]
    fn root_judges_the_certificate_of_a_service_that_runs_as_another_user() {
        const SERVICE: u32 = 12_345;
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        fs::create_dir(&state).unwrap();
        if std::os::unix::fs::chown(&state, Some(SERVICE), None).is_err() {
            println!("NOT RUN: the certificate of a service: only root can give files away");
            return;
        }
        let (files, _) = ensure(&state, &names()).unwrap();
        assert_eq!(fs::metadata(&files.key).unwrap().uid(), SERVICE);
        crate::tls::Tls::open(&files).unwrap();
        std::os::unix::fs::chown(&files.key, Some(SERVICE + 1), None).unwrap();
        let error = crate::tls::Tls::open(&files).unwrap_err();
        assert!(error.contains("agents.key belongs to user 12346") && !error.contains("chown"), "{error}");
    }

    #[test]
    fn a_prepared_certificate_takes_the_place_of_the_current_one_also_after_a_crash_between_its_files() {
        let folder = tempfile::tempdir().unwrap();
        let (state, names) = (folder.path(), names());
        assert!(matches!(switch(state), Err(CertificateError::NotPrepared(_))));
        for crash in [false, true] {
            ensure(state, &names).unwrap();
            let next = fingerprint(&prepare(state, &names).unwrap().certificate).unwrap();
            assert!(matches!(prepare(state, &names), Err(CertificateError::AlreadyPrepared(_))));
            assert_ne!(fingerprint(&current_files(state).certificate).unwrap(), next);
            if crash {
                fs::rename(next_files(state).key, current_files(state).key).unwrap();
            }
            let current = switch(state).unwrap();
            assert_eq!(fingerprint(&current.certificate).unwrap(), next);
            crate::tls::Tls::open(&current).unwrap();
            assert!(!next_files(state).key.exists());
        }
    }

    #[test]
    fn a_fingerprint_is_that_of_openssl() {
        let folder = tempfile::tempdir().unwrap();
        let (files, _) = ensure(folder.path(), &names()).unwrap();
        let script = "openssl x509 -in \"$1\" -noout -pubkey | openssl pkey -pubin -outform DER | sha256sum";
        let output =
            std::process::Command::new("sh").args(["-c", script, "sh"]).arg(&files.certificate).output().unwrap();
        let printed = String::from_utf8(output.stdout).unwrap();
        let digest = printed.split_whitespace().next().unwrap();
        assert_eq!(fingerprint(&files.certificate).unwrap().to_string(), format!("sha256:{digest}"));
        let error = fingerprint(&files.key).unwrap_err().to_string();
        assert!(error.contains("agents.key"), "{error}");
    }
}
