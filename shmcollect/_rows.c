/* Copies rows: gathers and scatters many, writes one step, and publishes them.
 *
 * _rings.c has checked every address; what is checked here are the indices and arrays of each call.
 */
#include "_rings.h"

#include <stdlib.h>
#include <string.h>

static int check_writable(const Rings *self)
{
    if (!self->view.readonly)
        return 0;
    PyErr_SetString(PyExc_TypeError, "these rings are mapped read-only");
    return -1;
}

static int check_row(const Rings *self, int64_t env, int64_t sequence)
{
    if (env < 0 || env >= self->num_envs) {
        PyErr_Format(PyExc_IndexError, "env=%lld, expected 0..%lld", (long long)env, (long long)self->num_envs - 1);
        return -1;
    }
    if (sequence < 0 || sequence > INT64_MAX - self->capacity - 2) {
        PyErr_Format(PyExc_ValueError, "sequence=%lld is negative or at the end of 64 bits", (long long)sequence);
        return -1;
    }
    return 0;
}

static int parse_row(const Rings *self, PyObject *const *args, int64_t *env, int64_t *sequence)
{
    if (as_int64(args[0], env) < 0 || as_int64(args[1], sequence) < 0)
        return -1;
    return check_row(self, *env, *sequence);
}

/* ---- many rows ------------------------------------------------------------------------------------------- */

/* The rows (envs[i], sequences[i]), i < count: checked copies, so that nobody can change an index after its check,
 * be it a thread, another process, or the very copying of rows into the caller's arrays. */
typedef struct {
    int64_t count;
    int64_t *envs, *sequences;
} Rows;

static void rows_free(Rows *rows)
{
    free(rows->envs);
    free(rows->sequences);
}

static int64_t *indices_copy(const char *name, PyObject *object, int64_t count)
{
    Py_buffer view;
    const int64_t *numbers = int64_buffer(name, object, count, 0, false, &view);
    if (!numbers)
        return NULL;
    int64_t *copy = malloc((size_t)count * sizeof *copy + 1);
    if (copy)
        memcpy(copy, numbers, (size_t)count * sizeof *copy);
    else
        PyErr_NoMemory();
    PyBuffer_Release(&view);
    return copy;
}

/* args: envs, sequences, count. */
static int rows_parse(const Rings *self, PyObject *const *args, Rows *rows)
{
    *rows = (Rows){0};
    if (as_int64(args[2], &rows->count) < 0)
        return -1;
    if (rows->count < 0) {
        PyErr_Format(PyExc_ValueError, "count=%lld is negative", (long long)rows->count);
        return -1;
    }
    int status = 0;
    if (!(rows->envs = indices_copy("envs", args[0], rows->count)) ||
        !(rows->sequences = indices_copy("sequences", args[1], rows->count)))
        status = -1;
    for (int64_t i = 0; i < rows->count && status == 0; i++)
        status = check_row(self, rows->envs[i], rows->sequences[i]);
    if (status < 0)
        rows_free(rows);
    return status;
}

/* A contiguous array of `count * length` values of the field's type. */
static int values_parse(const char *name, PyObject *object, int flags, const Field *field, int64_t count,
                        int64_t length, Py_buffer *view)
{
    Py_ssize_t values, bytes;
    if (__builtin_mul_overflow(count, length, &values) || __builtin_mul_overflow(values, field->row_bytes, &bytes)) {
        PyErr_NoMemory();
        return -1;
    }
    if (PyObject_GetBuffer(object, view, flags | PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0)
        return -1;
    if (view->len == bytes && format_of(view) == field->format)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s: expected %zd bytes of format %c, got %zd of format %s", name, bytes,
                 field->format, view->len, view->format ? view->format : "B");
    PyBuffer_Release(view);
    return -1;
}

/* 1: the value is a C-contiguous buffer, opened; 0: it is none; -1: an exception. */
static int open_buffer(PyObject *value, Py_buffer *view)
{
    if (!PyObject_CheckBuffer(value))
        return 0;
    if (PyObject_GetBuffer(value, view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) == 0)
        return 1;
    if (!PyErr_ExceptionMatches(PyExc_BufferError) && !PyErr_ExceptionMatches(PyExc_ValueError))
        return -1;
    PyErr_Clear(); /* not contiguous, or no type a buffer can have */
    return 0;
}

