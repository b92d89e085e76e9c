//! The CUDA driver, loaded at run time behind an interface that is safe enough for the tests: devices, memory, kernels and timing.
//!
//! A [`Gpu`] is one device whose context is current on the thread that opened it, and stays there. Everything created
//! from it borrows it, so nothing outlives its context. Calls may hang with a faulty driver: call from a process that
//! can be killed.

mod error;
mod kernel;
mod memory;
mod symbols;
mod tensor;

use std::{
    cell::Cell,
    ffi::{CStr, OsStr, c_char, c_int},
    marker::PhantomData,
    ptr, thread,
    time::Duration,
};

pub use error::{CudaError, DriverError};
pub use kernel::{Argument, Function, Launch, Module};
pub use memory::{Buffer, HostBuffer, Pod};
pub use tensor::{TensorMap, Tile};

use symbols::{Handle, Symbols};

/// The soname of the library.
pub const LIBRARY: &str = "libcuda.so.1";

/// The values of `CUdevice_attribute` used here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Attribute {
    Multiprocessors = 16,
    ClockKilohertz = 13,
    L2Bytes = 38,
    Major = 75,
    Minor = 76,
    SharedBytesPerBlock = 97,
}

/// The polling interval for work that may never complete.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// The initialised driver.
#[derive(Debug)]
pub struct Cuda {
    symbols: Symbols,
}

impl Cuda {
    /// Loads and initialises the driver.
    ///
    /// # Errors
    /// Fails without the library, without a GPU, or with a driver that does not initialise.
    pub fn open(library: &OsStr) -> Result<Self, CudaError> {
        let cuda = Self { symbols: Symbols::load(library)? };
        // SAFETY: the first call of any CUDA program; it takes no pointer.
        cuda.check("cuInit", unsafe { (cuda.symbols.init)(0) })?;
        Ok(cuda)
    }

    /// Returns the CUDA version of the driver, such as 13000 for 13.0.
    pub fn version(&self) -> Result<i32, CudaError> {
        let mut version = 0;
        // SAFETY: the pointer points to a live variable.
        self.check("cuDriverGetVersion", unsafe { (self.symbols.driver_version)(&raw mut version) })?;
        Ok(version)
    }

    pub fn count(&self) -> Result<usize, CudaError> {
        let mut count = 0;
        // SAFETY: the pointer points to a live variable.
        self.check("cuDeviceGetCount", unsafe { (self.symbols.device_count)(&raw mut count) })?;
        Ok(usize::try_from(count).unwrap_or_default())
    }

    /// Opens a device and makes its context current on this thread.
    pub fn gpu(&self, index: usize) -> Result<Gpu<'_>, CudaError> {
        let mut device = 0;
        let index = c_int::try_from(index).unwrap_or(c_int::MAX);
        // SAFETY: the pointer points to a live variable; the driver rejects a wrong index.
        self.check("cuDeviceGet", unsafe { (self.symbols.device_get)(&raw mut device, index) })?;
        let mut context = ptr::null_mut();
        // SAFETY: the pointer points to a live variable; the device is the one just found.
        let code = unsafe { (self.symbols.context_retain)(&raw mut context, device) };
        self.check("cuDevicePrimaryCtxRetain", code)?;
        let gpu = Gpu { cuda: self, device, context, timers: Cell::new(None), not_send: PhantomData };
        // SAFETY: the context was just retained and is released when the `Gpu` is dropped.
        self.check("cuCtxSetCurrent", unsafe { (self.symbols.context_set)(context) })?;
        Ok(gpu)
    }

    fn check(&self, call: &'static str, code: i32) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        let mut name = ptr::null::<c_char>();
        // SAFETY: the pointer points to a live variable; the driver writes a constant string or null.
        let named = unsafe { (self.symbols.error_name)(code, &raw mut name) };
        let name = if named == 0 && !name.is_null() {
            // SAFETY: as above.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        } else {
            "unknown error".to_owned()
        };
        Err(CudaError::Driver(DriverError { call, code, name }))
    }
}

/// One device, open on this thread.
pub struct Gpu<'c> {
    cuda: &'c Cuda,
    device: c_int,
    context: Handle,
    timers: Cell<Option<(Handle, Handle)>>,
    /// A context is current on one thread.
    not_send: PhantomData<*mut ()>,
}

impl std::fmt::Debug for Gpu<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu").field("device", &self.device).finish_non_exhaustive()
    }
}

impl<'c> Gpu<'c> {
    pub fn name(&self) -> Result<String, CudaError> {
        self.text("cuDeviceGetName", self.cuda.symbols.device_name)
    }

    /// Returns the PCI address as the driver writes it: `0000:3B:00.0`.
    pub fn bus_id(&self) -> Result<String, CudaError> {
        self.text("cuDeviceGetPCIBusId", self.cuda.symbols.device_bus_id)
    }

    fn text(
        &self,
        call: &'static str,
        function: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> i32,
    ) -> Result<String, CudaError> {
        let mut text = [0u8; 128];
        // SAFETY: the buffer has the given length and one more byte that stays zero.
        let code = unsafe { function(text.as_mut_ptr().cast(), 127, self.device) };
        self.check(call, code)?;
        Ok(CStr::from_bytes_until_nul(&text).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default())
    }

