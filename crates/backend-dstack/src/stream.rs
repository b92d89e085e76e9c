//! The connection to the server: plain, or TLS.

use std::{io, net::TcpStream, path::Path, sync::Arc, time::Duration};

use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    crypto::ring,
    pki_types::{CertificateDer, ServerName, pem::PemObject as _},
};

/// Whom to believe that they are the server.
#[derive(Debug)]
pub(super) enum Trust {
    /// Nobody is asked.
    Plain,
    Tls(Arc<ClientConfig>),
}

/// A connection.
#[derive(Debug)]
pub(super) enum Stream {
    Plain(TcpStream),
    Tls(Box<StreamOwned<ClientConnection, TcpStream>>),
}

impl Trust {
    /// `authorities` is a file in PEM; without it, those of this machine.
    pub(super) fn new(secure: bool, authorities: Option<&Path>) -> Result<Self, String> {
        if !secure {
            return Ok(Self::Plain);
        }
        let mut roots = RootCertStore::empty();
        match authorities {
            Some(path) => {
                let bad = |error: &dyn std::fmt::Display| format!("`ca_file` {}: {error}", path.display());
                let certificates = CertificateDer::pem_file_iter(path).map_err(|error| bad(&error))?;
                for certificate in certificates {
                    roots.add(certificate.map_err(|error| bad(&error))?).map_err(|error| bad(&error))?;
                }
                if roots.is_empty() {
                    return Err(bad(&"there is no certificate in it"));
                }
            }
            None => {
                // One certificate of a machine's that cannot be read does not make the others worse.
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            }
        }
        let provider = Arc::new(ring::default_provider());
        let versions = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = versions.map_err(|error| error.to_string())?.with_root_certificates(roots).with_no_client_auth();
        Ok(Self::Tls(Arc::new(config)))
    }

    pub(super) fn over(&self, host: &str, socket: TcpStream) -> io::Result<Stream> {
        let Self::Tls(config) = self else { return Ok(Stream::Plain(socket)) };
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        let connection = ClientConnection::new(Arc::clone(config), name).map_err(io::Error::other)?;
        Ok(Stream::Tls(Box::new(StreamOwned::new(connection, socket))))
    }
}

impl io::Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.read(buffer),
            Self::Tls(stream) => stream.read(buffer),
        }
    }
}

impl io::Write for Stream {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.write(buffer),
            Self::Tls(stream) => stream.write(buffer),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(stream) => stream.flush(),
            Self::Tls(stream) => stream.flush(),
        }
    }
}

/// How long the next step on this connection may take.
pub(super) fn wait_no_longer(stream: &Stream, limit: Duration) -> io::Result<()> {
    let socket = match stream {
        Stream::Plain(socket) => socket,
        Stream::Tls(stream) => &stream.sock,
    };
    socket.set_write_timeout(Some(limit))?;
    socket.set_read_timeout(Some(limit))
}
