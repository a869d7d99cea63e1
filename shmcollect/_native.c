/* The only door to shared words: atomics, doorbells and the parent watch here, the Rings type in _rings.c.
 *
 * No policy lives here. Every buffer, offset and index that comes from Python is checked before it is used: a bad
 * call raises and writes nothing. Limited API of CPython 3.11 (the first with the buffer protocol), so one abi3
 * wheel serves every later Python. Memory orderings are in _sync.h.
 */
#include "_rings.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>

/* ---- words ----------------------------------------------------------------------------------------------- */
/* A shared word (or bell) of 8 bytes inside a buffer: present, aligned, and writable if it is going to be written. */
static void *word_at(PyObject *buffer, PyObject *offset_object, int flags, Py_buffer *view)
{
    int64_t offset;
    if (as_int64(offset_object, &offset) < 0 || PyObject_GetBuffer(buffer, view, flags) < 0)
        return NULL;
    if (offset < 0 || offset > (int64_t)view->len - 8) {
        PyErr_Format(PyExc_IndexError, "offset=%lld: no 8-byte word there in a buffer of %zd bytes", (long long)offset,
                     view->len);
    } else if (((uintptr_t)view->buf + (uintptr_t)offset) % 8 != 0) {
        PyErr_Format(PyExc_ValueError, "offset=%lld is not aligned to 8 bytes", (long long)offset);
    } else {
        return (char *)view->buf + offset;
    }
    PyBuffer_Release(view);
    return NULL;
}

static PyObject *native_load(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer view;
    word_t *word;
    if (check_count("load", nargs, 2) < 0 || !(word = word_at(args[0], args[1], PyBUF_SIMPLE, &view)))
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
        !(word = word_at(args[0], args[1], PyBUF_WRITABLE, &view)))
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
        !(word = word_at(args[0], args[1], PyBUF_WRITABLE, &view)))
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
        as_int64(args[3], &desired) < 0 || !(word = word_at(args[0], args[1], PyBUF_WRITABLE, &view)))
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
    if (check_count("bell_prepare", nargs, 2) < 0 || !(bell = word_at(args[0], args[1], PyBUF_WRITABLE, &view)))
        return NULL;
    uint32_t key = bell_prepare(bell);
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(key);
}

static PyObject *native_bell_cancel(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer view;
    bell_t *bell;
    if (check_count("bell_cancel", nargs, 2) < 0 || !(bell = word_at(args[0], args[1], PyBUF_WRITABLE, &view)))
        return NULL;
    bell_cancel(bell);
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

static PyObject *native_bell_notify(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer view;
    bell_t *bell;
    if (check_count("bell_notify", nargs, 2) < 0 || !(bell = word_at(args[0], args[1], PyBUF_WRITABLE, &view)))
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
    if (!(bell = word_at(args[0], args[1], PyBUF_WRITABLE, &view)))
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
    /* Signal 0 asks whether it is a pidfd: any other readable descriptor would end this process at once. */
    if (pidfd < 0 || pidfd > INT_MAX ||
        (syscall(SYS_pidfd_send_signal, (int)pidfd, 0, NULL, 0) < 0 && errno == EBADF)) {
        PyErr_Format(PyExc_ValueError, "pidfd=%lld is not an open pidfd", (long long)pidfd);
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

/* ---- the module ------------------------------------------------------------------------------------------ */

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
