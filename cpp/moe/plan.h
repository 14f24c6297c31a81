// Routing turned into work: which rows each expert gets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kt {

struct Routing {
  const void* ids;       // [tokens][top_k]; below 0, at or above num_experts, or of an expert left out: skipped
  const float* weights;  // [tokens][top_k]
  int tokens;
  int top_k;
  int id_bytes = 8;  // 4: int32, 8: int64

  // The tokens [first, first + count).
  Routing part(int first, int count) const {
    const size_t at = static_cast<size_t>(first) * top_k;
    return {static_cast<const uint8_t*>(ids) + at * id_bytes, weights + at, count, top_k, id_bytes};
  }
};

// The (token, weight) pairs grouped by expert, in token order. A token that names an expert twice has two pairs.
class Plan {
 public:
  // Pairs [first, first + count) of an active expert, and the row of the first of them in a table of products where
  // every expert starts at a multiple of kRowUnit.
  struct Chunk {
    int slot, first, count, row;
  };
  // Of one token: rows in that table, as the routing has them.
  struct TokenPairs {
    const int32_t* rows;
    const float* weights;
    int count;
  };

  // After this, build() and cut() with at most these sizes allocate nothing; cut() takes kRowUnit or more.
  void reserve(int num_experts, int max_pairs);
  // Leaves experts out of what is built next: those whose byte in mask or in skip is not 0; either may be null. Read
  // here and never again, because their owners may write to them while a forward runs.
  void leave_out(int num_experts, const uint8_t* mask, const uint8_t* skip);
  void build(const Routing& routing);
  // The first expert that the routing names, is not left out, and has a 0 in `loaded`; -1 if there is none.
  int first_missing(const Routing& routing, const uint8_t* loaded) const;

  int pairs() const { return begin_[active()]; }
  int active() const { return static_cast<int>(experts_.size()); }
  // The i-th active expert, ascending by id, and its pairs [begin, end).
  int expert(int i) const { return experts_[i]; }
  int begin(int i) const { return begin_[i]; }
  int end(int i) const { return begin_[i + 1]; }
  // The active expert with the i-th most pairs.
  int by_size(int i) const { return by_size_[i]; }
  // Chunks of at most so many pairs, the experts with most pairs first.
  void cut(int most);
  const std::vector<Chunk>& chunks() const { return chunks_; }
  int product_rows() const { return product_rows_; }
  TokenPairs of_token(int token) const {
    const int begin = token_begin_[token];
    return {product_row_.data() + begin, token_weights_.data() + begin, token_begin_[token + 1] - begin};
  }
  const int32_t* tokens() const { return tokens_.data(); }
  const float* weights() const { return weights_.data(); }

 private:
  template <class Id>
  void build_from(const Id* ids, const Routing& routing);
  template <class Id>
  bool skipped(Id id) const {
    return id < 0 || id >= num_experts() || left_out_[id];
  }
  int num_experts() const { return static_cast<int>(left_out_.size()); }

  std::vector<int32_t> experts_, begin_, by_size_, tokens_, slot_;
  std::vector<float> weights_;
  int product_rows_ = 0;
  std::vector<int32_t> next_row_, token_begin_, product_row_;
  std::vector<float> token_weights_;
  std::vector<Chunk> chunks_;
  std::vector<uint8_t> left_out_;
};

}  // namespace kt
