//! Hosts that hang: they accept connections and never answer. Most of them send the first line of an SSH server before, so that
//! the client waits for the exchange of keys, for which `ssh` has no time limit of its own.

use std::{
    fmt::Write as _,
    io::Write as _,
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use super::error::SshTestbedError;

const BANNER: &[u8] = b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n";
/// One in so many sends nothing at all.
const MUTE_EVERY: usize = 35;
/// Wakes the threads at the end.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Hosts that accept and never answer, until the value is dropped.
#[derive(Debug)]
pub struct HungHosts {
    hosts: Vec<HungHost>,
    over: Arc<AtomicBool>,
}

#[derive(Debug)]
struct HungHost {
    name: String,
    address: SocketAddr,
    serving: Option<JoinHandle<()>>,
}

impl HungHosts {
    /// Starts hosts with these names.
    ///
    /// # Errors
    /// Returns [`SshTestbedError::Port`] if a port cannot be opened.
    pub fn start(names: impl IntoIterator<Item = String>) -> Result<Self, SshTestbedError> {
        let fail = |source| SshTestbedError::Port { address: "127.0.0.1".to_owned(), source };
        let over = Arc::new(AtomicBool::new(false));
        let mut hosts = Vec::new();
        for (index, name) in names.into_iter().enumerate() {
            let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(fail)?;
            let address = listener.local_addr().map_err(fail)?;
            let (ended, greets) = (Arc::clone(&over), index % MUTE_EVERY != 0);
            let serving = std::thread::spawn(move || serve(&listener, greets, &ended));
            hosts.push(HungHost { name, address, serving: Some(serving) });
        }
        Ok(Self { hosts, over })
    }

    /// Returns their lines of a host file.
    pub fn hostfile(&self) -> String {
        let mut text = String::new();
        for host in &self.hosts {
            // Writing to a string does not fail.
            let _written = writeln!(text, "{} address=127.0.0.1 port={}", host.name, host.address.port());
        }
        text
    }
}

/// Keeps every connection open.
fn serve(listener: &TcpListener, greets: bool, over: &AtomicBool) {
    let mut open: Vec<TcpStream> = Vec::new();
    while let Ok((mut client, _)) = listener.accept() {
        if over.load(Ordering::Acquire) {
            return;
        }
        if greets {
            // The client may have gone.
            let _gone = client.write_all(BANNER);
        }
        open.push(client);
    }
}

impl Drop for HungHosts {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        for host in &mut self.hosts {
            if TcpStream::connect_timeout(&host.address, CONNECT_TIMEOUT).is_ok()
                && let Some(serving) = host.serving.take()
            {
                drop(serving.join());
            }
        }
    }
}
