# The types with which Cython compiles totals.py; the text of the module is that file alone.
cimport cython

cdef Py_ssize_t _FLAGS, _FIELDS, _OPTION_WIDTH, _JOB_WIDTH, _TOTALS

@cython.locals(count=Py_ssize_t, sets=Py_ssize_t, job=Py_ssize_t, is_short=bint, batch_size=double, input_elements=double,
               total_activations=double, total_parameters=double, trainable_parameters=double, sequence_length=double,
               gradient_accumulation=double, traced_peak_bytes=double, flags=Py_ssize_t, option=Py_ssize_t, flag=Py_ssize_t,
               input_bytes=double, weight_bytes=double, activation_bytes=double, copy_bytes=double, base_bytes=double,
               state_copies=double, temporary_copies=double, loop_copies=double, filter_copies=double, share=double,
               trained_bytes=double, inputs=double, place=Py_ssize_t)
cpdef object fill_totals(double[::1] features, Py_ssize_t width, double[::1] job_columns, const double[::1] numbers,
                         const long long[::1] codes, const double[::1] options)
