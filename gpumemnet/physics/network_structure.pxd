# The types with which Cython compiles network_structure.py.
cimport cython
from gpumemnet.physics.layer_records cimport Layer, LayerKind

cdef Py_ssize_t _ROTATION_REACH, _PROJECTIONS, _WIDEST_FILTER

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

@cython.locals(first=Py_ssize_t, pooling=Layer, before=Layer, norm=Layer, total=Layer, is_added=bint)
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
