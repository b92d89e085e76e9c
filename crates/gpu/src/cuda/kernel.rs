//! Kernels: PTX that the driver compiles for the present device, and their launches.

use std::{
    ffi::{CString, c_int, c_void},
    fmt, ptr, thread,
};

use super::{Buffer, CudaError, Gpu, TensorMap, symbols::Handle};

/// `CU_JIT_ERROR_LOG_BUFFER` and its size: the compiler's error message.
const JIT_ERROR_LOG: c_int = 5;
const JIT_ERROR_LOG_BYTES: c_int = 6;
const LOG_BYTES: usize = 8 << 10;

/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
const MAX_DYNAMIC_SHARED: c_int = 8;

/// Compiled kernels, loaded into a device.
pub struct Module<'g> {
    gpu: &'g Gpu<'g>,
    handle: Handle,
}

impl fmt::Debug for Module<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Module")
    }
}

impl<'c> Gpu<'c> {
    /// Compiles and loads PTX.
    pub fn module(&self, ptx: &str) -> Result<Module<'_>, CudaError> {
        let handle = self.load(ptx)?.0;
        Ok(Module { gpu: self, handle })
    }

    /// Compiles and loads several sources in parallel, because each takes a second and the host has many cores.
    /// Meanwhile `work` may use the device; it must leave a little memory for the modules.
    pub fn modules<T>(
        &self,
        sources: &[&str],
        work: impl FnOnce() -> Result<T, CudaError>,
    ) -> Result<(Vec<Module<'_>>, T), CudaError> {
        let shared = SharedGpu(self);
        let (loaded, done) = thread::scope(|scope| {
            let threads: Vec<_> = sources.iter().map(|ptx| scope.spawn(move || shared.load(ptx))).collect();
            let done = work();
            let join = |thread: thread::ScopedJoinHandle<'_, _>| thread.join().expect("loading does not panic");
            (threads.into_iter().map(join).collect::<Vec<Result<ModuleHandle, CudaError>>>(), done)
        });
        // If one source fails, the modules that did load are dropped.
        let modules = loaded.into_iter().map(|loaded| loaded.map(|ModuleHandle(handle)| Module { gpu: self, handle }));
        Ok((modules.collect::<Result<_, _>>()?, done?))
    }

    fn load(&self, ptx: &str) -> Result<ModuleHandle, CudaError> {
        let text = CString::new(ptx).expect("PTX contains no zero byte");
        let mut log = vec![0u8; LOG_BYTES];
        let mut options = [JIT_ERROR_LOG, JIT_ERROR_LOG_BYTES];
        let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), LOG_BYTES as *mut c_void];
        let mut handle = ptr::null_mut();
        // SAFETY: the text ends with a zero byte; two options with two values, of which the first points to a live
        // buffer of the size that the second gives.
        let code = unsafe {
            (self.cuda.symbols.module_load)(
                &raw mut handle,
                text.as_ptr().cast(),
                2,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        self.check("cuModuleLoadDataEx", code).map_err(|error| with_log(error, &log))?;
        Ok(ModuleHandle(handle))
    }
}

/// A module handle, which belongs to its context and to no thread.
struct ModuleHandle(Handle);
// SAFETY: driver handles may be used from any thread.
unsafe impl Send for ModuleHandle {}

/// A device, shared with the threads that load modules.
#[derive(Clone, Copy)]
struct SharedGpu<'a>(&'a Gpu<'a>);
// SAFETY: the other threads use only the driver's functions and the context handle, which any thread may use, and make
// the context current first.
unsafe impl Send for SharedGpu<'_> {}

impl SharedGpu<'_> {
    fn load(self, ptx: &str) -> Result<ModuleHandle, CudaError> {
        // SAFETY: the context lives as long as the borrowed device.
        let code = unsafe { (self.0.cuda.symbols.context_set)(self.0.context) };
        self.0.check("cuCtxSetCurrent", code)?;
        self.0.load(ptx)
    }
}

fn with_log(error: CudaError, log: &[u8]) -> CudaError {
    let first_line = String::from_utf8_lossy(log);
    let first_line = first_line.trim_end_matches('\0').lines().next().unwrap_or_default();
    match error {
        CudaError::Driver(mut error) if !first_line.is_empty() => {
            error.name = format!("{}: {first_line}", error.name);
            CudaError::Driver(error)
        }
        other => other,
    }
}

impl Module<'_> {
    pub fn function(&self, name: &str) -> Result<Function<'_>, CudaError> {
        let text = CString::new(name).expect("a kernel's name contains no zero byte");
        let mut handle = ptr::null_mut();
        let symbols = &self.gpu.cuda.symbols;
        // SAFETY: a live variable, a loaded module, and a zero-terminated text.
        let code = unsafe { (symbols.module_function)(&raw mut handle, self.handle, text.as_ptr()) };
        self.gpu.check("cuModuleGetFunction", code)?;
        Ok(Function { gpu: self.gpu, handle })
    }
}

