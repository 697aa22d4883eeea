/* What the null GPU's processes share: who holds how much, in a file that every one of them maps.  See build.py. */
#pragma once
#include <stdint.h>

#define NULL_GPU_SLOTS 4096

typedef struct {
    int64_t pid; /* 0: never used; kept after the process has ended */
    uint64_t held_bytes;
} null_gpu_slot;

typedef struct {
    uint64_t total_bytes;
    uint64_t driver_bytes;  /* the driver's own share */
    uint64_t context_bytes; /* of each process */
    uint64_t lists;         /* 1: used bytes per process are told */
    null_gpu_slot slots[NULL_GPU_SLOTS];
} null_gpu_state;

/* The shared state of this process; opened anew after a fork, since locks belong to an open file. */
null_gpu_state *null_gpu_open(void);
void null_gpu_lock(void);
void null_gpu_unlock(void);
/* The slot of this process, NULL while it has no context. */
null_gpu_slot *null_gpu_own(void);
/* Whether the slot's process lives; a zombie holds nothing. */
int null_gpu_alive(const null_gpu_slot *slot);
uint64_t null_gpu_used(const null_gpu_state *state);
