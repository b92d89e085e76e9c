// arch: compute_80
// Layers of deep learning, forward and backward, each as one block does it: every block is a replica of the same problem
// and writes a whole result of its own, so that every multiprocessor runs every layer and all results must be the same
// bits.
//
// They are the same bits on every architecture, and crates/gpu/src/dl/layers/exact says which: only operations whose
// result IEEE 754 fixes are used (the functions above them are written here), sums are in a fixed order, and nothing is
// added atomically. The tensor cores round in their own way, so what they get has exact sums.

#include "numbers.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)

// The sizes of the problems. A test holds crates/gpu/src/dl/layers/problem.rs against them.
#define LINEAR_ROWS 128
#define LINEAR_INPUTS 128
#define LINEAR_OUTPUTS 128
#define CONV_IMAGES 2
#define CONV_INPUTS 8
#define CONV_OUTPUTS 16
#define CONV_SIDE 16
#define NORM_ROWS 128
#define NORM_COLUMNS 512
#define SOFTMAX_ROWS 128
#define SOFTMAX_COLUMNS 512
#define GELU_NUMBERS 32768
#define ATTENTION_HEADS 4
#define ATTENTION_TOKENS 64
#define ATTENTION_WIDTH 32
#define EMBEDDING_TOKENS 256
#define EMBEDDING_WORDS 128
#define EMBEDDING_WIDTH 64
#define ENTROPY_ROWS 128
#define ENTROPY_CLASSES 512
#define ADAM_NUMBERS 32768

#define CONV_PLANE (CONV_SIDE * CONV_SIDE)

// ---- The inputs: each number depends on its place alone. ----

enum Kind : u32 { SIGNED, POSITIVE, SMALL, INDEX };

// `range`: of SMALL, the largest integer; of INDEX, how many there are.
extern "C" __global__ void make_values(float *to, u32 count, u32 seed, u32 kind, u32 range, float scale) {
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        const u32 h = scrambled(i ^ seed);
        float value;
        switch (kind) {
        case SIGNED: value = (float)((int)(h >> 8) - 0x800000) * 0x1p-23f; break;
        case POSITIVE: value = (float)(h >> 8) * 0x1p-24f; break;
        case SMALL: value = (float)((int)(((h >> 16) * (2 * range + 1)) >> 16) - (int)range); break;
        default: value = (float)(((h >> 16) * range) >> 16);
        }
        to[i] = value * scale;
    }
}

// ---- Functions, from operations that round in one way only. ----

__device__ __forceinline__ float exponential(float x) {
    // Beyond these ends the result would be subnormal or infinite.
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    // Adding and taking off 1.5 * 2^23 rounds to an integer.
    const float n = __fmaf_rn(x, 0x1.715476p+0f, 0x1.8p+23f) - 0x1.8p+23f;
    // ln 2 in two parts: what the first lacks, the second has.
    const float r = __fmaf_rn(n, 0x1.05c610p-29f, __fmaf_rn(n, -0x1.62e430p-1f, x));
    float p = 0x1.a01a02p-13f;
    p = __fmaf_rn(p, r, 0x1.6c16c2p-10f);
    p = __fmaf_rn(p, r, 0x1.111112p-7f);
    p = __fmaf_rn(p, r, 0x1.555556p-5f);
    p = __fmaf_rn(p, r, 0x1.555556p-3f);
    p = __fmaf_rn(p, r, 0.5f);
    p = __fmaf_rn(p, r, 1.0f);
    p = __fmaf_rn(p, r, 1.0f);
    return p * __int_as_float(((int)n + 127) << 23);
}

