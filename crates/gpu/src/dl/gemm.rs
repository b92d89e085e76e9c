//! Matrix products in each type of number, with every result checked.

use super::expected_sums::{self, SEED_A, SEED_B};
use crate::cublas::{Cublas, CublasError};
use crate::cuda::{Argument, Attribute, Buffer, CudaError, Function, Gpu, Launch, Module, TensorMap, Tile};

/// A type of number that the GPU multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NumberFormat {
    Bf16,
    Fp16,
    Tf32,
    Fp32,
    Fp8,
    Int8,
}

impl NumberFormat {
    pub const ALL: &[Self] = &[Self::Bf16, Self::Fp16, Self::Tf32, Self::Fp32, Self::Fp8, Self::Int8];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
            Self::Tf32 => "tf32",
            Self::Fp32 => "fp32",
            Self::Fp8 => "fp8",
            Self::Int8 => "int8",
        }
    }

    /// Returns the size of one number of a matrix in bytes.
    pub const fn bytes(self) -> u32 {
        match self {
            Self::Bf16 | Self::Fp16 => 2,
            Self::Tf32 | Self::Fp32 => 4,
            Self::Fp8 | Self::Int8 => 1,
        }
    }

    /// Returns the range: numbers are from minus this to this. The tensor cores keep some 13 bits of a sum of fp8
    /// products, so those are small; a sum of int8 products has 31 bits.
    pub const fn range(self) -> u32 {
        match self {
            Self::Bf16 | Self::Fp16 | Self::Tf32 | Self::Fp32 => 7,
            Self::Fp8 => 3,
            Self::Int8 => 127,
        }
    }

    /// Returns whether results are floating-point numbers.
    const fn is_float(self) -> bool {
        !matches!(self, Self::Int8)
    }

    /// Returns the kernel that fills a matrix. tf32 is fp32 of which the tensor cores use the upper bits.
    const fn fill_kernel(self) -> &'static str {
        match self {
            Self::Bf16 => "make_bf16",
            Self::Fp16 => "make_fp16",
            Self::Tf32 | Self::Fp32 => "make_fp32",
            Self::Fp8 => "make_fp8",
            Self::Int8 => "make_int8",
        }
    }
}

/// Rows of A, rows of B, numbers in a row of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    pub m: u32,
    pub n: u32,
    pub k: u32,
}

impl Shape {
    pub const fn flop(self) -> f64 {
        2.0 * self.m as f64 * self.n as f64 * self.k as f64
    }
}

/// Returns whether the GPU has the Hopper-only instructions, which later architectures lack.
pub(super) fn is_hopper(gpu: &Gpu<'_>) -> Result<bool, CudaError> {
    Ok(gpu.capability()? == 90)
}

/// The product kernels for a GPU.
#[derive(Debug)]
pub struct GemmKernels<'g> {
    gpu: &'g Gpu<'g>,
    checks: Module<'g>,
    products: Vec<(NumberFormat, Module<'g>)>,
    hopper: bool,
    multiprocessors: u32,
}

/// Shared memory per block on Hopper: four stages of 56 KiB, and room to align to 1 KiB.
const HOPPER_SHARED: u32 = 4 * (128 + 320) * 128 + 1024;
const AMPERE_SHARED: u32 = 4 * 2 * 128 * 64;

impl<'g> GemmKernels<'g> {
    pub fn new(
        gpu: &'g Gpu<'g>,
        checks: Module<'g>,
        products: Vec<(NumberFormat, Module<'g>)>,
    ) -> Result<Self, CudaError> {
        let multiprocessors = gpu.attribute(Attribute::Multiprocessors)?.unsigned_abs();
        Ok(Self { gpu, checks, products, hopper: is_hopper(gpu)?, multiprocessors })
    }

    /// Returns the types of numbers that this GPU and our kernels support.
    pub fn formats(&self) -> impl Iterator<Item = NumberFormat> + '_ {
        self.products.iter().map(|(number, _)| *number)
    }

    fn kernel(&self, number: NumberFormat) -> Result<(Function<'_>, Launch), CudaError> {
        let (_, module) = self.products.iter().find(|(known, _)| *known == number).expect("a supported number format");
        let function = module.function("product_of_matrices")?;
        let launch = match number {
            NumberFormat::Fp32 => Launch::new(self.multiprocessors * 2, 256),
            // Clusters of two blocks: with an odd number of multiprocessors, one would be idle.
            _ if self.hopper => Launch::new(self.multiprocessors / 2 * 2, 384).shared(HOPPER_SHARED),
            _ => Launch::new(self.multiprocessors * 2, 256).shared(AMPERE_SHARED),
        };
        if launch.shared > 0 {
            function.allow_shared(launch.shared)?;
        }
        Ok((function, launch))
    }

