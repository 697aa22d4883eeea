# The types with which Cython compiles bin_shares.py.
cimport cython

cdef double _E, _REACH

@cython.locals(edge_count=Py_ssize_t, count=Py_ssize_t, rows=Py_ssize_t, row=Py_ssize_t, answer=Py_ssize_t, total=double,
               component=Py_ssize_t, share=double, location=double, scale=double, at=Py_ssize_t, end=Py_ssize_t, middle=Py_ssize_t,
               below=double, up_to=double)
cpdef object fill_shares(const double[::1] mixtures, Py_ssize_t components, const double[::1] log_edges, double[::1] answers)
