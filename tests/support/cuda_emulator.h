// Runs a CUDA C++ kernel on the CPU, for tests. Include this before the kernel source, then call
//     run_grid(blocks, threads, shared_bytes, [&] { kernel(arguments...); });
// Every CUDA thread is a fiber with its own stack; all fibers of all blocks take turns on the calling
// host thread. A fiber runs until it waits (barrier, warp operation) or polls (load_acquire,
// __nanosleep). Misuse that would hang or fault on a GPU prints a message and aborts.
// Needs g++ or clang++ with glibc; do not include it in more than one file of a program.
#pragma once
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <deque>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define threadIdx (emu::current->thread_index)
#define blockIdx (emu::current->block_index)
#define blockDim (emu::block_size)
#define gridDim (emu::grid_size)
// Macros, because some versions of glibc declare functions with these names.
#define rsqrtf(x) (1.0f / sqrtf(x))
#define __expf(x) expf(x)

struct uint3 { unsigned x, y, z; };
struct alignas(8) float2 { float x, y; };
struct alignas(8) int2 { int x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };

// The same function as _longjmp; the declaration in setjmp.h may be replaced (_FORTIFY_SOURCE) by a
// checked one, which refuses to jump between stacks.
extern "C" [[noreturn]] void emu_longjmp(struct __jmp_buf_tag*, int) __asm__("_longjmp");

