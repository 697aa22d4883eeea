# The types with which Cython compiles closed_form.py; the text of the module is that file alone.
cimport cython

cdef double _BLOCK, _ROUNDING, _SMALL_SEGMENT, _MEDIUM_SEGMENT, _MEDIUM_LIMIT, _SMALL_TOP, _MEDIUM_TOP, _LARGE_TOP
cdef double _CUBLASLT, _TYPICAL, _FULL, _LOSS, _HANDLES, _PADDED_IMAGE
cdef Py_ssize_t _CLASSES, _LARGEST_SIZE, _CONVOLUTION, _ADD, _MULTIPLY, _SOFTMAX, _MATMUL, _DROPOUT, _LINEAR
cdef long long _CONSTANT, _INNER_SUM, _PASSED_ON, _BLOCK_BEGIN, _IN_BLOCK, _WRITTEN_OUT, _SIBLING, _DEPTHWISE
cdef Py_ssize_t _IS_ALIAS, _SAVES_INPUT, _SAVES_OUTPUT, _MASK_BYTES, _STATISTICS, _SECOND_SHARE, _HAS_BIAS, _IS_CAST
cdef Py_ssize_t _OWN_BYTES, _TAKEN_BYTES, _IS_ATTENTION, _IS_EMBEDDING, _RULE_WIDTH
cdef Py_ssize_t _BATCH, _POSITIONS, _WEIGHT_BYTES, _BASE_BYTES, _COPY_BYTES, _STATE, _TEMPORARY, _FROZEN, _CREATED
cdef Py_ssize_t _INPUT_BYTES, _AUTOCAST, _MATH, _CHECKPOINTED, _LOOP, _INPUT_ELEMENTS, _CHANNELS_LAST, _FILTER_STATE, _JOB_WIDTH
cdef Py_ssize_t _COUNT_PLACE, _WEIGHT_PLACE, _KEPT_PLACE, _PEAK_PLACE, _GROUP_PLACE, _SUM_PLACE
cdef Py_ssize_t _WEIGHTS, _TRAINED, _LOOPED, _KEPT, _STANDING, _BLOCK_KEPT, _COPIES, _FULLEST, _FULLEST_FROZEN, _PEAK
cdef Py_ssize_t _STEP, _NAMED, _FILTERS, _WEIGHING_REACH
cdef double[::1] _RULES
cdef long long[::1] _GROUP_OF_KIND
cdef Py_ssize_t _LAYER_NOTES, _OWN, _TAKEN, _IS_NEEDED, _IS_KEPT, _NOTE_WIDTH

@cython.locals(job=Py_ssize_t, layer=Py_ssize_t, count=Py_ssize_t, layer_count=Py_ssize_t, job_count=Py_ssize_t,
               longest=Py_ssize_t, first=Py_ssize_t, roles='long long[::1]', chain='long long[::1]', notes='double[::1]')
cpdef object fill_columns(double[::1] answers, Py_ssize_t width, Py_ssize_t begin, const double[::1] jobs,
                          const long long[::1] counts, const long long[::1] kinds,
                          const double[::1] activations, const double[::1] parameters, double blas_workspace_bytes)

@cython.locals(block=double, top=double, place=Py_ssize_t)
cdef Py_ssize_t _block_class(double size) noexcept

@cython.locals(block=double)
cdef double _cost(double size, Py_ssize_t place) noexcept

@cython.locals(stored=Py_ssize_t, place=Py_ssize_t, layer=Py_ssize_t, kind=Py_ssize_t, cumulated=double, at=Py_ssize_t,
               note=Py_ssize_t, tied=Py_ssize_t)
cdef void _fill_job(double[::1] answers, Py_ssize_t answer, const double[::1] jobs, Py_ssize_t job, const long long[::1] kinds,
                    const long long[::1] roles, const double[::1] activations, const double[::1] parameters, Py_ssize_t first,
                    Py_ssize_t count, double blas_workspace_bytes, long long[::1] chain, double[::1] notes) noexcept

