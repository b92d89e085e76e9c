//! Rates of the kernels on the GPU at hand, for whoever works on them.

use std::{ffi::OsStr, time::Instant};

use doctor_gpu::{
    cuda::{Cuda, LIBRARY},
    dl::{
        known,
        memory::{MemoryTester, PATTERNS},
        products::{Multipliers, Number, Shape},
    },
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let began = Instant::now();
    let say = |what: &str| eprintln!("{:7.3} s  {what}", began.elapsed().as_secs_f64());
    let cuda = Cuda::open(OsStr::new(LIBRARY))?;
    say("driver");
    let gpu = cuda.gpu(0)?;
    say(&format!("{} {} {}", gpu.name()?, gpu.bus_id()?, gpu.capability()?));
    let all = Multipliers::new(&gpu)?;
    say("kernels of products");
    let tester = MemoryTester::new(&gpu)?;
    say("kernels of memory");
    let report = tester.run(PATTERNS)?;
    say(&format!(
        "memory: {:.2} % of free, {:.3} s, {:.1} GB/s, copy {:.1} GB/s, errors {}",
        report.percent_tested(),
        report.seconds,
        report.rate() / 1e9,
        report.copy_rate / 1e9,
        report.errors
    ));
    for number in all.numbers() {
        for k in [8192, 16384] {
            let shape = Shape { m: 8448, n: 8320, k };
            let expected = known::row_sums(shape.m, shape.n, shape.k, number.range());
            say("known");
            let product = all.product(number, shape, &expected)?;
            product.multiply()?;
            product.check()?;
            let wrong = product.take_wrong_rows()?;
            if let Some(row) = wrong.first() {
                say(&format!(
                    "{} wrong rows, first {row}: {:?}",
                    wrong.len(),
                    product.locate(*row)?.iter().take(4).collect::<Vec<_>>()
                ));
            }
            let repeats = if number == Number::Fp32 { 3 } else { 20 };
            let bare = gpu.timed(|| (0..repeats).try_for_each(|_| product.multiply()))?;
            let checked = gpu.timed(|| {
                (0..repeats).try_for_each(|_| {
                    product.multiply()?;
                    product.check()
                })
            })?;
            let rate = |seconds: f64| shape.flop() * f64::from(repeats) / seconds / 1e12;
            let paces = product.paces()?;
            let median = paces[paces.len() / 2].ticks;
            say(&format!(
                "{} k={k}: {:.1} TFLOP/s, checked {:.1}; wrong rows {}; slowest of {} SMs {} at {:.3}",
                number.name(),
                rate(bare),
                rate(checked),
                product.take_wrong_rows()?.len(),
                paces.len(),
                paces[0].multiprocessor,
                paces[0].ticks / median
            ));
        }
    }
    Ok(())
}