// Of a positive number that is not subnormal.
__device__ __forceinline__ float logarithm(float x) {
    const u32 bits = __float_as_uint(x);
    float exponent = (float)((int)(bits >> 23) - 127), m = __uint_as_float((bits & 0x7fffffu) | 0x3f800000u);
    if (m > 0x1.6a09e6p+0f) {
        m = m * 0.5f;
        exponent = exponent + 1.0f;
    }
    const float s = __fdiv_rn(m - 1.0f, m + 1.0f), z = s * s;
    float p = 0x1.745d18p-4f;
    p = __fmaf_rn(p, z, 0x1.c71c72p-4f);
    p = __fmaf_rn(p, z, 0x1.24924ap-3f);
    p = __fmaf_rn(p, z, 0x1.99999ap-3f);
    p = __fmaf_rn(p, z, 0x1.555556p-2f);
    p = __fmaf_rn(p, z, 1.0f);
    return __fmaf_rn(exponent, 0x1.62e430p-1f, __fmaf_rn(exponent, -0x1.05c610p-29f, (s + s) * p));
}

__device__ __forceinline__ u32 lane() { return threadIdx.x % 32; }

// The sum over a row by one warp: lane l takes the places l, l + 32, and so on; then the lanes' sums meet in pairs.
template <typename Add>
__device__ __forceinline__ float summed(u32 count, Add add) {
    float sum = 0.0f;
#pragma unroll 1
    for (u32 i = lane(); i < count; i += 32) sum = add(sum, i);
#pragma unroll
    for (u32 distance = 16; distance; distance /= 2) sum = sum + __shfl_xor_sync(~0u, sum, distance);
    return sum;
}

template <typename At>
__device__ __forceinline__ float largest(u32 count, At at) {
    float most = -3.0e38f;
#pragma unroll 1
    for (u32 i = lane(); i < count; i += 32) {
        const float x = at(i);
        most = x > most ? x : most;
    }
#pragma unroll
    for (u32 distance = 16; distance; distance /= 2) {
        const float x = __shfl_xor_sync(~0u, most, distance);
        most = x > most ? x : most;
    }
    return most;
}

// A layer of this name: `in` has its inputs one after the other, and each block has `stride` numbers for its outputs.
#define LAYER(name)                                                                                                     \
    __device__ __forceinline__ void name##_of(const float *in, float *out);                                             \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const float *in, float *out, u32 stride, u32 *where) {   \
        if (threadIdx.x == 0) {                                                                                         \
            u32 multiprocessor;                                                                                         \
            asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));                                                 \
            where[blockIdx.x] = multiprocessor;                                                                         \
        }                                                                                                               \
        name##_of(in, out + (u64)blockIdx.x * stride);                                                                  \
    }                                                                                                                   \
    __device__ __forceinline__ void name##_of(const float *in, float *out)

// ---- Linear: y = x w^T + b by the tensor cores, in bf16 with sums in single precision. ----

// A matrix, by the steps to the next row and to the next number that is summed over.
struct Matrix {
    const float *numbers;
    u32 row, along;

    // Two neighbours as a pair of bf16, which their upper halves are: the inputs have no more digits.
    __device__ __forceinline__ u32 pair(u32 r, u32 k) const {
        const float *at = numbers + r * row + k * along;
        return (__float_as_uint(at[0]) >> 16) | (__float_as_uint(at[along]) & 0xffff0000u);
    }
};

// c = a b^T + bias, of `rows` x `columns`.
__device__ __forceinline__ void product(Matrix a, Matrix b, const float *bias, float *c, u32 rows, u32 columns, u32 depth) {
    const u32 warp = threadIdx.x / 32, group = lane() / 4, two = lane() % 4 * 2, across = columns / 8;
#pragma unroll 1
    for (u32 tile = warp; tile < rows / 16 * across; tile += WARPS) {
        const u32 row = tile / across * 16 + group, column = tile % across * 8;
        float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
        for (u32 k = two; k < depth; k += 16) {
            asm volatile(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                : "r"(a.pair(row, k)), "r"(a.pair(row + 8, k)), "r"(a.pair(row, k + 8)), "r"(a.pair(row + 8, k + 8)),
                  "r"(b.pair(column + group, k)), "r"(b.pair(column + group, k + 8)));
        }
        const float left = bias ? bias[column + two] : 0.0f, right = bias ? bias[column + two + 1] : 0.0f;
        float *to = c + row * columns + column + two;
        to[0] = d[0] + left;
        to[1] = d[1] + right;
        to[8 * columns] = d[2] + left;
        to[8 * columns + 1] = d[3] + right;
    }
}