impl Drop for Module<'_> {
    fn drop(&mut self) {
        // SAFETY: loaded by this context; its functions borrow it and are gone.
        let _given_back = unsafe { (self.gpu.cuda.symbols.module_unload)(self.handle) };
    }
}

/// One kernel.
#[derive(Clone, Copy)]
pub struct Function<'g> {
    gpu: &'g Gpu<'g>,
    handle: Handle,
}

impl fmt::Debug for Function<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Function")
    }
}

/// The numbers of blocks and threads, and the shared memory of each block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    pub grid: [u32; 3],
    pub block: u32,
    pub shared: u32,
}

impl Launch {
    pub const fn new(grid: u32, block: u32) -> Self {
        Self { grid: [grid, 1, 1], block, shared: 0 }
    }

    #[must_use]
    pub const fn shared(mut self, bytes: u32) -> Self {
        self.shared = bytes;
        self
    }
}

/// One kernel argument, in the order and with the types of the source.
#[derive(Debug, Clone, Copy)]
pub enum Argument<'a> {
    Buffer(&'a Buffer<'a>),
    /// An address within a buffer, or zero.
    Address(u64),
    U32(u32),
    U64(u64),
    F32(f32),
    Tensor(&'a TensorMap),
}

impl<'a> From<&'a Buffer<'a>> for Argument<'a> {
    fn from(buffer: &'a Buffer<'a>) -> Self {
        Self::Buffer(buffer)
    }
}

impl From<u32> for Argument<'_> {
    fn from(value: u32) -> Self {
        Self::U32(value)
    }
}

impl From<u64> for Argument<'_> {
    fn from(value: u64) -> Self {
        Self::U64(value)
    }
}

impl From<f32> for Argument<'_> {
    fn from(value: f32) -> Self {
        Self::F32(value)
    }
}

impl Function<'_> {
    /// Raises the shared memory limit of a block above the default.
    pub fn allow_shared(&self, bytes: u32) -> Result<(), CudaError> {
        let bytes = c_int::try_from(bytes).unwrap_or(c_int::MAX);
        // SAFETY: a function of a loaded module; the driver rejects a number that is too large.
        let code = unsafe { (self.gpu.cuda.symbols.function_attribute)(self.handle, MAX_DYNAMIC_SHARED, bytes) };
        self.gpu.check("cuFuncSetAttribute", code)
    }

    /// Returns how many such blocks fit on a multiprocessor at a time.
    pub fn blocks_per_multiprocessor(&self, launch: Launch) -> Result<u32, CudaError> {
        let mut blocks = 0;
        let block = c_int::try_from(launch.block).unwrap_or(c_int::MAX);
        // SAFETY: a live variable and a function of a loaded module.
        let code = unsafe {
            (self.gpu.cuda.symbols.blocks_per_multiprocessor)(
                &raw mut blocks,
                self.handle,
                block,
                launch.shared as usize,
            )
        };
        self.gpu.check("cuOccupancyMaxActiveBlocksPerMultiprocessor", code)?;
        Ok(u32::try_from(blocks).unwrap_or_default())
    }

    /// Enqueues a launch without waiting.
    ///
    /// The arguments must match the kernel's source. This is not checked here: each kernel and its one caller are in
    /// this crate and are tested together on a GPU.
    pub fn launch(&self, launch: Launch, arguments: &[Argument<'_>]) -> Result<(), CudaError> {
        // The driver takes a pointer to each value and copies the values before the call returns.
        let values: Vec<u64> = arguments.iter().map(argument_bits).collect();
        let mut pointers: Vec<*mut c_void> = arguments
            .iter()
            .zip(&values)
            .map(|(argument, value)| match argument {
                Argument::Tensor(map) => map.as_ptr().cast_mut(),
                _ => ptr::from_ref(value).cast_mut().cast(),
            })
            .collect();
        let [x, y, z] = launch.grid;
        // SAFETY: a function of a loaded module with as many live values as it takes, see above. Buffers are borrowed
        // here and freed only after the driver has waited for the work that uses them.
        let code = unsafe {
            (self.gpu.cuda.symbols.launch)(
                self.handle,
                x,
                y,
                z,
                launch.block,
                1,
                1,
                launch.shared,
                ptr::null_mut(),
                pointers.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        self.gpu.check("cuLaunchKernel", code)
    }
}

/// Returns the value's bytes, lowest address first: all hosts of such GPUs are little-endian.
fn argument_bits(argument: &Argument<'_>) -> u64 {
    match argument {
        Argument::Buffer(buffer) => buffer.address(),
        Argument::Address(value) | Argument::U64(value) => *value,
        Argument::U32(value) => u64::from(*value),
        Argument::F32(value) => u64::from(value.to_bits()),
        Argument::Tensor(_) => 0,
    }
}