/* memmove, here and below: nothing keeps a caller from passing an array that lies in these very rings. */
static void gather_rows(const Rings *self, const Field *field, const Rows *rows, int64_t length, char *out)
{
    for (int64_t i = 0; i < rows->count; i++) {
        int64_t slot = rows->sequences[i] % self->capacity;
        int64_t before_wrap = length < self->capacity - slot ? length : self->capacity - slot;
        const char *ring = (const char *)self->view.buf + field->offset + rows->envs[i] * field->env_stride;
        memmove(out, ring + slot * field->row_bytes, (size_t)(before_wrap * field->row_bytes));
        memmove(out + before_wrap * field->row_bytes, ring, (size_t)((length - before_wrap) * field->row_bytes));
        out += length * field->row_bytes;
    }
}

/* gather(field, envs, sequences, count, length, out): copy `length` slots from each row on into out. */
METHOD(rings_gather)
{
    Rings *self = (Rings *)object;
    Py_ssize_t index;
    int64_t length;
    Rows rows;
    Py_buffer out;
    if (check_count("gather", nargs, 6) < 0 || field_index(self, args[0], &index) < 0 || as_int64(args[4], &length) < 0)
        return NULL;
    const Field *field = &self->fields[index];
    if (length < 1 || length > self->capacity)
        return PyErr_Format(PyExc_ValueError, "length=%lld, expected 1..%lld", (long long)length,
                            (long long)self->capacity);
    if (rows_parse(self, args + 1, &rows) < 0)
        return NULL;
    if (values_parse("out", args[5], PyBUF_WRITABLE, field, rows.count, length, &out) < 0) {
        rows_free(&rows);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    gather_rows(self, field, &rows, length, out.buf);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&out);
    rows_free(&rows);
    Py_RETURN_NONE;
}

static void scatter_rows(const Rings *self, const Field *field, const Rows *rows, const char *row)
{
    for (int64_t i = 0; i < rows->count; i++, row += field->row_bytes)
        memmove(slot_at(self, field, rows->envs[i], rows->sequences[i]), row, (size_t)field->row_bytes);
}

/* Whether a buffer holds `count` values of exactly the field's type and shape. */
static bool fits_rows(const Py_buffer *view, const Field *field, int64_t count)
{
    bool fits = view->ndim == field->ndim + 1 && format_of(view) == field->format && view->shape[0] == count;
    for (int i = 0; fits && i < field->ndim; i++)
        fits = view->shape[i + 1] == field->shape[i];
    return fits;
}

/* Opens one buffer for each field: how many fit, up to the first that does not; -1 is an exception. The caller
 * releases *opened of them. */
static Py_ssize_t open_values(const Rings *self, PyObject *fields, PyObject *values, int64_t count, Py_ssize_t *indices,
                              Py_buffer *views, Py_ssize_t *opened)
{
    Py_ssize_t number = PyTuple_Size(fields);
    for (Py_ssize_t i = 0; i < number; i++)
        if (field_index(self, PyTuple_GetItem(fields, i), &indices[i]) < 0)
            return -1;
    for (Py_ssize_t i = 0; i < number; i++) {
        int status = open_buffer(PyTuple_GetItem(values, i), &views[i]);
        if (status <= 0)
            return status < 0 ? -1 : i;
        ++*opened;
        if (!fits_rows(&views[i], &self->fields[indices[i]], count))
            return i;
    }
    return number;
}

/* scatter(fields, envs, sequences, count, values): copy rows of several fields into the slots.
 * Returns -1, or the index of the first array that is not exactly of its field's type (then nothing is written). */
METHOD(rings_scatter)
{
    Rings *self = (Rings *)object;
    Rows rows;
    if (check_count("scatter", nargs, 5) < 0 || check_writable(self) < 0)
        return NULL;
    if (!PyTuple_Check(args[0]) || !PyTuple_Check(args[4]) || PyTuple_Size(args[0]) != PyTuple_Size(args[4]))
        return PyErr_Format(PyExc_TypeError, "fields and values: expected two tuples of equal length");
    Py_ssize_t number = PyTuple_Size(args[0]), opened = 0;
    Py_ssize_t *indices = calloc((size_t)number + 1, sizeof *indices);
    Py_buffer *views = calloc((size_t)number + 1, sizeof *views);
    PyObject *result = NULL;
    if (!indices || !views) {
        PyErr_NoMemory();
    } else if (rows_parse(self, args + 1, &rows) == 0) {
        Py_ssize_t fitting = open_values(self, args[0], args[4], rows.count, indices, views, &opened);
        for (Py_ssize_t i = 0; fitting == number && i < number; i++)
            scatter_rows(self, &self->fields[indices[i]], &rows, views[i].buf);
        if (fitting >= 0)
            result = PyLong_FromSsize_t(fitting == number ? -1 : fitting);
        rows_free(&rows);
    }
    while (opened > 0)
        PyBuffer_Release(&views[--opened]);
    free(indices);
    free(views);
    return result;
}

