// The decode step of a few sequences as one persistent kernel: every layer, the head and the next token.
//
// Each warp streams its share of all weight matrices, in order, from global memory through a ring of its own in shared
// memory. The stream does not depend on the activations, so it runs ahead across phases: while blocks wait for each
// other, normalize the input or attend, the weights of the next matrix arrive. A layer has five phases, separated by
// barriers of the whole grid:
//
//     qkv   norm, projection          -> qkv
//     attn  norms, rotation, KV cache -> attended
//     out   projection, residual      -> x
//     fc    norm, projection, act     -> hidden
//     down  projection, residual      -> x
//
// The code before this file defines the shapes of the model (HEADS, WIDTH, ...); see `cuda_decoder.py`. Rounding follows
// the model: results of norms, projections and activations are rounded to its dtype, sums are in fp32.

typedef unsigned int u32;
typedef long long i64;

#define FP32 0
#define BF16 1
#define FP16 2
#define DENSE 0
#define INT8 1
#define FP8 2
#define INT4 3
#define NO_NORM 0
#define LAYER_NORM 1
#define RMS_NORM 2
#define GELU 0
#define GELU_TANH 1
#define SILU 2
#define RELU2 3

#if DTYPE == FP32
typedef float T;
#else
typedef unsigned short T;
#endif

#define THREADS (WARPS * 32)
#define ALL_LANES 0xffffffffu
constexpr int VEC = 16 / sizeof(T);  // elements of 16 bytes
constexpr int TOTAL_WARPS = BLOCKS * WARPS;
constexpr int GROUP = HEADS / KV_HEADS;
constexpr int HEADS_PER_UNIT = GROUP % 4 == 0 ? 4 : GROUP % 3 == 0 ? 3 : GROUP % 2 == 0 ? 2 : 1;  // query heads that one block attends with
constexpr int UNITS = HEADS / HEADS_PER_UNIT;
constexpr int MAX_SPLITS = BLOCKS / (UNITS * BATCH) < 1 ? 1 : (BLOCKS / (UNITS * BATCH) > 32 ? 32 : BLOCKS / (UNITS * BATCH));

// The matrices of a layer in the order of the stream, and the head.
enum Kind { QKV, OUT, FC, DOWN, HEAD };

constexpr int rows_of(int kind) {
  return kind == QKV    ? (HEADS + 2 * KV_HEADS) * HEAD_SIZE
         : kind == FC   ? HIDDEN * (GATED ? 2 : 1)
         : kind == HEAD ? VOCAB
                        : WIDTH;
}
constexpr int columns_of(int kind) { return kind == OUT ? HEADS * HEAD_SIZE : kind == DOWN ? HIDDEN : WIDTH; }
constexpr int format_of(int kind) {
  return kind == QKV ? QKV_FORMAT : kind == OUT ? OUT_FORMAT : kind == FC ? FC_FORMAT : kind == DOWN ? DOWN_FORMAT : HEAD_FORMAT;
}
// Columns that share a scale, for int4.
constexpr int scale_group_of(int kind) {
  return kind == QKV ? QKV_GROUP : kind == OUT ? OUT_GROUP : kind == FC ? FC_GROUP : kind == DOWN ? DOWN_GROUP : HEAD_GROUP;
}
// Weights in 16 bytes.
constexpr int weights_per_load(int format) { return format == DENSE ? VEC : format == INT4 ? 32 : 16; }
constexpr int row_bytes_of(int kind) { return columns_of(kind) * 16 / weights_per_load(format_of(kind)); }
constexpr int chunks_of(int kind) { return (row_bytes_of(kind) + 511) / 512; }  // 512 bytes: 16 per lane
// A group of rows is the unit of work of a warp.
constexpr int groups_of(int kind) { return (rows_of(kind) + GROUP_ROWS - 1) / GROUP_ROWS; }

constexpr int SCALE_BYTES = QKV_FORMAT == INT4 || OUT_FORMAT == INT4 || FC_FORMAT == INT4 || DOWN_FORMAT == INT4 || HEAD_FORMAT == INT4 ? 128 : 0;
constexpr int SLOT_BYTES = GROUP_ROWS * (512 + SCALE_BYTES);
constexpr int MAX_COLUMNS_RAW = HIDDEN > WIDTH ? HIDDEN : WIDTH;
constexpr int MAX_COLUMNS = ((MAX_COLUMNS_RAW > HEADS * HEAD_SIZE ? MAX_COLUMNS_RAW : HEADS * HEAD_SIZE) + 1023) / 1024 * 1024;

// Pointers, as 64-bit integers; the same order as in `cuda_decoder.py`.
struct Layer {
  const char* weight[4];
  const char* scales[4];
  const T* bias[4];
  const T* norm_weight[2];
  const T* norm_bias[2];
  const T* query_norm;
  const T* key_norm;
  const T* skip;
  const T* value_mix;
  const T* value_embedding;  // of the tokens (batch, kv heads * head size)
  T* keys;
  T* values;
  i64 window;  // 0: none
};
struct Model {
  const char* head;
  const char* head_scales;
  const T* head_bias;
  const T* norm_weight;
  const T* norm_bias;
  const T* token_embedding;     // null: x is given
  const T* position_embedding;
  const float* frequencies;     // null: no rotation
  T* x;
  const T* x0;
  T* qkv;
  T* attended;
  T* hidden;
  float* logits;
  int* argmax;
  float* partial_outputs;
  float* partial_sums;   // maximum and sum of each part
  float* max_logits;
  int* max_tokens;
  u32* counters;         // barrier, finished blocks, finished parts of each unit
};