@cython.locals(is_autocast=bint, is_math=bint, own=double, base=double, at=Py_ssize_t, note=Py_ssize_t, sums_in_full=bint,
               weighed=bint, scores=bint, before=Py_ssize_t, kind=Py_ssize_t, following=Py_ssize_t, rule=Py_ssize_t, taken=double)
cdef void _note_element_bytes(const double[::1] jobs, Py_ssize_t job, const long long[::1] roles, Py_ssize_t stored,
                              long long[::1] chain, double[::1] notes) noexcept

@cython.locals(tied=Py_ssize_t, largest=double, at=Py_ssize_t, count=double)
cdef Py_ssize_t _tied_embedding(const double[::1] parameters, Py_ssize_t stored, long long[::1] chain) noexcept

@cython.locals(place=Py_ssize_t, amount=double)
cdef Py_ssize_t _keep(double[::1] answers, Py_ssize_t group, double size, double copies, bint is_inside,
                      double[::1] notes) noexcept

@cython.locals(is_half=bint, copied=double)
cdef double _layout_copies(double image, double result, double weight, double element_bytes, bint is_first,
                           bint is_channels_last) noexcept

@cython.locals(mask_place=Py_ssize_t, in_all=double, c=Py_ssize_t, moment=double)
cdef double _softmax_moment(Py_ssize_t place, double amount, Py_ssize_t before_place, double before_amount, double mask_bytes,
                            bint is_inside, double[::1] notes) noexcept

@cython.locals(batch_size=double, weight_bytes=double, copy_bytes=double, created=double, is_autocast=bint,
               previous_elements=double, previous_total=double, previous_bytes=double, before_amount=double, matrices=double,
               largest_output=double, largest_weight=double, largest_convolution=double, blocks=double, total=double,
               fullest=double, fullest_frozen=double, before_place=Py_ssize_t, highest=Py_ssize_t, kept_by=Py_ssize_t,
               is_saved=bint, at=Py_ssize_t, note=Py_ssize_t, layer=Py_ssize_t, kind=Py_ssize_t, rule=Py_ssize_t,
               group=Py_ssize_t, own_bytes=double, taken_bytes=double, is_needed=bint, is_inside=bint, elements=double,
               count=double, place=Py_ssize_t, amount=double, c=Py_ssize_t,
               following=Py_ssize_t, second=double, main_place=Py_ssize_t, second_place=Py_ssize_t, main_amount=double,
               second_amount=double, copy_place=Py_ssize_t, moment=double, moment_total=double, trained_total=double,
               logits=double, sums=Py_ssize_t, is_checkpointed=bint, copies=double, copies_place=Py_ssize_t,
               copies_amount=double, role='long long', beyond='long long', ends_block=bint,
               tied_place=Py_ssize_t, tied_amount=double, source=Py_ssize_t, extra=double, mask=double, is_product=bint,
               shared_elements=double, nearest=Py_ssize_t, shared_bytes=double, loop=double, looped=double, stepped=double,
               cast_place=Py_ssize_t, mask_place=Py_ssize_t, cast_amount=double, mask_amount=double)
cdef void _walk(double[::1] answers, Py_ssize_t answer, const double[::1] jobs, Py_ssize_t job, const long long[::1] roles,
                const double[::1] activations, const double[::1] parameters, Py_ssize_t stored, Py_ssize_t tied,
                long long[::1] chain, double[::1] notes) noexcept

@cython.locals(created=double, state=double, resident_total=double, loss_total=double, step_total=double,
               input_place=Py_ssize_t, c=Py_ssize_t, trained=double, loss=double, resident=double,
               step=double, beyond=double, new=double, size=Py_ssize_t, sums=Py_ssize_t, backward=double, own=double,
               pooled=double, peak=Py_ssize_t, small=double, medium=double, small_bytes=double, medium_count=double,
               spare=double)
cdef void _finish(double[::1] answers, Py_ssize_t answer, const double[::1] jobs, Py_ssize_t job, Py_ssize_t stored,
                  double blas_workspace_bytes, double[::1] notes) noexcept
