//! A relay that delays each chunk of data. The kernel of a small machine often cannot delay packets.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddrV4, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use super::error::SshTestbedError;

/// A relay that listens until it is dropped.
#[derive(Debug)]
pub struct SlowProxy {
    pub at: SocketAddrV4,
    over: Arc<AtomicBool>,
    listener: Option<JoinHandle<()>>,
}

impl SlowProxy {
    pub(super) fn new(to: SocketAddrV4, by: Duration) -> Result<Self, SshTestbedError> {
        let fail = |source| SshTestbedError::Port { address: to.ip().to_string(), source };
        let listener = TcpListener::bind((*to.ip(), 0)).map_err(fail)?;
        let port = listener.local_addr().map_err(fail)?.port();
        let over = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&over);
        let serve = move || {
            for client in listener.incoming().flatten() {
                if ended.load(Ordering::Acquire) {
                    return;
                }
                if let Ok(server) = TcpStream::connect(to) {
                    relay(&client, &server, by);
                    relay(&server, &client, by);
                }
            }
        };
        let listener = Some(std::thread::spawn(serve));
        Ok(Self { at: SocketAddrV4::new(*to.ip(), port), over, listener })
    }
}

/// Forwards one direction until either side ends.
fn relay(from: &TcpStream, to: &TcpStream, by: Duration) {
    let (Ok(mut from), Ok(mut to)) = (from.try_clone(), to.try_clone()) else { return };
    std::thread::spawn(move || {
        let mut piece = [0; 16 * 1024];
        while let Ok(length @ 1..) = from.read(&mut piece) {
            std::thread::sleep(by);
            if to.write_all(&piece[..length]).is_err() {
                break;
            }
        }
        // An error means that the connection has ended already.
        let _ended = to.shutdown(Shutdown::Write);
    });
}

impl Drop for SlowProxy {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        // Unblocks the accept call with one last connection.
        let _woken = TcpStream::connect(self.at);
        if let Some(listener) = self.listener.take() {
            drop(listener.join());
        }
    }
}