constexpr int TABLE_BYTES = (sizeof(Model) + LAYERS * sizeof(Layer) + 15) / 16 * 16;
constexpr int INPUT_BYTES = BATCH * MAX_COLUMNS * (int)sizeof(T);
constexpr int ATTENTION_BYTES = WARPS * (HEAD_SIZE + 2) * 4;
constexpr int WORK_BYTES = ((INPUT_BYTES > ATTENTION_BYTES ? INPUT_BYTES : ATTENTION_BYTES) + 15) / 16 * 16;
constexpr int SUMS_BYTES = SCALE_BYTES ? BATCH * MAX_COLUMNS / 32 * 4 : 0;
constexpr int SCRATCH_BYTES = 64 * 4 * 2;
constexpr int RING_BYTES = SHARED_BYTES - TABLE_BYTES - WORK_BYTES - SUMS_BYTES - SCRATCH_BYTES;
constexpr int SLOTS_THAT_FIT = RING_BYTES / WARPS / SLOT_BYTES;
constexpr int SLOTS = SLOTS_THAT_FIT > 32 ? 32 : SLOTS_THAT_FIT;
static_assert(SLOTS >= 2, "not enough shared memory");

#ifdef __CUDACC_RTC__
extern __shared__ __align__(16) char dynamic_shared_memory[];
__device__ __forceinline__ char* shared_memory() { return dynamic_shared_memory; }
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy_async_16(void* shared, const void* global, u32 bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_async_4(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ u32 load_acquire(const u32* p) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
// Add 1 after everything that the threads of this block wrote before their last barrier; the old value.
__device__ __forceinline__ u32 count_release(u32* p) {
  u32 old;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(old) : "l"(p) : "memory");
  return old;
}
// Loads of what other blocks wrote bypass L1.
__device__ __forceinline__ uint4 load_16(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ float load_float(const float* p) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u32 byte_permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
__device__ __forceinline__ float half_to_float(unsigned short h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}
__device__ __forceinline__ unsigned short float_to_half(float f) {
  unsigned short h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
#else
static u32 count_release(u32* p) { return atomicAdd(p, 1u); }
static uint4 load_16(const void* p) { return *(const uint4*)p; }
static float load_float(const float* p) { return *p; }
static u32 byte_permute(u32 a, u32 b, u32 selector) {
  unsigned long long both = (unsigned long long)b << 32 | a;
  u32 out = 0;
  for (int i = 0; i < 4; i++) out |= (u32)(both >> ((selector >> 4 * i & 7) * 8) & 0xff) << 8 * i;
  return out;
}
static float half_to_float(unsigned short h) {
  _Float16 f;
  __builtin_memcpy(&f, &h, 2);
  return (float)f;
}
static unsigned short float_to_half(float f) {
  _Float16 f16 = (_Float16)f;
  unsigned short h;
  __builtin_memcpy(&h, &f16, 2);
  return h;
}
#endif

__device__ __forceinline__ float bf16_to_float(u32 bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ float to_float(T value) {
#if DTYPE == FP32
  return value;
#elif DTYPE == BF16
  return bf16_to_float(value);
#else
  return half_to_float(value);
#endif
}

__device__ __forceinline__ T from_float(float value) {
#if DTYPE == FP32
  return value;
#elif DTYPE == BF16
  u32 bits = __float_as_uint(value);
  if (value != value) return 0x7fff;
  return (T)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#else
  return float_to_half(value);
#endif
}

__device__ __forceinline__ float rounded(float value) { return to_float(from_float(value)); }

// 16 bytes as VEC numbers.
__device__ __forceinline__ void unpack(const uint4& v, float* out) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
#if DTYPE == FP32
    out[i] = __uint_as_float(words[i]);
#elif DTYPE == BF16
    out[2 * i] = bf16_to_float(words[i]);
    out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
#else
    out[2 * i] = half_to_float((unsigned short)words[i]);
    out[2 * i + 1] = half_to_float((unsigned short)(words[i] >> 16));
#endif
  }
}

__device__ __forceinline__ uint4 pack(const float* in) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
#if DTYPE == FP32
    words[i] = __float_as_uint(in[i]);
#else
    words[i] = (u32)from_float(in[2 * i]) | (u32)from_float(in[2 * i + 1]) << 16;
#endif
  }
  return uint4{words[0], words[1], words[2], words[3]};
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) v += __shfl_xor_sync(ALL_LANES, v, offset);
  return v;
}

// The nearest float8_e4m3fn; |value| <= 448.
__device__ __forceinline__ float round_to_fp8(float value) {
  u32 bits = __float_as_uint(value);
  float normal = __uint_as_float((bits + 0x7ffff + (bits >> 20 & 1)) & 0xfff00000u);
  float subnormal = ((value * 512.0f + 12582912.0f) - 12582912.0f) * (1.0f / 512.0f);
  return fabsf(value) < 0.015625f ? subnormal : normal;
}

__device__ __forceinline__ float activate(float x) {
#if ACTIVATION == GELU
  return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
#elif ACTIVATION == GELU_TANH
  return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
#elif ACTIVATION == SILU
  return x / (1.0f + expf(-x));
#else
  return x > 0.0f ? x * x : 0.0f;
#endif
}

// The state of a block, shared by the phases.
struct Block {
  const Model* model;
  const Layer* layers;
  char* work;        // the input of a matrix, or partial results of attention
  float* input_sums; // per 32 columns, for int4
  float* scratch;
  int scratch_half;
  u32 barriers;      // passed so far

  __device__ __forceinline__ float reduce(float v, bool is_max) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float* out = scratch + scratch_half * 64;
    scratch_half ^= 1;
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) {
      float other = __shfl_xor_sync(ALL_LANES, v, offset);
      v = is_max ? fmaxf(v, other) : v + other;
    }
    if (lane == 0) out[warp] = v;
    __syncthreads();
    v = out[lane % WARPS];