/* Refuses rows that would take a cursor back, be it behind an earlier row of the same env. */
static int check_growth(Rings *self, int64_t which, const Rows *rows, int64_t step)
{
    for (int64_t i = 0; i < rows->count; i++)
        self->targets[rows->envs[i]] =
            atomic_load_explicit(self->cursors[which][rows->envs[i]], memory_order_relaxed);
    for (int64_t i = 0; i < rows->count; i++) {
        int64_t env = rows->envs[i], target = rows->sequences[i] + step;
        if (target < self->targets[env]) {
            PyErr_Format(PyExc_ValueError, "cursor=%lld of env %lld would go back from %lld to %lld", (long long)which,
                         (long long)env, (long long)self->targets[env], (long long)target);
            return -1;
        }
        self->targets[env] = target;
    }
    return 0;
}

/* A histogram with eight buckets per octave, from 2^10 ns on (shmcollect/histogram.py says which is which). */
static void count_latency(const Rings *self, int64_t latency_ns)
{
    int64_t bucket = 0;
    if (latency_ns >= 1 << 10) {
        int octave = 63 - __builtin_clzll((unsigned long long)latency_ns);
        bucket = (int64_t)(octave - 10) * 8 + ((latency_ns >> (octave - 3)) & 7);
    }
    word_t *word = self->latencies[bucket < self->num_latencies ? bucket : self->num_latencies - 1];
    int64_t count = atomic_load_explicit(word, memory_order_relaxed);
    atomic_store_explicit(word, count + 1, memory_order_relaxed); /* one writer: no need for an atomic addition */
}

static PyObject *touched_groups(const Rings *self)
{
    PyObject *groups = PyList_New(0);
    for (int64_t group = 0; groups && group < self->num_groups; group++) {
        PyObject *number = self->touched[group] ? PyLong_FromLongLong(group) : NULL;
        if (self->touched[group] && (!number || PyList_Append(groups, number) < 0))
            Py_CLEAR(groups);
        Py_XDECREF(number);
    }
    return groups;
}

/* advance(cursor, envs, sequences, count, step): cursor = sequence + step for every row, with release; cursors only
 * grow. Of ACTED it counts how long each row has waited. Returns the groups whose envs were touched, each once. */
METHOD(rings_advance)
{
    Rings *self = (Rings *)object;
    int64_t which, step;
    Rows rows;
    if (check_count("advance", nargs, 5) < 0 || check_writable(self) < 0 || as_int64(args[0], &which) < 0 ||
        as_int64(args[4], &step) < 0)
        return NULL;
    if (which < 0 || which > GRANTED || step < 0 || step > self->capacity)
        return PyErr_Format(PyExc_ValueError, "cursor=%lld, expected 0..%d; step=%lld, expected 0..%lld",
                            (long long)which, GRANTED, (long long)step, (long long)self->capacity);
    if (rows_parse(self, args + 1, &rows) < 0)
        return NULL;
    int status = check_growth(self, which, &rows, step);
    int64_t now_ns = monotonic_ns();
    memset(self->touched, 0, (size_t)self->num_groups);
    for (int64_t i = 0; i < rows.count && status == 0; i++) {
        if (which == ACTED) /* read before the worker may write the next one */
            count_latency(self, now_ns - atomic_load_explicit(self->cursors[OBSERVED_NS][rows.envs[i]],
                                                              memory_order_relaxed));
        word_store(self->cursors[which][rows.envs[i]], rows.sequences[i] + step); /* SYNC: acted, released, granted */
        self->touched[self->group_of[rows.envs[i]]] = 1;
    }
    rows_free(&rows);
    return status < 0 ? NULL : touched_groups(self);
}

/* ---- one step -------------------------------------------------------------------------------------------- */

/* Copies a value into a slot if it is a C-contiguous buffer of exactly the field's type and shape: 1. Otherwise 0,
 * which is an answer: the caller converts the value and comes again. -1 is an exception. */
