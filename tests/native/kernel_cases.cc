// Cases for every member of Kernels.
#include <math.h>
#include <string.h>

#include <algorithm>
#include <numeric>

#include "cases.h"
#include "matmul.h"
#include "operands.h"
#include "scratch.h"

namespace jax_w4a8 {
namespace {

// ---------------------------------------------------------------------------------------------------------
// to_float

void AddToFloatCases(Cases& cases) {
  for (const DType dtype : kDTypes) {
    cases.push_back(
        {std::string("to_float.") + NameOf(dtype), [dtype](const Kernels& k, Checksum& out) {
           // Every half, or floats of all exponents.
           constexpr int64_t kCount = 1 << 16;
           Random random(1);
           std::vector<uint8_t> x(static_cast<size_t>(kCount) * SizeOf(dtype));
           for (int64_t i = 0; i < kCount; ++i) {
             const uint32_t bits = dtype == DType::kF32 ? random.Word() : static_cast<uint32_t>(i);
             memcpy(x.data() + static_cast<size_t>(i) * SizeOf(dtype), &bits, SizeOf(dtype));
           }
           std::vector<float> floats(kCount);
           k.to_float(dtype, x.data(), kCount, floats.data());
           out.AddFloats(floats);
         }});
    cases.push_back({std::string("to_float.lengths.") + NameOf(dtype),
                     [dtype](const Kernels& k, Checksum& out) {
                       const auto x = Rounded(dtype, Random(2).Floats(64, -20, 20));
                       for (int64_t n = 0; n <= 40; ++n) {
                         std::vector<float> floats(64, 1.0f);  // those behind n keep it
                         k.to_float(dtype, x.data() + SizeOf(dtype), n, floats.data());
                         out.AddFloats(floats);
                       }
                     }});
  }
}

// ---------------------------------------------------------------------------------------------------------
// quantize_row

struct RowKind {
  const char* name;
  std::vector<float> (*make)(Random& random, int64_t n);
};

// Ordinary values, one of them replaced at a place that depends on n.
std::vector<float> WithOne(Random& random, int64_t n, float value) {
  std::vector<float> x = random.Floats(n, -6, 1);
  x[static_cast<size_t>(random.Int(0, n - 1))] = value;
  return x;
}

std::vector<float> Absolute(std::vector<float> x, float sign) {
  for (float& value : x) value = sign * fabsf(value);
  return x;
}

const RowKind kRowKinds[] = {
    {"ordinary", [](Random& r, int64_t n) { return r.Floats(n, -6, 1); }},
    {"positive", [](Random& r, int64_t n) { return Absolute(r.Floats(n, 1, 1), 1); }},
    {"negative", [](Random& r, int64_t n) { return Absolute(r.Floats(n, -3, 3), -1); }},
    {"zeros", [](Random&, int64_t n) { return std::vector<float>(static_cast<size_t>(n), 0.0f); }},
    {"minus_zeros",
     [](Random&, int64_t n) { return std::vector<float>(static_cast<size_t>(n), -0.0f); }},
    {"one_nan", [](Random& r, int64_t n) { return WithOne(r, n, NAN); }},
    {"one_infinity", [](Random& r, int64_t n) { return WithOne(r, n, INFINITY); }},
    {"one_minus_infinity", [](Random& r, int64_t n) { return WithOne(r, n, -INFINITY); }},
    {"huge", [](Random& r, int64_t n) { return r.Floats(n, 120, 127); }},
    {"one_huge", [](Random& r, int64_t n) { return WithOne(r, n, -0x1.fffffep+127f); }},
    {"all_exponents", [](Random& r, int64_t n) { return r.Floats(n, -127, 127); }},
    // Exponent 0 in the bits: subnormal.
    {"subnormal", [](Random& r, int64_t n) { return r.Floats(n, -127, -127); }},
    {"about_the_least_range", [](Random& r, int64_t n) { return r.Floats(n, -103, -101); }},
    // Multiples of a half with magnitude 127 or 255: many codes are halfway.
    {"halves",
     [](Random& r, int64_t n) {
       std::vector<float> x(static_cast<size_t>(n));
       for (float& value : x) value = static_cast<float>(r.Int(-254, 254)) / 2;
       x[0] = 127;
       return x;
     }},
};

void AddQuantizeCase(Cases& cases, const RowKind& kind, int64_t n, int64_t group_size,
                     bool symmetric) {
  const MatrixShape shape = {16, n, group_size, DType::kF32};
  const std::string group =
      group_size == kChannelWise ? "channelwise" : "g" + std::to_string(group_size);
  const std::string name = std::string("quantize_row.") + kind.name + "." + std::to_string(n) +
                           "." + group + (symmetric ? ".symmetric" : ".asymmetric");
  cases.push_back({name, [kind, shape, symmetric](const Kernels& k, Checksum& out) {
                     Random random(static_cast<uint64_t>(shape.inputs));
                     for (const float factor : {1.0f, 0.37f, -2.5f, 0.0f}) {
                       RowStorage storage(2, shape.groups(), shape.group_width());
                       const std::vector<float> x = kind.make(random, shape.inputs);
                       k.quantize_row(x.data(), shape.inputs, factor, symmetric, 1, storage.rows());
                       out.AddBytes(storage.codes.data(), storage.codes.size());
                       out.AddBytes(storage.start.data(), storage.start.size() * sizeof(int32_t));
                       out.AddFloats(storage.zero);
                       out.AddFloats(storage.scale);
                     }
                   }});
}

void AddQuantizeCases(Cases& cases) {
  for (const bool symmetric : {false, true}) {
    for (const RowKind& kind : kRowKinds) {
      AddQuantizeCase(cases, kind, 100, 32, symmetric);
      AddQuantizeCase(cases, kind, 600, kChannelWise, symmetric);
    }
    for (const int64_t n : {1, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130, 511, 1100}) {
      AddQuantizeCase(cases, kRowKinds[0], n, n < 100 ? 32 : 128, symmetric);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------
// matmul, with arrange_rows where there is one

struct Product {
  MatrixShape shape;
  DType out_dtype;
  bool gathered;                 // rows by row_index and out_index, blocks in two calls
  const Activation* activation;  // null: a plain product
  int low, high;                 // binary orders of the rows' scales
};

std::vector<int32_t> Shuffled(Random& random, int64_t count) {
  std::vector<int32_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  for (int64_t i = count - 1; i > 0; --i) {
    std::swap(order[static_cast<size_t>(i)], order[static_cast<size_t>(random.Int(0, i))]);
  }
  return order;
}

// Working memory full of a pattern.
class Tiles {
 public:
  Tiles(const Kernels& kernels, int64_t inputs) : scratch_(Size(kernels, inputs)) {
    memset(scratch_.data(), 0xa5, Size(kernels, inputs));
    tiles_ = TileScratch(layout_ = ScratchLayout(scratch_.data()), kernels, 1, inputs);
  }

  void Run(const Kernels& kernels, MatmulArgs args) {
    tiles_.Forget(1);
    tiles_.Prepare(kernels, {{0, 0, args.row_count}, args.block_begin, args.block_end}, 0, &args);
    kernels.matmul(args);
  }

 private:
  static size_t Size(const Kernels& kernels, int64_t inputs) {
    ScratchLayout layout;
    TileScratch(layout, kernels, 1, inputs);
    return layout.size();
  }

  Scratch scratch_;
  ScratchLayout layout_;
  TileScratch tiles_;
};

void RunProduct(const Product& p, int64_t rows, const Kernels& kernels, Checksum& out) {
  const RandomMatrices matrices(static_cast<uint64_t>(p.shape.inputs), p.shape);
  Random random(static_cast<uint64_t>(rows));
  RowStorage storage(rows, matrices.first());
  storage.Fill(random, p.shape.inputs, p.low, p.high);
  if (rows > 2) storage.scale[2] = NAN;
  const std::vector<int32_t> row_index = Shuffled(random, rows), out_index = Shuffled(random, rows);

  MatmulArgs args = {};
  args.weights = matrices.first();
  args.rows = storage.rows();
  args.block_end = args.weights.blocks;
  args.row_count = rows;
  args.row_index = p.gathered ? row_index.data() : nullptr;
  args.out_index = p.gathered ? out_index.data() : nullptr;
  args.out_dtype = p.out_dtype;
  args.out_columns = p.activation ? p.shape.channels / 2 : p.shape.channels;
  args.out_stride = args.out_columns + 3;  // whose last elements keep a pattern
  args.activation = p.activation;
  const size_t count = static_cast<size_t>(rows * args.out_stride);
  std::vector<uint8_t> result(count * SizeOf(p.out_dtype), 0x55);
  args.out = result.data();

  Tiles tiles(kernels, args.weights.inputs());
  if (p.gathered && args.weights.blocks > 2) {
    args.block_end = 2;
    tiles.Run(kernels, args);
    args.block_begin = 2;
    args.block_end = args.weights.blocks;
  }
  tiles.Run(kernels, args);
  out.AddFloats(p.out_dtype, result.data(), count);
}

void AddProduct(Cases& cases, const std::string& kind, const Product& p, int64_t rows) {
  std::string name = kind + "." + p.shape.Name() + "." + NameOf(p.out_dtype);
  if (p.gathered) name += ".gathered";
  cases.push_back({name + ".rows" + std::to_string(rows),
                   [p, rows](const Kernels& k, Checksum& out) { RunProduct(p, rows, k, out); }});
}

void AddMatmulCases(Cases& cases) {
  // Inputs that aren't whole groups, chunks or runs; channels that aren't whole pairs of blocks.
  const Product every_count[] = {
      {{48, 96, 32, DType::kBF16}, DType::kF32, false, nullptr, -6, 0},
      {{40, 100, 64, DType::kF32}, DType::kBF16, true, nullptr, -6, 0},
      {{33, 190, 128, DType::kBF16}, DType::kF16, true, nullptr, -6, 0},
      {{20, 77, kChannelWise, DType::kF32}, DType::kF32, true, nullptr, -6, 0},
  };
  for (const Product& p : every_count) {
    for (int64_t rows = 1; rows <= 40; ++rows) AddProduct(cases, "matmul", p, rows);
    AddProduct(cases, "matmul", p, 255);
    AddProduct(cases, "matmul", p, kMostRows);
  }
  // More than one panel of 512 inputs, some of which end inside a group; scales of all magnitudes.
  const Product panels[] = {
      {{32, 600, 32, DType::kF32}, DType::kF32, false, nullptr, -6, 0},
      {{16, 600, 96, DType::kBF16}, DType::kF16, true, nullptr, -20, 20},
      {{35, 1100, 640, DType::kBF16}, DType::kBF16, true, nullptr, -120, 120},
      {{48, 1100, kChannelWise, DType::kF32}, DType::kF32, true, nullptr, -120, 120},
      {{17, 1024, 128, DType::kF32}, DType::kF32, false, nullptr, -6, 0},
  };
  for (const Product& p : panels) {
    for (const int64_t rows : {1, 2, 3, 5, 6, 7, 8, 11, 12, 13, 16, 17, 31, 33}) {
      AddProduct(cases, "matmul", p, rows);
    }
  }
}

void AddActivationCases(Cases& cases) {
  static const Activation activations[] = {
      {ActivationKind::kSilu, 0, 0},
      {ActivationKind::kSwigluOai, 1.702f, 7},
      {ActivationKind::kSwigluOai, 1, INFINITY},
      {ActivationKind::kGelu, 0, 0},
      {ActivationKind::kGeluTanh, 0, 0},
  };
  for (const Activation& activation : activations) {
    const std::string clamped = activation.limit == INFINITY ? ".unclamped" : "";
    const std::string kind = std::string("activation.") + NameOf(activation.kind) + clamped;
    for (const DType dtype : kDTypes) {
      const Product ordinary = {{96, 64, 32, DType::kF32}, dtype, true, &activation, -8, -2};
      const Product any = {
          {64, 96, kChannelWise, DType::kBF16}, dtype, false, &activation, -90, 80};
      for (const int64_t rows : {1, 3, 40}) AddProduct(cases, kind, ordinary, rows);
      AddProduct(cases, kind, any, 200);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------
// combine

void AddCombineCases(Cases& cases) {
  for (const DType dtype : kDTypes) {
    // Floats of all exponents, rounded, NaN and infinity among them.
    cases.push_back({std::string("combine.rounding.") + NameOf(dtype),
                     [dtype](const Kernels& k, Checksum& out) {
                       constexpr int64_t kColumns = 20011;
                       Random random(3);
                       std::vector<float> slots(kColumns);
                       for (float& value : slots) value = FloatOfWord(random.Word());
                       std::vector<uint8_t> y(kColumns * SizeOf(dtype));
                       k.combine(slots.data(), nullptr, nullptr, 1, kColumns, dtype, y.data());
                       out.AddFloats(dtype, y.data(), kColumns);
                     }});
    cases.push_back(
        {std::string("combine.slots.") + NameOf(dtype), [dtype](const Kernels& k, Checksum& out) {
           Random random(4);
           for (const int64_t columns : {1, 15, 16, 17, 61}) {
             for (int64_t count = 0; count <= 9; ++count) {
               const std::vector<float> slots = random.Floats(count * columns, -4, 4);
               const std::vector<float> weights = random.Floats(count, -3, 0);
               std::vector<int32_t> ids(static_cast<size_t>(count));
               for (int32_t& id : ids) id = static_cast<int32_t>(random.Int(-1, 2));
               for (const bool weighted : {false, true}) {
                 for (const bool chosen : {false, true}) {
                   std::vector<uint8_t> y(static_cast<size_t>(columns + 1) * SizeOf(dtype), 0x55);
                   k.combine(slots.data(), chosen ? ids.data() : nullptr,
                             weighted ? weights.data() : nullptr, count, columns, dtype, y.data());
                   out.AddFloats(dtype, y.data(), static_cast<size_t>(columns + 1));
                 }
               }
             }
           }
         }});
  }
}

// ---------------------------------------------------------------------------------------------------------
// Probes

void AddProbeCases(Cases& cases) {
  cases.push_back({"read_probe", [](const Kernels& k, Checksum& out) {
                     Random random(5);
                     std::vector<int32_t> words(64 * 37);
                     for (int32_t& word : words)
                       word = static_cast<int32_t>(random.Int(-100000, 100000));
                     int32_t sum = 7;
                     k.read_probe(reinterpret_cast<const uint8_t*>(words.data()),
                                  static_cast<int64_t>(words.size() * sizeof(int32_t)), &sum);
                     out.AddInt(sum);
                   }});
  // How much work one iteration is depends on the instruction set; two are twice as much.
  cases.push_back({"peak_probe", [](const Kernels& k, Checksum& out) {
                     int32_t sink = 1;
                     const int64_t one = k.peak_probe(1, &sink), two = k.peak_probe(2, &sink);
                     out.AddInt(one > 0 && two == 2 * one);
                   }});
}

}  // namespace

void AddKernelCases(Cases& cases) {
  AddToFloatCases(cases);
  AddQuantizeCases(cases);
  AddMatmulCases(cases);
  AddActivationCases(cases);
  AddCombineCases(cases);
  AddProbeCases(cases);
}

}  // namespace jax_w4a8
