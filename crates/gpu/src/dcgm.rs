//! DCGM's health watches, from a host engine that is already running.
//!
//! The library only forwards requests to the engine (`nv-hostengine`); no engine is started here, neither embedded nor
//! as a process. If no health watch is enabled, all are enabled and left on, because a check with disabled watches
//! passes whatever is wrong. Struct sizes and constants are those of DCGM's public header, 3.x and 4.x. Another version
//! rejects a struct by its first word, and the error is reported.

use std::{
    ffi::{CString, OsStr, c_char, c_int, c_uint},
    net::{SocketAddr, TcpStream, ToSocketAddrs as _},
    time::Duration,
};

use doctor_checks::{
    dcgm_health_report::{HealthReport, Incident, WatchedHealth},
    gpu::normalize_bus_id,
};
use doctor_core::observation::{FailureKind, ProbeFailure};
use libloading::Library;

/// Newest first.
pub const LIBRARIES: [&str; 2] = ["libdcgm.so.4", "libdcgm.so.3"];

/// The limit for connecting to the engine, and for finding out whether it is there at all.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

type Handle = usize;
type Group = usize;

/// Constants of DCGM's header.
const OK: c_int = 0;
const VERSION_MISMATCH: c_int = -12;
const ALL_GPUS: Group = 0x7fff_ffff;
const ALL_SYSTEMS: c_uint = 0xffff_ffff;
const MAX_GPUS: usize = 32;
/// Incidents per response: version 4 is DCGM 2 and 3, version 5 is DCGM 4.
const MAX_INCIDENTS_V4: usize = 64;
const MAX_INCIDENTS_V5: usize = 1024;

#[repr(C)]
struct ConnectParams {
    version: c_uint,
    persist_after_disconnect: c_uint,
    timeout_ms: c_uint,
    address_is_unix_socket: c_uint,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RawIncident {
    system: c_uint,
    health: c_uint,
    text: [u8; 1024],
    error: c_uint,
    entity_kind: c_uint,
    entity: c_uint,
}

#[repr(C)]
struct Response<const MOST: usize> {
    version: c_uint,
    overall: c_uint,
    count: c_uint,
    incidents: [RawIncident; MOST],
}

/// DCGM's attributes of a GPU, of which only the bus id is used.
#[repr(C)]
struct Attributes {
    version: c_uint,
    clock_sets: [c_uint; 2 + 3 * 256],
    thermals: [c_uint; 3],
    power_limits: [c_uint; 6],
    identifiers_version: c_uint,
    brand: [u8; 256],
    name: [u8; 256],
    bus: [u8; 256],
    serial_uuid_vbios_inforom: [u8; 4 * 256],
    pci_ids: [c_uint; 2],
    driver: [u8; 256],
    virtualization: c_uint,
    memory: [c_uint; 5],
    settings: [c_uint; 4],
}

/// Returns the first word of a struct: its size and version.
const fn version<T>(number: usize) -> c_uint {
    (size_of::<T>() | number << 24) as c_uint
}

/// Queries the watches of the engine at `address` and returns the text of `dcgm_health_report`. If `library` is empty, the known names
/// are tried.
///
/// # Errors
/// Returns `Missing` without the library, and `Failed` with DCGM's code for everything else.
pub fn health(library: &OsStr, address: &str) -> Result<String, ProbeFailure> {
    let dcgm = Dcgm::load(library)?;
    if !is_listening(address)? {
        return Ok(HealthReport::NoEngine.to_text());
    }
    let session = Session::open(&dcgm, address)?;
    let watched = session.watched()?;
    let mut health_data = WatchedHealth { watched, gpus: session.gpus()?, ..WatchedHealth::default() };
    if watched == 0 {
        session.watch()?;
    } else {
        (health_data.incidents, health_data.truncated) = session.incidents()?;
    }
    Ok(HealthReport::Watched(health_data).to_text())
}

/// Returns whether a process listens at this address. The library does not distinguish an absent engine from one that hangs.
fn is_listening(address: &str) -> Result<bool, ProbeFailure> {
    let failed = |error: std::io::Error| ProbeFailure::new(FailureKind::Failed, format!("{address}: {error}"));
    let addresses: Vec<SocketAddr> = address.to_socket_addrs().map_err(failed)?.collect();
    let mut any_refused = None;
    for socket_address in addresses {
        match TcpStream::connect_timeout(&socket_address, CONNECT_TIMEOUT) {
            Ok(_) => return Ok(true),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => any_refused = Some(()),
            Err(error) => return Err(failed(error)),
        }
    }
    match any_refused {
        Some(()) => Ok(false),
        None => {
            Err(ProbeFailure::new(FailureKind::Failed, format!("{address} is not an address, such as 127.0.0.1:5555")))
        }
    }
}

struct Dcgm {
    library: Library,
}

impl Dcgm {
    fn load(library: &OsStr) -> Result<Self, ProbeFailure> {
        let names: Vec<&OsStr> =
            if library.is_empty() { LIBRARIES.iter().map(OsStr::new).collect() } else { vec![library] };
        let mut load_error = String::new();
        for name in names {
            // SAFETY: loading runs the library's initialisers. It is NVIDIA's, installed by root, and loaded by every
            // program that uses DCGM.
            match unsafe { Library::new(name) } {
                Ok(library) => return Ok(Self { library }),
                Err(error) => load_error = format!("{} cannot be loaded: {error}", name.to_string_lossy()),
            }
        }
        Err(ProbeFailure::new(FailureKind::Missing, load_error))
    }

