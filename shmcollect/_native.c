/* The only door to shared words: atomics, doorbells, the row loops over the rings, the parent watch.
 *
 * No policy lives here. Every buffer, offset and index that comes from Python is checked before it is used: a bad
 * call raises and writes nothing. Limited API of CPython 3.11 (the first with the buffer protocol), so one abi3
 * wheel serves every later Python. Memory orderings are in _sync.h.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

#include "_sync.h"

/* ---- arguments ------------------------------------------------------------------------------------------- */

static int check_count(const char *name, Py_ssize_t got, Py_ssize_t expected)
{
    if (got == expected)
        return 0;
    PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments (%zd given)", name, expected, got);
    return -1;
}

static int as_int64(PyObject *object, int64_t *value)
{
    *value = PyLong_AsLongLong(object);
    return *value == -1 && PyErr_Occurred() ? -1 : 0;
}

/* A shared word inside a buffer: present, aligned, and writable where it is going to be written. */
static void *word_at(PyObject *buffer, PyObject *offset_object, Py_ssize_t size, int flags, Py_buffer *view)
{
    int64_t offset;
    if (as_int64(offset_object, &offset) < 0 || PyObject_GetBuffer(buffer, view, flags) < 0)
        return NULL;
    if (offset < 0 || offset > (int64_t)view->len - size) {
        PyErr_Format(PyExc_IndexError, "offset=%lld: no %zd-byte word there in a buffer of %zd bytes",
                     (long long)offset, size, view->len);
    } else if (((uintptr_t)view->buf + (uintptr_t)offset) % (uintptr_t)size != 0) {
        PyErr_Format(PyExc_ValueError, "offset=%lld is not aligned to %zd bytes", (long long)offset, size);
    } else {
        return (char *)view->buf + offset;
    }
    PyBuffer_Release(view);
    return NULL;
}

/* ---- words ----------------------------------------------------------------------------------------------- */

static PyObject *native_load(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer view;
    word_t *word;
    if (check_count("load", nargs, 2) < 0 || !(word = word_at(args[0], args[1], 8, PyBUF_SIMPLE, &view)))
        return NULL;
    int64_t value = word_load(word);
    PyBuffer_Release(&view);
    return PyLong_FromLongLong(value);
}

