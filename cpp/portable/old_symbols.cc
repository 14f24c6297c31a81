// Binds the extension and nanobind's backends to symbol versions of glibc 2.28 and libstdc++ 3.4.24, whatever it is
// built on, so that one wheel installs on every distribution since 2018 (manylinux_2_28). glibc 2.32 and 2.34 only
// moved these functions from libpthread and libdl into libc, under a new version; the old ones are the same code, and
// stay.
//
// Each is a pair: the linker turns calls of NAME, those in libraries linked in included, into __wrap_NAME
// (cmake/python.cmake has the list), and that calls NAME under its old version.

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>

#include <condition_variable>
#include <new>

#if defined(__GLIBC__) && defined(__x86_64__)

#define KT_OLD(version, result, name, parameters, arguments)                      \
  __asm__(".symver old_" #name ", " #name "@" version);                           \
  extern "C" __attribute__((visibility("default"))) result old_##name parameters; \
  extern "C" __attribute__((visibility("hidden"))) result __wrap_##name parameters { return old_##name arguments; }

KT_OLD("GLIBC_2.2.5", char*, dlerror, (), ())
KT_OLD("GLIBC_2.2.5", void*, dlopen, (const char* file, int mode), (file, mode))
KT_OLD("GLIBC_2.2.5", void*, dlsym, (void* handle, const char* name), (handle, name))
KT_OLD("GLIBC_2.2.5", int, pthread_create,
       (pthread_t * thread, const pthread_attr_t* attributes, void* (*start)(void*), void* argument),
       (thread, attributes, start, argument))
KT_OLD("GLIBC_2.2.5", int, pthread_join, (pthread_t thread, void** result), (thread, result))
KT_OLD("GLIBC_2.2.5", int, pthread_sigmask, (int how, const sigset_t* set, sigset_t* old), (how, set, old))
KT_OLD("GLIBC_2.3.4", int, pthread_setaffinity_np, (pthread_t thread, size_t size, const cpu_set_t* cpus),
       (thread, size, cpus))
KT_OLD("GLIBC_2.12", int, pthread_setname_np, (pthread_t thread, const char* name), (thread, name))
KT_OLD("GLIBCXX_3.4.11", void, _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE,
       (std::condition_variable * condition, std::unique_lock<std::mutex>* lock), (condition, lock))

// Since GCC 11 copies and ends of std::exception_ptr are inline and count by these two; before, they were functions.
__asm__(".symver old_copy, _ZNSt15__exception_ptr13exception_ptrC1ERKS0_@CXXABI_1.3.3");
__asm__(".symver old_end, _ZNSt15__exception_ptr13exception_ptrD1Ev@CXXABI_1.3.3");
extern "C" __attribute__((visibility("default"))) void old_copy(void** to, void* const* from);
extern "C" __attribute__((visibility("default"))) void old_end(void** pointer);
extern "C" __attribute__((visibility("hidden"))) void __wrap__ZNSt15__exception_ptr13exception_ptr9_M_addrefEv(
    void** pointer) {
  void* copy;  // of the pointer, whose end is never called: what is left is the count
  old_copy(&copy, pointer);
}
extern "C" __attribute__((visibility("hidden"))) void __wrap__ZNSt15__exception_ptr13exception_ptr10_M_releaseEv(
    void** pointer) {
  old_end(pointer);
  *pointer = nullptr;
}

// Since 2.32 libstdc++ asks glibc whether there is one thread only, to count references without locking. Here: never.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded = 0;

// Since GCC 11 of libstdc++.
namespace std {
__attribute__((visibility("hidden"))) void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std

#endif
