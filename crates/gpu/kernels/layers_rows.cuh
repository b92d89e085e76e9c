// Layers that work on rows: the norms, softmax, cross-entropy. crates/gpu/src/dl/layers/exact/rows.rs has the same in Rust.

// ---- Layer norm, and root-mean-square norm, which does not subtract the mean. One warp per row. ----

#define NORM_EPSILON 0x1p-17f

struct Row { float mean, scale; };

template <bool CENTRED>
__device__ __forceinline__ Row normed(const float *x) {
    const float part = 1.0f / NORM_COLUMNS;
    const float mean = CENTRED ? summed(NORM_COLUMNS, [&](float sum, u32 i) { return sum + x[i]; }) * part : 0.0f;
    const float square = summed(NORM_COLUMNS, [&](float sum, u32 i) {
        const float d = x[i] - mean;
        return __fmaf_rn(d, d, sum);
    });
    return Row{mean, __fdiv_rn(1.0f, __fsqrt_rn(__fmaf_rn(square, part, NORM_EPSILON)))};
}

template <bool CENTRED>
__device__ __forceinline__ void norm_forward(const float *in, float *out) {
    const float *gamma = in + NORM_ROWS * NORM_COLUMNS, *beta = gamma + NORM_COLUMNS;
#pragma unroll 1
    for (u32 row = threadIdx.x / 32; row < NORM_ROWS; row += WARPS) {
        const float *x = in + row * NORM_COLUMNS;
        const Row norm = normed<CENTRED>(x);
#pragma unroll 1
        for (u32 i = lane(); i < NORM_COLUMNS; i += 32) {
            const float right = (x[i] - norm.mean) * norm.scale;
            out[row * NORM_COLUMNS + i] = CENTRED ? __fmaf_rn(right, gamma[i], beta[i]) : right * gamma[i];
        }
    }
}

template <bool CENTRED>
__device__ __forceinline__ void norm_backward(const float *in, float *out) {
    __shared__ Row norms[NORM_ROWS];
    const float *gamma = in + NORM_ROWS * NORM_COLUMNS, *all_dy = gamma + (CENTRED ? 2 : 1) * NORM_COLUMNS;
    float *dgamma = out + NORM_ROWS * NORM_COLUMNS, *dbeta = dgamma + NORM_COLUMNS;
#pragma unroll 1
    for (u32 row = threadIdx.x / 32; row < NORM_ROWS; row += WARPS) {
        const float *x = in + row * NORM_COLUMNS, *dy = all_dy + row * NORM_COLUMNS;
        const Row norm = normed<CENTRED>(x);
        if (lane() == 0) norms[row] = norm;
        const float part = 1.0f / NORM_COLUMNS;
        const float mean = CENTRED ? summed(NORM_COLUMNS, [&](float sum, u32 i) { return __fmaf_rn(dy[i], gamma[i], sum); }) * part : 0.0f;
        const float along = summed(NORM_COLUMNS, [&](float sum, u32 i) {
            return __fmaf_rn(dy[i] * gamma[i], (x[i] - norm.mean) * norm.scale, sum);
        }) * part;
#pragma unroll 1
        for (u32 i = lane(); i < NORM_COLUMNS; i += 32) {
            const float right = (x[i] - norm.mean) * norm.scale;
            out[row * NORM_COLUMNS + i] = __fmaf_rn(-right, along, __fmaf_rn(dy[i], gamma[i], -mean)) * norm.scale;
        }
    }
    __syncthreads();
#pragma unroll 1
    for (u32 i = threadIdx.x; i < NORM_COLUMNS; i += THREADS) {
        float for_gamma = 0.0f, for_beta = 0.0f;
#pragma unroll 1
        for (u32 row = 0; row < NORM_ROWS; row++) {
            const float dy = all_dy[row * NORM_COLUMNS + i], right = (in[row * NORM_COLUMNS + i] - norms[row].mean) * norms[row].scale;
            for_gamma = __fmaf_rn(dy, right, for_gamma);
            for_beta = for_beta + dy;
        }
        dgamma[i] = for_gamma;
        if (CENTRED) dbeta[i] = for_beta;
    }
}

LAYER(layernorm_forward) { norm_forward<true>(in, out); }
LAYER(layernorm_backward) { norm_backward<true>(in, out); }
LAYER(rmsnorm_forward) { norm_forward<false>(in, out); }
LAYER(rmsnorm_backward) { norm_backward<false>(in, out); }

// ---- Softmax and cross-entropy. One warp per row. ----

LAYER(softmax_forward) {
#pragma unroll 1
    for (u32 row = threadIdx.x / 32; row < SOFTMAX_ROWS; row += WARPS) {
        const float *x = in + row * SOFTMAX_COLUMNS;
        const Exponents all = exponents(x, SOFTMAX_COLUMNS);
#pragma unroll 1
        for (u32 i = lane(); i < SOFTMAX_COLUMNS; i += 32) out[row * SOFTMAX_COLUMNS + i] = __fdiv_rn(exponential(x[i] - all.most), all.sum);
    }
}

LAYER(softmax_backward) {
#pragma unroll 1
    for (u32 row = threadIdx.x / 32; row < SOFTMAX_ROWS; row += WARPS) {
        const float *x = in + row * SOFTMAX_COLUMNS, *dy = x + SOFTMAX_ROWS * SOFTMAX_COLUMNS;
        const Exponents all = exponents(x, SOFTMAX_COLUMNS);
        const auto y = [&](u32 i) { return __fdiv_rn(exponential(x[i] - all.most), all.sum); };
        const float along = summed(SOFTMAX_COLUMNS, [&](float sum, u32 i) { return __fmaf_rn(y(i), dy[i], sum); });
#pragma unroll 1
        for (u32 i = lane(); i < SOFTMAX_COLUMNS; i += 32) out[row * SOFTMAX_COLUMNS + i] = y(i) * (dy[i] - along);
    }
}

LAYER(cross_entropy_forward) {
    const float *targets = in + ENTROPY_ROWS * ENTROPY_CLASSES;
#pragma unroll 1
    for (u32 row = threadIdx.x / 32; row < ENTROPY_ROWS; row += WARPS) {
        const float *x = in + row * ENTROPY_CLASSES;
        const Exponents all = exponents(x, ENTROPY_CLASSES);
        if (lane() == 0) out[row] = logarithm(all.sum) - (x[(u32)targets[row]] - all.most);
    }
}

// The gradient of the mean loss over all rows.
LAYER(cross_entropy_backward) {
    const float *targets = in + ENTROPY_ROWS * ENTROPY_CLASSES;
#pragma unroll 1
    for (u32 row = threadIdx.x / 32; row < ENTROPY_ROWS; row += WARPS) {
        const float *x = in + row * ENTROPY_CLASSES;
        const Exponents all = exponents(x, ENTROPY_CLASSES);
        const u32 target = (u32)targets[row];
#pragma unroll 1
        for (u32 i = lane(); i < ENTROPY_CLASSES; i += 32) {
            const float y = __fdiv_rn(exponential(x[i] - all.most), all.sum);
            out[row * ENTROPY_CLASSES + i] = (i == target ? y - 1.0f : y) * (1.0f / ENTROPY_ROWS);
        }
    }
}
