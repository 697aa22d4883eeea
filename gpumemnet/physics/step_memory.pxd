# The types with which Cython compiles step_memory.py.
cimport cython

cdef double _BLOCK, _ROUNDING, _MEDIUM_SEGMENT, _SMALL_TOP, _MEDIUM_TOP, _LARGE_TOP
cdef Py_ssize_t _CLASSES

cpdef double block_bytes(double size) noexcept

@cython.locals(top=double, block_class=Py_ssize_t)
cpdef Py_ssize_t class_of_block(double block) noexcept

cpdef double segment_cost(double block, Py_ssize_t block_class) noexcept

cdef enum:  # lengths of arrays; assigning _NO_CLASS and its like checks them against step_memory.py
    CLASSES = 10
    GROUPS = 11

cdef double[CLASSES] _NO_CLASS
cdef double[GROUPS] _NO_GROUP

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
    cdef double[CLASSES] backward_peak, forward_peak, resident, step, peak
    cdef double[GROUPS] group_counts, kept_by_group
    cdef double backward_total, forward_total, loss_total, loop_cost, last_parameter_cost, layer_count, block_count
    cdef double logits_bytes, attention_matrix_bytes, largest_output_bytes, largest_convolution_bytes, largest_parameters
    cdef Py_ssize_t loop_class
    cdef void clear(self) noexcept
