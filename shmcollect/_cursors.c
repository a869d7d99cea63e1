/* Reads the cursors of all envs: which are ready for an action, which have theirs, which have a finished rollout. */
#include "_rings.h"

/* cursor(which, env): the value of one cursor. */
METHOD(rings_cursor)
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
METHOD(rings_read_cursors)
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
METHOD(rings_scan)
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
METHOD(rings_acted)
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
METHOD(rings_finished)
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
        int64_t observed = word_load(self->cursors[OBSERVED][env]); /* SYNC: observed */
        if (observed - released <= length)
            continue;
        envs[finished] = env;
        sequences[finished++] = released;
    }
    PyBuffer_Release(&envs_view);
    PyBuffer_Release(&sequences_view);
    return PyLong_FromLongLong(finished);
}
