// Status values as Python exceptions.
#pragma once

#include <nanobind/nanobind.h>

#include "base/status.h"

inline void raise(const kt::Status& status) {
  switch (status.code()) {
    case kt::Status::Code::ok:
      return;
    case kt::Status::Code::invalid:
      throw nanobind::value_error(status.message().c_str());
    case kt::Status::Code::unsupported:
      PyErr_SetString(PyExc_RuntimeError, status.message().c_str());
      break;
    case kt::Status::Code::system:
      PyErr_SetString(PyExc_OSError, status.message().c_str());
      break;
  }
  throw nanobind::python_error();
}

// Raises what body() returns; while it runs, other Python threads do too.
template <class Body>
void raise_of(const Body& body) {
  kt::Status status;
  {
    nanobind::gil_scoped_release released;
    status = body();
  }
  raise(status);
}