LAYER(linear_forward) {
    const float *x = in, *w = x + LINEAR_ROWS * LINEAR_INPUTS, *b = w + LINEAR_OUTPUTS * LINEAR_INPUTS;
    product({x, LINEAR_INPUTS, 1}, {w, LINEAR_INPUTS, 1}, b, out, LINEAR_ROWS, LINEAR_OUTPUTS, LINEAR_INPUTS);
}

LAYER(linear_backward) {
    const float *x = in, *w = x + LINEAR_ROWS * LINEAR_INPUTS, *dy = w + LINEAR_OUTPUTS * LINEAR_INPUTS + LINEAR_OUTPUTS;
    float *dx = out, *dw = dx + LINEAR_ROWS * LINEAR_INPUTS, *db = dw + LINEAR_OUTPUTS * LINEAR_INPUTS;
    product({dy, LINEAR_OUTPUTS, 1}, {w, 1, LINEAR_INPUTS}, 0, dx, LINEAR_ROWS, LINEAR_INPUTS, LINEAR_OUTPUTS);
    product({dy, 1, LINEAR_OUTPUTS}, {x, 1, LINEAR_INPUTS}, 0, dw, LINEAR_OUTPUTS, LINEAR_INPUTS, LINEAR_ROWS);
    for (u32 i = threadIdx.x; i < LINEAR_OUTPUTS; i += THREADS) {
        float sum = 0.0f;
#pragma unroll 1
        for (u32 row = 0; row < LINEAR_ROWS; row++) sum = sum + dy[row * LINEAR_OUTPUTS + i];
        db[i] = sum;
    }
}

// ---- Convolution of images, 3 x 3, with a border of zeros. ----

// Calls `take(place in the plane at (y + ky - 1, x + kx - 1), place in the kernel)` for those inside the plane.
template <typename Take>
__device__ __forceinline__ void around(u32 y, u32 x, Take take) {
#pragma unroll 1
    for (u32 k = 0; k < 9; k++) {
        const u32 row = y + k / 3 - 1, column = x + k % 3 - 1;
        if (row < CONV_SIDE && column < CONV_SIDE) take(row * CONV_SIDE + column, k);
    }
}

LAYER(conv2d_forward) {
    const float *x = in, *w = x + CONV_IMAGES * CONV_INPUTS * CONV_PLANE, *b = w + CONV_OUTPUTS * CONV_INPUTS * 9;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < CONV_IMAGES * CONV_OUTPUTS * CONV_PLANE; i += THREADS) {
        const u32 image = i / (CONV_OUTPUTS * CONV_PLANE), o = i / CONV_PLANE % CONV_OUTPUTS, at = i % CONV_PLANE;
        float sum = b[o];
#pragma unroll 1
        for (u32 c = 0; c < CONV_INPUTS; c++) {
            const float *plane = x + (image * CONV_INPUTS + c) * CONV_PLANE, *kernel = w + (o * CONV_INPUTS + c) * 9;
            around(at / CONV_SIDE, at % CONV_SIDE, [&](u32 place, u32 k) { sum = __fmaf_rn(plane[place], kernel[k], sum); });
        }
        out[i] = sum;
    }
}

LAYER(conv2d_backward) {
    const float *x = in, *w = x + CONV_IMAGES * CONV_INPUTS * CONV_PLANE, *dy = w + CONV_OUTPUTS * CONV_INPUTS * 9 + CONV_OUTPUTS;
    float *dx = out, *dw = dx + CONV_IMAGES * CONV_INPUTS * CONV_PLANE, *db = dw + CONV_OUTPUTS * CONV_INPUTS * 9;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < CONV_IMAGES * CONV_INPUTS * CONV_PLANE; i += THREADS) {
        const u32 image = i / (CONV_INPUTS * CONV_PLANE), c = i / CONV_PLANE % CONV_INPUTS, at = i % CONV_PLANE;
        float sum = 0.0f;
#pragma unroll 1
        for (u32 o = 0; o < CONV_OUTPUTS; o++) {
            const float *plane = dy + (image * CONV_OUTPUTS + o) * CONV_PLANE, *kernel = w + (o * CONV_INPUTS + c) * 9;
            // An output sees this input through the kernel turned around.
            around(at / CONV_SIDE, at % CONV_SIDE, [&](u32 place, u32 k) { sum = __fmaf_rn(plane[place], kernel[8 - k], sum); });
        }
        dx[i] = sum;
    }
