// arch: compute_80
// Matrix products in single precision on the ordinary units of any GPU: C = A * B^T, A of m rows, B of n rows, both
// with `k_bytes` bytes of numbers in a row. A block computes 128 x 128 numbers, eight by eight per thread.

typedef unsigned int u32;
typedef unsigned long long u64;

#define TILE 128

// The multiprocessor of a tile, and its time in that multiprocessor's clock ticks.
struct TileRecord { u32 multiprocessor, ticks; };

#define DEPTH 16
#define PITCH (TILE + 4)

extern "C" __global__ void __launch_bounds__(256, 2)
    product_of_matrices(const float *a, const float *b, float *c, TileRecord *records, u32 m, u32 n, u32 k_bytes) {
    __shared__ __align__(16) float x[2][DEPTH][PITCH];
    __shared__ __align__(16) float y[2][DEPTH][PITCH];
    const u32 k = k_bytes / 4, columns = n / TILE, tiles = m / TILE * columns, steps = k / DEPTH;
    const u32 row = threadIdx.x / 2, part = threadIdx.x % 2 * 8, ty = threadIdx.x / 16 * 4, tx = threadIdx.x % 16 * 4;
#pragma unroll 1
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const long long began = clock64();
        const u32 tile_m = tile / columns, tile_n = tile % columns;
        const float4 *from_a = (const float4 *)(a + (u64)(tile_m * TILE + row) * k + part);
        const float4 *from_b = (const float4 *)(b + (u64)(tile_n * TILE + row) * k + part);
        float d[8][8] = {};
        float4 next_a[2] = {from_a[0], from_a[1]}, next_b[2] = {from_b[0], from_b[1]};
#pragma unroll 1
        for (u32 step = 0; step < steps; step++) {
            float(*xs)[PITCH] = x[step % 2], (*ys)[PITCH] = y[step % 2];
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                xs[part + i * 4 + 0][row] = next_a[i].x;
                xs[part + i * 4 + 1][row] = next_a[i].y;
                xs[part + i * 4 + 2][row] = next_a[i].z;
                xs[part + i * 4 + 3][row] = next_a[i].w;
                ys[part + i * 4 + 0][row] = next_b[i].x;
                ys[part + i * 4 + 1][row] = next_b[i].y;
                ys[part + i * 4 + 2][row] = next_b[i].z;
                ys[part + i * 4 + 3][row] = next_b[i].w;
            }
            __syncthreads();
            if (step + 1 < steps) {
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    next_a[i] = from_a[(step + 1) * (DEPTH / 4) + i];
                    next_b[i] = from_b[(step + 1) * (DEPTH / 4) + i];
                }
            }
#pragma unroll
            for (u32 depth = 0; depth < DEPTH; depth++) {
                const float4 p = *(const float4 *)&xs[depth][ty], q = *(const float4 *)&xs[depth][ty + 64];
                const float4 r = *(const float4 *)&ys[depth][tx], s = *(const float4 *)&ys[depth][tx + 64];
                const float left[8] = {p.x, p.y, p.z, p.w, q.x, q.y, q.z, q.w}, right[8] = {r.x, r.y, r.z, r.w, s.x, s.y, s.z, s.w};
#pragma unroll
                for (u32 i = 0; i < 8; i++) {
#pragma unroll
                    for (u32 j = 0; j < 8; j++) d[i][j] = __fmaf_rn(left[i], right[j], d[i][j]);
                }
            }
        }
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            const u32 line = tile_m * TILE + ty + i % 4 + i / 4 * 64;
            float *to = c + (u64)line * n + tile_n * TILE + tx;
            *(float4 *)to = make_float4(d[i][0], d[i][1], d[i][2], d[i][3]);
            *(float4 *)(to + 64) = make_float4(d[i][4], d[i][5], d[i][6], d[i][7]);
        }
        // The next tile starts in the half of shared memory that slower warps may still read.
        __syncthreads();
        if (threadIdx.x == 0 && records) {
            u32 multiprocessor;
            asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
            records[tile] = TileRecord{multiprocessor, (u32)(clock64() - began)};
        }
    }
}
