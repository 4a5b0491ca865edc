// The decode step of up to eight sequences as one persistent kernel: every layer, the head and the next token.
//
// Each warp streams its share of all weight matrices, in order, from global memory through a ring of its own in shared
// memory. The stream does not depend on the activations, so it runs ahead across phases: while blocks wait for each
// other, normalize the input or attend, the weights of the next matrix arrive. A layer has five phases, separated by
// grid-wide barriers:
//
//     qkv   norm, projection          -> qkv
//     attn  norms, rotation, KV cache -> attended
//     out   projection, residual      -> x
//     fc    norm, projection, act     -> hidden
//     down  projection, residual      -> x
//
// A block multiplies 16 rows of a weight at a time on tensor cores (m16n8k16; the sequences are the 8 columns), and
// each of its warps takes a part of the weight's columns. Quantized weights become fp16 in registers, exactly;
// since the columns within a product can be in any order, each lane decodes 16 consecutive bytes of two rows.
//
// `cuda_decoder.py` prepends macros with the shapes of the model (HEADS, WIDTH, ...). Rounding follows the model:
// results of norms, projections and activations are rounded to its dtype, and sums are in fp32.

typedef unsigned int u32;
typedef long long i64;

#define BF16 0
#define FP16 1
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

typedef unsigned short T;  // bf16 or fp16

#define THREADS (WARPS * 32)
#define ALL_LANES 0xffffffffu
constexpr int VEC = 8;          // elements in 16 bytes
constexpr int GROUP_ROWS = 16;  // rows of a weight in a product
constexpr int LOADS = 2;        // of 16 bytes per lane and row of a chunk: 64 bytes of each row
constexpr int GROUP = HEADS / KV_HEADS;
constexpr int HEADS_PER_UNIT = GROUP % 2 == 0 ? 2 : 1;  // query heads that a block handles together
constexpr int UNITS = HEADS / HEADS_PER_UNIT;
constexpr int MAX_SPLITS = BLOCKS / (UNITS * BATCH) < 1 ? 1 : (BLOCKS / (UNITS * BATCH) > 32 ? 32 : BLOCKS / (UNITS * BATCH));

// The matrices of a layer in the order in which they are streamed, and the head.
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
// Weights in 16 bytes.
constexpr int weights_per_load(int format) { return format == DENSE ? VEC : format == INT4 ? 32 : 16; }
constexpr int row_bytes_of(int kind) { return columns_of(kind) * 16 / weights_per_load(format_of(kind)); }
constexpr int CHUNK_BYTES = LOADS * 64;  // of each row
constexpr int chunks_of(int kind) { return (row_bytes_of(kind) + CHUNK_BYTES - 1) / CHUNK_BYTES; }
constexpr int padded_columns_of(int kind) { return chunks_of(kind) * LOADS * 4 * weights_per_load(format_of(kind)); }
constexpr int groups_of(int kind) { return (rows_of(kind) + GROUP_ROWS - 1) / GROUP_ROWS; }
constexpr int larger(int a, int b) { return a > b ? a : b; }

constexpr bool HAS_INT4 = QKV_FORMAT == INT4 || OUT_FORMAT == INT4 || FC_FORMAT == INT4 || DOWN_FORMAT == INT4 || HEAD_FORMAT == INT4;
constexpr int SLOT_BYTES = 2 * LOADS * 512 + (HAS_INT4 ? 256 : 0);  // int4: two scales of each of two rows per lane
constexpr int INPUT_COLUMNS = larger(larger(padded_columns_of(QKV), padded_columns_of(OUT)),
                                     larger(larger(padded_columns_of(FC), padded_columns_of(DOWN)), padded_columns_of(HEAD)));
constexpr int INPUT_STRIDE = (INPUT_COLUMNS + 63) / 64 * 64 + 32;  // so that sequences start in different banks
constexpr int ROUND_GROUPS = THREADS / (GROUP_ROWS * BATCH);  // groups whose results are summed at once, one per thread
static_assert(ROUND_GROUPS * GROUP_ROWS * BATCH == THREADS, "a thread per result");

// The pointers arrive as 64-bit integers, in the order of these members; see `cuda_decoder.py`.
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
  const T* value_embedding;  // rows of the tokens: (batch, kv heads * head size)
  char* keys;
  char* values;
  char* key_scales;
  char* value_scales;
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
  float* partial_sums;   // maximum and sum of the softmax of each part
  float* max_logits;
  int* max_tokens;
  u32* counters;         // arrivals at barriers, finished blocks, finished parts of each unit
};