static PyObject *native_store(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer view;
    word_t *word;
    int64_t value;
    if (check_count("store", nargs, 3) < 0 || as_int64(args[2], &value) < 0 ||
        !(word = word_at(args[0], args[1], 8, PyBUF_WRITABLE, &view)))
        return NULL;
    word_store(word, value);
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

static PyObject *native_fetch_add(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer view;
    word_t *word;
    int64_t delta;
    if (check_count("fetch_add", nargs, 3) < 0 || as_int64(args[2], &delta) < 0 ||
        !(word = word_at(args[0], args[1], 8, PyBUF_WRITABLE, &view)))
        return NULL;
    int64_t before = atomic_fetch_add(word, delta);
    PyBuffer_Release(&view);
    return PyLong_FromLongLong(before);
}

static PyObject *native_compare_exchange(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer view;
    word_t *word;
    int64_t expected, desired;
    if (check_count("compare_exchange", nargs, 4) < 0 || as_int64(args[2], &expected) < 0 ||
        as_int64(args[3], &desired) < 0 || !(word = word_at(args[0], args[1], 8, PyBUF_WRITABLE, &view)))
        return NULL;
    bool exchanged = atomic_compare_exchange_strong(word, &expected, desired);
    PyBuffer_Release(&view);
    return PyBool_FromLong(exchanged);
}

static PyObject *native_fence(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
#ifndef __SANITIZE_THREAD__
    atomic_thread_fence(memory_order_seq_cst);
#endif
    Py_RETURN_NONE;
}

/* ---- doorbells ------------------------------------------------------------------------------------------- */

static PyObject *native_bell_prepare(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer view;
    bell_t *bell;
    if (check_count("bell_prepare", nargs, 2) < 0 || !(bell = word_at(args[0], args[1], 8, PyBUF_WRITABLE, &view)))
        return NULL;
    uint32_t key = bell_prepare(bell);
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(key);
}

static PyObject *native_bell_cancel(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer view;
    bell_t *bell;
    if (check_count("bell_cancel", nargs, 2) < 0 || !(bell = word_at(args[0], args[1], 8, PyBUF_WRITABLE, &view)))
        return NULL;
    bell_cancel(bell);
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

static PyObject *native_bell_notify(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer view;
    bell_t *bell;
    if (check_count("bell_notify", nargs, 2) < 0 || !(bell = word_at(args[0], args[1], 8, PyBUF_WRITABLE, &view)))
        return NULL;
    bool slept = bell_notify(bell);
    PyBuffer_Release(&view);
    return PyBool_FromLong(slept);
}

static PyObject *native_bell_wait(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer view;
    bell_t *bell;
    int64_t key, deadline_ns;
    if (check_count("bell_wait", nargs, 4) < 0 || as_int64(args[2], &key) < 0 || as_int64(args[3], &deadline_ns) < 0)
        return NULL;
    if (key < 0 || key > UINT32_MAX || deadline_ns < 0) {
        PyErr_Format(PyExc_ValueError, "bell_wait(key=%lld, deadline_ns=%lld): key is unsigned 32 bit, deadline >= 0",
                     (long long)key, (long long)deadline_ns);
        return NULL;
    }
    if (!(bell = word_at(args[0], args[1], 8, PyBUF_WRITABLE, &view)))
        return NULL;
    int error;
    bool interrupted = false;
    do {
        Py_BEGIN_ALLOW_THREADS
        error = bell_sleep(bell, (uint32_t)key, deadline_ns);
        Py_END_ALLOW_THREADS
        interrupted = error == EINTR && PyErr_CheckSignals() < 0;
    } while (error == EINTR && !interrupted);
    bell_cancel(bell);
    PyBuffer_Release(&view);
    if (interrupted)
        return NULL;
    if (error != 0 && error != ETIMEDOUT) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyBool_FromLong(error == 0);
}

/* ---- the parent watch ------------------------------------------------------------------------------------ */

static void *end_with_parent(void *argument)
{
    struct pollfd parent = {.fd = (int)(intptr_t)argument, .events = POLLIN};
    while (poll(&parent, 1, -1) < 0 && errno == EINTR)
        ;
    kill(getpid(), SIGKILL); /* the interpreter may hold its lock for ever: nothing gentler is certain */
    return NULL;
}

static PyObject *native_watch_parent(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    int64_t pidfd;
    if (check_count("watch_parent", nargs, 1) < 0 || as_int64(args[0], &pidfd) < 0)
        return NULL;
    struct pollfd parent = {.fd = (int)pidfd, .events = POLLIN};
    if (pidfd < 0 || pidfd > INT_MAX || poll(&parent, 1, 0) < 0 || (parent.revents & POLLNVAL)) {
        PyErr_Format(PyExc_ValueError, "pidfd=%lld is not an open descriptor", (long long)pidfd);
        return NULL;
    }
    pthread_attr_t attributes;
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals belong to Python's threads */
    int error = pthread_create(&thread, &attributes, end_with_parent, (void *)(intptr_t)pidfd);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (error != 0) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

/* ---- Rings: row loops over the slots of all envs ---------------------------------------------------------- */

enum { OBSERVED, ACTED, RELEASED, GRANTED, OBSERVED_NS, NUM_CURSORS };
enum { SEQUENCE, EPISODE_START, REWARD, TERMINATED, TRUNCATED, INTERRUPTED, NUM_STEP_FIELDS };
enum { MAX_DIMS = 32 };

static const Py_ssize_t step_field_bytes[NUM_STEP_FIELDS] = {8, 1, 4, 1, 1, 1};

typedef struct {
    Py_ssize_t offset, env_stride, row_bytes;
    char format;
    int ndim;
    Py_ssize_t shape[MAX_DIMS];
} Field;

typedef struct {
    PyObject_HEAD
    Py_buffer view;
    int64_t num_envs, capacity;
    int64_t num_groups;
    word_t **cursors[NUM_CURSORS]; /* [cursor][env] */
    int64_t *group_of;             /* [env] */
    word_t **running;              /* [group] */
    word_t *grant_count;           /* odd while steps are being granted to several envs at once */
    char *touched;                 /* [group], scratch of advance() */
    Py_ssize_t num_fields;
    Field *fields;
    Py_ssize_t step_fields[NUM_STEP_FIELDS];
    Py_ssize_t num_leaves;
    Py_ssize_t *leaves; /* the observation's fields */
} Rings;

static void rings_free_members(Rings *self)
{
    for (int i = 0; i < NUM_CURSORS; i++)
        free(self->cursors[i]);
    free(self->group_of);
    free(self->running);
    free(self->touched);
    free(self->fields);
    free(self->leaves);
    if (self->view.obj)
        PyBuffer_Release(&self->view);
}

static void rings_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    rings_free_members((Rings *)object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

/* Turns offsets into checked word addresses. */
static word_t **words_at(Rings *self, const int64_t *offsets, int64_t count)
{
    word_t **words = calloc((size_t)count + 1, sizeof *words);
    if (!words) {
        PyErr_NoMemory();
        return NULL;
    }
    for (int64_t i = 0; i < count; i++) {
        if (offsets[i] < 0 || offsets[i] > (int64_t)self->view.len - 8 ||
            ((uintptr_t)self->view.buf + (uintptr_t)offsets[i]) % 8 != 0) {
            PyErr_Format(PyExc_ValueError, "word %lld: offset %lld is outside the buffer or not aligned",
                         (long long)i, (long long)offsets[i]);
            free(words);
            return NULL;
        }
        words[i] = (word_t *)((char *)self->view.buf + offsets[i]);
    }
    return words;
}

/* A contiguous int64 buffer of at least (or, with exact, precisely) `count` numbers. */
static int64_t *int64_buffer(const char *name, PyObject *object, int64_t count, int flags, bool exact, Py_buffer *view)
{
    if (PyObject_GetBuffer(object, view, flags | PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    const char *format = view->format ? view->format : "B";
    int64_t numbers = view->len / 8;
    if (view->itemsize == 8 && strchr("lq", format[0]) && format[1] == 0 && (uintptr_t)view->buf % 8 == 0 &&
        (exact ? numbers == count : numbers >= count))
        return view->buf;
    PyErr_Format(PyExc_ValueError, "%s: expected %s%lld int64, got %zd bytes of format %s", name,
                 exact ? "" : "at least ", (long long)count, view->len, format);
    PyBuffer_Release(view);
    return NULL;
}

static int rings_parse_cursors(Rings *self, PyObject *offsets)
{
    Py_buffer view;
    int64_t *numbers = int64_buffer("cursors", offsets, NUM_CURSORS * self->num_envs, 0, true, &view);
    if (!numbers)
        return -1;
    int status = 0;
    for (int i = 0; i < NUM_CURSORS && status == 0; i++)
        if (!(self->cursors[i] = words_at(self, numbers + i * self->num_envs, self->num_envs)))
            status = -1;
    PyBuffer_Release(&view);
    return status;
}

static int rings_parse_groups(Rings *self, PyObject *groups, PyObject *running)
{
    Py_buffer view;
    int64_t *numbers = int64_buffer("running", running, 1, 0, false, &view);
    if (!numbers)
        return -1;
    self->num_groups = view.len / 8;
    self->running = words_at(self, numbers, self->num_groups);
    PyBuffer_Release(&view);
    if (!self->running || !(numbers = int64_buffer("groups", groups, self->num_envs, 0, true, &view)))
        return -1;
    self->group_of = malloc((size_t)self->num_envs * sizeof *self->group_of);
    self->touched = calloc((size_t)self->num_groups, 1);
    int status = self->group_of && self->touched ? 0 : (PyErr_NoMemory(), -1);
    for (int64_t env = 0; env < self->num_envs && status == 0; env++) {
        self->group_of[env] = numbers[env];
        if (numbers[env] < 0 || numbers[env] >= self->num_groups) {
            PyErr_Format(PyExc_ValueError, "groups[%lld]=%lld, expected 0..%lld", (long long)env,
                         (long long)numbers[env], (long long)self->num_groups - 1);
            status = -1;
        }
    }
    PyBuffer_Release(&view);
    return status;
}

static int field_parse_shape(Field *field, PyObject *shape)
{
    Py_ssize_t ndim = PyTuple_Size(shape), bytes = strchr("bB?", field->format)   ? 1
                                                   : strchr("hHe", field->format) ? 2
                                                   : strchr("iIf", field->format) ? 4
                                                                                  : 8;
    if (ndim < 0)
        return -1;
    if (ndim > MAX_DIMS || !strchr("bB?hHeiIfqQd", field->format)) {
        PyErr_Format(PyExc_ValueError, "format=%c with %zd dimensions is not supported", field->format, ndim);
        return -1;
    }
    field->ndim = (int)ndim;
    for (Py_ssize_t i = 0; i < ndim; i++) {
        Py_ssize_t length = PyLong_AsSsize_t(PyTuple_GetItem(shape, i));
        if (length < 0 || (length > 0 && bytes > PY_SSIZE_T_MAX / length)) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_ValueError, "shape[%zd]=%zd is negative or too large", i, length);
            return -1;
        }
        field->shape[i] = length;
        bytes *= length;
    }
    if (bytes == field->row_bytes)
        return 0;
    PyErr_Format(PyExc_ValueError, "row_bytes=%zd, but format %c and shape make %zd", field->row_bytes, field->format,
                 bytes);
    return -1;
}

static int rings_check_extent(Rings *self, Py_ssize_t index, const Field *field)
{
    Py_ssize_t rows, envs, end;
    if (field->offset >= 0 && field->env_stride >= 0 && field->row_bytes >= 0 &&
        !__builtin_mul_overflow(field->row_bytes, (Py_ssize_t)self->capacity, &rows) && rows <= field->env_stride &&
        !__builtin_mul_overflow(field->env_stride, (Py_ssize_t)self->num_envs, &envs) &&
        !__builtin_add_overflow(field->offset, envs, &end) && end <= self->view.len)
        return 0;
    PyErr_Format(PyExc_ValueError, "field %zd (offset=%zd, env_stride=%zd, row_bytes=%zd) does not fit %zd bytes", index,
                 field->offset, field->env_stride, field->row_bytes, self->view.len);
    return -1;
}

static int rings_parse_fields(Rings *self, PyObject *fields)
{
    self->num_fields = PyTuple_Size(fields);
    if (self->num_fields < 0 || !(self->fields = calloc((size_t)self->num_fields + 1, sizeof *self->fields)))
        return PyErr_Occurred() ? -1 : (PyErr_NoMemory(), -1);
    for (Py_ssize_t i = 0; i < self->num_fields; i++) {
        Field *field = &self->fields[i];
        int format;
        PyObject *shape, *item = PyTuple_GetItem(fields, i);
        if (!PyTuple_Check(item)) {
            PyErr_SetString(PyExc_TypeError, "a field is a tuple (offset, env_stride, row_bytes, format, shape)");
            return -1;
        }
        if (!PyArg_ParseTuple(item, "nnnCO!", &field->offset, &field->env_stride, &field->row_bytes, &format,
                              &PyTuple_Type, &shape))
            return -1;
        field->format = format > 0 && format < 128 ? (char)format : '!';
        if (field_parse_shape(field, shape) < 0 || rings_check_extent(self, i, field) < 0)
            return -1;
    }
    return 0;
}

static int field_index(Rings *self, PyObject *object, Py_ssize_t *index)
{
    *index = PyLong_AsSsize_t(object);
    if (*index == -1 && PyErr_Occurred())
        return -1;
    if (*index >= 0 && *index < self->num_fields)
        return 0;
    PyErr_Format(PyExc_IndexError, "field=%zd, expected 0..%zd", *index, self->num_fields - 1);
    return -1;
}

static int rings_parse_step_fields(Rings *self, PyObject *step_fields, PyObject *leaves)
{
    if (PyTuple_Size(step_fields) != NUM_STEP_FIELDS) {
        PyErr_Format(PyExc_ValueError, "step_fields: expected a tuple of %d field indices", NUM_STEP_FIELDS);
        return -1;
    }
    for (int i = 0; i < NUM_STEP_FIELDS; i++) {
        if (field_index(self, PyTuple_GetItem(step_fields, i), &self->step_fields[i]) < 0)
            return -1;
        const Field *field = &self->fields[self->step_fields[i]];
        uintptr_t base = (uintptr_t)self->view.buf + (uintptr_t)field->offset;
        if (field->row_bytes != step_field_bytes[i] || base % (uintptr_t)field->row_bytes != 0 ||
            field->env_stride % field->row_bytes != 0) {
            PyErr_Format(PyExc_ValueError, "step_fields[%d]: expected an aligned field of %zd bytes a row", i,
                         step_field_bytes[i]);
            return -1;
        }
    }
    self->num_leaves = PyTuple_Size(leaves);
    if (self->num_leaves < 0 || !(self->leaves = calloc((size_t)self->num_leaves + 1, sizeof *self->leaves)))
        return PyErr_Occurred() ? -1 : (PyErr_NoMemory(), -1);
    for (Py_ssize_t i = 0; i < self->num_leaves; i++)
        if (field_index(self, PyTuple_GetItem(leaves, i), &self->leaves[i]) < 0)
            return -1;
    return 0;
}

static PyObject *rings_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"buffer",  "num_envs",    "capacity", "cursors",     "groups",
                            "running", "grant_count", "fields",   "step_fields", "leaves", NULL};
    PyObject *buffer, *cursors, *groups, *running, *fields, *step_fields, *leaves;
    long long num_envs, capacity, grant_count;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OLLOOOLO!O!O!:Rings", names, &buffer, &num_envs, &capacity, &cursors,
                                     &groups, &running, &grant_count, &PyTuple_Type, &fields, &PyTuple_Type,
                                     &step_fields, &PyTuple_Type, &leaves))
        return NULL;
    if (num_envs < 1 || num_envs > INT32_MAX || capacity < 2 || capacity > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "num_envs=%lld must be >= 1 and capacity=%lld >= 2", num_envs, capacity);
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Rings *self = (Rings *)allocate(type, 0);
    if (!self)
        return NULL;
    self->num_envs = num_envs;
    self->capacity = capacity;
    int64_t grant_offset = grant_count;
    word_t **grant_word = NULL;
    if (PyObject_GetBuffer(buffer, &self->view, PyBUF_SIMPLE) < 0 || rings_parse_cursors(self, cursors) < 0 ||
        rings_parse_groups(self, groups, running) < 0 || rings_parse_fields(self, fields) < 0 ||
        rings_parse_step_fields(self, step_fields, leaves) < 0 || !(grant_word = words_at(self, &grant_offset, 1))) {
        Py_DECREF(self);
        return NULL;
    }
    self->grant_count = grant_word[0];
    free(grant_word);
    return (PyObject *)self;
}

