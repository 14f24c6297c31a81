// One MoE layer on ggml's CPU backend, the graph that llama.cpp's build_moe_ffn makes once the experts are chosen:
//
//   out[t] = sum_j weights[t, j] * down_e (silu(gate_e x[t]) * up_e x[t]),  e = ids[t, j]
//
// x, weights and out are f32, ids i32; ggml quantises activations by itself. Weights are held as the file has them
// (kind 0) and, where an extra buffer type of the backend takes MUL_MAT_ID, once more in its layout (kind 1).
//
// A C interface for ctypes: one layer per process; a call returns null or what went wrong. ggml itself aborts on
// errors.

#include <dlfcn.h>
#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>
#include <strings.h>

#include <array>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

enum Matrix { kGate, kUp, kDown, kMatrices };

struct Sizes {
  ggml_type type;
  int64_t experts, top_k, hidden, intermediate;
};

void require(bool ok, const std::string& what) {
  if (!ok) throw std::runtime_error(what);
}

template <class Function>
Function symbol(void* library, const char* name) {
  void* found = dlsym(library, name);
  require(found != nullptr, std::string("no ") + name + " in the backend");
  return reinterpret_cast<Function>(found);
}

class Backend {
 public:
  explicit Backend(const char* path) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error(dlerror());
    require(symbol<int (*)()>(library, "ggml_backend_score")() > 0, std::string(path) + " does not run on this CPU");
    registry_ = symbol<ggml_backend_reg_t (*)()>(library, "ggml_backend_init")();
    pause_ = symbol<decltype(&ggml_threadpool_pause)>(library, "ggml_threadpool_pause");
    device_ = ggml_backend_reg_dev_get(registry_, 0);
    backend_ = ggml_backend_dev_init(device_, nullptr);
    require(backend_ != nullptr, std::string(path) + " does not start");
  }

  void set_threads(int threads) {
    ggml_threadpool_params params = ggml_threadpool_params_default(threads);
    params.poll = 100;  // workers wait awake between calls, for up to half a second
    ggml_threadpool* pool = call<decltype(&ggml_threadpool_new)>("ggml_threadpool_new")(&params);
    require(pool != nullptr, "no thread pool");
    call<decltype(&ggml_backend_cpu_set_threadpool)>("ggml_backend_cpu_set_threadpool")(backend_, pool);
    call<ggml_backend_set_n_threads_t>("ggml_backend_set_n_threads")(backend_, threads);
    if (pool_) call<decltype(&ggml_threadpool_free)>("ggml_threadpool_free")(pool_);
    pool_ = pool;
  }

  // Sends the workers to sleep; the next graph wakes them.
  void rest() {
    if (pool_) pause_(pool_);
  }

  ggml_backend_buffer_type_t plain() const { return ggml_backend_dev_buffer_type(device_); }

  // The first extra buffer type that takes a product by chosen experts with this matrix; plain() if none does.
  ggml_backend_buffer_type_t best(ggml_type type, int64_t columns, int64_t rows, int64_t experts) const {
    auto extra = call<ggml_backend_dev_get_extra_bufts_t>("ggml_backend_dev_get_extra_bufts")(device_);
    for (; extra && *extra; ++extra) {
      ggml_init_params params{ggml_tensor_overhead() * 8, nullptr, true};
      ggml_context* context = ggml_init(params);
      ggml_tensor* weights = ggml_new_tensor_3d(context, type, columns, rows, experts);
      ggml_tensor* input = ggml_new_tensor_3d(context, GGML_TYPE_F32, columns, 1, 1);
      ggml_tensor* ids = ggml_new_tensor_2d(context, GGML_TYPE_I32, 1, 1);
      ggml_tensor* product = ggml_mul_mat_id(context, weights, input, ids);
      weights->buffer = ggml_backend_buft_alloc_buffer(*extra, 0);
      const bool taken = ggml_backend_dev_supports_op(device_, product);
      ggml_backend_buffer_free(weights->buffer);
      ggml_free(context);
      if (taken) return *extra;
    }
    return plain();
  }

  ggml_backend_t get() const { return backend_; }

 private:
  template <class Function>
  Function call(const char* name) const {
    void* found = ggml_backend_reg_get_proc_address(registry_, name);
    require(found != nullptr, std::string("no ") + name + " in the backend");
    return reinterpret_cast<Function>(found);
  }

  ggml_backend_reg_t registry_;
  ggml_backend_dev_t device_;
  ggml_backend_t backend_;
  ggml_threadpool* pool_ = nullptr;
  decltype(&ggml_threadpool_pause) pause_;
};

