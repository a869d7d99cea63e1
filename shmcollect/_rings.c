/* The Rings type: takes the memory map of a segment and checks it once, so that its methods (_cursors.c, _rows.c) can
 * rely on it: every word is aligned and inside the buffer, and every slot of every field is inside it.
 */
#include "_rings.h"

#include <stdlib.h>
#include <string.h>

char format_of(const Py_buffer *view)
{
    const char *format = view->format ? view->format : "B";
    if (format[0] == 0 || format[1] != 0)
        return '!';
    return format[0] == 'l' && view->itemsize == 8 ? 'q' : format[0] == 'L' && view->itemsize == 8 ? 'Q' : format[0];
}

static void rings_free_members(Rings *self)
{
    for (int i = 0; i < NUM_CURSORS; i++)
        free(self->cursors[i]);
    free(self->group_of);
    free(self->running);
    free(self->latencies);
    free(self->targets);
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

int64_t *int64_buffer(const char *name, PyObject *object, int64_t count, int flags, bool exact, Py_buffer *view)
{
    if (PyObject_GetBuffer(object, view, flags | PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    int64_t numbers = view->len / 8;
    if (format_of(view) == 'q' && (uintptr_t)view->buf % 8 == 0 && (exact ? numbers == count : numbers >= count))
        return view->buf;
    PyErr_Format(PyExc_ValueError, "%s: expected %s%lld aligned int64, got %zd bytes of format %s", name,
                 exact ? "" : "at least ", (long long)count, view->len, view->format ? view->format : "B");
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
    self->targets = malloc((size_t)self->num_envs * sizeof *self->targets);
    self->touched = malloc((size_t)self->num_groups);
    int status = self->group_of && self->targets && self->touched ? 0 : (PyErr_NoMemory(), -1);
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

static int rings_parse_latencies(Rings *self, PyObject *latencies)
{
    Py_buffer view;
    int64_t *numbers = int64_buffer("latencies", latencies, 1, 0, false, &view);
    if (!numbers)
        return -1;
    self->num_latencies = view.len / 8;
    self->latencies = words_at(self, numbers, self->num_latencies);
    PyBuffer_Release(&view);
    return self->latencies ? 0 : -1;
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

int field_index(const Rings *self, PyObject *object, Py_ssize_t *index)
{
    int64_t number;
    if (as_int64(object, &number) < 0)
        return -1;
    if (number < 0 || number >= self->num_fields) {
        PyErr_Format(PyExc_IndexError, "field=%lld, expected 0..%zd", (long long)number, self->num_fields - 1);
        return -1;
    }
    *index = (Py_ssize_t)number;
    return 0;
}

static const char step_formats[NUM_STEP_FIELDS] = {'q', '?', 'f', '?', '?', '?'};

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
        if (field->format != step_formats[i] || field->ndim != 0 || base % (uintptr_t)field->row_bytes != 0 ||
            field->env_stride % field->row_bytes != 0) {
            PyErr_Format(PyExc_ValueError, "step_fields[%d]: expected an aligned scalar field of format %c", i,
                         step_formats[i]);
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
    static char *names[] = {"buffer",      "num_envs",  "capacity", "cursors",     "groups", "running",
                            "grant_count", "latencies", "fields",   "step_fields", "leaves", NULL};
    PyObject *buffer, *cursors, *groups, *running, *latencies, *fields, *step_fields, *leaves;
    long long num_envs, capacity, grant_count;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OLLOOOLOO!O!O!:Rings", names, &buffer, &num_envs, &capacity, &cursors,
                                     &groups, &running, &grant_count, &latencies, &PyTuple_Type, &fields,
                                     &PyTuple_Type, &step_fields, &PyTuple_Type, &leaves))
        return NULL;
    if (num_envs < 1 || num_envs > INT32_MAX || capacity < 2 || capacity > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "num_envs=%lld, expected 1..%d; capacity=%lld, expected 2..%d", num_envs,
                     INT32_MAX, capacity, INT32_MAX);
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
        rings_parse_groups(self, groups, running) < 0 || rings_parse_latencies(self, latencies) < 0 ||
        rings_parse_fields(self, fields) < 0 ||
        rings_parse_step_fields(self, step_fields, leaves) < 0 || !(grant_word = words_at(self, &grant_offset, 1))) {
        Py_DECREF(self);
        return NULL;
    }
    self->grant_count = grant_word[0];
    free(grant_word);
    return (PyObject *)self;
}

static PyMethodDef rings_methods[] = {
    FAST("cursor", rings_cursor),
    FAST("read_cursors", rings_read_cursors),
    FAST("scan", rings_scan),
    FAST("acted", rings_acted),
    FAST("finished", rings_finished),
    FAST("gather", rings_gather),
    FAST("scatter", rings_scatter),
    FAST("advance", rings_advance),
    FAST("write", rings_write),
    FAST("step", rings_step),
    FAST("observe", rings_observe),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot rings_slots[] = {
    {Py_tp_new, rings_new},
    {Py_tp_dealloc, rings_dealloc},
    {Py_tp_methods, rings_methods},
    {0, NULL},
};

PyType_Spec rings_spec = {
    .name = "shmcollect._native.Rings",
    .basicsize = sizeof(Rings),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = rings_slots,
};
