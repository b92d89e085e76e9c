//! Matrices and their products. A product is kept as a function of its matrices; a wrong number in a matrix changes the
//! numbers that depend on it.

use std::sync::{Arc, PoisonError};

use super::{Arguments, KernelError};
use crate::cuda::{
    contents::{
        Content,
        matrix::{Matrix, Storage},
        product::Product,
    },
    device::Device,
    gpu_model::NumberFormat,
    memory::Memory,
};

pub(crate) fn make_matrix(device: &Device, storage: Storage, arguments: &Arguments) -> Result<(), KernelError> {
    let [address, rows, k, seed, range] = arguments.take()?;
    let matrix = Matrix { storage, rows: rows as u32, k: k as u32, seed: seed as u32, range: range as u32 };
    Ok(device.memory().put(address, matrix.bytes(), Content::Matrix(matrix), address)?)
}

pub(crate) fn multiply(
    device: &Device,
    format: NumberFormat,
    has_tensor_maps: bool,
    grid: u32,
    arguments: &Arguments,
) -> Result<(), KernelError> {
    let [a, b, c, records, m, n, row_bytes] = arguments.take()?;
    let mut memory = device.memory();
    let (a_matrix, a_wrong) = matrix_at(&memory, a, m * row_bytes)?;
    let (b_matrix, b_wrong) = matrix_at(&memory, b, n * row_bytes)?;
    let product = Product::of(a_matrix, b_matrix, format != NumberFormat::Int8);
    memory.put(c, m * n * 4, Content::Product(Arc::clone(&product)), c)?;
    for wrong in &a_wrong {
        for column in 0..n {
            let partner = b_matrix.number(column as u32, wrong.k);
            add(&mut memory, c + (u64::from(wrong.row) * n + column) * 4, product.is_float, wrong.difference, partner)?;
        }
    }
    for wrong in &b_wrong {
        for row in 0..m {
            let partner = a_matrix.number(row as u32, wrong.k);
            add(&mut memory, c + (row * n + u64::from(wrong.row)) * 4, product.is_float, wrong.difference, partner)?;
        }
    }
    if let Some(fault) = device.model.faults.product.filter(|fault| fault.format == format) {
        let (row, column) = (u64::from(fault.row), u64::from(fault.column));
        if row < m && column < n {
            let place = row * n + column;
            memory.set_word(c + place * 4, product.bits(place) ^ (1 << fault.bit))?;
        }
    }
    let tile_columns = (n / if has_tensor_maps { 320 } else { 128 }) as u32;
    let tiles = tile_records(device, has_tensor_maps, grid, (m / 128) as u32, tile_columns);
    memory.put(records, tiles.len() as u64 * 4, Content::Words(tiles), records)?;
    drop(memory);
    let flop = 2.0 * (m * n) as f64 * f64::from(a_matrix.k);
    device.spend_under_load(flop / device.model.gemm_rate(format, device.is_warm()));
    Ok(())
}

/// A number of a matrix that is not what it should be.
struct WrongNumber {
    row: u32,
    k: u32,
    /// What is there, less what should be.
    difference: f32,
}

/// Returns the matrix at an address, and its wrong numbers.
fn matrix_at(memory: &Memory, address: u64, bytes: u64) -> Result<(Matrix, Vec<WrongNumber>), KernelError> {
    let stretch = memory.stretch(address, bytes)?;
    let matrix = match stretch.pieces.as_slice() {
        [piece] if piece.origin == address => match &piece.content {
            Content::Matrix(matrix) => *matrix,
            _ => return Err(KernelError::Unexpected("no matrix was made there")),
        },
        _ => return Err(KernelError::Unexpected("the memory of a matrix was written to")),
    };
    let bits = matrix.storage.bits();
    let per_word = u64::from(32 / bits);
    let mut wrong = Vec::new();
    for (at, word) in stretch.changed {
        for part in 0..per_word {
            let place = (at - address) / 4 * per_word + part;
            let (row, k) = ((place / u64::from(matrix.k)) as u32, (place % u64::from(matrix.k)) as u32);
            let stored = (word >> (part as u32 * bits)) & (u32::MAX >> (32 - bits));
            let difference = matrix.storage.decode(stored) - matrix.number(row, k) as f32;
            if difference != 0.0 {
                wrong.push(WrongNumber { row, k, difference });
            }
        }
    }
    Ok((matrix, wrong))
}

/// Adds to a number of a product what a wrong number in one matrix and its partner in the other make.
fn add(memory: &mut Memory, at: u64, is_float: bool, difference: f32, partner: i32) -> Result<(), KernelError> {
    let (was, more) = (memory.word(at)?, difference * partner as f32);
    let now = if is_float { (f32::from_bits(was) + more).to_bits() } else { was.wrapping_add(more as i32 as u32) };
    Ok(memory.set_word(at, now)?)
}

/// Returns the multiprocessor and the ticks of each tile, two words each.
fn tile_records(device: &Device, in_clusters: bool, grid: u32, rows: u32, columns: u32) -> Arc<Vec<u32>> {
    let mut known = device.tile_records.lock().unwrap_or_else(PoisonError::into_inner);
    let records = known.entry((grid, rows, columns)).or_insert_with(|| {
        let multiprocessors = device.model.multiprocessors.max(1);
        let record = |tile: u32| {
            // Blocks take tiles in turn; two blocks of a cluster are one below the other.
            let block = match (in_clusters, grid) {
                (true, 2..) => (tile / columns / 2 * columns + tile % columns) % (grid / 2) * 2 + tile / columns % 2,
                _ => tile % grid.max(1),
            };
            let multiprocessor = block % multiprocessors;
            let slow = device.model.faults.slow_multiprocessor.filter(|(slow, _)| *slow == multiprocessor);
            // A tile takes up to 2 % longer than another.
            let ticks = f64::from(1_000_000 + tile * 7919 % 20_000) * slow.map_or(1.0, |(_, factor)| factor);
            [multiprocessor, ticks as u32]
        };
        Arc::new((0..rows * columns).flat_map(record).collect())
    });
    Arc::clone(records)
}
