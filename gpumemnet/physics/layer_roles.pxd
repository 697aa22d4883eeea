# The types with which Cython compiles layer_roles.py; the text of the module is that file alone.
cimport cython

cdef Py_ssize_t _KINDS, _ADD, _CONCATENATE, _LINEAR, _MULTIPLY, _RMS_NORM, _MATMUL, _SOFTMAX, _ROTATION_REACH, _PROJECTIONS
cdef Py_ssize_t _WIDEST_FILTER, _CONV2D
cdef long long _ALIAS, _STARTS_BLOCK, _ATTENDS, _READS_SCORES, _READS_PROJECTIONS, _NORMALISES
cdef long long _CONSTANT, _INNER_SUM, _PASSED_ON, _BLOCK_BEGIN, _IN_BLOCK, _WRITTEN_OUT, _SIBLING, _DEPTHWISE
cdef long long[::1] _TRAITS

@cython.locals(job=Py_ssize_t, layer=Py_ssize_t, count=Py_ssize_t, layer_count=Py_ssize_t, job_count=Py_ssize_t,
               longest=Py_ssize_t, left=Py_ssize_t, first=Py_ssize_t, stored=Py_ssize_t, chain='long long[::1]')
cpdef object fill_roles(long long[::1] roles, const long long[::1] counts, const long long[::1] kinds,
                        const double[::1] activations, const double[::1] parameters)

@cython.locals(at=Py_ssize_t, layer=Py_ssize_t, next_layer=Py_ssize_t, kind=Py_ssize_t, following=Py_ssize_t, is_scored=bint,
               is_weighed=bint, can_be=bint)
cdef void _note_neighbours(long long[::1] roles, const long long[::1] kinds, const double[::1] activations,
                           const double[::1] parameters, long long[::1] chain, Py_ssize_t stored) noexcept

@cython.locals(width=Py_ssize_t)
cdef bint _is_depthwise(double parameters, double channels) noexcept

@cython.locals(product=Py_ssize_t, before=Py_ssize_t)
cdef void _note_rotation(long long[::1] roles, const long long[::1] kinds, long long[::1] chain, Py_ssize_t stored,
                         Py_ssize_t at) noexcept

@cython.locals(at=Py_ssize_t)
cdef void _note_siblings(long long[::1] roles, const long long[::1] kinds, long long[::1] chain, Py_ssize_t last) noexcept

@cython.locals(last=Py_ssize_t, has_attention=bint, all_attend=bint, attends=bint, attended=bint, at=Py_ssize_t,
               layer=Py_ssize_t, begin=Py_ssize_t)
cdef void _note_blocks(long long[::1] roles, const long long[::1] kinds, long long[::1] chain, Py_ssize_t stored) noexcept