namespace emu {

constexpr size_t stack_bytes = 64 * 1024, guard_bytes = 4096;
constexpr size_t overrun_bytes = 256;         // bytes after the shared memory of a block that must not change
constexpr unsigned idle_round_limit = 100000;  // rounds of polling without progress before giving up
constexpr unsigned working_operations = 1000;  // see note_operation

enum Operation : int { op_none, op_syncwarp, op_shfl_xor, op_shfl, op_any };
static const char* const operation_names[] = {"none", "__syncwarp", "__shfl_xor_sync", "__shfl_sync",
                                              "__any_sync"};
struct Block {
    std::vector<char> storage;
    char* shared = nullptr;
    unsigned live = 0, at_barrier = 0, operations_since_poll = 0;
};
struct Warp {
    Operation operation = op_none;
    unsigned arrived = 0, at_barrier = 0, finished = 0;
    // Two sets of values: a fast thread may enter the next operation before a slow one has read these results.
    unsigned values[2][32], parity = 0;
};
struct Copy {
    char* target;
    const char* source;
    unsigned bytes, size;
    long group;
};
struct Fiber {
    uint3 thread_index{0, 0, 0}, block_index{0, 0, 0};
    Block* block = nullptr;
    Warp* warp = nullptr;
    bool started = false, at_barrier = false;
    long committed_groups = 0;
    std::deque<Copy> copies;
    jmp_buf resume_point;
};

static uint3 block_size{0, 1, 1}, grid_size{0, 1, 1};
static size_t shared_size;
static std::vector<Fiber> fibers;
static std::vector<Fiber*> next_round;  // the fibers that can run
static Fiber* current;
static const std::function<void()>* body;
static jmp_buf scheduler_point;
static size_t live_fibers;
static bool progress;

[[noreturn]] inline void fail(const char* message, const char* detail = "") {
    if (current)
        fprintf(stderr, "cuda_emulator: block %u thread %u: %s%s\n", current->block_index.x,
                current->thread_index.x, message, detail);
    else
        fprintf(stderr, "cuda_emulator: %s%s\n", message, detail);
    abort();
}

// Gives control to the scheduler until something puts this fiber into next_round.
__attribute__((noinline)) static void suspend() {
    if (_setjmp(current->resume_point) == 0) emu_longjmp(scheduler_point, 1);
}

// Lets all other fibers run, because this one waits for memory that another thread writes.
inline void poll() {
    current->block->operations_since_poll = 0;
    next_round.push_back(current);
    suspend();
}

// A polling loop may contain barriers and warp operations, so these only count as progress in a block
// that has completed many of them since it last polled.
inline void note_operation() {
    if (++current->block->operations_since_poll > working_operations) progress = true;
}

inline void release_barrier(Block* block) {
    block->at_barrier = 0;
    Fiber* first = &fibers[size_t(current->block_index.x) * block_size.x];
    for (Fiber* f = first; f != first + block_size.x; ++f) {
        if (f->at_barrier && f != current) next_round.push_back(f);
        f->at_barrier = false;
        f->warp->at_barrier = 0;
    }
    note_operation();
}

static void fiber_main() {
    (*body)();
    Fiber* f = current;
    if (f->warp->arrived) fail("finished while its warp waits in ", operation_names[f->warp->operation]);
    f->warp->finished++;
    f->block->live--;
    live_fibers--;
    progress = true;
    // As on the GPU, a block barrier does not wait for finished threads.
    if (f->block->live && f->block->at_barrier == f->block->live) release_barrier(f->block);
    emu_longjmp(scheduler_point, 1);
}

// Stacks are kept for later launches. The lowest page of each is a guard against overflow.
static char* stack_of(size_t index) {
    static std::vector<char*> stacks;
    while (stacks.size() <= index) {
        void* p = mmap(nullptr, stack_bytes + guard_bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED || mprotect(p, guard_bytes, PROT_NONE)) fail("no memory for stacks");
        stacks.push_back(static_cast<char*>(p) + guard_bytes);
    }
    return stacks[index];
}

__attribute__((noinline)) static void resume(Fiber* f) {
    static ucontext_t entry;
    current = f;
    if (_setjmp(scheduler_point)) return;
    if (f->started) emu_longjmp(f->resume_point, 1);
    f->started = true;
    getcontext(&entry);
    entry.uc_stack.ss_sp = stack_of(size_t(f - fibers.data()));
    entry.uc_stack.ss_size = stack_bytes;
    entry.uc_link = nullptr;
    makecontext(&entry, fiber_main, 0);
    setcontext(&entry);
}

inline void run(unsigned block_count, unsigned threads, size_t shared_bytes,
                const std::function<void()>& function) {
    if (!fibers.empty()) fail("run_grid called inside run_grid");
    if (threads == 0 || threads % 32 || threads > 1024) fail("threads must be a multiple of 32 up to 1024");
    grid_size.x = block_count;
    block_size.x = threads;
    shared_size = shared_bytes;
    body = &function;
    live_fibers = size_t(block_count) * threads;
    std::vector<Block> blocks(block_count);
    std::vector<Warp> warps(live_fibers / 32);
    fibers = std::vector<Fiber>(live_fibers);
    next_round.clear();
    for (Block& block : blocks) {
        block.live = threads;
        block.storage.assign(shared_bytes + overrun_bytes + 127, char(0xFF));
        block.shared = reinterpret_cast<char*>((size_t(block.storage.data()) + 127) / 128 * 128);
    }
    for (size_t i = 0; i < fibers.size(); ++i) {
        fibers[i].thread_index.x = unsigned(i % threads);
        fibers[i].block_index.x = unsigned(i / threads);
        fibers[i].block = &blocks[i / threads];
        fibers[i].warp = &warps[i / 32];
        next_round.push_back(&fibers[i]);
    }
    std::vector<Fiber*> round;
    for (unsigned idle_rounds = 0; live_fibers;) {
        round.swap(next_round);
        next_round.clear();
        progress = false;
        for (Fiber* f : round) resume(f);
        current = nullptr;
        if (live_fibers && next_round.empty()) fail("deadlock: threads wait at barriers or warp operations forever");
        idle_rounds = progress ? 0 : idle_rounds + 1;
        if (idle_rounds > idle_round_limit) fail("deadlock: threads poll memory that nobody changes");
    }
    for (Block& block : blocks)
        for (size_t i = 0; i < overrun_bytes; ++i)
            if (block.shared[shared_bytes + i] != char(0xFF)) fail("a thread wrote past the end of shared memory");
    fibers.clear();
}

// Exchanges one value among the 32 threads of a warp; returns the values of all of them.
inline const unsigned* warp_exchange(Operation operation, unsigned mask, unsigned value) {
    Warp* w = current->warp;
    const char* name = operation_names[operation];
    if (mask != 0xFFFFFFFFu) fail("only the full mask is supported in ", name);
    if (w->finished) fail("another thread of the warp has finished and cannot take part in ", name);
    if (w->at_barrier) fail("another thread of the warp waits in __syncthreads and cannot take part in ", name);
    if (w->arrived && w->operation != operation)
        fail("other threads of the warp wait in a different operation than ", name);
    const unsigned* values = w->values[w->parity];
    w->operation = operation;
    w->values[w->parity][current->thread_index.x % 32] = value;
    if (++w->arrived < 32) {
        suspend();
    } else {
        w->arrived = 0;
        w->parity ^= 1;
        Fiber* first = current - current->thread_index.x % 32;
        for (Fiber* f = first; f != first + 32; ++f)
            if (f != current) next_round.push_back(f);
        note_operation();
    }
    return values;
}

template <class To, class From>
inline To bits(From from) {
    static_assert(sizeof(To) == 4 && sizeof(From) == 4, "only 4-byte types are supported");
    To to;
    memcpy(&to, &from, 4);
    return to;
}

// A copy is performed as late as allowed (when waited for), but its target is filled with 0xFF at
// once. So a missing wait, and a copy to memory that is still being read, both show as wrong data.
inline void start_copy(void* target, const void* source, unsigned bytes, unsigned size) {
    char* t = static_cast<char*>(target);
    if (size_t(target) % size) fail("misaligned shared pointer of an asynchronous copy");
    if (size_t(source) % size) fail("misaligned global pointer of an asynchronous copy");
    if (bytes > size) fail("asynchronous copy of more than 16 bytes");
    if (t < current->block->shared || t + size > current->block->shared + shared_size)
        fail("the target of an asynchronous copy is outside shared memory");
    memset(t, 0xFF, size);
    current->copies.push_back({t, static_cast<const char*>(source), bytes, size, current->committed_groups});
}

template <class T>
inline T add(T* address, T value) {
    if (value == T(0)) poll();  // only a read, perhaps in a loop
    else progress = true;
    T old = *address;
    *address = T(unsigned(old) + unsigned(value));
    return old;
}

}  // namespace emu