    pub fn attribute(&self, attribute: Attribute) -> Result<i32, CudaError> {
        let mut value = 0;
        // SAFETY: the pointer points to a live variable; the driver rejects an unknown attribute.
        let code = unsafe { (self.cuda.symbols.device_attribute)(&raw mut value, attribute as c_int, self.device) };
        self.check("cuDeviceGetAttribute", code)?;
        Ok(value)
    }

    /// Returns the compute capability, such as 90 for 9.0.
    pub fn capability(&self) -> Result<i32, CudaError> {
        Ok(self.attribute(Attribute::Major)? * 10 + self.attribute(Attribute::Minor)?)
    }

    /// Makes this device's context current again after another was opened on this thread.
    pub fn make_current(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained while the `Gpu` lives.
        self.check("cuCtxSetCurrent", unsafe { (self.cuda.symbols.context_set)(self.context) })
    }

    /// Enables this device, whose context is current, to access the memory of another if the hardware can.
    pub fn enable_peer_access(&self, other: &Gpu<'_>) -> Result<(), CudaError> {
        const ALREADY: i32 = 704;
        if !self.can_access_peer(other)? {
            return Ok(());
        }
        // SAFETY: both contexts are retained.
        match unsafe { (self.cuda.symbols.enable_peer)(other.context, 0) } {
            ALREADY => Ok(()),
            code => self.check("cuCtxEnablePeerAccess", code),
        }
    }

    /// Returns free and total device memory in bytes.
    pub fn memory(&self) -> Result<(usize, usize), CudaError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both pointers point to live variables; this device's context is current.
        let code = unsafe { (self.cuda.symbols.memory_info)(&raw mut free, &raw mut total) };
        self.check("cuMemGetInfo", code)?;
        Ok((free, total))
    }

    /// Waits for all enqueued work.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: takes no argument; this device's context is current.
        self.check("cuCtxSynchronize", unsafe { (self.cuda.symbols.context_synchronize)() })
    }

    /// Returns the device time in seconds between the first and the last operation that `work` enqueues. Waits for the end.
    pub fn timed(&self, work: impl FnOnce() -> Result<(), CudaError>) -> Result<f64, CudaError> {
        let (from, to) = self.timers()?;
        self.record_event(from)?;
        work()?;
        self.record_event(to)?;
        let symbols = &self.cuda.symbols;
        // SAFETY: an event of this context.
        self.check("cuEventSynchronize", unsafe { (symbols.event_synchronize)(to) })?;
        self.elapsed(from, to)
    }

    /// As [`Self::timed`], for work that may never complete: polls while `keep_going` returns true, and returns `None`
    /// afterwards. The device may then still be working.
    pub fn timed_while<E: From<CudaError>>(
        &self,
        work: impl FnOnce() -> Result<(), E>,
        mut keep_going: impl FnMut() -> Result<bool, E>,
    ) -> Result<Option<f64>, E> {
        const NOT_READY: i32 = 600;
        let (from, to) = self.timers()?;
        self.record_event(from)?;
        work()?;
        self.record_event(to)?;
        let symbols = &self.cuda.symbols;
        loop {
            // SAFETY: an event of this context.
            match unsafe { (symbols.event_query)(to) } {
                NOT_READY if !keep_going()? => return Ok(None),
                NOT_READY => thread::sleep(POLL_INTERVAL),
                code => {
                    self.check("cuEventQuery", code)?;
                    break;
                }
            }
        }
        Ok(Some(self.elapsed(from, to)?))
    }

    /// Returns the seconds between two completed events.
    fn elapsed(&self, from: Handle, to: Handle) -> Result<f64, CudaError> {
        let mut milliseconds = 0.0;
        // SAFETY: two recorded events of this context, and a live variable.
        let code = unsafe { (self.cuda.symbols.event_elapsed)(&raw mut milliseconds, from, to) };
        self.check("cuEventElapsedTime", code)?;
        Ok(f64::from(milliseconds) / 1000.0)
    }

    fn timers(&self) -> Result<(Handle, Handle), CudaError> {
        if let Some(timers) = self.timers.get() {
            return Ok(timers);
        }
        let timers = (self.event()?, self.event()?);
        self.timers.set(Some(timers));
        Ok(timers)
    }

    fn event(&self) -> Result<Handle, CudaError> {
        let mut event = ptr::null_mut();
        // SAFETY: the pointer points to a live variable; this device's context is current.
        self.check("cuEventCreate", unsafe { (self.cuda.symbols.event_create)(&raw mut event, 0) })?;
        Ok(event)
    }

    fn record_event(&self, event: Handle) -> Result<(), CudaError> {
        // SAFETY: an event of this context, on its default stream.
        self.check("cuEventRecord", unsafe { (self.cuda.symbols.event_record)(event, ptr::null_mut()) })
    }

    fn check(&self, call: &'static str, code: i32) -> Result<(), CudaError> {
        self.cuda.check(call, code)
    }
}

impl Drop for Gpu<'_> {
    fn drop(&mut self) {
        // An error cannot be reported any more; the process ends soon after.
        if let Some((from, to)) = self.timers.take() {
            for event in [from, to] {
                // SAFETY: created by this context and not used elsewhere.
                let _given_back = unsafe { (self.cuda.symbols.event_destroy)(event) };
            }
        }
        // SAFETY: retained once in `Cuda::gpu`.
        let _given_back = unsafe { (self.cuda.symbols.context_release)(self.device) };
    }
}
