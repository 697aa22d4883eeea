/* A CUDA runtime without a GPU: memory is accounted for, kernels are not run.
 *
 * Loaded before PyTorch, it answers for libcudart as far as a training step asks.  PyTorch's own code above is the real one:
 * operators, their temporaries, the caching allocator.  An allocation takes addresses of a reserved range that nobody may
 * touch, a copy to the host yields zeros.  What is not written here is generated as "success, nothing done" (build.py).
 */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "state.h"

#define EXPORT __attribute__((visibility("default")))
#define GRANULE (2ULL << 20) /* the driver hands out memory in pieces of 2 MiB */
#define ADDRESSES (1ULL << 42)

/* ---- memory ------------------------------------------------------------------------------------------------------------ */

typedef struct allocation {
    uintptr_t address;
    uint64_t bytes;
    struct allocation *next;
} allocation;

static allocation *allocations;
static uintptr_t base, unused;
static null_gpu_slot *own;
static pid_t own_pid;
static cudaError_t last;

static cudaError_t fail(cudaError_t error) { return last = error; }

/* The slot of this process; the first call makes its context. */
static null_gpu_slot *slot(void) {
    if (own && own_pid == getpid()) return own;
    null_gpu_state *state = null_gpu_open();
    if (!state) return NULL;
    null_gpu_lock();
    null_gpu_slot *found = NULL;
    for (int i = 0; i < NULL_GPU_SLOTS && !found; i++) {
        null_gpu_slot *each = &state->slots[i];
        if (!each->pid || each->pid == getpid()) found = each;
    }
    if (found && null_gpu_used(state) + state->context_bytes <= state->total_bytes) {
        found->pid = getpid();
        found->held_bytes = state->context_bytes;
        own = found;
        own_pid = getpid();
        base = unused = (uintptr_t)mmap(NULL, ADDRESSES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        allocations = NULL;
    } else
        found = NULL;
    null_gpu_unlock();
    return found;
}

EXPORT cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    null_gpu_slot *mine = slot();
    if (!mine) return fail(null_gpu_open() ? cudaErrorMemoryAllocation : cudaErrorNoDevice);
    uint64_t whole = (bytes + GRANULE - 1) / GRANULE * GRANULE;
    null_gpu_state *state = null_gpu_open();
    null_gpu_lock();
    int fits = null_gpu_used(state) + whole <= state->total_bytes;
    if (fits) mine->held_bytes += whole;
    null_gpu_unlock();
    if (!fits) return fail(cudaErrorMemoryAllocation);
    allocation *made = malloc(sizeof *made);
    *made = (allocation){unused, whole, allocations};
    allocations = made;
    unused += whole; /* addresses are never used again: four tebibytes outlast a job */
    if (unused > base + ADDRESSES) unused = base;
    *pointer = (void *)made->address;
    return cudaSuccess;
}

EXPORT cudaError_t cudaFree(void *pointer) {
    null_gpu_slot *mine = slot();
    if (!pointer || !mine) return cudaSuccess;
    for (allocation **each = &allocations; *each; each = &(*each)->next)
        if ((*each)->address == (uintptr_t)pointer) {
            allocation *gone = *each;
            *each = gone->next;
            mine->held_bytes -= gone->bytes;
            free(gone);
            return cudaSuccess;
        }
    return fail(cudaErrorInvalidValue);
}

EXPORT cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    null_gpu_state *state = null_gpu_open();
    if (!slot()) return fail(cudaErrorNoDevice);
    *total_bytes = state->total_bytes;
    *free_bytes = state->total_bytes - null_gpu_used(state);
    return cudaSuccess;
}

static int on_device(const void *pointer) { return base && (uintptr_t)pointer >= base && (uintptr_t)pointer < base + ADDRESSES; }

/* What the host sends and reads back whole comes back: DDP's reducer agrees with the other ranks on its buckets this way
   (torch/csrc/distributed/c10d/reducer.cpp, sync_bucket_indices). */