constexpr int TABLE_BYTES = (sizeof(Model) + LAYERS * sizeof(Layer) + 15) / 16 * 16;
constexpr int INPUT_BYTES = BATCH * INPUT_STRIDE * (int)sizeof(T);
constexpr int ATTENTION_BYTES = WARPS * (HEAD_SIZE + 2) * 4;
constexpr int WORK_BYTES = (larger(larger(INPUT_BYTES, ATTENTION_BYTES), THREADS * 8) + 15) / 16 * 16;
constexpr int RESULT_BYTES = WARPS * THREADS * 4;      // results of a round
constexpr int ROTATION_BYTES = BATCH * HEAD_SIZE * 4;  // cosine and sine of each pair of a head
constexpr int SCRATCH_BYTES = (2 * WARPS * BATCH + 16) * 4;  // reductions, scales of the input, flags
constexpr int RING_BYTES = SHARED_BYTES - TABLE_BYTES - WORK_BYTES - 2 * RESULT_BYTES - ROTATION_BYTES - SCRATCH_BYTES;
constexpr int SLOTS_THAT_FIT = RING_BYTES / WARPS / SLOT_BYTES;
constexpr int SLOTS = SLOTS_THAT_FIT > MAX_SLOTS ? MAX_SLOTS : SLOTS_THAT_FIT;
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
// Add 1 (release): whoever sees it also sees what the threads of this block wrote before their last `__syncthreads`.
__device__ __forceinline__ void count_release(u32* p) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory"); }
// The same, and return the old value (acquire): what other blocks wrote before they added is visible afterwards.
__device__ __forceinline__ u32 count(u32* p) {
  u32 old;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(old) : "l"(p) : "memory");
  return old;
}
// Loads that bypass L1, for what other blocks wrote.
__device__ __forceinline__ uint4 load_16(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_8(const void* p) {
  uint2 v;
  asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u32 load_4(const void* p) {
  u32 v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ float load_float(const float* p) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u32 byte_permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
// c += a * b for a (16, 16) and b (16, 8), or c = a * b with `is_first` (fp16 only). The PTX manual has the layout of
// the fragments of m16n8k16.
template <bool IS_HALF>
__device__ __forceinline__ void multiply_add(float (&c)[4], const u32* a, u32 b0, u32 b1, bool is_first = false) {
  if (IS_HALF && is_first)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
  else if (IS_HALF)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Four 8 x 8 matrices: each lane passes the address of row lane % 8 of matrix lane / 8.
__device__ __forceinline__ void load_matrices(u32 (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(shared_address(row)) : "memory");
}
// a * b + c for two halves.
__device__ __forceinline__ u32 fma_halves(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ u32 add_halves(u32 a, u32 b) {
  u32 d;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
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
static void count_release(u32* p) { atomicAdd(p, 1u); }
static u32 count(u32* p) { return atomicAdd(p, 1u); }
static uint4 load_16(const void* p) { return *(const uint4*)p; }
static uint2 load_8(const void* p) { return *(const uint2*)p; }
static u32 load_4(const void* p) { return *(const u32*)p; }
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
static u32 fma_halves(u32 a, u32 b, u32 c) {
  u32 out = 0;
  for (int i = 0; i < 32; i += 16)
    out |= (u32)float_to_half(half_to_float(a >> i) * half_to_float(b >> i) + half_to_float(c >> i)) << i;
  return out;
}
static u32 add_halves(u32 a, u32 b) { return fma_halves(a, 0x3c003c00u, b); }
template <bool IS_HALF>
static void multiply_add(float (&c)[4], const u32* a, u32 b0, u32 b1, bool is_first = false) {
  if (is_first) c[0] = c[1] = c[2] = c[3] = 0.0f;
  const int lane = threadIdx.x % 32;
  const auto number = [](u32 word, int k) {
    const u32 bits = word >> k % 2 * 16 & 0xffff;
    return IS_HALF ? half_to_float(bits) : __uint_as_float(bits << 16);
  };
  for (int k = 0; k < 16; k++) {
    const int source = k % 8 / 2;
    const u32 low = __shfl_sync(0xffffffffu, a[k / 8 * 2], lane / 4 * 4 + source);
    const u32 high = __shfl_sync(0xffffffffu, a[k / 8 * 2 + 1], lane / 4 * 4 + source);
    for (int n = 0; n < 2; n++) {
      const u32 b = __shfl_sync(0xffffffffu, k < 8 ? b0 : b1, (lane % 4 * 2 + n) * 4 + source);
      c[n] += number(low, k) * number(b, k);
      c[2 + n] += number(high, k) * number(b, k);
    }
  }
}
static void load_matrices(u32 (&out)[4], const void* row) {
  const int lane = threadIdx.x % 32;
  u32 words[4];
  __builtin_memcpy(words, row, 16);
  for (int i = 0; i < 4; i++)
    for (int word = 0; word < 4; word++) {
      const u32 value = __shfl_sync(0xffffffffu, words[word], i * 8 + lane / 4);
      if (lane % 4 == word) out[i] = value;
    }
}
#endif

__device__ __forceinline__ float bf16_to_float(u32 bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ float to_float(T value) { return DTYPE == BF16 ? bf16_to_float(value) : half_to_float(value); }

__device__ __forceinline__ T from_float(float value) {
  if (DTYPE == FP16) return float_to_half(value);
  const u32 bits = __float_as_uint(value);
  return value != value ? 0x7fff : (T)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

__device__ __forceinline__ float rounded(float value) { return to_float(from_float(value)); }

// 16 bytes as fp32 numbers.
__device__ __forceinline__ void unpack(const uint4& v, float* out) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    out[2 * i] = to_float((T)words[i]);
    out[2 * i + 1] = to_float((T)(words[i] >> 16));
  }
}

__device__ __forceinline__ uint4 pack(const float* in) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) words[i] = (u32)from_float(in[2 * i]) | (u32)from_float(in[2 * i + 1]) << 16;
  return uint4{words[0], words[1], words[2], words[3]};
}

__device__ __forceinline__ uint4 pack_halves(const float* in) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) words[i] = (u32)float_to_half(in[2 * i]) | (u32)float_to_half(in[2 * i + 1]) << 16;
  return uint4{words[0], words[1], words[2], words[3]};
}

// a * x + b * y, rounded.
__device__ __forceinline__ uint4 combine(const uint4& x, const uint4& y, float a, float b) {
  float first[VEC], second[VEC];
  unpack(x, first);
  unpack(y, second);
#pragma unroll
  for (int e = 0; e < VEC; e++) first[e] = a * first[e] + b * second[e];
  return pack(first);
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
  char* work;      // the input of a matrix, or partial results of attention
  float* results;  // of all warps, for two rounds
  const float* rotation;  // cosines of the pairs of a head, then sines, per sequence
  float* scratch;
  float* input_scales;
  float* flag;
  int scratch_half, round;
  u32 barriers;    // passed so far
  u32 nibbles[2];  // masks of `decode`

  // The sum or the maximum over all threads of the block, for each sequence.
  __device__ __forceinline__ void reduce(float (&v)[BATCH], bool is_max) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float* out = scratch + scratch_half * (WARPS * BATCH);
    scratch_half ^= 1;
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
#pragma unroll
      for (int offset = 16; offset; offset >>= 1) {
        const float other = __shfl_xor_sync(ALL_LANES, v[b], offset);
        v[b] = is_max ? fmaxf(v[b], other) : v[b] + other;
      }
      if (lane == 0) out[b * WARPS + warp] = v[b];
    }
    __syncthreads();
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      v[b] = out[b * WARPS + lane % WARPS];
#pragma unroll
      for (int offset = WARPS / 2; offset; offset >>= 1) {
        const float other = __shfl_xor_sync(ALL_LANES, v[b], offset);
        v[b] = is_max ? fmaxf(v[b], other) : v[b] + other;
      }
    }
  }

  // Arrive at the barrier of the grid: blocks that have passed the next `wait` see everything that this one wrote.
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

// The weights that a warp needs, in that order, as chunks: 128 bytes of each of 16 rows.
struct Stream {
  const Layer* layers;
  const Model* model;
  char* slots;
  const char* rows[2];    // the next bytes for this lane, in rows lane / 4 and lane / 4 + 8 of the group
  const char* scales[2];  // of these rows
  int left;               // bytes from there to the end of the row
  int kind, layer, group, chunk, write, read;
  bool done;

  // The row of the matrix that is row n of a group. In a gated MLP, 8 rows of the gate and the same 8 of "up".
  __device__ __forceinline__ static int row_of(int kind, int group, int n) {
    if (GATED && kind == FC) return min(group * 8 + n % 8, HIDDEN - 1) + n / 8 * HIDDEN;
    return min(group * 16 + n, rows_of(kind) - 1);
  }