#pragma unroll
    for (int offset = WARPS / 2; offset; offset >>= 1) {
      float other = __shfl_xor_sync(ALL_LANES, v, offset);
      v = is_max ? fmaxf(v, other) : v + other;
    }
    return v;
  }

  // Everything that this block wrote is visible to the blocks that pass the next `wait`.
  __device__ __forceinline__ void arrive() {
    __syncthreads();
    if (threadIdx.x == 0) count_release(model->counters);
    barriers += 1;
  }

  __device__ __forceinline__ void wait() {
    if (threadIdx.x == 0 && barriers) {
      while (load_acquire(model->counters) < barriers * BLOCKS) {
      }
    }
    __syncthreads();
  }
};

// The weights of a warp, in the order in which it needs them.
struct Stream {
  const Layer* layers;
  const Model* model;
  char* ring;  // of this lane
  const char* rows[GROUP_ROWS];
  const char* scales[GROUP_ROWS];
  int kind, layer, group, chunk, write, read;
  bool done;

  __device__ __forceinline__ static int row_of(int kind, int group, int r) {
    if (GATED && kind == FC) {  // gates, then as many others
      constexpr int HALF = GROUP_ROWS / 2;
      int row = group * HALF + r % HALF;
      return (row < HIDDEN ? row : HIDDEN - 1) + (r < HALF ? 0 : HIDDEN);
    }
    int row = group * GROUP_ROWS + r;
    return row < rows_of(kind) ? row : rows_of(kind) - 1;
  }

  __device__ __forceinline__ void start_group(int first) {
    while (group >= groups_of(kind)) {
      group = first;
      if (kind == HEAD) {
        done = true;
        return;
      }
      kind += 1;
      if (kind == HEAD && layer + 1 < LAYERS) {
        kind = QKV;
        layer += 1;
      }
    }
    const char* weight = kind == HEAD ? model->head : layers[layer].weight[kind];
#pragma unroll
    for (int r = 0; r < GROUP_ROWS; r++) rows[r] = weight + (i64)row_of(kind, group, r) * row_bytes_of(kind);
    if (SCALE_BYTES && format_of(kind) == INT4) {
      const char* all = kind == HEAD ? model->head_scales : layers[layer].scales[kind];
      const int per_row = columns_of(kind) / scale_group_of(kind);
#pragma unroll
      for (int r = 0; r < GROUP_ROWS; r++) scales[r] = all + (i64)row_of(kind, group, r) * per_row * sizeof(T);
    }
  }

  // Start to copy the next chunk.
  __device__ __forceinline__ void load() {
    if (!done) {
      const int lane = threadIdx.x % 32;
      char* slot = ring + write * SLOT_BYTES;
      const int offset = chunk * 512 + lane * 16, left = row_bytes_of(kind) - offset;
      const u32 bytes = left >= 16 ? 16 : left > 0 ? left : 0;
#pragma unroll
      for (int r = 0; r < GROUP_ROWS; r++) copy_async_16(slot + r * 512 + lane * 16, rows[r] + (bytes ? offset : 0), bytes);
      if (SCALE_BYTES && format_of(kind) == INT4) {
        const int column = offset * 2 < columns_of(kind) ? offset * 2 : 0;
        const int index = column / scale_group_of(kind);
#pragma unroll
        for (int r = 0; r < GROUP_ROWS; r++) {
          const i64 address = (i64)(scales[r] + index * sizeof(T));
          copy_async_4(slot + GROUP_ROWS * 512 + r * 128 + lane * 4, (const void*)(address & ~(i64)3));
        }
      }
      if (++chunk == chunks_of(kind)) {
        chunk = 0;
        group += TOTAL_WARPS;
        start_group((threadIdx.x / 32) * BLOCKS + blockIdx.x);
      }
    }
    commit_copies();
    write = write + 1 == SLOTS ? 0 : write + 1;
  }
};

// The input of a matrix in shared memory, normalized: lanes read 16 bytes each, next to one another. `given`: the input
// before the norm, (batch, columns) in global memory, or for the first matrix the embeddings of `tokens`.
template <int KIND>
__device__ __forceinline__ void load_input(
    Block& block, const T* given, const T* norm_weight, const T* norm_bias, const T* skip, const int* tokens,
    const int* starts) {
  constexpr int COLUMNS = columns_of(KIND), FORMAT = format_of(KIND);
  constexpr int W = weights_per_load(FORMAT), PIECES = W / VEC, CHUNK = 32 * W;
  constexpr int PADDED = (COLUMNS + CHUNK - 1) / CHUNK * CHUNK;
  constexpr int VECTORS = (PADDED / VEC + THREADS - 1) / THREADS;
  constexpr int NORM_OF = KIND == OUT || KIND == DOWN ? NO_NORM : NORM;
  const int thread = threadIdx.x;
  T* input = (T*)block.work;
  uint4 weights[VECTORS], biases[VECTORS];
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int column = (thread + i * THREADS) * VEC;
    if (NORM_OF != NO_NORM && column < COLUMNS) {
      if (norm_weight) weights[i] = *(const uint4*)(norm_weight + column);
      if (norm_bias) biases[i] = *(const uint4*)(norm_bias + column);
    }
  }
  block.wait();
#pragma unroll
  for (int b = 0; b < BATCH; b++) {
    float values[VECTORS][VEC];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      const int column = (thread + i * THREADS) * VEC;
#pragma unroll
      for (int e = 0; e < VEC; e++) values[i][e] = 0.0f;
      if (column >= COLUMNS) continue;
      if (KIND == QKV && tokens) {
        unpack(load_16(block.model->token_embedding + (i64)tokens[b] * WIDTH + column), values[i]);
        if (block.model->position_embedding) {
          float position[VEC];
          unpack(load_16(block.model->position_embedding + (i64)max(starts[b], 0) * WIDTH + column), position);
#pragma unroll
          for (int e = 0; e < VEC; e++) values[i][e] = rounded(values[i][e] + position[e]);
        }
        if (blockIdx.x == 0) *(uint4*)(block.model->x + b * WIDTH + column) = pack(values[i]);
      } else {
        unpack(load_16(given + (i64)b * COLUMNS + column), values[i]);
      }
      if (KIND == QKV && skip) {
        float first[VEC];
        unpack(load_16(block.model->x0 + (i64)b * COLUMNS + column), first);
#pragma unroll
        for (int e = 0; e < VEC; e++) values[i][e] = rounded(to_float(skip[0]) * values[i][e] + to_float(skip[1]) * first[e]);
      }
    }
    float mean = 0.0f, rstd = 1.0f;
    if (NORM_OF == LAYER_NORM) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < VECTORS; i++)