// gate, up [I, H] and down [H, I] of every expert, each in a buffer of its own.
class Weights {
 public:
  Weights(const Backend& backend, const Sizes& sizes, bool extra) {
    context_ = ggml_init({ggml_tensor_overhead() * kMatrices, nullptr, true});
    for (int m = 0; m < kMatrices; ++m) {
      const int64_t columns = m == kDown ? sizes.intermediate : sizes.hidden;
      const int64_t rows = m == kDown ? sizes.hidden : sizes.intermediate;
      auto type = extra ? backend.best(sizes.type, columns, rows, sizes.experts) : backend.plain();
      if (type != backend.plain()) name_ = ggml_backend_buft_name(type);
      matrices_[m] = ggml_new_tensor_3d(context_, sizes.type, columns, rows, sizes.experts);
      buffers_[m] = ggml_backend_buft_alloc_buffer(type, ggml_backend_buft_get_alloc_size(type, matrices_[m]));
      require(buffers_[m] != nullptr, "not enough memory for the weights");
      ggml_backend_buffer_set_usage(buffers_[m], GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
      ggml_backend_tensor_alloc(buffers_[m], matrices_[m], ggml_backend_buffer_get_base(buffers_[m]));
    }
  }
  Weights(const Weights&) = delete;
  ~Weights() {
    for (ggml_backend_buffer_t buffer : buffers_) ggml_backend_buffer_free(buffer);
    ggml_free(context_);
  }

  ggml_tensor* operator[](int m) const { return matrices_[m]; }
  // Of the extra buffer type; null if no matrix has one.
  const char* name() const { return name_; }

 private:
  ggml_context* context_;
  std::array<ggml_tensor*, kMatrices> matrices_{};
  std::array<ggml_backend_buffer_t, kMatrices> buffers_{};
  const char* name_ = nullptr;
};

// The graphs of one token count, one for each copy of the weights; they share inputs and intermediate rows.
class Graphs {
 public:
  Graphs(const Backend& backend, const Sizes& sizes, const std::vector<std::vector<const Weights*>>& kinds,
         int64_t tokens, const float* x, const float* weights)
      : backend_(backend) {
    inputs_ = ggml_init({ggml_tensor_overhead() * 3, nullptr, true});
    x_ = ggml_new_tensor_3d(inputs_, GGML_TYPE_F32, sizes.hidden, 1, tokens);
    ids_ = ggml_new_tensor_2d(inputs_, GGML_TYPE_I32, sizes.top_k, tokens);
    weights_ = ggml_new_tensor_3d(inputs_, GGML_TYPE_F32, 1, sizes.top_k, tokens);
    input_buffer_ = ggml_backend_alloc_ctx_tensors(inputs_, backend.get());
    require(input_buffer_ != nullptr, "not enough memory for the inputs");
    ggml_backend_tensor_set(x_, x, 0, ggml_nbytes(x_));
    ggml_backend_tensor_set(weights_, weights, 0, ggml_nbytes(weights_));

    const size_t nodes = 16 + 3 * sizes.top_k;
    size_t count = 0;
    for (const auto& copies : kinds) count += copies.size();
    const size_t bytes = count * (nodes * ggml_tensor_overhead() + ggml_graph_overhead_custom(nodes, false));
    context_ = ggml_init({bytes, nullptr, true});
    allocator_ = ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend.get()));
    for (const auto& copies : kinds) {
      auto& graphs = graphs_.emplace_back();
      for (const Weights* copy : copies) {
        graphs.push_back(build(*copy, sizes, tokens, nodes));
        require(ggml_gallocr_alloc_graph(allocator_, graphs.back()), "not enough memory for the rows");
      }
    }
  }
  Graphs(const Graphs&) = delete;
  ~Graphs() {
    ggml_gallocr_free(allocator_);
    ggml_free(context_);
    ggml_backend_buffer_free(input_buffer_);
    ggml_free(inputs_);
  }

  void compute(int kind, int64_t call, const int32_t* ids) {
    auto& graphs = graphs_[kind];
    ggml_backend_tensor_set(ids_, ids, 0, ggml_nbytes(ids_));
    last_ = graphs[call % graphs.size()];
    require(ggml_backend_graph_compute(backend_.get(), last_) == GGML_STATUS_SUCCESS, "the graph was not computed");
  }

  void output(float* to) const {
    ggml_tensor* out = ggml_graph_node(last_, -1);
    ggml_backend_tensor_get(out, to, 0, ggml_nbytes(out));
  }

 private:
  ggml_cgraph* build(const Weights& w, const Sizes& sizes, int64_t tokens, size_t nodes) {
    ggml_cgraph* graph = ggml_new_graph_custom(context_, nodes, false);
    ggml_build_forward_expand(graph, weights_);
    ggml_tensor* up = ggml_mul_mat_id(context_, w[kUp], x_, ids_);
    ggml_tensor* gate = ggml_mul_mat_id(context_, w[kGate], x_, ids_);
    ggml_tensor* rows = ggml_swiglu_split(context_, gate, up);
    rows = ggml_mul_mat_id(context_, w[kDown], rows, ids_);
    rows = ggml_mul(context_, rows, weights_);
    ggml_build_forward_expand(graph, rows);
    std::vector<ggml_tensor*> chosen;
    for (int64_t j = 0; j < sizes.top_k; ++j) {
      chosen.push_back(ggml_view_2d(context_, rows, sizes.hidden, tokens, rows->nb[2], j * rows->nb[1]));
      ggml_build_forward_expand(graph, chosen.back());
    }
    ggml_tensor* out = chosen[0];
    for (int64_t j = 1; j < sizes.top_k; ++j) {
      out = ggml_add(context_, out, chosen[j]);
      ggml_build_forward_expand(graph, out);
    }
    if (sizes.top_k == 1) out = ggml_cont(context_, out);
    ggml_set_output(out);
    ggml_build_forward_expand(graph, out);
    return graph;
  }

  const Backend& backend_;
  ggml_context* inputs_;
  ggml_context* context_;
  ggml_backend_buffer_t input_buffer_;
  ggml_gallocr_t allocator_;
  ggml_tensor *x_, *ids_, *weights_;
  std::vector<std::vector<ggml_cgraph*>> graphs_;
  ggml_cgraph* last_ = nullptr;
};

