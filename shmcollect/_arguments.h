/* Arguments that come from Python, counted and converted. */
#ifndef SHMCOLLECT_ARGUMENTS_H
#define SHMCOLLECT_ARGUMENTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

#define FAST(name, function) {name, (PyCFunction)(void (*)(void))function, METH_FASTCALL, NULL}

static inline int check_count(const char *name, Py_ssize_t got, Py_ssize_t expected)
{
    if (got == expected)
        return 0;
    PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments (%zd given)", name, expected, got);
    return -1;
}

static inline int as_int64(PyObject *object, int64_t *value)
{
    *value = PyLong_AsLongLong(object);
    return *value == -1 && PyErr_Occurred() ? -1 : 0;
}

#endif