  // Find the next group of which this warp has chunks, starting at the current one.
  __device__ __forceinline__ void start_group() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    chunk = warp;
    while (group >= groups_of(kind) || chunk >= chunks_of(kind)) {
      group = blockIdx.x;
      if (kind == HEAD) {
        done = true;
        return;
      }
      kind = kind + 1 == HEAD && layer + 1 < LAYERS ? QKV : kind + 1;
      layer += kind == QKV;
    }
    const char* weight = kind == HEAD ? model->head : layers[layer].weight[kind];
    const int offset = warp * CHUNK_BYTES + lane % 4 * 16;
#pragma unroll
    for (int i = 0; i < 2; i++) rows[i] = weight + (i64)row_of(kind, group, lane / 4 + 8 * i) * row_bytes_of(kind) + offset;
    left = row_bytes_of(kind) - offset;
    if (HAS_INT4 && format_of(kind) == INT4) {
      const T* all = (const T*)(kind == HEAD ? model->head_scales : layers[layer].scales[kind]);
#pragma unroll
      for (int i = 0; i < 2; i++)
        scales[i] = (const char*)(all + (i64)row_of(kind, group, lane / 4 + 8 * i) * (columns_of(kind) / 128) + warp * LOADS);
    }
  }

  // Start to copy the next chunk. Its slot has the first 64 bytes of all 16 rows, then the second. They are swizzled in
  // pieces of 16 bytes: `load_matrices` (dense weights) reads a piece of 8 rows at a time, without bank conflicts.
  __device__ __forceinline__ void load() {
    if (!done) {
      const int lane = threadIdx.x % 32;
      char* slot = slots + write * SLOT_BYTES;
      char* target = slot + piece_offset(lane / 4, lane % 4);
#pragma unroll
      for (int i = 0; i < LOADS; i++) {
        const int bytes = min(max(left - i * 64, 0), 16), offset = bytes ? i * 64 : 0;
        copy_async_16(target + i * 1024, rows[0] + offset, bytes);
        copy_async_16(target + i * 1024 + 512, rows[1] + offset, bytes);
      }
      if (HAS_INT4 && format_of(kind) == INT4) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          copy_async_4(slot + 2 * LOADS * 512 + lane * 8 + i * 4, scales[i]);
          scales[i] += WARPS * LOADS * sizeof(T);
        }
      }
      rows[0] += WARPS * CHUNK_BYTES;
      rows[1] += WARPS * CHUNK_BYTES;
      left -= WARPS * CHUNK_BYTES;
      chunk += WARPS;
      if (chunk >= chunks_of(kind)) {
        group += BLOCKS;
        start_group();
      }
    }
    commit_copies();
    write = write + 1 == SLOTS ? 0 : write + 1;
  }

  // The offset of a piece (0 to 3) of a row (0 to 7) in 512 bytes. Two rows, of 64 bytes each, span all banks, so each
  // pair of rows has its pieces in another order.
  __device__ __forceinline__ static int piece_offset(int row, int piece) { return row * 64 + (piece ^ (row / 2 % 4)) * 16; }
};

// Load the input of a matrix into shared memory, normalized, and in fp16 if the weights are quantized. `given` is the
// input before the norm, (batch, columns) in global memory; with `tokens`, their embeddings are used instead.
template <int KIND>
__device__ __forceinline__ void load_input(
    Block& block, const T* given, const T* norm_weight, const T* norm_bias, const T* skip, const int* tokens,
    const int* starts) {
  constexpr int COLUMNS = columns_of(KIND), FORMAT = format_of(KIND);
  constexpr int PADDED = padded_columns_of(KIND);
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
  // All sequences are loaded once if their values fit into registers; otherwise again in each pass.
  constexpr bool FITS = BATCH * VECTORS <= 16;
  uint4 loaded[FITS ? BATCH : 1][FITS ? VECTORS : 1];
  const auto load = [&](int b, int i) -> uint4 {
    const int column = (thread + i * THREADS) * VEC;
    if (column >= COLUMNS) return uint4{0, 0, 0, 0};
    uint4 out;
    if (KIND == QKV && tokens) {
      out = load_16(block.model->token_embedding + (i64)tokens[b] * WIDTH + column);
      if (block.model->position_embedding)
        out = combine(out, load_16(block.model->position_embedding + (i64)max(starts[b], 0) * WIDTH + column), 1.0f, 1.0f);
      if (blockIdx.x == 0) *(uint4*)(block.model->x + b * WIDTH + column) = out;
    } else {
      out = load_16(given + (i64)b * COLUMNS + column);
    }
    if (KIND == QKV && skip)
      out = combine(out, load_16(block.model->x0 + (i64)b * COLUMNS + column), to_float(skip[0]), to_float(skip[1]));
    return out;
  };
  if (FITS) {
#pragma unroll
    for (int b = 0; b < BATCH; b++)
#pragma unroll
      for (int i = 0; i < VECTORS; i++) loaded[FITS ? b : 0][FITS ? i : 0] = load(b, i);
  }
  const auto values_of = [&](int b, int i, float* out) { unpack(FITS ? loaded[FITS ? b : 0][FITS ? i : 0] : load(b, i), out); };
  float mean[BATCH] = {}, rstd[BATCH], factor[BATCH];
  if (NORM_OF == LAYER_NORM) {
#pragma unroll
    for (int b = 0; b < BATCH; b++)
#pragma unroll
      for (int i = 0; i < VECTORS; i++) {
        float values[VEC];
        values_of(b, i, values);
#pragma unroll
        for (int e = 0; e < VEC; e++) mean[b] += values[e];
      }
    block.reduce(mean, false);
#pragma unroll
    for (int b = 0; b < BATCH; b++) mean[b] /= COLUMNS;
  }
  if (NORM_OF != NO_NORM) {
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      rstd[b] = 0.0f;
#pragma unroll
      for (int i = 0; i < VECTORS; i++) {
        float values[VEC];
        values_of(b, i, values);
#pragma unroll
        for (int e = 0; e < VEC; e++) {
          const float centered = (thread + i * THREADS) * VEC < COLUMNS ? values[e] - mean[b] : 0.0f;
          rstd[b] += centered * centered;
        }
      }
    }
    block.reduce(rstd, false);
#pragma unroll
    for (int b = 0; b < BATCH; b++) rstd[b] = 1.0f / sqrtf(rstd[b] / COLUMNS + EPS);
  }
  const auto normalized = [&](int b, int i, float* out) {
    values_of(b, i, out);
    if (NORM_OF == NO_NORM || (thread + i * THREADS) * VEC >= COLUMNS) return;
    float weight[VEC], bias[VEC];
    if (norm_weight) unpack(weights[i], weight);
    if (norm_bias) unpack(biases[i], bias);
#pragma unroll
    for (int e = 0; e < VEC; e++) {
      out[e] = (out[e] - mean[b]) * rstd[b];
      if (norm_weight) out[e] *= weight[e];
      if (norm_bias) out[e] += bias[e];
      out[e] = rounded(out[e]);
    }
  };
  if (FORMAT != DENSE) {
    float largest[BATCH] = {};
#pragma unroll
    for (int b = 0; b < BATCH; b++)
#pragma unroll
      for (int i = 0; i < VECTORS; i++) {
        float values[VEC];
        normalized(b, i, values);
#pragma unroll
        for (int e = 0; e < VEC; e++) largest[b] = fmaxf(largest[b], fabsf(values[e]));
      }
    block.reduce(largest, true);
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      float inverse;
      if (FORMAT == FP8) {
        inverse = fmaxf(largest[b] / 448.0f, 1.1754943508222875e-38f);
        factor[b] = 1.0f / inverse;
      } else {  // a power of 2, so that the largest value in fp16 is between 2^14 and 2^15
        const int exponent = min(max(268 - (int)(__float_as_uint(largest[b]) >> 23), 1), 253);
        factor[b] = __uint_as_float((u32)exponent << 23);
        inverse = __uint_as_float((u32)(254 - exponent) << 23);
      }
      if (thread == 0) block.input_scales[b] = inverse;  // `finish` reads it after a `__syncthreads`
    }
  }
