//! The memory test of a GPU: patterns written to all free memory and read back.

use super::kernels;
use crate::cuda::{Argument, Attribute, Buffer, CudaError, Function, Gpu, Launch, Module};

/// One pass: a pattern that is written everywhere and read back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pattern {
    pub name: &'static str,
    kernel: &'static str,
    seed: u64,
}

const fn pattern(name: &'static str, kernel: &'static str, seed: u64) -> Pattern {
    Pattern { name, kernel, seed }
}

impl Pattern {
    /// A pattern of random words, different for each number.
    pub const fn random(number: u64) -> Self {
        pattern("random", "random", 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(number + 5))
    }
}

/// Returns the word of a random pattern at an address. `kernels/memory.cu` has the same formula.
pub const fn word_at(address: u64, random: Pattern) -> u64 {
    let mut x = address ^ random.seed;
    x ^= x >> 32;
    x = x.wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^= x >> 32;
    x = x.wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^ (x >> 32)
}

/// Address and inverse find address lines that are stuck or shorted; the walking bit finds neighbours that disturb each
/// other; the checkerboards charge every cell against its neighbours; random words find the rest.
pub const PATTERNS: &[Pattern] = &[
    pattern("address in address", "address", 0),
    pattern("inverse address", "inverse", 0),
    pattern("walking one", "walk_one", 0),
    pattern("walking zero", "walk_zero", 17),
    pattern("checkerboard", "checker", 0),
    pattern("inverse checkerboard", "checker", 1),
    pattern("random 1", "random", 0x9e37_79b9_7f4a_7c15),
    pattern("random 2", "random", 0xbf58_476d_1ce4_e5b9),
    pattern("random 3", "random", 0x94d0_49bb_1331_11eb),
    pattern("random 4", "random", 0xd6e8_feb8_6659_fd93),
];

/// A word that differs from what was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WrongWord {
    pub pattern: &'static str,
    /// The device address.
    pub address: u64,
    /// Bytes from the start of the tested memory.
    pub offset: u64,
    pub expected: u64,
    pub got: u64,
}

/// The results of the memory test.
#[derive(Debug, Clone, Default)]
pub struct MemoryReport {
    pub free_before: usize,
    pub tested: usize,
    pub seconds: f64,
    pub passes: usize,
    /// The total number of errors; `wrong` lists the first of them.
    pub errors: u64,
    pub wrong: Vec<WrongWord>,
    /// Bytes read and written per second in a copy within the device.
    pub copy_rate: f64,
}

impl MemoryReport {
    /// Returns the bytes written and read per second.
    pub fn rate(&self) -> f64 {
        if self.seconds > 0.0 { 2.0 * self.passes as f64 * self.tested as f64 / self.seconds } else { 0.0 }
    }

    pub fn percent_tested(&self) -> f64 {
        if self.free_before == 0 { 0.0 } else { 100.0 * self.tested as f64 / self.free_before as f64 }
    }
}

/// Further wrong words are counted but not listed.
pub const MAX_LISTED: u32 = 1 << 16;

/// The page size of the driver's allocator.
const PAGE: usize = 2 << 20;

/// Left free for kernels that are loaded in the meantime.
const RESERVED_BYTES: usize = 256 << 20;

/// A smaller remainder is not worth another buffer.
const MIN_BUFFER_BYTES: usize = 64 << 20;

/// The kernels of this test on one GPU.
#[derive(Debug)]
pub struct MemoryTester<'g> {
    gpu: &'g Gpu<'g>,
    module: Module<'g>,
    launch: Launch,
    count: Buffer<'g>,
    wrong_words: Buffer<'g>,
}

impl<'g> MemoryTester<'g> {
    pub fn new(gpu: &'g Gpu<'g>) -> Result<Self, CudaError> {
        Self::with_module(gpu, gpu.module(kernels::MEMORY)?)
    }

    /// Creates a tester from compiled kernels.
    pub(super) fn with_module(gpu: &'g Gpu<'g>, module: Module<'g>) -> Result<Self, CudaError> {
        let multiprocessors = gpu.attribute(Attribute::Multiprocessors)?.unsigned_abs();
        let count = gpu.allocate(8)?;
        count.fill(0)?;
        Ok(Self {
            gpu,
            module,
            launch: Launch::new(multiprocessors * 16, 256),
            count,
            wrong_words: gpu.allocate(MAX_LISTED as usize * 24)?,
        })
    }

    pub const fn gpu(&self) -> &'g Gpu<'g> {
        self.gpu
    }

    /// Allocates all available memory, tests it, and frees it.
    pub fn run(&self, patterns: &[Pattern]) -> Result<MemoryReport, CudaError> {
        let (free_before, _) = self.gpu.memory()?;
        let buffers = allocate_all(self.gpu)?;
        let tested = buffers.iter().map(Buffer::bytes).sum();
        let mut report = MemoryReport { free_before, tested, passes: patterns.len(), ..MemoryReport::default() };
        for pattern in patterns {
            report.seconds += self.gpu.timed(|| buffers.iter().try_for_each(|buffer| self.fill(*pattern, buffer)))?;
            report.seconds += self.gpu.timed(|| buffers.iter().try_for_each(|buffer| self.verify(*pattern, buffer)))?;
            let (errors, wrong_words) = self.take_wrong_words(*pattern, &buffers)?;
            report.errors += errors;
            report.wrong.extend(wrong_words);
        }
        report.copy_rate = self.copy_rate(&buffers)?;
        Ok(report)
    }

