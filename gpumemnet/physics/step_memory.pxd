# The types with which Cython compiles step_memory.py.
cimport cython

cdef double _BLOCK, _ROUNDING, _MEDIUM_SEGMENT, _SMALL_TOP, _MEDIUM_TOP, _LARGE_TOP
cdef double _SMALL_SEGMENT, _MEDIUM_LIMIT, _CUBLASLT, _TYPICAL, _HANDLES
cdef Py_ssize_t _CLASSES, _SIZES, _GROUPS, _FIELDS, _TOTALS

cpdef double block_bytes(double size) noexcept

@cython.locals(top=double, block_class=Py_ssize_t)
cpdef Py_ssize_t class_of_block(double block) noexcept

cpdef double segment_cost(double block, Py_ssize_t block_class) noexcept

cdef enum:  # lengths of arrays; assigning _NO_CLASS and its like checks them against step_memory.py
    CLASSES = 10
    GROUPS = 11
    SIZES = 4
    FLAG_COUNT = 16

cdef double[CLASSES] _NO_CLASS
cdef double[GROUPS] _NO_GROUP
cdef double[SIZES] _NO_SIZE

@cython.final
cdef class OptionNumbers:
    cdef public double[FLAG_COUNT] flags
    cdef public double input_bytes, weight_bytes, activation_bytes, copy_bytes, uncast_bytes
    cdef public double state_copies, temporary_copies, loop_copies, filter_copies
    cdef public bint is_autocast, is_math_attention, is_checkpointed, is_channels_last, frees_outputs_first, keeps_outputs

@cython.final
cdef class JobNumbers:
    cdef public double batch_size, positions, input_elements, input_bytes, frozen_parameters, weight_bytes, copy_bytes
    cdef public double uncast_bytes, state_copies, temporary_copies, loop_copies, filter_copies, new_gradients
    cdef public bint is_autocast, is_math_attention, is_checkpointed, is_channels_last
    cdef public double batches_on_gpu
    cdef public bint frees_outputs_first, keeps_outputs

@cython.final
cdef class StepMemory:
    cdef double[CLASSES] weights, trained, filter_state, kept, standing, recomputed, weight_copies, named_output, moment
    cdef double[CLASSES] backward_peak, forward_peak, frozen_peak, resident, step, peak
    cdef double[GROUPS] group_counts, kept_by_group
    cdef double backward_total, forward_total, loss_total, loop_cost, last_parameter_cost, layer_count, block_count
    cdef double logits_bytes, attention_matrix_bytes, largest_output_bytes, largest_convolution_bytes, largest_parameters
    cdef Py_ssize_t loop_class
    cdef void clear(self) noexcept

@cython.locals(count=Py_ssize_t, row=Py_ssize_t, jobs=list, job=JobNumbers)
cpdef list fill_totals(double[::1] features, Py_ssize_t width, const double[::1] numbers, const long long[::1] codes, list options)

@cython.locals(number=double, batch_size=double, input_elements=double, total_activations=double, total_parameters=double,
               trainable_parameters=double, sequence_length=double, gradient_accumulation=double, traced_peak_bytes=double,
               trainable_share=double, gradient_bytes=double, inputs=double, before_flags='double[7]', after_flags='double[7]')
cdef void _fill_row(double[::1] features, Py_ssize_t begin, const double[::1] numbers, Py_ssize_t count, Py_ssize_t row,
                    OptionNumbers option, JobNumbers job) noexcept

@cython.locals(c=Py_ssize_t, from_start=double, resident=double)
cpdef void find_peaks(JobNumbers job, StepMemory memory) noexcept

cpdef void add_frozen_moment(StepMemory memory) noexcept

@cython.locals(c=Py_ssize_t, beyond=double, new=double)
cdef void _grow(double *segments, double *need) noexcept

@cython.locals(c=Py_ssize_t, size=Py_ssize_t, weights='double[4]', kept='double[4]', peak='double[4]', head='double[2]',
               sums='double[16]', resident=double, step=double, own=double, pooled=double, small=double, medium=double,
               small_segments=double, medium_segments=double, medium_count=double, spare_count=double, large_state=double)
cpdef void write_columns(double[::1] features, Py_ssize_t begin, JobNumbers job, StepMemory memory,
                         double blas_workspace_bytes) noexcept

@cython.locals(at=Py_ssize_t)
cdef Py_ssize_t _write(double[::1] features, Py_ssize_t begin, const double *numbers, Py_ssize_t count) noexcept