#pragma unroll
  for (int b = 0; b < BATCH; b++)
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      const int column = (thread + i * THREADS) * VEC;
      if (column >= PADDED) continue;
      float v[VEC];
      normalized(b, i, v);
      if (FORMAT != DENSE) {
#pragma unroll
        for (int e = 0; e < VEC; e++) {
          v[e] *= factor[b];
          if (FORMAT == FP8) v[e] = round_to_fp8(fminf(fmaxf(v[e], -448.0f), 448.0f));
        }
      }
      T* out = input + b * INPUT_STRIDE + column;
      if (FORMAT == DENSE) {  // 32 columns are two products; the pairs that a lane needs for both are 16 bytes
        const uint4 packed = pack(v);
        u32* pairs = (u32*)(out - column % 32) + column % 32 / 8;
        pairs[0] = packed.x, pairs[4] = packed.y, pairs[8] = packed.z, pairs[12] = packed.w;
      } else {
        const float in_pairs[VEC] = {v[0], v[4], v[1], v[5], v[2], v[6], v[3], v[7]};  // in the order of `decode`
        *(uint4*)out = pack_halves(FORMAT == INT4 ? in_pairs : v);
      }
    }
  __syncthreads();
}

// Four bytes of quantized weights as pairs of fp16 numbers ("halves").
template <int FORMAT>
__device__ __forceinline__ void decode_word(u32 word, u32* pairs, const u32* nibbles) {
  if (FORMAT == INT8) {  // put into the mantissa of 1024, with an offset of 128
    word ^= 0x80808080u;
    pairs[0] = add_halves(byte_permute(word, 0x64646464u, 0x4140u), 0xe480e480u);
    pairs[1] = add_halves(byte_permute(word, 0x64646464u, 0x4342u), 0xe480e480u);
  }
  if (FORMAT == FP8) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pairs[half]) : "h"((unsigned short)(word >> 16 * half)));
#else  // the bits of e4m3 moved into a half are its value / 2^8
      const u32 spread = byte_permute(word, 0u, half ? 0x3424u : 0x1404u);
      pairs[half] = fma_halves((spread & 0x80008000u) | (spread >> 1 & 0x3f803f80u), 0x5c005c00u, 0u);
#endif
    }
  }
  if (FORMAT == INT4) {  // codes 0 and 4, 1 and 5, 2 and 6, 3 and 7; 1024 + code, or 1024 + 16 * code
#pragma unroll
    for (int half = 0; half < 2; half++) {
      pairs[2 * half] = add_halves((word >> 8 * half & nibbles[0]) | 0x64006400u, 0xe408e408u);
      pairs[2 * half + 1] = fma_halves((word >> 8 * half & nibbles[1]) | 0x64006400u, 0x2c002c00u, 0xd480d480u);
    }
  }
}

template <int FORMAT>
__device__ __forceinline__ void decode(const uint4& loaded, u32 (&pairs)[weights_per_load(FORMAT) / 2], const u32 (&nibbles)[2]) {
  const u32 words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
  constexpr int PAIRS = weights_per_load(FORMAT) / 8;
#pragma unroll
  for (int i = 0; i < 4; i++) decode_word<FORMAT>(words[i], pairs + PAIRS * i, nibbles);
}

// What a thread needs to finish its result: scales and biases (two of each if gated: of the gate and of "up"), the
// residual, and `first`, its element of x0. They are converted only when they are used, so that nothing waits for the
// loads.
struct Operands {
  T scale[2], bias[2], residual, first;
};

struct Largest {
  float value;
  int token;
};

template <int KIND>
struct Matrix {
  static constexpr int ROWS = rows_of(KIND), FORMAT = format_of(KIND), GROUPS = groups_of(KIND);
  static constexpr bool IS_GATED = GATED && KIND == FC;

  // This thread finishes row `n` of a group, for sequence `b`.
  __device__ __forceinline__ static Operands load_operands(const Block& block, const Layer* layer, int first_group) {
    const int group = first_group + threadIdx.x / (GROUP_ROWS * BATCH) * BLOCKS;
    const int n = threadIdx.x / BATCH % GROUP_ROWS, b = threadIdx.x % BATCH;
    Operands operands = {};
    if (group >= GROUPS || (IS_GATED && n >= 8)) return operands;
    const T* scales = (const T*)(KIND == HEAD ? block.model->head_scales : layer->scales[KIND % 4]);
    const T* bias = KIND == HEAD ? block.model->head_bias : layer->bias[KIND % 4];
#pragma unroll
    for (int i = 0; i < (IS_GATED ? 2 : 1); i++) {
      const int row = Stream::row_of(KIND, group, n + 8 * i);
      if (FORMAT == INT8 || FORMAT == FP8) operands.scale[i] = scales[row];
      if (bias) operands.bias[i] = bias[row];
      if (KIND == OUT || KIND == DOWN) operands.residual = *(volatile T*)(block.model->x + b * WIDTH + row);
      if (KIND == OUT && layer->skip) operands.first = block.model->x0[b * WIDTH + row];
    }
    return operands;
  }

