/* cuBLAS and cuDNN without a GPU: handles, one algorithm for everything, no workspace.  See null_cuda.c; plans are in null_cudnn.c.
 *
 * The interface is the binary one of cublas_api.h, cublasLt.h and cudnn_graph.h: pointers and integers.
 */
#include <cudnn_version.h>
#include <stdint.h>
#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))

static int handle(void **made) {
    *made = calloc(1, 64);
    return 0;
}

/* ---- cuBLAS ------------------------------------------------------------------------------------------------------------------ */

EXPORT int cublasCreate_v2(void **made) { return handle(made); }
EXPORT int cublasGetPointerMode_v2(void *context, int *mode) { return (void)context, *mode = 0; }
EXPORT int cublasGetMathMode(void *context, int *mode) { return (void)context, *mode = 0; }
EXPORT size_t cublasLtGetVersion(void) { return 130000; }
EXPORT int cublasLtMatmulDescCreate(void **made, int compute, int scale) { return (void)compute, (void)scale, handle(made); }
EXPORT int cublasLtMatmulPreferenceCreate(void **made) { return handle(made); }
EXPORT int cublasLtMatrixLayoutCreate(void **made, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    return (void)type, (void)rows, (void)columns, (void)leading, handle(made);
}
EXPORT int cublasLtMatmulAlgoGetHeuristic(void *context, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                          int requested, void *results, int *count) {
    (void)context, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference, (void)results;
    *count = requested > 0; /* the caller has zeroed the results: success, no workspace */
    return 0;
}

/* ---- cuDNN -------------------------------------------------------------------------------------------------------------------- */

#define MAKES(name) \
    EXPORT int name(void **made) { return handle(made); }
MAKES(cudnnCreate)
MAKES(cudnnCreateActivationDescriptor)
MAKES(cudnnCreateConvolutionDescriptor)
MAKES(cudnnCreateDropoutDescriptor)
MAKES(cudnnCreateFilterDescriptor)
MAKES(cudnnCreatePoolingDescriptor)
MAKES(cudnnCreateTensorDescriptor)

EXPORT size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
EXPORT int cudnnGetProperty(int which, int *value) {
    const int parts[] = {CUDNN_MAJOR, CUDNN_MINOR, CUDNN_PATCHLEVEL};
    *value = which >= 0 && which < 3 ? parts[which] : 0;
    return 0;
}
EXPORT size_t cudnnGetCudartVersion(void) { return 13000; }
EXPORT const char *cudnnGetErrorString(int status) { return (void)status, "null GPU"; }
EXPORT void cudnnGetLastErrorString(char *text, size_t length) {
    if (length) *text = 0;
}
EXPORT int cudnnDropoutGetStatesSize(void *context, size_t *bytes) { return (void)context, (int)(*bytes = 0); }
EXPORT int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *context, int mode, int operations, void *x, void *z, void *y,
                                                                    void *scale, void *activation, size_t *bytes) {
    (void)context, (void)mode, (void)operations, (void)x, (void)z, (void)y, (void)scale, (void)activation;
    return (int)(*bytes = 0);
}
EXPORT int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *context, int mode, int operations, void *x, void *y, void *dy,
                                                             void *dz, void *dx, void *scale, void *activation, size_t *bytes) {
    (void)context, (void)mode, (void)operations, (void)x, (void)y, (void)dy, (void)dz, (void)dx, (void)scale, (void)activation;
    return (int)(*bytes = 0);
}
EXPORT int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *context, int mode, int operations, void *activation, void *x,
                                                                size_t *bytes) {
    (void)context, (void)mode, (void)operations, (void)activation, (void)x;
    return (int)(*bytes = 0);
}
