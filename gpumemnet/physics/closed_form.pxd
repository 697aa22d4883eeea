# The types with which Cython compiles closed_form.py.
cimport cython
from gpumemnet.physics.step_memory cimport JobNumbers, StepMemory
from gpumemnet.physics.step_memory cimport add_frozen_moment, block_bytes, class_of_block, find_peaks, segment_cost, write_columns
from gpumemnet.physics.network_structure cimport Layer, LayerKind, note_element_types, note_structure, note_tensor_sizes

cdef enum:  # lengths of arrays; assigning _NO_CLASS and its like checks them against closed_form.py
    CLASSES = 10

cdef double _FULL, _LOSS, _PADDED_IMAGE
cdef bint _TF32_READS_IMAGES
cdef Py_ssize_t _REACH, _LAYERS_AT_ONCE, _CLASSES, _COLUMNS
cdef list _KINDS
cdef double[CLASSES] _NO_CLASS

@cython.locals(row=Py_ssize_t, at=Py_ssize_t, count=Py_ssize_t, layer_count=Py_ssize_t, job_count=Py_ssize_t, left=Py_ssize_t,
               longest=Py_ssize_t, first=Py_ssize_t, records=list, layers=list, batch=Layer, memory=StepMemory, job=JobNumbers)
cpdef object fill_columns(double[::1] features, Py_ssize_t width, Py_ssize_t begin, list jobs,
                          const long long[::1] counts, const long long[::1] kinds,
                          const double[::1] activations, const double[::1] parameters, const long long[::1] trains,
                          const long long[::1] blocks, double blas_workspace_bytes)

@cython.locals(stored=Py_ssize_t, at=Py_ssize_t, kind=LayerKind, layer=Layer)
cdef list _stored_layers(list records, const long long[::1] kinds, const double[::1] activations,
                         const double[::1] parameters, const long long[::1] trains, const long long[::1] blocks,
                         Py_ssize_t first, Py_ssize_t count, StepMemory memory)

@cython.locals(block=double, block_class=Py_ssize_t)
cdef void _add_tensors(double *amounts, double size, double copies) noexcept

@cython.locals(at=Py_ssize_t, layer=Layer, following=Layer, source=Layer, projected=Layer, block_input=Layer,
               tied=Layer)
cdef object _walk_layers(JobNumbers job, Layer batch, list layers, StepMemory memory)

@cython.locals(parameters=double, frozen=double, has_backward=bint, layer=Layer, kind=LayerKind)
cdef void _note_trained_layers(JobNumbers job, list layers) noexcept

@cython.locals(tied=Layer, last=Layer, layer=Layer, largest=double)
cdef Layer _tied_embedding(list layers)

cdef void _hold_tied_gradient(JobNumbers job, StepMemory memory, Layer tied, double copies) noexcept

@cython.locals(last=Layer)
cdef void _hold_named_output(JobNumbers job, StepMemory memory, list layers) noexcept

@cython.locals(is_saved=bint)
cdef bint _keeps_output(Layer layer, Layer following) noexcept

cdef void _keep_output(StepMemory memory, Layer layer, Py_ssize_t block_class, double cost) noexcept

@cython.locals(block=double, block_class=Py_ssize_t)
cdef void _keep_bytes(StepMemory memory, Layer layer, double size) noexcept

@cython.locals(layer=Layer, kind=LayerKind, is_block_input=bint)
cdef void _keep_tensors(StepMemory memory, list layers, Py_ssize_t at, Layer source, Layer projected, Layer following) noexcept

@cython.locals(layer=Layer, factor=Layer, before=Py_ssize_t, nearest=Py_ssize_t)
cdef bint _keeps_weighed_factor(list layers, Py_ssize_t at, Layer source) noexcept

cdef void _hold_weights(JobNumbers job, StepMemory memory, Layer layer) noexcept

cdef void _end_block(StepMemory memory, Layer layer, Layer following) noexcept

@cython.locals(c=Py_ssize_t, total=double)
cdef void _add_operator(JobNumbers job, StepMemory memory, Layer layer, Layer source, Layer block_input, bint is_first) noexcept

cdef void _hold_other_inputs(StepMemory memory, Layer layer, Layer source, Layer block_input) noexcept

@cython.locals(c=Py_ssize_t, moment=double, total=double)
cdef void _add_backward(JobNumbers job, StepMemory memory, Layer layer) noexcept

cdef double _extra_gradients(Layer layer) noexcept

@cython.locals(is_half=bint, copied=double)
cdef double _layout_copies(JobNumbers job, Layer layer, Layer source, bint is_first) noexcept

@cython.locals(cost=double)
cdef void _create_gradients(JobNumbers job, StepMemory memory, Layer layer) noexcept

@cython.locals(c=Py_ssize_t, moment=double, total=double)
cdef void _add_softmax(JobNumbers job, StepMemory memory, Layer layer, Layer source) noexcept

@cython.locals(c=Py_ssize_t, trained=double, loss=double)
cdef void _add_loss(JobNumbers job, StepMemory memory, list layers, Layer last) noexcept

@cython.locals(c=Py_ssize_t, moment=double, total=double)
cdef void _add_previous_output(StepMemory memory) noexcept