#pragma unroll
        for (int e = 0; e < VEC; e++) sum += values[i][e];
      mean = block.reduce(sum, false) / COLUMNS;
    }
    if (NORM_OF != NO_NORM) {
      float squares = 0.0f;
#pragma unroll
      for (int i = 0; i < VECTORS; i++)
#pragma unroll
        for (int e = 0; e < VEC; e++) {
          const float centered = (thread + i * THREADS) * VEC < COLUMNS ? values[i][e] - mean : 0.0f;
          squares += centered * centered;
        }
      rstd = 1.0f / sqrtf(block.reduce(squares, false) / COLUMNS + EPS);
    }
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      if ((thread + i * THREADS) * VEC >= COLUMNS) continue;
      float weight[VEC], bias[VEC];
      if (NORM_OF != NO_NORM && norm_weight) unpack(weights[i], weight);
      if (NORM_OF != NO_NORM && norm_bias) unpack(biases[i], bias);
#pragma unroll
      for (int e = 0; e < VEC; e++) {
        float value = values[i][e];
        if (NORM_OF != NO_NORM) {
          value = (value - mean) * rstd;
          if (norm_weight) value *= weight[e];
          if (norm_bias) value += bias[e];
          value = rounded(value);
        }
        values[i][e] = value;
        largest = fmaxf(largest, fabsf(value));
      }
    }
    if (FORMAT == FP8) {
      const float scale = fmaxf(block.reduce(largest, true) / 448.0f, 1.1754943508222875e-38f);
      if (thread == 0) block.scratch[48 + b] = scale;  // read after the barrier below, in `finish`
#pragma unroll
      for (int i = 0; i < VECTORS; i++)
#pragma unroll
        for (int e = 0; e < VEC; e++)
          values[i][e] = round_to_fp8(fminf(fmaxf(values[i][e] * (1.0f / scale), -448.0f), 448.0f));
    }
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      const int column = (thread + i * THREADS) * VEC;
      if (column >= PADDED) continue;
      const int chunk = column / CHUNK, lane = column % CHUNK / W, piece = column % W / VEC;
      *(uint4*)(input + b * MAX_COLUMNS + ((chunk * PIECES + piece) * 32 + lane) * VEC) = pack(values[i]);
      if (FORMAT == INT4) {  // neighboring threads have the parts of 32 columns
        float sum = 0.0f;
#pragma unroll
        for (int e = 0; e < VEC; e++) sum += values[i][e];
#pragma unroll
        for (int offset = 1; offset < PIECES; offset <<= 1) sum += __shfl_xor_sync(ALL_LANES, sum, offset);
        if (piece == 0) block.input_sums[b * (MAX_COLUMNS / 32) + column / 32] = sum;
      }
    }
  }
  __syncthreads();
}

// Add the products of 16 bytes of each row.
template <int FORMAT>
__device__ __forceinline__ void add_products(float (&acc)[GROUP_ROWS][BATCH], const uint4 (&w)[GROUP_ROWS], const T* input,
                                             const float* sums, const float (&scale)[GROUP_ROWS]) {
  constexpr int W = weights_per_load(FORMAT), PIECES = W / VEC;
  float part[GROUP_ROWS][BATCH];
  if (FORMAT == INT4) {
#pragma unroll
    for (int r = 0; r < GROUP_ROWS; r++)
#pragma unroll
      for (int b = 0; b < BATCH; b++) part[r][b] = -24.0f * sums[b * (MAX_COLUMNS / 32)];
  }
#pragma unroll
  for (int piece = 0; piece < PIECES; piece++) {
    float x[BATCH][VEC];
#pragma unroll
    for (int b = 0; b < BATCH; b++) unpack(*(const uint4*)(input + b * MAX_COLUMNS + piece * 32 * VEC), x[b]);
#pragma unroll
    for (int r = 0; r < GROUP_ROWS; r++) {
      const u32 words[4] = {w[r].x, w[r].y, w[r].z, w[r].w};
      float weight[VEC];
      if (FORMAT == DENSE) {
        unpack(w[r], weight);
      } else {
#pragma unroll
        for (int e = 0; e < VEC; e++) {
          const int index = piece * VEC + e;
          if (FORMAT == INT8) {  // in the low byte of the mantissa of 2^23
            const u32 word = words[index / 4] ^ 0x80808080u;
            weight[e] = __uint_as_float(byte_permute(word, 0x4b000000u, 0x7440u | (index % 4))) - 8388736.0f;
          } else if (FORMAT == INT4) {  // 16 + code, at the top of the mantissa of 16
            const u32 word = words[index / 8];
            const int shift = 19 - 4 * (index % 8);
            weight[e] = __uint_as_float(((shift >= 0 ? word << (shift & 31) : word >> (-shift & 31)) & 0x780000u) | 0x41800000u);
          }
        }
        if (FORMAT == FP8) {
#pragma unroll
          for (int e = 0; e < VEC; e += 2) {
            const int index = piece * VEC + e;
            const u32 word = words[index / 4];
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
            u32 halves;
            asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((unsigned short)(index % 4 ? word >> 16 : word)));
            weight[e] = half_to_float((unsigned short)halves);
            weight[e + 1] = half_to_float((unsigned short)(halves >> 16));
#else  // as halves that are smaller by 2^8
            const u32 spread = byte_permute(word, 0u, index % 4 ? 0x3424u : 0x1404u);
            const u32 halves = (spread & 0x80008000u) | (spread >> 1 & 0x3f803f80u);
            weight[e] = 256.0f * half_to_float((unsigned short)halves);
            weight[e + 1] = 256.0f * half_to_float((unsigned short)(halves >> 16));
#endif
          }
        }
      }
#pragma unroll
      for (int b = 0; b < BATCH; b++)
#pragma unroll
        for (int e = 0; e < VEC; e++) {
          if (FORMAT == INT4)
            part[r][b] += weight[e] * x[b][e];
          else
            acc[r][b] += weight[e] * x[b][e];
        }
    }
  }
  if (FORMAT == INT4) {
#pragma unroll
    for (int r = 0; r < GROUP_ROWS; r++)
#pragma unroll
      for (int b = 0; b < BATCH; b++) acc[r][b] += scale[r] * part[r][b];
  }
}

