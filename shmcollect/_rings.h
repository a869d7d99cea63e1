/* What the Rings type holds: checked addresses and extents, so that the row loops need only check their indices. */
#ifndef SHMCOLLECT_RINGS_H
#define SHMCOLLECT_RINGS_H

#include "_arguments.h"
#include "_sync.h"

enum { OBSERVED, ACTED, RELEASED, GRANTED, OBSERVED_NS, NUM_CURSORS };
enum { SEQUENCE, EPISODE_START, REWARD, TERMINATED, TRUNCATED, INTERRUPTED, NUM_STEP_FIELDS };
enum { MAX_DIMS = 32 };

typedef struct {
    Py_ssize_t offset, env_stride, row_bytes;
    char format; /* a letter of the struct module */
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
    int64_t num_latencies;
    word_t **latencies;            /* [bucket]: actions that took so long; written by whoever advances ACTED */
    int64_t *targets;              /* [env], scratch of advance() */
    char *touched;                 /* [group], scratch of advance() */
    Py_ssize_t num_fields;
    Field *fields;
    Py_ssize_t step_fields[NUM_STEP_FIELDS];
    Py_ssize_t num_leaves;
    Py_ssize_t *leaves; /* the observation's fields */
} Rings;

extern PyType_Spec rings_spec;

#define METHOD(name) PyObject *name(PyObject *object, PyObject *const *args, Py_ssize_t nargs)

/* _cursors.c */
METHOD(rings_cursor);
METHOD(rings_read_cursors);
METHOD(rings_scan);
METHOD(rings_acted);
METHOD(rings_finished);
/* _rows.c */
METHOD(rings_gather);
METHOD(rings_scatter);
METHOD(rings_advance);
METHOD(rings_write);
METHOD(rings_step);
METHOD(rings_observe);

/* The index of a field, or an exception. */
int field_index(const Rings *self, PyObject *object, Py_ssize_t *index);

/* A contiguous int64 buffer of at least (or, with exact, precisely) `count` numbers. */
int64_t *int64_buffer(const char *name, PyObject *object, int64_t count, int flags, bool exact, Py_buffer *view);

/* The element type as one letter, whatever its name: NumPy says l, the struct module q. '!' for all that is not a
 * single native number. */
char format_of(const Py_buffer *view);

static inline char *slot_at(const Rings *self, const Field *field, int64_t env, int64_t sequence)
{
    return (char *)self->view.buf + field->offset + env * field->env_stride +
           (sequence % self->capacity) * field->row_bytes;
}

static inline char *step_slot(const Rings *self, int which, int64_t env, int64_t sequence)
{
    return slot_at(self, &self->fields[self->step_fields[which]], env, sequence);
}

#endif
