/* The driver's library, of which PyTorch asks whether this process has a context.  The rest is generated (build.py). */
#include "state.h"

__attribute__((visibility("default"))) int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    (void)device;
    *flags = 0;
    *active = null_gpu_own() != 0;
    return 0;
}

__attribute__((visibility("default"))) int cuCtxGetCurrent(void **context) {
    *context = null_gpu_own();
    return 0;
}
