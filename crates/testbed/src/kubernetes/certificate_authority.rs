//! The certificates of a control plane: its certificate authority, the server's certificate, and one per user.
//!
//! The `openssl` program creates them, because every machine with TLS has it, and a certificate library would be built
//! for these few calls only. Keys are P-256 in PKCS#8, which Go and rustls both read and which take no time to generate.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use super::{KubernetesTestbedError, file_error};

/// Extensions by kind of certificate. The distribution's default file would make every certificate an authority.
const SETTINGS: &str = "\
[req]
distinguished_name = none
prompt = no
[none]
[authority]
basicConstraints = critical, CA:true
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:false
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectAltName = IP:127.0.0.1, DNS:localhost, DNS:kubernetes, DNS:kubernetes.default, DNS:kubernetes.default.svc
[user]
basicConstraints = critical, CA:false
keyUsage = critical, digitalSignature
extendedKeyUsage = clientAuth
";

#[derive(Debug)]
pub(super) struct CertificateAuthority {
    folder: PathBuf,
    settings: PathBuf,
    own: KeyPair,
    issued: usize,
}

/// The paths of a certificate and its key.
#[derive(Debug, Clone)]
pub(super) struct KeyPair {
    pub(super) certificate: PathBuf,
    pub(super) key: PathBuf,
}

impl CertificateAuthority {
    /// Creates an authority with its files in this folder.
    pub(super) fn new(folder: &Path) -> Result<Self, KubernetesTestbedError> {
        fs::create_dir(folder).map_err(file_error("creating", folder))?;
        let settings = folder.join("openssl.cnf");
        fs::write(&settings, SETTINGS).map_err(file_error("writing", &settings))?;
        let own = pair(folder, "authority");
        let authority = Self { folder: folder.to_owned(), settings, own, issued: 0 };
        authority.request(&authority.own, "/CN=cluster-doctor-testbed", "authority", &[])?;
        Ok(authority)
    }

    pub(super) fn certificate(&self) -> &Path {
        &self.own.certificate
    }

    /// Issues a certificate for a server on loopback.
    pub(super) fn server(&self) -> Result<KeyPair, KubernetesTestbedError> {
        self.issue("server", "/CN=kube-apiserver", "server")
    }

    /// Issues a client certificate with the user name and groups that Kubernetes reads.
    pub(super) fn user(&mut self, name: &str, groups: &[&str]) -> Result<KeyPair, KubernetesTestbedError> {
        // A user name may contain characters that a file name may not.
        self.issued += 1;
        self.issue(&format!("user-{}", self.issued), &subject(name, groups), "user")
    }

    /// Creates the key that signs service account tokens. `certificate` is its public half, which verifies them.
    pub(super) fn token_key(&self) -> Result<KeyPair, KubernetesTestbedError> {
        let key = self.folder.join("tokens.key");
        let certificate = self.folder.join("tokens.pub");
        let mut make = Command::new("openssl");
        make.args(["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out"]).arg(&key);
        run(&mut make)?;
        let mut publish = Command::new("openssl");
        publish.args(["pkey", "-pubout", "-in"]).arg(&key).arg("-out").arg(&certificate);
        run(&mut publish)?;
        Ok(KeyPair { certificate, key })
    }

    fn issue(&self, file: &str, subject: &str, extensions: &str) -> Result<KeyPair, KubernetesTestbedError> {
        let issued = pair(&self.folder, file);
        let by = [Path::new("-CA"), &self.own.certificate, Path::new("-CAkey"), &self.own.key];
        self.request(&issued, subject, extensions, &by)?;
        Ok(issued)
    }

    fn request(
        &self,
        to: &KeyPair,
        subject: &str,
        extensions: &str,
        by: &[&Path],
    ) -> Result<(), KubernetesTestbedError> {
        let mut command = Command::new("openssl");
        command
            .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-sha256"])
            .args(["-days", "2", "-utf8", "-subj", subject, "-extensions", extensions, "-config"])
            .arg(&self.settings)
            .arg("-keyout")
            .arg(&to.key)
            .arg("-out")
            .arg(&to.certificate)
            .args(by);
        run(&mut command)
    }
}

fn pair(folder: &Path, name: &str) -> KeyPair {
    KeyPair { certificate: folder.join(format!("{name}.crt")), key: folder.join(format!("{name}.key")) }
}

/// Formats user name and groups as an `openssl` subject: Kubernetes reads a group from an organisation.
fn subject(name: &str, groups: &[&str]) -> String {
    let escaped = |text: &str| text.replace('\\', "\\\\").replace('/', "\\/").replace('+', "\\+");
    let organisations: String = groups.iter().map(|group| format!("/O={}", escaped(group))).collect();
    format!("{organisations}/CN={}", escaped(name))
}

fn run(command: &mut Command) -> Result<(), KubernetesTestbedError> {
    let ended =
        command.output().map_err(|source| KubernetesTestbedError::Program { program: "openssl".into(), source })?;
    if ended.status.success() {
        return Ok(());
    }
    Err(KubernetesTestbedError::Certificate { said: String::from_utf8_lossy(&ended.stderr).trim().to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_names_its_user_and_every_group() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut authority = CertificateAuthority::new(&folder.path().join("pki")).expect("an authority");
        let pair = authority.user("agent/of+one", &["readers", "team/a"]).expect("a certificate");
        let mut read = Command::new("openssl");
        read.args(["x509", "-noout", "-subject", "-nameopt", "sep_multiline,utf8,sname", "-in"]).arg(&pair.certificate);
        let stdout = read.output().expect("openssl runs").stdout;
        let stdout = String::from_utf8(stdout).expect("text");
        let names: Vec<&str> = stdout.lines().skip(1).map(str::trim).collect();
        assert_eq!(names, ["O=readers", "O=team/a", "CN=agent/of+one"]);
        let mut verify = Command::new("openssl");
        verify.args(["verify", "-purpose", "sslclient", "-CAfile"]).arg(authority.certificate()).arg(&pair.certificate);
        run(&mut verify).expect("the authority knows what it signed");
    }
}
