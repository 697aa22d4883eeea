# The types with which Cython compiles tensor_sizes.py.
cimport cython
from gpumemnet.physics.allocator_blocks cimport block_bytes, class_of_block, segment_cost
from gpumemnet.physics.layer_records cimport Layer, LayerKind
from gpumemnet.physics.step_memory cimport JobNumbers

cdef double _FULL

@cython.locals(layer=Layer)
cpdef void note_element_types(JobNumbers job, list layers) noexcept

@cython.locals(at=Py_ssize_t, layer=Layer, kind=LayerKind, has_embedding=bint, is_weights=bint, element_bytes=double)
cdef void _note_mixed_types(JobNumbers job, list layers) noexcept

@cython.locals(layer=Layer, following=Layer)
cdef bint _makes_attention_scores(list layers, Py_ssize_t at) noexcept

@cython.locals(layer=Layer, previous=Layer)
cdef bint _makes_attention_weights(list layers, Py_ssize_t at) noexcept

@cython.locals(second=double, block=double)
cpdef void note_tensor_sizes(JobNumbers job, Layer layer) noexcept