enum { SENT = 64, MOST_SENT = 1 << 16 };
static struct {
    uintptr_t address;
    size_t bytes;
    void *content;
} sent[SENT];
static unsigned next_sent;

static void remember(uintptr_t address, const void *content, size_t bytes) {
    for (unsigned each = 0; each < SENT; each++)
        if (sent[each].address == address) sent[each].bytes = 0;
    if (!content || bytes > MOST_SENT) return;
    unsigned place = next_sent++ % SENT;
    free(sent[place].content);
    sent[place].address = address, sent[place].bytes = bytes, sent[place].content = malloc(bytes);
    memcpy(sent[place].content, content, bytes);
}

/* Fills with zeros; whole pages take no memory then, which is little beside what a model may swap to the host. */
static void clear(void *to, size_t bytes) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = ((uintptr_t)to + page - 1) / page * page;
    uintptr_t end = (uintptr_t)to + bytes, last = end / page * page;
    if (bytes > MOST_SENT && last > first && madvise((void *)first, last - first, MADV_DONTNEED) == 0) {
        memset(to, 0, first - (uintptr_t)to);
        memset((void *)last, 0, end - last);
    } else
        memset(to, 0, bytes);
}

static void read_back(void *to, uintptr_t address, size_t bytes) {
    for (unsigned each = 0; each < SENT; each++)
        if (sent[each].address == address && sent[each].bytes == bytes) {
            memcpy(to, sent[each].content, bytes);
            return;
        }
    clear(to, bytes); /* nothing was computed */
}

static cudaError_t copy(void *to, const void *from, size_t bytes) {
    null_gpu_lock();
    if (on_device(to)) remember((uintptr_t)to, on_device(from) ? NULL : from, bytes);
    else if (on_device(from)) read_back(to, (uintptr_t)from, bytes);
    else memmove(to, from, bytes);
    null_gpu_unlock();
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    (void)kind;
    return copy(to, from, bytes);
}
EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    (void)kind, (void)stream;
    return copy(to, from, bytes);
}
EXPORT cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                                     enum cudaMemcpyKind kind, cudaStream_t stream) {
    (void)kind, (void)stream;
    for (size_t row = 0; row < height; row++) copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return cudaSuccess;
}
EXPORT cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    (void)flags;
    *pointer = calloc(1, bytes);
    return *pointer ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
EXPORT cudaError_t cudaFreeHost(void *pointer) {
    free(pointer);
    return cudaSuccess;
}
EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    memset(attributes, 0, sizeof *attributes);
    int device = on_device(pointer);
    attributes->type = device ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
    attributes->device = device ? 0 : -1;
    attributes->devicePointer = device ? (void *)pointer : NULL;
    attributes->hostPointer = device ? NULL : (void *)pointer;
    return cudaSuccess;
}
EXPORT cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
    (void)symbol;
    return cudaMalloc(pointer, 1);
}

/* ---- the device: an H200 of public specification ------------------------------------------------------------------------ */

EXPORT cudaError_t cudaGetDeviceCount(int *count) {
    *count = null_gpu_open() ? 1 : 0;
    return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}
