// Layers that multiply: linear, convolution, attention. crates/gpu/src/dl/layers/exact/matrices.rs has the same in Rust.

// ---- Linear: y = x w^T + b on the tensor cores, in bf16 with sums in single precision. ----

// A matrix, with the strides to the next row and to the next number that is summed over.
struct Matrix {
    const float *numbers;
    u32 row, along;

    // Two neighbours as a pair of bf16, which are their upper halves: the inputs have no more digits.
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

// ---- Convolution of images, 3 x 3, with zero padding. ----

// Calls `take(position in the plane at (y + ky - 1, x + kx - 1), position in the kernel)` for those inside the plane.
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
            // An output sees this input through the flipped kernel.
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

// ---- Causal attention: softmax(q k^T / sqrt(width)) v, where a token sees itself and those before it. ----

#define ATTENTION_SCALE 0x1.6a09e6p-3f
#define ATTENTION_NUMBERS (ATTENTION_HEADS * ATTENTION_TOKENS * ATTENTION_WIDTH)

__device__ __forceinline__ float inner(const float *a, const float *b) {
    float sum = 0.0f;
#pragma unroll 4
    for (u32 i = 0; i < ATTENTION_WIDTH; i++) sum = __fmaf_rn(a[i], b[i], sum);
    return sum;
}

// Computes the attention weights of the tokens up to `token`, with one warp; the rest are zeros.
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