struct Layer {
  Sizes sizes;
  std::vector<std::vector<std::unique_ptr<Weights>>> kinds;
  std::unique_ptr<Graphs> graphs;
};

std::unique_ptr<Backend> backend;
std::unique_ptr<Layer> layer;

template <class Body>
const char* guarded(Body body) {
  static std::string message;
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

ggml_type type_of(const char* name) {
  for (int type = 0; type < GGML_TYPE_COUNT; ++type)
    if (const char* known = ggml_type_name(ggml_type(type)); known && strcasecmp(known, name) == 0)
      return ggml_type(type);
  throw std::runtime_error(std::string("llama.cpp has no type ") + name);
}

}  // namespace

extern "C" {

const char* kt_load(const char* path) {
  return guarded([&] { backend = std::make_unique<Backend>(path); });
}

const char* kt_set_threads(int threads) {
  return guarded([&] { backend->set_threads(threads); });
}

const char* kt_rest() {
  return guarded([&] { backend->rest(); });
}

// The copies of kind 0, to be filled; `bytes` gets what an expert takes in it.
const char* kt_make(const char* type, int64_t experts, int64_t top_k, int64_t hidden, int64_t intermediate, int copies,
                    int64_t* bytes) {
  return guarded([&] {
    layer.reset();
    const Sizes sizes{type_of(type), experts, top_k, hidden, intermediate};
    const int64_t block = ggml_blck_size(sizes.type);
    require(hidden % block == 0 && intermediate % block == 0,
            std::string(type) + " needs sizes in multiples of " + std::to_string(block));
    auto made = std::make_unique<Layer>();
    made->sizes = sizes;
    made->kinds.resize(1);
    for (int i = 0; i < copies; ++i) made->kinds[0].push_back(std::make_unique<Weights>(*backend, sizes, false));
    *bytes = 0;
    for (int m = 0; m < kMatrices; ++m) *bytes += (*made->kinds[0][0])[m]->nb[2];
    layer = std::move(made);
  });
}

// matrix: 0 gate, 1 up, 2 down; the rows of one expert as a file has them.
const char* kt_fill(int matrix, int64_t expert, const void* rows) {
  return guarded([&] {
    for (const auto& copy : layer->kinds[0]) {
      ggml_tensor* tensor = (*copy)[matrix];
      ggml_backend_tensor_set(tensor, rows, expert * tensor->nb[2], tensor->nb[2]);
    }
  });
}

// Kind 1 out of kind 0, where the backend has a layout for it; `name` gets what it calls that, or stays null.
const char* kt_repack(const char** name) {
  return guarded([&] {
    std::vector<std::unique_ptr<Weights>> copies;
    for (const auto& plain : layer->kinds[0]) {
      copies.push_back(std::make_unique<Weights>(*backend, layer->sizes, true));
      if (!copies.back()->name()) return;
      for (int m = 0; m < kMatrices; ++m)
        ggml_backend_tensor_set((*copies.back())[m], (*plain)[m]->data, 0, ggml_nbytes((*plain)[m]));
    }
    *name = copies[0]->name();
    layer->kinds.push_back(std::move(copies));
  });
}

const char* kt_prepare(int64_t tokens, const float* x, const float* weights) {
  return guarded([&] {
    std::vector<std::vector<const Weights*>> kinds;
    for (const auto& copies : layer->kinds) {
      auto& kind = kinds.emplace_back();
      for (const auto& copy : copies) kind.push_back(copy.get());
    }
    layer->graphs.reset();
    layer->graphs = std::make_unique<Graphs>(*backend, layer->sizes, kinds, tokens, x, weights);
  });
}

const char* kt_forward(int kind, int64_t call, const int32_t* ids) {
  return guarded([&] { layer->graphs->compute(kind, call, ids); });
}

const char* kt_output(float* to) {
  return guarded([&] { layer->graphs->output(to); });
}

}  // extern "C"