    /// Creates the two matrices. `expected` are the checksums of [`expected_sums::row_sums`].
    ///
    /// # Panics
    /// Panics if the GPU does not support the number format.
    pub fn product<'p>(&'p self, number: NumberFormat, shape: Shape, expected: &[u32]) -> Result<Gemm<'p>, CudaError> {
        let row = shape.k * number.bytes();
        let (kernel, launch) = self.kernel(number)?;
        let a = self.matrix(number, shape.m, shape.k, SEED_A)?;
        let b = self.matrix(number, shape.n, shape.k, SEED_B)?;
        let maps = if self.hopper && number != NumberFormat::Fp32 {
            let tile = |rows, tile_rows| Tile { row_bytes: row.into(), rows, tile_row_bytes: 128, tile_rows };
            Some((
                self.gpu.tensor_map(&a, tile(shape.m.into(), 128))?,
                self.gpu.tensor_map(&b, tile(shape.n.into(), 160))?,
            ))
        } else {
            None
        };
        let weights: Vec<u32> = (0..shape.n).map(expected_sums::weight_at).collect();
        let count = self.gpu.allocate(4)?;
        count.fill(0)?;
        let columns = if maps.is_some() { shape.n / 320 } else { shape.n / 128 };
        Ok(Gemm {
            kernels: self,
            number,
            shape,
            kernel,
            launch,
            c: self.gpu.allocate(shape.m as usize * shape.n as usize * 4)?,
            records: self.gpu.allocate((shape.m / 128 * columns) as usize * 8)?,
            tile_columns: columns,
            weights: self.gpu.upload(&weights)?,
            expected: self.gpu.upload(expected)?,
            count,
            wrong: self.gpu.allocate(shape.m as usize * 8)?,
            a,
            b,
            maps,
        })
    }

    fn matrix(&self, number: NumberFormat, rows: u32, k: u32, seed: u32) -> Result<Buffer<'_>, CudaError> {
        let matrix = self.gpu.allocate(rows as usize * k as usize * number.bytes() as usize)?;
        let maker = self.checks.function(number.fill_kernel())?;
        let launch = Launch::new(self.multiprocessors * 8, 256);
        maker.launch(launch, &[(&matrix).into(), rows.into(), k.into(), seed.into(), number.range().into()])?;
        Ok(matrix)
    }
}

/// Two matrices, their product, and its expected checksums.
#[derive(Debug)]
pub struct Gemm<'p> {
    kernels: &'p GemmKernels<'p>,
    pub number: NumberFormat,
    pub shape: Shape,
    kernel: Function<'p>,
    launch: Launch,
    a: Buffer<'p>,
    b: Buffer<'p>,
    c: Buffer<'p>,
    maps: Option<(TensorMap, TensorMap)>,
    records: Buffer<'p>,
    tile_columns: u32,
    weights: Buffer<'p>,
    expected: Buffer<'p>,
    count: Buffer<'p>,
    wrong: Buffer<'p>,
}

/// A wrong number of a product.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WrongNumber {
    pub row: u32,
    pub column: u32,
    /// The bits in memory.
    pub got: u32,
    pub expected: i32,
    /// The multiprocessor that computed it.
    pub multiprocessor: u32,
}

/// A multiprocessor and the average time of its tiles, in its own clock ticks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TileTime {
    pub multiprocessor: u32,
    pub ticks: f64,
}

/// The most wrong numbers of a row that are listed.
const MAX_LISTED: u32 = 1024;

