# The types with which Cython compiles totals.py.
cimport cython
from gpumemnet.physics.step_memory cimport JobNumbers

cdef Py_ssize_t _FIELDS, _TOTALS

cdef enum:
    FLAG_COUNT = 16

@cython.final
cdef class OptionNumbers:
    cdef public double[FLAG_COUNT] flags
    cdef public double input_bytes, weight_bytes, activation_bytes, copy_bytes, uncast_bytes
    cdef public double state_copies, temporary_copies, loop_copies, filter_copies
    cdef public bint is_autocast, is_math_attention, is_checkpointed, is_channels_last, frees_outputs_first, keeps_outputs

@cython.locals(count=Py_ssize_t, row=Py_ssize_t, jobs=list, job=JobNumbers)
cpdef list fill_totals(double[::1] features, Py_ssize_t width, const double[::1] numbers, const long long[::1] codes, list options)

@cython.locals(number=double, batch_size=double, input_elements=double, total_activations=double, total_parameters=double,
               trainable_parameters=double, sequence_length=double, gradient_accumulation=double, traced_peak_bytes=double,
               trainable_share=double, gradient_bytes=double, inputs=double, before_flags='double[7]', after_flags='double[7]')
cdef void _fill_row(double[::1] features, Py_ssize_t begin, const double[::1] numbers, Py_ssize_t count, Py_ssize_t row,
                    OptionNumbers option, JobNumbers job) noexcept