  __device__ __forceinline__ static void finish(const Block& block, const Layer* layer, const Operands& operands, const float* results, int first_group, Largest& largest) {
    const int group = first_group + threadIdx.x / (GROUP_ROWS * BATCH) * BLOCKS;
    const int n = threadIdx.x / BATCH % GROUP_ROWS, b = threadIdx.x % BATCH;
    const int row = group * (IS_GATED ? 8 : GROUP_ROWS) + n;
    if (group >= GROUPS || row >= (IS_GATED ? HIDDEN : ROWS) || (IS_GATED && n >= 8)) return;
    float sum = 0.0f, up = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) {
      sum += results[warp * THREADS + threadIdx.x];
      if (IS_GATED) up += results[warp * THREADS + threadIdx.x + 8 * BATCH];
    }
    const float input_scale = FORMAT == DENSE ? 1.0f : block.input_scales[b];
    constexpr bool HAS_ROW_SCALES = FORMAT == INT8 || FORMAT == FP8;
    float value = sum * ((HAS_ROW_SCALES ? to_float(operands.scale[0]) : 1.0f) * input_scale) + to_float(operands.bias[0]);
    up = up * ((HAS_ROW_SCALES ? to_float(operands.scale[1]) : 1.0f) * input_scale) + to_float(operands.bias[1]);
    float residual = to_float(operands.residual);
    if (KIND == OUT && layer->skip)
      residual = rounded(to_float(layer->skip[0]) * residual + to_float(layer->skip[1]) * to_float(operands.first));
    const Model* model = block.model;
    if (KIND == QKV) model->qkv[b * ROWS + row] = from_float(value);
    if (KIND == OUT) model->x[b * ROWS + row] = from_float(residual + ATTENTION_SCALE * rounded(value));
    if (KIND == DOWN) model->x[b * ROWS + row] = from_float(residual + rounded(value));
    if (KIND == FC) {
      value = rounded(activate(rounded(value)));
      if (IS_GATED) value *= rounded(up);
      model->hidden[b * HIDDEN + row] = from_float(value);
    }
    if (KIND == HEAD) {
      value = rounded(value);
      if (SOFTCAP > 0.0f) value = rounded(SOFTCAP * rounded(tanhf(rounded(value / SOFTCAP))));
      model->logits[(i64)b * VOCAB + row] = value;
      if (value != value || largest.value != largest.value)
        largest.value = __uint_as_float(0x7fffffffu);
      else if (value > largest.value)  // rows come in increasing order, so the first of equal values is kept
        largest = Largest{value, row};
    }
  }

  __device__ __forceinline__ static void multiply(Block& block, Stream& stream, const Layer* layer, Operands operands, Largest& largest) {
    constexpr int W = weights_per_load(FORMAT), PRODUCTS = W / 4;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane % 4;
    const T* input = (const T*)block.work + (lane / 4 < BATCH ? lane / 4 : 0) * INPUT_STRIDE + quad * W;
    // for `load_matrices`: rows 0 to 7 and 8 to 15 of the first 16 bytes of a product, then of the second
    const int matrix_row = Stream::piece_offset(lane % 8, lane / 16) + lane / 8 % 2 * 512;
    const int matrix_row_2 = Stream::piece_offset(lane % 8, lane / 16 + 2) + lane / 8 % 2 * 512;
    const int piece = Stream::piece_offset(lane / 4, quad);
    for (int first = blockIdx.x; first < GROUPS; first += ROUND_GROUPS * BLOCKS) {
      float* results = block.results + block.round * (WARPS * THREADS);
      block.round ^= 1;
      for (int i = 0; i < ROUND_GROUPS && first + i * BLOCKS < GROUPS; i++) {
        float acc[2][4] = {};
#pragma unroll 1
        for (int chunk = warp; chunk < chunks_of(KIND); chunk += WARPS) {
          wait_copies<SLOTS - 1>();
          const char* slot = stream.slots + stream.read * SLOT_BYTES;
          const T* x = input + chunk * LOADS * 4 * W;
          if (FORMAT == DENSE) {
            u32 weights[2 * LOADS][4];
            uint4 pairs[LOADS];
            __syncwarp();  // lanes read what others copied
#pragma unroll
            for (int j = 0; j < LOADS; j++) {
              pairs[j] = *(const uint4*)(x + j * 4 * W);
              load_matrices(weights[2 * j], slot + j * 1024 + matrix_row);
              load_matrices(weights[2 * j + 1], slot + j * 1024 + matrix_row_2);
            }
            __syncwarp();
            stream.load();
#pragma unroll
            for (int j = 0; j < LOADS; j++) {
              multiply_add<DTYPE == FP16>(acc[0], weights[2 * j], pairs[j].x, pairs[j].y);
              multiply_add<DTYPE == FP16>(acc[1], weights[2 * j + 1], pairs[j].z, pairs[j].w);
            }
          } else {
            uint4 loaded[LOADS][2];
            float scale[2][LOADS];
#pragma unroll
            for (int j = 0; j < LOADS; j++) {
              loaded[j][0] = *(const uint4*)(slot + j * 1024 + piece);
              loaded[j][1] = *(const uint4*)(slot + j * 1024 + 512 + piece);
            }
            if (FORMAT == INT4) {
              const uint2 pairs = *(const uint2*)(slot + 2 * LOADS * 512 + lane * 8);
              scale[0][0] = to_float((T)pairs.x), scale[0][1] = to_float((T)(pairs.x >> 16));
              scale[1][0] = to_float((T)pairs.y), scale[1][1] = to_float((T)(pairs.y >> 16));
            }
            stream.load();
#pragma unroll
            for (int j = 0; j < LOADS; j++) {
              u32 low[W / 2], high[W / 2];
              decode<FORMAT>(loaded[j][0], low, block.nibbles);
              decode<FORMAT>(loaded[j][1], high, block.nibbles);
              float part[2][4];
#pragma unroll
              for (int p = 0; p < PRODUCTS; p++) {
                const uint4 pairs = *(const uint4*)(x + j * 4 * W + p / 2 * 8);
                const u32 weights[4] = {low[2 * p], high[2 * p], low[2 * p + 1], high[2 * p + 1]};
                multiply_add<true>(FORMAT == INT4 ? part[p % 2] : acc[p % 2], weights, p % 2 ? pairs.z : pairs.x, p % 2 ? pairs.w : pairs.y, FORMAT == INT4 && p < 2);
              }
              if (FORMAT == INT4) {
#pragma unroll
                for (int e = 0; e < 4; e++) acc[0][e] += scale[e / 2][j] * (part[0][e] + part[1][e]);
              }
            }
          }
          stream.read = stream.read + 1 == SLOTS ? 0 : stream.read + 1;
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int n = lane / 4 + e / 2 * 8, b = quad * 2 + e % 2;
          if (b < BATCH) results[warp * THREADS + (i * GROUP_ROWS + n) * BATCH + b] = acc[0][e] + acc[1][e];
        }
      }
      __syncthreads();
      if (first != blockIdx.x) operands = load_operands(block, layer, first);
      finish(block, layer, operands, results, first, largest);
    }
  }

  // A phase. Operands and the weights of the norm are loaded before the barrier: the phase before does not write them.
  __device__ __forceinline__ static void run(Block& block, Stream& stream, const Layer* layer, const T* input, const T* norm_weight,
                             const T* norm_bias, Largest& largest, const int* tokens, const int* starts) {
    const Operands operands = load_operands(block, layer, blockIdx.x);
    load_input<KIND>(block, input, norm_weight, norm_bias, KIND == QKV ? layer->skip : nullptr, tokens, starts);
    multiply(block, stream, layer, operands, largest);
    block.arrive();
  }
};