// What a lane needs to finish its row: scales, biases (of the gate and the other if gated), and the residual.
struct Operands {
  float scale[2], bias[2], residual;
};

struct Result {
  float best;
  int token;
};

template <int KIND>
struct Matrix {
  static constexpr int COLUMNS = columns_of(KIND), ROWS = rows_of(KIND), FORMAT = format_of(KIND);
  static constexpr bool IS_GATED = GATED && KIND == FC;
  static constexpr int OUTPUTS = IS_GATED ? GROUP_ROWS / 2 : GROUP_ROWS;  // of a group; lane i has output i / BATCH
  static_assert(OUTPUTS * BATCH <= 32, "a lane per output");

  __device__ __forceinline__ static Operands load_operands(const Block& block, const Layer* layer, int group) {
    Operands operands = {{1.0f, 1.0f}, {0.0f, 0.0f}, 0.0f};
    const int lane = threadIdx.x % 32, output = lane / BATCH, b = lane % BATCH;
    if (output >= OUTPUTS || group >= groups_of(KIND)) return operands;
    const T* scales = (const T*)(KIND == HEAD ? block.model->head_scales : layer->scales[KIND % 4]);
    const T* bias = KIND == HEAD ? block.model->head_bias : layer->bias[KIND % 4];
#pragma unroll
    for (int half = 0; half < (IS_GATED ? 2 : 1); half++) {
      const int row = Stream::row_of(KIND, group, output + half * (GROUP_ROWS / 2));
      if (FORMAT == INT8 || FORMAT == FP8) operands.scale[half] = to_float(scales[row]);
      if (bias) operands.bias[half] = to_float(bias[row]);
      if (KIND == OUT || KIND == DOWN) {
        float residual = to_float(*(volatile T*)(block.model->x + b * WIDTH + row));
        if (KIND == OUT && layer->skip)
          residual = rounded(to_float(layer->skip[0]) * residual + to_float(layer->skip[1]) * to_float(block.model->x0[b * WIDTH + row]));
        operands.residual = residual;
      }
    }
    return operands;
  }

  __device__ __forceinline__ static void finish(const Block& block, const Operands& operands, float sum, float up, int group, Result& result) {
    const int lane = threadIdx.x % 32, output = lane / BATCH, b = lane % BATCH;
    const int row = group * OUTPUTS + output;
    if (output >= OUTPUTS || row >= (IS_GATED ? HIDDEN : ROWS)) return;
    const float input_scale = FORMAT == FP8 ? block.scratch[48 + b] : 1.0f;
    float value = sum * (operands.scale[0] * input_scale) + operands.bias[0];
    const Model* model = block.model;
    if (KIND == QKV) model->qkv[b * ROWS + row] = from_float(value);
    if (KIND == OUT) model->x[b * ROWS + row] = from_float(operands.residual + ATTENTION_SCALE * rounded(value));
    if (KIND == DOWN) model->x[b * ROWS + row] = from_float(operands.residual + rounded(value));
    if (KIND == FC) {
      value = rounded(activate(rounded(value)));
      if (IS_GATED) value *= rounded(up * (operands.scale[1] * input_scale) + operands.bias[1]);
      model->hidden[b * HIDDEN + row] = from_float(value);
    }
    if (KIND == HEAD) {
      value = rounded(value);
      if (SOFTCAP > 0.0f) value = rounded(SOFTCAP * rounded(tanhf(rounded(value / SOFTCAP))));
      model->logits[(i64)b * VOCAB + row] = value;
      const bool is_better = value > result.best;  // rows come in increasing order, so the first of equal ones is kept
      if (value != value || result.best != result.best)
        result.best = __uint_as_float(0x7fffffffu);
      else if (is_better) {
        result.best = value;
        result.token = row;
      }
    }
  }

