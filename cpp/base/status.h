// Errors are values inside the core: nothing below the bindings throws, prints or exits.
#pragma once

#include <string>
#include <utility>

namespace kt {

class [[nodiscard]] Status {
 public:
  enum class Code { ok, invalid, unsupported, system };

  Status() = default;
  static Status ok() { return {}; }
  // The caller passed something wrong (ValueError in Python).
  static Status invalid(std::string message) { return {Code::invalid, std::move(message)}; }
  // This build, CPU or process cannot do it (RuntimeError in Python; ImportError at import).
  static Status unsupported(std::string message) { return {Code::unsupported, std::move(message)}; }
  // The operating system refused: memory, threads, files (OSError or MemoryError in Python).
  static Status system(std::string message) { return {Code::system, std::move(message)}; }

  bool is_ok() const { return code_ == Code::ok; }
  Code code() const { return code_; }
  // Says what is wrong and what to do next.
  const std::string& message() const { return message_; }

 private:
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}
  Code code_ = Code::ok;
  std::string message_;
};

}  // namespace kt

#define KT_RETURN_IF_ERROR(expr)              \
  do {                                        \
    ::kt::Status kt_status = (expr);          \
    if (!kt_status.is_ok()) return kt_status; \
  } while (0)