static int write_exact(const Rings *self, const Field *field, int64_t env, int64_t sequence, PyObject *value)
{
    Py_buffer view;
    int status = open_buffer(value, &view);
    if (status <= 0)
        return status;
    bool fits = view.ndim == field->ndim && format_of(&view) == field->format && view.len == field->row_bytes;
    for (int i = 0; fits && i < field->ndim; i++)
        fits = view.shape[i] == field->shape[i];
    if (fits)
        memmove(slot_at(self, field, env, sequence), view.buf, (size_t)field->row_bytes);
    PyBuffer_Release(&view);
    return fits;
}

/* write(field, env, sequence, value): copy one value into a slot. False: it is not exactly of the field's type. */
METHOD(rings_write)
{
    Rings *self = (Rings *)object;
    Py_ssize_t index;
    int64_t env, sequence;
    if (check_count("write", nargs, 4) < 0 || check_writable(self) < 0 || field_index(self, args[0], &index) < 0 ||
        parse_row(self, args + 1, &env, &sequence) < 0)
        return NULL;
    int written = write_exact(self, &self->fields[index], env, sequence, args[3]);
    return written < 0 ? NULL : PyBool_FromLong(written);
}

static int check_observation(const Rings *self, int64_t env, int64_t sequence, PyObject *leaves)
{
    if (!PyTuple_Check(leaves) || PyTuple_Size(leaves) != self->num_leaves) {
        PyErr_Format(PyExc_TypeError, "leaves: expected a tuple of %zd", self->num_leaves);
        return -1;
    }
    int64_t turn = atomic_load_explicit(self->cursors[OBSERVED][env], memory_order_relaxed);
    if (turn == sequence)
        return 0;
    PyErr_Format(PyExc_ValueError, "env %lld: observation %lld published out of turn (observed=%lld)", (long long)env,
                 (long long)sequence, (long long)turn);
    return -1;
}

/* Writes an observation into its slot and publishes it: -1, or the index of the first leaf that is not exactly of its
 * field's type (then nothing is published). NULL is an exception. */
static PyObject *publish_observation(const Rings *self, int64_t env, int64_t sequence, PyObject *leaves,
                                     bool episode_start)
{
    word_t *slot_sequence = (word_t *)step_slot(self, SEQUENCE, env, sequence);
    slot_begin(slot_sequence);
    for (Py_ssize_t i = 0; i < self->num_leaves; i++) {
        const Field *field = &self->fields[self->leaves[i]];
        int written = write_exact(self, field, env, sequence, PyTuple_GetItem(leaves, i));
        if (written <= 0)
            return written < 0 ? NULL : PyLong_FromSsize_t(i);
    }
    *step_slot(self, EPISODE_START, env, sequence) = (char)episode_start;
    slot_end(slot_sequence, sequence);
    atomic_store_explicit(self->cursors[OBSERVED_NS][env], monotonic_ns(), memory_order_relaxed);
    word_store(self->cursors[OBSERVED][env], sequence + 1); /* SYNC: observed */
    return PyLong_FromLong(-1);
}

/* observe(env, sequence, leaves): write the first observation of an episode into its slot and publish it.
 * Returns -1, or the index of the first leaf that is not exactly of its field's type (then nothing is published). */
METHOD(rings_observe)
{
    Rings *self = (Rings *)object;
    int64_t env, sequence;
    if (check_count("observe", nargs, 3) < 0 || check_writable(self) < 0 || parse_row(self, args, &env, &sequence) < 0 ||
        check_observation(self, env, sequence, args[2]) < 0)
        return NULL;
    return publish_observation(self, env, sequence, args[2], true);
}

/* step(env, sequence, reward, terminated, truncated, interrupted, leaves): what the step brought, into its own slot, and
 * the observation after it into the next one; publishes it. Returns as observe() does. */
METHOD(rings_step)
{
    Rings *self = (Rings *)object;
    int64_t env, sequence;
    if (check_count("step", nargs, 7) < 0 || check_writable(self) < 0 || parse_row(self, args, &env, &sequence) < 0 ||
        check_observation(self, env, sequence + 1, args[6]) < 0)
        return NULL;
    float reward = (float)PyFloat_AsDouble(args[2]);
    if (PyErr_Occurred())
        return NULL;
    int flags[3];
    for (int i = 0; i < 3; i++)
        if ((flags[i] = PyObject_IsTrue(args[3 + i])) < 0)
            return NULL;
    for (int i = 0; i < 3; i++)
        *step_slot(self, TERMINATED + i, env, sequence) = (char)flags[i];
    memcpy(step_slot(self, REWARD, env, sequence), &reward, sizeof reward);
    return publish_observation(self, env, sequence + 1, args[6], flags[0] || flags[1]);
}
