//! The expected checksums of the products, computed without multiplying matrices. `kernels/numbers.cuh` has the same
//! formulas in CUDA.
//!
//! The checksum of row i of C = A Bᵀ is Σⱼ Cᵢⱼ wⱼ = Σₖ Aᵢₖ (Σⱼ Bⱼₖ wⱼ), modulo 2³². The right side takes as many steps
//! as the matrices have numbers, so the host computes it while the GPU starts up, and no unit of the GPU under test is involved.

use std::thread;

/// Seeds of the two matrices.
pub const SEED_A: u32 = 0x0c1d_a0a1;
pub const SEED_B: u32 = 0x0c1d_b0b2;

pub(super) const fn hash(mut x: u32) -> u32 {
    x ^= x >> 16;
    x = x.wrapping_mul(0x21f0_aaad);
    x ^= x >> 15;
    x = x.wrapping_mul(0x735a_2d97);
    x ^ (x >> 15)
}

/// Returns the number at a position of a matrix, from -range to range.
pub const fn number_at(seed: u32, row: u32, k: u32, range: u32) -> i32 {
    let h = hash(((row << 16) | k) ^ seed);
    (((h >> 16) * (2 * range + 1)) >> 16) as i32 - range as i32
}

/// Returns the weight of a column. It is odd, so that no error is multiplied to zero.
pub const fn weight_at(column: u32) -> u32 {
    hash(column ^ 0x5bd1_e995) | 1
}

/// Returns the checksum of each row of the product of `m` rows with `n` rows of `k` numbers.
pub fn row_sums(m: u32, n: u32, k: u32, range: u32) -> Vec<u32> {
    let weighted = weighted_columns(n, k, range);
    let row_sum = |row: u32| -> u32 {
        let terms = weighted.iter().zip(0..k);
        terms.fold(0, |sum, (weighted, at)| {
            sum.wrapping_add((number_at(SEED_A, row, at, range) as u32).wrapping_mul(*weighted))
        })
    };
    parallel_rows(m, |rows| rows.map(row_sum).collect::<Vec<_>>()).concat()
}

/// Returns Σⱼ Bⱼₖ wⱼ for each k.
fn weighted_columns(n: u32, k: u32, range: u32) -> Vec<u32> {
    let parts = parallel_rows(n, |rows| {
        let mut sums = vec![0u32; k as usize];
        for row in rows {
            let weight = weight_at(row);
            for (sum, at) in sums.iter_mut().zip(0..k) {
                *sum = sum.wrapping_add((number_at(SEED_B, row, at, range) as u32).wrapping_mul(weight));
            }
        }
        sums
    });
    let mut all = vec![0u32; k as usize];
    for part in parts {
        for (sum, more) in all.iter_mut().zip(part) {
            *sum = sum.wrapping_add(more);
        }
    }
    all
}

/// Splits the rows among the processors of the host.
fn parallel_rows<T: Send>(rows: u32, work: impl Fn(std::ops::Range<u32>) -> T + Sync) -> Vec<T> {
    let threads = thread::available_parallelism().map_or(1, |count| count.get() as u32).min(rows.max(1));
    let bound = |part: u32| (u64::from(rows) * u64::from(part) / u64::from(threads)) as u32;
    thread::scope(|scope| {
        let parts: Vec<_> = (0..threads)
            .map(|part| {
                let (work, range) = (&work, bound(part)..bound(part + 1));
                scope.spawn(move || work(range))
            })
            .collect();
        parts.into_iter().map(|part| part.join().expect("the integer sums do not panic")).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_equals_that_of_the_multiplied_matrices() {
        let (m, n, k, range) = (5, 7, 19, 7);
        let expected: Vec<u32> = (0..m)
            .map(|i| {
                (0..n).fold(0u32, |sum, j| {
                    let c: i32 =
                        (0..k).map(|at| number_at(SEED_A, i, at, range) * number_at(SEED_B, j, at, range)).sum();
                    sum.wrapping_add((c as u32).wrapping_mul(weight_at(j)))
                })
            })
            .collect();
        assert_eq!(row_sums(m, n, k, range), expected);
    }

    #[test]
    fn numbers_fill_their_range_evenly() {
        let mut counts = [0u32; 15];
        for row in 0..64 {
            for k in 0..512 {
                counts[(number_at(SEED_A, row, k, 7) + 7) as usize] += 1;
            }
        }
        let expected = 64.0 * 512.0 / 15.0;
        assert!(counts.iter().all(|&count| (f64::from(count) - expected).abs() < expected * 0.15), "{counts:?}");
    }
}