// Runs kernel() for every thread of the grid, all blocks at the same time.
template <class Kernel>
void run_grid(unsigned blocks, unsigned threads, size_t shared_bytes, Kernel kernel) {
    emu::run(blocks, threads, shared_bytes, std::function<void()>(kernel));
}

inline char* shared_memory() { return emu::current->block->shared; }

inline void __syncthreads() {
    emu::Fiber* f = emu::current;
    if (f->warp->arrived)
        emu::fail("in __syncthreads while its warp waits in ", emu::operation_names[f->warp->operation]);
    f->at_barrier = true;
    f->warp->at_barrier++;
    if (++f->block->at_barrier < f->block->live) emu::suspend();
    else emu::release_barrier(f->block);
}

inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) { emu::warp_exchange(emu::op_syncwarp, mask, 0); }
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
    if (lane_mask < 0 || lane_mask > 31) emu::fail("lane mask of __shfl_xor_sync is not in 0..31");
    unsigned lane = threadIdx.x % 32;
    return emu::bits<T>(emu::warp_exchange(emu::op_shfl_xor, mask, emu::bits<unsigned>(value))[lane ^ unsigned(lane_mask)]);
}
template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane) {
    return emu::bits<T>(emu::warp_exchange(emu::op_shfl, mask, emu::bits<unsigned>(value))[lane & 31]);
}
inline int __any_sync(unsigned mask, int predicate) {
    const unsigned* values = emu::warp_exchange(emu::op_any, mask, predicate != 0);
    unsigned any = 0;
    for (int i = 0; i < 32; ++i) any |= values[i];
    return int(any);
}

inline void __threadfence() {}
inline void __nanosleep(unsigned) { emu::poll(); }
inline unsigned load_acquire(const unsigned* address) {
    emu::poll();
    return *static_cast<const volatile unsigned*>(address);
}
inline unsigned atomicAdd(unsigned* address, unsigned value) { return emu::add(address, value); }
inline int atomicAdd(int* address, int value) { return emu::add(address, value); }

inline void copy_async_16(void* shared, const void* global, unsigned bytes) { emu::start_copy(shared, global, bytes, 16); }
inline void copy_async_4(void* shared, const void* global) { emu::start_copy(shared, global, 4, 4); }
inline void commit_copies() { emu::current->committed_groups++; }
template <int N>
inline void wait_copies() {
    emu::Fiber* f = emu::current;
    for (; !f->copies.empty() && f->copies.front().group < f->committed_groups - N; f->copies.pop_front()) {
        const emu::Copy& c = f->copies.front();
        memset(c.target, 0, c.size);
        if (c.bytes) memcpy(c.target, c.source, c.bytes);
    }
}

inline float __uint_as_float(unsigned x) { return emu::bits<float>(x); }
inline unsigned __float_as_uint(float x) { return emu::bits<unsigned>(x); }
#define EMU_MIN_MAX(A, B, R)                                          \
    inline R min(A a, B b) { return (R)a < (R)b ? (R)a : (R)b; }      \
    inline R max(A a, B b) { return (R)a > (R)b ? (R)a : (R)b; }
EMU_MIN_MAX(int, int, int)
EMU_MIN_MAX(unsigned, unsigned, unsigned)
EMU_MIN_MAX(int, unsigned, unsigned)
EMU_MIN_MAX(unsigned, int, unsigned)
EMU_MIN_MAX(long, long, long)
EMU_MIN_MAX(unsigned long, unsigned long, unsigned long)
EMU_MIN_MAX(long long, long long, long long)
#undef EMU_MIN_MAX