// Attention: each lane has VEC numbers of a head, so LANES lanes share a token and a warp reads TOKENS at a time.
constexpr int LANES = HEAD_SIZE / VEC;
constexpr int TOKENS = 32 / LANES;
constexpr int UNROLL = 4;
constexpr float LOG2_E = 1.4426950408889634f;

// VEC numbers of a key or value as the KV cache stores them; see `KV_CODECS` in `cache/buffer.py`.
struct Stored {
#if KV_CODES == DENSE
  uint4 bits;
#elif KV_CODES == INT4
  u32 bits, group;  // group: the codes of its minimum and step
  unsigned short base, minimum_unit, step_unit;
#else
  uint2 bits;
  unsigned short scale;
#endif
};
constexpr int SCALE_GROUP = HEAD_SIZE < 64 ? HEAD_SIZE : 64;
constexpr int CODE_BYTES = KV_CODES == DENSE ? HEAD_SIZE * 2 : KV_CODES == INT4 ? HEAD_SIZE / 2 : HEAD_SIZE;
constexpr int SCALE_BYTES = KV_CODES == INT4 ? HEAD_SIZE / 8 * 2 + 6 : HEAD_SIZE / SCALE_GROUP * 2;

// `index` is slot * KV_HEADS + kv head.
__device__ __forceinline__ Stored load_stored(const char* codes, const char* scales, i64 index) {
  const int part = threadIdx.x % LANES;
  Stored out;
  codes += index * CODE_BYTES + part * (CODE_BYTES / LANES);
  scales += index * SCALE_BYTES;
#if KV_CODES == DENSE
  out.bits = load_16(codes);
#elif KV_CODES == INT4
  const unsigned short* shared = (const unsigned short*)(scales + 2 * LANES);
  out.bits = load_4(codes);
  out.group = (unsigned char)scales[part] | (u32)(unsigned char)scales[LANES + part] << 8;
  out.base = shared[0], out.minimum_unit = shared[1], out.step_unit = shared[2];
#else
  out.bits = load_8(codes);
  out.scale = *(const unsigned short*)(scales + part * VEC / SCALE_GROUP * 2);
#endif
  return out;
}

__device__ __forceinline__ void read_stored(const Stored& stored, float* out) {
#if KV_CODES == DENSE
  unpack(stored.bits, out);
#elif KV_CODES == INT4
  const float minimum = bf16_to_float(stored.base) + (stored.group & 255) * bf16_to_float(stored.minimum_unit);
  const float step = (stored.group >> 8) * bf16_to_float(stored.step_unit);
#pragma unroll
  for (int e = 0; e < VEC; e++) out[e] = minimum + (stored.bits >> 4 * e & 15) * step;
#else
  u32 pairs[4];
  decode_word<KV_CODES>(stored.bits.x, pairs, nullptr);
  decode_word<KV_CODES>(stored.bits.y, pairs + 2, nullptr);
  const float scale = bf16_to_float(stored.scale);
#pragma unroll
  for (int e = 0; e < VEC; e++) out[e] = scale * half_to_float((unsigned short)(pairs[e / 2] >> e % 2 * 16));
#endif
}