    pub fn fill(&self, pattern: Pattern, buffer: &Buffer<'_>) -> Result<(), CudaError> {
        let kernel = self.kernel("fill", pattern)?;
        let pairs = (buffer.bytes() / 16) as u64;
        kernel.launch(self.launch, &[buffer.into(), pairs.into(), pattern.seed.into()])
    }

    /// Enqueues a comparison of every word. Wrong words are listed on the device until [`Self::take_wrong_words`].
    pub fn verify(&self, pattern: Pattern, buffer: &Buffer<'_>) -> Result<(), CudaError> {
        let kernel = self.kernel("verify", pattern)?;
        let pairs = (buffer.bytes() / 16) as u64;
        let (count, wrong_words) = (Argument::Buffer(&self.count), Argument::Buffer(&self.wrong_words));
        kernel.launch(
            self.launch,
            &[buffer.into(), pairs.into(), pattern.seed.into(), count, wrong_words, MAX_LISTED.into()],
        )
    }

    /// Returns how many words were wrong since the last call, and which.
    pub fn take_wrong_words(
        &self,
        pattern: Pattern,
        buffers: &[Buffer<'_>],
    ) -> Result<(u64, Vec<WrongWord>), CudaError> {
        let errors = self.count.read::<u64>(1)?[0];
        if errors == 0 {
            return Ok((0, Vec::new()));
        }
        let listed = errors.min(u64::from(MAX_LISTED)) as usize;
        let encoded = self.wrong_words.read::<u64>(listed * 3)?;
        self.count.fill(0)?;
        let wrong_words = encoded.chunks_exact(3).map(|words| WrongWord {
            pattern: pattern.name,
            address: words[0],
            offset: offset_of(words[0], buffers),
            expected: words[1],
            got: words[2],
        });
        Ok((errors, wrong_words.collect()))
    }

    /// Injects errors into words of a buffer with a separate kernel. `plant_words` defines the kinds.
    pub fn inject(&self, buffer: &Buffer<'_>, injected: &[(u64, u32, u64)]) -> Result<(), CudaError> {
        let indices: Vec<u64> = injected.iter().map(|(index, _, _)| *index).collect();
        let kinds: Vec<u32> = injected.iter().map(|(_, kind, _)| *kind).collect();
        let values: Vec<u64> = injected.iter().map(|(_, _, value)| *value).collect();
        let (indices, kinds, values) =
            (self.gpu.upload(&indices)?, self.gpu.upload(&kinds)?, self.gpu.upload(&values)?);
        let count = injected.len() as u32;
        let arguments = [buffer.into(), (&indices).into(), (&kinds).into(), (&values).into(), count.into()];
        self.module.function("plant_words")?.launch(Launch::new(count.div_ceil(256), 256), &arguments)?;
        self.gpu.synchronize()
    }

    fn kernel(&self, verb: &str, pattern: Pattern) -> Result<Function<'_>, CudaError> {
        self.module.function(&format!("{verb}_{}", pattern.kernel))
    }

    /// Measures the driver's own copy of one half of the largest buffer onto the other, for comparison.
    fn copy_rate(&self, buffers: &[Buffer<'_>]) -> Result<f64, CudaError> {
        let Some(largest) = buffers.iter().max_by_key(|buffer| buffer.bytes()) else { return Ok(0.0) };
        let half = largest.bytes() / 2 / PAGE * PAGE;
        let bytes = half.min(8 << 30);
        if bytes == 0 {
            return Ok(0.0);
        }
        let mut rates = Vec::new();
        for _ in 0..5 {
            let seconds = self.gpu.timed(|| largest.copy_within(half, bytes))?;
            rates.push(2.0 * bytes as f64 / seconds);
        }
        rates.sort_by(f64::total_cmp);
        Ok(rates[rates.len() / 2])
    }
}

/// Allocates all free memory, in as few buffers as the driver allows.
fn allocate_all<'g>(gpu: &'g Gpu<'g>) -> Result<Vec<Buffer<'g>>, CudaError> {
    let mut buffers = Vec::new();
    loop {
        let (free, _) = gpu.memory()?;
        let mut size = free.saturating_sub(RESERVED_BYTES) / PAGE * PAGE;
        let taken = loop {
            if size < MIN_BUFFER_BYTES {
                return Ok(buffers);
            }
            match gpu.allocate(size) {
                Ok(buffer) => break buffer,
                Err(error) if error.is_out_of_memory() => size = (size - size / 256).saturating_sub(PAGE) / PAGE * PAGE,
                Err(error) => return Err(error),
            }
        };
        buffers.push(taken);
    }
}

fn offset_of(address: u64, buffers: &[Buffer<'_>]) -> u64 {
    let mut before = 0;
    for buffer in buffers {
        let range = buffer.address()..buffer.address() + buffer.bytes() as u64;
        if range.contains(&address) {
            return before + (address - range.start);
        }
        before += buffer.bytes() as u64;
    }
    before
}