#pragma unroll 1
    for (u32 i = threadIdx.x; i < CONV_OUTPUTS * CONV_INPUTS * 9; i += THREADS) {
        const u32 o = i / (CONV_INPUTS * 9), c = i / 9 % CONV_INPUTS, ky = i % 9 / 3, kx = i % 3;
        float sum = 0.0f;
#pragma unroll 1
        for (u32 at = 0; at < CONV_IMAGES * CONV_PLANE; at++) {
            const u32 image = at / CONV_PLANE, row = at % CONV_PLANE / CONV_SIDE + ky - 1, column = at % CONV_SIDE + kx - 1;
            if (row < CONV_SIDE && column < CONV_SIDE) {
                sum = __fmaf_rn(dy[(image * CONV_OUTPUTS + o) * CONV_PLANE + at % CONV_PLANE],
                                x[(image * CONV_INPUTS + c) * CONV_PLANE + row * CONV_SIDE + column], sum);
            }
        }
        dw[i] = sum;
    }
    for (u32 o = threadIdx.x; o < CONV_OUTPUTS; o += THREADS) {
        float sum = 0.0f;
#pragma unroll 1
        for (u32 at = 0; at < CONV_IMAGES * CONV_PLANE; at++) {
            sum = sum + dy[(at / CONV_PLANE * CONV_OUTPUTS + o) * CONV_PLANE + at % CONV_PLANE];
        }
        db[o] = sum;
    }
}

// ---- Layer norm, and root-mean-square norm, which takes no mean off. A warp has a row. ----

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

// ---- Softmax and cross-entropy. A warp has a row. ----

struct Exponents { float most, sum; };

__device__ __forceinline__ Exponents exponents(const float *x, u32 count) {
    const float most = largest(count, [&](u32 i) { return x[i]; });
    return Exponents{most, summed(count, [&](float sum, u32 i) { return sum + exponential(x[i] - most); })};
}

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

// Of the mean loss over all rows.
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

// ---- GELU by its tanh form, written as x / (1 + exp(-2u)), where nothing cancels. ----

// u = sqrt(2 / pi) (x + 0.044715 x^3); these are of 2u.
#define GELU_LINEAR 0x1.988454p+0f
#define GELU_CUBIC 0x1.2444f2p-4f

struct Gate { float open, slope; };

__device__ __forceinline__ Gate gate(float x) {
    const float square = x * x, u = x * __fmaf_rn(square, GELU_CUBIC, GELU_LINEAR);
    return Gate{__fdiv_rn(1.0f, 1.0f + exponential(-u)), __fmaf_rn(square, 3.0f * GELU_CUBIC, GELU_LINEAR)};
}

LAYER(gelu_forward) {
#pragma unroll 1
    for (u32 i = threadIdx.x; i < GELU_NUMBERS; i += THREADS) out[i] = in[i] * gate(in[i]).open;
}

LAYER(gelu_backward) {
    const float *dy = in + GELU_NUMBERS;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < GELU_NUMBERS; i += THREADS) {
        const Gate at = gate(in[i]);
        out[i] = dy[i] * __fmaf_rn(in[i] * at.slope, at.open * (1.0f - at.open), at.open);
    }
}

// ---- Causal attention: softmax(q k^T / sqrt(width)) v, where a token sees itself and those before it. ----

#define ATTENTION_SCALE 0x1.6a09e6p-3f
#define ATTENTION_NUMBERS (ATTENTION_HEADS * ATTENTION_TOKENS * ATTENTION_WIDTH)

__device__ __forceinline__ float inner(const float *a, const float *b) {
    float sum = 0.0f;
#pragma unroll 4
    for (u32 i = 0; i < ATTENTION_WIDTH; i++) sum = __fmaf_rn(a[i], b[i], sum);
    return sum;
}

