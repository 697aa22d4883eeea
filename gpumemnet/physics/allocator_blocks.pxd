# The types with which Cython compiles allocator_blocks.py.
cimport cython

cdef double _BLOCK, _ROUNDING, _MEDIUM_SEGMENT, _SMALL_TOP, _MEDIUM_TOP, _LARGE_TOP
cdef Py_ssize_t _CLASSES

cpdef double block_bytes(double size) noexcept

@cython.locals(top=double, block_class=Py_ssize_t)
cpdef Py_ssize_t class_of_block(double block) noexcept

cpdef double segment_cost(double block, Py_ssize_t block_class) noexcept
