// Calls a kernel from Python in a fraction of ctypes' time. bind(address, name) gives a builtin function that puts its
// ints, floats and Nones (null pointers) into an Arg array and calls the C function there.
//
// Limited API of Python 3.10, so one file serves every later Python. The interpreter lock stays held: a kernel that runs
// long releases it itself (threads.h).
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "abi.h"

namespace {

constexpr Py_ssize_t kMaxArgs = 64;

// The `self` of the builtin function; the function's definition lives in it because it must live as long.
struct Binding {
  PyObject_HEAD
  int64_t (*kernel)(const Arg*);
  PyMethodDef definition;
  char name[64];
};

PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  auto* binding = reinterpret_cast<Binding*>(self);
  if (n > kMaxArgs) {
    return PyErr_Format(PyExc_TypeError, "kernel %s: %zd arguments, at most %zd", binding->name, n, kMaxArgs);
  }
  Arg values[kMaxArgs];
  for (Py_ssize_t k = 0; k < n; ++k) {
    PyObject* arg = args[k];
    if (Py_TYPE(arg) == &PyLong_Type || Py_TYPE(arg) == &PyBool_Type) {
      values[k].i = PyLong_AsLongLong(arg);
      if (values[k].i == -1 && PyErr_Occurred()) return nullptr;
    } else if (Py_TYPE(arg) == &PyFloat_Type) {
      values[k].f = PyFloat_AsDouble(arg);
    } else if (arg == Py_None) {
      values[k].p = nullptr;
    } else {
      return PyErr_Format(PyExc_TypeError, "kernel %s: argument %zd is a %S; int, float, bool or None wanted",
                          binding->name, k, reinterpret_cast<PyObject*>(Py_TYPE(arg)));
    }
  }
  return PyLong_FromLongLong(binding->kernel(values));
}

void free_binding(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_Free(self);
  Py_DECREF(type);
}

PyType_Slot binding_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(free_binding)}, {0, nullptr}};
PyType_Spec binding_spec = {"opmux.native._fastcall.Binding", sizeof(Binding), 0, Py_TPFLAGS_DEFAULT, binding_slots};
PyObject* binding_type = nullptr;

PyObject* bind(PyObject*, PyObject* args) {
  unsigned long long address = 0;
  const char* name = nullptr;
  if (!PyArg_ParseTuple(args, "Ks", &address, &name)) return nullptr;
  auto* binding = PyObject_New(Binding, reinterpret_cast<PyTypeObject*>(binding_type));
  if (!binding) return nullptr;
  binding->kernel = reinterpret_cast<int64_t (*)(const Arg*)>(static_cast<uintptr_t>(address));
  std::strncpy(binding->name, name, sizeof(binding->name) - 1);
  binding->name[sizeof(binding->name) - 1] = '\0';
  binding->definition = {binding->name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call)), METH_FASTCALL, nullptr};
  PyObject* function = PyCFunction_NewEx(&binding->definition, reinterpret_cast<PyObject*>(binding), nullptr);
  Py_DECREF(binding);
  return function;
}

PyMethodDef methods[] = {{"bind", bind, METH_VARARGS, "bind(address, name) -> function"}, {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_fastcall", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__fastcall() {
  binding_type = PyType_FromSpec(&binding_spec);
  return binding_type ? PyModule_Create(&module) : nullptr;
}
