// Elementwise layers: GELU, embedding, Adam. crates/gpu/src/dl/layers/exact/elementwise.rs has the same in Rust.

// ---- GELU in its tanh form, written as x / (1 + exp(-2u)), where nothing cancels. ----

// u = sqrt(2 / pi) (x + 0.044715 x^3); these constants are for 2u.
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

// ---- Embedding: rows of a table by the words of a text; backward, each row sums over the positions of its word. ----

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
