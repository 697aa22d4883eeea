# The types with which Cython compiles network_structure.py.
cimport cython
from gpumemnet.physics.step_memory cimport JobNumbers, block_bytes, class_of_block, segment_cost

@cython.final
cdef class LayerKind:
    cdef public Py_ssize_t group
    cdef public double mask_bytes, statistics, second_share, autocast_output_bytes, autocast_input_bytes
    cdef public bint is_alias, saves_input, saves_output, has_bias, is_cast, is_attention, is_embedding, is_gate, is_convolution, is_norm
    cdef public bint is_average_pool, is_add, is_concatenate, is_conv2d, is_dropout, is_linear, is_matmul, is_multiply, is_other, is_rms_norm, is_softmax
    cdef public bint computes_attention, reads_scores, reads_projections, starts_block

@cython.final
@cython.no_gc  # it refers to a kind, which refers to nothing
@cython.freelist(256)
cdef class Layer:
    cdef public LayerKind kind
    cdef public double activations, parameters
    cdef public bint is_constant_product, is_inner_sum, is_passed_on, begins_block, is_in_block, is_decomposed_norm, is_read_later, is_written_out
    cdef public bint is_sibling, is_depthwise, is_recomputed, has_backward, is_output_kept, is_trained, saves_input
    cdef public double element_bytes, input_element_bytes, elements, output_bytes, output_cost
    cdef public double weight_cost, second_cost, second_elements
    cdef public Py_ssize_t output_class, weight_class, second_class, trains, block
    cpdef void describe(self, LayerKind kind, double activations, double parameters, Py_ssize_t trains, Py_ssize_t block) noexcept

cdef double _FULL

@cython.locals(layer=Layer)
cpdef void note_element_types(JobNumbers job, list layers) noexcept

@cython.locals(at=Py_ssize_t, layer=Layer, kind=LayerKind, has_embedding=bint, is_weights=bint, is_kernel=bint, element_bytes=double)
cdef void _note_mixed_types(JobNumbers job, list layers) noexcept

@cython.locals(layer=Layer, following=Layer)
cdef bint _makes_attention_scores(list layers, Py_ssize_t at) noexcept

@cython.locals(layer=Layer, previous=Layer)
cdef bint _makes_attention_weights(list layers, Py_ssize_t at) noexcept

@cython.locals(second=double, block=double)
cpdef void note_tensor_sizes(JobNumbers job, Layer layer) noexcept

cdef Py_ssize_t _ROTATION_REACH, _PROJECTIONS, _SCORES_REACH, _WIDEST_FILTER

@cython.locals(at=Py_ssize_t, layer=Layer, kind=LayerKind, last=Py_ssize_t)
cpdef void note_structure(list layers) noexcept

@cython.locals(layer=Layer, following=Layer)
cdef void _note_inner_sum(list layers, Py_ssize_t at) noexcept

@cython.locals(layer=Layer, following=Layer, previous=Layer, is_scored=bint)
cdef void _note_scale_of_scores(list layers, Py_ssize_t at) noexcept

@cython.locals(layer=Layer, following=Layer)
cdef void _note_decomposed_norm(list layers, Py_ssize_t at) noexcept

@cython.locals(layer=Layer, following=Layer, other=Layer)
cdef void _note_projection(list layers, Py_ssize_t at) noexcept

@cython.locals(at=Py_ssize_t, layer=Layer, previous=Layer)
cdef void _note_siblings(list layers, Py_ssize_t last) noexcept

@cython.locals(halves=Layer, second=Layer, total=Layer, first=Layer, projection=Layer, following=Layer, product=Py_ssize_t,
               before=Py_ssize_t)
cdef void _note_rotation(list layers, Py_ssize_t at) noexcept

@cython.locals(product=Py_ssize_t, layer=Layer)
cdef Py_ssize_t _first_product(list layers, Py_ssize_t at) noexcept

@cython.locals(layer=Layer, following=Layer, previous=Layer, can_be=bint)
cdef void _note_depthwise(list layers, Py_ssize_t at) noexcept

@cython.locals(layer=Layer, before=Layer, read=Layer, norm=Layer, channels=double)
cdef void _note_shortcut(list layers, Py_ssize_t at) noexcept

@cython.locals(before=Layer, layer=Layer, total=Layer, is_added=bint)
cdef void _note_parallel_norm(list layers, Py_ssize_t at) noexcept

@cython.locals(layer=Layer, following=Layer, scaled=Layer, projection=Layer, after=Py_ssize_t)
cdef void _note_projection_of_scores(list layers, Py_ssize_t at) noexcept

@cython.locals(layer=Layer, part=Layer, total=double, first=Py_ssize_t, position=Py_ssize_t)
cdef void _note_split_convolution(list layers, Py_ssize_t at) noexcept

@cython.locals(first=Py_ssize_t, layer=Layer, pooling=Layer, before=Layer, norm=Layer, total=Layer, is_added=bint, channels=double)
cdef void _note_branch(list layers, Py_ssize_t at) noexcept

@cython.locals(width=Py_ssize_t)
cdef bint _is_depthwise(double parameters, double channels) noexcept

@cython.locals(layer=Layer, block=Py_ssize_t)
cdef bint _note_stated_blocks(list layers) noexcept

@cython.locals(at=Py_ssize_t, layer=Layer, first=Layer, last=Py_ssize_t, begin=Py_ssize_t, has_attention=bint, attends=bint,
               attended=bint, all_attend=bint)
cdef Py_ssize_t _note_residual_blocks(list layers) noexcept

@cython.locals(at=Py_ssize_t, layer=Layer, last=Py_ssize_t)
cdef Py_ssize_t _note_plain_blocks(list layers) noexcept