// What share each token up to `token` has in it, by one warp; the rest are zeros.
__device__ __forceinline__ void shares(const float *q, const float *k, u32 token, float *share) {
    for (u32 j = lane(); j <= token; j += 32) {
        share[j] = inner(q + token * ATTENTION_WIDTH, k + j * ATTENTION_WIDTH) * ATTENTION_SCALE;
    }
    __syncwarp();
    const Exponents all = exponents(share, token + 1);
    __syncwarp();
    for (u32 j = lane(); j < ATTENTION_TOKENS; j += 32) {
        share[j] = j <= token ? __fdiv_rn(exponential(share[j] - all.most), all.sum) : 0.0f;
    }
    __syncwarp();
}

LAYER(attention_forward) {
    __shared__ float share[WARPS][ATTENTION_TOKENS];
    const u32 warp = threadIdx.x / 32;
#pragma unroll 1
    for (u32 row = warp; row < ATTENTION_HEADS * ATTENTION_TOKENS; row += WARPS) {
        const u32 token = row % ATTENTION_TOKENS;
        const float *q = in + (row - token) * ATTENTION_WIDTH, *k = q + ATTENTION_NUMBERS, *v = k + ATTENTION_NUMBERS;
        shares(q, k, token, share[warp]);
        for (u32 i = lane(); i < ATTENTION_WIDTH; i += 32) {
            float sum = 0.0f;
#pragma unroll 1
            for (u32 j = 0; j <= token; j++) sum = __fmaf_rn(share[warp][j], v[j * ATTENTION_WIDTH + i], sum);
            out[row * ATTENTION_WIDTH + i] = sum;
        }
        __syncwarp();
    }
}

LAYER(attention_backward) {
    __shared__ float share[ATTENTION_TOKENS][ATTENTION_TOKENS];
    __shared__ float score[ATTENTION_TOKENS][ATTENTION_TOKENS];
#pragma unroll 1
    for (u32 head = 0; head < ATTENTION_HEADS; head++) {
        const u32 first = head * ATTENTION_TOKENS * ATTENTION_WIDTH;
        const float *q = in + first, *k = q + ATTENTION_NUMBERS, *v = k + ATTENTION_NUMBERS, *dy = v + ATTENTION_NUMBERS;
        float *dq = out + first, *dk = dq + ATTENTION_NUMBERS, *dv = dk + ATTENTION_NUMBERS;
#pragma unroll 1
        for (u32 token = threadIdx.x / 32; token < ATTENTION_TOKENS; token += WARPS) {
            shares(q, k, token, share[token]);
            for (u32 j = lane(); j < ATTENTION_TOKENS; j += 32) {
                score[token][j] = j <= token ? inner(dy + token * ATTENTION_WIDTH, v + j * ATTENTION_WIDTH) : 0.0f;
            }
            __syncwarp();
            const float along = summed(token + 1, [&](float sum, u32 j) { return __fmaf_rn(share[token][j], score[token][j], sum); });
            for (u32 j = lane(); j <= token; j += 32) {
                score[token][j] = share[token][j] * (score[token][j] - along) * ATTENTION_SCALE;
            }
        }
        __syncthreads();
#pragma unroll 1
        for (u32 i = threadIdx.x; i < ATTENTION_TOKENS * ATTENTION_WIDTH; i += THREADS) {
            const u32 token = i / ATTENTION_WIDTH, column = i % ATTENTION_WIDTH;
            float for_q = 0.0f, for_k = 0.0f, for_v = 0.0f;
#pragma unroll 1
            for (u32 j = 0; j <= token; j++) for_q = __fmaf_rn(score[token][j], k[j * ATTENTION_WIDTH + column], for_q);
#pragma unroll 1
            for (u32 j = token; j < ATTENTION_TOKENS; j++) {
                for_k = __fmaf_rn(score[j][token], q[j * ATTENTION_WIDTH + column], for_k);
                for_v = __fmaf_rn(share[j][token], dy[j * ATTENTION_WIDTH + column], for_v);
            }
            dq[i] = for_q;
            dk[i] = for_k;
            dv[i] = for_v;
        }
        __syncthreads();
    }
}

