/* Plans of cuDNN without a GPU.
 *
 * By default every question has one answer of zeros: one engine configuration, no workspace, an engine with neither knobs nor notes.
 * With NULL_GPU_CUDNN, the path of a libcudnn.so.9 from 9.8 on, that library answers: for the device described in
 * NULL_GPU_CUDNN_DEVICE instead of the handle that PyTorch gives (NVIDIA, cuDNN documentation, "Deviceless Ahead-of-Time
 * Compilation").  So PyTorch's own code chooses among the real plans and allocates their workspaces.  Plans are not executed.
 *
 * Numbers are those of cudnn_graph_v9.h.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum { HEURISTICS = 4, PLAN = 5, DEVICE = 38 };
enum { HEURISTICS_DEVICE = 204, PLAN_HANDLE = 400, PLAN_DEVICE = 407, GRAPH_HANDLE = 800, DEVICE_JSON = 2702 };
enum { TYPE_INT64 = 3, TYPE_DESCRIPTOR = 15, TYPE_INT32 = 23, TYPE_CHAR = 24 };
enum { KNOB_CHOICES = 302, KNOB_INFO = 1302, NUMERICAL_NOTE = 1303, BEHAVIOR_NOTE = 1305 };

static struct {
    int (*create)(int, void **);
    int (*destroy)(void *);
    int (*finalize)(void *);
    int (*set)(void *, int, int, int64_t, const void *);
    int (*get)(void *, int, int, int64_t, int64_t *, void *);
    void *device;
} real;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void *symbol(void *library, const char *name) {
    void *found = dlsym(library, name);
    if (!found) {
        fprintf(stderr, "null GPU: %s\n", dlerror());
        abort();
    }
    return found;
}

/* A name space of its own: the functions of this library must not take the place of those that cuDNN's parts call. */
static void load(void) {
    const char *path = getenv("NULL_GPU_CUDNN"), *device = getenv("NULL_GPU_CUDNN_DEVICE");
    if (!path || !device) return;
    void *library = dlmopen(LM_ID_NEWLM, path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "null GPU: %s\n", dlerror());
        abort();
    }
    real.destroy = symbol(library, "cudnnBackendDestroyDescriptor");
    real.finalize = symbol(library, "cudnnBackendFinalize");
    real.set = symbol(library, "cudnnBackendSetAttribute");
    real.get = symbol(library, "cudnnBackendGetAttribute");
    int (*create)(int, void **) = symbol(library, "cudnnBackendCreateDescriptor");
    int status = create(DEVICE, &real.device);
    if (!status) status = real.set(real.device, DEVICE_JSON, TYPE_CHAR, (int64_t)strlen(device), device);
    if (!status) status = real.finalize(real.device);
    if (status) {
        fprintf(stderr, "null GPU: cuDNN does not accept the description of the device: status %d\n", status);
        abort();
    }
    real.create = create;
}

static int is_real(void) { return pthread_once(&once, load), real.create != NULL; }

/* Which attribute of a descriptor takes the device: remembered from its creation to its end. */
typedef struct asks {
    void *descriptor;
    int attribute;
    struct asks *next;
} asks;
static asks *waiting;
static pthread_mutex_t waiting_lock = PTHREAD_MUTEX_INITIALIZER;

static int take(void *descriptor) {
    int attribute = 0;
    pthread_mutex_lock(&waiting_lock);
    for (asks **each = &waiting; *each; each = &(*each)->next)
        if ((*each)->descriptor == descriptor) {
            asks *gone = *each;
            attribute = gone->attribute;
            *each = gone->next;
            free(gone);
            break;
        }
    pthread_mutex_unlock(&waiting_lock);
    return attribute;
}

EXPORT int cudnnBackendCreateDescriptor(int type, void **made) {
    if (!is_real()) {
        *made = calloc(1, 64);
        return 0;
    }
    int status = real.create(type, made);
    if (!status && (type == HEURISTICS || type == PLAN)) {
        asks *each = malloc(sizeof *each);
        pthread_mutex_lock(&waiting_lock);
        *each = (asks){*made, type == PLAN ? PLAN_DEVICE : HEURISTICS_DEVICE, waiting};
        waiting = each;
        pthread_mutex_unlock(&waiting_lock);
    }
    return status;
}
EXPORT int cudnnBackendDestroyDescriptor(void *descriptor) {
    if (!is_real()) return free(descriptor), 0;
    take(descriptor);
    return real.destroy(descriptor);
}
EXPORT int cudnnBackendSetAttribute(void *descriptor, int name, int type, int64_t count, const void *elements) {
    if (!is_real() || name == GRAPH_HANDLE || name == PLAN_HANDLE) return 0;
    return real.set(descriptor, name, type, count, elements);
}
EXPORT int cudnnBackendFinalize(void *descriptor) {
    if (!is_real()) return 0;
    int attribute = take(descriptor);
    int status = attribute ? real.set(descriptor, attribute, TYPE_DESCRIPTOR, 1, &real.device) : 0;
    return status ? status : real.finalize(descriptor);
}
EXPORT int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t requested, int64_t *count, void *elements) {
    if (is_real()) return real.get(descriptor, name, type, requested, count, elements);
    int64_t found = name != KNOB_CHOICES && name != KNOB_INFO && name != NUMERICAL_NOTE && name != BEHAVIOR_NOTE;
    if (count) *count = found;
    if (found && requested > 0 && elements && type == TYPE_INT64) *(int64_t *)elements = 0;
    if (found && requested > 0 && elements && type == TYPE_INT32) *(int32_t *)elements = 0;
    return 0;
}
EXPORT int cudnnBackendExecute(void *handle, void *plan, void *variant) { return (void)handle, (void)plan, (void)variant, 0; }