  __device__ __forceinline__ static void multiply(Block& block, Stream& stream, const Layer* layer, Operands operands, Result& result) {
    constexpr int W = weights_per_load(FORMAT), PIECES = W / VEC;
    const int lane = threadIdx.x % 32, first = (threadIdx.x / 32) * BLOCKS + blockIdx.x;
    const T* input = (const T*)block.work + lane * VEC;
    for (int group = first; group < groups_of(KIND); group += TOTAL_WARPS) {
      if (group != first) operands = load_operands(block, layer, group);
      float acc[GROUP_ROWS][BATCH] = {};
#pragma unroll 1
      for (int chunk = 0; chunk < chunks_of(KIND); chunk++) {
        wait_copies<SLOTS - 1>();
        const char* slot = stream.ring + stream.read * SLOT_BYTES;
        uint4 weights[GROUP_ROWS];
        float scale[GROUP_ROWS];
#pragma unroll
        for (int r = 0; r < GROUP_ROWS; r++) {
          weights[r] = *(const uint4*)(slot + r * 512 + lane * 16);
          if (FORMAT == INT4) {
            const int column = (chunk * 32 + lane) * W, index = (column < COLUMNS ? column : 0) / scale_group_of(KIND);
            const i64 position = (i64)Stream::row_of(KIND, group, r) * (COLUMNS / scale_group_of(KIND)) + index;
            const char* pair = slot + GROUP_ROWS * 512 + r * 128 + lane * 4;
            scale[r] = to_float(*(const T*)(pair + (sizeof(T) == 2 ? position % 2 * 2 : 0)));
          }
        }
        stream.load();
        stream.read = stream.read + 1 == SLOTS ? 0 : stream.read + 1;
        add_products<FORMAT>(acc, weights, input + chunk * PIECES * 32 * VEC, block.input_sums + chunk * 32 + lane, scale);
      }
      float sum = 0.0f, up = 0.0f;
#pragma unroll
      for (int r = 0; r < GROUP_ROWS; r++)
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
          const float total = warp_sum(acc[r][b]);
          if (IS_GATED && r >= OUTPUTS) {
            if (lane == (r - OUTPUTS) * BATCH + b) up = total;
          } else if (lane == r * BATCH + b) {
            sum = total;
          }
        }
      finish(block, operands, sum, up, group, result);
    }
  }

  // A phase. Weights and biases that do not depend on other blocks are loaded before the barrier.
  __device__ __forceinline__ static void run(Block& block, Stream& stream, const Layer* layer, const T* input, const T* norm_weight,
                             const T* norm_bias, Result& result, const int* tokens, const int* starts) {
    const Operands operands = load_operands(block, layer, (threadIdx.x / 32) * BLOCKS + blockIdx.x);
    load_input<KIND>(block, input, norm_weight, norm_bias, KIND == QKV ? layer->skip : nullptr, tokens, starts);
    multiply(block, stream, layer, operands, result);
    block.arrive();
  }
};

// Attention: a warp reads 16 bytes of the keys of a few tokens at a time, so a token has LANES lanes.
constexpr int LANES = HEAD_SIZE / VEC;
constexpr int TOKENS = 32 / LANES;
constexpr int UNROLL = HEADS_PER_UNIT > 2 ? 2 : 4;
constexpr float LOG2_E = 1.4426950408889634f;

struct Keys {
  uint4 keys[UNROLL], values[UNROLL];
};

// Norm and rotation of the part of a head that a lane has; rounded after each as the model does.
__device__ __forceinline__ void norm_and_rotate(float* v, const T* weight, const Model* model, int position) {
  const int part = threadIdx.x % LANES;
  if (NORMS_HEADS) {
    float squares = 0.0f;
#pragma unroll
    for (int e = 0; e < VEC; e++) squares += v[e] * v[e];
#pragma unroll
    for (int offset = LANES / 2; offset; offset >>= 1) squares += __shfl_xor_sync(ALL_LANES, squares, offset);
    const float rstd = 1.0f / sqrtf(squares / HEAD_SIZE + EPS);
#pragma unroll
    for (int e = 0; e < VEC; e++) v[e] = rounded(v[e] * rstd * (weight ? to_float(weight[part * VEC + e]) : 1.0f));
  }
  if (model->frequencies) {  // pairs are the two halves of a head
#pragma unroll
    for (int e = 0; e < VEC; e++) {
      const float other = __shfl_xor_sync(ALL_LANES, v[e], LANES / 2);
      const float angle = position * model->frequencies[(part * VEC + e) % (HEAD_SIZE / 2)];
      v[e] = rounded(v[e] * cosf(angle) + (part < LANES / 2 ? -other : other) * sinf(angle));
    }
  }
}