EXPORT cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return cudaSuccess;
}
EXPORT cudaError_t cudaSetDevice(int device) {
    return device == 0 && slot() ? cudaSuccess : fail(device == 0 ? cudaErrorMemoryAllocation : cudaErrorInvalidDevice);
}
EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    (void)device;
    memset(found, 0, sizeof *found);
    strcpy(found->name, "NVIDIA H200");
    memcpy(found->uuid.bytes, "null-gpu-0000000", 16);
    found->totalGlobalMem = null_gpu_open()->total_bytes;
    found->sharedMemPerBlock = 48 << 10;
    found->sharedMemPerBlockOptin = 227 << 10;
    found->sharedMemPerMultiprocessor = 228 << 10;
    found->regsPerBlock = found->regsPerMultiprocessor = 65536;
    found->warpSize = 32;
    found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
    found->maxThreadsDim[2] = 64;
    found->maxGridSize[0] = 2147483647;
    found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->major = 9;
    found->multiProcessorCount = 132;
    found->maxThreadsPerMultiProcessor = 2048;
    found->maxBlocksPerMultiProcessor = 32;
    found->l2CacheSize = 60 << 20;
    found->totalConstMem = 64 << 10;
    found->textureAlignment = 512;
    found->memPitch = 2147483647;
    found->concurrentKernels = found->unifiedAddressing = found->cooperativeLaunch = 1;
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp properties;
    cudaGetDeviceProperties(&properties, device);
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = properties.maxThreadsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)properties.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)properties.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)properties.sharedMemPerMultiprocessor; break;
    case cudaDevAttrWarpSize: *value = properties.warpSize; break;
    case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = properties.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = properties.regsPerBlock; break;
    case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
    case cudaDevAttrMaxGridDimX: *value = properties.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = properties.maxGridSize[1]; break;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *value = properties.maxThreadsDim[0]; break;
    case cudaDevAttrL2CacheSize: *value = properties.l2CacheSize; break;
    default: *value = 0;
    }
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
    (void)device;
    snprintf(text, (size_t)length, "0000:00:00.0");
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    (void)device, (void)peer;
    *can = 0;
    return cudaSuccess;
}
EXPORT cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
EXPORT cudaError_t cudaDriverGetVersion(int *version) { return cudaRuntimeGetVersion(version); }
EXPORT cudaError_t cudaGetLastError(void) {
    cudaError_t error = last;
    last = cudaSuccess;
    return error;
}
EXPORT cudaError_t cudaPeekAtLastError(void) { return last; }
EXPORT const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : error == cudaErrorNoDevice ? "no CUDA-capable device is detected" : "null GPU";
}
EXPORT const char *cudaGetErrorName(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorUnknown";
}

/* ---- driver entry points that PyTorch asks the runtime for ----------------------------------------------------------------- */

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active); /* null_driver.c */
static int done(void) { return 0; }
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *status) {
    (void)version, (void)flags;
    *function = strcmp(symbol, "cuDevicePrimaryCtxGetState") ? (void *)done : (void *)cuDevicePrimaryCtxGetState;
    if (status) *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

/* ---- streams, events, kernels --------------------------------------------------------------------------------------------- */

static cudaError_t handle(void **made) {
    *made = calloc(1, 64);
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *made) { return handle((void **)made); }
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *made, unsigned flags) { return (void)flags, handle((void **)made); }
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *made, unsigned flags, int priority) {
    return (void)flags, (void)priority, handle((void **)made);
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *made) { return handle((void **)made); }
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *made, unsigned flags) { return (void)flags, handle((void **)made); }
EXPORT cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    (void)start, (void)end;
    *milliseconds = 1.0F;
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    (void)stream;
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                            cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                            size_t *count) {
    (void)id, (void)graph, (void)nodes, (void)edges, (void)count;
    return cudaStreamIsCapturing(stream, status);
}
EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    (void)function;
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->ptxVersion = attributes->binaryVersion = 90;
    attributes->maxDynamicSharedSizeBytes = 227 << 10;
    return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared) {
    (void)function, (void)shared;
    *blocks = threads > 0 && threads <= 1024 ? 2048 / threads : 1;
    return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads,
                                                                         size_t shared, unsigned flags) {
    return (void)flags, cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}

static __thread struct {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
} configuration;

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    configuration.grid = grid, configuration.block = block, configuration.shared = shared, configuration.stream = stream;
    return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
    *(cudaStream_t *)stream = configuration.stream;
    return cudaSuccess;
}
EXPORT void **__cudaRegisterFatBinary(void *binary) { return (void)binary, calloc(1, sizeof(void *)); }
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}
