// One matrix product under test: random weights and activations, guarded copies in every kind the kernels read, fp64
// references, and the call itself.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "check.h"
#include "grouped_case.h"
#include "guarded.h"
#include "variants.h"

namespace kt_test {

struct Shape {
  int m, n_panels, k;
};

enum class Rows { list, consecutive };
inline const char* rows_name(Rows rows) { return rows == Rows::list ? "list" : "consecutive"; }

inline bool has_tiles(const Variant& v) { return std::string(v.name).find("amx") != std::string::npos; }

// Tile kernels write c, and read consecutive rows in place, up to the end of the 32 rows they work on.
inline int room_for(const Variant& v, int m) { return has_tiles(v) ? kt::round_up(m, kt::kRowUnit) : m; }

// The activations of all rows in one kind, with `data_rows` rows of data and nothing behind them.
struct ActBuffers {
  Guarded<uint8_t> data;
  Guarded<float> scales;
  Guarded<int32_t> group_sums, sums;
  kt::Acts acts;

  ActBuffers(kt::ActKind kind, const std::vector<uint16_t>& x, int rows, int data_rows, int k, int span)
      : data(data_rows * pitch_of(kind, k)),
        scales(kind == kt::ActKind::bf16 ? 1 : static_cast<size_t>(rows) * acts_group_pitch(k)),
        group_sums(scales.size()),
        sums(kind == kt::ActKind::bf16 ? 1 : static_cast<size_t>(rows) * acts_sum_pitch(k)) {
    const kt::IsaTable& table = *variants().run.front().table;
    for (int r = 0; r < rows; ++r) {
      uint8_t* row = data.data() + r * pitch_of(kind, k);
      if (kind == kt::ActKind::bf16) {
        std::memcpy(row, x.data() + static_cast<size_t>(r) * k, 2 * static_cast<size_t>(k));
      } else {
        const size_t group = static_cast<size_t>(r) * acts_group_pitch(k);
        table.quantise(kind, x.data() + static_cast<size_t>(r) * k, k, span, row, scales.data() + group,
                       group_sums.data() + group, sums.data() + static_cast<size_t>(r) * acts_sum_pitch(k));
      }
    }
    data.seal();
    scales.seal();
    group_sums.seal();
    sums.seal();
    acts = {data.data(), pitch_of(kind, k),   scales.data(),     group_sums.data(),
            sums.data(), acts_group_pitch(k), acts_sum_pitch(k), span};
  }

  // bf16 rows lie as a caller's tensor does, without padding.
  static size_t pitch_of(kt::ActKind kind, int k) {
    return kind == kt::ActKind::bf16 ? 2 * static_cast<size_t>(k)
                                     : static_cast<size_t>(kt::padded_depth(k)) * kt::act_bytes(kind);
  }
};

struct Reference {
  std::vector<double> c;           // rows x n
  std::vector<double> row_norms;   // of the activations
  std::vector<double> cols_norms;  // of the weights
};

inline double dot(const double* a, const double* b, int k) {
  double sum[4] = {};
  int i = 0;
  for (; i + 4 <= k; i += 4) {
    for (int j = 0; j < 4; ++j) sum[j] += a[i + j] * b[i + j];
  }
  for (; i < k; ++i) sum[0] += a[i] * b[i];
  return sum[0] + sum[1] + sum[2] + sum[3];
}

inline Reference reference(const std::vector<double>& a, const std::vector<double>& w, int k) {
  Reference r;
  const int rows = static_cast<int>(a.size()) / k, n = static_cast<int>(w.size()) / k;
  for (int i = 0; i < rows; ++i) r.row_norms.push_back(std::sqrt(dot(&a[i * k], &a[i * k], k)));
  for (int j = 0; j < n; ++j) r.cols_norms.push_back(std::sqrt(dot(&w[j * k], &w[j * k], k)));
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < n; ++j) r.c.push_back(dot(&a[i * k], &w[j * k], k));
  }
  return r;
}

class GemmCase {
 public:
  static constexpr int kFirstRow = 3;
  Shape shape;
  int n, rows;                    // rows of activations; a product uses m of them
  int span;                       // of activation scales
  std::vector<uint16_t> weights;  // n x k
  std::vector<uint16_t> x;        // rows x k

  GemmCase(Shape s, Random& random)
      : shape(s),
        n(s.n_panels * kt::kPanelRows),
        rows(s.m + kFirstRow),
        span(kt::kActGroup << random.below(3)),
        weights(static_cast<size_t>(n) * s.k),
        x(static_cast<size_t>(rows) * s.k),
        list_(s.m) {
    fill_gaussian_bf16(weights, random);
    fill_gaussian_bf16(x, random);
    // Any order, some rows several times, some never.
    for (int32_t& r : list_) r = random.below(rows);
    list_.seal();
  }

  // Packs the weights; the bytes are the same from every variant (format_test). The groups of a checkpoint format take
  // turns.
  void set_format(kt::Format format) {
    const std::vector<int> groups = legal_groups(format);
    format_ = {format, groups[(shape.m + shape.k) % groups.size()]};
    const size_t bytes = kt::panel_bytes(format_, shape.k);
    const kt::GroupedKind* kind = kt::grouped_kind(format);
    panels_ = std::make_unique<Guarded<uint8_t>>(bytes * shape.n_panels);
    const auto& kernels = variants().run.front().table->formats[static_cast<int>(format)];
    for (int p = 0; p < shape.n_panels; ++p) {
      const uint16_t* source = weights.data() + static_cast<size_t>(p) * kt::kPanelRows * shape.k;
      uint8_t* panel = panels_->data() + p * bytes;
      Random scales(p + 1);
      if (kt::is_raw(format)) {
        random_raw_panel(format, shape.k, scales, panel);
      } else if (kind) {
        kt::put_grouped(*kind, format_.group,
                        random_panel(*kind, format_.group, source, kt::kPanelRows, shape.k, scales), panel);
      } else {
        kernels.pack(source, shape.k, kt::kPanelRows, shape.k, panel);
      }
    }
    panels_->seal();
  }

