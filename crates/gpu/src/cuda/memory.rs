//! Device memory, and pinned host memory that the device accesses at full speed.

use std::{ffi::c_void, fmt, ops, ptr, slice};

use super::{CudaError, Gpu, symbols::DevicePtr};

/// Plain numbers: every bit pattern is a value, and there is no padding.
///
/// # Safety
/// Implement it only for such types.
pub unsafe trait Pod: Copy + Default + 'static {}

// SAFETY: plain numbers.
unsafe impl Pod for u8 {}
// SAFETY: plain numbers.
unsafe impl Pod for u16 {}
// SAFETY: plain numbers.
unsafe impl Pod for u32 {}
// SAFETY: plain numbers.
unsafe impl Pod for i32 {}
// SAFETY: plain numbers.
unsafe impl Pod for u64 {}
// SAFETY: plain numbers.
unsafe impl Pod for f32 {}
// SAFETY: plain numbers.
unsafe impl Pod for f64 {}

/// A buffer in device memory.
pub struct Buffer<'g> {
    gpu: &'g Gpu<'g>,
    address: DevicePtr,
    bytes: usize,
}

impl fmt::Debug for Buffer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl<'c> Gpu<'c> {
    pub fn allocate(&self, bytes: usize) -> Result<Buffer<'_>, CudaError> {
        let mut address = 0;
        // SAFETY: the pointer points to a live variable; this device's context is current.
        let code = unsafe { (self.cuda.symbols.allocate)(&raw mut address, bytes) };
        self.check("cuMemAlloc", code)?;
        Ok(Buffer { gpu: self, address, bytes })
    }

    /// Allocates a buffer with these values.
    pub fn upload<T: Pod>(&self, values: &[T]) -> Result<Buffer<'_>, CudaError> {
        let buffer = self.allocate(size_of_val(values))?;
        buffer.write(values)?;
        Ok(buffer)
    }

    /// Allocates pinned host memory.
    pub fn allocate_host(&self, words: usize) -> Result<HostBuffer<'_>, CudaError> {
        let mut address = ptr::null_mut();
        // SAFETY: the pointer points to a live variable; this device's context is current.
        let code = unsafe { (self.cuda.symbols.allocate_host)(&raw mut address, words * 8, 0) };
        self.check("cuMemHostAlloc", code)?;
        let host = HostBuffer { gpu: self, address: address.cast(), words };
        // SAFETY: fresh memory of this many words, which this call initialises.
        unsafe { ptr::write_bytes(host.address, 0, words) };
        Ok(host)
    }

    /// Returns whether this device can access the other's memory.
    pub fn can_access_peer(&self, other: &Gpu<'_>) -> Result<bool, CudaError> {
        let mut can = 0;
        // SAFETY: the pointer points to a live variable; both devices are open.
        let code = unsafe { (self.cuda.symbols.can_access_peer)(&raw mut can, self.device, other.device) };
        self.check("cuDeviceCanAccessPeer", code)?;
        Ok(can != 0)
    }
}