__device__ __forceinline__ Keys load_keys(const Layer* layer, const int* table, int kv_head, int token, int end) {
  Keys out;
  const int part = threadIdx.x % LANES;
#pragma unroll
  for (int u = 0; u < UNROLL; u++, token += WARPS * TOKENS) {
    if (token < end) {
      const i64 slot = (i64)table[token / BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE;
      const i64 offset = (slot * KV_HEADS + kv_head) * HEAD_SIZE + part * VEC;
      out.keys[u] = load_16(layer->keys + offset);
      out.values[u] = load_16(layer->values + offset);
    }
  }
  return out;
}

// Online softmax of HEADS_PER_UNIT query heads over the tokens of a lane.
struct Softmax {
  float maximum[HEADS_PER_UNIT], sum[HEADS_PER_UNIT], acc[HEADS_PER_UNIT][VEC];

  __device__ __forceinline__ void add(const float (&query)[HEADS_PER_UNIT][VEC], const float* key, const float* value, bool is_valid) {
#pragma unroll
    for (int h = 0; h < HEADS_PER_UNIT; h++) {
      float score = 0.0f;
#pragma unroll
      for (int e = 0; e < VEC; e++) score += query[h][e] * key[e];
#pragma unroll
      for (int offset = LANES / 2; offset; offset >>= 1) score += __shfl_xor_sync(ALL_LANES, score, offset);
      if (!is_valid) continue;
      score *= rsqrtf((float)HEAD_SIZE) * LOG2_E;
      const float largest = fmaxf(maximum[h], score), old = exp2f(maximum[h] - largest), weight = exp2f(score - largest);
      maximum[h] = largest;
      sum[h] = sum[h] * old + weight;
#pragma unroll
      for (int e = 0; e < VEC; e++) acc[h][e] = acc[h][e] * old + weight * value[e];
    }
  }
};

__device__ __forceinline__ void attend(Block& block, const Layer* layer, const int* tables, int table_stride, const int* starts, const int* counts) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = lane % LANES;
  const Model* model = block.model;
  bool waited = false;
  for (int unit = blockIdx.x; unit < UNITS * BATCH * MAX_SPLITS; unit += BLOCKS) {
    const int b = unit / UNITS % BATCH, split = unit / (UNITS * BATCH), first_head = unit % UNITS * HEADS_PER_UNIT;
    const int kv_head = first_head / GROUP;
    const int stored = starts[b], window = (int)layer->window;
    const int first = window ? max(stored + 1 - window, 0) : 0;
    const int splits = min(max((stored - first + MIN_SPLIT_TOKENS - 1) / MIN_SPLIT_TOKENS, 1), MAX_SPLITS);
    if (split >= splits) continue;
    const int per_split = (stored - first + splits - 1) / splits;
    const int begin = first + split * per_split, end = min(begin + per_split, stored);
    const int* table = tables + (i64)b * table_stride;
    int token = begin + warp * TOKENS + lane / LANES;
    Keys loaded = load_keys(layer, table, kv_head, token, end);
    if (!waited) block.wait();  // for qkv
    waited = true;

    const T* qkv = model->qkv + (i64)b * rows_of(QKV);
    float query[HEADS_PER_UNIT][VEC];
    Softmax softmax;
#pragma unroll
    for (int h = 0; h < HEADS_PER_UNIT; h++) {
      unpack(load_16(qkv + (first_head + h) * HEAD_SIZE + part * VEC), query[h]);
      norm_and_rotate(query[h], layer->query_norm, model, stored);
      softmax.maximum[h] = -1e30f;
      softmax.sum[h] = 0.0f;
#pragma unroll
      for (int e = 0; e < VEC; e++) softmax.acc[h][e] = 0.0f;
    }
    if (split == 0 && warp == 0) {  // the new token
      float key[VEC], value[VEC];
      unpack(load_16(qkv + (HEADS + kv_head) * HEAD_SIZE + part * VEC), key);
      unpack(load_16(qkv + (HEADS + KV_HEADS + kv_head) * HEAD_SIZE + part * VEC), value);
      norm_and_rotate(key, layer->key_norm, model, stored);
      if (layer->value_mix) {
        const T* embedded = layer->value_embedding + (i64)b * KV_HEADS * HEAD_SIZE + kv_head * HEAD_SIZE + part * VEC;
#pragma unroll
        for (int e = 0; e < VEC; e++)
          value[e] = rounded(to_float(layer->value_mix[0]) * value[e] + to_float(layer->value_mix[1]) * to_float(embedded[e]));
      }
      if (counts[b] > 0 && lane < LANES && first_head % GROUP == 0) {
        const i64 slot = (i64)table[stored / BLOCK_SIZE] * BLOCK_SIZE + stored % BLOCK_SIZE;
        const i64 offset = (slot * KV_HEADS + kv_head) * HEAD_SIZE + part * VEC;
        *(uint4*)(layer->keys + offset) = pack(key);
        *(uint4*)(layer->values + offset) = pack(value);
      }
      softmax.add(query, key, value, lane < LANES);
    }
    // Lanes of a warp have different tokens but take part in the same shuffles.
    for (int base = begin + warp * TOKENS; base < end; base += UNROLL * WARPS * TOKENS) {
      const Keys current = loaded;
      const int here = token;
      token += UNROLL * WARPS * TOKENS;
      loaded = load_keys(layer, table, kv_head, token, end);
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        float key[VEC], value[VEC];
        unpack(current.keys[u], key);
        unpack(current.values[u], value);
        softmax.add(query, key, value, here + u * WARPS * TOKENS < end);
      }
    }

    float* parts = (float*)block.work;
#pragma unroll
    for (int h = 0; h < HEADS_PER_UNIT; h++) {
      float maximum = softmax.maximum[h];
#pragma unroll
      for (int offset = LANES; offset < 32; offset <<= 1) maximum = fmaxf(maximum, __shfl_xor_sync(ALL_LANES, maximum, offset));
      const float factor = exp2f(softmax.maximum[h] - maximum);
      float sum = softmax.sum[h] * factor;
#pragma unroll
      for (int offset = LANES; offset < 32; offset <<= 1) sum += __shfl_xor_sync(ALL_LANES, sum, offset);
#pragma unroll
      for (int e = 0; e < VEC; e++) {
        float total = softmax.acc[h][e] * factor;
#pragma unroll
        for (int offset = LANES; offset < 32; offset <<= 1) total += __shfl_xor_sync(ALL_LANES, total, offset);
        if (lane < LANES) parts[warp * (HEAD_SIZE + 2) + part * VEC + e] = total;
      }
      if (lane == 0) {
        parts[warp * (HEAD_SIZE + 2) + HEAD_SIZE] = maximum;
        parts[warp * (HEAD_SIZE + 2) + HEAD_SIZE + 1] = sum;
      }
      __syncthreads();
      for (int d = threadIdx.x; d < HEAD_SIZE; d += THREADS) {
        float largest = -1e30f, total = 0.0f, denominator = 0.0f;
        for (int w = 0; w < WARPS; w++) largest = fmaxf(largest, parts[w * (HEAD_SIZE + 2) + HEAD_SIZE]);
        for (int w = 0; w < WARPS; w++) {
          const float* p = parts + w * (HEAD_SIZE + 2);
          const float weight = exp2f(p[HEAD_SIZE] - largest);
          total += weight * p[d];
          denominator += weight * p[HEAD_SIZE + 1];
        }
        const int index = b * HEADS + first_head + h;
        if (splits == 1) {
          model->attended[(i64)index * HEAD_SIZE + d] = from_float(total / denominator);
        } else {
          model->partial_outputs[((i64)index * MAX_SPLITS + split) * HEAD_SIZE + d] = total;
          if (d == 0) {
            model->partial_sums[(index * MAX_SPLITS + split) * 2] = largest;
            model->partial_sums[(index * MAX_SPLITS + split) * 2 + 1] = denominator;
          }
        }
      }
      __syncthreads();
    }
    if (splits > 1) {  // the block that finishes last adds the parts up
      u32* finished = model->counters + 2 + unit % (UNITS * BATCH);
      if (threadIdx.x == 0) block.scratch[63] = count_release(finished) == (u32)splits - 1 ? 1.0f : 0.0f;
      __syncthreads();
      if (block.scratch[63] != 0.0f) {
        for (int i = threadIdx.x; i < HEADS_PER_UNIT * HEAD_SIZE; i += THREADS) {
          const int index = b * HEADS + first_head + i / HEAD_SIZE, d = i % HEAD_SIZE;
          float largest = -1e30f, total = 0.0f, denominator = 0.0f;
          for (int s = 0; s < splits; s++) largest = fmaxf(largest, load_float(model->partial_sums + (index * MAX_SPLITS + s) * 2));
          for (int s = 0; s < splits; s++) {
            const int p = index * MAX_SPLITS + s;
            const float weight = exp2f(load_float(model->partial_sums + p * 2) - largest);
            total += weight * load_float(model->partial_outputs + (i64)p * HEAD_SIZE + d);
            denominator += weight * load_float(model->partial_sums + p * 2 + 1);
          }
          model->attended[(i64)index * HEAD_SIZE + d] = from_float(total / denominator);
        }
        if (threadIdx.x == 0) *finished = 0;
      }
      __syncthreads();
    }
  }
  block.arrive();
}

