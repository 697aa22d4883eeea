# The types with which Cython compiles settled_counts.py.
cimport cython

cdef Py_ssize_t _TOTAL_ACTIVATIONS, _TOTAL_PARAMETERS, _TRAINABLE_PARAMETERS, _FIELDS
cdef Py_ssize_t _MISSING_TOTAL, _OTHER_TOTAL, _LARGE_TOTAL, _LARGE_TRAINABLE, _PER_FIELD

@cython.locals(jobs=Py_ssize_t, left=Py_ssize_t, row=Py_ssize_t, first=Py_ssize_t, end=Py_ssize_t, field=Py_ssize_t,
               total=double, trainable=double, number=double)
cpdef object settle_counts(double[::1] numbers, const long long[::1] layer_counts, const double[::1] activations,
                           const double[::1] parameters, const double[::1] limits, long long[::1] broken)

@cython.locals(field=Py_ssize_t, number=double)
cdef Py_ssize_t _first_broken(double[::1] numbers, Py_ssize_t jobs, Py_ssize_t row, const double[::1] limits) noexcept

@cython.locals(derived=double, stated=double, layer=Py_ssize_t)
cdef Py_ssize_t _settle_total(double[::1] numbers, Py_ssize_t jobs, Py_ssize_t row, const double[::1] amounts, Py_ssize_t first,
                              Py_ssize_t end, Py_ssize_t field, const double[::1] limits) noexcept