impl Buffer<'_> {
    pub const fn address(&self) -> u64 {
        self.address
    }

    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    pub const fn len<T>(&self) -> usize {
        self.bytes / size_of::<T>()
    }

    pub const fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Sets every 32-bit word.
    pub fn fill(&self, word: u32) -> Result<(), CudaError> {
        // SAFETY: as many words as the buffer has.
        let code = unsafe { (self.gpu.cuda.symbols.set_words)(self.address, word, self.bytes / 4, ptr::null_mut()) };
        self.gpu.check("cuMemsetD32", code)
    }

    /// Copies from the host and waits.
    ///
    /// # Panics
    /// Panics if the values do not fit.
    pub fn write<T: Pod>(&self, values: &[T]) -> Result<(), CudaError> {
        let bytes = size_of_val(values);
        assert!(bytes <= self.bytes, "{bytes} bytes do not fit into {}", self.bytes);
        // SAFETY: both sides have this many bytes; the slice lives until the copy has ended.
        let code =
            unsafe { (self.gpu.cuda.symbols.to_device)(self.address, values.as_ptr().cast(), bytes, ptr::null_mut()) };
        self.gpu.check("cuMemcpyHtoD", code)?;
        self.gpu.synchronize()
    }

    /// Copies the first `count` values to the host and waits.
    ///
    /// # Panics
    /// Panics if the buffer has fewer.
    pub fn read<T: Pod>(&self, count: usize) -> Result<Vec<T>, CudaError> {
        self.read_from(0, count)
    }

    /// Copies `count` values after the first `skipped` ones to the host and waits.
    ///
    /// # Panics
    /// Panics if the buffer has fewer.
    pub fn read_from<T: Pod>(&self, skipped: usize, count: usize) -> Result<Vec<T>, CudaError> {
        let mut values = vec![T::default(); count];
        let (before, bytes) = (skipped * size_of::<T>(), size_of_val(values.as_slice()));
        assert!(
            before + bytes <= self.bytes,
            "{bytes} bytes at offset {before} exceed the buffer of {} bytes",
            self.bytes
        );
        let from = self.address + before as DevicePtr;
        // SAFETY: both sides have this many bytes; any bits are a value; the vector lives until the copy has ended.
        let code = unsafe { (self.gpu.cuda.symbols.to_host)(values.as_mut_ptr().cast(), from, bytes, ptr::null_mut()) };
        self.gpu.check("cuMemcpyDtoH", code)?;
        self.gpu.synchronize()?;
        Ok(values)
    }

    /// Enqueues a copy of the first `bytes` of another buffer of the same device.
    ///
    /// # Panics
    /// Panics if either buffer is shorter.
    pub fn copy_from(&self, other: &Buffer<'_>, bytes: usize) -> Result<(), CudaError> {
        assert!(bytes <= self.bytes && bytes <= other.bytes, "the copy exceeds a buffer");
        // SAFETY: both buffers have this many bytes and live as long as their context.
        let code = unsafe { (self.gpu.cuda.symbols.on_device)(self.address, other.address, bytes, ptr::null_mut()) };
        self.gpu.check("cuMemcpyDtoD", code)
    }

    /// Enqueues a copy of the first `bytes` of this buffer to the offset `to`.
    ///
    /// # Panics
    /// Panics if the two parts overlap or the second is not all within the buffer.
    pub fn copy_within(&self, to: usize, bytes: usize) -> Result<(), CudaError> {
        assert!(bytes <= to && to + bytes <= self.bytes, "the parts overlap or exceed the buffer");
        let symbols = &self.gpu.cuda.symbols;
        // SAFETY: both parts are within the buffer and do not overlap.
        let code = unsafe { (symbols.on_device)(self.address + to as u64, self.address, bytes, ptr::null_mut()) };
        self.gpu.check("cuMemcpyDtoD", code)
    }

    /// As [`Buffer::copy_from`], from another device.
    ///
    /// # Panics
    /// Panics if either buffer is shorter.
    pub fn copy_from_peer(&self, other: &Buffer<'_>, bytes: usize) -> Result<(), CudaError> {
        assert!(bytes <= self.bytes && bytes <= other.bytes, "the copy exceeds a buffer");
        // SAFETY: both buffers have this many bytes, each in the context passed with it.
        let code = unsafe {
            (self.gpu.cuda.symbols.to_peer)(
                self.address,
                self.gpu.context,
                other.address,
                other.gpu.context,
                bytes,
                ptr::null_mut(),
            )
        };
        self.gpu.check("cuMemcpyPeer", code)
    }

    /// Enqueues a copy from pinned memory.
    pub fn load(&self, host: &HostBuffer<'_>) -> Result<(), CudaError> {
        let bytes = self.bytes.min(host.words * 8);
        // SAFETY: both sides have this many bytes. The host memory is pinned and freed only after its context has been
        // synchronised.
        let code =
            unsafe { (self.gpu.cuda.symbols.to_device)(self.address, host.address.cast(), bytes, ptr::null_mut()) };
        self.gpu.check("cuMemcpyHtoD", code)
    }

    /// Enqueues a copy to pinned memory. The mutable borrow ends when this returns, before the copy does: synchronise
    /// before reading.
    pub fn store(&self, host: &mut HostBuffer<'_>) -> Result<(), CudaError> {
        let bytes = self.bytes.min(host.words * 8);
        // SAFETY: as above.
        let code =
            unsafe { (self.gpu.cuda.symbols.to_host)(host.address.cast(), self.address, bytes, ptr::null_mut()) };
        self.gpu.check("cuMemcpyDtoH", code)
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated by this context and not used elsewhere. The driver waits for work that uses it.
        let _given_back = unsafe { (self.gpu.cuda.symbols.free)(self.address) };
    }
}

/// Pinned host memory, as 64-bit words.
pub struct HostBuffer<'g> {
    gpu: &'g Gpu<'g>,
    address: *mut u64,
    words: usize,
}

impl fmt::Debug for HostBuffer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostBuffer").field("words", &self.words).finish_non_exhaustive()
    }
}

impl ops::Deref for HostBuffer<'_> {
    type Target = [u64];
    fn deref(&self) -> &[u64] {
        // SAFETY: this many initialised words, owned until dropped.
        unsafe { slice::from_raw_parts(self.address, self.words) }
    }
}

impl ops::DerefMut for HostBuffer<'_> {
    fn deref_mut(&mut self) -> &mut [u64] {
        // SAFETY: this many initialised words, exclusively borrowed.
        unsafe { slice::from_raw_parts_mut(self.address, self.words) }
    }
}

impl Drop for HostBuffer<'_> {
    fn drop(&mut self) {
        // A copy may still be running; wait for its end first.
        let _waited = self.gpu.synchronize();
        let address: *mut c_void = self.address.cast();
        // SAFETY: allocated by this context and not used elsewhere.
        let _given_back = unsafe { (self.gpu.cuda.symbols.free_host)(address) };
    }
}
