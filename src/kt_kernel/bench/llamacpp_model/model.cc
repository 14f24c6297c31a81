// A whole model on llama.cpp: prefill of one sequence, and decode of one token for each of several.
//
// A C interface for ctypes: one model per process; a call returns null or what went wrong. ggml itself aborts on
// errors.

#include <dlfcn.h>
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <llama.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

void require(bool ok, const std::string& what) {
  if (!ok) throw std::runtime_error(what);
}

// The CPU module that was loaded, and its pool: without one llama.cpp starts its threads anew for every graph.
class Threads {
 public:
  Threads(const char* module, int threads) : registry_(ggml_backend_load(module)) {
    require(registry_ != nullptr, std::string(module) + " does not load, or does not run on this CPU");
    ggml_threadpool_params params = ggml_threadpool_params_default(threads);
    params.poll = 100;  // workers wait awake between calls, for up to half a second
    pool_ = call<decltype(&ggml_threadpool_new)>("ggml_threadpool_new")(&params);
    require(pool_ != nullptr, "no thread pool");
    pause_ = reinterpret_cast<decltype(pause_)>(dlsym(dlopen(module, RTLD_NOW | RTLD_NOLOAD), "ggml_threadpool_pause"));
    require(pause_ != nullptr, std::string(module) + " has no ggml_threadpool_pause");
  }

  ggml_threadpool* pool() const { return pool_; }
  // Sends the workers to sleep; the next graph wakes them.
  void rest() const { pause_(pool_); }

 private:
  template <class Function>
  Function call(const char* name) const {
    void* found = ggml_backend_reg_get_proc_address(registry_, name);
    require(found != nullptr, std::string("no ") + name + " in the backend");
    return reinterpret_cast<Function>(found);
  }

  ggml_backend_reg_t registry_;
  ggml_threadpool* pool_;
  decltype(&ggml_threadpool_pause) pause_;
};

class Model {
 public:
  Model(const char* module, const char* path, int threads, int sequences, int context, int batch)
      : threads_(module, threads), batch_(llama_batch_init(batch, 0, 1)), lengths_(sequences) {
    model_.reset(llama_model_load_from_file(path, llama_model_default_params()));
    require(model_ != nullptr, std::string(path) + " does not load");
    llama_context_params params = llama_context_default_params();
    params.n_ctx = static_cast<uint32_t>(context * sequences);
    params.n_batch = params.n_ubatch = static_cast<uint32_t>(batch);
    params.n_seq_max = static_cast<uint32_t>(sequences);
    params.n_threads = params.n_threads_batch = threads;
    context_.reset(llama_init_from_model(model_.get(), params));
    require(context_ != nullptr, "no context: not enough memory?");
    llama_attach_threadpool(context_.get(), threads_.pool(), threads_.pool());
    vocabulary_ = llama_vocab_n_tokens(llama_model_get_vocab(model_.get()));
  }

  // The sequence is these tokens then; next gets the most likely one after them.
  void prefill(int sequence, const int32_t* tokens, int count, int32_t* next) {
    llama_memory_seq_rm(llama_get_memory(context_.get()), sequence, -1, -1);
    lengths_[sequence] = 0;
    batch_.n_tokens = 0;
    for (int i = 0; i < count; ++i) add(sequence, tokens[i], i + 1 == count);
    run();
    *next = most_likely(count - 1);
  }

  // A token more for each of the first sequences.
  void decode(const int32_t* tokens, int sequences, int32_t* next) {
    batch_.n_tokens = 0;
    for (int i = 0; i < sequences; ++i) add(i, tokens[i], true);
    run();
    for (int i = 0; i < sequences; ++i) next[i] = most_likely(i);
  }

  void rest() const { threads_.rest(); }

 private:
  struct Free {
    void operator()(llama_model* model) const { llama_model_free(model); }
    void operator()(llama_context* context) const { llama_free(context); }
  };

  void add(int sequence, int32_t token, bool wanted) {
    const int i = batch_.n_tokens++;
    batch_.token[i] = token;
    batch_.pos[i] = lengths_[sequence]++;
    batch_.n_seq_id[i] = 1;
    batch_.seq_id[i][0] = sequence;
    batch_.logits[i] = wanted;
  }

  void run() {
    const int status = llama_decode(context_.get(), batch_);
    require(status == 0, "llama_decode gave " + std::to_string(status));
  }

  int32_t most_likely(int row) {
    const float* logits = llama_get_logits_ith(context_.get(), row);
    require(logits != nullptr, "no logits");
    return static_cast<int32_t>(std::max_element(logits, logits + vocabulary_) - logits);
  }

  Threads threads_;
  std::unique_ptr<llama_model, Free> model_;
  std::unique_ptr<llama_context, Free> context_;
  llama_batch batch_;
  std::vector<llama_pos> lengths_;  // of sequences
  int32_t vocabulary_ = 0;
};

std::unique_ptr<Model> the_model;
std::string last_error;

template <class Call>
const char* guarded(Call call) {
  try {
    call();
    return nullptr;
  } catch (const std::exception& error) {
    last_error = error.what();
    return last_error.c_str();
  }
}

}  // namespace

extern "C" {

const char* kt_open(const char* module, const char* path, int threads, int sequences, int context, int batch) {
  return guarded([&] {
    llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    the_model = std::make_unique<Model>(module, path, threads, sequences, context, batch);
  });
}

const char* kt_prefill(int sequence, const int32_t* tokens, int count, int32_t* next) {
  return guarded([&] { the_model->prefill(sequence, tokens, count, next); });
}

const char* kt_decode(const int32_t* tokens, int sequences, int32_t* next) {
  return guarded([&] { the_model->decode(tokens, sequences, next); });
}

const char* kt_rest() {
  return guarded([&] { the_model->rest(); });
}
}