    fn symbol<T: Copy>(&self, name: &str) -> Result<T, ProbeFailure> {
        // SAFETY: each caller uses the type of DCGM's header, and keeps the function no longer than this value.
        let symbol_result = unsafe { self.library.get::<T>(name.as_bytes()) };
        symbol_result
            .map(|symbol| *symbol)
            .map_err(|error| ProbeFailure::new(FailureKind::Failed, format!("DCGM's library has no {name}: {error}")))
    }
}

/// Calls a function of the library, with the type given for each argument.
macro_rules! call {
    ($dcgm:expr, $function:ident ( $($argument:expr => $type:ty),* $(,)? )) => {{
        let name = stringify!($function);
        let function: unsafe extern "C" fn($($type),*) -> c_int = $dcgm.symbol(name)?;
        // SAFETY: the function has the type of DCGM's header, and pointers point to live variables of the types and
        // sizes that their first words give.
        match unsafe { function($($argument),*) } {
            OK => Ok(()),
            code => Err((name, code)),
        }
    }};
}

fn dcgm_failure((function, code): (&str, c_int)) -> ProbeFailure {
    let meaning = match code {
        -3 => "generic error",
        -6 => "not supported",
        -7 => "not initialised",
        -11 => "timed out",
        VERSION_MISMATCH => "version mismatch of library, host engine and doctor-node",
        -17 | -29 => "no permission",
        -18 => "a GPU is lost",
        -19 => "a GPU needs a reset",
        -21 => "the connection to the host engine is not valid",
        -33 => "the health module is not loaded",
        -35 => "no GPU in the group",
        -57 => "the driver timed out",
        _ => "error",
    };
    let kind = match code {
        -11 | -57 => FailureKind::TimedOut,
        -17 | -29 => FailureKind::Denied,
        _ => FailureKind::Failed,
    };
    ProbeFailure::new(kind, format!("{function}: {meaning} (DCGM {code})"))
}

/// A connection to the engine.
struct Session<'a> {
    dcgm: &'a Dcgm,
    handle: Handle,
}

impl<'a> Session<'a> {
    fn open(dcgm: &'a Dcgm, address: &str) -> Result<Self, ProbeFailure> {
        let no_address = |_| ProbeFailure::new(FailureKind::Failed, "the host engine's address contains a zero byte");
        let address = CString::new(address).map_err(no_address)?;
        call!(dcgm, dcgmInit()).map_err(dcgm_failure)?;
        let mut params = ConnectParams {
            version: version::<ConnectParams>(2),
            // The watches stay enabled for the next check, a quarter of an hour later.
            persist_after_disconnect: 1,
            timeout_ms: CONNECT_TIMEOUT.as_millis() as c_uint,
            address_is_unix_socket: 0,
        };
        let mut handle: Handle = 0;
        let connected = call!(dcgm, dcgmConnect_v2(
            address.as_ptr() => *const c_char, &mut params => *mut ConnectParams, &mut handle => *mut Handle
        ));
        match connected {
            Ok(()) => Ok(Self { dcgm, handle }),
            Err(error) => {
                // There is nothing to do about a failed shutdown.
                let _closed = call!(dcgm, dcgmShutdown());
                Err(dcgm_failure(error))
            }
        }
    }

    fn watched(&self) -> Result<u32, ProbeFailure> {
        let mut systems: c_uint = 0;
        call!(self.dcgm, dcgmHealthGet(
            self.handle => Handle, ALL_GPUS => Group, &mut systems => *mut c_uint
        ))
        .map_err(dcgm_failure)?;
        Ok(systems)
    }

    fn watch(&self) -> Result<(), ProbeFailure> {
        call!(self.dcgm, dcgmHealthSet(
            self.handle => Handle, ALL_GPUS => Group, ALL_SYSTEMS => c_uint
        ))
        .map_err(dcgm_failure)
    }