// ---- Embedding: rows of a table by the words of a text; backward, each row gathers from the places of its word. ----

LAYER(embedding_forward) {
    const float *words = in, *table = words + EMBEDDING_TOKENS;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < EMBEDDING_TOKENS * EMBEDDING_WIDTH; i += THREADS) {
        out[i] = table[(u32)words[i / EMBEDDING_WIDTH] * EMBEDDING_WIDTH + i % EMBEDDING_WIDTH];
    }
}

LAYER(embedding_backward) {
    const float *words = in, *dy = words + EMBEDDING_TOKENS + EMBEDDING_WORDS * EMBEDDING_WIDTH;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < EMBEDDING_WORDS * EMBEDDING_WIDTH; i += THREADS) {
        const u32 word = i / EMBEDDING_WIDTH, column = i % EMBEDDING_WIDTH;
        float sum = 0.0f;
#pragma unroll 4
        for (u32 token = 0; token < EMBEDDING_TOKENS; token++) {
            if ((u32)words[token] == word) sum = sum + dy[token * EMBEDDING_WIDTH + column];
        }
        out[i] = sum;
    }
}

// ---- The tenth step of Adam. ----

#define ADAM_RATE 0x1.0624dep-10f
#define ADAM_BETA1 0x1.ccccccp-1f
#define ADAM_BETA2 0x1.ff7ceep-1f
// 1 - beta.
#define ADAM_REST1 0x1.99999ap-4f
#define ADAM_REST2 0x1.0624dep-10f
#define ADAM_EPSILON 0x1.5798eep-27f
// 1 - beta^10.
#define ADAM_BIAS1 0x1.4d7a04p-1f
#define ADAM_BIAS2 0x1.463598p-7f

LAYER(adam_step) {
    const float *w = in, *g = w + ADAM_NUMBERS, *m = g + ADAM_NUMBERS, *v = m + ADAM_NUMBERS;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < ADAM_NUMBERS; i += THREADS) {
        const float first = __fmaf_rn(m[i], ADAM_BETA1, ADAM_REST1 * g[i]);
        const float second = __fmaf_rn(v[i], ADAM_BETA2, ADAM_REST2 * g[i] * g[i]);
        const float root = __fsqrt_rn(__fdiv_rn(second, ADAM_BIAS2)) + ADAM_EPSILON;
        out[i] = __fmaf_rn(-ADAM_RATE, __fdiv_rn(__fdiv_rn(first, ADAM_BIAS1), root), w[i]);
        out[ADAM_NUMBERS + i] = first;
        out[2 * ADAM_NUMBERS + i] = second;
    }
}

// ---- What is compared. ----

// One number for all the bits of a replica's outputs and their places; a block each. A single wrong bit always changes
// it: what one place adds is different for each value there. Integers are added, so the order is free.
extern "C" __global__ void __launch_bounds__(THREADS) fingerprint(const u32 *out, u32 stride, u32 count, u64 *prints) {
    __shared__ u64 sums[THREADS];
    u64 sum = 0;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
        u64 x = ((u64)i << 32) | out[(u64)blockIdx.x * stride + i];
        x ^= x >> 32;
        x *= 0xd6e8feb86659fd93ull;
        x ^= x >> 32;
        x *= 0xd6e8feb86659fd93ull;
        x ^= x >> 32;
        sum += x;
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (u32 half = THREADS / 2; half; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) prints[blockIdx.x] = sums[0];
}

// Plants errors for the negative control and for trials, one a thread: four words for each, the place among all
// replicas' outputs in two of them, then the kind (0 the number is lost, 1 one bit is turned, 2 NaN), then which bit.
// `changed` says whether the place had another value.
extern "C" __global__ void plant_outputs(u32 *out, const uint4 *errors, u32 *changed, u32 count) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const uint4 error = errors[i];
    u32 *at = out + (((u64)error.y << 32) | error.x);
    const u32 was = *at;
    switch (error.z) {
    case 0: *at = 0; break;
    case 1: *at = was ^ (1u << (error.w & 31)); break;
    default: *at = 0x7fc00000u;
    }
    changed[i] = *at != was;
}
