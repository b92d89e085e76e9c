//! The product of two matrices: each number is computed when it is read, and the checksums of all rows once.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use super::{matrix::Matrix, row_sums::row_sums};

/// C = A Bᵀ, in rows of `b.rows` numbers of 32 bits.
#[derive(Debug)]
pub(crate) struct Product {
    pub(crate) a: Matrix,
    pub(crate) b: Matrix,
    /// Whether numbers are stored as floats.
    pub(crate) is_float: bool,
    numbers: Mutex<HashMap<u64, i32>>,
    sums: OnceLock<CheckSums>,
}

/// The checksum of every row, for these weights of the columns.
#[derive(Debug)]
struct CheckSums {
    weights: Vec<u32>,
    sums: Arc<Vec<u32>>,
}

impl Product {
    /// Returns the product of two matrices. All GPUs share one: their matrices are the same.
    pub(crate) fn of(a: Matrix, b: Matrix, is_float: bool) -> Arc<Self> {
        static ALL: Mutex<Vec<Arc<Product>>> = Mutex::new(Vec::new());
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = all.iter().find(|known| (known.a, known.b, known.is_float) == (a, b, is_float)) {
            return Arc::clone(known);
        }
        let new = Arc::new(Self { a, b, is_float, numbers: Mutex::default(), sums: OnceLock::new() });
        all.push(Arc::clone(&new));
        new
    }

    pub(crate) const fn columns(&self) -> u32 {
        self.b.rows
    }

    /// Returns the number at a position.
    pub(crate) fn number(&self, position: u64) -> i32 {
        if let Some(known) = self.numbers.lock().unwrap_or_else(PoisonError::into_inner).get(&position) {
            return *known;
        }
        let (row, column) =
            ((position / u64::from(self.columns())) as u32, (position % u64::from(self.columns())) as u32);
        let number = (0..self.a.k).map(|k| self.a.number(row, k) * self.b.number(column, k)).sum();
        self.numbers.lock().unwrap_or_else(PoisonError::into_inner).insert(position, number);
        number
    }

    /// Returns a number as it is stored.
    pub(crate) fn encode(&self, number: i32) -> u32 {
        if self.is_float { (number as f32).to_bits() } else { number as u32 }
    }

    pub(crate) fn bits(&self, position: u64) -> u32 {
        self.encode(self.number(position))
    }

    /// Returns the checksum of each row: the sum of each number times the weight of its column, modulo 2³².
    pub(crate) fn row_sums(&self, weights: &[u32]) -> Arc<Vec<u32>> {
        let compute = || Arc::new(row_sums(&self.a, &self.b, weights));
        let first = self.sums.get_or_init(|| CheckSums { weights: weights.to_vec(), sums: compute() });
        if first.weights == weights { Arc::clone(&first.sums) } else { compute() }
    }
}
