/* NVML of the null GPU: device and processes read from the shared state. */
#include <stdio.h>
#include <string.h>

#include "state.h"

#define EXPORT __attribute__((visibility("default")))
enum { SUCCESS = 0, UNINITIALIZED = 1, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
#define NOT_TOLD (~0ULL)

typedef struct {
    unsigned long long total, free, used;
} memory;
typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} memory_v2;
typedef struct {
    unsigned pid;
    unsigned long long used_bytes;
    unsigned gpu_instance, compute_instance;
} process;
typedef struct {
    unsigned pid;
    unsigned long long used_bytes;
} process_v1;
static int text(char *to, unsigned length, const char *from) {
    snprintf(to, length, "%s", from);
    return SUCCESS;
}

EXPORT int nvmlInitWithFlags(unsigned flags) { return (void)flags, null_gpu_open() ? SUCCESS : UNINITIALIZED; }
EXPORT int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
EXPORT int nvmlShutdown(void) { return SUCCESS; }
EXPORT const char *nvmlErrorString(int error) { return (void)error, "null GPU"; }
EXPORT int nvmlSystemGetDriverVersion(char *to, unsigned length) { return text(to, length, "stand-in"); }
EXPORT int nvmlDeviceGetCount_v2(unsigned *count) { return *count = 1, SUCCESS; }
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    return index ? NOT_FOUND : (*device = (void *)null_gpu_open(), SUCCESS);
}
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) { return (void)bus, nvmlDeviceGetHandleByIndex_v2(0, device); }
EXPORT int nvmlDeviceGetUUID(void *device, char *to, unsigned length) { return (void)device, text(to, length, "GPU-null"); }
EXPORT int nvmlDeviceGetName(void *device, char *to, unsigned length) { return (void)device, text(to, length, "NVIDIA H200"); }
EXPORT int nvmlDeviceGetMigMode(void *device, unsigned *now, unsigned *pending) {
    return (void)device, *now = *pending = 0, SUCCESS;
}
EXPORT int nvmlDeviceGetMemoryInfo(void *device, memory *found) {
    (void)device;
    const null_gpu_state *state = null_gpu_open();
    unsigned long long used = null_gpu_used(state);
    *found = (memory){state->total_bytes, state->total_bytes - used, used};
    return SUCCESS;
}
EXPORT int nvmlDeviceGetMemoryInfo_v2(void *device, memory_v2 *found) {
    (void)device;
    const null_gpu_state *state = null_gpu_open();
    unsigned long long used = null_gpu_used(state);
    *found = (memory_v2){found->version, state->total_bytes, state->driver_bytes, state->total_bytes - used, used - state->driver_bytes};
    return SUCCESS;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process *found) {
    (void)device;
    const null_gpu_state *state = null_gpu_open();
    unsigned room = found ? *count : 0, living = 0;
    for (int i = 0; i < NULL_GPU_SLOTS && state->slots[i].pid; i++) {
        const null_gpu_slot *each = &state->slots[i];
        if (!each->held_bytes || !null_gpu_alive(each)) continue;
        if (living < room) found[living] = (process){(unsigned)each->pid, state->lists ? each->held_bytes : NOT_TOLD, ~0U, ~0U};
        living++;
    }
    *count = living;
    return living > room ? INSUFFICIENT_SIZE : SUCCESS;
}

/* PyTorch's allocator lists processes when memory runs out, and fails where that is refused, as in some containers. */
EXPORT int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, process_v1 *found) {
    process all[NULL_GPU_SLOTS];
    unsigned room = *count;
    if (!null_gpu_open()->lists) return NOT_SUPPORTED;
    *count = NULL_GPU_SLOTS;
    nvmlDeviceGetComputeRunningProcesses_v3(device, count, all);
    for (unsigned i = 0; i < room && i < *count; i++) found[i] = (process_v1){all[i].pid, all[i].used_bytes};
    return *count > room ? INSUFFICIENT_SIZE : SUCCESS;
}

/* What PyTorch looks up for its messages and for multi-GPU memory. */
#define REFUSES(name) \
    EXPORT int name(void) { return NOT_SUPPORTED; }
REFUSES(nvmlDeviceGetGpuFabricInfoV)
REFUSES(nvmlDeviceGetNvLinkRemoteDeviceType)
REFUSES(nvmlDeviceGetNvLinkRemotePciInfo_v2)
REFUSES(nvmlSystemGetCudaDriverVersion_v2)