static inline char *slot_at(const Rings *self, const Field *field, int64_t env, int64_t sequence)
{
    return (char *)self->view.buf + field->offset + env * field->env_stride +
           (sequence % self->capacity) * field->row_bytes;
}

static inline char *step_slot(const Rings *self, int which, int64_t env, int64_t sequence)
{
    return slot_at(self, &self->fields[self->step_fields[which]], env, sequence);
}

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

/* cursor(which, env): the value of one cursor. */
static PyObject *rings_cursor(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    Rings *self = (Rings *)object;
    int64_t which, env;
    if (check_count("cursor", nargs, 2) < 0 || as_int64(args[0], &which) < 0 || as_int64(args[1], &env) < 0)
        return NULL;
    if (which < 0 || which >= NUM_CURSORS || env < 0 || env >= self->num_envs) {
        PyErr_Format(PyExc_IndexError, "cursor=%lld env=%lld does not exist", (long long)which, (long long)env);
        return NULL;
    }
    return PyLong_FromLongLong(word_load(self->cursors[which][env]));
}

/* read_cursors(which, out): the values of one cursor of all envs. */
static PyObject *rings_read_cursors(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    Rings *self = (Rings *)object;
    int64_t which, *out;
    Py_buffer view;
    if (check_count("read_cursors", nargs, 2) < 0 || as_int64(args[0], &which) < 0)
        return NULL;
    if (which < 0 || which >= NUM_CURSORS)
        return PyErr_Format(PyExc_IndexError, "cursor=%lld does not exist", (long long)which);
    if (!(out = int64_buffer("out", args[1], self->num_envs, PyBUF_WRITABLE, true, &view)))
        return NULL;
    for (int64_t env = 0; env < self->num_envs; env++)
        out[env] = word_load(self->cursors[which][env]);
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

/* scan(start, limit, envs, sequences): rows that inference may act on, from env `start` round.
 * Returns (ready, coming, oldest_ns): how many rows were written out (at most limit), how many envs are on their way,
 * and when the oldest of the rows was published (CLOCK_MONOTONIC; 0 without rows). */
static PyObject *rings_scan(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    Rings *self = (Rings *)object;
    int64_t start, limit, *envs, *sequences, ready = 0, coming = 0, oldest_ns = 0;
    Py_buffer envs_view, sequences_view;
    if (check_count("scan", nargs, 4) < 0 || as_int64(args[0], &start) < 0 || as_int64(args[1], &limit) < 0)
        return NULL;
    if (start < 0 || start >= self->num_envs || limit < 0)
        return PyErr_Format(PyExc_IndexError, "start=%lld limit=%lld with %lld envs", (long long)start,
                            (long long)limit, (long long)self->num_envs);
    if (!(envs = int64_buffer("envs", args[2], limit, PyBUF_WRITABLE, false, &envs_view)))
        return NULL;
    if (!(sequences = int64_buffer("sequences", args[3], limit, PyBUF_WRITABLE, false, &sequences_view))) {
        PyBuffer_Release(&envs_view);
        return NULL;
    }
    int64_t grants = word_load(self->grant_count); /* SYNC: grant count */
    for (int64_t i = 0, env = start; i < self->num_envs; i++, env = env + 1 == self->num_envs ? 0 : env + 1) {
        int64_t granted = word_load(self->cursors[GRANTED][env]);   /* SYNC: granted */
        int64_t observed = word_load(self->cursors[OBSERVED][env]); /* SYNC: observed */
        int64_t acted = atomic_load_explicit(self->cursors[ACTED][env], memory_order_relaxed);
        if (acted >= granted)
            continue;
        if (observed > acted) {
            if (ready == limit)
                break;
            int64_t since_ns = atomic_load_explicit(self->cursors[OBSERVED_NS][env], memory_order_relaxed);
            oldest_ns = ready == 0 || since_ns < oldest_ns ? since_ns : oldest_ns;
            envs[ready] = env;
            sequences[ready++] = acted;
        } else if (word_load(self->running[self->group_of[env]])) {
            coming++;
        }
    }
    if (grants & 1 || word_load(self->grant_count) != grants) { /* half a grant was seen: nothing to say yet */
        ready = oldest_ns = 0;
        coming = 1;
    }
    PyBuffer_Release(&envs_view);
    PyBuffer_Release(&sequences_view);
    return Py_BuildValue("LLL", (long long)ready, (long long)coming, (long long)oldest_ns);
}

/* acted(first, count): the envs among first..first+count-1 whose newest observation has its action. */
static PyObject *rings_acted(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    Rings *self = (Rings *)object;
    int64_t first, count;
    if (check_count("acted", nargs, 2) < 0 || as_int64(args[0], &first) < 0 || as_int64(args[1], &count) < 0)
        return NULL;
    if (first < 0 || count < 0 || count > self->num_envs || first > self->num_envs - count)
        return PyErr_Format(PyExc_IndexError, "envs %lld.. (%lld of them) with %lld envs", (long long)first,
                            (long long)count, (long long)self->num_envs);
    PyObject *result = PyList_New(0);
    for (int64_t env = first; result && env < first + count; env++) {
        int64_t observed = atomic_load_explicit(self->cursors[OBSERVED][env], memory_order_relaxed);
        if (observed == 0 || word_load(self->cursors[ACTED][env]) != observed) /* SYNC: acted */
            continue;
        PyObject *number = PyLong_FromLongLong(env);
        if (!number || PyList_Append(result, number) < 0)
            Py_CLEAR(result);
        Py_XDECREF(number);
    }
    return result;
}

/* finished(length, start, envs, sequences): rollouts of `length` steps that are complete, at most one per env, from
 * env `start` round. Returns how many. */
static PyObject *rings_finished(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    Rings *self = (Rings *)object;
    int64_t length, start, *envs, *sequences, finished = 0;
    Py_buffer envs_view, sequences_view;
    if (check_count("finished", nargs, 4) < 0 || as_int64(args[0], &length) < 0 || as_int64(args[1], &start) < 0)
        return NULL;
    if (start < 0 || start >= self->num_envs || length < 1 || length >= self->capacity)
        return PyErr_Format(PyExc_IndexError, "start=%lld length=%lld with %lld envs of %lld slots", (long long)start,
                            (long long)length, (long long)self->num_envs, (long long)self->capacity);
    if (!(envs = int64_buffer("envs", args[2], self->num_envs, PyBUF_WRITABLE, false, &envs_view)))
        return NULL;
    if (!(sequences = int64_buffer("sequences", args[3], self->num_envs, PyBUF_WRITABLE, false, &sequences_view))) {
        PyBuffer_Release(&envs_view);
        return NULL;
    }
    for (int64_t i = 0, env = start; i < self->num_envs; i++, env = env + 1 == self->num_envs ? 0 : env + 1) {
        int64_t released = atomic_load_explicit(self->cursors[RELEASED][env], memory_order_relaxed);
        if (word_load(self->cursors[OBSERVED][env]) <= released + length) /* SYNC: observed */
            continue;
        envs[finished] = env;
        sequences[finished++] = released;
    }
    PyBuffer_Release(&envs_view);
    PyBuffer_Release(&sequences_view);
    return PyLong_FromLongLong(finished);
}

/* The rows (envs[i], sequences[i]), i < count, with every index checked. */
typedef struct {
    Py_buffer envs_view, sequences_view;
    const int64_t *envs, *sequences;
    int64_t count;
} Rows;

static void rows_release(Rows *rows)
{
    PyBuffer_Release(&rows->envs_view);
    PyBuffer_Release(&rows->sequences_view);
}

static int rows_parse(const Rings *self, PyObject *const *args, Rows *rows)
{
    if (as_int64(args[2], &rows->count) < 0)
        return -1;
    if (rows->count < 0) {
        PyErr_Format(PyExc_ValueError, "count=%lld is negative", (long long)rows->count);
        return -1;
    }
    if (!(rows->envs = int64_buffer("envs", args[0], rows->count, 0, false, &rows->envs_view)))
        return -1;
    if (!(rows->sequences = int64_buffer("sequences", args[1], rows->count, 0, false, &rows->sequences_view))) {
        PyBuffer_Release(&rows->envs_view);
        return -1;
    }
    for (int64_t i = 0; i < rows->count; i++)
        if (check_row(self, rows->envs[i], rows->sequences[i]) < 0) {
            rows_release(rows);
            return -1;
        }
    return 0;
}

/* A contiguous byte buffer of exactly `bytes`. */
static int bytes_parse(const char *name, PyObject *object, int flags, Py_ssize_t bytes, Py_buffer *view)
{
    if (PyObject_GetBuffer(object, view, flags | PyBUF_C_CONTIGUOUS) < 0)
        return -1;
    if (view->len == bytes)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s: expected %zd bytes, got %zd", name, bytes, view->len);
    PyBuffer_Release(view);
    return -1;
}

static void gather_rows(const Rings *self, const Field *field, const Rows *rows, int64_t length, char *out)
{
    for (int64_t i = 0; i < rows->count; i++) {
        int64_t slot = rows->sequences[i] % self->capacity;
        int64_t before_wrap = length < self->capacity - slot ? length : self->capacity - slot;
        const char *ring = (const char *)self->view.buf + field->offset + rows->envs[i] * field->env_stride;
        memcpy(out, ring + slot * field->row_bytes, (size_t)(before_wrap * field->row_bytes));
        memcpy(out + before_wrap * field->row_bytes, ring, (size_t)((length - before_wrap) * field->row_bytes));
        out += length * field->row_bytes;
    }
}

/* gather(field, envs, sequences, count, length, out): copy `length` slots from each row on into out. */
static PyObject *rings_gather(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    Rings *self = (Rings *)object;
    Py_ssize_t index, bytes;
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
    bool fits = !__builtin_mul_overflow((Py_ssize_t)(rows.count * length), field->row_bytes, &bytes);
    if (!fits || bytes_parse("out", args[5], PyBUF_WRITABLE, bytes, &out) < 0) {
        rows_release(&rows);
        return fits ? NULL : PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS
    gather_rows(self, field, &rows, length, out.buf);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&out);
    rows_release(&rows);
    Py_RETURN_NONE;
}

/* scatter(field, envs, sequences, count, rows): copy rows into the slots. */
static PyObject *rings_scatter(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    Rings *self = (Rings *)object;
    Py_ssize_t index, bytes;
    Rows rows;
    Py_buffer source;
    if (check_count("scatter", nargs, 5) < 0 || check_writable(self) < 0 || field_index(self, args[0], &index) < 0 ||
        rows_parse(self, args + 1, &rows) < 0)
        return NULL;
    const Field *field = &self->fields[index];
    bool fits = !__builtin_mul_overflow((Py_ssize_t)rows.count, field->row_bytes, &bytes);
    if (!fits || bytes_parse("rows", args[4], 0, bytes, &source) < 0) {
        rows_release(&rows);
        return fits ? NULL : PyErr_NoMemory();
    }
    const char *row = source.buf;
    for (int64_t i = 0; i < rows.count; i++, row += field->row_bytes)
        memcpy(slot_at(self, field, rows.envs[i], rows.sequences[i]), row, (size_t)field->row_bytes);
    PyBuffer_Release(&source);
    rows_release(&rows);
    Py_RETURN_NONE;
}

/* advance(cursor, envs, sequences, count, step): cursor = sequence + step for every row, with release; cursors only
 * grow. Returns the groups whose envs were touched, each once. */
static PyObject *rings_advance(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    Rings *self = (Rings *)object;
    int64_t which, step;
    Rows rows;
    if (check_count("advance", nargs, 5) < 0 || check_writable(self) < 0 || as_int64(args[0], &which) < 0 ||
        as_int64(args[4], &step) < 0)
        return NULL;
    if (which < 0 || which > GRANTED || step < 0 || step > self->capacity)
        return PyErr_Format(PyExc_ValueError, "cursor=%lld step=%lld", (long long)which, (long long)step);
    if (rows_parse(self, args + 1, &rows) < 0)
        return NULL;
    for (int64_t i = 0; i < rows.count; i++) {
        int64_t now = atomic_load_explicit(self->cursors[which][rows.envs[i]], memory_order_relaxed);
        if (rows.sequences[i] + step < now) {
            PyErr_Format(PyExc_ValueError, "cursor=%lld of env %lld would go back from %lld to %lld", (long long)which,
                         (long long)rows.envs[i], (long long)now, (long long)(rows.sequences[i] + step));
            rows_release(&rows);
            return NULL;
        }
    }
    memset(self->touched, 0, (size_t)self->num_groups);
    for (int64_t i = 0; i < rows.count; i++) {
        word_store(self->cursors[which][rows.envs[i]], rows.sequences[i] + step); /* SYNC: acted, granted */
        self->touched[self->group_of[rows.envs[i]]] = 1;
    }
    rows_release(&rows);
    PyObject *groups = PyList_New(0);
    for (int64_t group = 0; groups && group < self->num_groups; group++) {
        PyObject *number = self->touched[group] ? PyLong_FromLongLong(group) : NULL;
        if (self->touched[group] && (!number || PyList_Append(groups, number) < 0))
            Py_CLEAR(groups);
        Py_XDECREF(number);
    }
    return groups;
}

/* The same element type, whatever letter names it: NumPy says l, the struct module q. */
static char format_of(const Py_buffer *view)
{
    const char *format = view->format ? view->format : "B";
    if (format[0] == 0 || format[1] != 0)
        return '!';
    return format[0] == 'l' && view->itemsize == 8 ? 'q' : format[0] == 'L' && view->itemsize == 8 ? 'Q' : format[0];
}

/* Copies a value into a slot if it is a C-contiguous buffer of exactly the field's type and shape. */
static bool write_exact(const Rings *self, const Field *field, int64_t env, int64_t sequence, PyObject *value)
{
    Py_buffer view;
    if (!PyObject_CheckBuffer(value))
        return false;
    if (PyObject_GetBuffer(value, &view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0) {
        PyErr_Clear(); /* not contiguous: an answer, not an error; the caller converts the value and comes again */
        return false;
    }
    bool fits = view.ndim == field->ndim && format_of(&view) == field->format && view.len == field->row_bytes;
    for (int i = 0; fits && i < field->ndim; i++)
        fits = view.shape[i] == field->shape[i];
    if (fits)
        memcpy(slot_at(self, field, env, sequence), view.buf, (size_t)field->row_bytes);
    PyBuffer_Release(&view);
    return fits;
}

/* write(field, env, sequence, value): copy one value into a slot. False: it is not exactly of the field's type. */
static PyObject *rings_write(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    Rings *self = (Rings *)object;
    Py_ssize_t index;
    int64_t env, sequence;
    if (check_count("write", nargs, 4) < 0 || check_writable(self) < 0 || field_index(self, args[0], &index) < 0 ||
        parse_row(self, args + 1, &env, &sequence) < 0)
        return NULL;
    return PyBool_FromLong(write_exact(self, &self->fields[index], env, sequence, args[3]));
}

/* complete(env, sequence, reward, terminated, truncated, interrupted): what the step brought, into its own slot. */
static PyObject *rings_complete(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    Rings *self = (Rings *)object;
    int64_t env, sequence;
    if (check_count("complete", nargs, 6) < 0 || check_writable(self) < 0 || parse_row(self, args, &env, &sequence) < 0)
        return NULL;
    float reward = (float)PyFloat_AsDouble(args[2]);
    if (PyErr_Occurred())
        return NULL;
    for (int i = 0; i < 3; i++) {
        int flag = PyObject_IsTrue(args[3 + i]);
        if (flag < 0)
            return NULL;
        *step_slot(self, TERMINATED + i, env, sequence) = (char)flag;
    }
    memcpy(step_slot(self, REWARD, env, sequence), &reward, sizeof reward);
    Py_RETURN_NONE;
}

/* observe(env, sequence, leaves, episode_start): write an observation into its slot and publish it.
 * Returns -1, or the index of the first leaf that is not exactly of its field's type (then nothing is published). */
static PyObject *rings_observe(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    Rings *self = (Rings *)object;
    int64_t env, sequence;
    if (check_count("observe", nargs, 4) < 0 || check_writable(self) < 0 || parse_row(self, args, &env, &sequence) < 0)
        return NULL;
    if (!PyTuple_Check(args[2]) || PyTuple_Size(args[2]) != self->num_leaves)
        return PyErr_Format(PyExc_TypeError, "leaves: expected a tuple of %zd", self->num_leaves);
    int episode_start = PyObject_IsTrue(args[3]);
    if (episode_start < 0)
        return NULL;
    word_t *observed = self->cursors[OBSERVED][env];
    if (atomic_load_explicit(observed, memory_order_relaxed) != sequence)
        return PyErr_Format(PyExc_ValueError, "env %lld: observation %lld published out of turn (observed=%lld)",
                            (long long)env, (long long)sequence,
                            (long long)atomic_load_explicit(observed, memory_order_relaxed));
    word_t *slot_sequence = (word_t *)step_slot(self, SEQUENCE, env, sequence);
    slot_begin(slot_sequence);
    for (Py_ssize_t i = 0; i < self->num_leaves; i++) {
        const Field *field = &self->fields[self->leaves[i]];
        if (!write_exact(self, field, env, sequence, PyTuple_GetItem(args[2], i)))
            return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(i);
    }
    *step_slot(self, EPISODE_START, env, sequence) = (char)episode_start;
    slot_end(slot_sequence, sequence);
    atomic_store_explicit(self->cursors[OBSERVED_NS][env], monotonic_ns(), memory_order_relaxed);
    word_store(observed, sequence + 1); /* SYNC: observed */
    return PyLong_FromLong(-1);
}

/* ---- the module ------------------------------------------------------------------------------------------ */

#define FAST(name, function) {name, (PyCFunction)(void (*)(void))function, METH_FASTCALL, NULL}

static PyMethodDef rings_methods[] = {
    FAST("cursor", rings_cursor),   FAST("read_cursors", rings_read_cursors),
    FAST("scan", rings_scan),       FAST("acted", rings_acted),
    FAST("finished", rings_finished), FAST("gather", rings_gather),
    FAST("scatter", rings_scatter), FAST("advance", rings_advance),
    FAST("write", rings_write),     FAST("complete", rings_complete),
    FAST("observe", rings_observe), {NULL, NULL, 0, NULL},
};

static PyType_Slot rings_slots[] = {
    {Py_tp_new, rings_new},
    {Py_tp_dealloc, rings_dealloc},
    {Py_tp_methods, rings_methods},
    {0, NULL},
};

static PyType_Spec rings_spec = {
    .name = "shmcollect._native.Rings",
    .basicsize = sizeof(Rings),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = rings_slots,
};

static PyMethodDef methods[] = {
    FAST("load", native_load),
    FAST("store", native_store),
    FAST("fetch_add", native_fetch_add),
    FAST("compare_exchange", native_compare_exchange),
    {"fence", native_fence, METH_NOARGS, NULL},
    FAST("bell_prepare", native_bell_prepare),
    FAST("bell_cancel", native_bell_cancel),
    FAST("bell_notify", native_bell_notify),
    FAST("bell_wait", native_bell_wait),
    FAST("watch_parent", native_watch_parent),
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module)
{
    static const struct {
        const char *name;
        int value;
    } constants[] = {{"OBSERVED", OBSERVED}, {"ACTED", ACTED}, {"RELEASED", RELEASED}, {"GRANTED", GRANTED}};
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++)
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) < 0)
            return -1;
    PyObject *type = PyType_FromModuleAndSpec(module, &rings_spec, NULL);
    if (!type)
        return -1;
    int status = PyModule_AddObjectRef(module, "Rings", type);
    Py_DECREF(type);
    return status;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "shmcollect._native",
    .m_methods = methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module_def); }