__device__ __forceinline__ unsigned short float_to_bf16(float value) {
  const u32 bits = __float_as_uint(value);
  return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The maximum of `v` over `lanes` neighboring lanes: those of a scale group or a head.
__device__ __forceinline__ float lanes_max(float v, int lanes) {
#pragma unroll
  for (int offset = 1; offset < LANES; offset <<= 1) {
    const float other = __shfl_xor_sync(ALL_LANES, v, offset);
    if (offset < lanes) v = fmaxf(v, other);
  }
  return v;
}

// Encode a lane's part of a head, and replace it with the values that will be read back.
__device__ __forceinline__ Stored encode(float* v) {
  Stored out;
#if KV_CODES == DENSE
  out.bits = pack(v);
#elif KV_CODES == INT4  // `AffineCodec`: minima are rounded down and steps up, so that nothing is clipped
  float low = v[0], high = v[0];
#pragma unroll
  for (int e = 1; e < VEC; e++) low = fminf(low, v[e]), high = fmaxf(high, v[e]);
  const float margin = 1.0f + BF16_MARGIN;
  float base = -lanes_max(-low, LANES);
  out.base = float_to_bf16(base - fabsf(base) * BF16_MARGIN);
  base = bf16_to_float(out.base);
  out.minimum_unit = float_to_bf16(lanes_max(low - base, LANES) * margin / 255.0f);
  const float minimum_unit = bf16_to_float(out.minimum_unit);
  const float minimum = fminf(fmaxf(floorf((low - base) / (minimum_unit == 0.0f ? 1.0f : minimum_unit)), 0.0f), 255.0f);
  const float range = fmaxf(high - (base + minimum * minimum_unit), 0.0f) / 15.0f;
  out.step_unit = float_to_bf16(lanes_max(range, LANES) * margin / 255.0f);
  const float step_unit = bf16_to_float(out.step_unit);
  const float step = fminf(fmaxf(ceilf(range / (step_unit == 0.0f ? 1.0f : step_unit)), 0.0f), 255.0f);
  out.group = (u32)minimum | (u32)step << 8;
  const float start = base + minimum * minimum_unit, size = step * step_unit;
  out.bits = 0;
#pragma unroll
  for (int e = 0; e < VEC; e++)
    out.bits |= (u32)fminf(fmaxf(rintf((v[e] - start) / (size == 0.0f ? 1.0f : size)), 0.0f), 15.0f) << 4 * e;
#else
  float largest = 0.0f;
#pragma unroll
  for (int e = 0; e < VEC; e++) largest = fmaxf(largest, fabsf(v[e]));
  largest = lanes_max(largest, SCALE_GROUP / VEC);
  out.scale = float_to_bf16(largest / (KV_CODES == INT8 ? 127.0f : 448.0f));
  const float scale = bf16_to_float(out.scale);
  u32 words[2] = {0, 0};
#pragma unroll
  for (int e = 0; e < VEC; e++) {
    const float ratio = v[e] / (scale == 0.0f ? 1.0f : scale);
    u32 code;
    if (KV_CODES == INT8) {
      code = (u32)(int)rintf(fminf(fmaxf(ratio, -127.0f), 127.0f)) & 255;
    } else {
      const float value = round_to_fp8(fminf(fmaxf(ratio, -448.0f), 448.0f)), size = fabsf(value);
      const u32 bits = __float_as_uint(size);
      code = size < 0.015625f ? (u32)(size * 512.0f) : (bits >> 20) - (120 << 3);
      code |= __float_as_uint(value) >> 24 & 128;
    }
    words[e / 4] |= code << e % 4 * 8;
  }
  out.bits = uint2{words[0], words[1]};
#endif
  read_stored(out, v);
  return out;
}

__device__ __forceinline__ void store(const Stored& stored, char* codes, char* scales, i64 index) {
  const int part = threadIdx.x % LANES;
  codes += index * CODE_BYTES + part * (CODE_BYTES / LANES);
  scales += index * SCALE_BYTES;
#if KV_CODES == DENSE
  *(uint4*)codes = stored.bits;
#elif KV_CODES == INT4
  unsigned short* shared = (unsigned short*)(scales + 2 * LANES);
  *(u32*)codes = stored.bits;
  scales[part] = (char)stored.group;
  scales[LANES + part] = (char)(stored.group >> 8);
  if (part == 0) shared[0] = stored.base, shared[1] = stored.minimum_unit, shared[2] = stored.step_unit;
#else
  *(uint2*)codes = stored.bits;
  if (part * VEC % SCALE_GROUP == 0) *(unsigned short*)(scales + part * VEC / SCALE_GROUP * 2) = stored.scale;
#endif
}

// UNROLL tokens of a lane.
struct Keys {
  Stored keys[UNROLL], values[UNROLL];
};

// Normalize and rotate a lane's part of a head; as in the model, results are rounded after each.
__device__ __forceinline__ void norm_and_rotate(float* v, const T* weight, const float* rotation) {
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
  if (rotation) {  // an element and the one HEAD_SIZE / 2 further are a pair
#pragma unroll
    for (int e = 0; e < VEC; e++) {
      const float other = __shfl_xor_sync(ALL_LANES, v[e], LANES / 2);
      const float* pair = rotation + (part * VEC + e) % (HEAD_SIZE / 2);
      v[e] = rounded(v[e] * pair[0] + (part < LANES / 2 ? -other : other) * pair[HEAD_SIZE / 2]);
    }
  }
}

__device__ __forceinline__ Keys load_keys(const Layer* layer, const int* table, int kv_head, int token, int end) {
  Keys out;
#pragma unroll
  for (int u = 0; u < UNROLL; u++, token += WARPS * TOKENS) {
    out.keys[u] = out.values[u] = Stored{};
    if (token < end) {
      const i64 slot = (i64)table[token / BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE;
      out.keys[u] = load_stored(layer->keys, layer->key_scales, slot * KV_HEADS + kv_head);
      out.values[u] = load_stored(layer->values, layer->value_scales, slot * KV_HEADS + kv_head);
    }
  }
  return out;
}

// Online softmax of HEADS_PER_UNIT query heads over the tokens that a lane reads.
struct Softmax {
  float maximum[HEADS_PER_UNIT], sum[HEADS_PER_UNIT], acc[HEADS_PER_UNIT][VEC];

  // Add COUNT tokens; those from `valid` on are ignored.
  template <int COUNT>
  __device__ __forceinline__ void add(const float (&query)[HEADS_PER_UNIT][VEC], const float (&keys)[COUNT][VEC],
                                      const float (&values)[COUNT][VEC], int valid) {
    float scores[HEADS_PER_UNIT][COUNT];
#pragma unroll
    for (int h = 0; h < HEADS_PER_UNIT; h++)
#pragma unroll
      for (int u = 0; u < COUNT; u++) {
        scores[h][u] = 0.0f;
#pragma unroll
        for (int e = 0; e < VEC; e++) scores[h][u] += query[h][e] * keys[u][e];
      }
#pragma unroll
    for (int offset = LANES / 2; offset; offset >>= 1)
#pragma unroll
      for (int h = 0; h < HEADS_PER_UNIT; h++)
#pragma unroll
        for (int u = 0; u < COUNT; u++) scores[h][u] += __shfl_xor_sync(ALL_LANES, scores[h][u], offset);
#pragma unroll
    for (int h = 0; h < HEADS_PER_UNIT; h++) {
      float largest = maximum[h];
#pragma unroll
      for (int u = 0; u < COUNT; u++) {
        scores[h][u] *= rsqrtf((float)HEAD_SIZE) * LOG2_E;
        if (u < valid) largest = fmaxf(largest, scores[h][u]);
      }
      const float old = exp2f(maximum[h] - largest);
      maximum[h] = largest;
      sum[h] *= old;
#pragma unroll
      for (int e = 0; e < VEC; e++) acc[h][e] *= old;
#pragma unroll
      for (int u = 0; u < COUNT; u++) {
        const float weight = u < valid ? exp2f(scores[h][u] - largest) : 0.0f;
        sum[h] += weight;
#pragma unroll
        for (int e = 0; e < VEC; e++) acc[h][e] += weight * values[u][e];
      }
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

    const T* qkv = model->qkv + (i64)b * rows_of(QKV) + part * VEC;
    const float* rotation = model->frequencies ? block.rotation + b * HEAD_SIZE : nullptr;
    uint4 queries[HEADS_PER_UNIT];
#pragma unroll
    for (int h = 0; h < HEADS_PER_UNIT; h++) queries[h] = load_16(qkv + (first_head + h) * HEAD_SIZE);
    const uint4 new_key = load_16(qkv + (HEADS + kv_head) * HEAD_SIZE), new_value = load_16(qkv + (HEADS + KV_HEADS + kv_head) * HEAD_SIZE);
    float query[HEADS_PER_UNIT][VEC];
    Softmax softmax;
#pragma unroll
    for (int h = 0; h < HEADS_PER_UNIT; h++) {
      unpack(queries[h], query[h]);
      norm_and_rotate(query[h], layer->query_norm, rotation);
      softmax.maximum[h] = -1e30f;
      softmax.sum[h] = 0.0f;
#pragma unroll
      for (int e = 0; e < VEC; e++) softmax.acc[h][e] = 0.0f;
    }
    if (split == 0 && warp == 0) {  // the new token
      float keys[1][VEC], values[1][VEC];
      float *key = keys[0], *value = values[0];
      unpack(new_key, key);
      unpack(new_value, value);
      norm_and_rotate(key, layer->key_norm, rotation);
      if (layer->value_mix) {
        const T* embedded = layer->value_embedding + (i64)b * KV_HEADS * HEAD_SIZE + kv_head * HEAD_SIZE + part * VEC;
#pragma unroll
        for (int e = 0; e < VEC; e++)
          value[e] = rounded(to_float(layer->value_mix[0]) * value[e] + to_float(layer->value_mix[1]) * to_float(embedded[e]));
      }
      const Stored stored_key = encode(key), stored_value = encode(value);
      if (counts[b] > 0 && lane < LANES && first_head % GROUP == 0) {
        const i64 slot = (i64)table[stored / BLOCK_SIZE] * BLOCK_SIZE + stored % BLOCK_SIZE;
        store(stored_key, layer->keys, layer->key_scales, slot * KV_HEADS + kv_head);
        store(stored_value, layer->values, layer->value_scales, slot * KV_HEADS + kv_head);
      }
      softmax.add<1>(query, keys, values, lane < LANES);
    }
    // The loop is the same for all lanes of a warp: they read different tokens, but take part in the same shuffles.
    for (int base = begin + warp * TOKENS; base < end; base += UNROLL * WARPS * TOKENS) {
      const Keys current = loaded;
      const int here = token;
      token += UNROLL * WARPS * TOKENS;
      loaded = load_keys(layer, table, kv_head, token, end);
      float keys[UNROLL][VEC], values[UNROLL][VEC];
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        read_stored(current.keys[u], keys[u]);
        read_stored(current.values[u], values[u]);
      }
      softmax.add<UNROLL>(query, keys, values, (end - here + WARPS * TOKENS - 1) / (WARPS * TOKENS));
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
    if (splits > 1) {  // the block that finishes last adds up the parts
      u32* finished = model->counters + 2 + unit % (UNITS * BATCH);
      if (threadIdx.x == 0) *block.flag = count(finished) == (u32)splits - 1 ? 1.0f : 0.0f;
      __syncthreads();
      if (*block.flag != 0.0f) {
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
  if (!waited) block.wait();  // otherwise its arrival would count for the barrier before
  block.arrive();
}

// The argmax over a warp (the first of equal values), and whether any value is NaN.
__device__ __forceinline__ void argmax(float& best, int& token, int& is_nan) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) {
    const float value = __shfl_xor_sync(ALL_LANES, best, offset);
    const int index = __shfl_xor_sync(ALL_LANES, token, offset);
    is_nan |= __shfl_xor_sync(ALL_LANES, is_nan, offset);
    if (value > best || (value == best && index < token)) best = value, token = index;
  }
}

// Write the argmax of each sequence, -1 if its logits are not finite, and the inputs of the next step.
__device__ __forceinline__ void next_token(Block& block, const Largest& largest, int* tokens, int* starts, const int* counts) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Model* model = block.model;
  float* values = (float*)block.work;
  int* indices = (int*)(values + THREADS);
  __syncthreads();  // the input is no longer needed
  values[threadIdx.x] = largest.value;
  indices[threadIdx.x] = largest.token;
  __syncthreads();
  for (int b = warp; b < BATCH; b += WARPS) {
    float best = -1e38f;
    int token = 0x7fffffff, is_nan = 0;
    for (int index = lane * BATCH + b; index < THREADS; index += 32 * BATCH) {  // threads with results of the sequence
      is_nan |= values[index] != values[index];
      if (values[index] > best || (values[index] == best && indices[index] < token)) best = values[index], token = indices[index];
    }
    argmax(best, token, is_nan);
    if (lane == 0) {
      model->max_logits[b * BLOCKS + blockIdx.x] = is_nan ? __uint_as_float(0x7fffffffu) : best;
      model->max_tokens[b * BLOCKS + blockIdx.x] = token;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) *block.flag = count(model->counters + 1) == BLOCKS - 1 ? 1.0f : 0.0f;
  __syncthreads();
  if (*block.flag == 0.0f) return;
  for (int b = warp; b < BATCH; b += WARPS) {
    float best = -1e38f;
    int token = 0x7fffffff, is_nan = 0;
    for (int i = lane; i < BLOCKS; i += 32) {
      const float value = load_float(model->max_logits + b * BLOCKS + i);
      const int index = *(volatile int*)(model->max_tokens + b * BLOCKS + i);
      is_nan |= value != value;
      if (value > best || (value == best && index < token)) best = value, token = index;
    }
    argmax(best, token, is_nan);
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
  float* results = (float*)(work + WORK_BYTES);
  float* rotation = (float*)(work + WORK_BYTES + 2 * RESULT_BYTES);
  float* scratch = rotation + ROTATION_BYTES / 4;
  // read from memory, since the compiler would load constants into registers again for every use
  if (threadIdx.x < 2) ((u32*)scratch)[threadIdx.x] = threadIdx.x ? 0x00f000f0u : 0x000f000fu;
  __syncthreads();
  const volatile u32* nibbles = (u32*)scratch;
  Block block = {model, layers, work, results, rotation, scratch, scratch + 2 * WARPS * BATCH, scratch + 2 * WARPS * BATCH + 8,
                 0, 0, 0, {nibbles[0], nibbles[1]}};
  __syncthreads();
  Stream stream;
  stream.layers = layers;
  stream.model = model;
  stream.slots = (char*)scratch + SCRATCH_BYTES + threadIdx.x / 32 * (SLOTS * SLOT_BYTES);
  stream.kind = QKV;
  stream.layer = stream.write = stream.read = 0;
  stream.group = blockIdx.x;
  stream.done = false;
  stream.start_group();
  for (int i = 0; i < SLOTS; i++) stream.load();
  if (model->frequencies) {
    constexpr int PAIRS = HEAD_SIZE / 2;
    for (int i = threadIdx.x; i < BATCH * PAIRS; i += THREADS) {
      const float angle = starts[i / PAIRS] * model->frequencies[i % PAIRS];
      rotation[i / PAIRS * HEAD_SIZE + i % PAIRS] = cosf(angle);
      rotation[i / PAIRS * HEAD_SIZE + PAIRS + i % PAIRS] = sinf(angle);
    }
  }

  Largest largest = {-1e38f, 0x7fffffff};
  for (int i = 0; i < LAYERS; i++) {
    const Layer* layer = layers + i;
    const bool embeds = i == 0 && model->token_embedding;
    Matrix<QKV>::run(block, stream, layer, model->x, layer->norm_weight[0], layer->norm_bias[0], largest, embeds ? tokens : nullptr, starts);
    attend(block, layer, tables, table_stride, starts, counts);
    Matrix<OUT>::run(block, stream, layer, model->attended, nullptr, nullptr, largest, nullptr, starts);
    Matrix<FC>::run(block, stream, layer, model->x, layer->norm_weight[1], layer->norm_bias[1], largest, nullptr, starts);
    Matrix<DOWN>::run(block, stream, layer, model->hidden, nullptr, nullptr, largest, nullptr, starts);
  }
  const Operands operands = Matrix<HEAD>::load_operands(block, layers, blockIdx.x);
  load_input<HEAD>(block, model->x, model->norm_weight, model->norm_bias, nullptr, nullptr, starts);
  Matrix<HEAD>::multiply(block, stream, layers, operands, largest);
  next_token(block, largest, tokens, starts, counts);
}