  std::vector<double> decoded_weights() const {
    std::vector<double> w;
    std::vector<float> panel(static_cast<size_t>(kt::kPanelRows) * shape.k);
    for (int p = 0; p < shape.n_panels; ++p) {
      kt::decode_panel(format_, panels_->data() + p * kt::panel_bytes(format_, shape.k), shape.k, shape.k,
                       panel.data());
      w.insert(w.end(), panel.begin(), panel.end());
    }
    return w;
  }

  std::vector<double> exact_acts() const {
    std::vector<double> a;
    for (uint16_t v : x) a.push_back(kt::bf16_to_f32(v));
    return a;
  }
  // What the kernel is given: scale * q.
  std::vector<double> dequantised_acts(kt::ActKind kind) {
    if (kind == kt::ActKind::bf16) return exact_acts();
    const kt::Acts& acts = acts_for(kind, rows).acts;
    std::vector<double> a;
    for (int r = 0; r < rows; ++r) {
      for (int k = 0; k < shape.k; ++k) {
        const double scale = acts.scales[static_cast<size_t>(r) * acts.group_pitch + k / kt::kActGroup];
        a.push_back(scale * quantised(kind, acts.data + r * acts.pitch, k));
      }
    }
    return a;
  }

  // Forgets the copies made of x.
  void x_changed() {
    for (auto& per_kind : acts_) {
      for (auto& buffers : per_kind) buffers.reset();
    }
  }

  int row(Rows how, int i) const { return how == Rows::list ? list_[i] : kFirstRow + i; }

  // The first m rows of the product, which the kernel lays out in whole rows (of a list) or in pairs of panels.
  // gathered: from rows that were gathered before, where the kernel can.
  std::vector<float> run(const Variant& v, Rows how, int m, int first = 0, bool gathered = false) {
    const kt::FormatKernels& kernels = v.table->formats[static_cast<int>(format_.id)];
    now_running("%s %s group=%d m=%d n_panels=%d k=%d rows=%s", v.name, kt::format_name(format_.id), format_.group, m,
                shape.n_panels, shape.k, rows_name(how));
    const int data_rows = how == Rows::list ? rows : kFirstRow + first + room_for(v, m);
    const bool pairs = how == Rows::consecutive;
    Guarded<float> c(static_cast<size_t>(room_for(v, m)) * (pairs ? kt::round_up(n, kt::kPairColumns) : n));
    Guarded<uint8_t> scratch(v.table->gemm_scratch_bytes(shape.k, shape.n_panels));
    kt::GemmArgs args{};
    args.panels = panels_->data();
    args.n_panels = shape.n_panels;
    args.k = shape.k;
    args.acts = acts_for(kernels.act, std::max(rows, data_rows)).acts;
    args.rows = how == Rows::list ? list_.data() + first : nullptr;
    args.first_row = kFirstRow + first;
    args.m = m;
    args.c = c.data();
    args.scratch = scratch.data();
    args.lay_out_rows();
    if (pairs) {
      args.c_pitch = kt::kPairColumns;
      args.c_step = static_cast<size_t>(room_for(v, m)) * kt::kPairColumns;
    }
    args.group = format_.group;
    args.format = format_.id;
    args.next = first % 2 ? nullptr : panels_->data();
    const kt::RowGather& gather = kernels.gather_of(m);
    const size_t pitch = gathered && gather.gather ? gather.row_bytes(shape.k) : 0;
    Guarded<uint8_t> gathered_rows(pitch ? rows * pitch : 1);
    for (int r = 0; r < rows && pitch; ++r) {
      for (int k0 = 0; k0 < shape.k; k0 += kt::kGatherDepth)
        gather.gather(args.acts, r, k0, shape.k, gathered_rows.data() + r * pitch);
    }
    args.gathered = pitch ? gathered_rows.data() : nullptr;
    args.gathered_pitch = pitch;
    kernels.gemm(args);
    if (!c.front_intact() || !scratch.front_intact()) {
      fail(__FILE__, __LINE__, std::string("written in front of a buffer: ") + running);
    }
    std::vector<float> rows;
    for (int i = 0; i < m; ++i) {
      for (int p = 0; p < shape.n_panels; ++p)
        rows.insert(rows.end(), args.c_at(i, p), args.c_at(i, p) + kt::kPanelRows);
    }
    return rows;
  }

 private:
  // Two sizes are in use at a time: exactly the rows, and with the room of tile kernels.
  const ActBuffers& acts_for(kt::ActKind kind, int data_rows) {
    auto& slot = acts_[static_cast<int>(kind)][data_rows > rows];
    const size_t bytes = data_rows * ActBuffers::pitch_of(kind, shape.k);
    if (!slot || slot->data.bytes() != bytes)
      slot = std::make_unique<ActBuffers>(kind, x, rows, data_rows, shape.k, span);
    return *slot;
  }

  kt::WeightFormat format_;
  std::unique_ptr<Guarded<uint8_t>> panels_;
  Guarded<int32_t> list_;
  std::unique_ptr<ActBuffers> acts_[3][2];
};

}  // namespace kt_test
