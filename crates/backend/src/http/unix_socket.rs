//! HTTP over a Unix socket, as a ureq transport.

use std::{
    io::{self, Read as _, Write as _},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    io::Errno,
    net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
};
use ureq::unversioned::transport::{Buffers, ConnectionDetails, Connector, LazyBuffers, NextTimeout, Transport};

#[derive(Debug)]
pub(super) struct UnixConnector {
    path: PathBuf,
}

impl UnixConnector {
    pub(super) fn new(path: &Path) -> Self {
        Self { path: path.to_owned() }
    }
}

impl Connector for UnixConnector {
    type Out = Box<dyn Transport>;

    fn connect(&self, details: &ConnectionDetails<'_>, _: Option<()>) -> Result<Option<Self::Out>, ureq::Error> {
        let stream = connect(&self.path, details.timeout)?;
        let buffers = LazyBuffers::new(details.config.input_buffer_size(), details.config.output_buffer_size());
        Ok(Some(Box::new(UnixTransport { stream, buffers })))
    }
}

/// How often to try again while the server's queue of connections is full.
const PAUSE: Duration = Duration::from_millis(20);

/// Connects within the timeout. If the server accepts no connections, a blocking `connect` on a Unix socket waits without a limit, and
/// one that does not block reports a full queue.
fn connect(path: &Path, timeout: NextTimeout) -> Result<UnixStream, ureq::Error> {
    let until = Instant::now() + left(timeout)?;
    let address = SocketAddrUnix::new(path).map_err(io::Error::from)?;
    loop {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(io::Error::from)?;
        match net::connect(&socket, &address) {
            Ok(()) => {
                let stream = UnixStream::from(socket);
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(Errno::AGAIN | Errno::INTR) if Instant::now() < until => thread::sleep(PAUSE),
            Err(Errno::AGAIN | Errno::INTR) => return Err(ureq::Error::Timeout(timeout.reason)),
            Err(error) => return Err(io::Error::from(error).into()),
        }
    }
}

/// Returns the remaining time, or an error if there is none.
fn left(timeout: NextTimeout) -> Result<Duration, ureq::Error> {
    if timeout.after.is_zero() { Err(ureq::Error::Timeout(timeout.reason)) } else { Ok(*timeout.after) }
}

fn failed(error: io::Error, timeout: NextTimeout) -> ureq::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ureq::Error::Timeout(timeout.reason),
        _ => error.into(),
    }
}

#[derive(Debug)]
struct UnixTransport {
    stream: UnixStream,
    buffers: LazyBuffers,
}

impl Transport for UnixTransport {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), ureq::Error> {
        let timeout = timeout.for_write();
        self.stream.set_write_timeout(Some(left(timeout)?))?;
        let output = &self.buffers.output()[..amount];
        self.stream.write_all(output).map_err(|error| failed(error, timeout))
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, ureq::Error> {
        let timeout = timeout.for_read();
        self.stream.set_read_timeout(Some(left(timeout)?))?;
        let count = loop {
            match self.stream.read(self.buffers.input_append_buf()) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other.map_err(|error| failed(error, timeout))?,
            }
        };
        self.buffers.input_appended(count);
        Ok(count > 0)
    }

    /// No connection is reused.
    fn is_open(&mut self) -> bool {
        false
    }
}
