//! The checksums of a product's rows, without multiplying the matrices: Σⱼ Cᵢⱼ wⱼ = Σₖ Aᵢₖ (Σⱼ Bⱼₖ wⱼ).

use std::{ops::Range, thread};

use super::matrix::{Matrix, number};

pub(super) fn row_sums(a: &Matrix, b: &Matrix, weights: &[u32]) -> Vec<u32> {
    let parts = split(b.rows, |rows| {
        let mut sums = vec![0; b.k as usize];
        rows.for_each(|row| add_row(b, row, weights[row as usize], &mut sums));
        sums
    });
    let mut weighted = vec![0u32; b.k as usize];
    for part in parts {
        weighted.iter_mut().zip(part).for_each(|(sum, part)| *sum = sum.wrapping_add(part));
    }
    split(a.rows, |rows| rows.map(|row| inner_product(a, row, &weighted)).collect::<Vec<_>>()).concat()
}

fn split<T: Send>(rows: u32, work: impl Fn(Range<u32>) -> T + Sync) -> Vec<T> {
    let threads = thread::available_parallelism().map_or(1, |count| count.get() as u32).clamp(1, 8);
    let bound = |part: u32| (u64::from(rows) * u64::from(part) / u64::from(threads)) as u32;
    thread::scope(|scope| {
        let work = &work;
        let parts: Vec<_> = (0..threads).map(|part| scope.spawn(move || work(bound(part)..bound(part + 1)))).collect();
        parts.into_iter().map(|part| part.join().expect("integer sums do not panic")).collect()
    })
}

/// Adds the numbers of a row times its weight.
fn add_row(matrix: &Matrix, row: u32, weight: u32, sums: &mut [u32]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has it.
        return unsafe { add_row_avx2(matrix, row, weight, sums) };
    }
    add_row_anywhere(matrix, row, weight, sums);
}

fn inner_product(matrix: &Matrix, row: u32, weighted: &[u32]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has it.
        return unsafe { inner_product_avx2(matrix, row, weighted) };
    }
    inner_product_anywhere(matrix, row, weighted)
}

/// Compiled with wider vectors: eight numbers at a time.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn add_row_avx2(matrix: &Matrix, row: u32, weight: u32, sums: &mut [u32]) {
    add_row_anywhere(matrix, row, weight, sums);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn inner_product_avx2(matrix: &Matrix, row: u32, weighted: &[u32]) -> u32 {
    inner_product_anywhere(matrix, row, weighted)
}

#[inline(always)]
fn add_row_anywhere(matrix: &Matrix, row: u32, weight: u32, sums: &mut [u32]) {
    let (seed, range) = (matrix.seed, matrix.range);
    for (k, sum) in sums.iter_mut().enumerate() {
        *sum = sum.wrapping_add((number(seed, range, row, k as u32) as u32).wrapping_mul(weight));
    }
}

#[inline(always)]
fn inner_product_anywhere(matrix: &Matrix, row: u32, weighted: &[u32]) -> u32 {
    let (seed, range) = (matrix.seed, matrix.range);
    let mut sum = 0u32;
    for (k, weighted) in weighted.iter().enumerate() {
        sum = sum.wrapping_add((number(seed, range, row, k as u32) as u32).wrapping_mul(*weighted));
    }
    sum
}