// The argmax of each sequence, -1 if its logits are not finite, and the inputs of the next step.
__device__ __forceinline__ void next_token(Block& block, const Result& result, int* tokens, int* starts, const int* counts) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Model* model = block.model;
  float* values = (float*)block.work;
  int* indices = (int*)(values + WARPS * 32);
  __syncthreads();  // the input is not needed any more
  values[threadIdx.x] = result.best;
  indices[threadIdx.x] = result.token;
  __syncthreads();
  for (int b = threadIdx.x; b < BATCH; b += THREADS) {
    Result best = {-1e38f, 0x7fffffff};
    bool is_nan = false;
    for (int w = 0; w < WARPS; w++)
      for (int output = 0; output < GROUP_ROWS; output++) {
        const int i = w * 32 + output * BATCH + b;
        is_nan |= values[i] != values[i];
        if (values[i] > best.best || (values[i] == best.best && indices[i] < best.token)) best = Result{values[i], indices[i]};
      }
    model->max_logits[b * BLOCKS + blockIdx.x] = is_nan ? __uint_as_float(0x7fffffffu) : best.best;
    model->max_tokens[b * BLOCKS + blockIdx.x] = best.token;
  }
  __syncthreads();
  if (threadIdx.x == 0) block.scratch[62] = count_release(model->counters + 1) == BLOCKS - 1 ? 1.0f : 0.0f;
  __syncthreads();
  if (block.scratch[62] == 0.0f) return;
  for (int b = warp; b < BATCH; b += WARPS) {
    float best = -1e38f;
    int token = 0x7fffffff, is_nan = 0;
    for (int i = lane; i < BLOCKS; i += 32) {
      const float value = load_float(model->max_logits + b * BLOCKS + i);
      const int index = *(volatile int*)(model->max_tokens + b * BLOCKS + i);
      is_nan |= value != value;
      if (value > best || (value == best && index < token)) best = value, token = index;
    }
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) {
      const float value = __shfl_xor_sync(ALL_LANES, best, offset);
      const int index = __shfl_xor_sync(ALL_LANES, token, offset);
      is_nan |= __shfl_xor_sync(ALL_LANES, is_nan, offset);
      if (value > best || (value == best && index < token)) best = value, token = index;
    }
    if (lane == 0) {
      const bool is_finite = !is_nan && fabsf(best) < 1e38f;
      tokens[b] = token == 0x7fffffff ? 0 : token;
      starts[b] += counts[b];
      model->argmax[b] = is_finite ? token : -1;
    }
  }
  if (threadIdx.x == 0) model->counters[0] = model->counters[1] = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decode_step(const char* pointers, int* tokens, const int* tables, int table_stride, int* starts, const int* counts) {
  char* memory = shared_memory();
  for (int i = threadIdx.x; i < TABLE_BYTES / 8; i += THREADS) ((i64*)memory)[i] = ((const i64*)pointers)[i];
  __syncthreads();
  const Model* model = (const Model*)memory;
  const Layer* layers = (const Layer*)(memory + sizeof(Model));
  char* work = memory + TABLE_BYTES;
  float* sums = (float*)(work + WORK_BYTES);
  float* scratch = (float*)(work + WORK_BYTES + SUMS_BYTES);
  Block block = {model, layers, work, sums, scratch, 0, 0};
  Stream stream;
  stream.layers = layers;
  stream.model = model;
  stream.ring = (char*)scratch + SCRATCH_BYTES + threadIdx.x / 32 * (SLOTS * SLOT_BYTES);
  stream.kind = QKV;
  stream.layer = stream.chunk = stream.write = stream.read = 0;
  stream.group = threadIdx.x / 32 * BLOCKS + blockIdx.x;
  stream.done = false;
  stream.start_group(stream.group);
  for (int i = 0; i < SLOTS; i++) stream.load();

  Result result = {-1e38f, 0x7fffffff};
  for (int i = 0; i < LAYERS; i++) {
    const Layer* layer = layers + i;
    const bool embeds = i == 0 && model->token_embedding;
    Matrix<QKV>::run(block, stream, layer, model->x, layer->norm_weight[0], layer->norm_bias[0], result, embeds ? tokens : nullptr, starts);
    attend(block, layer, tables, table_stride, starts, counts);
    Matrix<OUT>::run(block, stream, layer, model->attended, nullptr, nullptr, result, nullptr, starts);
    Matrix<FC>::run(block, stream, layer, model->x, layer->norm_weight[1], layer->norm_bias[1], result, nullptr, starts);
    Matrix<DOWN>::run(block, stream, layer, model->hidden, nullptr, nullptr, result, nullptr, starts);
  }
  const Operands operands = Matrix<HEAD>::load_operands(block, layers, threadIdx.x / 32 * BLOCKS + blockIdx.x);
  load_input<HEAD>(block, model->x, model->norm_weight, model->norm_bias, nullptr, nullptr, starts);
  Matrix<HEAD>::multiply(block, stream, layers, operands, result);
  next_token(block, result, tokens, starts, counts);
}