    fn gpus(&self) -> Result<Vec<(u32, String)>, ProbeFailure> {
        let mut ids: [c_uint; MAX_GPUS] = [0; MAX_GPUS];
        let mut count: c_int = 0;
        call!(self.dcgm, dcgmGetAllDevices(
            self.handle => Handle, ids.as_mut_ptr() => *mut c_uint, &mut count => *mut c_int
        ))
        .map_err(dcgm_failure)?;
        let count = usize::try_from(count).unwrap_or(0).min(MAX_GPUS);
        ids[..count].iter().map(|id| Ok((*id, self.bus(*id)?))).collect()
    }

    /// Returns the bus id, or an empty text if DCGM does not know it: the incident is then reported with DCGM's own number.
    fn bus(&self, gpu: c_uint) -> Result<String, ProbeFailure> {
        // SAFETY: a struct of numbers and arrays of numbers, for which all zeroes is a value.
        let mut attributes: Box<Attributes> = Box::new(unsafe { std::mem::zeroed() });
        attributes.version = version::<Attributes>(3);
        let result = call!(self.dcgm, dcgmGetDeviceAttributes(
            self.handle => Handle, gpu => c_uint, &mut *attributes => *mut Attributes
        ));
        Ok(result.ok().and_then(|()| normalize_bus_id(&text_of_buffer(&attributes.bus))).unwrap_or_default())
    }

    fn incidents(&self) -> Result<(Vec<Incident>, bool), ProbeFailure> {
        match self.check::<MAX_INCIDENTS_V5>(5)? {
            Err((_, VERSION_MISMATCH)) => self.check::<MAX_INCIDENTS_V4>(4)?,
            answer => answer,
        }
        .map_err(dcgm_failure)
    }

    /// Requests a response of this size and version. A library of the other version rejects it.
    #[expect(clippy::type_complexity, reason = "distinguishes a rejected version from a missing function")]
    fn check<const MOST: usize>(
        &self,
        number: usize,
    ) -> Result<Result<(Vec<Incident>, bool), (&'static str, c_int)>, ProbeFailure> {
        // SAFETY: a struct of numbers and arrays of numbers, for which all zeroes is a value. A megabyte, too large for the stack.
        let mut response: Box<Response<MOST>> = unsafe { Box::new_zeroed().assume_init() };
        response.version = version::<Response<MOST>>(number);
        let result = call!(self.dcgm, dcgmHealthCheck(
            self.handle => Handle, ALL_GPUS => Group, &mut *response => *mut Response<MOST>
        ));
        let incident = |raw: &RawIncident| Incident {
            kind: raw.entity_kind,
            entity: raw.entity,
            system: raw.system,
            health: raw.health,
            error: raw.error,
            text: text_of_buffer(&raw.text),
        };
        Ok(result.map(|()| {
            let count = response.count as usize;
            (response.incidents.iter().take(count).map(incident).collect(), count >= MOST)
        }))
    }

    /// Closes the session. Errors are ignored, because the results are complete.
    fn close(&self) -> Result<(), ProbeFailure> {
        let _disconnected = call!(self.dcgm, dcgmDisconnect(self.handle => Handle));
        let _shut = call!(self.dcgm, dcgmShutdown());
        Ok(())
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        let _closed = self.close();
    }
}

/// Converts a zero-terminated text in a buffer.
fn text_of_buffer(buffer: &[u8]) -> String {
    let end = buffer.iter().position(|byte| *byte == 0).unwrap_or(buffer.len());
    String::from_utf8_lossy(&buffer[..end]).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structs_have_the_sizes_of_dcgms_header() {
        assert_eq!(version::<ConnectParams>(2), 2 << 24 | 16);
        assert_eq!(size_of::<RawIncident>(), 4 + 4 + 1024 + 4 + 4 + 4);
        assert_eq!(version::<Response<MAX_INCIDENTS_V4>>(4), 4 << 24 | (12 + 64 * 1044));
        assert_eq!(version::<Response<MAX_INCIDENTS_V5>>(5), 5 << 24 | (12 + 1024 * 1044));
        assert_eq!(size_of::<Attributes>(), 4 + 3080 + 12 + 24 + 2064 + 20 + 16);
        assert_eq!(std::mem::offset_of!(Attributes, bus), 3636);
    }

    #[test]
    fn a_missing_library_is_reported_by_name() {
        let failure = health(OsStr::new("libdoctor-has-none.so.4"), "127.0.0.1:1").unwrap_err();
        assert_eq!(failure.kind, FailureKind::Missing);
        assert!(failure.text.contains("libdoctor-has-none.so.4"), "{}", failure.text);
    }

    #[test]
    fn an_address_without_a_listener_differs_from_an_invalid_one() {
        assert_eq!(is_listening("127.0.0.1:1"), Ok(false));
        assert!(is_listening("no port").is_err());
    }
}