impl Gemm<'_> {
    /// Enqueues one multiplication.
    pub fn multiply(&self) -> Result<(), CudaError> {
        let row_bytes = self.shape.k * self.number.bytes();
        let (a, b) = match &self.maps {
            Some((a, b)) => (Argument::Tensor(a), Argument::Tensor(b)),
            None => (Argument::Buffer(&self.a), Argument::Buffer(&self.b)),
        };
        let (m, n) = (self.shape.m, self.shape.n);
        let arguments = [a, b, (&self.c).into(), (&self.records).into(), m.into(), n.into(), row_bytes.into()];
        self.kernel.launch(self.launch, &arguments)
    }

    /// Enqueues the same multiplication with cuBLAS, in bf16 and without a check.
    pub(super) fn multiply_by(&self, cublas: &Cublas) -> Result<(), CublasError> {
        let Shape { m, n, k } = self.shape;
        cublas.multiply([m, n, k], self.a.address(), self.b.address(), self.c.address())
    }

    /// Enqueues a check of every number of the product.
    pub fn check(&self) -> Result<(), CudaError> {
        let name = if self.number.is_float() { "check_rows_float" } else { "check_rows_int" };
        let arguments = [
            (&self.c).into(),
            self.shape.n.into(),
            (&self.weights).into(),
            (&self.expected).into(),
            (&self.count).into(),
            (&self.wrong).into(),
            self.shape.m.into(),
        ];
        self.kernels.checks.function(name)?.launch(Launch::new(self.shape.m, 256), &arguments)
    }

    /// Returns the rows that were wrong in any check since the last call.
    pub fn take_wrong_rows(&self) -> Result<Vec<u32>, CudaError> {
        let count = self.count.read::<u32>(1)?[0];
        if count == 0 {
            return Ok(Vec::new());
        }
        let listed = self.wrong.read::<u32>(count.min(self.shape.m) as usize * 2)?;
        self.count.fill(0)?;
        let mut rows: Vec<u32> = listed.chunks_exact(2).map(|row| row[0]).collect();
        rows.sort_unstable();
        rows.dedup();
        Ok(rows)
    }

    /// Returns the numbers of a row that are wrong now, and the multiprocessors that computed them.
    pub fn locate(&self, row: u32) -> Result<Vec<WrongNumber>, CudaError> {
        let gpu = self.kernels.gpu;
        let (count, list) = (gpu.allocate(4)?, gpu.allocate(MAX_LISTED as usize * 16)?);
        count.fill(0)?;
        let arguments = [
            (&self.c).into(),
            self.shape.n.into(),
            self.shape.k.into(),
            row.into(),
            SEED_A.into(),
            SEED_B.into(),
            self.number.range().into(),
            u32::from(self.number.is_float()).into(),
            (&count).into(),
            (&list).into(),
            MAX_LISTED.into(),
        ];
        // One warp per number.
        self.kernels.checks.function("locate")?.launch(Launch::new(self.shape.n.div_ceil(8), 256), &arguments)?;
        let count_found = count.read::<u32>(1)?[0].min(MAX_LISTED) as usize;
        let records = self.records()?;
        let words = list.read::<u32>(count_found * 4)?;
        let wrong = words.chunks_exact(4).map(|word| {
            let tile = word[0] / 128 * self.tile_columns + word[1] / (self.shape.n / self.tile_columns);
            let multiprocessor = records.get(tile as usize).map_or(u32::MAX, |record| record.0);
            WrongNumber { row: word[0], column: word[1], got: word[2], expected: word[3] as i32, multiprocessor }
        });
        let mut wrong: Vec<_> = wrong.collect();
        wrong.sort_unstable_by_key(|wrong| wrong.column);
        Ok(wrong)
    }

    /// Returns for each tile of the last multiplication its multiprocessor and ticks.
    fn records(&self) -> Result<Vec<(u32, u32)>, CudaError> {
        let words = self.records.read::<u32>(self.records.len::<u32>())?;
        Ok(words.chunks_exact(2).map(|record| (record[0], record[1])).collect())
    }

    /// Returns the average time of each multiprocessor's tiles in the last multiplication, slowest first.
    pub fn tile_times(&self) -> Result<Vec<TileTime>, CudaError> {
        let mut sums = std::collections::BTreeMap::<u32, (f64, f64)>::new();
        for (multiprocessor, ticks) in self.records()? {
            let sum = sums.entry(multiprocessor).or_default();
            *sum = (sum.0 + f64::from(ticks), sum.1 + 1.0);
        }
        let paces =
            sums.into_iter().map(|(multiprocessor, (ticks, tiles))| TileTime { multiprocessor, ticks: ticks / tiles });
        let mut paces: Vec<_> = paces.collect();
        paces.sort_by(|a, b| b.ticks.total_cmp(&a.ticks));
        Ok(paces)
    }

    /// Injects errors into the product with a separate kernel: position, kind (see `plant_numbers`) and bit of each.
    /// Returns for each whether the value changed.
    pub fn inject(&self, injected: &[(u32, u32, u32)]) -> Result<Vec<bool>, CudaError> {
        let gpu = self.kernels.gpu;
        let column = |pick: fn(&(u32, u32, u32)) -> u32| injected.iter().map(pick).collect::<Vec<u32>>();
        let positions = gpu.upload(&column(|injected| injected.0))?;
        let (kinds, bits) = (gpu.upload(&column(|injected| injected.1))?, gpu.upload(&column(|injected| injected.2))?);
        let changed = gpu.allocate(injected.len() * 4)?;
        let count = injected.len() as u32;
        let is_float = u32::from(self.number.is_float());
        let arguments = [
            (&self.c).into(),
            (&positions).into(),
            (&kinds).into(),
            (&bits).into(),
            is_float.into(),
            (&changed).into(),
            count.into(),
        ];
        self.kernels.checks.function("plant_numbers")?.launch(Launch::new(count.div_ceil(256), 256), &arguments)?;
        Ok(changed.read::<u32>(injected.len())?.into_iter().map(|changed| changed != 0).collect())
    }
}
